"""The engine thread: the only one that runs the model. It takes what waits, up to a round, and never waits for more.
While one round runs on the device it starts the next: of those who ask again as soon as they are answered each should
have its half.

Nothing here takes a lock of its own: submitting and closing are single puts into a queue that is safe even inside a
signal handler or a finalizer.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

from flide.runtime.plan import RoundPlan
from flide.runtime.rounds import PendingRound, RoundRunner, Runnable

logger = logging.getLogger("flide.engine")

ENOUGH = 8192  # rows of a round from which on more of them make none cheaper


@dataclass(frozen=True, slots=True)
class Job:
    """A request that waits for its round; cancelling the future drops it unless its round has begun."""

    prepared: Runnable
    future: Future[Any] = field(default_factory=Future)


_Arrivals: TypeAlias = "queue.SimpleQueue[list[Job] | None]"  # None: nothing comes after this


class JobQueue(ABC):
    """What an engine submits jobs to."""

    def __init__(self) -> None:
        self._closed, self._process = False, os.getpid()

    @property
    def closed(self) -> bool:
        return self._closed

    def check(self) -> None:
        """See that jobs can be submitted.

        Raises:
            RuntimeError: they cannot: closed, or forked.
        """
        if self._closed:
            raise closed_error()
        if self._process != os.getpid():
            raise RuntimeError("an engine does not survive a fork: spawn the process and make an engine in it")

    @abstractmethod
    def submit(self, jobs: list[Job], *, waits: bool = False) -> None:
        """Queue jobs, all or none. Their futures end in any case: with a result, an error or cancelled.

        Args:
            jobs: to run.
            waits: this thread is going to wait for them.

        Raises:
            RuntimeError: as :meth:`check`; or this thread would wait for itself.
        """

    @abstractmethod
    def close(self) -> None:
        """Finish what was submitted."""


class Worker(JobQueue):
    """A thread that runs rounds until it is closed, collected or the process ends.

    Args:
        runner: the model. Its ``start`` runs on the thread, before this returns.

    Raises:
        Exception: whatever ``start`` raised.
    """

    def __init__(self, runner: RoundRunner) -> None:
        super().__init__()
        self._arrivals: _Arrivals = queue.SimpleQueue()
        self._ended = threading.Event()
        started: Future[None] = Future()
        # A daemon, so that a forgotten worker cannot keep the process alive. The thread must not hold the worker, or
        # that would never be collected.
        self._thread = threading.Thread(
            target=_serve, args=(runner, self._arrivals, started, self._ended), name="flide-engine", daemon=True
        )
        self._thread.start()
        # Collection can happen anywhere, so it must not wait. The end of the process must: a thread inside torch would
        # otherwise meet an interpreter that is gone.
        weakref.finalize(self, self._arrivals.put, None).atexit = False
        weakref.finalize(self._thread, _stop, self._arrivals, weakref.ref(self._thread))
        started.result()

    def submit(self, jobs: list[Job], *, waits: bool = False) -> None:
        self.check()
        self._arrivals.put(jobs)
        if self._ended.is_set():  # closed meanwhile, and the thread may have looked for the last time
            _refuse(self._arrivals)

    def close(self) -> None:
        """Finish what was submitted, then stop the thread and wait for it (unless this is that thread)."""
        self._closed = True
        _stop(self._arrivals, weakref.ref(self._thread))


def _stop(arrivals: _Arrivals, thread_ref: weakref.ref[threading.Thread]) -> None:
    arrivals.put(None)
    thread = thread_ref()
    if thread is not None and thread is not threading.current_thread():
        thread.join()


def _serve(runner: RoundRunner, arrivals: _Arrivals, started: Future[None], ended: threading.Event) -> None:
    try:
        runner.start()
    except BaseException as error:  # noqa: BLE001 - it is raised where the worker is made
        ended.set()
        started.set_exception(_as_exception(error))
        return
    started.set_result(None)
    waiting: deque[Job] = deque()
    running: Round | None = None
    while _receive(arrivals, waiting, runner, wait=running is None) or waiting or running is not None:
        if running is not None and not (waiting and runner.starts_ahead):
            running.finish()
            running = None
        else:
            running = _start_next(runner, waiting, running)
    ended.set()
    _refuse(arrivals)


def _start_next(runner: RoundRunner, waiting: deque[Job], running: Round | None) -> Round | None:
    """Start the next round, then finish the one before it (first, where starting may take long: nothing was captured
    for the next)."""
    batch, plan = next_round(waiting, runner, 0 if running is None else len(running))
    if running is not None and batch and not plan.fits:
        running.finish()
        running = None
    following = Round(runner, batch, partial(runner.begin, plan)) if batch else None
    if running is not None:
        running.finish()
    return following


def _receive(arrivals: _Arrivals, waiting: deque[Job], runner: RoundRunner, *, wait: bool) -> bool:
    """Collect what has arrived; False once nothing comes."""
    with contextlib.suppress(queue.Empty):
        while True:
            jobs = arrivals.get(block=wait and not waiting)
            if jobs is None:
                arrivals.put(None)  # seen again when what waits is done
                return False
            waiting.extend(jobs)
            try:
                runner.expect(job.prepared for job in jobs)
            except Exception:  # what is not brought ahead is looked for when its round is planned
                logger.exception("checkpoints could not be brought ahead")
    return True


def next_round(waiting: deque[Job], runner: RoundRunner, running: int = 0) -> tuple[list[Job], RoundPlan]:
    """The next jobs that share a round, without those that were cancelled: while others run, and where it makes none of
    them dearer, at most half of all, so that the device has the other half when these are answered."""
    batch: list[Job] = []
    plan = runner.plan()
    half = (len(waiting) + running + 1) // 2 if running else len(waiting)
    while waiting:
        if len(batch) >= half and plan.needed.tokens >= ENOUGH:
            break
        try:
            if not plan.add(waiting[0].prepared):
                break
        except Exception as error:  # noqa: BLE001 - it is reported where the answer is awaited
            job = waiting.popleft()
            if job.future.set_running_or_notify_cancel():
                job.future.set_exception(_as_exception(error))
            continue
        job = waiting.popleft()
        if job.future.set_running_or_notify_cancel():
            batch.append(job)
        else:
            plan.undo()
    return batch, plan


class Round:
    """Jobs that run together. Nothing here raises: the thread must outlive any round.

    Args:
        runner: of the engine.
        batch: the jobs.
        begin: starts the round.

    Attributes:
        rows: it computes.
        is_rehearsed: whether :meth:`rehearse` was called.
        has_hidden_end: it ended while that went on, nobody knows when.
    """

    def __init__(
        self, runner: RoundRunner, batch: list[Job], begin: Callable[[], PendingRound], *, rows: int = 0
    ) -> None:
        self._runner, self._batch, self.rows = runner, batch, rows
        self.is_rehearsed = self.has_hidden_end = False
        self._outcome: PendingRound | BaseException
        try:
            self._outcome = begin()
        except BaseException as error:  # noqa: BLE001 - it is reported where the answer is awaited
            self._outcome = error

    def __len__(self) -> int:
        return len(self._batch)

    def is_done(self) -> bool:
        """Whether :meth:`finish` would not wait."""
        try:
            return isinstance(self._outcome, BaseException) or self._outcome.is_done()
        except Exception:  # noqa: BLE001 - the device has failed, which is reported where the answer is awaited
            return True

    def rehearse(self) -> None:
        """See :meth:`PreparedRequest.rehearse`; of each request, once."""
        self.is_rehearsed = True
        try:
            for job in self._batch:
                self._runner.rehearse(job.prepared)
        except BaseException:  # what is wrong with an answer is told where it is made
            logger.exception("an answer could not be rehearsed")
        self.has_hidden_end = self.is_done()

    def finish(self) -> None:
        """Wait for the answers and deliver them."""
        for job, result in zip(self._batch, self._results(), strict=True):
            if isinstance(result, Exception):
                job.future.set_exception(result)
            else:
                job.future.set_result(result)

    def _results(self) -> Sequence[Any]:
        """What became of the requests, or errors in their places."""
        try:
            try:
                if isinstance(self._outcome, BaseException):
                    raise self._outcome
                return self._outcome.results()
            except BaseException as error:
                if len(self._batch) == 1:
                    raise
                message = "a round of %d requests failed and is run again one by one: %r"
                logger.warning(message, len(self._batch), error)
            return [self._alone(job)._results()[0] for job in self._batch]  # one must not take others down
        except BaseException as error:  # noqa: BLE001 - it is reported where the answer is awaited
            return [_as_exception(error)] * len(self._batch)

    def _alone(self, job: Job) -> Round:
        return Round(self._runner, [job], partial(self._runner.begin_alone, job.prepared))


def _as_exception(error: BaseException) -> Exception:
    """The error, or one in its place where it would end a thread, a loop or a generator instead of reporting."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration | StopAsyncIteration):
        return error
    wrapped = RuntimeError(f"running the model failed: {error!r}")
    wrapped.__cause__ = error
    return wrapped


def _refuse(arrivals: _Arrivals) -> None:
    """Fail everything that came too late."""
    with contextlib.suppress(queue.Empty):
        while True:
            refuse_all(arrivals.get_nowait() or ())


def refuse_all(jobs: Iterable[Job]) -> None:
    """Fail jobs of an engine that is closed."""
    for job in jobs:
        if job.future.set_running_or_notify_cancel():
            job.future.set_exception(closed_error())


def closed_error() -> RuntimeError:
    return RuntimeError("the engine is closed")


__all__ = ["Job", "JobQueue", "Round", "Worker", "closed_error", "next_round", "refuse_all"]
