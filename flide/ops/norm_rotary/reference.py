"""Reference of the head norm and rotation, in plain torch. Shapes: T rows, N heads, H head dim, F rotated pairs."""

from __future__ import annotations

import torch
from torch import Tensor


def norm_rotary_reference(
    x_TNH: Tensor, weight_H: Tensor, cos_TF: Tensor, sin_TF: Tensor, *, eps: float, offset: float
) -> Tensor:
    """See ``norm_rotary``. Computes in float32 (float64 for float64 inputs)."""
    compute = torch.promote_types(x_TNH.dtype, torch.float32)
    y = x_TNH.to(compute)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * (offset + weight_H.to(compute))
    cos_T1F, sin_T1F = cos_TF.to(compute)[:, None], sin_TF.to(compute)[:, None]
    half = cos_TF.shape[-1]
    first, second, rest = y.split([half, half, y.shape[-1] - 2 * half], -1)
    rotated = [first * cos_T1F - second * sin_T1F, second * cos_T1F + first * sin_T1F, rest]
    return torch.cat(rotated, -1).to(x_TNH.dtype).contiguous()
