"""Running packed streams: token trees in, logits of a head's columns out.

``Streams`` runs them where the model is, compiled or not, and returns when they are done: the CPU's way. ``graphs.py``
has CUDA's: packed ahead into pinned memory and replayed. Shapes: N readout rows, C columns of the head.
"""

from __future__ import annotations

import contextlib
import time
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flide.heads import Head
from flide.models.decision import ForDecision
from flide.runtime.capacity import padded
from flide.runtime.checkpoints.budget import Budgets
from flide.runtime.checkpoints.pools import CheckpointPools, Pairs
from flide.runtime.metadata import ForkMetadata, StreamCapacity, TrunkCache
from flide.runtime.tree import TreeLayout

Step = Callable[[Tensor, ForkMetadata], Tensor]


@dataclass(frozen=True, slots=True)
class StartReport:
    """What making ready took.

    Attributes:
        compile_seconds: first call of the model: compilation, and the kernels of the largest capacity.
        capture_seconds: all graphs, their warm-up included.
        graphs: how many there are.
        graph_bytes: device memory reserved for them.
        pool_bytes: device memory of the KV pages and scratch states, those of checkpoints included.
    """

    compile_seconds: float = 0.0
    capture_seconds: float = 0.0
    graphs: int = 0
    graph_bytes: int = 0
    pool_bytes: int = 0


@dataclass(frozen=True, slots=True)
class StreamRun:
    """How one stream ran.

    Attributes:
        rows: it was padded to.
        captured: whether a CUDA graph was replayed.
        seconds: it took on the device, copies included.
    """

    rows: int
    captured: bool
    seconds: float


class PendingLogits(Protocol):
    """Logits of a stream that has been started."""

    def result(self) -> tuple[NDArray[np.float32], StreamRun]:
        """Wait for the logits ``[N, C]`` of the rows read, in depth-first order of the trees. To be called once."""

    def is_done(self) -> bool:
        """Whether :meth:`result` would not wait."""


class Ready:
    """Logits that are there already."""

    def __init__(self, logits_NC: NDArray[np.float32], run: StreamRun) -> None:
        self._result = logits_NC, run

    def result(self) -> tuple[NDArray[np.float32], StreamRun]:
        return self._result

    def is_done(self) -> bool:
        return True


class Streams:
    """Runs one stream at a time.

    Args:
        model: on its device, in eval mode.
        head: what reads options out of hidden rows, in eval mode, on the model's device.
        compile: through ``torch.compile``; sizes are then padded, so that one graph serves them all.
        selective_readout: see ``ForDecision.forward``.
        own_pages: KV pages for the rounds, where there are checkpoints.
        budgets: of checkpoints, for which the model is given pools; None keeps none.

    Attributes:
        pools: of checkpoints, or None.
    """

    def __init__(
        self,
        model: ForDecision,
        head: Head,
        *,
        compile: bool,
        selective_readout: bool = True,
        own_pages: int = 0,
        budgets: Budgets | None = None,
    ) -> None:
        self._compile, self.own_pages = compile, own_pages
        self.pools: CheckpointPools | None = None
        model.belong_to(None if budgets is None else self)
        if budgets is not None:
            self.pools = CheckpointPools(model, budgets, own_pages=own_pages, parents=1)
        self.report = StartReport()
        self._step = decision_step(model, head, selective_readout=selective_readout)
        if compile:
            self._step = compile_step(self._step)

    @torch.inference_mode()
    def start(self) -> None:
        """Make ready: compile, capture. On the thread that will run the streams, before any other call."""
        if self._compile:
            began = time.perf_counter()
            meta = ForkMetadata.allocate(padded(StreamCapacity(1, 1, 1)))
            self._step(meta.tokens, meta)
            self.report = StartReport(compile_seconds=time.perf_counter() - began)

    def run_on_this_thread(self) -> None:
        """From now on another thread runs the streams: this one."""

    @torch.inference_mode()
    def submit(
        self,
        layouts: Sequence[TreeLayout],
        needed: StreamCapacity,
        caches: Sequence[TrunkCache] | None = None,
        copies: Pairs = (),
    ) -> PendingLogits:
        """Run one stream.

        Args:
            layouts: its requests.
            needed: what they need together.
            caches: one for each, of a model with pools.
            copies: (from, to) of KV pages to copy first.
        """
        if self.pools is not None:
            self.pools.copy_pages(copies)
        meta = ForkMetadata.pack(layouts, capacity=padded(needed) if self._compile else None, caches=caches)
        began = time.perf_counter()
        logits_NC = self._step(meta.tokens, meta)[: needed.readouts].numpy()
        run = StreamRun(meta.capacity.tokens, captured=False, seconds=time.perf_counter() - began)
        return Ready(logits_NC, run)


def decision_step(model: ForDecision, head: Head, *, selective_readout: bool = True) -> Step:
    """The callable that is compiled and captured: a stream to its logits ``[N, C]``."""

    def step(tokens_T: Tensor, meta: ForkMetadata) -> Tensor:
        logits_NC: Tensor = head(model(tokens_T, meta, selective_readout=selective_readout))
        return logits_NC

    return step


def compile_step(step: Step, *, mode: str | None = None) -> Step:
    """``torch.compile`` of a step, so that one graph serves streams of every capacity.

    Each call gets a code object of its own: Dynamo counts recompilations per code object, and steps of several models
    are no recompilations of one.
    """
    assert isinstance(step, types.FunctionType)
    own = types.FunctionType(
        step.__code__.replace(co_name=f"step_{id(step):x}"), step.__globals__, closure=step.__closure__
    )
    compiled = torch.compile(own, fullgraph=True, dynamic=True, mode=mode)

    def run(tokens_T: Tensor, meta: ForkMetadata) -> Tensor:
        with _compile_settings():
            logits_NC: Tensor = compiled(tokens_T, meta)
        return logits_NC

    return run


@contextlib.contextmanager
def _compile_settings() -> Iterator[None]:
    with (
        # Sizes that happen to be equal at first are not the same size.
        torch.fx.experimental._config.patch(use_duck_shape=False),  # type: ignore[attr-defined]
        # Numbers of layers are constants. Otherwise Dynamo makes them symbols, finds it must not, and starts again.
        torch._dynamo.config.patch(specialize_float=True),
        # Fields of an arena are aligned, which a symbolic offset does not show.
        torch._inductor.config.patch(assume_aligned_inputs=True),
        # A residual sum is stored by the kernel that computes it, not computed again by those that need it.
        torch._inductor.config.patch(realize_reads_threshold=1),
    ):
        yield
