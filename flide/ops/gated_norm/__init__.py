"""Output norm of a Gated DeltaNet head in one pass: ``x / rms(x) * weight * silu(gate)``.

Inductor gives every row of a head a program of its own, too little work to keep the memory busy. This file is
torch-only: schema, fake and dispatch. Shapes: T rows, N heads, V value dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flide.ops.autograd import recompute_gradients
from flide.ops.gated_norm.reference import gated_norm_reference

_INPUTS = "Tensor x, Tensor gate, Tensor weight, float eps"
torch.library.define("flide::gated_norm", f"({_INPUTS}) -> Tensor")
torch.library.define("flide::gated_norm_backward", f"(Tensor grad, {_INPUTS}) -> (Tensor, Tensor, Tensor)")


def gated_norm(x_TNV: Tensor, gate_TNV: Tensor, weight_V: Tensor, *, eps: float) -> Tensor:
    """Normalise every head of every row, then multiply it by the weight and its activated gate.

    Args:
        x_TNV: ``[T, N, V]``; like all inputs of any strides, copied unless the last one is 1.
        gate_TNV: ``[T, N, V]``.
        weight_V: ``[V]`` of the norm; of any dtype, float32 in published checkpoints.
        eps: added to the mean square.

    Returns:
        ``[T, N, V]`` in the dtype of ``x``, contiguous; float32 inside.
    """
    return torch.ops.flide.gated_norm(x_TNV, gate_TNV, weight_V, eps)


@torch.library.register_fake("flide::gated_norm")
def _(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.register_fake("flide::gated_norm_backward")
def _(grad: Tensor, x: Tensor, gate: Tensor, weight: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), gate.new_empty(gate.shape), weight.new_empty(weight.shape)


@torch.library.impl("flide::gated_norm", "CompositeExplicitAutograd")
def _(x, gate, weight, eps):
    return gated_norm_reference(x, gate, weight, eps=eps)


@torch.library.impl("flide::gated_norm", "CUDA")
def _(x, gate, weight, eps):
    from flide.ops.gated_norm.triton import gated_norm_triton

    return gated_norm_triton(x, gate, weight, eps=eps)


@torch.library.impl("flide::gated_norm_backward", "CompositeExplicitAutograd")
def _(grad, x, gate, weight, eps):
    def forward(x, gate, weight):
        return gated_norm_reference(x, gate, weight, eps=eps)

    return recompute_gradients(forward, (x, gate, weight), grad)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    gradients = torch.ops.flide.gated_norm_backward(grad, *ctx.saved_tensors, ctx.eps)
    return *gradients, None


torch.library.register_autograd("flide::gated_norm", _backward, setup_context=_setup_context)

__all__ = ["gated_norm"]
