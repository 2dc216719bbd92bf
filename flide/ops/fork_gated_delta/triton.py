"""Triton kernels of the forked gated delta rule; the formula stands in ``reference.py``.

One launch convolves, activates and normalises all rows. One *prepare* launch then does all that needs no recurrent
state, for every chunk of every segment at once: the gates and the inverse of each chunk's triangle, which turns the
rule inside a chunk into products::

    T = (I + A)^-1;   W = T diag(beta exp(G)) K;   U = T diag(beta) V;   P = tril(exp(G_i - G_j) Q K^T)

One *scan* launch per level then runs chunk after chunk, every segment starting from its parent's state by index::

    D = U - W S;   O = diag(exp(G)) Q S + P D;   S <- exp(G_L) S + K^T diag(exp(G_L - G)) D

Grids are persistent: programs loop up to a count that lies on the device.

Shapes: T stream rows, S segments, Y chunks, N value heads, E key heads, K key dim, V value dim, L rows of a chunk,
C conv channels, W conv width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flide.ops.fork_schedule.reference import CHUNK, ForkSchedule
from flide.ops.launch import launch_table, num_programs

FEW_SEGMENTS = 64
BLOCK = 16  # diagonal blocks of the triangle, inverted by powers


@triton.jit
def _silu(b_x, FAST: tl.constexpr):
    """x / (1 + exp(-x)). FAST: the hardware's approximations, 1e-6 relative, a third of the instructions."""
    if FAST:
        b_sigmoid = tl.inline_asm_elementwise(
            "{ .reg .f32 e; mul.ftz.f32 e, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 e, e; add.ftz.f32 e, e, 0f3F800000;"
            " rcp.approx.ftz.f32 $0, e; }",
            "=f,f",
            [b_x],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        b_sigmoid = tl.sigmoid(b_x)
    return b_x * b_sigmoid


@triton.jit
def _conv_silu(
    p_qkv,
    s_qkv,
    p_weight,
    p_history,
    p_window,
    C,
    rows,
    local,
    m_rows,
    o_c,
    WIDTH: tl.constexpr,
    HAS_CACHE: tl.constexpr,
    FAST: tl.constexpr,
):
    """silu(conv) of some channels ``o_c`` of a chunk's rows, float32; history by index where the segment begins."""
    b_y = tl.zeros([rows.shape[0], o_c.shape[0]], dtype=tl.float32)
    for lag in tl.static_range(WIDTH):
        source = rows - lag
        m_source = m_rows
        if lag > 0:
            m_before = m_rows & (local < lag)
            before = tl.load(p_history + (lag - 1 - local), mask=m_before, other=-1)
            source = tl.where(local < lag, before, source)
            m_source = m_rows & (source >= 0)
        p_x = p_qkv + source.to(tl.int64)[:, None] * s_qkv + o_c[None, :]
        b_x = tl.load(p_x, mask=m_source[:, None], other=0.0).to(tl.float32)
        if HAS_CACHE and lag > 0:
            m_cached = m_rows & (source <= -2)
            p_cached = (p_window + (-2 - source).to(tl.int64) * C)[:, None] + o_c[None, :]
            b_x += tl.load(p_cached, mask=m_cached[:, None], other=0.0).to(tl.float32)
        b_weight = tl.load(p_weight + o_c * WIDTH + (WIDTH - 1 - lag)).to(tl.float32)
        b_y += b_x * b_weight[None, :]
    return _silu(b_y, FAST)


@triton.jit
def _conv_store(
    p_qkv,
    s_qkv,
    p_to,
    p_weight,
    p_window,
    C,
    rows,
    local,
    m_rows,
    p_before,
    channel,
    scale,
    D: tl.constexpr,
    NORM: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_CACHE: tl.constexpr,
    FAST: tl.constexpr,
):
    """Convolve one head's channels of some rows, normalise them for q and k, and store them."""
    o_c = channel + tl.arange(0, D)
    b_y = _conv_silu(p_qkv, s_qkv, p_weight, p_before, p_window, C, rows, local, m_rows, o_c, WIDTH, HAS_CACHE, FAST)
    if NORM:
        b_y *= (tl.rsqrt(tl.sum(b_y * b_y, axis=1) + 1e-6) * scale)[:, None]
    p_y = p_to + rows.to(tl.int64)[:, None] * C + o_c[None, :]
    tl.store(p_y, b_y.to(p_to.dtype.element_ty), mask=m_rows[:, None])


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
    s_qkv,
    C,
    N: tl.constexpr,
    E: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BR: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_CACHE: tl.constexpr,
    FAST: tl.constexpr,
):
    UNITS: tl.constexpr = 2 * E + N
    active = tl.load(p_offsets + num_segments)
    work = tl.program_id(0)
    while work < tl.cdiv(active, BR) * UNITS:
        unit = work % UNITS
        rows = work // UNITS * BR + tl.arange(0, BR)
        m_rows = rows < active
        b_segment = tl.load(p_row_segments + rows, mask=m_rows, other=0)
        local = rows - tl.load(p_offsets + b_segment)
        p_before = p_history + b_segment * (WIDTH - 1)
        p_window = p_conv_pool + rows * 0
        if HAS_CACHE:
            p_window += tl.load(p_root_slots + b_segment).to(tl.int64) * (WIDTH - 1) * C
        if unit < 2 * E:
            scale = tl.where(unit < E, K**-0.5, 1.0)
            _conv_store(
                p_qkv,
                s_qkv,
                p_to,
                p_weight,
                p_window,
                C,
                rows,
                local,
                m_rows,
                p_before,
                unit * K,
                scale,
                K,
                True,
                WIDTH,
                HAS_CACHE,
                FAST,
            )
        else:
            _conv_store(
                p_qkv,
                s_qkv,
                p_to,
                p_weight,
                p_window,
                C,
                rows,
                local,
                m_rows,
                p_before,
                2 * E * K + (unit - 2 * E) * V,
                1.0,
                V,
                False,
                WIDTH,
                HAS_CACHE,
                FAST,
            )
        work += tl.num_programs(0)


