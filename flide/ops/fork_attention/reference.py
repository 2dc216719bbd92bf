"""Reference of fork attention: the oracle of the kernels, the CPU path and the training path.

Shapes: Q query rows, T stream rows, L keys of one path, N query heads, M key/value heads, R = N / M, H head dim.

A query in row t of its path sees key t' iff the key's segment is the query's own or an ancestor of it, t' <= t, and,
for a sliding window W > 0, t - t' < W. Distances are measured along the path, never between stream rows.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from flide.ops.segments import Segment, read_segments

QUERY_BLOCK = 512  # queries at a time; fewer where they would have more scores than
MOST_SCORES = 8 << 20


def fork_attention_reference(
    query_QNH: Tensor,
    key_TMH: Tensor,
    value_TMH: Tensor,
    query_rows: Tensor | None,
    segment_offsets: Tensor,
    segment_parents: Tensor,
    *,
    scale: float,
    window: int,
    segment_starts: Tensor | None = None,
    kv_pool: Tensor | None = None,
    segment_pages: Tensor | None = None,
    page_table: Tensor | None = None,
    write: bool = True,
) -> Tensor:
    """Attention of every query row over its own path; see the ops in ``fork_attention/__init__.py`` for the arguments.

    With ``kv_pool`` ([pages, 2, M, PAGE, H]) trunks, cached part and new, are read from their pages; their new keys and
    values are written there first, if ``write``. Computes in float32 (float64 for float64 inputs).
    """
    segments = read_segments(segment_offsets, segment_parents)
    starts = [0] * len(segments) if segment_starts is None else segment_starts.tolist()
    pages = None
    if kv_pool is not None:
        assert segment_pages is not None
        assert page_table is not None
        pages = _Pages(kv_pool, segment_pages.tolist(), page_table.tolist())
        for i, s in enumerate(segments):
            if write and s.level == 0 and len(s):
                pages.write(i, starts[i], key_TMH[s.begin : s.end], value_TMH[s.begin : s.end])

    out_QNH = query_QNH.new_zeros(query_QNH.shape)
    out_rows, outs = [], []
    for index, where, rows in _queries_by_segment(segments, query_rows, query_QNH.shape[0]):
        key_LMH, value_LMH = _path_keys(segments, index, starts, key_TMH, value_TMH, pages)
        own = segments[index]
        position_of_own_begin = key_LMH.shape[0] - len(own)
        time_Q = rows - own.begin + position_of_own_begin
        most = max(32, min(QUERY_BLOCK, MOST_SCORES // (query_QNH.shape[1] * max(1, key_LMH.shape[0]))))
        for block in torch.arange(len(time_Q)).split(most):
            o_QNH = _attend(query_QNH[where[block]], key_LMH, value_LMH, time_Q[block], scale, window)
            if o_QNH.requires_grad:
                out_rows.append(where[block])
                outs.append(o_QNH)
            else:  # what is kept between blocks of growing size would leave the memory of each in pieces
                out_QNH[where[block].to(out_QNH.device)] = o_QNH.to(out_QNH.dtype)
    if not outs:
        return out_QNH
    return out_QNH.index_copy(0, torch.cat(out_rows).to(query_QNH.device), torch.cat(outs).to(query_QNH.dtype))


def _attend(query_QNH: Tensor, key_LMH: Tensor, value_LMH: Tensor, time_Q: Tensor, scale: float, window: int) -> Tensor:
    """Softmax attention of queries at path times ``time_Q`` over keys at times 0..L-1."""
    first = max(0, int(time_Q.min()) - window + 1) if window > 0 else 0
    last = int(time_Q.max()) + 1
    query = _upcast(query_QNH).unflatten(1, (key_LMH.shape[1], -1))
    key, value = _upcast(key_LMH[first:last]), _upcast(value_LMH[first:last])
    distance_QL = (time_Q[:, None] - torch.arange(first, last)[None, :]).to(query.device)
    visible_QL = distance_QL >= 0
    if window > 0:
        visible_QL &= distance_QL < window
    scores_MRQL = torch.einsum("qmrh,lmh->mrql", query, key) * scale
    weights_MRQL = scores_MRQL.masked_fill(~visible_QL, float("-inf")).softmax(-1)
    return torch.einsum("mrql,lmh->qmrh", weights_MRQL, value).flatten(1, 2)


def _queries_by_segment(
    segments: list[Segment], query_rows: Tensor | None, num_queries: int
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(segment, indices into the query tensor, their stream rows) for every segment that has queries."""
    rows = torch.arange(num_queries) if query_rows is None else query_rows.cpu().long()
    ends = torch.tensor([s.end for s in segments])
    owner = torch.searchsorted(ends, rows, right=True)  # padding rows lie past the last end
    for index in owner.unique().tolist():
        if index < len(segments):
            where = (owner == index).nonzero()[:, 0]
            yield index, where, rows[where]


def _path_keys(
    segments: list[Segment], index: int, starts: list[int], key_TMH: Tensor, value_TMH: Tensor, pages: _Pages | None
) -> tuple[Tensor, Tensor]:
    keys, values = [], []
    for i in segments[index].path:
        s = segments[i]
        if s.level == 0 and pages is not None:
            key, value = pages.read(i, starts[i] + len(s))
            keys.append(key)
            values.append(value)
        elif s.level == 0 and starts[i]:
            raise ValueError("a trunk that resumes from a checkpoint needs a KV pool")
        else:
            keys.append(key_TMH[s.begin : s.end])
            values.append(value_TMH[s.begin : s.end])
    return torch.cat(keys), torch.cat(values)


class _Pages:
    """Reads and writes one trunk's keys and values through the page table."""

    def __init__(self, pool: Tensor, segment_pages: list[int], page_table: list[int]) -> None:
        self.pool, self.segment_pages, self.page_table = pool, segment_pages, page_table
        self.page_size = pool.shape[3]

    def _locate(self, segment: int, begin: int, end: int) -> tuple[Tensor, Tensor]:
        first = self.segment_pages[segment]
        if begin < end and first < 0:
            raise ValueError("a trunk needs KV pages when the layer has a KV pool")
        time = torch.arange(begin, end)
        table = torch.tensor(self.page_table, dtype=torch.long)
        return table[first + time // self.page_size].to(self.pool.device), (time % self.page_size).to(self.pool.device)

    def write(self, segment: int, start: int, key_TMH: Tensor, value_TMH: Tensor) -> None:
        page, slot = self._locate(segment, start, start + key_TMH.shape[0])
        self.pool[page, 0, :, slot] = key_TMH.to(self.pool.dtype)
        self.pool[page, 1, :, slot] = value_TMH.to(self.pool.dtype)

    def read(self, segment: int, length: int) -> tuple[Tensor, Tensor]:
        page, slot = self._locate(segment, 0, length)
        return self.pool[page, 0, :, slot], self.pool[page, 1, :, slot]


def _upcast(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
