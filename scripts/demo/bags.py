"""Questions as bags of hashed words, for the baseline. Without torch, so that a process that reads them starts quickly.

Words are those of lower-cased text, in the state also pairs of neighbours, so that "not urgent" is a word, too.

Shapes: Q questions, O options, S state words, I instruction words, W words of an option.
"""

from __future__ import annotations

import itertools
import json
import re
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flide.evaluation.rows import parse_row
from flide.runtime.prompt import option_texts, render_value
from flide.runtime.request import Choice, Noul
from scripts.demo.data import make_row

MOST_STATE, MOST_ASKED, MOST_OPTION, MOST_OPTIONS = 160, 20, 12, 10
_WORD = re.compile(r"[a-z]+|\d+")


class Bags(NamedTuple):
    """Questions as hashed words, 0 where there is none.

    Attributes:
        state_QS, asked_QI, options_QOW: int32 words.
        targets_QO: float32 target distributions.
        noul_Q: which are yes-or-no questions.
        count_Q: how many options there are.
    """

    state_QS: NDArray[np.int32]
    asked_QI: NDArray[np.int32]
    options_QOW: NDArray[np.int32]
    targets_QO: NDArray[np.float32]
    noul_Q: NDArray[np.bool_]
    count_Q: NDArray[np.int64]


class Told(NamedTuple):
    """What an answer is called: row, question id, type, names of the options."""

    row: int
    question_id: str
    type: str
    options: tuple[str, ...]


def joined(parts: Iterable[tuple[Bags, list[Told]]]) -> tuple[Bags, list[Told]]:
    """Several readings as one."""
    bags, told = zip(*parts, strict=True)
    arrays = Bags(*(np.concatenate(columns) for columns in zip(*bags, strict=True)))
    return arrays, [this for these in told for this in these]


def read_bags(split: str, first: int, last: int) -> tuple[Bags, list[Told]]:
    """Every question of rows ``first`` to ``last`` of a split."""
    found, told = [], []
    for index in range(first, last):
        row = parse_row(json.dumps(make_row(split, index)), index + 1)
        words = _words(render_value(row.request.state))
        state = _hashed([*words, *(f"{a} {b}" for a, b in itertools.pairwise(words))], MOST_STATE)
        for question_id, question in row.request.questions.items():
            texts = option_texts(question)
            options = np.zeros((MOST_OPTIONS, MOST_OPTION), np.int32)
            for o, text in enumerate(texts):
                # Places mean something in scales and with Yes and No; a choice's options come in any order.
                place = [] if isinstance(question, Choice) else [f"<{question.type} {o}>"]
                options[o] = _hashed([*place, *_words(text)], MOST_OPTION)
            target = np.zeros(MOST_OPTIONS, np.float32)
            target[: len(texts)] = row.targets[question_id]
            asked = _hashed(_words(render_value(question.instructions)), MOST_ASKED)
            found.append((state, asked, options, target, isinstance(question, Noul), len(texts)))
            names = ("true", "false") if isinstance(question, Noul) else tuple(map(str, range(len(texts))))
            names = tuple(question.criteria) if isinstance(question, Choice) else names
            told.append(Told(index + 1, question_id, question.type, names))
    return Bags(*(np.array(column) for column in zip(*found, strict=True))), told


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _hashed(words: Sequence[str], most: int) -> NDArray[np.int32]:
    ids: list[Any] = [zlib.crc32(word.encode()) % ((1 << 31) - 2) + 1 for word in dict.fromkeys(words)][:most]
    return np.array(ids + [0] * (most - len(ids)), np.int32)
