"""Triton kernel of the gated norm; the formula stands in ``reference.py``."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["num_rows"])
def _gated_norm_kernel(
    p_x,
    p_gate,
    p_norm_weight,
    p_out,
    num_rows,
    s_x,
    s_xn,
    s_gate,
    s_gate_n,
    eps,
    N: tl.constexpr,
    V: tl.constexpr,
    VP: tl.constexpr,
    B: tl.constexpr,
):
    o_x = tl.program_id(0) * B + tl.arange(0, B)  # head by head of row by row
    row, head = (o_x // N).to(tl.int64), (o_x % N).to(tl.int64)
    o_v = tl.arange(0, VP)
    m_v = o_v < V
    m_x = (row < num_rows)[:, None] & m_v[None, :]
    b_x = tl.load(p_x + (row * s_x + head * s_xn)[:, None] + o_v[None, :], mask=m_x, other=0.0).to(tl.float32)
    b_gate = tl.load(p_gate + (row * s_gate + head * s_gate_n)[:, None] + o_v[None, :], mask=m_x, other=0.0)
    b_gate = b_gate.to(tl.float32)
    b_weight = tl.load(p_norm_weight + o_v, mask=m_v, other=0.0).to(tl.float32)
    b_y = b_x * tl.rsqrt(tl.sum(b_x * b_x, axis=1) / V + eps)[:, None] * b_weight[None, :]
    b_y *= b_gate * (1 / (1 + tl.exp(-b_gate)))
    tl.store(p_out + o_x.to(tl.int64)[:, None] * V + o_v[None, :], b_y.to(p_out.dtype.element_ty), mask=m_x)


HEADS, WARPS = 16, 4  # heads of a program: at V = 128 a thread has two 16-byte loads of each bfloat16 input


def gated_norm_triton(x_TNV: Tensor, gate_TNV: Tensor, weight_V: Tensor, *, eps: float) -> Tensor:
    """Launch the kernel; arguments as in ``gated_norm``."""
    assert gate_TNV.shape == x_TNV.shape
    rows, heads, value_dim = x_TNV.shape
    x_TNV, gate_TNV, weight_V = (x if x.stride(-1) == 1 else x.contiguous() for x in (x_TNV, gate_TNV, weight_V))
    out = x_TNV.new_empty(x_TNV.shape)
    _gated_norm_kernel[(triton.cdiv(rows * heads, HEADS),)](
        x_TNV,
        gate_TNV,
        weight_V,
        out,
        rows,
        x_TNV.stride(0),
        x_TNV.stride(1),
        gate_TNV.stride(0),
        gate_TNV.stride(1),
        eps,
        N=heads,
        V=value_dim,
        VP=triton.next_power_of_2(value_dim),
        B=HEADS,
        num_warps=WARPS,
    )
    return out
