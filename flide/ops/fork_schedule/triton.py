"""One small launch that computes a stream's schedule; every program repeats the prefix sums it needs."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from flide.ops.fork_schedule.reference import CHUNK, ForkSchedule
from flide.runtime.tree import MAX_DEPTH

PROGRAMS = 32
ROWS = 8  # table entries a program finds at a time


@triton.jit
def _max(a, b):
    return tl.maximum(a, b)


@triton.jit(do_not_specialize=["S", "Q"])
def _fork_schedule_kernel(
    p_offsets,
    p_parents,
    p_levels,
    p_initial,
    p_save_rows,
    p_save_slots,
    p_row_segments,
    p_readout_rows,
    p_history,
    p_roots,
    p_level_starts,
    p_chunk_offsets,
    p_chunk_segments,
    p_chunk_rows,
    p_chunk_saves,
    p_tiles,
    p_readout_tiles,
    p_counts,
    S,
    Q,
    SP: tl.constexpr,
    QP: tl.constexpr,
    W: tl.constexpr,
    SAVES: tl.constexpr,
    L: tl.constexpr,
    BQ: tl.constexpr,
    DEPTH: tl.constexpr,
    B: tl.constexpr,
):
    pid = tl.program_id(0)
    o_s = tl.arange(0, SP)
    m_s = o_s < S
    b_begin = tl.load(p_offsets + o_s, mask=m_s, other=0)
    b_end = tl.load(p_offsets + o_s + 1, mask=m_s, other=0)
    b_parent = tl.load(p_parents + o_s, mask=m_s, other=-1)
    b_level = tl.load(p_levels + o_s, mask=m_s, other=-1)

    # chunks of each segment, cut where a state is saved
    b_chunks = tl.zeros([SP], dtype=tl.int32)
    b_from = b_begin
    for k in tl.static_range(SAVES):
        b_row = tl.load(p_save_rows + o_s * SAVES + k, mask=m_s, other=-1)
        b_to = tl.where(b_row >= 0, b_row + 1, b_end)
        b_chunks += (b_to - b_from + L - 1) // L
        b_from = b_to
    b_chunks += (b_end - b_from + L - 1) // L
    b_chunk_end = tl.cumsum(b_chunks, axis=0)

    # tiles of query rows: cut where another trunk, or other siblings, begin
    b_before = tl.load(p_parents + o_s - 1, mask=m_s & (o_s > 0), other=-1)
    b_is_start = (b_level == 0) | ((b_level > 0) & (b_parent != b_before))
    b_group = tl.associative_scan(tl.where(b_is_start, b_begin, 0), 0, _max)
    b_low = (b_begin - b_group + BQ - 1) // BQ
    b_tile_end = tl.cumsum(tl.where(m_s, (b_end - b_group + BQ - 1) // BQ - b_low, 0), axis=0)

    num_chunks = tl.max(b_chunk_end, axis=0)
    num_tiles = tl.max(b_tile_end, axis=0)
    if pid == 0:
        tl.store(p_chunk_offsets + o_s + 1, b_chunk_end, mask=m_s)
        tl.store(p_chunk_offsets, 0)
        tl.store(p_counts, num_tiles)
        start = 0
        tl.store(p_level_starts, 0)
        for k in tl.static_range(DEPTH):
            start += tl.sum((b_level == k).to(tl.int32), axis=0)
            tl.store(p_level_starts + k + 1, start)
    if pid == 1:
        b_root = o_s
        for _ in tl.static_range(DEPTH - 1):
            b_up = tl.load(p_parents + b_root, mask=m_s, other=-1)
            b_root = tl.where(b_up >= 0, b_up, b_root)
        b_slot = tl.load(p_initial + b_root, mask=m_s, other=0)
        tl.store(p_roots + o_s, b_slot, mask=m_s)
        for k in tl.static_range(1, W):
            b_back = tl.full([SP], k, dtype=tl.int32)
            b_found = tl.full([SP], -1, dtype=tl.int32)
            b_node = b_parent
            for _ in tl.static_range(DEPTH - 1):
                m_node = m_s & (b_node >= 0)
                b_nb = tl.load(p_offsets + b_node, mask=m_node, other=0)
                b_ne = tl.load(p_offsets + b_node + 1, mask=m_node, other=0)
                m_in = m_node & (b_back <= b_ne - b_nb)
                b_found = tl.where(m_in, b_ne - b_back, b_found)
                b_back = tl.where(m_node & (m_in == 0), b_back - (b_ne - b_nb), b_back)
                b_next = tl.load(p_parents + b_node, mask=m_node, other=-1)
                b_node = tl.where(m_node & (m_in == 0), b_next, -1)
            b_found = tl.where((b_found == -1) & (b_slot > 0), b_back - W - 1, b_found)
            tl.store(p_history + o_s * (W - 1) + k - 1, b_found, mask=m_s)
    if pid == 2:
        last_run = 0
        count = 0
        for q in range(0, Q, QP):
            o_q = q + tl.arange(0, QP)
            m_q = o_q < Q
            b_g = _group(p_readout_rows, p_row_segments, p_parents, o_q, m_q, S)
            b_pg = _group(p_readout_rows, p_row_segments, p_parents, o_q - 1, m_q & (o_q > 0), S)
            b_changed = (b_g != b_pg) | (o_q == 0)
            b_run = tl.associative_scan(tl.where(b_changed, o_q, 0), 0, _max)
            b_run = tl.maximum(b_run, last_run)
            m_start = m_q & (b_g >= 0) & ((o_q - b_run) % BQ == 0)
            b_order = count + tl.cumsum(m_start.to(tl.int32), axis=0)
            tl.store(p_readout_tiles + b_order - 1, o_q, mask=m_start)
            count += tl.sum(m_start.to(tl.int32), axis=0)
            last_run = tl.max(b_run, axis=0)
        tl.store(p_counts + 1, count)

    o_b = tl.arange(0, B)
    for base in range(pid * B, num_chunks, tl.num_programs(0) * B):
        o_y = base + o_b
        m_y = o_y < num_chunks
        b_seg, b_local = _owner(o_y, b_chunk_end, b_chunks, m_s)
        b_lo = tl.load(p_offsets + b_seg, mask=m_y, other=0)
        b_stop = tl.load(p_offsets + b_seg + 1, mask=m_y, other=0)
        b_row0 = tl.zeros([B], dtype=tl.int32)
        b_row1 = tl.zeros([B], dtype=tl.int32)
        b_save = tl.full([B], -1, dtype=tl.int32)
        for k in tl.static_range(SAVES + 1):
            b_hi = b_stop
            b_into = tl.full([B], -1, dtype=tl.int32)
            if k < SAVES:
                b_cut = tl.load(p_save_rows + b_seg * SAVES + k, mask=m_y, other=-1)
                b_into = tl.load(p_save_slots + b_seg * SAVES + k, mask=m_y, other=-1)
                b_hi = tl.where(b_cut >= 0, b_cut + 1, b_stop)
            b_n = (b_hi - b_lo + L - 1) // L
            m_in = (b_local >= 0) & (b_local < b_n)
            b_row0 = tl.where(m_in, b_lo + b_local * L, b_row0)
            b_row1 = tl.where(m_in, tl.minimum(b_lo + b_local * L + L, b_hi), b_row1)
            b_save = tl.where(m_in & (b_local == b_n - 1), b_into, b_save)
            b_local -= b_n
            b_lo = b_hi
        tl.store(p_chunk_segments + o_y, b_seg, mask=m_y)
        tl.store(p_chunk_rows + 2 * o_y, b_row0, mask=m_y)
        tl.store(p_chunk_rows + 2 * o_y + 1, b_row1, mask=m_y)
        tl.store(p_chunk_saves + o_y, b_save, mask=m_y)
    b_tiles = tl.where(m_s, (b_end - b_group + BQ - 1) // BQ - b_low, 0)
    for base in range(pid * B, num_tiles, tl.num_programs(0) * B):
        o_i = base + o_b
        m_own = (b_tile_end[None, :] - b_tiles[None, :] <= o_i[:, None]) & (o_i[:, None] < b_tile_end[None, :])
        b_tile_row = b_group + (b_low - b_tile_end + b_tiles) * BQ
        b_of_tile = tl.sum(tl.where(m_own, b_tile_row[None, :], 0), axis=1) + o_i * BQ
        tl.store(p_tiles + o_i, b_of_tile, mask=o_i < num_tiles)


@triton.jit
def _owner(o_y, b_end, b_count, m_s):
    """The segment each entry belongs to, and its place among the segment's entries."""
    b_seg = tl.sum((b_end[None, :] <= o_y[:, None]).to(tl.int32) * m_s[None, :].to(tl.int32), axis=1)
    m_own = (b_end[None, :] - b_count[None, :] <= o_y[:, None]) & (o_y[:, None] < b_end[None, :])
    b_start = tl.sum(tl.where(m_own, b_end[None, :] - b_count[None, :], 0), axis=1)
    return b_seg, o_y - b_start


