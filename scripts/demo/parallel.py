"""Rows of a split, worked on by several processes while this one does something else."""

from __future__ import annotations

import itertools
import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ProcessPoolExecutor
from types import TracebackType
from typing import TypeVar

MOST_PROCESSES = 15
STRETCH = 512  # rows of one piece of work
AHEAD = 8  # pieces for every process that are begun before somebody asks for them

T = TypeVar("T")


class Workers:
    """Processes that start at once, and load nothing that takes long: work is a function of a module without torch.

    Args:
        processes: how many; 0 for none, whose work this process does when it is asked for. None for one fewer than
            there are cores.
    """

    def __init__(self, processes: int | None = None) -> None:
        self._pool: ProcessPoolExecutor | None = None
        if processes is None:
            processes = max(1, min(len(os.sched_getaffinity(0)) - 1, MOST_PROCESSES))
        self.processes = processes
        if processes:
            # Not forked: this process may have threads and a CUDA context.
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(processes, mp_context=context, initializer=_begin)
            for _ in range(processes):
                self._pool.submit(_nothing)  # it starts a process for whatever is submitted before one is idle

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._pool:
            self._pool.shutdown(cancel_futures=True)

    def stretches(
        self, work: Callable[[str, int, int], T], split: str, count: int | None = None, *, size: int = STRETCH
    ) -> Generator[T, None, None]:
        """``work(split, first, last)`` for stretches of the first ``count`` rows, in order; begun in this call.

        Without a count it goes on without end, some way ahead of whoever takes the results; closing it stops that.
        What comes out does not depend on how fast anybody is.
        """
        firsts = itertools.count(0, size) if count is None else range(0, count, size)
        bounds = ((first, first + size if count is None else min(first + size, count)) for first in firsts)
        if self._pool is None:
            return (work(split, first, last) for first, last in bounds)
        pool, most = self._pool, AHEAD * self.processes if count is None else None
        pending = deque(pool.submit(work, split, *bound) for bound in itertools.islice(bounds, most))

        def results(pending: deque[Future[T]]) -> Generator[T, None, None]:
            try:
                while pending:
                    yield pending.popleft().result()
                    pending.extend(pool.submit(work, split, *bound) for bound in itertools.islice(bounds, 1))
            finally:
                for future in pending:
                    future.cancel()

        return results(pending)


def _begin() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is a process for every core


def _nothing() -> None:
    pass
