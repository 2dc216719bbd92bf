"""Token ids of words, found for all words of a text at once: a table in numpy's arrays, with no object for each word.

A word of up to 16 bytes of UTF-8 is two 64-bit numbers, so that comparing those is comparing words. Shapes: B bytes and
W words of a text, E entries, P slots, I ids.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["PackedWords"]

LONGEST = 16  # bytes of a word
MOST = 1 << 15  # entries
_MOST_IDS = 1 << 17
_SLOT_BITS = 17  # four slots to an entry at least, so that most words are where they are looked for first
_SHIFT = np.uint64(64 - _SLOT_BITS)
_FIRST, _SECOND = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F)  # odd, their bits spread
_NO_WORD = np.uint64(0xFFFFFFFFFFFFFFFF)  # bytes that are not in UTF-8
_BEGINNING = np.array([(1 << 8 * n) - 1 for n in range(9)], np.uint64)  # of eight bytes, little-endian, the first n
_BLANK = ord(" ")

_Halves: TypeAlias = "tuple[NDArray[np.uint64], NDArray[np.uint64]]"


class PackedWords:
    """Words that stand behind a blank, with the ids of both. Threads may share it."""

    def __init__(self) -> None:
        # The last entry is none: that of slots where no word is.
        self._words_E = np.full(MOST + 1, _NO_WORD), np.full(MOST + 1, _NO_WORD)
        self._begins_E = np.zeros(MOST + 1, np.int32)
        self._counts_E = np.zeros(MOST + 1, np.int32)
        self._ids_I = np.zeros(_MOST_IDS, np.int32)
        self._slots_P = np.full(1 << _SLOT_BITS, MOST, np.int32)
        self._count = self._num_ids = 0
        self._lock = threading.Lock()

    def add(self, word: str, ids: bytes) -> None:
        """A word and its packed int32 ids; dropped where it is too long, or there is no room."""
        data = word.encode()
        if len(data) > LONGEST or b"\0" in data:
            return
        padded = np.frombuffer(data.ljust(LONGEST, b"\0"), "<u8")
        halves_1 = padded[:1], padded[1:]
        with self._lock:
            entry, begin, end = self._count, self._num_ids, self._num_ids + len(ids) // 4
            if entry == MOST or end > _MOST_IDS or self._find(halves_1)[0] != MOST:
                return
            for words_E, half_1 in zip(self._words_E, halves_1, strict=True):
                words_E[entry] = half_1[0]
            self._ids_I[begin:end] = np.frombuffer(ids, np.int32)
            self._begins_E[entry], self._counts_E[entry] = begin, end - begin
            slot = int(_slots(halves_1)[0])
            while self._slots_P[slot] != MOST:
                slot = (slot + 1) % len(self._slots_P)
            self._slots_P[slot] = entry  # last: who looks it up meanwhile finds all of it
            self._count, self._num_ids = entry + 1, end

    def ids(self, text: str, others: Mapping[str, bytes]) -> bytes | None:
        """Packed int32 ids of a text that begins with a blank; None if one of its words is not known.

        Args:
            text: what is to be looked up.
            others: packed ids of words, for those that are not here.

        Raises:
            UnicodeEncodeError: the text has a lone surrogate.
        """
        assert text[0] == " ", "text is cut in front of blanks"
        data = text.encode()
        if b"\0" in data:
            return None
        bytes_B = np.frombuffer(data + bytes(LONGEST + 8), np.uint8)
        blanks_W = np.flatnonzero(bytes_B == _BLANK)
        begins_W = blanks_W + 1
        ends_W = np.append(blanks_W[1:], len(data))
        lengths_W = ends_W - begins_W
        eights_B: NDArray[np.uint64] = np.ndarray(len(data) + LONGEST, "<u8", bytes_B, strides=(1,))
        first_W = eights_B.take(begins_W) & _BEGINNING.take(np.minimum(lengths_W, 8))
        second_W = eights_B.take(begins_W + 8) & _BEGINNING.take(np.minimum(np.maximum(lengths_W - 8, 0), 8))
        entries_W = self._find((first_W, second_W))
        unknown_W = (entries_W == MOST) | (lengths_W > LONGEST)
        places: list[int] = np.flatnonzero(unknown_W).tolist()
        given = [others.get(data[begins_W[i] : ends_W[i]].decode()) for i in places]
        if None in given:
            return None
        counts_W = self._counts_E.take(entries_W)
        counts_W[places] = 1  # kept free for what is given
        starts_W = self._begins_E.take(entries_W)
        if (counts_W != 1).any():
            # Each id of a word is as far from the word's first one in the table as it is in the text.
            firsts_W = np.cumsum(counts_W) - counts_W
            starts_W = np.repeat(starts_W - firsts_W, counts_W)
            starts_W += np.arange(len(starts_W), dtype=np.int32)
            places = firsts_W[places].tolist()
        packed = self._ids_I.take(starts_W).tobytes()
        parts, done = [], 0
        for place, ids in zip(places, given, strict=True):
            assert ids is not None
            parts += [packed[4 * done : 4 * place], ids]
            done = place + 1
        return b"".join([*parts, packed[4 * done :]])

    def _find(self, halves_W: _Halves) -> NDArray[np.int32]:
        """``[W]`` entries of words, ``MOST`` for those that have none."""
        slots_W = _slots(halves_W)
        entries_W: NDArray[np.int32] = self._slots_P.take(slots_W)
        (first_E, second_E), (first_W, second_W) = self._words_E, halves_W
        wrong_W = np.flatnonzero((first_E.take(entries_W) != first_W) | (second_E.take(entries_W) != second_W))
        while len(wrong_W):  # no word is in the slot, or another one, behind which this one may be
            wrong_W = wrong_W[entries_W.take(wrong_W) != MOST]
            slots_W[wrong_W] = (slots_W.take(wrong_W) + 1) % len(self._slots_P)
            found_W = self._slots_P.take(slots_W.take(wrong_W))
            entries_W[wrong_W] = found_W
            is_other = first_E.take(found_W) != first_W.take(wrong_W)
            is_other |= second_E.take(found_W) != second_W.take(wrong_W)
            wrong_W = wrong_W[is_other]
        return entries_W


def _slots(halves_W: _Halves) -> NDArray[np.int64]:
    """Where words are looked for first."""
    mixed_W = (halves_W[0] * _FIRST) ^ (halves_W[1] * _SECOND)
    slots_W: NDArray[np.int64] = ((mixed_W ^ (mixed_W >> np.uint64(29))) * _FIRST >> _SHIFT).astype(np.int64)
    return slots_W
