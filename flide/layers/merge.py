"""Merging projections of the same input into one matrix product: an inference-only step.

The merged weight takes the place of its parts in memory: each part becomes a view of its rows, so that
``state_dict()``, saving and everything else that speaks the checkpoint's names goes on as before, and in-place changes
reach both.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class MergedLinear(nn.Module):
    """``[part_0(x) | part_1(x) | ...]`` as one product. Not for training.

    Args:
        groups: of linear layers without biases and with equal inputs; their weights become views of the merged one.
    """

    weight: Tensor

    def __init__(self, groups: Sequence[Sequence[nn.Linear]]) -> None:
        super().__init__()
        parts = [part for group in groups for part in group]
        self.sizes = [sum(part.out_features for part in group) for group in groups]
        self.register_buffer("weight", torch.cat([part.weight.detach() for part in parts]), persistent=False)
        for part, rows in zip(parts, self.weight.split([part.out_features for part in parts]), strict=True):
            part.weight = nn.Parameter(rows, requires_grad=False)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """One view of the product per group."""
        return F.linear(x, self.weight).split(self.sizes, -1)


def merge(*groups: Sequence[nn.Module]) -> MergedLinear | None:
    """Groups of layers as one product, or None where one of them is more than a linear layer (an adapter, a
    subclass)."""
    if all(type(part) is nn.Linear and part.bias is None for group in groups for part in group):
        return MergedLinear([[part for part in group if isinstance(part, nn.Linear)] for group in groups])
    return None


def side_by_side(parts: Sequence[nn.Module], x: Tensor) -> Tensor:
    """What :class:`MergedLinear` gives for a group, computed layer by layer."""
    return parts[0](x) if len(parts) == 1 else torch.cat([part(x) for part in parts], -1)
