"""Token ids of words, kept: texts repeat theirs, and looking one up takes a tenth of the time that encoding it takes.

A text is taken apart at its blanks, or where that is not safe at fewer places. Only for tokenizers that
``text_cuts.cuts_of`` knows.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from flide.runtime.text_cuts import ends_a_word, is_cut_by_blanks, words

MOST_WORDS, MOST_CHARACTERS = 1 << 15, 1 << 20  # that are kept: some 10 MB
LONGEST = 512  # characters of one that is encoded by itself: between two words there may be a list of options
# A word costs about as much to encode alone as ten in a text. What of a text's words may be new for it to be looked up,
# and is learnt of another text, is so small a part that no text takes twice the time of encoding it.
NEW_SHARE, NEW_AT_LEAST = 8, 8


@dataclass(frozen=True, slots=True)
class _Split:
    """A piece of text in parts: ``"".join(parts) + "".join(" " + word for word in behind)``."""

    parts: list[str]
    behind: list[str]

    @classmethod
    def at_blanks(cls, piece: str) -> _Split | None:
        """None where the first word must not be cut off."""
        first, *behind = piece.split(" ")
        if behind and first and not ends_a_word(first):
            return None
        return cls([first] if first else [], behind)

    @classmethod
    def of(cls, piece: str) -> _Split:
        return (cls.at_blanks(piece) if is_cut_by_blanks(piece) else None) or cls(words(piece), [])

    def __len__(self) -> int:
        return len(self.parts) + len(self.behind)


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
        self._characters = 0

    def ids(self, pieces: Sequence[str]) -> list[array[int] | None]:
        """The int32 token ids of each piece of one text; None if too little of it is known, or something in it is to
        be looked at again."""
        split = [_Split.at_blanks(piece) for piece in pieces]
        found = [self._look_up(parts) for parts in split]
        missing = [i for i, ids in enumerate(found) if ids is None]
        if missing:
            careful = {i: _Split.of(pieces[i]) for i in missing}
            total = sum(len(careful.get(i) or parts or ()) for i, parts in enumerate(split))
            self._learn(careful.values(), total // NEW_SHARE + NEW_AT_LEAST)
            for i, parts in careful.items():
                found[i] = self._look_up(parts)
        return found

    def _look_up(self, split: _Split | None) -> array[int] | None:
        if split is None:
            return None
        try:
            ids = map(self._parts.__getitem__, split.parts), map(self._behind.__getitem__, split.behind)
            return array("i", b"".join(itertools.chain(*ids)))
        except KeyError:
            return None

    def _learn(self, texts: Iterable[_Split], most: int) -> None:
        """Learn some of what is not known of some texts."""
        new: dict[tuple[bool, str], None] = {}
        for split in texts:
            if len(new) < most:
                new.update(((False, part), None) for part in split.parts if part not in self._parts)
                new.update(((True, word), None) for word in split.behind if word not in self._behind)
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
            self._characters = 0
        for is_behind, word, ids in learnt:
            assert not is_behind or ends_a_word(word), "only where blanks cut"
            (self._behind if is_behind else self._parts)[word] = array("i", ids).tobytes()
        self._characters += characters
