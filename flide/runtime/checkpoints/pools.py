"""The memory of checkpoints: pages of keys and values, and slots of recurrent states with their windows.

Layers' pools of one shape are one allocation, so that an item (a page or a slot) is copied in all of them at once.
Shapes: L layers, X items, K items of one copy; the rest is an item of one layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self, TypeAlias

import numpy as np
import torch
from torch import Tensor

from flide.layers.attention import ForkAttention
from flide.layers.gated_delta import ForkGatedDeltaNet
from flide.models.decision import ForDecision
from flide.runtime.checkpoints.budget import Budgets

PAGES_AT_ONCE = 16  # that go through a buffer on the device on their way to the host or back

Pairs: TypeAlias = Sequence[tuple[int, int]]  # (from, to)


class CheckpointPools:
    """The pools of a model's layers, on their device, and room for copies of items on the host.

    Args:
        model: is given its pools, which never move.
        pages, slots: of each layer; slot 0 is the zero state.
        parents: see :meth:`ForDecision.allocate_pools`.
        host_pages, host_slots: on the host, page-locked where the device is a GPU.
    """

    def __init__(
        self, model: ForDecision, *, pages: int, slots: int, parents: int, host_pages: int = 0, host_slots: int = 0
    ) -> None:
        attention = [layer for layer in model.modules() if isinstance(layer, ForkAttention)]
        recurrent = [layer for layer in model.modules() if isinstance(layer, ForkGatedDeltaNet)]
        likes = [layer.k_proj.weight for layer in attention]
        kv, self._pages = _allocate(likes, [layer.kv_pool_shape(pages) for layer in attention], host_pages)
        shapes = [layer.pool_shapes(slots) for layer in recurrent]
        likes = [layer.A_log for layer in recurrent]
        states, state_pools = _allocate(likes, [state for state, _ in shapes], host_slots)
        likes = [layer.conv_weight() for layer in recurrent]
        windows, window_pools = _allocate(likes, [window for _, window in shapes], host_slots)
        self._slots = state_pools + window_pools
        for layer, pool in zip(attention, kv, strict=True):
            layer.allocate_pools(pages=pages, kv_pool=pool)
        scratch: Tensor | None = None
        for mixer, state, window in zip(recurrent, states, windows, strict=True):
            mixer.allocate_pools(slots=slots, parents=parents, scratch=scratch, state_pool=state, conv_pool=window)
            scratch = mixer.scratch
        self._device = model.lm_head.weight.device

    @classmethod
    def within(cls, budgets: Budgets, model: ForDecision, *, own_pages: int, parents: int) -> Self:
        """Pools of the rounds' own pages, slot 0, and behind them what the budgets have room for."""
        device, host = budgets.device, budgets.host
        sizes = {"host_pages": host.pages, "host_slots": host.slots, "parents": parents}
        return cls(model, pages=own_pages + device.pages, slots=1 + device.slots, **sizes)

    def copy_pages(self, pairs: Pairs) -> None:
        """Copy pages on the device."""
        if pairs:
            from_K, to_K = self._indices(pairs)
            for pool in self._pages:
                pool.device_LX.index_copy_(1, to_K, pool.device_LX.index_select(1, from_K))

    def offload(self, pages: Pairs, slot: tuple[int, int]) -> None:
        """Copy pages and a slot to the host: (there, here) each. They are there when the device has come so far."""
        for pools, pairs in self._parts(pages, slot):
            from_K, _ = self._indices(pairs)
            for pool in pools:
                taken_KL = pool.device_LX.index_select(1, from_K).transpose(0, 1).contiguous()
                for k, (_, to) in enumerate(pairs):
                    pool.host_XL[to].copy_(taken_KL[k], non_blocking=True)

    def restore(self, pages: Pairs, slot: tuple[int, int]) -> None:
        """Copy pages and a slot back from the host: (from the host's, to the device's) each."""
        for pools, pairs in self._parts(pages, slot):
            _, to_K = self._indices(pairs)
            for pool in pools:
                taken_KL = pool.host_XL.new_empty((len(pairs), *pool.host_XL.shape[1:]), device=self._device)
                for k, (source, _) in enumerate(pairs):
                    taken_KL[k].copy_(pool.host_XL[source], non_blocking=True)
                pool.device_LX.index_copy_(1, to_K, taken_KL.transpose(0, 1))

    def _parts(self, pages: Pairs, slot: tuple[int, int]) -> Iterator[tuple[list[_Pool], Pairs]]:
        for begin in range(0, len(pages), PAGES_AT_ONCE):
            yield self._pages, pages[begin : begin + PAGES_AT_ONCE]
        yield self._slots, [slot]

    def _indices(self, pairs: Pairs) -> tuple[Tensor, Tensor]:
        on_gpu = self._device.type == "cuda"
        both_2K = torch.tensor([*zip(*pairs, strict=True)], dtype=torch.int64, pin_memory=on_gpu)
        from_K, to_K = both_2K.to(self._device, non_blocking=True)
        return from_K, to_K


@dataclass(frozen=True, slots=True, eq=False)
class _Pool:
    """Layers' pools of one shape: ``[L, X, ...]`` on the device, ``[X, L, ...]``, item by item, on the host."""

    device_LX: Tensor
    host_XL: Tensor


def _allocate(likes: list[Tensor], shapes: list[tuple[int, ...]], host_items: int) -> tuple[list[Tensor], list[_Pool]]:
    """A zeroed pool for each layer, of its dtype and on its device, and the allocations that they are part of."""
    kinds = [(shape, like.dtype, like.device) for shape, like in zip(shapes, likes, strict=True)]
    parts: dict[int, Tensor] = {}
    pools = []
    for kind in dict.fromkeys(kinds):
        shape, dtype, device = kind
        members = [i for i, other in enumerate(kinds) if other == kind]
        joint_LX = _zeros((len(members), *shape), dtype, device)
        # Each with a storage of its own: inputs that share one are to the compiler as if they overlapped.
        parts |= {i: torch.from_dlpack(joint_LX[k]) for k, i in enumerate(members)}
        on_gpu = device.type == "cuda" and host_items > 0
        host = torch.zeros(host_items, len(members), *shape[1:], dtype=dtype, pin_memory=on_gpu)
        pools.append(_Pool(joint_LX, host))
    return [parts[i] for i in range(len(kinds))], pools


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """On a CPU, memory that is not there before it is used: a longest prompt has many pages."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


__all__ = ["CheckpointPools", "Pairs"]
