"""Reference of the fork schedule, in plain torch.

Shapes: T stream rows, S segments, Q readout queries, W conv width, Y chunks, I tiles.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from flide.runtime.tree import MAX_DEPTH

CHUNK = 64  # rows of a chunk of the delta rule


class ForkSchedule(NamedTuple):
    """Where the work of a stream lies: computed on the device once per forward, shared by all layers. All int32.

    Attributes:
        history: ``[S, W - 1]`` what comes before a segment, nearest first: a stream row; -1 for zeros; ``-2 - r`` for
            row r of the window its trunk resumes from.
        root_slots: ``[S]`` state-pool slot the segment's trunk starts from.
        levels: ``[MAX_DEPTH + 1]`` first segment of each level, and the end of the last.
        chunk_offsets: ``[S + 1]`` first chunk of each segment; the last entry counts them.
        chunk_segments: ``[Y]`` segment of each chunk.
        chunk_rows: ``[Y, 2]`` first row and end of each chunk. A trunk's chunks also end wherever its state is saved.
        chunk_saves: ``[Y]`` state-pool slot for the state after the chunk; -1 none.
        tiles: ``[I]`` first row of each tile of query rows; a tile's rows belong to one trunk, or to siblings.
        readout_tiles: ``[Q]`` first query of each tile of readout queries.
        tile_counts: ``[2]`` how many tiles and readout tiles there are.
    """

    history: Tensor
    root_slots: Tensor
    levels: Tensor
    chunk_offsets: Tensor
    chunk_segments: Tensor
    chunk_rows: Tensor
    chunk_saves: Tensor
    tiles: Tensor
    readout_tiles: Tensor
    tile_counts: Tensor


def fork_schedule_reference(
    segment_offsets: Tensor,
    segment_parents: Tensor,
    segment_levels: Tensor,
    initial_slots: Tensor,
    save_rows: Tensor,
    save_slots: Tensor,
    row_segments: Tensor,
    readout_rows: Tensor,
    *,
    conv_width: int,
    query_block: int,
) -> ForkSchedule:
    """The schedule, for tiles of ``query_block`` query rows; entries behind the counts are arbitrary."""
    device, num_segments = segment_offsets.device, segment_parents.shape[0]
    begins, ends, parents = segment_offsets[:-1], segment_offsets[1:], segment_parents
    index = torch.arange(num_segments, device=device, dtype=torch.int32)

    back = torch.arange(1, conv_width, device=device, dtype=torch.int32)[None, :].expand(num_segments, -1)
    history = torch.full_like(back, -1)
    ancestor, root = parents[:, None].expand(-1, conv_width - 1), index
    for _ in range(MAX_DEPTH - 1):
        node = ancestor.clamp(min=0)
        inside = (ancestor >= 0) & (back <= ends[node] - begins[node])
        history = torch.where(inside, ends[node] - back, history)
        back = torch.where(ancestor >= 0, back - (ends[node] - begins[node]), back)
        ancestor = torch.where(inside | (ancestor < 0), -1, parents[node])
        root = torch.where(parents[root] >= 0, parents[root], root)
    root_slots = initial_slots[root]
    resumed = (history == -1) & (back >= 1) & (root_slots[:, None] > 0)
    history = torch.where(resumed, back - conv_width - 1, history)

    cuts = torch.where(save_rows >= 0, save_rows + 1, ends[:, None])
    span_begins = torch.cat([begins[:, None], cuts], 1)
    span_ends = torch.cat([cuts, ends[:, None]], 1)
    counts = (span_ends - span_begins + CHUNK - 1) // CHUNK
    span_offsets = F.pad(counts.flatten().cumsum(0), (1, 0)).to(torch.int32)
    chunks = torch.arange(max_chunks(row_segments.shape[0], counts.numel()), device=device, dtype=torch.int32)
    span = torch.searchsorted(span_offsets, chunks, right=True, out_int32=True) - 1
    span = span.clamp(max=counts.numel() - 1)
    first = span_begins.flatten()[span] + (chunks - span_offsets[span]) * CHUNK
    end = span_ends.flatten()[span]
    saves = F.pad(save_slots, (0, 1), value=-1).flatten()[span]

    is_start = (segment_levels == 0) | ((segment_levels > 0) & (parents != F.pad(parents, (1, 0), value=-1)[:-1]))
    group_begins = torch.where(is_start, begins, 0).cummax(0).values
    low, high = (-(-(x - group_begins) // query_block) for x in (begins, ends))
    tile_offsets = F.pad((high - low).cumsum(0), (1, 0)).to(torch.int32)
    tile = torch.arange(max_tiles(row_segments.shape[0], num_segments, query_block), device=device, dtype=torch.int32)
    owner = (torch.searchsorted(tile_offsets, tile, right=True, out_int32=True) - 1).clamp(max=num_segments - 1)
    tiles = group_begins[owner] + (low[owner] + tile - tile_offsets[owner]) * query_block

    segments = row_segments[readout_rows]
    group = torch.where(segment_levels > 0, num_segments + parents, index)[segments.clamp(min=0)]
    group = torch.where(segments >= 0, group, -1)
    query = torch.arange(group.shape[0], device=device, dtype=torch.int32)
    changed = group != F.pad(group, (1, 0), value=-2)[:-1]
    run = torch.where(changed, query, 0).cummax(0).values
    starts = ((query - run) % query_block == 0) & (group >= 0)
    order = starts.cumsum(0)
    readout_tiles = torch.searchsorted(order, query.long() + 1)

    return ForkSchedule(
        history=history.contiguous(),
        root_slots=root_slots,
        levels=F.pad(torch.stack([(segment_levels == k).sum() for k in range(MAX_DEPTH)]).cumsum(0), (1, 0)).int(),
        chunk_offsets=span_offsets[:: counts.shape[1]].contiguous(),
        chunk_segments=(span // counts.shape[1]).int(),
        chunk_rows=torch.stack([first, torch.minimum(first + CHUNK, end)], 1).int(),
        chunk_saves=torch.where(first + CHUNK >= end, saves, -1).int(),
        tiles=tiles.int(),
        readout_tiles=readout_tiles.int(),
        tile_counts=torch.stack([tile_offsets[-1], order[-1]]).int(),
    )


def max_chunks(num_rows: int, num_spans: int) -> int:
    return num_rows // CHUNK + num_spans


def max_tiles(num_rows: int, num_segments: int, query_block: int) -> int:
    return num_rows // query_block + num_segments
