"""A tiny random model with a tokenizer, as transformers writes one: what tests run where answers need not be right."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path

import torch

from flide import Engine, EngineConfig
from flide.models import Qwen35Config, Qwen35ForDecision
from tests.tiny_tokenizer import write_tokenizer

TINY_MODEL = "tiny-random"
SEED = 20260101
CONFIG = {
    "model_type": "qwen3_5_text",
    "vocab_size": 1280,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}


@functools.cache
def tiny_model_directory() -> Path:
    """Its directory, made once a process: same seed, same files."""
    parent = Path(tempfile.mkdtemp(prefix="flide-tests-"))
    atexit.register(shutil.rmtree, parent, ignore_errors=True)
    directory = parent / TINY_MODEL
    directory.mkdir()
    torch.manual_seed(SEED)
    model = Qwen35ForDecision.from_config(Qwen35Config.from_hf(CONFIG), dtype=torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                # Logits of standard deviation near 1, so that the random answers are not all alike.
                parameter.normal_(std=parameter[0].numel() ** -0.5 if "embed" not in name else 64**-0.5)
    model.save_pretrained(directory)
    write_tokenizer(directory, vocab_size=CONFIG["vocab_size"])
    return directory


def tiny_engine(config: EngineConfig | None = None) -> Engine:
    """An engine of its own for it."""
    return Engine.from_pretrained(tiny_model_directory(), config or EngineConfig())
