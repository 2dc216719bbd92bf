"""Texts from templates. ``texts/*.txt`` holds banks of them, each with a part for training, validation and test.

A bank begins with ``# name``, in one file or several; its lines are templates. ``v:`` and ``t:`` begin lines that only
the validation and the test split use; all others are training's. Outside brackets `` | `` separates templates on one
line. In a template ``[a|b|]`` is one of the alternatives and ``{name}`` is filled: by a value of the text that is
written, from the bank of that name, or by a number (``_RANGES``). ``{lex.name}`` is an entry of a bank of phrases that
say the same, ``{some.name}`` lists a few entries of ``lex.name``; only training's templates have them.

Training's texts are also reworded: words and phrases are replaced by others from ``synonyms.txt``, whose lines are
groups of interchangeable ones. No sentence, name or level of a held-out template comes out of this (``is_held_out``).
"""

from __future__ import annotations

import itertools
import math
import random
import re
from functools import cache
from pathlib import Path

SPLITS = ("train", "val", "test")
CLOSED = ("day", "month", "plan")  # closed classes of words, which all splits share
_TEXTS = Path(__file__).parent / "texts"
SYNONYMS = "synonyms.txt"
# Numbers: any, of days that are soon over, of percent that are many, of milliseconds that are many, of errors.
_RANGES = {"n": (2, 60), "few": (2, 9), "high": (81, 98), "long": (900, 9900), "code": (100, 9999)}
_ARTICLE = re.compile(r"[Aa]n? (?=(\w+))")
_NO_VOWELS, _VOWEL_SOUNDS = ("one", "once", "euro", "Euro"), ("hour", "honest")
_BLANKS, _BLANKS_BEFORE = re.compile(r"  +"), re.compile(r" +([,.?!:])")
_MARKS = {"v:": "val", "t:": "test"}
_INNERMOST = re.compile(r"\[([^\[\]]*)\]")
_SLOT = re.compile(r"\{(\w+)\}")
_PHRASES = re.compile(r"\{(lex|some)\.(\w+)\}")
_NUMBERS = re.compile(r"\{(?:n|few|high|long|code|port|days|window|order|phone)\}|\d+")
_WORDS = re.compile(r"(?<![\w{./-])([A-Za-z][A-Za-z'-]*)(?![\w}/])")
_SENTENCE_ENDS = re.compile(r"[.!?\n]|: | / ")
SHORT = 2  # words of a sentence that any split may say
# Banks whose texts are reworded by nobody: levels, which synonyms might bring out of order.
_AS_THEY_ARE = ("scale.",)
REWORDED = (0.0, 0.0, 0.25, 0.5)  # shares of the replaceable phrases of a text that are replaced
# How often a name in training is an invented word, so that unknown names are nothing new. What is common to the names
# of a kind stays.
INVENTED = {
    "item": (0.3, "{}"),
    "part": (0.1, "{}"),
    "first": (0.2, "{:c}"),
    "last": (0.3, "{:c}"),
    "city": (0.3, "{:c}"),
    "company": (0.3, "{:c}"),
    "event": (0.15, "{}"),
    "business": (0.15, "{}"),
    "app": (0.1, "{}"),
    "feature": (0.1, "{}"),
    "service": (0.3, "{}-{}"),
    "host": (0.3, "{}-{:n}"),
    "file": (0.3, "{}.{:e}"),
}
CURRENCIES = ("{} euros", "${}", "{} EUR", "{} dollars", "{} pounds", "\u20ac{}", "\u00a3{}", "USD {}", "{} francs")
_ENDINGS = ("py", "js", "yaml", "json", "md", "csv", "txt", "html", "sql", "ts", "go", "css", "toml", "xml")
_ONSETS, _VOWELS, _CODAS = (
    sounds.split(",")
    for sounds in (
        "b,bl,br,c,ch,cl,cr,d,dr,f,fl,fr,g,gl,gr,h,j,k,l,m,n,p,pl,pr,qu,r,s,sc,sh,sk,sl,sp,st,t,th,tr,v,w,z",
        "a,e,i,o,u,ai,ea,ee,oa,oo,ou",
        ",n,r,l,m,t,s,d,k,p,x,nd,nt,rk,st,ck,ll,sh",
    )
)

Bank = dict[str, list[str]]


