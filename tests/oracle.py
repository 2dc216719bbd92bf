"""The correctness statement's other side: isolated prompts, one at a time, unpadded, through transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from flide.runtime.tree import TokenTree

TINY: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}


def tiny_config(**overrides: Any) -> Qwen3_5TextConfig:
    return Qwen3_5TextConfig(**{**TINY, **overrides})


def tiny_transformers_model(*, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
    """A random model whose logits have a standard deviation near 1 and whose small parameters are not at rest.

    A token's query and key are made alike: where their product is near 0, the delta rule's output is tiny and the norm
    behind it blows its rounding up: float32 computations of a small random model then differ by far more than rounding.
    """
    torch.manual_seed(seed)
    model = Qwen3_5ForCausalLM(tiny_config(**overrides)).to(torch.float32).eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.data.add_(torch.randn_like(parameter) * 0.3)
        elif "embed" not in name:
            parameter.data.normal_(std=parameter[0].numel() ** -0.5)
    for layer in model.model.layers:
        if hasattr(layer, "linear_attn"):
            for weight in (layer.linear_attn.in_proj_qkv.weight, layer.linear_attn.conv1d.weight):
                size = model.config.linear_num_key_heads * model.config.linear_key_head_dim
                weight.data[:size] = weight.data[size : 2 * size] + 0.5 * weight.data[:size]
    # Tied or not, the head's rows set the scale of the logits; the first norm undoes that of the embedding.
    for weight in (model.model.embed_tokens.weight, model.lm_head.weight):
        weight.data.normal_(std=model.config.hidden_size**-0.5)
    frequencies = model.model.rotary_emb.inv_freq
    model.to(dtype)
    model.model.rotary_emb.inv_freq = frequencies  # float32 in a loaded model of any dtype
    return model


def save_transformers(model: Any, directory: Path, **options: Any) -> Path:
    model.save_pretrained(directory, **options)
    return directory


@torch.no_grad()
def isolated_logits(model: Any, prompt: list[int]) -> Tensor:
    """``[vocab]`` logits after one whole prompt."""
    return model(torch.tensor([prompt]), use_cache=False).logits[0, -1]


def random_tokens(count: int, vocab: int, generator: torch.Generator) -> list[int]:
    return torch.randint(vocab, (count,), generator=generator).tolist()


def random_tree(shape: tuple[int, list[Any]], vocab: int, generator: torch.Generator) -> TokenTree:
    """A tree of random tokens from ``(length, [child, ...])``; a child is a length or such a pair."""
    length, children = shape
    return TokenTree(
        random_tokens(length, vocab, generator),
        tuple(random_tree((c, []) if isinstance(c, int) else c, vocab, generator) for c in children),
    )
