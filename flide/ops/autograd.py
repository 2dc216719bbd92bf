"""Training support shared by the ops: the backward of an op is its reference, recomputed with gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.overrides import enable_reentrant_dispatch


def recompute_gradients(
    reference: Callable[..., Tensor], inputs: Sequence[Tensor], grad_output: Tensor
) -> tuple[Tensor, ...]:
    """Gradients of ``reference(*inputs)`` against ``grad_output``, one contiguous tensor per input.

    Costs one forward of the reference and keeps nothing of the original forward but its inputs.
    """
    with _recording():
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


@contextmanager
def _recording() -> Iterator[None]:
    """Autograd on, inside an op.

    A ``TorchDispatchMode`` above the op (a FLOP counter, selective checkpointing, the first call of a compiled graph)
    switches autograd off for everything the op calls, whatever the grad mode says, until dispatch is re-entered.
    """
    with torch.enable_grad():
        if torch.empty(0, requires_grad=True).sum().requires_grad:
            yield
        else:
            with enable_reentrant_dispatch(), torch._C._DisableTorchDispatch(), torch.enable_grad():
                yield
