"""The segment table as the reference ops read it: on the host, one Python object per segment."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Segment:
    """One trunk, branch or leaf.

    Attributes:
        begin, end: stream rows.
        path: the segment and its ancestors, trunk first, as indices into the table.
    """

    begin: int
    end: int
    path: tuple[int, ...]

    @property
    def level(self) -> int:
        return len(self.path) - 1

    @property
    def root(self) -> int:
        return self.path[0]

    def __len__(self) -> int:
        return self.end - self.begin


def read_segments(segment_offsets: Tensor, segment_parents: Tensor) -> list[Segment]:
    """Every segment of the table, unused (empty) ones included; parents come before their children."""
    offsets, parents = segment_offsets.tolist(), segment_parents.tolist()
    segments: list[Segment] = []
    for i, parent in enumerate(parents):
        path = (i,) if parent < 0 else (*segments[parent].path, i)
        segments.append(Segment(offsets[i], offsets[i + 1], path))
    return segments


def rows_before(segments: list[Segment], index: int, count: int) -> list[int]:
    """Stream rows of the ``count`` tokens before segment ``index``, nearest first; shorter where its path is."""
    rows: list[int] = []
    for ancestor in reversed(segments[index].path[:-1]):
        s = segments[ancestor]
        rows += range(s.end - 1, max(s.begin, s.end - (count - len(rows))) - 1, -1)
        if len(rows) == count:
            break
    return rows
