"""Texts from templates. ``texts/*.txt`` holds banks of them, each with a part for training, validation and test.

A bank begins with ``# name``, in one file or several; its lines are templates. ``v:`` and ``t:`` begin lines that only
the validation and the test split use; all others are training's. Outside brackets `` | `` separates templates on one
line. In a template ``[a|b|]`` is one of the alternatives and ``{name}`` is filled: by a value of the text that is
written, from the bank of that name, or by a number.
"""

from __future__ import annotations

import random
import re
from functools import cache
from pathlib import Path

SPLITS = ("train", "val", "test")
CLOSED = ("day", "month", "plan")  # closed classes of words, which all splits share
_TEXTS = Path(__file__).parent / "texts"
_MARKS = {"v:": "val", "t:": "test"}
_INNERMOST = re.compile(r"\[([^\[\]]*)\]")
_SLOT = re.compile(r"\{(\w+)\}")

Bank = dict[str, list[str]]


@cache
def banks() -> dict[str, Bank]:
    """All banks by name: split -> templates."""
    found: dict[str, Bank] = {}
    for path in sorted(_TEXTS.glob("*.txt")):
        bank: Bank = {}
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith("# "):
                bank = found.setdefault(line[2:].strip(), {split: [] for split in SPLITS})
                continue
            split = _MARKS.get(line[:2], "train")
            text = line if split == "train" else line[2:]
            bank[split] += [part.strip().replace("\\n", "\n") for part in split_outside_brackets(text)]
    return found


def split_outside_brackets(line: str) -> list[str]:
    """The templates on one line."""
    parts, depth, begin = [], 0, 0
    for i, char in enumerate(line):
        depth += (char == "[") - (char == "]")
        if char == "|" and not depth:
            parts.append(line[begin:i])
            begin = i + 1
    return [*parts, line[begin:]]


def kinds(prefix: str) -> list[str]:
    """What follows ``prefix.`` in the names of banks, in the order of the files."""
    return [name.removeprefix(prefix + ".") for name in banks() if name.startswith(prefix + ".")]


class Writer:
    """Writes the texts of one row.

    Args:
        rng: every random decision.
        split: which part of the banks.

    Attributes:
        values: slots that mean the same thing throughout the row.
    """

    def __init__(self, rng: random.Random, split: str) -> None:
        self.rng, self.split = rng, split
        self.values: dict[str, str] = {}
        currency = rng.choice(("{} euros", "${}", "{} EUR", "{} dollars"))
        self.money = currency.format
        for name in ("item", "item2", "app", "feature", "business", "company", "city", "event", "file", "plan"):
            self.values[name] = self.word(name)
        while self.values["item2"] == self.values["item"]:
            self.values["item2"] = self.word("item")
        high, low = rng.randint(41, 400), rng.randint(5, 40)
        self.values |= {"amount": self.money(high), "amount2": self.money(low)}
        self.values |= {
            "order": str(rng.randint(10000, 99999)),
            "phone": f"0{rng.randint(100, 999)} {rng.randint(10000, 99999)}",
        }

    def word(self, name: str) -> str:
        """An entry of a bank of words; ``item2`` is another item."""
        return self.rng.choice(banks()[name.rstrip("2")][self.split])

    def say(self, bank: str, **values: str) -> str:
        """A text from a template of a bank."""
        return self.fill(self.rng.choice(banks()[bank][self.split]), **values)

    def fill(self, template: str, **values: str) -> str:
        """One of the texts that a template stands for."""
        while found := _INNERMOST.search(template):
            chosen = self.rng.choice(found[1].split("|"))
            template = template[: found.start()] + chosen + template[found.end() :]
        text = _SLOT.sub(lambda slot: values.get(slot[1]) or self._slot(slot[1]), template)
        text = re.sub(r" +", " ", text)
        return re.sub(r" +([,.?!:])", r"\1", text).strip(" ")

    def _slot(self, name: str) -> str:
        if name in self.values:
            return self.values[name]
        if name == "n":
            return str(self.rng.randint(2, 60))
        if name == "code":
            return str(self.rng.randint(100, 9999))
        if name == "port":
            return str(self.rng.choice((80, 443, 5432, 6379, 8080, 9000)))
        return self.word(name)


def with_typos(text: str, rng: random.Random, *, share: float) -> str:
    """The text with letters swapped, dropped or doubled in about this share of its words."""
    words = text.split(" ")
    for i, word in enumerate(words):
        if len(word) > 3 and word.isalpha() and rng.random() < share:
            at = rng.randrange(1, len(word) - 1)
            kind = rng.randrange(3)
            if kind == 0:
                words[i] = word[:at] + word[at + 1] + word[at] + word[at + 2 :]
            elif kind == 1:
                words[i] = word[:at] + word[at + 1 :]
            else:
                words[i] = word[:at] + word[at] + word[at:]
    return " ".join(words)