@cache
def banks() -> dict[str, Bank]:
    """All banks by name: split -> templates."""
    found: dict[str, Bank] = {}
    for path in sorted(_TEXTS.glob("*.txt")):
        if path.name == SYNONYMS:
            continue
        bank: Bank = {}
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith("# "):
                bank = found.setdefault(line[2:].strip(), {split: [] for split in SPLITS})
                continue
            if not line:
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
        currency = rng.choice(CURRENCIES if split == "train" else CURRENCIES[:4])
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
        """An entry of a bank of words, or in training at times an invented word; ``item2`` is another item."""
        name = name.rstrip("2")
        share, form = INVENTED.get(name, (0.0, ""))
        if self.split == "train" and self.rng.random() < share:
            return invented(self.rng, form)
        return self.rng.choice(banks()[name][self.split])

    def say(self, bank: str, **values: str) -> str:
        """A text from a template of a bank."""
        while True:
            text = tidied(
                self._resolved(self.rng.choices(banks()[bank][self.split], cum_weights=_weights(bank, self.split))[0])
            )
            if self.split != "train":
                break
            share = 0.0 if bank.startswith(_AS_THEY_ARE) else self.rng.choice(REWORDED)
            text = tidied(with_synonyms(text, self.rng, share=share))
            if not is_held_out(text):
                break
        filled = _SLOT.sub(lambda slot: values.get(slot[1]) or self._slot(slot[1]), _several(text, self.values))
        return tidied(filled)

    def _resolved(self, template: str) -> str:
        """Without alternatives and phrases; slots stay."""
        while True:
            if found := _INNERMOST.search(template):
                chosen = self.rng.choice(found[1].split("|"))
            elif found := _PHRASES.search(template):
                chosen = self._phrases(found[2], some=found[1] == "some")
            else:
                return template
            template = template[: found.start()] + chosen + template[found.end() :]

    def _phrases(self, name: str, *, some: bool) -> str:
        bank = banks()[f"lex.{name}"][self.split]
        if not some:
            return self.rng.choice(bank)
        kept = self.rng.sample(bank, self.rng.randint(2, min(4, len(bank))))
        joined = ", ".join(kept[:-1])
        return joined + self.rng.choice((", ", " and ", " or ", ", ")) + kept[-1]

    def _slot(self, name: str) -> str:
        if name in self.values:
            return self.values[name]
        if name in _RANGES:
            return str(self.rng.randint(*_RANGES[name]))
        if name == "port":
            return str(self.rng.choice((80, 443, 5432, 6379, 8080, 9000)))
        return self.word(name)


@cache
def _weights(bank: str, split: str) -> list[float]:
    """How often each template of a bank is taken, summed up: in training, more often those that say more."""
    bits = [1 + (_bits(template) if split == "train" else 0) for template in banks()[bank][split]]
    return list(itertools.accumulate(bits))


def _bits(template: str) -> float:
    """Of the number of texts that a template stands for, about."""
    alternatives = sum(math.log2(1 + part.count("|")) for part in _INNERMOST.findall(template))
    return alternatives + sum(math.log2(len(banks()[f"lex.{name}"]["train"])) for _, name in _PHRASES.findall(template))


def _several(text: str, values: dict[str, str]) -> str:
    """The text with ``{item}s`` filled by plurals."""
    return re.sub(r"\{(item2?)\}s\b", lambda slot: plural(values[slot[1]]), text)


def plural(noun: str) -> str:
    """Of a noun, or of what is before its "of"."""
    head, *rest = noun.partition(" of ")
    ending = "" if head.endswith(("s", "x")) and not head.endswith("ss") else "s"
    ending = "es" if head.endswith(("ss", "ch", "sh", "x")) else ending
    return "".join([head.removesuffix("f") + "ves" if head.endswith("elf") else head + ending, *rest])


def invented(rng: random.Random, form: str) -> str:
    """A name of invented words that no split has: see ``INVENTED``."""
    while True:
        name = form
        for kind in re.findall(r"\{:?(\w?)\}", form):
            name = re.sub(r"\{:?\w?\}", _piece(rng, kind), name, count=1)
        if name.lower() not in _names():
            return name


