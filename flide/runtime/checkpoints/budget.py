"""How a budget of memory is divided between pages and slots."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
from torch import nn

from flide.layers.attention import ForkAttention, ForkAttentionReader
from flide.layers.gated_delta import ForkGatedDeltaNet
from flide.models.decision import ForDecision
from flide.runtime.metadata import PAGE_SIZE

GIB = 1 << 30
STAGES, MOST_AT_ONCE = 4, 32  # buffers between device and host, and pages of each
STATE_SHARE = 0.5  # of a budget, for recurrent states where a model has any: as much as keys and values


@dataclass(frozen=True, slots=True)
class ItemBytes:
    """Memory of one page and of one slot, in all layers together, and the type of the states in it."""

    page: int
    slot: int
    state_dtype: torch.dtype = torch.float32

    @classmethod
    def of(cls, model: ForDecision, state_dtype: torch.dtype = torch.float32) -> Self:
        slot = 0
        for layer in model.modules():
            if isinstance(layer, ForkGatedDeltaNet):
                state, window = layer.pool_shapes(1)
                slot += state_dtype.itemsize * math.prod(state) + math.prod(window) * layer.conv_weight().element_size()
        return cls(PAGE_SIZE * model.kv_bytes_per_token, slot, state_dtype)


@dataclass(frozen=True, slots=True)
class Budget:
    """So many pages and slots: as many as there are bytes for."""

    pages: int = 0
    slots: int = 0

    @classmethod
    def of(cls, gib: float, item: ItemBytes) -> Budget:
        """Of a model without recurrent layers a slot is but a number: there are as many as pages.

        Raises:
            ValueError: there is no room for a single checkpoint.
        """
        if not gib:
            return cls()
        available = int(gib * GIB)
        slots = int(STATE_SHARE * available) // item.slot if item.slot else 0
        pages = (available - slots * item.slot) // item.page if item.page else slots
        slots = slots if item.slot else pages
        if pages < 1 or slots < 1:
            least = max(item.slot / STATE_SHARE, item.slot + item.page) / GIB
            raise ValueError(
                f"a budget of {gib} GB holds no checkpoint of this model, which takes at least {least:.3g}"
            )
        return cls(pages, slots)

    def bytes(self, item: ItemBytes) -> int:
        return self.pages * item.page + self.slots * item.slot


@dataclass(frozen=True, slots=True)
class Budgets:
    """Of both tiers.

    Attributes:
        item: what a page and a slot take.
        at_once: pages of a buffer on the device through which they go to the host and back. There are ``STAGES``
            buffers, for as many slots, too, all of them within the device's budget.
    """

    device: Budget
    host: Budget
    item: ItemBytes
    at_once: int = 0

    @classmethod
    def of(
        cls, model: ForDecision, *, device_gb: float, host_gb: float, state_dtype: torch.dtype = torch.float32
    ) -> Self | None:
        """None for no budget.

        Raises:
            ValueError: see :meth:`Budget.of`.
        """
        if not device_gb:
            return None
        item = ItemBytes.of(model, state_dtype)
        device, host = Budget.of(device_gb, item), Budget.of(host_gb, item)
        if not host_gb:
            return cls(device, host, item)
        at_once = min(MOST_AT_ONCE, max(1, device.pages // (8 * STAGES)))
        device = Budget(device.pages - STAGES * at_once, device.slots - STAGES)
        if min(device.pages, device.slots) < 1:
            raise ValueError(f"a budget of {device_gb} GB has no room for the buffers of a host tier")
        return cls(device, host, item, at_once)


def trunk_cost(model: ForDecision) -> Callable[[int, int], float]:
    """Floating-point operations of computing a trunk's tokens ``begin`` to ``end``."""
    layers = [module for module in model.modules() if isinstance(module, nn.Linear) and module is not model.lm_head]
    per_token = 2.0 * sum(layer.weight.numel() for layer in layers)
    attention = [module for module in model.modules() if isinstance(module, ForkAttention | ForkAttentionReader)]
    per_key = 4.0 * sum(layer.num_heads * layer.head_dim for layer in attention)
    return lambda begin, end: per_token * (end - begin) + per_key * (end**2 - begin**2) / 2


__all__ = ["GIB", "Budget", "Budgets", "ItemBytes", "trunk_cost"]
