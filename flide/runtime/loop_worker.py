"""The engine on an event loop's thread, in a process whose loop has little else to do.

A request that comes over a socket is planned, packed and launched by the thread that read it, and that thread looks
again and again whether the device is done: nobody has to be woken, and no two threads share an interpreter. It looks
for a while longer for who asks again at once, since a core that sleeps takes as long to wake as a short body to be
parsed. While one round runs the next is started, as late as may be, so that as many as may be are in it; the answer of
who has a round alone is rehearsed before that ends.

Only for devices that work by themselves (``RoundRunner.can_change_threads``): others would hold the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Iterator
from functools import partial

from flide.runtime.plan import RoundPlan
from flide.runtime.rounds import RoundRunner
from flide.runtime.worker import Job, JobQueue, Round, closed_error, next_round, refuse_all

logger = logging.getLogger("flide.engine")

# The next round is planned, packed and launched so many seconds before the running one should end, and twice what that
# took of late; but never earlier than MOST_AHEAD, whatever held it up once.
AHEAD, MOST_AHEAD = 1e-3, 10e-3
WATCHED = 3e-3  # seconds before its end in which a round is watched; before that it is looked at every so often
LOOK = 1e-3
LINGER = 2e-3  # seconds after the last round in which the loop does not sleep
REHEARSAL = 8e-4  # seconds before it should be there in which the answer of who asks alone is rehearsed
FINENESS = 16  # rounds whose rows differ by less than one part in so many are taken to last equally long


class LoopWorker(JobQueue):
    """Runs rounds on a loop's thread, where it is made.

    Args:
        runner: that was started.
        loop: whose thread this is.
    """

    def __init__(self, runner: RoundRunner, loop: asyncio.AbstractEventLoop) -> None:
        assert runner.can_change_threads, "a round would hold the loop"
        super().__init__()
        self._runner, self._loop, self._thread = runner, loop, threading.get_ident()
        self._arrivals: deque[list[Job]] = deque()  # from other threads
        self._ended = threading.Event()
        self._finishing = threading.RLock()  # of a thread that closes where the loop has stopped
        self._waiting: deque[Job] = deque()
        self._running: Round | None = None
        self._following: Round | None = None
        self._held: tuple[list[Job], RoundPlan] | None = None  # to be run alone
        self._is_stepping = False
        self._began = 0.0  # when the round that runs had the device, or the last one ended
        self._again: asyncio.Handle | None = None  # of the next look
        self._seconds: dict[int, float] = {}  # how long rounds of so many rows last
        self._start_seconds = 0.0  # how long it takes to start one while another one runs
        runner.run_on_this_thread()

    def submit(self, jobs: list[Job], *, waits: bool = False) -> None:
        self.check()
        if threading.get_ident() == self._thread:
            if waits:
                raise RuntimeError("this thread runs the engine and cannot wait for it: use adecide")
            self._take(jobs)
            return
        self._arrivals.append(jobs)  # where closing finds them, should the loop have stopped
        try:
            self._loop.call_soon_threadsafe(self._receive)
        except RuntimeError:  # the loop is closed
            with contextlib.suppress(ValueError):  # closing has found them
                self._arrivals.remove(jobs)
                raise closed_error() from None
        if self._ended.is_set():  # closed meanwhile, and who closed may have looked for the last time
            self._refuse()

    def close(self) -> None:
        self._closed = True
        done = threading.Event()

        def finish() -> None:
            self._finish_all()
            done.set()

        if threading.get_ident() == self._thread:
            finish()
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(finish)
        while not done.wait(LINGER):
            if not self._loop.is_running():  # or not any more
                finish()

    def _arrived(self) -> Iterator[list[Job]]:
        """What other threads have submitted; for any thread."""
        with contextlib.suppress(IndexError):
            while True:
                yield self._arrivals.popleft()

    def _receive(self) -> None:
        for jobs in self._arrived():
            self._take(jobs)

    def _take(self, jobs: list[Job]) -> None:
        self._waiting.extend(jobs)
        try:
            self._runner.expect(job.prepared for job in jobs)
        except Exception:  # what is not brought ahead is looked for when its round is planned
            logger.exception("checkpoints could not be brought ahead")
        if self._running is None and not self._is_stepping:
            self._step()

    def _step(self) -> None:
        """End what has ended, start what is to be started, and come again while anything runs."""
        self._is_stepping = True
        seen = True
        try:
            while self._running is not None and self._running.is_done():
                self._end(seen=seen)
                seen = False
            self._start()
            self._rehearse()
        finally:
            self._is_stepping = False
            self._come_again()

    def _come_again(self) -> None:
        if self._again is not None or self._loop.is_closed():
            return
        watched = max(WATCHED, self._ahead() + LOOK) if self._can_start_ahead() else WATCHED
        if self._running is not None and self._time_left() > watched:
            self._again = self._loop.call_later(LOOK, self._look)
        elif self._running is not None or self._waiting or time.perf_counter() < self._began + LINGER:
            self._again = self._loop.call_soon(self._look)

    def _look(self) -> None:
        self._again = None
        self._step()

    def _end(self, *, seen: bool = True) -> None:
        """Deliver the answers of the round that runs; meanwhile the device has the following one. ``seen``: it has not
        ended while another one's were delivered, which would tell nothing of how long it took."""
        ended, self._running, self._following = self._running, self._following, None
        assert ended is not None
        now = time.perf_counter()
        if seen:
            kind, seconds = _kind(ended.rows), now - self._began
            known = self._seconds.get(kind, seconds)
            # The shortest of late: what takes longer once does so for reasons of its own.
            self._seconds[kind] = min(seconds, known if ended.has_hidden_end else 1.02 * known)
        self._began = now
        ended.finish()

    def _start(self) -> None:
        """Start a round, if one can be started now."""
        if self._running is None:
            if self._held is not None or self._waiting:
                batch, plan = self._held or next_round(self._waiting, self._runner)
                self._held = None
                self._began = time.perf_counter()
                self._running = self._round(batch, plan)
        elif self._can_start_ahead() and self._time_left() < self._ahead():
            began = time.perf_counter()
            batch, plan = next_round(self._waiting, self._runner, len(self._running))
            if batch and not plan.fits:  # starting it may take long: nothing was captured for it
                self._held = batch, plan
            else:
                self._following = self._round(batch, plan)
            if self._following is not None:
                self._start_seconds = max(time.perf_counter() - began, 0.9 * self._start_seconds)

    def _rehearse(self) -> None:
        """Rehearse the answer of a request that has the round to itself, once that should end soon; never later: what
        has ended would wait."""
        running = self._running
        if running is None or running.is_rehearsed or len(running) > 1:
            return
        if self._following is not None or self._held is not None:  # which would wait
            return
        if 0.5 * REHEARSAL < self._time_left() < REHEARSAL and not running.is_done():
            running.rehearse()

    def _round(self, batch: list[Job], plan: RoundPlan) -> Round | None:
        return Round(self._runner, batch, partial(self._runner.begin, plan), rows=plan.rows) if batch else None

    def _time_left(self) -> float:
        """Seconds for which the round that runs will go on, as far as is known."""
        assert self._running is not None
        return self._began + self._seconds.get(_kind(self._running.rows), 0.0) - time.perf_counter()

    def _can_start_ahead(self) -> bool:
        """Whether there is a round to start while one runs."""
        return bool(self._waiting) and self._following is None and self._held is None

    def _ahead(self) -> float:
        """Seconds before the end of a round in which the next one is to be started."""
        return min(MOST_AHEAD, AHEAD + 2 * self._start_seconds)

    def _finish_all(self) -> None:
        with self._finishing:
            self._runner.run_on_this_thread()
            for jobs in self._arrived():
                self._waiting.extend(jobs)
            while self._running is not None or self._held is not None or self._waiting:
                if self._running is not None:
                    self._end()
                self._start()
        self._ended.set()
        self._refuse()

    def _refuse(self) -> None:
        """Fail everything that came too late."""
        for jobs in self._arrived():
            refuse_all(jobs)


def _kind(rows: int) -> int:
    return int(FINENESS * math.log2(max(1, rows)))


__all__ = ["LoopWorker"]
