"""Token ids of words, kept: texts repeat theirs, and looking one up takes a tenth of the time that encoding it takes.

Only for tokenizers that ``text_cuts.cuts_of`` knows.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
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

    def ids(self, text: str) -> list[int] | None:
        """The token ids of a text; None if too little of it is known, or something in it is to be looked at again."""
        pieces = words(text)
        found = list(map(self._known.get, pieces))
        if None in found:
            new = list(dict.fromkeys(piece for piece, ids in zip(pieces, found, strict=True) if ids is None))
            most = len(pieces) // NEW_SHARE + NEW_AT_LEAST
            learnt = self._learn([piece for piece in new[:most] if len(piece) <= LONGEST])
            found = [learnt.get(piece) if ids is None else ids for piece, ids in zip(pieces, found, strict=True)]
        return None if None in found else list(chain.from_iterable(cast(list[list[int]], found)))

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
