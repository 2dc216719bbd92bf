"""Questions about the words of a text, which training rows have beside those of the tasks.

Whoever is asked about a product or a file has to find a name in a text, names it has never read too. The tasks ask that
too rarely for a small model to learn it from them. No validation or test row has these questions.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from functools import cache

from scripts.demo.grammar import banks, invented, is_held_out
from scripts.demo.questions import Asked

KINDS = ("word", "has_word")
SHARE = 0.3  # of the training rows that get each of the two
MOST_OPTIONS = 5
_ASK_WORD = (
    "Which word is in the text?",
    "Which of these words can be read here?",
    "Which of these is mentioned?",
    "What is talked about?",
    "Which name comes up in the text?",
)
_ASK_HAS_WORD = (
    "Is the word {} in the text?",
    "Is {} mentioned?",
    "Does the text mention the {}?",
    "Does {} come up here?",
    "Is anything said about the {}?",
)
_WORD = re.compile(r"[^\W\d_]{4,}")


def lookups(texts: Iterable[str], rng: random.Random) -> dict[str, Asked]:
    """Some questions about the words of ``texts``, or none."""
    words = {*_WORD.findall(" ".join(texts))}
    told = {word.lower() for word in words}
    here = sorted(word for word in words if not is_held_out(word))
    asked: dict[str, Asked] = {}
    if not here:
        return asked
    if rng.random() < SHARE:
        truth = _shown(rng.choice(here), rng)
        others = {word for word in (_other(rng) for _ in range(rng.randint(1, MOST_OPTIONS - 1))) if word not in told}
        others.discard(truth.lower())
        options = [truth, *sorted(others)]
        rng.shuffle(options)
        if len(options) > 1:
            question = {"type": "choice", "instructions": rng.choice(_ASK_WORD), "criteria": dict.fromkeys(options)}
            asked["word"] = Asked(question, truth)
    if rng.random() < SHARE:
        word = _shown(rng.choice(here), rng) if rng.random() < 0.5 else _other(rng)
        question = {"type": "noul", "instructions": rng.choice(_ASK_HAS_WORD).format(word)}
        asked["has_word"] = Asked(question, word.lower() in told)
    return asked


def _shown(word: str, rng: random.Random) -> str:
    return word.lower() if rng.random() < 0.5 else word


def _other(rng: random.Random) -> str:
    """A word that may be in no text."""
    return invented(rng, "{}") if rng.random() < 0.3 else rng.choice(_vocabulary())


@cache
def _vocabulary() -> tuple[str, ...]:
    found: set[str] = set()
    for bank in banks().values():
        for template in bank["train"]:
            found.update(word.lower() for word in _WORD.findall(re.sub(r"\{[^}]*\}", " ", template)))
    return tuple(sorted(word for word in found if not is_held_out(word)))
