"""A small Qwen-style tokenizer for tests, built in memory in a fraction of a second."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from scripts.tokenizer_builder import CHAT_TEMPLATE, CONTROL_TOKENS, SPECIAL_TOKENS, build_tokenizer, write_tokenizer

__all__ = [
    "CHAT_TEMPLATE",
    "CONTROL_TOKENS",
    "SPECIAL_TOKENS",
    "build_tokenizer",
    "wrap",
    "write_model_directory",
    "write_tokenizer",
]


def write_model_directory(directory: Path, *, vocab_size: int = 1280, template: str | None = CHAT_TEMPLATE) -> Path:
    """The tokenizer and a Qwen3.5 config.json without weights."""
    write_tokenizer(directory, vocab_size=vocab_size, template=template)
    config = {"model_type": "qwen3_5_text", "vocab_size": vocab_size}
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


def wrap(tokenizer: Tokenizer, *, template: str | None = CHAT_TEMPLATE) -> Any:
    """A transformers tokenizer around a bare one."""
    from transformers import PreTrainedTokenizerFast

    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    wrapped.chat_template = template
    return wrapped
