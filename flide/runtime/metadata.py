"""ForkMetadata: the structure of a stream as data, so that one compiled graph serves every round.

Shapes: T stream rows, S segments, N readout rows, G pages. All tensors are int32 views of one arena.
"""

from __future__ import annotations

import functools
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flide.runtime.compact import Compact
from flide.runtime.tree import MAX_DEPTH, TokenTree, TreeLayout, numbers

if TYPE_CHECKING:
    from flide.ops.fork_schedule.reference import ForkSchedule

PAGE_SIZE = 64  # rows of a KV page; the kernels read blocks of keys that divide it
MAX_SAVES = 4  # checkpoints one trunk may save in one round
_ALIGN = 4  # int32 elements in 16 bytes
# Unused elements at the head of the arena: without them the second field would begin at an offset equal to the first
# one's size, and dynamic shapes would tie the two together ("duck sizing") and recompile where they differ.
_HEADER = _ALIGN


@dataclass(frozen=True, slots=True)
class StreamCapacity(Compact):
    """Sizes a stream is laid out for; under capture they are the only shapes there are.

    Attributes:
        tokens: stream rows.
        segments: trunks, branches and leaves together.
        readouts: readout rows.
        pages: entries of the page table (0 when no KV pool is used).
        depth: levels of the trees, 2 or 3; the kernels run one pass per level.
    """

    tokens: int
    segments: int
    readouts: int
    pages: int = 0
    depth: int = 2

    def __post_init__(self) -> None:
        if min(self.tokens, self.segments, self.readouts) < 1 or self.pages < 0:
            raise ValueError(f"a stream capacity needs positive sizes, got {self}")
        if self.depth not in (2, MAX_DEPTH):
            raise ValueError(f"trees have 2 or {MAX_DEPTH} levels, got {self.depth}")

    def holds(self, other: StreamCapacity) -> bool:
        """Whether a round of size ``other`` fits."""
        return (
            other.tokens <= self.tokens
            and other.segments <= self.segments
            and other.readouts <= self.readouts
            and other.pages <= self.pages
            and other.depth <= self.depth
        )

    def __add__(self, other: StreamCapacity) -> StreamCapacity:
        """What two sets of requests need together."""
        return StreamCapacity(
            self.tokens + other.tokens,
            self.segments + other.segments,
            self.readouts + other.readouts,
            self.pages + other.pages,
            max(self.depth, other.depth),
        )


@dataclass(frozen=True, slots=True)
class TrunkCache:
    """What a trunk resumes from and what it saves. The default is a fresh trunk that saves nothing.

    Resuming and saving need a model with pools (``allocate_pools``): without them the cached part is not there to read.

    Attributes:
        length: tokens the checkpoint covers; the tree's trunk holds only the tokens after them.
        slot: state-pool slot of that checkpoint (slot 0 is the permanent zero state).
        pages: KV pages of the whole trunk, cached and new, ``num_pages(total)`` of them in logical order.
        saves: up to ``MAX_SAVES`` pairs (length, slot): keep the state after ``length`` tokens in ``slot``.
    """

    length: int = 0
    slot: int = 0
    pages: Sequence[int] = ()
    saves: tuple[tuple[int, int], ...] = ()


