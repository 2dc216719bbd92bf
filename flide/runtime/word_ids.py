"""Token ids of words, kept: texts repeat theirs, and looking one up takes a tenth of the time that encoding it takes.

Only for tokenizers that ``text_cuts.cuts_of`` knows.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import cast

from flide.runtime.text_cuts import words

MOST_WORDS, MOST_CHARACTERS = 1 << 15, 1 << 20  # that are kept: some 10 MB
LONGEST = 512  # characters of one that is encoded by itself: between two words there may be a list of options
# A word costs about as much to encode alone as ten in a text. What of a text's words may be new for it to be looked up,
# and is learnt of another text, is so small a part that no text takes twice the time of encoding it.
NEW_SHARE, NEW_AT_LEAST = 8, 8


class WordIds:
    """Encodes texts whose words it knows, and learns from others. Threads may share it.

    Args:
        encode: token ids of each of some texts, as if nothing were around them.
        may_keep: whether a word of these ids may be looked up another time.
    """

    def __init__(self, encode: Callable[[list[str]], list[list[int]]], may_keep: Callable[[list[int]], bool]) -> None:
        self._encode, self._may_keep = encode, may_keep
        self._known: dict[str, list[int]] = {}
        self._characters = 0

    def ids(self, pieces: Sequence[str]) -> list[list[int] | None]:
        """The token ids of each piece of one text; None if too little of it is known, or something in it is to be
        looked at again."""
        split = [words(piece) for piece in pieces]
        found = [list(map(self._known.get, parts)) for parts in split]
        if any(None in ids for ids in found):
            self._look_again(split, found)
        return [
            None if None in ids else list(itertools.chain.from_iterable(cast(list[list[int]], ids))) for ids in found
        ]

    def _look_again(self, split: Sequence[list[str]], found: Sequence[list[list[int] | None]]) -> None:
        """Learn some of the words that were not found, and fill those in."""
        most = sum(map(len, split)) // NEW_SHARE + NEW_AT_LEAST
        new: dict[str, None] = {}
        for parts, ids in zip(split, found, strict=True):
            if len(new) < most:
                new.update((part, None) for part, known in zip(parts, ids, strict=True) if known is None)
        learnt = self._learn([part for part in itertools.islice(new, most) if len(part) <= LONGEST])
        for parts, ids in zip(split, found, strict=True):
            ids[:] = [learnt.get(part) if known is None else known for part, known in zip(parts, ids, strict=True)]

    def _learn(self, new: list[str]) -> dict[str, list[int]]:
        """Ids of new words."""
        learnt = {piece: ids for piece, ids in zip(new, self._encode(new), strict=True) if self._may_keep(ids)}
        characters = sum(map(len, learnt))
        if len(self._known) + len(learnt) > MOST_WORDS or self._characters + characters > MOST_CHARACTERS:
            self._known.clear()
            self._characters = 0
        self._known.update(learnt)
        self._characters += characters
        return learnt
