"""OLMo Hybrid in transformers, small and random: the oracle of the example."""

from __future__ import annotations

from typing import Any

import torch
from transformers import OlmoHybridConfig, OlmoHybridForCausalLM

TINY: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 96,
    "linear_value_head_dim": 192,
    "linear_allow_neg_eigval": True,
    "max_position_embeddings": 4096,
    "pad_token_id": None,
    "eos_token_id": None,
    "rope_parameters": {"rope_theta": None, "rope_type": "default"},  # as released: no positions
}


def tiny_olmo(*, seed: int = 0, **overrides: Any) -> Any:
    """A random model, its weights spread as those of ``tests.oracle.tiny_transformers_model``, and for its reasons."""
    torch.manual_seed(seed)
    model = OlmoHybridForCausalLM(OlmoHybridConfig(**{**TINY, **overrides})).to(torch.float32).eval()
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data.add_(torch.randn_like(parameter) * 0.3)
        else:
            parameter.data.normal_(std=parameter[0].numel() ** -0.5)
    for layer in model.model.layers:
        if hasattr(layer, "linear_attn"):
            mixer, size = layer.linear_attn, layer.linear_attn.key_dim
            mixer.q_proj.weight.data = mixer.k_proj.weight.data + 0.5 * mixer.q_proj.weight.data
            weight = mixer.conv1d.weight.data
            weight[:size] = weight[size : 2 * size] + 0.5 * weight[:size]
    # Tied or not, the head's rows set the scale of the logits. Attention blocks norm what they give, not what they
    # take: a stream of rows near 1 is what trained models have.
    model.lm_head.weight.data.normal_(std=model.config.hidden_size**-0.5)
    if not model.config.tie_word_embeddings:
        model.model.embed_tokens.weight.data.normal_()
    return model
