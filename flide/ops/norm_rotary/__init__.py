"""Head norm and rotation in one pass: ``rotate(x / rms(x) * (offset + weight))`` per head.

Inductor needs three kernels for it: a rotation pairs channels of a row that is still being reduced. This file is
torch-only: schema, fake and dispatch. Shapes: T rows, N heads, H head dim, F rotated pairs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flide.ops.autograd import recompute_gradients
from flide.ops.norm_rotary.reference import norm_rotary_reference

_INPUTS = "Tensor x, Tensor weight, Tensor cos, Tensor sin, float eps, float offset"
torch.library.define("flide::norm_rotary", f"({_INPUTS}) -> Tensor")
torch.library.define("flide::norm_rotary_backward", f"(Tensor grad, {_INPUTS}) -> (Tensor, Tensor)")


def norm_rotary(
    x_TNH: Tensor, weight_H: Tensor, cos_TF: Tensor, sin_TF: Tensor, *, eps: float, offset: float = 0.0
) -> Tensor:
    """Normalise every head of every row, then rotate its first 2F channels.

    Args:
        x_TNH: ``[T, N, H]``; like all inputs of any strides, copied unless the last one is 1.
        weight_H: ``[H]`` of the norm.
        cos_TF, sin_TF: ``[T, F]`` float32, 2F <= H; channel i pairs with i + F. No gradient reaches them.
        eps: added to the mean square.
        offset: 1 for zero-centred weights.

    Returns:
        ``[T, N, H]`` in the dtype of ``x``, contiguous; float32 inside.
    """
    return torch.ops.flide.norm_rotary(x_TNH, weight_H, cos_TF, sin_TF, eps, offset)


@torch.library.register_fake("flide::norm_rotary")
def _(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.register_fake("flide::norm_rotary_backward")
def _(grad: Tensor, x: Tensor, weight: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape)


@torch.library.impl("flide::norm_rotary", "CompositeExplicitAutograd")
def _(x, weight, cos, sin, eps, offset):
    return norm_rotary_reference(x, weight, cos, sin, eps=eps, offset=offset)


@torch.library.impl("flide::norm_rotary", "CUDA")
def _(x, weight, cos, sin, eps, offset):
    from flide.ops.norm_rotary.triton import norm_rotary_triton

    return norm_rotary_triton(x, weight, cos, sin, eps=eps, offset=offset)


@torch.library.impl("flide::norm_rotary_backward", "CompositeExplicitAutograd")
def _(grad, x, weight, cos, sin, eps, offset):
    def forward(x, weight):
        return norm_rotary_reference(x, weight, cos, sin, eps=eps, offset=offset)

    return recompute_gradients(forward, (x, weight), grad)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.eps, ctx.offset = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    gradients = torch.ops.flide.norm_rotary_backward(grad, *ctx.saved_tensors, ctx.eps, ctx.offset)
    return *gradients, None, None, None, None


torch.library.register_autograd("flide::norm_rotary", _backward, setup_context=_setup_context)

__all__ = ["norm_rotary"]
