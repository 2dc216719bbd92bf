"""What answers the server's requests: an engine in this process, or one behind a link (``remote.py``)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol, Self

from flide.runtime.decision import Decision
from flide.runtime.engine import Engine
from flide.runtime.reader import RequestReader
from flide.runtime.rounds import PreparedRequest, Runnable
from flide.serve.config import ServeConfig
from flide.serve.metrics import Counts, Metrics
from flide.serve.scheduler import Scheduler, Ticket

COUNTS_EVERY = 0.2  # seconds in which what happened is counted


class Place(Protocol):
    """A request's place in the queue, as long as a block lasts.

    Attributes:
        answer: the decision, or whatever else became of it.
        waited, ran: seconds, once there is a decision.
    """

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None: ...

    @property
    def answer(self) -> asyncio.Future[Decision]: ...

    @property
    def waited(self) -> float: ...

    @property
    def ran(self) -> float: ...


class Backend(Protocol):
    """What a server needs. All methods are called on its event loop but ``reader``'s."""

    @property
    def reader(self) -> RequestReader: ...

    @property
    def counts(self) -> Counts: ...

    @property
    def closed(self) -> bool: ...

    async def start(self) -> None: ...

    async def drain(self) -> None:
        """Take nothing new and wait until all that was taken is answered."""

    def ticket(self, prepared: PreparedRequest, key: str) -> Place:
        """A place in the queue, to be entered: see :meth:`Scheduler.ticket`."""

    async def stuck_for(self) -> float:
        """Seconds for which the engine, given something to do, has ended nothing."""

    async def metrics(self) -> bytes:
        """What Prometheus is told."""


class LocalBackend:
    """An engine in this process.

    Args:
        engine: made ready; it stays the caller's to close.
        config: limits.
    """

    def __init__(self, engine: Engine, config: ServeConfig) -> None:
        self.engine, self.reader = engine, engine.reader
        self.scheduler = Scheduler(
            engine.submit,
            round_tokens=engine.round_tokens,
            max_waiting=config.max_waiting,
            max_waiting_tokens=config.max_waiting_tokens,
            max_per_key=config.max_per_key,
            max_wait=config.max_wait,
        )
        self.counts = Metrics(
            waiting=lambda: self.scheduler.waiting,
            waiting_tokens=lambda: self.scheduler.waiting_tokens,
            running_tokens=lambda: self.scheduler.running_tokens,
            checkpoints=engine.checkpoint_stats,
        )
        self._unobserve: Callable[[], None] | None = None
        self._counting: asyncio.TimerHandle | None = None

    @property
    def closed(self) -> bool:
        return self.engine.closed

    async def start(self) -> None:
        self._unobserve = self.engine.observe(self.counts.round)
        self._count()

    async def drain(self) -> None:
        await self.scheduler.drain()
        if self._unobserve is not None:
            self._unobserve()
            self._unobserve = None
        if self._counting is not None:
            self._counting.cancel()
            self._counting = None

    def _count(self) -> None:
        self._counting = asyncio.get_running_loop().call_later(COUNTS_EVERY, self._count)
        self.counts.catch_up()

    def ticket(self, prepared: Runnable, key: str) -> Ticket:
        return self.scheduler.ticket(prepared, key)

    async def stuck_for(self) -> float:
        return self.scheduler.stuck_for

    async def metrics(self) -> bytes:
        return self.counts.text()
