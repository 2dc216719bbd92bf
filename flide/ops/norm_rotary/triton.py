"""Triton kernel of the head norm and rotation; the formula stands in ``reference.py``."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["num_rows"])
def _norm_rotary_kernel(
    p_x,
    p_weight,
    p_cos,
    p_sin,
    p_out,
    num_rows,
    s_x,
    s_xh,
    s_cos,
    s_sin,
    eps,
    offset,
    N: tl.constexpr,
    H: tl.constexpr,
    F: tl.constexpr,
    B: tl.constexpr,
):
    o_x = tl.program_id(0) * B + tl.arange(0, B)  # head by head of row by row
    row = (o_x // N).to(tl.int64)
    m_x = (row < num_rows)[:, None]
    o_h = tl.arange(0, H)
    p_head = p_x + (row * s_x + o_x % N * s_xh)[:, None]
    b_x = tl.load(p_head + o_h[None, :], mask=m_x, other=0.0).to(tl.float32)
    b_weight = tl.load(p_weight + o_h).to(tl.float32) + offset
    b_scale = tl.rsqrt(tl.sum(b_x * b_x, axis=1) / H + eps)[:, None]
    b_y = b_x * b_scale * b_weight[None, :]
    # The other channel of a pair is read again, from the cache.
    is_first = o_h < F
    pair = tl.where(is_first, o_h + F, o_h - F)
    m_rotated = o_h < 2 * F
    m_pair = m_x & m_rotated[None, :]
    b_pair = tl.load(p_head + pair[None, :], mask=m_pair, other=0.0).to(tl.float32)
    b_pair *= b_scale * (tl.load(p_weight + pair, mask=m_rotated, other=0.0).to(tl.float32) + offset)[None, :]
    angle = tl.where(is_first, o_h, o_h - F)[None, :]
    b_cos = tl.load(p_cos + row[:, None] * s_cos + angle, mask=m_pair, other=1.0)
    b_sin = tl.load(p_sin + row[:, None] * s_sin + angle, mask=m_pair, other=0.0)
    b_y = b_y * b_cos + tl.where(is_first[None, :], -b_pair, b_pair) * b_sin
    tl.store(p_out + o_x.to(tl.int64)[:, None] * H + o_h[None, :], b_y.to(p_out.dtype.element_ty), mask=m_x)


HEADS, WARPS = 16, 4  # heads of a program


def norm_rotary_triton(
    x_TNH: Tensor, weight_H: Tensor, cos_TF: Tensor, sin_TF: Tensor, *, eps: float, offset: float
) -> Tensor:
    """Launch the kernel; arguments as in ``norm_rotary``."""
    rows, heads, head_dim = x_TNH.shape
    x_TNH, weight_H, cos_TF, sin_TF = (
        x if x.stride(-1) == 1 else x.contiguous() for x in (x_TNH, weight_H, cos_TF, sin_TF)
    )
    out = x_TNH.new_empty(x_TNH.shape)
    _norm_rotary_kernel[(triton.cdiv(rows * heads, HEADS),)](
        x_TNH,
        weight_H,
        cos_TF,
        sin_TF,
        out,
        rows,
        x_TNH.stride(0),
        x_TNH.stride(1),
        cos_TF.stride(0),
        sin_TF.stride(0),
        eps,
        offset,
        N=heads,
        H=head_dim,
        F=cos_TF.shape[1],
        B=HEADS,
        num_warps=WARPS,
    )
    return out
