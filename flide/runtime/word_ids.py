"""Token ids of words and of short texts, kept: both come again, and looking one up takes a tenth of the time that
encoding it takes.

A text is taken apart at its blanks, or where that is not safe at fewer places. Only for tokenizers that
``text_cuts.cuts_of`` knows.
"""

from __future__ import annotations

import itertools
import sys
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from flide.runtime.packed_words import PackedWords
from flide.runtime.text_cuts import ends_a_word, is_cut_by_blanks, words

MOST_WORDS, MOST_CHARACTERS = 1 << 15, 1 << 20  # that are kept: some 10 MB
LONGEST = 512  # characters of one that is encoded by itself: between two words there may be a list of options
# A word costs about as much to encode alone as ten in a text. What of a text's words may be new for it to be looked up,
# and is learnt of another text, is so small a part that no text takes twice the time of encoding it. Once so
# many are known that it is no beginning, those of another text are only learnt that come again: most numbers do not.
NEW_SHARE, NEW_AT_LEAST, BEGINNING = 8, 8, 1 << 13
PACKED = 1 << 13  # characters of a piece from which on its words are looked up together
MOST_SEEN = 1 << 16  # words that came and were not learnt, some 5 MB

MOST_TEXT = 1 << 23  # bytes of texts that are kept, of their ids and of what it takes to find them
LONGEST_TEXT = 1 << 13  # characters
_ENTRY = 200  # bytes that an entry takes beside the objects in it

# A piece of text as parts, and words with a blank before each.
_Split: TypeAlias = "tuple[list[str], list[str]]"


class TextIds:
    """Remembers short texts as a whole, as questions are, which one asks about many states. Threads may share it."""

    def __init__(self) -> None:
        self._known: dict[tuple[str | None, str], array[int]] = {}
        self._bytes = 0

    def get(self, text: str, salt: str | None) -> array[int] | None:
        """The ids of a text, which must stay as they are, if it was kept with this salt."""
        return self._known.get((salt, text))

    def keep(self, text: str, salt: str | None, ids: array[int]) -> None:
        if len(text) > LONGEST_TEXT:
            return
        # Of a short text the salt can be the most, which a user chooses.
        size = sum(map(sys.getsizeof, (text, salt, ids))) + _ENTRY
        if self._bytes + size > MOST_TEXT:
            self._known.clear()
            self._bytes = 0
        self._known[salt, text] = ids
        self._bytes += size


class WordIds:
    """Encodes texts whose words it knows, and learns from others. Threads may share it.

    Args:
        encode: token ids of each of some texts, as if nothing were around them.
        may_keep: whether a word of these ids may be looked up another time.
    """

    def __init__(self, encode: Callable[[list[str]], list[list[int]]], may_keep: Callable[[list[int]], bool]) -> None:
        self._encode, self._may_keep = encode, may_keep
        # Packed int32 ids: of parts as they stand, and of words with a blank before them. The latter all end so that
        # another blank may follow.
        self._parts: dict[str, bytes] = {}
        self._behind: dict[str, bytes] = {}
        self._packed = PackedWords()  # the latter once more
        self._characters = 0
        self._seen: set[int] = set()  # hashes of what came and was not learnt

    def ids(self, pieces: Sequence[str]) -> list[array[int] | None]:
        """The int32 token ids of each piece of one text; None if too little of it is known, or something in it is to
        be looked at again."""
        if len(pieces) == 1 and len(pieces[0]) >= PACKED:
            packed = self._look_up_packed(pieces[0])
            if packed is not None:
                return [packed]
        split = list(map(_at_blanks, pieces))
        found = list(map(self._look_up, split))
        if None in found:
            missing = [i for i, ids in enumerate(found) if ids is None]
            for i in missing:
                split[i] = _taken_apart(pieces[i])
            total = sum(len(parts) + len(behind) for parts, behind in filter(None, split))
            self._learn([split[i] for i in missing], total)
            for i in missing:
                found[i] = self._look_up(split[i])
        return found

    def _look_up_packed(self, piece: str) -> array[int] | None:
        """As ``_look_up``, of a piece that has not been taken apart."""
        first, blank, behind = piece.partition(" ")
        known = self._parts.get(first) if first else b""
        if known is None or (first and blank and not ends_a_word(first)):
            return None
        try:
            ids = self._packed.ids(blank + behind, self._behind) if blank else b""
        except UnicodeEncodeError:  # which who encodes it tells of
            return None
        return None if ids is None else array("i", known + ids)

    def _look_up(self, split: _Split | None) -> array[int] | None:
        if split is None:
            return None
        parts, behind = split
        try:
            ids = map(self._parts.__getitem__, parts), map(self._behind.__getitem__, behind)
            return array("i", b"".join(itertools.chain(*ids)))
        except KeyError:
            return None

    def _learn(self, texts: Iterable[_Split | None], total: int) -> None:
        """Learn some of what is not known of some texts, which are part of one of so many words."""
        most = total // NEW_SHARE + NEW_AT_LEAST
        new: dict[tuple[bool, str], None] = {}
        for parts, behind in filter(None, texts):
            if len(new) < most:
                new.update(((False, part), None) for part in parts if part not in self._parts)
                new.update(((True, word), None) for word in behind if word not in self._behind)
        is_beginning = len(self._parts) + len(self._behind) < BEGINNING
        if not is_beginning and len(new) > min(most, total // 2):
            new = self._again(new)
        named = [(is_behind, word) for is_behind, word in itertools.islice(new, most) if len(word) < LONGEST]
        encoded = self._encode([" " + word if is_behind else word for is_behind, word in named])
        learnt = [(*name, ids) for name, ids in zip(named, encoded, strict=True) if self._may_keep(ids)]
        characters = sum(len(word) for _, word, _ in learnt)
        if (
            len(self._parts) + len(self._behind) + len(learnt) > MOST_WORDS
            or self._characters + characters > MOST_CHARACTERS
        ):
            self._parts.clear()
            self._behind.clear()
            self._packed = PackedWords()
            self._characters = 0
        for is_behind, word, ids in learnt:
            assert not is_behind or ends_a_word(word), "only where blanks cut"
            packed = array("i", ids).tobytes()
            if is_behind:
                self._packed.add(word, packed)
            (self._behind if is_behind else self._parts)[word] = packed
        self._characters += characters

    def _again(self, new: dict[tuple[bool, str], None]) -> dict[tuple[bool, str], None]:
        """Those of some words that came before."""
        seen, hashes = self._seen, list(map(hash, new))
        again = dict.fromkeys(itertools.compress(new, list(map(seen.__contains__, hashes))))
        if len(seen) + len(hashes) > MOST_SEEN:
            seen.clear()
        seen.update(hashes[:MOST_SEEN])
        return again


def _at_blanks(piece: str) -> _Split | None:
    """None where the first word must not be cut off."""
    first, *behind = piece.split(" ")
    if behind and first and not ends_a_word(first):
        return None
    return [first] if first else [], behind


def _taken_apart(piece: str) -> _Split:
    return (_at_blanks(piece) if is_cut_by_blanks(piece) else None) or (words(piece), [])
