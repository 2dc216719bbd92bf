"""Reference of the gated norm, in plain torch. Shapes: T rows, N heads, V value dim."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def gated_norm_reference(x_TNV: Tensor, gate_TNV: Tensor, weight_V: Tensor, *, eps: float) -> Tensor:
    """See ``gated_norm``. Computes in float32 (float64 for float64 inputs)."""
    compute = torch.promote_types(x_TNV.dtype, torch.float32)
    y = x_TNV.to(compute)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return (y * weight_V.to(compute) * F.silu(gate_TNV.to(compute))).to(x_TNV.dtype).contiguous()
