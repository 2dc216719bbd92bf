"""Token ids of what texts begin with, kept: of a text that has grown, only what is new is encoded.

A text is known block by block, each behind the blocks before it, and found again by its characters. The ids of a block
end at the last safe boundary in it, so that they depend on nothing behind it.

Only for tokenizers that ``text_cuts.cuts_of`` knows.
"""

from __future__ import annotations

import itertools
import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from flide.runtime.seen import Seen
from flide.runtime.text_cuts import Cuts

__all__ = ["Beginning", "PrefixIds"]

BLOCK = 512  # characters
MOST_BLOCKS = 1 << 15  # that are kept: some 50 MB of English text
MOST_IDS = MOST_BLOCKS * BLOCK  # in these: behind a long text without a boundary one block has the ids of all of it
MOST_SEEN = 1 << 14  # first blocks that came
LARGEST_SHARE = 4  # a text keeps at most one in so many of these


_Key: TypeAlias = "tuple[int | str | None, str]"


@dataclass(frozen=True, slots=True)
class _Block:
    """A block of a text.

    Attributes:
        key: the number of the block before it, or of the first one the salt, and its own characters.
        number: its own.
        cut: where in the text its ids end.
        ids: of the text from the cut of the block before it on.
    """

    key: _Key
    number: int
    cut: int
    ids: array[int]


@dataclass(frozen=True, slots=True)
class Beginning:
    """A text of which something may be known.

    Attributes:
        text: the whole of it.
        salt: texts of another one are not known to it.
        pieces: what is not known, in pieces whose ids make up those of all: new blocks, then what is behind the last.
    """

    text: str
    salt: str | None
    pieces: list[str]
    _known: list[_Block]
    _cuts: list[int]  # where new blocks end


class PrefixIds:
    """Remembers the token ids of texts. Threads may share it.

    Args:
        cuts: safe boundaries of the tokenizer.
        again: keep only texts whose first block came before: most never grow, and to make their blocks takes as long as
            to look up their words.
    """

    def __init__(self, cuts: Cuts, *, again: bool = False) -> None:
        self._cuts, self._again = cuts, again
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        # The last ones were used last, and of one text those that it begins with: what is behind a block goes first.
        self._blocks: OrderedDict[_Key, _Block] = OrderedDict()
        self._num_ids = 0
        self._seen = Seen(MOST_SEEN)  # first blocks

    def find(self, text: str, salt: str | None = None) -> Beginning:
        """What is known of a text to those who use a salt, and what is not."""
        if len(text) < BLOCK:
            return Beginning(text, salt, [text], [], [])
        known: list[_Block] = []
        number: int | str | None = salt
        cut = 0
        end = min(len(text) // BLOCK, MOST_BLOCKS // LARGEST_SHARE) * BLOCK
        with self._lock:
            for start in range(0, end, BLOCK):
                block = self._blocks.get((number, text[start : start + BLOCK]))
                if block is None:
                    break
                known.append(block)
                number, cut = block.number, block.cut
            if self._again and not known and not self._seen.again((salt, text[:BLOCK])):
                return Beginning(text, salt, [text], [], [])
        pieces, cuts = [], []
        for start in range(len(known) * BLOCK, end, BLOCK):
            # A boundary is seen by what follows it, which has to lie in the block, too.
            found = self._cuts.last.match(text, start, start + BLOCK)
            before, cut = cut, found.end() if found else cut
            pieces.append(text[before:cut])
            cuts.append(cut)
        return Beginning(text, salt, [*pieces, text[cut:]], known, cuts)

    def keep(self, beginning: Beginning, ids: Sequence[array[int]]) -> array[int]:
        """Remember a text.

        Args:
            beginning: what ``find`` said of it.
            ids: of each of its pieces, int32.

        Returns:
            The ids of the whole text, int32.
        """
        text, known = beginning.text, beginning._known
        if len(text) < BLOCK:
            return ids[0]
        keys: list[_Key] = []
        number: int | str | None = beginning.salt
        with self._lock:
            for block in known:
                self._add(block)  # it may have had to go meanwhile
                number = block.number
                keys.append(block.key)
            left = MOST_IDS // LARGEST_SHARE - sum(len(block.ids) for block in known)
            for start, cut, piece in zip(itertools.count(len(known) * BLOCK, BLOCK), beginning._cuts, ids):  # noqa: B905
                left -= len(piece)
                if left < 0:
                    break
                key = number, text[start : start + BLOCK]
                number = self._add(_Block(key, next(self._numbers), cut, piece)).number
                keys.append(key)
            for key in reversed(keys):
                self._blocks.move_to_end(key)
            while len(self._blocks) > MOST_BLOCKS or self._num_ids > MOST_IDS:
                self._num_ids -= len(self._blocks.popitem(last=False)[1].ids)
        return array("i", b"".join([*(block.ids for block in known), *ids]))

    def _add(self, block: _Block) -> _Block:
        """What is known under a block's key: another one's, where it came first."""
        found = self._blocks.get(block.key)
        if found is None:
            self._blocks[block.key] = found = block
            self._num_ids += len(block.ids)
        return found
