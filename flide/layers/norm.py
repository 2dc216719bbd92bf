"""Root-mean-square norms. Shapes: leading dims free, R their product, D normalised dim."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from flide.ops.gated_norm import gated_norm


class KeepFloat32(nn.Module):
    """A module some of whose tensors stay float32 under ``.to(dtype)``, ``.half()`` and ``.bfloat16()``.

    Attributes:
        float32_names: names of those direct parameters and buffers.
    """

    float32_names: tuple[str, ...] = ()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        tensors = [x for name in self.float32_names if (x := getattr(self, name)) is not None]
        kept = {id(x) for x in tensors} | {id(x.grad) for x in tensors if x.grad is not None}

        move = keeping_dtype(fn)
        return super()._apply(lambda x: move(x) if id(x) in kept else fn(x), recurse)


def keeping_dtype(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """What ``Module._apply`` is given, without its casts: devices change, dtypes do not."""

    def move(x: Tensor) -> Tensor:
        y = fn(x)
        return x.to(y.device) if y.dtype != x.dtype else y

    return move


class RMSNorm(nn.Module):
    """``x / rms(x) * (offset + weight)`` in float32, cast to the input's dtype at the end.

    Args:
        size: D.
        eps: added to the mean square, inside the root.
        offset: 1 for families that store zero-centred weights (Qwen3.5), 0 for plain ones.
        elementwise_affine: False where there is no weight.
    """

    def __init__(self, size: int, eps: float, *, offset: float = 0.0, elementwise_affine: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size)) if elementwise_affine else None
        self.eps, self.offset = eps, offset

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        if self.weight is not None:
            y = y * (self.offset + self.weight.float())
        return y.to(x.dtype)

    def reset_parameters(self) -> None:
        if self.weight is not None:
            nn.init.constant_(self.weight, 1.0 - self.offset)


class GatedRMSNorm(KeepFloat32):
    """``x / rms(x) * weight * silu(gate)`` in float32: the output norm of a Gated DeltaNet head.

    The weight stays float32, as published checkpoints store it.
    """

    float32_names = ("weight",)

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        if x.dim() != 3:
            x_R1D, gate_R1D = (y.reshape(-1, 1, y.shape[-1]) for y in (x, gate))
            return gated_norm(x_R1D, gate_R1D, self.weight, eps=self.eps).view(x.shape)
        return gated_norm(x, gate, self.weight, eps=self.eps)

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