def _piece(rng: random.Random, kind: str) -> str:
    if kind == "n":
        return str(rng.randint(1, 60))
    if kind == "e":
        return rng.choice(_ENDINGS)
    syllables = [
        rng.choice(_ONSETS) + rng.choice(_VOWELS) + (rng.choice(_CODAS) if rng.random() < 0.6 else "")
        for _ in range(rng.choice((2, 2, 3)))
    ]
    word = "".join(syllables)
    return word.capitalize() if kind == "c" else word


@cache
def _names() -> frozenset[str]:
    return frozenset(name.lower() for kind in INVENTED for bank in banks()[kind].values() for name in bank)


def tidied(text: str) -> str:
    """With single blanks, none before punctuation, and articles that fit."""
    text = _BLANKS_BEFORE.sub(r"\1", _BLANKS.sub(" ", text)).strip(" ")
    return _ARTICLE.sub(_fitting, text)


def _fitting(found: re.Match[str]) -> str:
    """ "a " or "an ", by the word that follows; as it is where it is no article."""
    text, at, word = found.string, found.start(), found[1]
    begins = not at or text[max(0, at - 2) : at] in (". ", "! ", "? ", ": ")
    if not begins and (found[0][0] == "A" or text[at - 1].isalnum() or text[at - 1] in "'-_"):
        return found[0]
    if word[0] in "aeioAEIO" or word.startswith(_VOWEL_SOUNDS):
        return found[0] if word.startswith(_NO_VOWELS) else found[0][0] + "n "
    # Capitals may be spelt, as in "an SMS", and a u may be either sound.
    return found[0] if word[0] == "u" or not word[0].islower() else found[0][0] + " "


def with_synonyms(text: str, rng: random.Random, *, share: float) -> str:
    """The text with about this share of its phrases replaced by others that mean the same."""
    if not share:
        return text
    by_word = _synonyms()
    parts = _WORDS.split(text)  # words are at odd places
    for i in range(1, len(parts), 2):
        for phrase, others in by_word.get(parts[i].lower(), ()):
            last = i + 2 * len(phrase) - 2
            found = [part.lower() for part in parts[i : last + 1 : 2]] == phrase
            if not found or any(gap != " " for gap in parts[i + 1 : last : 2]):
                continue
            if rng.random() < share:
                chosen = rng.choice(others)
                parts[i] = chosen[0].upper() + chosen[1:] if parts[i][0].isupper() else chosen
                parts[i + 1 : last + 1] = [""] * (last - i)
            break
    return "".join(parts)


@cache
def _synonyms() -> dict[str, list[tuple[list[str], list[str]]]]:
    """First word -> the phrases that begin with it, the longest first, and what can replace each."""
    groups: dict[str, list[str]] = {}
    for line in (_TEXTS / SYNONYMS).read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            these = [phrase.strip() for phrase in line.split("|")]
            for phrase in these:
                groups[phrase] = groups.get(phrase, []) + [other for other in these if other != phrase]
    by_word: dict[str, list[tuple[list[str], list[str]]]] = {}
    for phrase in sorted(groups, key=lambda phrase: (-len(phrase.split()), phrase)):
        by_word.setdefault(phrase.split()[0], []).append((phrase.split(), groups[phrase]))
    return by_word


def is_held_out(text: str) -> bool:
    """Whether a text, its slots not filled yet, has a sentence, or is a name, of the validation or the test split."""
    return not _held_out().isdisjoint(_parts(text))


@cache
def _held_out() -> frozenset[str]:
    found: set[str] = set()
    for name, bank in banks().items():
        if name not in CLOSED:
            for split in SPLITS[1:]:
                for template in bank[split]:
                    for text in _expanded(template):
                        found |= _parts(text)
    return frozenset(found) - {"", "{text}"}


def _expanded(template: str) -> list[str]:
    found = _INNERMOST.search(template)
    if not found:
        return [tidied(template)]
    head, tail = template[: found.start()], template[found.end() :]
    return [text for chosen in found[1].split("|") for text in _expanded(head + chosen + tail)]


def _parts(text: str) -> set[str]:
    """A text and its sentences, such that texts that differ in numbers only are equal."""
    plain = _NUMBERS.sub("0", text.lower()).replace("{amount2}", "{amount}").replace("{item2}", "{item}")
    sentences = [part.strip(" ,;") for part in _SENTENCE_ENDS.split(plain)]
    short = 0 if " / " in plain else SHORT  # a scale's levels are names
    return {plain.strip(), *(part for part in sentences if len(part.split()) > short)}


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
