"""The demo model's tokenizer: byte-level BPE trained on rendered prompts of the training split alone."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from flide.evaluation.rows import parse_row
from flide.runtime.prompt import option_texts, render_value
from scripts.demo.data import make_row
from scripts.tokenizer_builder import save_tokenizer, train_tokenizer

VOCAB_SIZE = 4096


def prompt_texts(split: str, first: int, last: int) -> list[str]:
    """What the tokenizer sees of rows: states and questions as prompts show them."""
    found = []
    for index in range(first, last):
        request = parse_row(json.dumps(make_row(split, index)), index + 1).request
        found.append(render_value(request.state) + "\n\n")
        for question in request.questions.values():
            options = "\n".join(f"A. {text}" for text in option_texts(question))
            found.append(f"Question: {question.instructions}\n{options}\nAnswer with the letter of the correct option.")
    return found


def write_demo_tokenizer(directory: Path, texts: Iterable[str], *, vocab_size: int = VOCAB_SIZE) -> None:
    """Train on texts and write the files of a transformers tokenizer with the embedded model's chat template."""
    # The frame around a message, and words without a blank before them, which can be labels of many options.
    extra = ["user\n", "assistant\n", "\n\n"] * 50
    save_tokenizer(train_tokenizer([*texts, *extra], vocab_size), directory)
