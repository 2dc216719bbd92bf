"""Labelled rows of the demo tasks, from a seed; the n-th row of a split depends on nothing else.

python -m scripts.demo.data OUT --train 20000 --val 1500 --test 3000
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from scripts.demo import aids
from scripts.demo.grammar import CLOSED, SPLITS, Writer, banks, invented, with_typos
from scripts.demo.tasks import SHARES, TASKS, TRAINING_SHARES

SEED = 20261129
MOST_QUESTIONS = 8
# Words without which a sentence may say something else.
_TELLING = """no not never nobody none nothing without cannot cant dont but only worst best like dislike before after
unused used receipt private yes low medium high"""
KEPT = frozenset([*_TELLING.split(), *(word.lower() for name in CLOSED for word in banks()[name]["train"])])
RARE = ("escalate", "policy", "window", "page", "deadline")  # asked whenever they can be
# What a small model learns last, which training rows ask more often.
HARD = ("like", "dislike", "complains", "praises", "stars", "product", "is_product", "anger", "want", "severity")
COPIED = ("product", "is_product", *aids.WORDS)  # questions about words of the text as they are
UNKNOWN_LEVELS = 0.5  # share of scales with words dropped whose levels tell little but their order


def make_row(split: str, index: int, *, seed: int = SEED) -> dict[str, Any]:
    """One row: a System One body with targets, as ``flide train`` and ``flide eval`` read."""
    rng = random.Random(f"{seed} {split} {index}")
    shares = TRAINING_SHARES if split == "train" else SHARES
    name = rng.choices(list(shares), list(shares.values()))[0]
    writer = Writer(rng, split)
    state, asked = TASKS[name](writer)
    state = _roughened(state, rng)
    if split == "train":
        asked |= aids.lookups(_texts(state), rng)
    ids = list(asked)
    rng.shuffle(ids)
    ids.sort(key=lambda kind: not _is_favoured(kind, split, rng))
    ids = ids[: rng.randint(2, MOST_QUESTIONS)]
    rng.shuffle(ids)
    return {
        "model": "demo",
        "state": state,
        "questions": {f"{name}.{kind}": asked[kind].question for kind in ids},
        "targets": {f"{name}.{kind}": asked[kind].target for kind in ids},
    }


def _is_favoured(kind: str, split: str, rng: random.Random) -> bool:
    if kind in RARE:
        return rng.random() >= 0.3
    return split == "train" and kind in (*HARD, *aids.WORDS) and rng.random() < 0.5


def rows(split: str, count: int, *, seed: int = SEED) -> Iterator[dict[str, Any]]:
    """The first ``count`` rows of a split."""
    return (make_row(split, index, seed=seed) for index in range(count))


def make_rows(split: str, first: int, last: int) -> list[dict[str, Any]]:
    """Rows ``first`` to ``last`` of a split."""
    return [make_row(split, index) for index in range(first, last)]


def with_words_dropped(row: dict[str, Any], rng: random.Random, *, share: float) -> dict[str, Any]:
    """A row to train on that leaves out about this share of all words, so that no template is learnt as a whole.

    Negations, numbers, things that are asked for and what a word can be told apart by stay: the answers remain what
    they were.
    """
    asked = " ".join(
        " ".join([question["instructions"], *(question.get("criteria") or ())])
        for kind, question in row["questions"].items()
        if kind.rpartition(".")[2] in COPIED
    )
    things = {_plain(word) for word in asked.split()}

    def thinned(text: str, *, among: Iterable[str] = ()) -> str:
        words = text.split(" ")
        kept = [word for word in words if rng.random() >= share or _is_kept(word) or _plain(word) in things]
        shorter = " ".join(kept)
        return shorter if kept and shorter.strip() and shorter not in among else text

    questions, targets = {}, dict(row["targets"])
    for kind, question in row["questions"].items():
        question = {**question, "instructions": thinned(question["instructions"])}
        criteria = question.get("criteria")
        if question["type"] == "choice":
            options: dict[str, str | None] = {}
            for name, description in criteria.items():
                shown = thinned(name, among=[*criteria, *options])
                options[shown] = description and thinned(description)
                if row["targets"][kind] == name:
                    targets[kind] = shown
            question["criteria"] = options
        elif question["type"] == "score":
            levels: list[str] = []
            unknown = rng.random() < UNKNOWN_LEVELS
            for level in criteria:
                shown = invented(rng, "{}") if unknown and rng.random() < 0.7 else level
                levels.append(thinned(shown, among=[*criteria, *levels]))
            question["criteria"] = levels
        questions[kind] = question
    return {**row, "state": _every_text(row["state"], thinned), "questions": questions, "targets": targets}


def _plain(word: str) -> str:
    return word.strip(".,:;!?\n").lower()


def _is_kept(word: str) -> bool:
    plain = _plain(word)
    return plain in KEPT or "n't" in plain or not plain.isalpha()


def write_rows(path: Path, these: Iterable[dict[str, Any]]) -> None:
    """As JSON lines."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in these)


def _roughened(state: Any, rng: random.Random) -> Any:
    """As people write: some texts have typos, some no capitals."""
    share = rng.choice((0.0, 0.0, 0.0, 0.03, 0.1))
    lower = rng.random() < 0.08

    def rough(text: str) -> str:
        text = with_typos(text, rng, share=share)
        return text.lower() if lower else text

    return _every_text(state, rough)


def _texts(state: Any) -> list[str]:
    found: list[str] = []
    _every_text(state, lambda text: found.append(text) or text)
    return found


def _every_text(state: Any, change: Callable[[str], str]) -> Any:
    if isinstance(state, dict):
        return {
            key: [change(x) for x in value] if isinstance(value, list) else change(value)
            for key, value in state.items()
        }
    return change(state)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    for split, count in zip(SPLITS, (20000, 1500, 3000), strict=True):
        parser.add_argument(f"--{split}", type=int, default=count)
    parser.add_argument("--seed", type=int, default=SEED)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for split in SPLITS:
        write_rows(arguments.out / f"{split}.jsonl", rows(split, getattr(arguments, split), seed=arguments.seed))


if __name__ == "__main__":
    main()
