"""Streams on CUDA: packed into pinned memory ahead of time, copied in once, replayed as one graph per capacity.

Everything happens on one thread and one stream; nothing waits but the reader of a result. Weights, pools and inputs
keep their addresses from the start on. Shapes: N readout rows, C columns of the head.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flide.heads import Head
from flide.models.decision import ForDecision
from flide.runtime.capacity import (
    ALIGN,
    MAX_REQUESTS,
    MIN_CACHED_PAGES,
    capacity_ladder,
    own_pages,
    padded,
    smallest_that_holds,
)
from flide.runtime.checkpoints.budget import Budgets
from flide.runtime.checkpoints.pools import CheckpointPools, Pairs
from flide.runtime.metadata import (
    ForkMetadata,
    HostArena,
    StreamCapacity,
    TrunkCache,
    arena_size,
    fresh_caches,
    num_pages,
)
from flide.runtime.streams import PendingLogits, StartReport, Step, StreamRun, compile_step, decision_step
from flide.runtime.tree import TreeLayout

logger = logging.getLogger("flide.engine")

GraphMode = Literal["explicit", "reduce-overhead", "off"]
_CAPTURING = threading.Lock()  # a capture does not survive that another thread synchronizes the device
ROUNDS_IN_FLIGHT = 2  # one runs while the next is packed


@dataclass(frozen=True, slots=True)
class _Graph:
    """A capacity's inputs, which never move, and what replays it."""

    meta: ForkMetadata
    graph: torch.cuda.CUDAGraph | None  # None where torch.compile keeps the graph
    logits_NC: Tensor | None


