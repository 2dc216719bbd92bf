"""The engine thread: the only one that runs the model. It takes what waits, up to a round, and never waits for more.

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
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeAlias

from flide.runtime.decision import Decision
from flide.runtime.rounds import PreparedRequest, RoundRunner

logger = logging.getLogger("flide.engine")


@dataclass(frozen=True, slots=True)
class Job:
    """A request that waits for its round; cancelling the future drops it unless its round has begun."""

    prepared: PreparedRequest
    future: Future[Decision] = field(default_factory=Future)


_Arrivals: TypeAlias = "queue.SimpleQueue[list[Job] | None]"  # None: nothing comes after this


class Worker:
    """A thread that runs rounds until it is closed, collected or the process ends.

    Args:
        runner: the model.
        max_tokens: stream rows that requests may share in one round; a longer request runs alone.
    """

    def __init__(self, runner: RoundRunner, max_tokens: int) -> None:
        self._arrivals: _Arrivals = queue.SimpleQueue()
        self._closed, self._ended = False, threading.Event()
        self._process = os.getpid()
        # A daemon, so that a forgotten worker cannot keep the process alive. The thread must not hold the worker, or
        # that would never be collected.
        self._thread = threading.Thread(
            target=_serve, args=(runner, self._arrivals, max_tokens, self._ended), name="flide-engine", daemon=True
        )
        self._thread.start()
        # Collection can happen anywhere, so it must not wait. The end of the process must: a thread inside torch would
        # otherwise meet an interpreter that is gone.
        weakref.finalize(self, self._arrivals.put, None).atexit = False
        weakref.finalize(self._thread, _stop, self._arrivals, weakref.ref(self._thread))

    @property
    def closed(self) -> bool:
        return self._closed

    def check(self) -> None:
        """See that jobs can be submitted.

        Raises:
            RuntimeError: they cannot: closed, or forked.
        """
        if self._closed:
            raise _closed_error()
        if self._process != os.getpid():
            raise RuntimeError("an engine does not survive a fork: spawn the process and make an engine in it")

    def submit(self, jobs: list[Job]) -> None:
        """Queue jobs, all or none. Their futures end in any case: with a result, an error or cancelled.

        Raises:
            RuntimeError: as :meth:`check`.
        """
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


def _serve(runner: RoundRunner, arrivals: _Arrivals, max_tokens: int, ended: threading.Event) -> None:
    waiting: deque[Job] = deque()
    while _receive(arrivals, waiting) or waiting:
        _run_round(runner, _next_round(waiting, max_tokens))
    ended.set()
    _refuse(arrivals)


def _receive(arrivals: _Arrivals, waiting: deque[Job]) -> bool:
    """Collect what has arrived, waiting for it only where there is nothing else to do; False once nothing comes."""
    with contextlib.suppress(queue.Empty):
        while True:
            jobs = arrivals.get(block=not waiting)
            if jobs is None:
                arrivals.put(None)  # seen again when what waits is done
                return False
            waiting.extend(jobs)
    return True


def _next_round(waiting: deque[Job], max_tokens: int) -> list[Job]:
    """The next jobs that share a round, without those that were cancelled."""
    batch: list[Job] = []
    total = 0
    while waiting and (not batch or total + waiting[0].prepared.num_tokens <= max_tokens):
        job = waiting.popleft()
        if job.future.set_running_or_notify_cancel():
            batch.append(job)
            total += job.prepared.num_tokens
    return batch


def _run_round(runner: RoundRunner, batch: list[Job]) -> None:
    for job, result in zip(batch, _results(runner, [job.prepared for job in batch]), strict=True):
        if isinstance(result, Exception):
            job.future.set_exception(result)
        else:
            job.future.set_result(result)


def _results(runner: RoundRunner, requests: list[PreparedRequest]) -> Sequence[Decision | Exception]:
    """Decisions, or errors in their places. Raises nothing: the thread must outlive any round."""
    try:
        try:
            return runner.run(requests) if requests else []
        except BaseException as error:
            if len(requests) == 1:
                raise
            message = "a round of %d requests failed and is run again one by one: %r"
            logger.warning(message, len(requests), error)
        return [_results(runner, [request])[0] for request in requests]  # one must not take the others down
    except BaseException as error:  # noqa: BLE001 - it is reported where the answer is awaited
        return [_as_exception(error)] * len(requests)


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
            for job in arrivals.get_nowait() or ():
                if job.future.set_running_or_notify_cancel():
                    job.future.set_exception(_closed_error())


def _closed_error() -> RuntimeError:
    return RuntimeError("the engine is closed")
