"""The memory of checkpoints: pages of keys and values, and slots of recurrent states with their windows.

Layers' pools of one shape are one allocation, so that an item (a page or a slot) is copied in all of them at once.
Shapes: L layers, X items, K items of one copy, S buffers; the rest is an item of one layer.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from flide.layers.attention import ForkAttention
from flide.layers.gated_delta import ForkGatedDeltaNet
from flide.models.decision import ForDecision
from flide.runtime.checkpoints.budget import GIB, STAGES, Budgets

Pairs: TypeAlias = Sequence[tuple[int, int]]  # (from, to)


class CheckpointPools:
    """The pools of a model's layers, on their device, and room for copies of items on the host.

    All calls come from the thread, and go to the stream, that rounds run on. What goes to the host or comes from there
    takes its way through buffers on the device and a stream of its own, so that rounds need not wait for the link
    unless they read what is on its way.

    Args:
        model: is given its pools, which never move.
        budgets: of checkpoints.
        own_pages: pages that belong to the rounds: the first ones. Slot 0 is the zero state.
        parents: see :meth:`ForDecision.allocate_pools`.
    """

    def __init__(self, model: ForDecision, budgets: Budgets, *, own_pages: int, parents: int) -> None:
        attention = [layer for layer in model.modules() if isinstance(layer, ForkAttention)]
        recurrent = [layer for layer in model.modules() if isinstance(layer, ForkGatedDeltaNet)]
        device, host, at_once = budgets.device, budgets.host, budgets.at_once
        pages, slots = own_pages + device.pages, 1 + device.slots
        self._device, self._at_once = model.lm_head.weight.device, max(1, at_once)
        shapes = [(layer.kv_pool_shape(pages), layer.k_proj.weight.dtype) for layer in attention]
        kv, self._pages = _allocate(shapes, self._device, host.pages, at_once)
        both = [layer.pool_shapes(slots) for layer in recurrent]
        shapes = [(state, budgets.item.state_dtype) for state, _ in both]
        states, state_pools = _allocate(shapes, self._device, host.slots, 1)
        shapes = [(shape, x.conv_weight().dtype) for x, (_, shape) in zip(recurrent, both, strict=True)]
        windows, window_pools = _allocate(shapes, self._device, host.slots, 1)
        self._slots = state_pools + window_pools
        for layer, pool in zip(attention, kv, strict=True):
            layer.allocate_pools(pages=pages, kv_pool=pool)
        scratch: Tensor | None = None
        for mixer, state, window in zip(recurrent, states, windows, strict=True):
            mixer.allocate_pools(slots=slots, parents=parents, scratch=scratch, state_pool=state, conv_pool=window)
            scratch = mixer.scratch
        on_gpu = self._device.type == "cuda" and host.slots > 0
        self._link = torch.cuda.Stream(self._device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._free = [[torch.cuda.Event() for _ in range(STAGES)] if on_gpu else [] for _ in range(2)]  # type: ignore[no-untyped-call]
        self._turns = itertools.count()

    def copy_pages(self, pairs: Pairs) -> None:
        """Copy pages on the device."""
        if pairs:
            from_K, to_K = self._indices(pairs)
            for pool in self._pages:
                pool.device_LX.index_copy_(1, to_K, pool.device_LX.index_select(1, from_K))

    def offload(self, pages: Pairs, slot: tuple[int, int]) -> None:
        """Copy pages and a slot to the host: (there, here) each. The device's may be overwritten by what comes next."""
        for pools, pairs, stage, free in self._parts(pages, slot):
            from_K, _ = self._indices(pairs)
            self._wait(free)
            for pool in pools:
                pool.stages_SKL[stage, : len(pairs)].copy_(pool.device_LX.index_select(1, from_K).transpose(0, 1))
            with self._on_link(free):
                for pool in pools:
                    for k, (_, to) in enumerate(pairs):
                        pool.host_XL[to].copy_(pool.stages_SKL[stage, k], non_blocking=True)

    def restore(self, pages: Pairs, slot: tuple[int, int]) -> None:
        """Copy pages and a slot back from the host: (from the host's, to the device's) each. What comes next finds
        them there."""
        for pools, pairs, stage, free in self._parts(pages, slot):
            _, to_K = self._indices(pairs)
            with self._on_link(free, first=free):
                for pool in pools:
                    for k, (source, _) in enumerate(pairs):
                        pool.stages_SKL[stage, k].copy_(pool.host_XL[source], non_blocking=True)
            self._wait(free)
            for pool in pools:
                pool.device_LX.index_copy_(1, to_K, pool.stages_SKL[stage, : len(pairs)].transpose(0, 1))
            if free is not None:
                free.record()

    def _parts(
        self, pages: Pairs, slot: tuple[int, int]
    ) -> Iterator[tuple[list[_Pool], Pairs, int, torch.cuda.Event | None]]:
        """What is copied at once, through which buffer, and the event after which that is free."""
        parts: list[tuple[list[_Pool], Pairs, int]]
        parts = [(self._pages, pages[i : i + self._at_once], 0) for i in range(0, len(pages), self._at_once)]
        parts += [(self._slots, [slot], 1)] if self._slots else []
        for pools, pairs, kind in parts:
            stage = next(self._turns) % STAGES
            yield pools, pairs, stage, self._free[kind][stage] if self._link is not None else None

    def _wait(self, event: torch.cuda.Event | None) -> None:
        """Have the rounds' stream wait."""
        if event is not None:
            event.wait()

    @contextlib.contextmanager
    def _on_link(self, done: torch.cuda.Event | None, *, first: torch.cuda.Event | None = None) -> Iterator[None]:
        """Copy on the link's stream after ``first``, by default after all that the rounds' stream was given."""
        if self._link is None or done is None:
            yield
            return
        if first is None:
            self._link.wait_stream(torch.cuda.current_stream(self._device))
        else:
            self._link.wait_event(first)
        with torch.cuda.stream(self._link):
            yield
            done.record()

    def _indices(self, pairs: Pairs) -> tuple[Tensor, Tensor]:
        on_gpu = self._device.type == "cuda"
        both_2K = torch.tensor([*zip(*pairs, strict=True)], dtype=torch.int64, pin_memory=on_gpu)
        from_K, to_K = both_2K.to(self._device, non_blocking=True)
        return from_K, to_K


