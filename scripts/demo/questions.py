"""Questions with known answers, in System One's form, worded by a :class:`~scripts.demo.grammar.Writer`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from scripts.demo.grammar import Writer


class Asked(NamedTuple):
    """A question and its target, as in a labelled row."""

    question: dict[str, Any]
    target: Any


def noul(writer: Writer, ask: str, truth: bool, *, sides: str | None = None, **values: str) -> Asked:
    """A yes-or-no question; ``sides`` names the banks ``yes.*`` and ``no.*`` that may describe its answers."""
    question: dict[str, Any] = {"type": "noul", "instructions": writer.say(ask, **values)}
    if sides and writer.rng.random() < 0.4:
        described = {"true": writer.say(f"yes.{sides}"), "false": writer.say(f"no.{sides}")}
        kept = writer.rng.choice((["true", "false"], ["true", "false"], ["true"], ["false"]))
        question["criteria"] = {side: described[side] for side in kept}
    return Asked(question, truth)


def choice(
    writer: Writer,
    ask: str,
    truth: str,
    others: Sequence[str],
    *,
    names: str,
    described: str | None = None,
    most: int = 6,
    explained: bool = False,
) -> Asked:
    """Which of several kinds: the truth and some others, in a random order under random names.

    Args:
        writer: words it.
        ask: bank of the instructions.
        truth: the right kind.
        others: wrong kinds; the first are preferred.
        names: names come from the banks ``{names}.{kind}``.
        described: descriptions come from the banks ``{described}.{kind}``, in some questions.
        most: options, at most.
        explained: with all descriptions.
    """
    rng = writer.rng
    kept = [truth, *others[: rng.randint(1, max(1, min(most - 1, len(others))))]]
    rng.shuffle(kept)
    style = rng.choice(("all", "all", "some", "none", "none")) if described else "none"
    style = "all" if explained else style
    criteria: dict[str, str | None] = {}
    answer = ""
    for kind in kept:
        name = writer.say(f"{names}.{kind}")
        while name in criteria:
            name = writer.say(f"{names}.{kind}")
        shown = style == "all" or (style == "some" and rng.random() < 0.5)
        criteria[name] = writer.say(f"{described}.{kind}") if shown else None
        if kind == truth:
            answer = name
    return Asked({"type": "choice", "instructions": writer.say(ask), "criteria": criteria}, answer)


def plain_choice(writer: Writer, ask: str, truth: str, others: Sequence[str], *, most: int = 5) -> Asked:
    """Which of several words, as they are."""
    kept = [truth, *others[: writer.rng.randint(1, most - 1)]]
    writer.rng.shuffle(kept)
    return Asked({"type": "choice", "instructions": writer.say(ask), "criteria": dict.fromkeys(kept)}, truth)


def score(writer: Writer, ask: str, level: int, *, scale: str) -> Asked:
    """Where on a scale from a bank, whose entries are levels from low to high."""
    levels = [part.strip() for part in writer.say(f"scale.{scale}").split(" / ")]
    return Asked({"type": "score", "instructions": writer.say(ask), "criteria": levels}, level)


def shuffled(writer: Writer, kinds: Sequence[str], *without: str) -> list[str]:
    """The kinds in a random order, some left out."""
    left = [kind for kind in kinds if kind not in without]
    writer.rng.shuffle(left)
    return left
