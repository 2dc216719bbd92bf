"""Gemma 4 in transformers, small and random: the oracle, in the variants that there are."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken
from transformers import (
    Gemma4Config,
    Gemma4ForCausalLM,
    Gemma4ForConditionalGeneration,
    Gemma4TextConfig,
    Gemma4UnifiedConfig,
    Gemma4UnifiedForConditionalGeneration,
    PreTrainedTokenizerFast,
)

from tests.tokenizer_families import gemma_like

VOCAB, WINDOW = 97, 8
FULL, SLIDING = "full_attention", "sliding_attention"
TINY: dict[str, Any] = {
    "vocab_size": VOCAB,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": WINDOW,
    "max_position_embeddings": 4096,
    "final_logit_softcapping": 3.0,  # near the logits, so that it matters
    "rope_parameters": {
        SLIDING: {"rope_type": "default", "rope_theta": 100.0},
        FULL: {"rope_type": "proportional", "rope_theta": 1000.0, "partial_rotary_factor": 0.25},
    },
}
SHARED = [SLIDING, FULL, SLIDING, FULL]  # layers that write keys and values; others read those of the last two
VARIANTS: dict[str, dict[str, Any]] = {
    "e2b": {
        "layer_types": [*SHARED, SLIDING, SLIDING, FULL],
        "num_hidden_layers": 7,
        "num_kv_shared_layers": 3,
        "num_key_value_heads": 1,
        "hidden_size_per_layer_input": 12,
        "use_double_wide_mlp": True,
    },
    "e4b": {
        "layer_types": [SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL],
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 3,
        "num_key_value_heads": 2,
        "hidden_size_per_layer_input": 12,
    },
    "12b": {
        "layer_types": [SLIDING, SLIDING, FULL, SLIDING, FULL],
        "num_hidden_layers": 5,
        "num_key_value_heads": 2,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
    },
    "31b": {
        "layer_types": [SLIDING, SLIDING, FULL, SLIDING, FULL],
        "num_hidden_layers": 5,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "num_global_key_value_heads": 2,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
    },
}


def published(variant: str) -> dict[str, Any]:
    """The config.json of a text model in the words of published files."""
    return {"num_kv_shared_layers": 0, "rms_norm_eps": 1e-6, **TINY, **VARIANTS[variant]}


def tiny_config(variant: str, **overrides: Any) -> Gemma4TextConfig:
    return Gemma4TextConfig(**{**TINY, **VARIANTS[variant], **overrides})


def spread(model: Any) -> Any:
    """Random values so that every part matters and the logits' standard deviation is near 1.

    Scores are not scaled: head norms near 1 would make them as large as heads are wide, and all but one key invisible.
    """
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.data.add_(torch.randn_like(parameter) * 0.3)
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                parameter.data.mul_(0.6)
        else:
            parameter.data.normal_(std=parameter[0].numel() ** -0.5)
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.uniform_(0.6, 1.4)
    return model


def tiny_gemma4(variant: str, *, seed: int = 0, **overrides: Any) -> Any:
    """A random text model."""
    torch.manual_seed(seed)
    return spread(Gemma4ForCausalLM(tiny_config(variant, **overrides)).to(torch.float32).eval())


def tiny_multimodal(variant: str) -> Any:
    """A random model with a vision part and, but for 31B, an audio part; 12B is of the unified kind."""
    torch.manual_seed(0)
    text = {**TINY, **VARIANTS[variant]}
    ids = {"image_token_id": 90, "video_token_id": 91, "audio_token_id": 92, "boi_token_id": 93, "eoi_token_id": 94}
    ids |= {"boa_token_id": 95, "eoa_token_index": 96}
    if variant == "12b":
        vision = {"mm_embed_dim": 64, "mm_posemb_size": 8, "output_proj_dims": 64, "patch_size": 2}
        config = Gemma4UnifiedConfig(
            text_config=text, vision_config=vision, audio_config={"audio_embed_dim": 16}, **ids
        )
        return spread(Gemma4UnifiedForConditionalGeneration(config).eval())
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 16, "use_clipped_linears": True}
    audio = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "output_proj_dims": 16}
    audio |= {"subsampling_conv_channels": [4, 4]}
    config = Gemma4Config(
        text_config=text, vision_config=vision, audio_config=None if variant == "31b" else audio, **ids
    )
    return spread(Gemma4ForConditionalGeneration(config).eval())


# What the published templates come to for one message of a user with thinking off. Those of E2B and E4B have no closed
# thought.
TEMPLATE = """{{ bos_token }}{% for message in messages %}<|turn>{{ message['role'] }}
{{ message['content'] | trim }}<turn|>
{% endfor %}{% if add_generation_prompt %}<|turn>model
THOUGHT{% endif %}"""
CLOSED_THOUGHT = "{% if not enable_thinking %}<|channel>thought\n<channel|>{% endif %}"


def write_tokenizer(directory: Path, *, closed_thought: bool) -> int:
    """A tokenizer of Gemma's kind with such a template; gives its size."""
    tokenizer = gemma_like(string.ascii_letters)
    controls = ("<pad>", "<eos>", "<bos>", "<|turn>", "<turn|>", "<|channel>", "<channel|>")
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in controls])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", unk_token="<unk>"
    )
    wrapped.chat_template = TEMPLATE.replace("THOUGHT", CLOSED_THOUGHT if closed_thought else "")
    wrapped.save_pretrained(directory)
    return len(wrapped)
