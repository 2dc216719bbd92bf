"""Training support shared by the ops: the backward of an op is its reference, recomputed with gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def recompute_gradients(
    reference: Callable[..., Tensor], inputs: Sequence[Tensor], grad_output: Tensor
) -> tuple[Tensor, ...]:
    """Gradients of ``reference(*inputs)`` against ``grad_output``, one contiguous tensor per input.

    Costs one forward of the reference and keeps nothing of the original forward but its inputs.
    """
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in inputs]
        output = reference(*leaves)
        gradients = (
            torch.autograd.grad(output, leaves, grad_output, allow_unused=True)
            if output.requires_grad
            else [None] * len(leaves)  # no active row: the output is constant zero
        )
    return tuple(
        torch.zeros_like(x, memory_format=torch.contiguous_format) if g is None else g.contiguous()
        for x, g in zip(leaves, gradients, strict=True)
    )