@dataclass(frozen=True, slots=True, eq=False)
class _Pool:
    """Layers' pools of one shape: ``[L, X, ...]`` on the device, ``[X, L, ...]``, item by item, on the host, and
    ``[STAGES, K, L, ...]`` buffers between them."""

    device_LX: Tensor
    host_XL: Tensor
    stages_SKL: Tensor


def _allocate(
    kinds: list[tuple[tuple[int, ...], torch.dtype]], device: torch.device, host_items: int, at_once: int
) -> tuple[list[Tensor], list[_Pool]]:
    """A zeroed pool for each layer, and the allocations that they are part of."""
    parts: dict[int, Tensor] = {}
    pools = []
    for kind in dict.fromkeys(kinds):
        shape, dtype = kind
        members = [i for i, other in enumerate(kinds) if other == kind]
        joint_LX = _zeros((len(members), *shape), dtype, device)
        # Each with a storage of its own: inputs that share one are to the compiler as if they overlapped.
        parts |= {i: torch.from_dlpack(joint_LX[k]) for k, i in enumerate(members)}
        host = _zeros((host_items, len(members), *shape[1:]), dtype, torch.device("cpu"))
        if device.type == "cuda" and host_items:
            _lock(host)
        num_buffers = at_once if host_items else 0
        stages = joint_LX.new_zeros(STAGES, num_buffers, len(members), *shape[1:])
        pools.append(_Pool(joint_LX, host, stages))
    return [parts[i] for i in range(len(kinds))], pools


def _lock(tensor: Tensor) -> None:
    """Page-lock a tensor for as long as there is it. (What torch allocates page-locked has a power of two in bytes.)"""
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    code = runtime.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)
    if int(code) != 0:
        raise RuntimeError(f"cannot page-lock {tensor.nbytes / GIB:.3g} GB of host memory: CUDA error {int(code)}")
    weakref.finalize(tensor, runtime.cudaHostUnregister, tensor.data_ptr()).atexit = False


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """On a CPU, memory that is not there before it is used: a longest prompt has many pages."""
    if device.type != "cpu" or not math.prod(shape):
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


__all__ = ["CheckpointPools", "Pairs"]
