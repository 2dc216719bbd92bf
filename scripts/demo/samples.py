"""Rows as token ids, encoded as an engine does it. Without torch, so that a process that encodes starts quickly."""

from __future__ import annotations

import functools
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flide.evaluation.rows import parse_row
from flide.runtime.prompt import ChatFormat
from flide.runtime.tokenizer import PromptTokenizer
from scripts.demo.data import make_row, with_words_dropped


@dataclass(frozen=True, slots=True)
class Sample:
    """A labelled row as token ids: what its questions share, what each adds, where there the options' lines end, and
    each one's target distribution."""

    trunk: NDArray[np.int16]
    branches: list[NDArray[np.int16]]
    option_ends: list[list[int]]
    targets: list[tuple[float, ...]]

    @property
    def num_tokens(self) -> int:
        return len(self.trunk) + sum(map(len, self.branches))


def make_samples(split: str, first: int, last: int, *, tokenizer: Path, dropped_words: float = 0.0) -> list[Sample]:
    """Rows ``first`` to ``last`` of a split; of every other one words are dropped."""
    format, line_ends = _format(tokenizer)
    samples = []
    for index in range(first, last):
        row = make_row(split, index)
        if dropped_words and index % 2:
            row = with_words_dropped(row, random.Random(index), share=dropped_words)
        samples.append(encode_row(row, format, line_ends))
    return samples


@functools.cache
def _format(tokenizer: Path) -> tuple[ChatFormat, frozenset[int]]:
    format = ChatFormat(PromptTokenizer.from_pretrained(tokenizer))
    return format, line_end_ids(format.tokenizer)


def line_end_ids(tokenizer: PromptTokenizer) -> frozenset[int]:
    """Tokens that end a line."""
    return frozenset(i for i in range(tokenizer.max_prompt_id() + 1) if tokenizer.decode([i]).endswith("\n"))


def encode_row(row: dict[str, Any], format: ChatFormat, line_ends: frozenset[int]) -> Sample:
    """A row as a sample. Its questions and options are lines: they hold no line breaks."""
    labelled = parse_row(json.dumps(row), 1)
    encoded = format.encode(labelled.request)
    # The first line is the question.
    ends = [
        [i for i, token in enumerate(tail) if token in line_ends][1 : n + 1]
        for tail, n in zip(encoded.tails, encoded.num_options, strict=True)
    ]
    return Sample(
        np.array(encoded.shared, np.int16),
        [np.array(tail, np.int16) for tail in encoded.tails],
        ends,
        list(labelled.targets.values()),
    )
