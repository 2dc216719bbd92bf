"""Questions that training rows have beside those of the tasks, and no validation or test row has.

Each asks for one step of what the tasks ask for: to find a word in a text, words never read before too; to see what a
review speaks of, whatever it says about it; to say what it thinks of one aspect. A small model learns the steps from
these long before it would learn them from the tasks alone.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache

from scripts.demo.grammar import Writer, banks, invented, is_held_out
from scripts.demo.questions import Asked

WORDS = ("word", "has_word")
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
_ASK_ABOUT = (
    "Which aspect does the review speak of?",
    "Which of these points is written about?",
    "Which topic comes up in the review?",
)
_ASK_ABOUT_IT = (
    "Does the review speak of the {}?",
    "Is the {} written about?",
    "Does the review say something on the {}?",
)
_ASK_OPINION = (
    "What does the review say of the {}?",
    "How is the {}?",
    "What is the opinion on the {}?",
)
_OPINIONS = {
    "good": ("good", "positive", "praise", "it is good", "a plus"),
    "bad": ("bad", "negative", "criticism", "it is bad", "a minus"),
    "nothing": ("nothing", "not said", "no opinion", "it is left open"),
}
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


def about_a_review(
    writer: Writer, liked: Sequence[str], disliked: Sequence[str], others: Sequence[str], named: Callable[[str], str]
) -> dict[str, Asked]:
    """``others`` are aspects that the review has no word of; ``named`` is a noun for an aspect."""
    rng = writer.rng
    told = [*liked, *disliked]
    asked: dict[str, Asked] = {}
    if told:
        truth = named(rng.choice(told))
        names = {truth: None} | dict.fromkeys(named(kind) for kind in others[: rng.randint(1, MOST_OPTIONS - 1)])
        order = list(names)
        rng.shuffle(order)
        question = {"type": "choice", "instructions": rng.choice(_ASK_ABOUT), "criteria": dict.fromkeys(order)}
        asked["about"] = Asked(question, truth)
    kind = rng.choice(told) if told and rng.random() < 0.5 else rng.choice(others)
    question = {"type": "noul", "instructions": rng.choice(_ASK_ABOUT_IT).format(named(kind))}
    asked["about_it"] = Asked(question, kind in told)
    kind = rng.choice(told) if told and rng.random() < 0.8 else rng.choice(others)
    truth = "good" if kind in liked else "bad" if kind in disliked else "nothing"
    options = {opinion: rng.choice(words) for opinion, words in _OPINIONS.items()}
    shown = list(options.values())
    rng.shuffle(shown)
    question = {"type": "choice", "instructions": rng.choice(_ASK_OPINION).format(named(kind))}
    asked["opinion"] = Asked({**question, "criteria": dict.fromkeys(shown)}, options[truth])
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