@triton.jit
def _group(p_readout_rows, p_row_segments, p_parents, o_q, m_q, S):
    """What a readout query shares a tile with: its trunk, or its siblings (numbered behind the segments); -1 nobody."""
    b_row = tl.load(p_readout_rows + o_q, mask=m_q, other=0)
    b_seg = tl.load(p_row_segments + b_row, mask=m_q, other=-1)
    b_parent = tl.load(p_parents + b_seg, mask=m_q & (b_seg >= 0), other=-1)
    return tl.where(b_seg < 0, -1, tl.where(b_parent >= 0, S + b_parent, b_seg))


def fork_schedule_triton(
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
    schedule: ForkSchedule,
) -> ForkSchedule:
    """Fill ``schedule``; arguments as in the reference."""
    num_segments, num_readouts = segment_parents.shape[0], readout_rows.shape[0]
    _fork_schedule_kernel[(PROGRAMS,)](
        segment_offsets,
        segment_parents,
        segment_levels,
        initial_slots,
        save_rows,
        save_slots,
        row_segments,
        readout_rows,
        *schedule,
        num_segments,
        num_readouts,
        SP=triton.next_power_of_2(num_segments),
        QP=min(1024, triton.next_power_of_2(num_readouts)),
        W=conv_width,
        SAVES=save_rows.shape[1],
        L=CHUNK,
        BQ=query_block,
        DEPTH=MAX_DEPTH,
        B=ROWS,
        num_warps=8,
    )
    return schedule