@triton.jit
def _copy_window(p_qkv, s_qkv, p_window, p_to, source, m_w, o_c, C):
    """Keep the raw rows ``source`` of some channels: stream rows, zeros (-1), or rows of the window resumed from."""
    p_x = p_qkv + source.to(tl.int64)[:, None] * s_qkv + o_c[None, :]
    b_x = tl.load(p_x, mask=(m_w & (source >= 0))[:, None], other=0.0)
    p_x = p_window + (-2 - source).to(tl.int64)[:, None] * C + o_c[None, :]
    b_x += tl.load(p_x, mask=(m_w & (source <= -2))[:, None], other=0.0)
    tl.store(p_to + o_c[None, :], b_x, mask=m_w[:, None])


@triton.jit
def _unit_lower_inverse(b_a, PRECISION: tl.constexpr, EXACT: tl.constexpr, L: tl.constexpr, B: tl.constexpr):
    """(I + A)^-1 for strictly lower ``b_a`` [L, L], by products: first of its B x B diagonal blocks, then of the rest.

    A strictly lower block of order 16 has (I + A)^-1 = (I - A)(I + A^2)(I + A^4)(I + A^8). With D the inverse of the
    block diagonal and A' the part below it, (I + A)^-1 = (I + D A')^-1 D, and X = D A' is nilpotent of order L / B = 4,
    so that (I + X)^-1 = (I - X)(I + X^2). The powers inside a block can grow (to 6435 for equal keys that never decay)
    and are multiplied more exactly.
    """
    NB: tl.constexpr = L // B
    o_b = tl.arange(0, NB)
    o_i = tl.arange(0, B)
    m_diagonal = (o_b[:, None] == o_b[None, :])[:, None, :, None]
    # Inside a block A is nilpotent of order 16: (I + A)^-1 = (I - A)(I + A^2)(I + A^4)(I + A^8).
    b_n = tl.sum(tl.where(m_diagonal, tl.reshape(b_a, (NB, B, NB, B)), 0.0), axis=2)
    b_eye = (o_i[:, None] == o_i[None, :])[None, :, :].to(tl.float32)
    b_inverse = b_eye - b_n
    b_n = tl.dot(b_n, b_n, input_precision=EXACT)
    b_inverse += tl.dot(b_inverse, b_n, input_precision=EXACT)
    b_n = tl.dot(b_n, b_n, input_precision=EXACT)
    b_inverse += tl.dot(b_inverse, b_n, input_precision=EXACT)
    b_n = tl.dot(b_n, b_n, input_precision=EXACT)
    b_inverse += tl.dot(b_inverse, b_n, input_precision=EXACT)
    b_d = tl.reshape(tl.where(m_diagonal, b_inverse[:, :, None, :], 0.0), (L, L))
    o_l = tl.arange(0, L)
    b_below = tl.where((o_l[:, None] // B) > (o_l[None, :] // B), b_a, 0.0)
    b_x = tl.dot(b_d, b_below, input_precision=PRECISION)
    b_x2 = tl.dot(b_x, b_x, input_precision=PRECISION)
    b_y = b_d + tl.dot(b_x2, b_d, input_precision=PRECISION)
    return b_y - tl.dot(b_x, b_y, input_precision=PRECISION)


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
    p_w,
    p_u,
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
    L: tl.constexpr,
    B: tl.constexpr,
    WIDTH: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_CACHE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    o_l = tl.arange(0, L)
    o_k = tl.arange(0, K)
    o_v = tl.arange(0, V)
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
        rows = first + o_l
        m_rows = rows < end

        dtype = p_w.dtype.element_ty
        o_row = rows.to(tl.int64) * N + i_h
        m_store = m_rows[:, None]

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
        b_k = tl.load(p_conv + o_c + (E + i_e) * K + o_k[None, :], mask=m_store, other=0.0)
        b_q = tl.load(p_conv + o_c + i_e * K + o_k[None, :], mask=m_store, other=0.0)
        b_v = tl.load(p_conv + o_c + 2 * E * K + i_h * V + o_v[None, :], mask=m_store, other=0.0)
        b_ratio = tl.exp(tl.minimum(b_G[:, None] - b_G[None, :], 0.0))
        b_P = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
        b_P = tl.where(o_l[:, None] >= o_l[None, :], b_P * b_ratio, 0.0)
        tl.store(p_p + o_row[:, None] * L + o_l[None, :], b_P.to(dtype), mask=m_store)
        b_A = tl.dot(b_k, tl.trans(b_k), input_precision=PRECISION)
        b_A = tl.where(o_l[:, None] > o_l[None, :], b_A * b_beta[:, None] * b_ratio, 0.0)
        b_T = _unit_lower_inverse(b_A, PRECISION, "ieee" if PRECISION == "ieee" else "tf32x3", L, B)
        # T scales its columns instead of K and V their rows.
        b_w = tl.dot((b_T * (b_beta * tl.exp(b_G))[None, :]).to(dtype), b_k, input_precision=PRECISION)
        tl.store(p_w + o_row[:, None] * K + o_k[None, :], b_w.to(dtype), mask=m_store)
        b_u = tl.dot((b_T * b_beta[None, :]).to(dtype), b_v, input_precision=PRECISION)
        tl.store(p_u + o_row[:, None] * V + o_v[None, :], b_u.to(dtype), mask=m_store)
        tl.store(p_total_decay + i_y * N + i_h, b_total)
        if HAS_CACHE:
            save = tl.load(p_chunk_saves + i_y).to(tl.int64)
            if save >= 0:
                p_hist = p_history + i_s * (WIDTH - 1)
                p_window = p_conv_pool + tl.load(p_root_slots + i_s).to(tl.int64) * (WIDTH - 1) * C
                o_w = tl.arange(0, WINDOW)
                m_w = o_w < WIDTH - 1
                source = end - (WIDTH - 1) + o_w
                before = tl.load(p_hist + (begin - 1 - source), mask=m_w & (source < begin), other=-1)
                source = tl.where(source < begin, before, source)
                p_to = p_conv_pool + (save * (WIDTH - 1) + o_w)[:, None] * C
                _copy_window(p_qkv, s_qkv, p_window, p_to, source, m_w, 2 * E * K + i_h * V + o_v, C)
                if i_h % (N // E) == 0:
                    _copy_window(p_qkv, s_qkv, p_window, p_to, source, m_w, i_e * K + o_k, C)
                    _copy_window(p_qkv, s_qkv, p_window, p_to, source, m_w, (E + i_e) * K + o_k, C)
        work += tl.num_programs(0)

    # Rows behind the last segment belong to nobody; their outputs are read by row-wise layers and must be finite.
    active = tl.load(p_offsets + num_segments)
    padding = (num_rows - active) * N
    for work in range(tl.program_id(0) * L, padding, tl.num_programs(0) * L):
        o_x = active.to(tl.int64) * N + work + o_l
        tl.store(
            p_out + o_x[:, None] * V + o_v[None, :],
            tl.zeros([L, V], dtype=p_out.dtype.element_ty),
            mask=(work + o_l < padding)[:, None],
        )


@triton.jit
def _scan_kernel(
    p_conv,
    p_w,
    p_u,
    p_p,
    p_decay,
    p_total_decay,
    p_out,
    p_scratch,
    p_state_pool,
    p_chunk_offsets,
    p_offsets,
    p_chunk_rows,
    p_chunk_saves,
    p_parents,
    p_initial_slots,
    p_final_slots,
    p_levels,
    C,
    N: tl.constexpr,
    E: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    L: tl.constexpr,
    LEVEL: tl.constexpr,
    HAS_CACHE: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    NV: tl.constexpr = V // BV
    o_l = tl.arange(0, L)
    o_k = tl.arange(0, K)
    first_segment = tl.load(p_levels + LEVEL)
    num_work = (tl.load(p_levels + LEVEL + 1) - first_segment) * N * NV
    for work in range(tl.program_id(0), num_work, tl.num_programs(0)):
        i_s = first_segment + work // (N * NV)
        i_h = (work // NV) % N
        o_v = (work % NV) * BV + tl.arange(0, BV)
        o_state = o_k[:, None] * V + o_v[None, :]
        b_S = tl.zeros([K, BV], dtype=tl.float32)
        if LEVEL > 0:
            parent_slot = tl.load(p_final_slots + tl.load(p_parents + i_s)).to(tl.int64)
            b_S = tl.load(p_scratch + (parent_slot * N + i_h) * K * V + o_state)
        elif HAS_CACHE:
            slot = tl.load(p_initial_slots + i_s).to(tl.int64)
            b_S = tl.load(p_state_pool + (slot * N + i_h) * K * V + o_state)
        first_chunk = tl.load(p_chunk_offsets + i_s)
        begin = tl.load(p_offsets + i_s)
        end = tl.load(p_offsets + i_s + 1)
        for i_y in tl.range(first_chunk, tl.load(p_chunk_offsets + i_s + 1), num_stages=STAGES):
            if LEVEL == 0 and HAS_CACHE:  # trunks are cut where they are saved
                rows = tl.load(p_chunk_rows + 2 * i_y) + o_l
                m_rows = (rows < tl.load(p_chunk_rows + 2 * i_y + 1))[:, None]
            else:  # not from the table: loads that wait for loads are not pipelined as far
                rows = begin + (i_y - first_chunk) * L + o_l
                m_rows = (rows < end)[:, None]
            o_row = (rows.to(tl.int64) * N + i_h)[:, None]
            p_qk = p_conv + rows.to(tl.int64)[:, None] * C + i_h // (N // E) * K + o_k[None, :]
            b_w = tl.load(p_w + o_row * K + o_k[None, :], mask=m_rows, other=0.0)
            b_q = tl.load(p_qk, mask=m_rows, other=0.0)
            b_k = tl.load(p_qk + E * K, mask=m_rows, other=0.0)
            b_u = tl.load(p_u + o_row * V + o_v[None, :], mask=m_rows, other=0.0)
            b_p = tl.load(p_p + o_row * L + o_l[None, :], mask=m_rows, other=0.0)
            b_G = tl.load(p_decay + o_row, mask=m_rows, other=0.0)
            b_total = tl.load(p_total_decay + i_y * N + i_h)
            b_Sc = b_S.to(b_w.dtype)
            b_d = b_u.to(tl.float32) - tl.dot(b_w, b_Sc, input_precision=PRECISION)
            b_o = tl.dot(b_q, b_Sc, input_precision=PRECISION) * tl.exp(b_G)
            b_o = tl.dot(b_p, b_d.to(b_w.dtype), b_o, input_precision=PRECISION)
            b_kd = (b_d * tl.exp(b_total - b_G)).to(b_w.dtype)
            b_S = tl.dot(tl.trans(b_k), b_kd, b_S * tl.exp(b_total), input_precision=PRECISION)
            tl.store(p_out + o_row * V + o_v[None, :], b_o.to(p_out.dtype.element_ty), mask=m_rows)
            if LEVEL == 0 and HAS_CACHE:
                save = tl.load(p_chunk_saves + i_y).to(tl.int64)
                if save >= 0:
                    tl.store(p_state_pool + (save * N + i_h) * K * V + o_state, b_S)
        final_slot = tl.load(p_final_slots + i_s).to(tl.int64)
        if final_slot >= 0:
            tl.store(p_scratch + (final_slot * N + i_h) * K * V + o_state, b_S)


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
    heads = A_log_N.shape[0]
    value_dim = (channels - 2 * num_key_heads * key_dim) // heads
    width = conv_weight_CW.shape[1]
    has_cache = state_pool.shape[0] > 1  # slot 0 alone is the zero state: nothing to resume or save
    exact = qkv_TC.dtype == torch.float32
    precision = "ieee" if exact else "tf32"
    conv = qkv_TC.new_empty(num_rows, channels)
    w = qkv_TC.new_empty(num_rows, heads, key_dim)
    u, out_TNV = (qkv_TC.new_empty(num_rows, heads, value_dim) for _ in range(2))
    p = qkv_TC.new_empty(num_rows, heads, CHUNK)
    decay = qkv_TC.new_empty(num_rows, heads, dtype=torch.float32)
    total_decay = qkv_TC.new_empty(schedule.chunk_segments.shape[0], heads, dtype=torch.float32)
    programs, table = num_programs(qkv_TC.device), launch_table(qkv_TC.device)
    _conv_kernel[(8 * programs,)](
        qkv_TC,
        conv,
        conv_weight_CW,
        conv_pool,
        segment_offsets,
        row_segments,
        schedule.history,
        schedule.root_slots,
        segment_parents.shape[0],
        qkv_TC.stride(0),
        channels,
        N=heads,
        E=num_key_heads,
        K=key_dim,
        V=value_dim,
        BR=table.conv_rows,
        WIDTH=width,
        HAS_CACHE=has_cache,
        FAST=qkv_TC.is_cuda and not exact,
        num_warps=table.conv_warps,
    )
    _prepare_kernel[(2 * programs,)](
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
        w,
        u,
        p,
        decay,
        total_decay,
        out_TNV,
        segment_parents.shape[0],
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
        L=CHUNK,
        B=BLOCK,
        WIDTH=width,
        WINDOW=triton.next_power_of_2(width - 1),
        HAS_CACHE=has_cache,
        PRECISION=precision,
        num_warps=table.prepare_warps,
    )
    # A trunk is few programs and runs long, so it is cut into more where there can only be few trunks.
    columns = table.scan_columns
    while segment_parents.shape[0] <= FEW_SEGMENTS and columns > 16 and heads * value_dim // columns * 2 <= programs:
        columns //= 2
    for level in range(depth):
        _scan_kernel[(4 * programs,)](
            conv,
            w,
            u,
            p,
            decay,
            total_decay,
            out_TNV,
            scratch,
            state_pool,
            schedule.chunk_offsets,
            segment_offsets,
            schedule.chunk_rows,
            schedule.chunk_saves,
            segment_parents,
            initial_slots,
            final_slots,
            schedule.levels,
            channels,
            N=heads,
            E=num_key_heads,
            K=key_dim,
            V=value_dim,
            BV=min(columns if level == 0 else table.scan_columns, value_dim),
            L=CHUNK,
            LEVEL=level,
            HAS_CACHE=has_cache,
            PRECISION=precision,
            STAGES=table.scan_stages,
            num_warps=table.scan_warps,
        )
    return out_TNV
