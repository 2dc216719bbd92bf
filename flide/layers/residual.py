"""Residual connections. Shapes: leading dims free, D hidden size."""

from __future__ import annotations

import torch
from torch import Tensor


def add_residual(residual: Tensor, x: Tensor) -> Tensor:
    """``residual + x``, with the dtype and the bits of that sum.

    Written in float32 for Inductor's sake: it would make a low-precision sum part of the matrix product before it,
    which first copies the residual; like this it becomes part of the norm behind it.
    """
    dtype = torch.promote_types(residual.dtype, x.dtype)
    compute = torch.promote_types(dtype, torch.float32)
    return (residual.to(compute) + x.to(compute)).to(dtype)