def _timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True, eq=False)
class _HostBuffers:
    """Pinned memory of one round in flight, and the events between which the device works on it."""

    arena: Tensor
    logits_NC: Tensor
    began: torch.cuda.Event = field(default_factory=_timing_event)
    done: torch.cuda.Event = field(default_factory=_timing_event)
    kept: bool = True  # for the next round
    numbers_NC: NDArray[np.float32] = field(init=False)  # the same memory as the logits
    _views: dict[StreamCapacity, tuple[HostArena, Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "numbers_NC", self.logits_NC.numpy())

    def views(self, capacity: StreamCapacity) -> tuple[HostArena, Tensor]:
        """The part of the arena that streams of some capacity use: to pack, and to copy from."""
        if capacity not in self._views:
            part = self.arena[: arena_size(capacity)]
            self._views[capacity] = HostArena(part.numpy(), capacity), part
        return self._views[capacity]


class _PendingOnDevice:
    def __init__(
        self, streams: CudaStreams, buffers: _HostBuffers, num_readouts: int, *, rows: int, captured: bool
    ) -> None:
        self._streams, self._buffers, self._num_readouts = streams, buffers, num_readouts
        self._rows, self._captured = rows, captured

    def result(self) -> tuple[NDArray[np.float32], StreamRun]:
        buffers = self._buffers
        try:
            buffers.done.synchronize()
            seconds = buffers.began.elapsed_time(buffers.done) / 1e3
            logits_NC = buffers.numbers_NC[: self._num_readouts].copy()
            return logits_NC, StreamRun(self._rows, self._captured, seconds)
        finally:
            self._streams._give_back(self._buffers)

    def is_done(self) -> bool:
        return bool(self._buffers.done.query())  # type: ignore[no-untyped-call]


class CudaStreams:
    """Runs streams by replaying graphs; a stream that no capacity holds runs uncaptured, through the same callable.

    Args:
        model: on its CUDA device, in eval mode, its projections merged; it is given pools and belongs to this object.
        head: what reads options out of hidden rows, in eval mode, on the model's device.
        max_tokens: rows of the largest capacity.
        max_prompt_tokens: longest trunk there will be.
        compile: through ``torch.compile``; otherwise kernels and layers run, or are captured, eagerly.
        graphs: "explicit" captures CUDA graphs here, "reduce-overhead" lets ``torch.compile`` do it, "off" has none.
        selective_readout: see ``ForDecision.forward``.
        depth: levels of the trees there will be: 2, or 3, which takes another compilation and graphs of its own. Rounds
            of two levels run in those of two.
        budgets: of checkpoints, whose pools are then beside those of the rounds; None keeps none.

    Attributes:
        limit: what rounds of several requests must keep within.
        own_pages: KV pages that belong to no checkpoint; the first ones.
        pools: of checkpoints, or None.
        report: what :meth:`start` took.
    """

    def __init__(
        self,
        model: ForDecision,
        head: Head,
        *,
        max_tokens: int,
        max_prompt_tokens: int,
        compile: bool,
        graphs: GraphMode,
        selective_readout: bool = True,
        depth: int = 2,
        budgets: Budgets | None = None,
    ) -> None:
        if graphs == "reduce-overhead" and not compile:
            raise ValueError("graphs='reduce-overhead' is a mode of torch.compile: it needs compile=True")
        model.belong_to(self)
        cached_pages = 0 if budgets is None else max(MIN_CACHED_PAGES, num_pages(max_prompt_tokens))
        self.capacities = capacity_ladder(max_tokens, depth=depth, cached_pages=cached_pages)
        self.limit, self._sizes = self.capacities[-1], [capacity.tokens for capacity in self.capacities]
        self.report = StartReport()
        self._mode = graphs
        self._device = model.lm_head.weight.device
        step = decision_step(model, head, selective_readout=selective_readout)
        mode = "reduce-overhead" if graphs == "reduce-overhead" else None
        self._step: Step = compile_step(step, mode=mode) if compile else step
        # Streams that no capacity holds must not be recorded. (Compiled when the first one comes.)
        self._uncaptured = compile_step(step) if graphs == "reduce-overhead" else self._step
        self._stream = torch.cuda.Stream(self._device, priority=-1)  # type: ignore[no-untyped-call]
        self._graphs: dict[StreamCapacity, _Graph] = {}
        before = torch.cuda.memory_allocated(self._device)
        if budgets is None:
            self.pools = None
            self.own_pages = max(self.limit.pages, num_pages(max_prompt_tokens))
            model.allocate_pools(pages=self.own_pages, parents=MAX_REQUESTS)
        else:
            self.own_pages = own_pages(max_tokens, max_prompt_tokens)
            self.pools = CheckpointPools(model, budgets, own_pages=self.own_pages, parents=MAX_REQUESTS)
        self._pool_bytes = torch.cuda.memory_allocated(self._device) - before
        size, columns = arena_size(self.limit), head.num_columns
        with torch.inference_mode():  # as everything that is run later: another kind of tensor is another compilation
            self._arena = torch.zeros(size, dtype=torch.int32, device=self._device)
        self._buffers = [
            _HostBuffers(
                torch.zeros(size, dtype=torch.int32, pin_memory=True),
                torch.zeros(self.limit.readouts, columns, pin_memory=True),
            )
            for _ in range(ROUNDS_IN_FLIGHT)
        ]
        torch.cuda.synchronize(self._device)  # the weights and pools were filled on another stream

    def start(self) -> None:
        """Compile and capture, largest capacity first, all graphs in one pool; on the thread that will run them.

        Meanwhile no other thread of the process may synchronize a device or give its cached memory back. Engines that
        start at the same time wait for each other.
        """
        with _CAPTURING:
            self._start()

    def run_on_this_thread(self) -> None:
        """From now on another thread runs the streams: this one."""
        torch.cuda.set_device(self._device)
        torch.cuda.set_stream(self._stream)

    @torch.inference_mode()
    def _start(self) -> None:
        self.run_on_this_thread()
        if self._mode == "reduce-overhead":
            _know_this_thread()
        began = time.perf_counter()
        # Kernels of longer streams may differ from those of captured ones, and no request should wait for them.
        longer = () if self._mode == "reduce-overhead" else (replace(self.limit, tokens=self.limit.tokens + ALIGN),)
        for depth in range(2, self.limit.depth + 1):
            for largest in (*longer, self.limit):
                meta = self._inputs(replace(largest, depth=depth))
                self._step(meta.tokens, meta)
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # what the first call used outside of graphs
        compiled = time.perf_counter()
        reserved = torch.cuda.memory_reserved(self._device)
        if self._mode != "off":
            pool = torch.cuda.graph_pool_handle()
            for capacity in reversed(self.capacities):
                meta = self._inputs(capacity)
                self._graphs[capacity] = self._record(meta) if self._mode != "explicit" else self._capture(meta, pool)
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()
        self.report = StartReport(
            compile_seconds=compiled - began,
            capture_seconds=time.perf_counter() - compiled,
            graphs=len(self._graphs),
            graph_bytes=torch.cuda.memory_reserved(self._device) - reserved,
            pool_bytes=self._pool_bytes,
        )
        logger.info("ready: %s", self.report)

    def submit(
        self,
        layouts: Sequence[TreeLayout],
        needed: StreamCapacity,
        caches: Sequence[TrunkCache] | None = None,
        copies: Pairs = (),
    ) -> PendingLogits:
        """Start one stream and return.

        Args:
            layouts: its requests.
            needed: what they need together.
            caches: one for each; None for trunks that neither resume nor save.
            copies: (from, to) of KV pages to copy first.

        Raises:
            ValueError: more trunks, or branches with leaves, than there is scratch for; longer trunks than there are
                pages for.
        """
        torch.cuda.set_stream(self._stream)  # of this thread, whatever ran on it since
        parents = len(layouts) if needed.depth == 2 else sum(layout.num_parents for layout in layouts)
        if parents > MAX_REQUESTS:
            raise ValueError(f"a round has at most {MAX_REQUESTS} trunks and branches with children, got {parents}")
        if caches is None and needed.pages > self.own_pages:
            raise ValueError(f"a round of {needed.pages} KV pages, and there are {self.own_pages}")
        if self.pools is not None:
            self.pools.copy_pages(copies)
        capacity = smallest_that_holds(self.capacities, needed, sizes=self._sizes)
        graph = self._graphs.get(capacity) if capacity is not None else None
        if graph is None:
            return self._run_uncaptured(layouts, needed, fresh_caches(layouts) if caches is None else caches)
        return self._replay(graph, layouts, needed, caches)

    def graph(self, capacity: StreamCapacity) -> torch.cuda.CUDAGraph | None:
        """The graph of one capacity, for timing; None if it has none of ours."""
        return self._graphs[capacity].graph if capacity in self._graphs else None

    @torch.inference_mode()
    def _replay(
        self, graph: _Graph, layouts: Sequence[TreeLayout], needed: StreamCapacity, caches: Sequence[TrunkCache] | None
    ) -> PendingLogits:
        buffers, stream = self._buffers.pop(), self._stream  # to ask for the current stream takes longer
        try:
            host, packed = buffers.views(graph.meta.capacity)
            host.pack(layouts, caches)
            buffers.began.record(stream)
            graph.meta.arena.copy_(packed, non_blocking=True)
            if graph.graph is None:
                torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
                logits_NC = self._step(graph.meta.tokens, graph.meta)
            else:
                graph.graph.replay()
                assert graph.logits_NC is not None
                logits_NC = graph.logits_NC
            rows = needed.readouts
            buffers.logits_NC[:rows].copy_(logits_NC[:rows], non_blocking=True)
            buffers.done.record(stream)
        except BaseException:
            with contextlib.suppress(RuntimeError):  # the first error is the one to report
                self._stream.synchronize()
            self._give_back(buffers)
            raise
        return _PendingOnDevice(self, buffers, rows, rows=graph.meta.capacity.tokens, captured=True)

    @torch.inference_mode()
    def _run_uncaptured(
        self, layouts: Sequence[TreeLayout], needed: StreamCapacity, caches: Sequence[TrunkCache]
    ) -> PendingLogits:
        host = ForkMetadata.pack(layouts, capacity=padded(needed), caches=caches, pin_memory=True)
        began = _timing_event()
        began.record()
        meta = host.to(self._device, non_blocking=True)
        logits_NC = self._uncaptured(meta.tokens, meta)[: needed.readouts]
        buffers = _HostBuffers(
            host.arena,
            torch.empty(logits_NC.shape, dtype=logits_NC.dtype, pin_memory=True),
            began,
            kept=False,
        )
        buffers.logits_NC.copy_(logits_NC, non_blocking=True)
        buffers.done.record()
        return _PendingOnDevice(self, buffers, needed.readouts, rows=host.capacity.tokens, captured=False)

    def _inputs(self, capacity: StreamCapacity) -> ForkMetadata:
        """An inert stream of some capacity; all that a graph may hold share one arena."""
        host = ForkMetadata.allocate(capacity)
        if capacity.tokens > self.limit.tokens:
            return host.to(self._device)
        arena = self._arena[: host.arena.numel()]
        arena.copy_(host.arena)
        return ForkMetadata.over(arena, capacity)

    def _capture(self, meta: ForkMetadata, pool: Any) -> _Graph:
        graph = torch.cuda.CUDAGraph()
        # Not torch.cuda.graph: it gives all cached memory back each time. Relaxed: kernels may be loaded meanwhile, so
        # that no run before the capture is needed.
        graph.capture_begin(pool, capture_error_mode="relaxed")
        try:
            logits_NC = self._step(meta.tokens, meta)
        finally:
            graph.capture_end()
        return _Graph(meta, graph, logits_NC)

    def _record(self, meta: ForkMetadata) -> _Graph:
        """Let torch.compile capture: its first call of a size warms up, the second one records."""
        for name in ForkMetadata.__slots__:
            field = getattr(meta, name)
            if isinstance(field, Tensor):
                torch._dynamo.mark_static_address(field, guard=False)
        for _ in range(3):
            torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
            self._step(meta.tokens, meta)
        return _Graph(meta, None, None)

    def _give_back(self, buffers: _HostBuffers) -> None:
        if buffers.kept:
            self._buffers.append(buffers)


def _know_this_thread() -> None:
    """torch.compile's graphs are kept per thread, and torch 2.11 makes a place for them in the first one only."""
    from torch._inductor import cudagraph_trees

    if not hasattr(cudagraph_trees.local, "tree_manager_containers"):
        cudagraph_trees.local.tree_manager_containers = {}
        cudagraph_trees.local.tree_manager_locks = collections.defaultdict(threading.Lock)


__all__ = ["CudaStreams", "GraphMode"]
