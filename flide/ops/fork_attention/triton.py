"""Triton kernels of fork attention; the rule stands in ``reference.py``.

A tile holds the query rows of one trunk, or of siblings, for all heads of one key/value head. Its keys are up to three
ranges: the trunk's pages (one dense loop for the whole tile), the parent branch's rows (depth three), and the stream
rows from the first query's own segment to the last query, masked by segment. Grids are persistent.

Shapes: T stream rows, Q query rows, N query heads, M key/value heads, G = N / M, H head dim.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flide.ops.fork_schedule.reference import ForkSchedule
from flide.ops.launch import launch_table, num_programs
from flide.runtime.metadata import PAGE_SIZE

READOUT_SPLITS = 8  # programs that share the keys of a tile of readout queries
LOG2_E = 1.4426950408889634


@triton.jit
def _online_softmax(
    b_q, b_k, b_v, m_visible, b_acc, b_max, b_sum, scale_log2, MASKED: tl.constexpr, PRECISION: tl.constexpr
):
    """One block of keys into the running maximum, sum and weighted values of each query."""
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
    if MASKED:
        b_s = tl.where(m_visible, b_s * scale_log2, float("-inf"))
        b_new = tl.maximum(b_max, tl.max(b_s, axis=1))
        b_base = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_p = tl.exp2(b_s - b_base[:, None])
    else:
        b_new = tl.maximum(b_max, tl.max(b_s, axis=1) * scale_log2)
        b_base = b_new
        b_p = tl.exp2(b_s * scale_log2 - b_base[:, None])
    b_alpha = tl.exp2(b_max - b_base)
    b_sum = b_sum * b_alpha + tl.sum(b_p, axis=1)
    b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * b_alpha[:, None], input_precision=PRECISION)
    return b_acc, b_new, b_sum


@triton.jit
def _load_page(
    p_pool,
    p_pages,
    n,
    limit,
    i_m,
    o_n,
    o_h,
    o_v,
    M: tl.constexpr,
    H: tl.constexpr,
    PAGE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Keys and (columns ``o_v`` of) values of trunk times ``n + o_n``, which lie in one page."""
    page = tl.load(p_pages + n // PAGE).to(tl.int64)
    p_row = p_pool + ((page * 2 * M + i_m) * PAGE + n % PAGE + o_n)[:, None] * H
    p_k = p_row + o_h[None, :]
    p_v = p_row + o_v[None, :] + M * PAGE * H
    if MASKED:
        m_n = (n + o_n < limit)[:, None]
        return tl.load(p_k, mask=m_n, other=0.0), tl.load(p_v, mask=m_n, other=0.0)
    else:
        return tl.load(p_k), tl.load(p_v)


@triton.jit
def _load_rows(p_k, p_v, rows, m_rows, i_m, o_h, o_v, s_k, s_kh, s_v, s_vh):
    """Keys and (columns ``o_v`` of) values of stream rows."""
    o_row = rows.to(tl.int64)[:, None]
    b_k = tl.load(p_k + o_row * s_k + i_m * s_kh + o_h[None, :], mask=m_rows[:, None], other=0.0)
    b_v = tl.load(p_v + o_row * s_v + i_m * s_vh + o_v[None, :], mask=m_rows[:, None], other=0.0)
    return b_k, b_v


@triton.jit
def _share(begin, end, i_split, SPLITS: tl.constexpr, BN: tl.constexpr):
    """The part of a range of keys that one of SPLITS programs does, in whole blocks."""
    share = tl.cdiv(tl.cdiv(end - begin, BN), SPLITS) * BN
    begin += i_split * share
    return begin, tl.minimum(end, begin + share)


@triton.jit(do_not_specialize=["num_queries"])
def _fork_attention_kernel(
    p_q,
    p_k,
    p_v,
    p_pool,
    p_out,
    p_partial,
    p_stats,
    p_query_rows,
    p_tiles,
    p_tile_count,
    p_row_segments,
    p_offsets,
    p_parents,
    p_starts,
    p_segment_pages,
    p_page_table,
    num_queries,
    s_q,
    s_qh,
    s_k,
    s_kh,
    s_v,
    s_vh,
    scale_log2,
    M: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
    H: tl.constexpr,
    BQ: tl.constexpr,
    BN: tl.constexpr,
    PAGE: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    SPLITS: tl.constexpr,
    VALUE_SPLITS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """One tile's attention, or that of one of VALUE_SPLITS parts of the values' columns. With SPLITS > 1 a program does
    its share of each range of keys and leaves the parts to _combine_kernel. With WINDOW > 0 blocks that no query of the
    tile sees are skipped; times count along the path."""
    tl.static_assert(PAGE % BN == 0)  # a block of keys lies in one page
    o_x = tl.arange(0, BQ * GP)
    o_g = o_x % GP
    o_h = tl.arange(0, H)
    o_n = tl.arange(0, BN)
    o_v = tl.arange(0, H // VALUE_SPLITS)
    num_tiles = tl.load(p_tile_count)
    for part in range(tl.program_id(0), num_tiles * M * SPLITS * VALUE_SPLITS, tl.num_programs(0)):
        work = part // VALUE_SPLITS
        if VALUE_SPLITS > 1:
            o_v = part % VALUE_SPLITS * (H // VALUE_SPLITS) + tl.arange(0, H // VALUE_SPLITS)
        i_tile = num_tiles - 1 - work // (M * SPLITS)  # branches, and the last tiles of a trunk, have the most keys
        i_m = work // SPLITS % M
        i_split = work % SPLITS
        first = tl.load(p_tiles + i_tile)
        query = first + o_x // GP
        m_q = query < tl.minimum(first + BQ, num_queries)
        rows = query
        first_row = first
        if HAS_ROWS:
            rows = tl.load(p_query_rows + query, mask=m_q, other=0)
            first_row = tl.load(p_query_rows + first)
        b_segment = tl.load(p_row_segments + rows, mask=m_q, other=-1)
        own = tl.load(p_row_segments + first_row)
        parent = tl.load(p_parents + own)
        # The tile ends where another trunk, or another parent's children, begin.
        b_parent = tl.load(p_parents + b_segment, mask=m_q & (b_segment >= 0), other=-2)
        m_q = m_q & (b_parent == parent) & ((parent >= 0) | (b_segment == own))
        last_row = tl.max(tl.where(m_q, rows, 0), axis=0)
        o_head = i_m * G + o_g
        m_q = m_q & (o_g < G)
        p_query = p_q + query.to(tl.int64)[:, None] * s_q + o_head[:, None] * s_qh + o_h[None, :]
        b_q = tl.load(p_query, mask=m_q[:, None], other=0.0)
        b_acc = tl.zeros([BQ * GP, H // VALUE_SPLITS], dtype=tl.float32)
        b_max = tl.full([BQ * GP], float("-inf"), dtype=tl.float32)
        b_sum = tl.zeros([BQ * GP], dtype=tl.float32)

        root = own
        for _ in tl.static_range(DEPTH - 1):
            up = tl.load(p_parents + root)
            root = tl.where(up >= 0, up, root)
        root_begin = tl.load(p_offsets + root)
        root_start = tl.load(p_starts + root)
        # Blocks that every query of the tile sees whole need no mask.
        limit = root_start + tl.load(p_offsets + root + 1) - root_begin
        dense = limit // BN * BN
        b_time = tl.full([BQ * GP], 1 << 30, dtype=tl.int32)
        if parent < 0:
            limit = root_start + last_row + 1 - root_begin
            dense = (root_start + first_row + 1 - root_begin) // BN * BN
            b_time = root_start + rows - root_begin
            if HAS_ROWS:
                dense = 0  # queries may stand in any order
        p_pages = p_page_table + tl.load(p_segment_pages + root)
        begin = 0
        if WINDOW > 0:
            b_begin = tl.load(p_offsets + b_segment, mask=m_q, other=0)
            b_time = tl.load(p_starts + b_segment, mask=m_q, other=0) + rows - b_begin
            low = tl.min(tl.where(m_q, b_time, 1 << 30), axis=0) - WINDOW + 1  # what the tile's first query sees first
            high = tl.max(tl.where(m_q, b_time, 0), axis=0) - WINDOW + 1
            begin = tl.minimum(tl.maximum(low, 0), limit) // BN * BN
            dense_begin = tl.cdiv(tl.maximum(high, 0), BN) * BN
        if SPLITS > 1:
            begin, limit = _share(begin, limit, i_split, SPLITS, BN)
            dense = tl.minimum(dense, limit)
        dense_begin = tl.maximum(dense_begin, begin) if WINDOW > 0 else begin
        for n in tl.range(dense_begin, dense, BN, num_stages=STAGES):
            b_k, b_v = _load_page(p_pool, p_pages, n, limit, i_m, o_n, o_h, o_v, M, H, PAGE, False)
            b_acc, b_max, b_sum = _online_softmax(
                b_q, b_k, b_v, None, b_acc, b_max, b_sum, scale_log2, False, PRECISION
            )
        n = tl.maximum(dense, begin)
        if WINDOW > 0:
            n = tl.where(dense_begin == begin, n, begin)
        while n < limit:
            b_k, b_v = _load_page(p_pool, p_pages, n, limit, i_m, o_n, o_h, o_v, M, H, PAGE, True)
            m_visible = (n + o_n < limit)[None, :] & (n + o_n[None, :] <= b_time[:, None])
            if WINDOW > 0:
                m_visible = m_visible & (b_time[:, None] - (n + o_n)[None, :] < WINDOW)
            b_acc, b_max, b_sum = _online_softmax(
                b_q, b_k, b_v, m_visible, b_acc, b_max, b_sum, scale_log2, True, PRECISION
            )
            n += BN
            if WINDOW > 0:
                n = tl.where((n == dense_begin) & (n < dense), dense, n)
        if parent >= 0:
            if DEPTH > 2 and parent != root:
                n = tl.load(p_offsets + parent)
                end = tl.load(p_offsets + parent + 1)
                if WINDOW > 0:
                    b_row = b_time + n - tl.load(p_starts + parent)  # of each query, as if it were the parent's
                    n += tl.maximum(low - tl.load(p_starts + parent), 0) // BN * BN
                if SPLITS > 1:
                    n, end = _share(n, end, i_split, SPLITS, BN)
                while n < end:
                    m_n = n + o_n < end
                    b_k, b_v = _load_rows(p_k, p_v, n + o_n, m_n, i_m, o_h, o_v, s_k, s_kh, s_v, s_vh)
                    m_visible = m_n[None, :] & m_q[:, None]
                    if WINDOW > 0:
                        m_visible = m_visible & (b_row[:, None] - (n + o_n)[None, :] < WINDOW)
                    b_acc, b_max, b_sum = _online_softmax(
                        b_q, b_k, b_v, m_visible, b_acc, b_max, b_sum, scale_log2, True, PRECISION
                    )
                    n += BN
            n = tl.load(p_offsets + own)
            if WINDOW > 0:
                n += tl.maximum(tl.min(tl.where(m_q, rows, last_row), axis=0) - WINDOW + 1 - n, 0) // BN * BN
            end = last_row + 1
            if SPLITS > 1:
                n, end = _share(n, end, i_split, SPLITS, BN)
            while n < end:
                m_n = n + o_n < end
                b_key_segment = tl.load(p_row_segments + n + o_n, mask=m_n, other=-2)
                b_k, b_v = _load_rows(p_k, p_v, n + o_n, m_n, i_m, o_h, o_v, s_k, s_kh, s_v, s_vh)
                m_visible = (b_key_segment[None, :] == b_segment[:, None]) & ((n + o_n)[None, :] <= rows[:, None])
                if WINDOW > 0:
                    m_visible = m_visible & (rows[:, None] - (n + o_n)[None, :] < WINDOW)
                b_acc, b_max, b_sum = _online_softmax(
                    b_q, b_k, b_v, m_visible, b_acc, b_max, b_sum, scale_log2, True, PRECISION
                )
                n += BN
        o_out = query.to(tl.int64) * M * G + o_head
        if SPLITS == 1:
            p_o = p_out + o_out[:, None] * H + o_v[None, :]
            tl.store(p_o, (b_acc / b_sum[:, None]).to(p_out.dtype.element_ty), mask=m_q[:, None])
        else:
            o_out += i_split.to(tl.int64) * num_queries * M * G
            tl.store(p_partial + o_out[:, None] * H + o_v[None, :], b_acc, mask=m_q[:, None])
            m_q = m_q & (part % VALUE_SPLITS == 0)
            tl.store(p_stats + 2 * o_out, b_max, mask=m_q)
            tl.store(p_stats + 2 * o_out + 1, b_sum, mask=m_q)


@triton.jit(do_not_specialize=["num_segments", "num_queries"])
def _combine_kernel(
    p_partial,
    p_stats,
    p_out,
    p_query_rows,
    p_offsets,
    num_segments,
    num_queries,
    N: tl.constexpr,
    H: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """The parts of one query head put together; zeros for queries that belong to nobody."""
    o_out = tl.program_id(0).to(tl.int64)
    o_h = tl.arange(0, H)
    o_part = tl.arange(0, SPLITS) * (num_queries * N).to(tl.int64) + o_out
    # All loads at once: what nobody wrote is only dropped afterwards.
    b_acc = tl.load(p_partial + o_part[:, None] * H + o_h[None, :])
    b_max = tl.load(p_stats + 2 * o_part)
    b_sum = tl.load(p_stats + 2 * o_part + 1)
    active = tl.load(p_query_rows + o_out // N) < tl.load(p_offsets + num_segments)
    top = tl.max(b_max, axis=0)
    b_weight = tl.exp2(b_max - top)
    b_out = tl.sum(b_acc * b_weight[:, None], axis=0) / tl.sum(b_sum * b_weight, axis=0)
    b_out = tl.where(active, b_out, 0.0)
    tl.store(p_out + o_out * H + o_h, b_out.to(p_out.dtype.element_ty))


@triton.jit(do_not_specialize=["num_rows", "num_segments", "num_queries"])
def _write_pages_kernel(
    p_k,
    p_v,
    p_pool,
    p_out,
    p_row_segments,
    p_offsets,
    p_parents,
    p_starts,
    p_segment_pages,
    p_page_table,
    num_rows,
    num_segments,
    num_queries,
    s_k,
    s_kh,
    s_v,
    s_vh,
    M: tl.constexpr,
    N: tl.constexpr,
    H: tl.constexpr,
    PAGE: tl.constexpr,
    B: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    WRITE: tl.constexpr,
):
    """With WRITE, new rows of trunks into their pages; zeros into the output of rows that belong to nobody."""
    o_b = tl.arange(0, B)
    o_h = tl.arange(0, H)
    num_trunk_blocks = (num_rows + B - 1) // B if WRITE else 0
    for work in range(tl.program_id(0), num_trunk_blocks * M, tl.num_programs(0)):
        rows = work // M * B + o_b
        i_m = work % M
        b_segment = tl.load(p_row_segments + rows, mask=rows < num_rows, other=-1)
        m_rows = b_segment >= 0
        m_rows = m_rows & (tl.load(p_parents + b_segment, mask=m_rows, other=0) < 0)
        if tl.max(m_rows.to(tl.int32), axis=0) > 0:
            b_begin = tl.load(p_offsets + b_segment, mask=m_rows, other=0)
            b_time = tl.load(p_starts + b_segment, mask=m_rows, other=0) + rows - b_begin
            b_first = tl.load(p_segment_pages + b_segment, mask=m_rows, other=0)
            b_page = tl.load(p_page_table + b_first + b_time // PAGE, mask=m_rows, other=0).to(tl.int64)
            b_k, b_v = _load_rows(p_k, p_v, rows, m_rows, i_m, o_h, o_h, s_k, s_kh, s_v, s_vh)
            p_to = p_pool + ((b_page * 2 * M + i_m) * PAGE + b_time % PAGE)[:, None] * H + o_h[None, :]
            tl.store(p_to, b_k, mask=m_rows[:, None])
            tl.store(p_to + M * PAGE * H, b_v, mask=m_rows[:, None])
    if not HAS_ROWS:
        active = tl.load(p_offsets + num_segments)
        for block in range(active // B + tl.program_id(0), (num_queries + B - 1) // B, tl.num_programs(0)):
            query = block * B + o_b
            m_q = (query < num_queries) & (query >= active)
            for i_n in range(N):
                p_o = p_out + (query.to(tl.int64) * N + i_n)[:, None] * H + o_h[None, :]
                tl.store(p_o, tl.zeros([B, H], dtype=p_out.dtype.element_ty), mask=m_q[:, None])


def combine_warps(head_dim: int) -> int:
    return max(1, head_dim // 256)


def fork_attention_triton(
    query_QNH: Tensor,
    key_TMH: Tensor,
    value_TMH: Tensor,
    kv_pool: Tensor,
    query_rows: Tensor | None,
    row_segments: Tensor,
    segment_offsets: Tensor,
    segment_parents: Tensor,
    segment_starts: Tensor,
    segment_pages: Tensor,
    page_table: Tensor,
    schedule: ForkSchedule,
    *,
    scale: float,
    depth: int,
    window: int = 0,
    write: bool = True,
) -> Tensor:
    """Launch the kernels; arguments as in ``fork_attention_paged``."""
    num_queries, num_heads, head_dim = query_QNH.shape
    num_rows, num_kv_heads = key_TMH.shape[:2]
    group = num_heads // num_kv_heads
    has_rows = query_rows is not None
    out_QNH = query_QNH.new_empty(query_QNH.shape)
    programs = num_programs(query_QNH.device)
    table = launch_table(query_QNH.device).attention_of(head_dim)
    # Queries that are read out are few and have many keys. The number of parts must not depend on the round.
    splits = READOUT_SPLITS if has_rows else 1
    parts = (splits, num_queries, num_heads) if splits > 1 else (0, 0, 0)
    partial = query_QNH.new_empty(*parts, head_dim, dtype=torch.float32)
    stats = query_QNH.new_empty(*parts, 2, dtype=torch.float32)
    strides = (key_TMH.stride(0), key_TMH.stride(1), value_TMH.stride(0), value_TMH.stride(1))
    if write or not has_rows:
        _write_pages_kernel[(2 * programs,)](
            key_TMH,
            value_TMH,
            kv_pool,
            out_QNH,
            row_segments,
            segment_offsets,
            segment_parents,
            segment_starts,
            segment_pages,
            page_table,
            num_rows,
            segment_parents.shape[0],
            num_queries,
            *strides,
            M=num_kv_heads,
            N=num_heads,
            H=head_dim,
            PAGE=PAGE_SIZE,
            B=16,
            HAS_ROWS=has_rows,
            WRITE=write,
            num_warps=4,
        )
    _fork_attention_kernel[(programs,)](
        query_QNH,
        key_TMH,
        value_TMH,
        kv_pool,
        out_QNH,
        partial,
        stats,
        query_rows if has_rows else row_segments,
        schedule.readout_tiles if has_rows else schedule.tiles,
        schedule.tile_counts[int(has_rows) :],
        row_segments,
        segment_offsets,
        segment_parents,
        segment_starts,
        segment_pages,
        page_table,
        num_queries,
        query_QNH.stride(0),
        query_QNH.stride(1),
        *strides,
        scale * LOG2_E,
        M=num_kv_heads,
        G=group,
        GP=triton.next_power_of_2(group),
        H=head_dim,
        BQ=table.query_block(group),
        BN=table.key_block,
        PAGE=PAGE_SIZE,
        HAS_ROWS=has_rows,
        SPLITS=splits,
        VALUE_SPLITS=table.value_splits,
        DEPTH=depth,
        PRECISION="ieee" if query_QNH.dtype == torch.float32 else "tf32",
        STAGES=table.stages,
        WINDOW=window,
        num_warps=table.warps,
    )
    if splits > 1:
        _combine_kernel[(num_queries * num_heads,)](
            partial,
            stats,
            out_QNH,
            query_rows,
            segment_offsets,
            segment_parents.shape[0],
            num_queries,
            N=num_heads,
            H=head_dim,
            SPLITS=splits,
            num_warps=combine_warps(head_dim),
        )
    return out_QNH
