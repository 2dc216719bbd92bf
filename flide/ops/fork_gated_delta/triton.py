"""Triton kernels of the forked gated delta rule; the formula stands in ``reference.py``.

A *convolution* launch convolves, activates and normalises rows. A *prepare* launch (in large streams one more, for
short chunks) then does all that needs no recurrent state, for every chunk of every segment at once: the gates and the
inverse of each chunk's triangle, which turns the rule inside a chunk into products::

    T = (I + A)^-1 diag(beta);   P = tril(exp(G_i - G_j) Q K^T) T;   W = T^T diag(exp(G_L - G)) K

One *scan* launch per level then runs chunk after chunk, every segment starting from its parent's state by index::

    R = V - diag(exp(G)) K S;   O = diag(exp(G)) Q S + P R;   S <- exp(G_L) S + W^T R

Grids are persistent: programs loop up to a count that lies on the device.

Shapes: T stream rows, S segments, Y chunks, N value heads, E key heads, K key dim, V value dim, L rows of a chunk,
C conv channels, W conv width; KP, VP: K and V padded to powers of two, which tiles must be.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flide.ops.fork_schedule.reference import CHUNK, ForkSchedule
from flide.ops.launch import launch_table, num_programs

SHORT = 16  # rows of a chunk that may have a tile of their own
UNPIPELINED = 64  # columns; for 32, a scan without a pipeline read illegal addresses on sm_90 (Triton 3.6)


@triton.jit
def _silu(b_x, FAST: tl.constexpr):
    """x / (1 + exp(-x)). FAST: the hardware's approximations, 1e-6 relative; two values share a reciprocal, since these
    instructions are what a convolution waits for. (Below -40, whose product of two still fits, sigmoid is that of -40.)
    """
    if FAST:
        b_sigmoid = tl.inline_asm_elementwise(
            "{ .reg .f32 a, b, p; max.ftz.f32 a, $2, 0fC2200000; max.ftz.f32 b, $3, 0fC2200000;"
            " mul.ftz.f32 a, a, 0fBFB8AA3B; mul.ftz.f32 b, b, 0fBFB8AA3B;"
            " ex2.approx.ftz.f32 a, a; ex2.approx.ftz.f32 b, b;"
            " add.ftz.f32 a, a, 0f3F800000; add.ftz.f32 b, b, 0f3F800000;"
            " mul.ftz.f32 p, a, b; rcp.approx.ftz.f32 p, p; mul.ftz.f32 $0, p, b; mul.ftz.f32 $1, p, a; }",
            "=f,=f,f,f",
            [b_x],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
    else:
        b_sigmoid = tl.sigmoid(b_x)
    return b_x * b_sigmoid


@triton.jit
def _exp(b_x, FAST: tl.constexpr):
    """exp(x). FAST: the hardware's approximation, without denormals."""
    if FAST:
        return tl.inline_asm_elementwise(
            "{ .reg .f32 e; mul.ftz.f32 e, $1, 0f3FB8AA3B; ex2.approx.ftz.f32 $0, e; }",
            "=f,f",
            [b_x],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        return tl.exp(b_x)


@triton.jit
def _load(p_x, m_head, PADDED: tl.constexpr):
    """A tile of whole rows; masked only where heads are padded."""
    if PADDED:
        return tl.load(p_x, mask=m_head, other=0.0)
    else:
        return tl.load(p_x)


@triton.jit
def _both(m_rows, m_head, PADDED: tl.constexpr):
    """The mask of a tile of some rows: theirs, and that of a head where heads are padded."""
    if PADDED:
        return m_rows & m_head
    else:
        return m_rows


@triton.jit
def _load_row(p_qkv, row, last, o_c, m_c, S_QKV: tl.constexpr):
    """Some channels of a stream row before ``last``."""
    return tl.load(p_qkv + row.to(tl.int64) * S_QKV + o_c, mask=m_c & (row < last), other=0.0)


@triton.jit
def _load_before(p_qkv, p_window, source, o_c, m_c, S_QKV: tl.constexpr, C: tl.constexpr, HAS_CACHE: tl.constexpr):
    """What comes before a segment: a stream row, zeros (-1), or a row of the window that it resumes from."""
    b_x = tl.load(p_qkv + source.to(tl.int64) * S_QKV + o_c, mask=m_c & (source >= 0), other=0.0).to(tl.float32)
    if HAS_CACHE:
        p_x = p_window + (-2 - source).to(tl.int64) * C + o_c
        b_x += tl.load(p_x, mask=m_c & (source <= -2), other=0.0).to(tl.float32)
    return b_x


@triton.jit
def _load_history(
    p_qkv, p_conv_pool, p_history, p_root_slots, segment, local, row, o_c, m_c,
    S_QKV: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr, HAS_CACHE: tl.constexpr,
):  # fmt: skip
    """The three rows before a row, on its path; its segment's own ones are ``local``."""
    p_window = p_conv_pool
    if HAS_CACHE:
        p_window += tl.load(p_root_slots + segment).to(tl.int64) * (WIDTH - 1) * C
    p_before = p_history + segment * (WIDTH - 1)
    b_1 = tl.zeros(o_c.shape, dtype=tl.float32)
    b_2 = tl.zeros(o_c.shape, dtype=tl.float32)
    b_3 = tl.zeros(o_c.shape, dtype=tl.float32)
    if WIDTH > 1:
        source = tl.where(local >= 1, row - 1, tl.load(p_before, mask=local < 1, other=-1))
        b_1 = _load_before(p_qkv, p_window, source, o_c, m_c, S_QKV, C, HAS_CACHE)
    if WIDTH > 2:
        source = tl.where(local >= 2, row - 2, tl.load(p_before + (1 - local), mask=local < 2, other=-1))
        b_2 = _load_before(p_qkv, p_window, source, o_c, m_c, S_QKV, C, HAS_CACHE)
    if WIDTH > 3:
        source = tl.where(local >= 3, row - 3, tl.load(p_before + (2 - local), mask=local < 3, other=-1))
        b_3 = _load_before(p_qkv, p_window, source, o_c, m_c, S_QKV, C, HAS_CACHE)
    return b_1, b_2, b_3


@triton.jit
def _conv_row(
    p_qkv, p_to, p_conv_pool, p_history, p_root_slots, row, last, segment, own, b_x, b_1, b_2, b_3, w_0, w_1, w_2, w_3,
    scale, o_c, m_c, NORM: tl.constexpr, S_QKV: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr,
    HAS_CACHE: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """One row of segment ``own``, behind one of ``segment``; returns the three rows before the next one."""
    if own != segment:
        b_1, b_2, b_3 = _load_history(
            p_qkv, p_conv_pool, p_history, p_root_slots, own, row * 0, row, o_c, m_c, S_QKV, C, WIDTH, HAS_CACHE
        )
    b_x = b_x.to(tl.float32)
    b_y = _silu(w_0 * b_x + w_1 * b_1 + w_2 * b_2 + w_3 * b_3, FAST)
    if NORM:
        b_y *= (tl.rsqrt(tl.sum(b_y * b_y, axis=1) + 1e-6) * scale)[:, None]
    tl.store(p_to + row.to(tl.int64) * C + o_c, b_y.to(p_to.dtype.element_ty), mask=m_c & (row < last))
    return b_x, b_1, b_2


@triton.jit
def _conv_rows(
    p_qkv, p_to, p_weight, p_conv_pool, p_offsets, p_row_segments, p_history, p_root_slots, row, last, head, scaled,
    channel, HEADS: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, NORM: tl.constexpr,
    S_QKV: tl.constexpr, C: tl.constexpr, WIDTH: tl.constexpr, HAS_CACHE: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """G heads' channels of the rows ``row`` to ``last``, one after another. Each is read once, four rows ahead; the
    three rows before it stay in registers, and where a segment begins they are its history, by index. The first
    ``scaled`` heads are queries."""
    o_h = head + tl.arange(0, G)
    o_d = tl.arange(0, DP)
    o_c = channel + o_h[:, None] * D + o_d[None, :]
    m_c = (o_h < HEADS)[:, None] & (o_d < D)[None, :]
    if (HEADS % G == 0) & (D == DP):
        m_c = tl.full([G, DP], 1, tl.int1)
    n_0 = _load_row(p_qkv, row, last, o_c, m_c, S_QKV)
    n_1 = _load_row(p_qkv, row + 1, last, o_c, m_c, S_QKV)
    n_2 = _load_row(p_qkv, row + 2, last, o_c, m_c, S_QKV)
    n_3 = _load_row(p_qkv, row + 3, last, o_c, m_c, S_QKV)
    p_tap = p_weight + o_c * WIDTH + WIDTH - 1  # of the row itself
    w_0 = tl.load(p_tap, mask=m_c, other=0.0).to(tl.float32)
    w_1 = tl.load(p_tap - 1, mask=m_c & (WIDTH > 1), other=0.0).to(tl.float32)
    w_2 = tl.load(p_tap - 2, mask=m_c & (WIDTH > 2), other=0.0).to(tl.float32)
    w_3 = tl.load(p_tap - 3, mask=m_c & (WIDTH > 3), other=0.0).to(tl.float32)
    scale = tl.where(o_h < scaled, D**-0.5, 1.0)
    segment = tl.load(p_row_segments + row)
    local = row - tl.load(p_offsets + segment)
    b_1, b_2, b_3 = _load_history(
        p_qkv, p_conv_pool, p_history, p_root_slots, segment, local, row, o_c, m_c, S_QKV, C, WIDTH, HAS_CACHE
    )
    while row < last:
        own_0 = tl.load(p_row_segments + row)
        own_1 = tl.load(p_row_segments + row + 1, mask=row + 1 < last, other=own_0)
        own_2 = tl.load(p_row_segments + row + 2, mask=row + 2 < last, other=own_1)
        own_3 = tl.load(p_row_segments + row + 3, mask=row + 3 < last, other=own_2)
        x_0, x_1, x_2, x_3 = n_0, n_1, n_2, n_3
        n_0 = _load_row(p_qkv, row + 4, last, o_c, m_c, S_QKV)
        n_1 = _load_row(p_qkv, row + 5, last, o_c, m_c, S_QKV)
        n_2 = _load_row(p_qkv, row + 6, last, o_c, m_c, S_QKV)
        n_3 = _load_row(p_qkv, row + 7, last, o_c, m_c, S_QKV)
        b_1, b_2, b_3 = _conv_row(
            p_qkv, p_to, p_conv_pool, p_history, p_root_slots, row, last, segment, own_0, x_0, b_1, b_2, b_3,
            w_0, w_1, w_2, w_3, scale, o_c, m_c, NORM, S_QKV, C, WIDTH, HAS_CACHE, FAST,
        )  # fmt: skip
        b_1, b_2, b_3 = _conv_row(
            p_qkv, p_to, p_conv_pool, p_history, p_root_slots, row + 1, last, own_0, own_1, x_1, b_1, b_2, b_3,
            w_0, w_1, w_2, w_3, scale, o_c, m_c, NORM, S_QKV, C, WIDTH, HAS_CACHE, FAST,
        )  # fmt: skip
        b_1, b_2, b_3 = _conv_row(
            p_qkv, p_to, p_conv_pool, p_history, p_root_slots, row + 2, last, own_1, own_2, x_2, b_1, b_2, b_3,
            w_0, w_1, w_2, w_3, scale, o_c, m_c, NORM, S_QKV, C, WIDTH, HAS_CACHE, FAST,
        )  # fmt: skip
        b_1, b_2, b_3 = _conv_row(
            p_qkv, p_to, p_conv_pool, p_history, p_root_slots, row + 3, last, own_2, own_3, x_3, b_1, b_2, b_3,
            w_0, w_1, w_2, w_3, scale, o_c, m_c, NORM, S_QKV, C, WIDTH, HAS_CACHE, FAST,
        )  # fmt: skip
        segment = own_3
        row += 4


@triton.jit(do_not_specialize=["num_segments"])
def _conv_kernel(
    p_qkv,
    p_to,
    p_weight,
    p_conv_pool,
    p_offsets,
    p_row_segments,
    p_history,
    p_root_slots,
    num_segments,
    S_QKV: tl.constexpr,
    C: tl.constexpr,
    N: tl.constexpr,
    E: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    KP: tl.constexpr,
    VP: tl.constexpr,
    GK: tl.constexpr,
    GV: tl.constexpr,
    BR: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_CACHE: tl.constexpr,
    FAST: tl.constexpr,
):
    """silu(conv) of some heads' channels (GK of q and k, GV of v) of BR rows; q and k normalised; float32 inside."""
    UNITS_K: tl.constexpr = (2 * E + GK - 1) // GK
    UNITS: tl.constexpr = UNITS_K + (N + GV - 1) // GV
    unit = tl.program_id(0) % UNITS
    row = tl.program_id(0) // UNITS * BR
    active = tl.load(p_offsets + num_segments)
    if row < active:
        last = tl.minimum(row + BR, active)
        if unit < UNITS_K:
            _conv_rows(
                p_qkv, p_to, p_weight, p_conv_pool, p_offsets, p_row_segments, p_history, p_root_slots, row, last,
                unit * GK, E, 0, 2 * E, GK, K, KP, True, S_QKV, C, WIDTH, HAS_CACHE, FAST,
            )  # fmt: skip
        else:
            _conv_rows(
                p_qkv, p_to, p_weight, p_conv_pool, p_offsets, p_row_segments, p_history, p_root_slots, row, last,
                (unit - UNITS_K) * GV, 0, 2 * E * K, N, GV, V, VP, False, S_QKV, C, WIDTH, HAS_CACHE, FAST,
            )  # fmt: skip


@triton.jit
def _copy_window(p_qkv, s_qkv, p_window, p_to, source, m_w, o_c, m_c, C, PADDED: tl.constexpr):
    """Keep the raw rows ``source`` of some channels: stream rows, zeros (-1), or rows of the window resumed from."""
    p_x = p_qkv + source.to(tl.int64)[:, None] * s_qkv + o_c[None, :]
    b_x = tl.load(p_x, mask=_both((m_w & (source >= 0))[:, None], m_c[None, :], PADDED), other=0.0)
    p_x = p_window + (-2 - source).to(tl.int64)[:, None] * C + o_c[None, :]
    b_x += tl.load(p_x, mask=_both((m_w & (source <= -2))[:, None], m_c[None, :], PADDED), other=0.0)
    tl.store(p_to + o_c[None, :], b_x, mask=_both(m_w[:, None], m_c[None, :], PADDED))


@triton.jit
def _unit_lower_inverse(b_a, dtype: tl.constexpr, PRECISION: tl.constexpr, L: tl.constexpr, LEVELS: tl.constexpr):
    """(I + A)^-1 for strictly lower ``b_a`` [L, L], L = 2^LEVELS, from the inverses of ever larger diagonal blocks.

    With T the inverse of the blocks of 2^k rows and B what of A lies in blocks of twice that size but below those,
    T - T B T is the inverse of the blocks of 2^(k + 1) rows. Every T is a product of contractions, its entries at most
    2, so half precision (the mantissa of tf32) neither overflows nor lets errors grow.
    """
    o_l = tl.arange(0, L)
    m_below = tl.where(o_l % 2 == 1, o_l, -1)[:, None] == tl.where(o_l % 2 == 0, o_l + 1, -2)[None, :]
    b_t = tl.where(o_l[:, None] == o_l[None, :], 1.0, tl.where(m_below, -b_a, 0.0))
    for level in tl.static_range(1, LEVELS):
        o_b = o_l >> level
        m_below = tl.where(o_b % 2 == 1, o_b, -1)[:, None] == tl.where(o_b % 2 == 0, o_b + 1, -2)[None, :]
        b_c = b_t.to(dtype)
        b_x = tl.dot(b_c, tl.where(m_below, b_a, 0.0).to(dtype), input_precision=PRECISION)
        b_t -= tl.dot(b_x.to(dtype), b_c, input_precision=PRECISION)
    return b_t


@triton.jit(do_not_specialize=["num_segments", "num_rows"])
def _prepare_kernel(
    p_qkv,
    p_conv,
    p_a,
    p_b,
    p_A_log,
    p_dt_bias,
    p_conv_pool,
    p_offsets,
    p_chunk_offsets,
    p_chunk_segments,
    p_chunk_rows,
    p_chunk_saves,
    p_history,
    p_root_slots,
    p_final_slots,
    p_w,
    p_p,
    p_decay,
    p_total_decay,
    p_out,
    num_segments,
    num_rows,
    s_qkv,
    s_a,
    s_b,
    C,
    beta_scale,
    N: tl.constexpr,
    E: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    KP: tl.constexpr,
    VP: tl.constexpr,
    L: tl.constexpr,
    ROWS: tl.constexpr,
    LEVELS: tl.constexpr,
    SHORT: tl.constexpr,
    WIDTH: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_CACHE: tl.constexpr,
    PRECISION: tl.constexpr,
    FAST: tl.constexpr,
):
    """All chunks, in tiles of ROWS = 2^LEVELS rows. Where SHORT > 0, chunks of at most SHORT rows are left to a
    launch with ROWS = SHORT: every second chunk of many branches is as short."""
    o_l = tl.arange(0, ROWS)
    o_k = tl.arange(0, KP)
    o_v = tl.arange(0, VP)
    m_k = o_k < K
    m_v = o_v < V
    num_chunks = tl.load(p_chunk_offsets + num_segments)
    work = tl.program_id(0)
    while work < num_chunks * N:  # not a for loop: its loads must not be pipelined across tiles
        i_y = work // N
        i_h = work % N
        i_e = i_h // (N // E)
        i_s = tl.load(p_chunk_segments + i_y)
        begin = tl.load(p_offsets + i_s)
        first = tl.load(p_chunk_rows + 2 * i_y)
        end = tl.load(p_chunk_rows + 2 * i_y + 1)
        is_mine = True
        if SHORT > 0:
            is_mine = (end - first > SHORT) ^ (ROWS == SHORT)
        if is_mine:
            rows = first + o_l
            m_rows = rows < end

            dtype = p_w.dtype.element_ty
            o_row = rows.to(tl.int64) * N + i_h
            m_store = m_rows[:, None]
            m_qk = _both(m_store, m_k[None, :], KP != K)

            b_a = tl.load(p_a + rows.to(tl.int64) * s_a + i_h, mask=m_rows, other=0.0).to(tl.float32)
            b_b = tl.load(p_b + rows.to(tl.int64) * s_b + i_h, mask=m_rows, other=0.0).to(tl.float32)
            b_a += tl.load(p_dt_bias + i_h).to(tl.float32)
            b_softplus = tl.where(b_a > 20.0, b_a, tl.log(1.0 + tl.exp(tl.minimum(b_a, 20.0))))
            b_g = tl.where(m_rows, -tl.exp(tl.load(p_A_log + i_h).to(tl.float32)) * b_softplus, 0.0)
            b_G = tl.cumsum(b_g, axis=0)
            b_total = tl.sum(b_g, axis=0)
            b_beta = tl.where(m_rows, beta_scale * tl.sigmoid(b_b), 0.0)

            tl.store(p_decay + o_row, b_G, mask=m_rows)
            o_c = rows.to(tl.int64)[:, None] * C
            b_k = tl.load(p_conv + o_c + (E + i_e) * K + o_k[None, :], mask=m_qk, other=0.0)
            b_q = tl.load(p_conv + o_c + i_e * K + o_k[None, :], mask=m_qk, other=0.0)
            b_ratio = _exp(tl.minimum(b_G[:, None] - b_G[None, :], 0.0), FAST)
            half: tl.constexpr = tl.float16 if FAST else tl.float32
            b_P = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
            b_P = tl.where(o_l[:, None] >= o_l[None, :], b_P * b_ratio, 0.0).to(half)
            b_A = tl.dot(b_k, tl.trans(b_k), input_precision=PRECISION)
            b_A = tl.where(o_l[:, None] > o_l[None, :], b_A * b_beta[:, None] * b_ratio, 0.0)
            b_T = _unit_lower_inverse(b_A, half, PRECISION, ROWS, LEVELS) * b_beta[None, :]
            b_P = tl.dot(b_P, b_T.to(half), input_precision=PRECISION)
            tl.store(p_p + o_row[:, None] * L + o_l[None, :], b_P.to(dtype), mask=m_store)
            if ROWS < L:  # scans read whole chunks
                o_c = tl.arange(0, L)[None, :]
                b_zero = tl.zeros([ROWS, L], dtype=dtype)
                tl.store(p_p + o_row[:, None] * L + o_c, b_zero, mask=m_store & (o_c >= ROWS))
            save = -1
            if HAS_CACHE:
                save = tl.load(p_chunk_saves + i_y)
            # Whether the state after the chunk is needed.
            is_last = end == tl.load(p_offsets + i_s + 1)
            if (is_last == 0) | (tl.load(p_final_slots + i_s) >= 0) | (save >= 0):
                b_T *= _exp(b_total - b_G, FAST)[:, None]
                b_w = tl.dot(tl.trans(b_T.to(dtype)), b_k, input_precision=PRECISION)
                tl.store(p_w + o_row[:, None] * K + o_k[None, :], b_w.to(dtype), mask=m_qk)
            tl.store(p_total_decay + i_y * N + i_h, b_total)
            if save >= 0:
                p_hist = p_history + i_s * (WIDTH - 1)
                p_window = p_conv_pool + tl.load(p_root_slots + i_s).to(tl.int64) * (WIDTH - 1) * C
                o_w = tl.arange(0, WINDOW)
                m_w = o_w < WIDTH - 1
                source = end - (WIDTH - 1) + o_w
                before = tl.load(p_hist + (begin - 1 - source), mask=m_w & (source < begin), other=-1)
                source = tl.where(source < begin, before, source)
                slot = tl.load(p_chunk_saves + i_y).to(tl.int64)
                p_to = p_conv_pool + (slot * (WIDTH - 1) + o_w)[:, None] * C
                _copy_window(p_qkv, s_qkv, p_window, p_to, source, m_w, 2 * E * K + i_h * V + o_v, m_v, C, VP != V)
                if i_h % (N // E) == 0:
                    _copy_window(p_qkv, s_qkv, p_window, p_to, source, m_w, i_e * K + o_k, m_k, C, KP != K)
                    _copy_window(p_qkv, s_qkv, p_window, p_to, source, m_w, (E + i_e) * K + o_k, m_k, C, KP != K)
        work += tl.num_programs(0)

    if ROWS == L:
        # Rows behind the last segment belong to nobody; their outputs are read by row-wise layers and must be finite.
        active = tl.load(p_offsets + num_segments)
        padding = (num_rows - active) * N
        for work in range(tl.program_id(0) * L, padding, tl.num_programs(0) * L):
            o_x = active.to(tl.int64) * N + work + o_l
            tl.store(
                p_out + o_x[:, None] * V + o_v[None, :],
                tl.zeros([L, VP], dtype=p_out.dtype.element_ty),
                mask=_both((work + o_l < padding)[:, None], m_v[None, :], VP != V),
            )


@triton.jit
def _load_some(p_x, m_some, m_head, MASKED: tl.constexpr, PADDED: tl.constexpr):
    """A tile of which only some is read where MASKED; otherwise there is something everywhere."""
    if MASKED:
        return tl.load(p_x, mask=_both(m_some, m_head, PADDED), other=0.0)
    else:
        return _load(p_x, m_head, PADDED)


@triton.jit
def _outputs(
    p_conv, p_p, p_decay, p_out, row, end, i_h, o_v, b_S, C,
    N: tl.constexpr, E: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr, L: tl.constexpr,
    ROWS: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store the outputs of a chunk of at most ROWS rows, from the rounded state before it; returns R.

    Few instructions are what makes a long trunk fast: unless MASKED, rows behind the chunk's end are read, too (there
    are some), and masked where they would matter; addresses are one 64-bit number and offsets that stay the same.
    """
    o_l = tl.arange(0, ROWS)[:, None]
    o_k = tl.arange(0, KP)[None, :]
    m_k = o_k < K
    m_rows = o_l < end - row
    at = row.to(tl.int64)
    head = at * N + i_h
    p_q = p_conv + at * C + i_h // (N // E) * K
    p_v = p_conv + at * C + 2 * E * K + i_h * V
    o_qk = o_l * C + o_k
    b_k = _load_some(p_q + E * K + o_qk, m_rows, m_k, MASKED, KP != K)
    b_v = _load_some(p_v + o_l * C + o_v[None, :], m_rows, m_rows, MASKED, False)
    b_q = _load_some(p_q + o_qk, m_rows, m_k, MASKED, KP != K)
    b_p = _load_some(p_p + head * L + (o_l * (N * L) + tl.arange(0, ROWS)[None, :]), m_rows, m_rows, MASKED, False)
    b_decay = tl.exp(tl.load(p_decay + head + o_l * N))
    b_r = b_v.to(tl.float32) - tl.dot(b_k, b_S, input_precision=PRECISION) * b_decay
    b_r = tl.where(m_rows, b_r, 0.0).to(b_k.dtype)
    b_o = tl.dot(b_q, b_S, input_precision=PRECISION) * b_decay
    b_o = tl.dot(b_p, b_r, b_o, input_precision=PRECISION).to(p_out.dtype.element_ty)
    tl.store(p_out + head * V + (o_l * (N * V) + o_v[None, :]), b_o, mask=m_rows)
    return b_r


@triton.jit
def _chunk(
    p_conv, p_p, p_w, p_decay, p_out, total_decay, row, end, needs_state, i_h, o_v, b_S, C,
    N: tl.constexpr, E: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr, L: tl.constexpr,
    ROWS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store the outputs of a chunk of at most ROWS rows, and return the state after it if that is needed."""
    b_r = _outputs(
        p_conv, p_p, p_decay, p_out, row, end, i_h, o_v, b_S.to(p_conv.dtype.element_ty), C,
        N, E, K, KP, V, L, ROWS, False, PRECISION,
    )  # fmt: skip
    if needs_state:
        o_l = tl.arange(0, ROWS)[:, None]
        o_k = tl.arange(0, KP)[None, :]
        head = row.to(tl.int64) * N + i_h
        m_w = _both(o_l < end - row, o_k < K, KP != K)
        b_w = tl.load(p_w + head * K + (o_l * (N * K) + o_k), mask=m_w, other=0.0)
        b_S = tl.dot(tl.trans(b_w), b_r, b_S * tl.exp(total_decay), input_precision=PRECISION)
    return b_S


@triton.jit
def _store_state(p_x, b_S, m_k, PADDED: tl.constexpr):
    if PADDED:
        tl.store(p_x, b_S, mask=m_k)
    else:
        tl.store(p_x, b_S)


@triton.jit
def _scan_segment(
    p_conv,
    p_w,
    p_p,
    p_decay,
    p_total_decay,
    p_out,
    p_scratch,
    p_rounded,
    p_state_pool,
    p_chunk_offsets,
    p_offsets,
    p_chunk_rows,
    p_chunk_saves,
    p_initial_slots,
    p_final_slots,
    parent_slot,
    i_s,
    i_h,
    i_v,
    C,
    N: tl.constexpr,
    E: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    L: tl.constexpr,
    SHORT: tl.constexpr,
    LEVEL: tl.constexpr,
    HAS_CACHE: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """BV value columns of one head, through all chunks of a segment."""
    o_v = i_v * BV + tl.arange(0, BV)
    o_k = tl.arange(0, KP)[:, None]
    m_k = o_k < K
    PADDED: tl.constexpr = KP != K
    o_state = o_k * V + o_v[None, :]
    b_S = tl.zeros([KP, BV], dtype=tl.float32)
    if LEVEL > 0:
        b_S = _load(p_scratch + (parent_slot * N + i_h) * K * V + o_state, m_k, PADDED)
    elif HAS_CACHE:
        slot = tl.load(p_initial_slots + i_s).to(tl.int64)
        b_S = _load(p_state_pool + (slot * N + i_h) * K * V + o_state, m_k, PADDED).to(tl.float32)
    first_chunk = tl.load(p_chunk_offsets + i_s)
    end_chunk = tl.load(p_chunk_offsets + i_s + 1)
    begin = tl.load(p_offsets + i_s)
    end = tl.load(p_offsets + i_s + 1)
    final_slot = tl.load(p_final_slots + i_s).to(tl.int64)
    p_total_decay += i_h
    if STAGES > 0:
        for i_y in tl.range(first_chunk, end_chunk, num_stages=STAGES):
            row = begin + (i_y - first_chunk) * L  # not from the table: loads that wait for loads are pipelined less
            if LEVEL == 0 and HAS_CACHE:  # but trunks are cut where they are saved
                row = tl.load(p_chunk_rows + 2 * i_y)
                end = tl.load(p_chunk_rows + 2 * i_y + 1)
            b_S = _chunk(
                p_conv, p_p, p_w, p_decay, p_out, tl.load(p_total_decay + i_y * N), row, end, True, i_h, o_v, b_S, C,
                N, E, K, KP, V, L, L, PRECISION,
            )  # fmt: skip
            if LEVEL == 0 and HAS_CACHE:
                save = tl.load(p_chunk_saves + i_y).to(tl.int64)
                if save >= 0:
                    _store_state(p_state_pool + (save * N + i_h) * K * V + o_state, b_S, m_k, PADDED)
    else:
        row = begin + (end_chunk - 1 - first_chunk) * L
        is_short = (row > begin) & (end - row <= SHORT)
        if is_short:
            end_chunk -= 1
        i_y = first_chunk
        while i_y < end_chunk:
            needs_state = (i_y + 1 < end_chunk) | is_short | (final_slot >= 0)
            b_S = _chunk(
                p_conv, p_p, p_w, p_decay, p_out, tl.load(p_total_decay + i_y * N), begin + (i_y - first_chunk) * L,
                end, needs_state, i_h, o_v, b_S, C, N, E, K, KP, V, L, L, PRECISION,
            )  # fmt: skip
            i_y += 1
        if is_short:
            b_S = _chunk(
                p_conv, p_p, p_w, p_decay, p_out, tl.load(p_total_decay + end_chunk * N), row, end, final_slot >= 0,
                i_h, o_v, b_S, C, N, E, K, KP, V, L, SHORT, PRECISION,
            )  # fmt: skip
    if final_slot >= 0:
        o_final = (final_slot * N + i_h) * K * V + o_state
        _store_state(p_scratch + o_final, b_S, m_k, PADDED)
        _store_state(p_rounded + o_final, b_S.to(p_rounded.dtype.element_ty), m_k, PADDED)


@triton.jit
def _scan_leaf(
    p_conv, p_p, p_decay, p_out, p_rounded, p_offsets, parent_slot, i_s, i_h, i_v, C,
    N: tl.constexpr, E: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    L: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """BV value columns of one head of a segment of one chunk whose state nobody needs.

    Many of these take as long as their reads: the parent's state comes rounded, as products take it, half the bytes,
    and rows behind the end do not.
    """
    o_v = i_v * BV + tl.arange(0, BV)
    o_k = tl.arange(0, KP)[:, None]
    b_S = _load(p_rounded + (parent_slot * N + i_h) * K * V + (o_k * V + o_v[None, :]), o_k < K, KP != K)
    begin = tl.load(p_offsets + i_s)
    end = tl.load(p_offsets + i_s + 1)
    _outputs(p_conv, p_p, p_decay, p_out, begin, end, i_h, o_v, b_S, C, N, E, K, KP, V, L, L, True, PRECISION)


@triton.jit(do_not_specialize=["few"])
def _scan_kernel(
    p_conv,
    p_w,
    p_p,
    p_decay,
    p_total_decay,
    p_out,
    p_scratch,
    p_rounded,
    p_state_pool,
    p_chunk_offsets,
    p_offsets,
    p_chunk_rows,
    p_chunk_saves,
    p_parents,
    p_initial_slots,
    p_final_slots,
    p_levels,
    few,
    C,
    N: tl.constexpr,
    E: tl.constexpr,
    K: tl.constexpr,
    KP: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    BV_FEW: tl.constexpr,
    L: tl.constexpr,
    SHORT: tl.constexpr,
    LEVEL: tl.constexpr,
    HAS_CACHE: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """BV columns a program, or BV_FEW if the level has no more than ``few`` segments. STAGES > 0 pipelines the chunks
    of a segment; branches are many and short: without a pipeline more programs fit on a multiprocessor."""
    first_segment = tl.load(p_levels + LEVEL)
    num_segments = tl.load(p_levels + LEVEL + 1) - first_segment
    work = tl.program_id(0)
    if BV_FEW < BV and num_segments <= few:
        while work < num_segments * N * (V // BV_FEW):
            _scan_segment(
                p_conv, p_w, p_p, p_decay, p_total_decay, p_out, p_scratch, p_rounded, p_state_pool, p_chunk_offsets,
                p_offsets, p_chunk_rows, p_chunk_saves, p_initial_slots, p_final_slots, 0,
                first_segment + work // (V // BV_FEW) // N, work // (V // BV_FEW) % N, work % (V // BV_FEW), C,
                N, E, K, KP, V, BV_FEW, L, SHORT, LEVEL, HAS_CACHE, PRECISION, STAGES,
            )  # fmt: skip
            work += tl.num_programs(0)
    else:
        while work < num_segments * N * (V // BV):
            i_s = first_segment + work // (V // BV) // N
            i_h = work // (V // BV) % N
            i_v = work % (V // BV)
            parent_slot = 0
            is_leaf = False
            if LEVEL > 0:
                parent_slot = tl.load(p_final_slots + tl.load(p_parents + i_s)).to(tl.int64)
            if LEVEL > 0 and STAGES == 0:
                num_chunks = tl.load(p_chunk_offsets + i_s + 1) - tl.load(p_chunk_offsets + i_s)
                is_leaf = (num_chunks == 1) & (tl.load(p_final_slots + i_s) < 0)
            if is_leaf:
                _scan_leaf(
                    p_conv, p_p, p_decay, p_out, p_rounded, p_offsets, parent_slot, i_s, i_h, i_v, C,
                    N, E, K, KP, V, BV, L, PRECISION,
                )  # fmt: skip
            else:
                _scan_segment(
                    p_conv, p_w, p_p, p_decay, p_total_decay, p_out, p_scratch, p_rounded, p_state_pool,
                    p_chunk_offsets, p_offsets, p_chunk_rows, p_chunk_saves, p_initial_slots, p_final_slots,
                    parent_slot, i_s, i_h, i_v, C, N, E, K, KP, V, BV, L, SHORT, LEVEL, HAS_CACHE, PRECISION,
                    STAGES,
                )  # fmt: skip
            work += tl.num_programs(0)


def fork_gated_delta_triton(
    qkv_TC: Tensor,
    a_TN: Tensor,
    b_TN: Tensor,
    conv_weight_CW: Tensor,
    A_log_N: Tensor,
    dt_bias_N: Tensor,
    state_pool: Tensor,
    conv_pool: Tensor,
    scratch: Tensor,
    segment_offsets: Tensor,
    segment_parents: Tensor,
    row_segments: Tensor,
    initial_slots: Tensor,
    final_slots: Tensor,
    schedule: ForkSchedule,
    *,
    num_key_heads: int,
    key_dim: int,
    beta_scale: float,
    depth: int,
) -> Tensor:
    """Launch the kernels; arguments as in ``fork_gated_delta_cached``."""
    num_rows, channels = qkv_TC.shape
    heads, num_segments = A_log_N.shape[0], segment_parents.shape[0]
    value_dim = (channels - 2 * num_key_heads * key_dim) // heads
    width = conv_weight_CW.shape[1]
    has_cache = state_pool.shape[0] > 1  # slot 0 alone is the zero state: nothing to resume or save
    exact = qkv_TC.dtype == torch.float32
    precision = "ieee" if exact else "tf32"
    read_rows = num_rows + CHUNK  # the last chunk is read whole
    conv = qkv_TC.new_empty(read_rows, channels)
    w, p = (qkv_TC.new_empty(read_rows, heads, size) for size in (key_dim, CHUNK))
    out_TNV = qkv_TC.new_empty(num_rows, heads, value_dim)
    # States in scratch, as products take them.
    rounded = scratch if exact else qkv_TC.new_empty(scratch.shape)
    decay = qkv_TC.new_empty(read_rows, heads, dtype=torch.float32)
    total_decay = qkv_TC.new_empty(schedule.chunk_segments.shape[0], heads, dtype=torch.float32)
    padded = {"KP": triton.next_power_of_2(key_dim), "VP": triton.next_power_of_2(value_dim)}
    programs, table = num_programs(qkv_TC.device), launch_table(qkv_TC.device)
    fast = qkv_TC.is_cuda and not exact
    heads_of = {"GK": max(1, table.conv_channels // padded["KP"]), "GV": max(1, table.conv_channels // padded["VP"])}
    units = triton.cdiv(2 * num_key_heads, heads_of["GK"]) + triton.cdiv(heads, heads_of["GV"])
    _conv_kernel[(triton.cdiv(num_rows, table.conv_rows) * units,)](
        qkv_TC,
        conv,
        conv_weight_CW,
        conv_pool,
        segment_offsets,
        row_segments,
        schedule.history,
        schedule.root_slots,
        num_segments,
        S_QKV=qkv_TC.stride(0),
        C=channels,
        N=heads,
        E=num_key_heads,
        K=key_dim,
        V=value_dim,
        **padded,
        **heads_of,
        BR=table.conv_rows,
        WIDTH=width,
        HAS_CACHE=has_cache,
        FAST=fast,
        num_warps=table.conv_warps,
    )
    tiles = [(CHUNK, table.prepare_programs, table.prepare_warps)]
    has_short = num_rows > table.large_rows  # one more launch costs most rounds what it saves
    if has_short:
        tiles.append((SHORT, table.short_programs, table.short_warps))
    for rows, tile_programs, warps in tiles:
        _prepare_kernel[(tile_programs * programs,)](
            qkv_TC,
            conv,
            a_TN,
            b_TN,
            A_log_N,
            dt_bias_N,
            conv_pool,
            segment_offsets,
            schedule.chunk_offsets,
            schedule.chunk_segments,
            schedule.chunk_rows,
            schedule.chunk_saves,
            schedule.history,
            schedule.root_slots,
            final_slots,
            w,
            p,
            decay,
            total_decay,
            out_TNV,
            num_segments,
            num_rows,
            qkv_TC.stride(0),
            a_TN.stride(0),
            b_TN.stride(0),
            channels,
            beta_scale,
            N=heads,
            E=num_key_heads,
            K=key_dim,
            V=value_dim,
            **padded,
            L=CHUNK,
            ROWS=rows,
            LEVELS=rows.bit_length() - 1,
            SHORT=SHORT if has_short else 0,
            WIDTH=width,
            WINDOW=triton.next_power_of_2(width - 1),
            HAS_CACHE=has_cache,
            PRECISION=precision,
            FAST=fast,
            num_warps=warps,
        )

    # In float32 chunks are twice as large: two or three at a time need more shared memory than there is.
    stages = 1 if exact else table.scan_stages
    for level in range(depth):
        # Tiles of columns divide a head; V & -V is the largest power of two that does.
        columns = narrow = min(table.scan_columns, value_dim & -value_dim)
        pipelined = level == 0 or columns < UNPIPELINED
        # A trunk runs long. A single one, or a few, are cut into more programs, as long as none waits for another.
        while level == 0 and narrow > 16 and heads * value_dim // narrow * 2 <= programs:
            narrow //= 2
        few = programs // (heads * value_dim // narrow)
        _scan_kernel[(4 * programs,)](
            conv,
            w,
            p,
            decay,
            total_decay,
            out_TNV,
            scratch,
            rounded,
            state_pool,
            schedule.chunk_offsets,
            segment_offsets,
            schedule.chunk_rows,
            schedule.chunk_saves,
            segment_parents,
            initial_slots,
            final_slots,
            schedule.levels,
            few,
            channels,
            N=heads,
            E=num_key_heads,
            K=key_dim,
            KP=padded["KP"],
            V=value_dim,
            BV=columns,
            BV_FEW=narrow,
            L=CHUNK,
            SHORT=SHORT,
            LEVEL=level,
            HAS_CACHE=has_cache,
            PRECISION=precision,
            STAGES=stages if pipelined else 0,
            num_warps=table.scan_warps,
        )
    return out_TNV