def num_pages(length: int) -> int:
    """KV pages that hold so many tokens."""
    return -(-length // PAGE_SIZE)


def fresh_caches(trees: Sequence[TokenTree | TreeLayout]) -> list[TrunkCache]:
    """KV pages for trunks that live for one round: numbered from 0, request by request."""
    caches, page = [], 0
    for tree in trees:
        length = tree.trunk_length if isinstance(tree, TreeLayout) else len(tree.tokens)
        count = num_pages(length)
        caches.append(TrunkCache(pages=range(page, page + count)))
        page += count
    return caches


@dataclass(frozen=True, slots=True, eq=False)
class ForkMetadata:
    """Where every row of a stream sits in its request tree. Values change every round, shapes and addresses never do.

    The stream is ``[trunk_0 | trunk_1 | ... | branches of 0 | branches of 1 | ... | leaves | padding]``; each part is a
    *segment*. Padding exists only at the tail. Three values are inert: an empty segment (its offset repeats), row 0
    where something is read, -1 where something is written or identified.

    Example: one request, trunk of 3, branches of 2 and 1; capacity T=8, S=4, N=4::

        positions        [0 1 2 3 4 3 0 0]  (three equal rows)
        row_segments     [0 0 0 1 1 2 -1 -1]
        segment_offsets  [0 3 5 6 6]
        segment_parents  [-1 0 0 -1]         segment_levels [0 1 1 -1]
        segment_starts   [0 3 3 0]           final_slots    [0 -1 -1 -1]
        readout_rows     [4 5 0 0]

    Attributes:
        capacity: sizes the arrays were laid out for. A model's forward reads none of it but ``depth``.
        arena: all fields (and the token ids) as one int32 tensor: a round is one copy.
        tokens: ``[T]`` token ids; padding 0.
        positions: ``[3, T]`` rotary positions (time, height, width: equal for text). Branches continue at the trunk's
            full length, cached tokens included.
        row_segments: ``[T]`` segment of each row; padding -1.
        segment_offsets: ``[S + 1]`` row boundaries, ``cu_seqlens`` style; the last entry is the number of active rows.
        segment_parents: ``[S]`` segment it forks from; -1 for trunks and unused segments.
        segment_levels: ``[S]`` 0 trunk, 1 branch, 2 leaf; unused -1.
        segment_starts: ``[S]`` tokens before the segment's first row on its own path; for a trunk, the cached length.
        initial_slots: ``[S]`` state-pool slot a trunk starts from; 0, the zero state, for everything fresh.
        final_slots: ``[S]`` scratch slot for the final state, numbered from 0 over segments with children; -1 none.
        save_rows: ``[S, MAX_SAVES]`` stream rows after which the state is saved, ascending; -1 none.
        save_slots: ``[S, MAX_SAVES]`` state-pool slot that save goes to; -1 none.
        segment_pages: ``[S]`` first entry of the segment's pages in ``page_table``; -1 none.
        page_table: ``[G]`` KV page numbers; -1 unused.
        readout_rows: ``[N]`` rows whose final hidden state is read, in depth-first order of the trees (request by
            request, each branch before its leaves, the next branch after them); unused 0.
        schedule: work lists of the GPU kernels, added by a model's forward; None on the host and on the CPU.
    """

    capacity: StreamCapacity
    arena: Tensor
    tokens: Tensor
    positions: Tensor
    row_segments: Tensor
    segment_offsets: Tensor
    segment_parents: Tensor
    segment_levels: Tensor
    segment_starts: Tensor
    initial_slots: Tensor
    final_slots: Tensor
    save_rows: Tensor
    save_slots: Tensor
    segment_pages: Tensor
    page_table: Tensor
    readout_rows: Tensor
    schedule: ForkSchedule | None = None

    @classmethod
    def allocate(
        cls, capacity: StreamCapacity, *, device: torch.device | str = "cpu", pin_memory: bool = False
    ) -> ForkMetadata:
        """An inert stream (no active rows) in one freshly allocated arena, every field 16-byte aligned."""
        layout = _layout(capacity)
        arena = torch.zeros(layout.size, dtype=torch.int32, device=device, pin_memory=pin_memory)
        arena[layout.inert] = -1
        meta = cls.over(arena, capacity)
        meta.row_segments.fill_(-1)
        return meta

    @classmethod
    def pack(
        cls,
        trees: Sequence[TokenTree | TreeLayout],
        *,
        capacity: StreamCapacity | None = None,
        caches: Sequence[TrunkCache] | None = None,
        pin_memory: bool = False,
    ) -> ForkMetadata:
        """Lay out one round on the host.

        Args:
            trees: the round's requests; a ``TreeLayout`` saves working it out again.
            capacity: sizes to lay out for; None takes exactly what the round needs.
            caches: one per request, when trunks resume from or save checkpoints.
            pin_memory: page-locked arena, for an asynchronous copy to a GPU.

        Returns:
            Metadata on the CPU; ``meta.tokens`` holds the token ids in stream order.

        Raises:
            ValueError: the round does not fit the capacity, is deeper than three levels, or names rows it lacks.
        """
        layouts = [tree if isinstance(tree, TreeLayout) else TreeLayout.of(tree) for tree in trees]
        caches = [TrunkCache()] * len(trees) if caches is None else caches
        capacity = capacity or _needed(layouts, caches)
        arena = torch.zeros(_layout(capacity).size, dtype=torch.int32, pin_memory=pin_memory)
        HostArena(arena.numpy(), capacity).pack(layouts, caches)
        return cls.over(arena, capacity)

    @classmethod
    def over(cls, arena: Tensor, capacity: StreamCapacity) -> ForkMetadata:
        """Metadata whose fields are views of an arena that has been written, or will be. ``[arena_size(capacity)]``."""
        views = {
            name: arena[begin : begin + count].view(shape) if len(shape) > 1 else arena[begin : begin + count]
            for name, (begin, count, shape) in _layout(capacity).fields.items()
        }
        return cls(capacity=capacity, arena=arena, schedule=None, **views)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> ForkMetadata:
        """The same metadata on another device: one copy of the arena."""
        return self.over(self.arena.to(device, non_blocking=non_blocking), self.capacity)

    def copy_(self, other: ForkMetadata, *, non_blocking: bool = False) -> None:
        """Overwrite this round with another of the same capacity, in place: one copy."""
        if other.capacity != self.capacity:
            raise ValueError(f"cannot copy a stream of {other.capacity} into one of {self.capacity}")
        self.arena.copy_(other.arena, non_blocking=non_blocking)

    def check(self) -> None:
        """Assert the invariants of a host copy (tests and debugging; never on a device in service)."""
        offsets = self.segment_offsets.tolist()
        parents, levels = self.segment_parents.tolist(), self.segment_levels.tolist()
        starts = self.segment_starts.tolist()
        rows = offsets[-1]
        assert offsets[0] == 0, "a stream starts at row 0"
        assert offsets == sorted(offsets), "offsets never decrease"
        assert rows <= self.capacity.tokens, "active rows fit the capacity"
        for i, (parent, level) in enumerate(zip(parents, levels, strict=True)):
            begin, end = offsets[i], offsets[i + 1]
            assert (parent == -1) == (level < 1), "trunks and unused segments have no parent"
            if parent >= 0:
                assert parent < i, "parents come first"
                assert levels[parent] == level - 1, "a child is one level below its parent"
                assert starts[i] == starts[parent] + offsets[parent + 1] - offsets[parent], "children continue"
            assert self.row_segments[begin:end].tolist() == [i] * (end - begin), "rows name their segment"
            assert self.positions[0, begin:end].tolist() == list(range(starts[i], starts[i] + end - begin))
        assert (self.row_segments[rows:] == -1).all(), "padding belongs to no segment"
        assert (self.tokens[rows:] == 0).all(), "padding reads token 0"
        assert ((self.readout_rows >= 0) & (self.readout_rows < max(rows, 1))).all(), "readouts name active rows"


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where each field lies in an arena: (first element, elements, shape); what of the fields without a row for every
    token is 0, and what is -1, where it is unused; and the arena's size."""

    fields: dict[str, tuple[int, int, tuple[int, ...]]]
    zero: slice
    inert: slice
    size: int


@functools.lru_cache(maxsize=1024)
def _layout(capacity: StreamCapacity) -> _Layout:
    t, s, n, g = capacity.tokens, capacity.segments, capacity.readouts, capacity.pages
    zero: dict[str, tuple[int, ...]] = {
        "tokens": (t,),
        "positions": (3, t),
        "segment_offsets": (s + 1,),
        "segment_starts": (s,),
        "initial_slots": (s,),
        "readout_rows": (n,),
    }
    minus_one: dict[str, tuple[int, ...]] = {
        "row_segments": (t,),
        "segment_parents": (s,),
        "segment_levels": (s,),
        "final_slots": (s,),
        "save_rows": (s, MAX_SAVES),
        "save_slots": (s, MAX_SAVES),
        "segment_pages": (s,),
        "page_table": (g,),
    }
    placed, at = {}, _HEADER
    for name, shape in (zero | minus_one).items():
        count = math.prod(shape)
        placed[name] = (at, count, shape)
        at += -(-count // _ALIGN) * _ALIGN
    zeros = slice(placed["segment_offsets"][0], placed["row_segments"][0])
    return _Layout(placed, zeros, slice(placed["segment_parents"][0], at), at)


def arena_size(capacity: StreamCapacity) -> int:
    """int32 elements of a stream's arena."""
    return _layout(capacity).size


class HostArena:
    """Memory that streams of one capacity are packed into, round after round.

    Args:
        memory: at least ``arena_size(capacity)`` int32 elements.
    """

    def __init__(self, memory: NDArray[np.int32], capacity: StreamCapacity) -> None:
        self.capacity, layout = capacity, _layout(capacity)
        self._view = {
            name: memory[begin : begin + count].reshape(shape) for name, (begin, count, shape) in layout.fields.items()
        }
        self._zero, self._inert = memory[layout.zero], memory[layout.inert]
        self._memory, self._zeros, self._inerts = memory.data, layout.zero, layout.inert
        self._at = {name: begin for name, (begin, _, _) in layout.fields.items()}

    def pack(self, layouts: Sequence[TreeLayout], caches: Sequence[TrunkCache] | None = None) -> None:
        """:meth:`ForkMetadata.pack`; whatever the memory held is overwritten. Without ``caches`` trunks are those of
        ``fresh_caches``."""
        if caches is None:
            if len(layouts) == 1 and layouts[0].num_tokens:
                self._pack_alone(layouts[0])
                return
            caches = fresh_caches(layouts)
        _check_caches(layouts, caches)
        needed, view = _needed(layouts, caches), self._view
        if not self.capacity.holds(needed):
            raise ValueError(f"a round of {needed} does not fit {self.capacity}")
        self._zero[:] = 0
        self._inert[:] = -1
        rows, nodes, requests, reads = _interleaved(layouts)
        t, n = rows.shape[1], nodes.shape[1]
        positions, starts = rows[1], nodes[2]
        resumed = np.array([cache.length for cache in caches], np.int32)
        if resumed.any():
            starts = starts + resumed[requests]
            positions = positions + resumed[requests][rows[2]]
        for name, values, unused in (("tokens", rows[0], 0), ("row_segments", rows[2], -1)):
            view[name][:t] = values
            view[name][t:] = unused
        view["positions"][:, :t] = positions
        view["positions"][:, t:] = 0
        view["segment_offsets"][1 : n + 1] = nodes[0]
        view["segment_offsets"][n + 1 :] = t
        view["segment_levels"][:n] = nodes[1]
        view["segment_starts"][:n] = starts
        view["segment_parents"][:n] = nodes[3]
        view["final_slots"][:n] = nodes[4]
        view["readout_rows"][: len(reads)] = reads

        page = 0
        for i, cache in enumerate(caches):
            if cache.slot:
                view["initial_slots"][i] = cache.slot
            for k, (length, slot) in enumerate(sorted(cache.saves)):
                view["save_rows"][i, k] = view["segment_offsets"][i] + length - cache.length - 1
                view["save_slots"][i, k] = slot
            if cache.pages:
                view["segment_pages"][i] = page
                view["page_table"][page : page + len(cache.pages)] = cache.pages
                page += len(cache.pages)

    def _pack_alone(self, layout: TreeLayout) -> None:
        """One fresh tree, as most rounds have that somebody waits for: the same, by copies of memory, which take
        two thirds of what numpy's assignments take."""
        t, n, reads = layout.num_tokens, layout.num_nodes, layout.num_reads
        pages = num_pages(layout.trunk_length)
        needed = StreamCapacity(max(1, t), n, max(1, reads), pages, max(2, layout.depth))
        if not self.capacity.holds(needed):
            raise ValueError(f"a round of {needed} does not fit {self.capacity}")
        memory, at, (size, segments) = self._memory, self._at, (self.capacity.tokens, self.capacity.segments)
        memory[self._zeros] = _all(0, self._zeros.stop - self._zeros.start)
        memory[self._inerts] = _all(-1, self._inerts.stop - self._inerts.start)
        rows, nodes = (x.data.cast("B").cast("i") for x in (layout.rows, layout.nodes))
        position = at["positions"]
        for begin, values in (
            (at["tokens"], rows[:t]),
            *((position + i * size, rows[t : 2 * t]) for i in range(3)),
        ):
            memory[begin : begin + t] = values
            memory[begin + t : begin + size] = _all(0, size - t)
        begin = at["row_segments"]
        memory[begin : begin + t] = rows[2 * t :]
        memory[begin + t : begin + size] = _all(-1, size - t)
        begin = at["segment_offsets"] + 1
        memory[begin : begin + n] = nodes[:n]
        memory[begin + n : begin + segments] = array("i", [t]) * (segments - n)
        for name, number in (("segment_levels", 1), ("segment_starts", 2), ("segment_parents", 3), ("final_slots", 4)):
            begin = at[name]
            memory[begin : begin + n] = nodes[number * n : (number + 1) * n]
        begin = at["readout_rows"]
        memory[begin : begin + reads] = layout.reads[0].data if reads else _all(0, 0)
        if pages:
            memory[at["segment_pages"]] = 0
            begin = at["page_table"]
            memory[begin : begin + pages] = numbers(pages).data


def _all(value: int, count: int) -> memoryview:
    """So many int32 of one value."""
    return _as_many(value, max(1024, 1 << count.bit_length()))[:count]


@functools.lru_cache(maxsize=64)
def _as_many(value: int, count: int) -> memoryview:
    return memoryview(array("i", [value]) * count)


_Rows: TypeAlias = NDArray[np.int32]


def _interleaved(layouts: Sequence[TreeLayout]) -> tuple[_Rows, _Rows, _Rows, _Rows]:
    """The ``rows`` and ``nodes`` of several trees in one stream, level by level and within a level request by request,
    each node's request, and the readout rows."""
    if len(layouts) == 1:
        (only,) = layouts
        return only.rows, only.nodes, np.zeros(only.num_nodes, np.int32), only.reads[0]
    if not layouts:
        return np.empty((3, 0), np.int32), np.empty((5, 0), np.int32), np.empty(0, np.int32), np.empty(0, np.int32)
    pieces = [
        (level, i, *x.level_rows[level : level + 2], *x.level_nodes[level : level + 2])
        for level in range(max(x.depth for x in layouts))
        for i, x in enumerate(layouts)
        if x.depth > level
    ]
    level, request, row, row_end, node, node_end = np.array(pieces, np.int32).T
    num_rows, num_nodes = row_end - row, node_end - node
    # How much further from the front a piece stands than in its own tree.
    further_row = np.cumsum(num_rows, dtype=np.int32) - num_rows - row
    further_node = np.cumsum(num_nodes, dtype=np.int32) - num_nodes - node
    rows = np.concatenate([layouts[i].rows[:, a:b] for _, i, a, b, _, _ in pieces], axis=1)
    nodes = np.concatenate([layouts[i].nodes[:, a:b] for _, i, _, _, a, b in pieces], axis=1)
    requests = np.repeat(request, num_nodes)
    rows[2] += np.repeat(further_node, num_rows)
    nodes[0] += np.repeat(further_row, num_nodes)
    further = np.zeros((2, MAX_DEPTH, len(layouts)), np.int32)
    further[:, level, request] = further_row, further_node
    nodes[3] += np.where(nodes[1] > 0, further[1, nodes[1] - 1, requests], 0)
    has_children = nodes[4] >= 0
    nodes[4] = np.where(has_children, has_children.cumsum() - 1, -1)
    reads = np.concatenate([x.reads for x in layouts], axis=1)
    read_requests = np.repeat(np.arange(len(layouts)), [len(x.reads[0]) for x in layouts])
    return rows, nodes, requests, reads[0] + further[0, reads[1], read_requests]


def _needed(layouts: Sequence[TreeLayout], caches: Sequence[TrunkCache]) -> StreamCapacity:
    return StreamCapacity(
        tokens=max(1, sum(x.num_tokens for x in layouts)),
        segments=max(1, sum(x.num_nodes for x in layouts)),
        readouts=max(1, sum(x.num_reads for x in layouts)),
        pages=sum(len(cache.pages) for cache in caches),
        depth=max([2, *(x.depth for x in layouts)]),
    )


def _check_caches(layouts: Sequence[TreeLayout], caches: Sequence[TrunkCache]) -> None:
    if len(caches) != len(layouts):
        raise ValueError(f"{len(layouts)} requests but {len(caches)} trunk caches")
    read = {cache.slot for cache in caches if cache.slot}
    written = [slot for cache in caches for _, slot in cache.saves]
    if len(set(written)) < len(written) or not read.isdisjoint(written):
        raise ValueError("no state slot is saved to twice in a round, or saved to while a trunk resumes from it")
    for layout, cache in zip(layouts, caches, strict=True):
        _check_cache(cache, cache.length + layout.trunk_length)


def _check_cache(cache: TrunkCache, total: int) -> None:
    if cache.pages and len(cache.pages) != num_pages(total):
        raise ValueError(f"a trunk of {total} tokens needs {num_pages(total)} pages, got {len(cache.pages)}")
    if cache.length and not (cache.slot and cache.pages):
        raise ValueError("a resumed trunk needs the slot and the pages of its checkpoint")
    if cache.slot and not cache.length:
        raise ValueError("a trunk that resumes nothing starts from the zero state, slot 0")
    if len(cache.saves) > MAX_SAVES:
        raise ValueError(f"a trunk saves at most {MAX_SAVES} checkpoints a round, got {len(cache.saves)}")
    for length, slot in cache.saves:
        if not cache.length < length <= total:
            raise ValueError(f"cannot save after {length} tokens: this round computes {cache.length + 1} to {total}")
        if slot < 1 or slot == cache.slot:
            raise ValueError(f"cannot save into slot {slot}: slot 0 is the zero state, a slot in use is read")
