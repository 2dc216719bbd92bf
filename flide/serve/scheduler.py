"""Who runs next: a bounded queue in front of the engine, fair between keys, on the event loop's thread.

The engine takes what it is given in order, so it is never given much: enough for the round that runs and the next one.
What waits, waits here, where it can still be dropped. Nothing waits for company. How much of a request a checkpoint
will cover is known to the engine alone, when its round begins; here it is taken to be what it was lately.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Self

from flide.runtime.decision import Decision
from flide.runtime.rounds import OptionLogits, Runnable
from flide.serve.fair import FairQueue
from flide.serve.faults import key_limit, queue_full, unavailable

LEARNING = 0.1  # weight of one request in what is expected of the next ones
Submit = Callable[[Any], "Future[Any]"]


@dataclass(eq=False, slots=True)
class Ticket:
    """A request on its way, as long as a block lasts: outside nobody waits for it any more, and it is dropped unless it
    runs.

    Attributes:
        key: name of who asks.
        tokens: rows it takes of a round, unless some are reused.
        expected: rows that it probably takes, once it has started.
        arrived, started, ended: seconds on the monotonic clock.
        answer: of the engine; or what the engine raised, or 503.
    """

    scheduler: Scheduler = field(repr=False)
    prepared: Runnable
    key: str
    tokens: int
    arrived: float
    answer: asyncio.Future[Any]
    started: float | None = None
    ended: float | None = None
    expected: int = 0
    running: Future[Any] | None = field(default=None, repr=False)
    expiry: asyncio.TimerHandle | None = field(default=None, repr=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.leave()

    def leave(self) -> None:
        """Nobody waits any more."""
        if self.expiry is not None:
            self.expiry.cancel()
        self.scheduler._leave(self)

    @property
    def waited(self) -> float:
        """Seconds before it ran."""
        assert self.started is not None
        return self.started - self.arrived

    @property
    def ran(self) -> float:
        """Seconds in the engine."""
        assert self.started is not None
        assert self.ended is not None
        return self.ended - self.started


class Scheduler:
    """Hands requests to an engine.

    Args:
        submit: starts a request on the engine.
        round_tokens: rows of the engine's largest round.
        max_waiting: requests that may wait.
        max_waiting_tokens: their rows.
        max_per_key: requests of one key that may wait or run; None for any number.
        max_wait: seconds a request may wait before it runs.
    """

    def __init__(
        self,
        submit: Submit,
        *,
        round_tokens: int,
        max_waiting: int,
        max_waiting_tokens: int,
        max_per_key: int | None,
        max_wait: float,
    ) -> None:
        self._submit, self._ahead = submit, 2 * round_tokens
        self._max_waiting, self._max_waiting_tokens = max_waiting, max_waiting_tokens
        self._max_per_key, self._max_wait = max_per_key, max_wait
        self._waiting: FairQueue[Ticket] = FairQueue()
        self._running: set[Ticket] = set()
        self._per_key: dict[str, int] = {}
        self.waiting = self.waiting_tokens = self.running_tokens = 0
        self._draining = False
        self._thread: int | None = None
        self._last_end = time.monotonic()
        self._computed = 1.0  # share of the tokens of late requests that were not reused

    def ticket(self, prepared: Runnable, key: str) -> Ticket:
        """A request's place in the queue, to be entered.

        Raises:
            Fault: 429, 503, 529.
        """
        if self._draining:
            raise unavailable("The server is shutting down.")
        tokens = prepared.needed.tokens
        if self._max_per_key is not None and self._per_key.get(key, 0) >= self._max_per_key:
            raise key_limit(self._max_per_key)
        while self.waiting >= self._max_waiting or (
            self.waiting and self.waiting_tokens + tokens > self._max_waiting_tokens
        ):
            self._make_room(key, tokens)
        loop, self._thread = asyncio.get_running_loop(), threading.get_ident()
        ticket = Ticket(self, prepared, key, tokens, time.monotonic(), loop.create_future())
        self._per_key[key] = self._per_key.get(key, 0) + 1
        self._waiting.append(key, ticket)
        self.waiting += 1
        self.waiting_tokens += tokens
        self._pump()
        if ticket.started is None:
            ticket.expiry = loop.call_later(self._max_wait, self._expire, ticket)
        return ticket

    @property
    def stuck_for(self) -> float:
        """Seconds for which the engine, given something to do, has ended nothing; 0 if it has nothing to do."""
        now = time.monotonic()
        oldest = min((t.started for t in self._running if t.started is not None), default=now)
        return now - max(oldest, self._last_end)

    async def drain(self) -> None:
        """Take nothing new and wait until all that was taken is answered, or nobody waits for it any more."""
        self._draining = True
        while self._per_key:
            await asyncio.sleep(0.01)

    def _make_room(self, key: str, tokens: int) -> None:
        """Refuse the newest request of the key that has most of what is short, so that one key's flood is its own; or
        who asks, where that key would be left with less."""
        by_number = self.waiting >= self._max_waiting

        def size(tickets: Iterable[Ticket]) -> int:
            return sum(1 if by_number else ticket.tokens for ticket in tickets)

        own = self._waiting.of(key)
        largest = max([own, *self._waiting.by_key()], key=size)
        left = list(largest)[:-1]
        if size(left) < size(own) + (1 if by_number else tokens):
            raise queue_full()
        ticket = largest[-1]
        self._take(ticket)
        _settle(ticket, None, queue_full())

    def _pump(self) -> None:
        """Start what the engine has room for, one request of each key in turn."""
        while self._waiting:
            key, ticket = self._waiting.first()
            expected = max(1, round(ticket.tokens * self._computed))
            if self._running and self.running_tokens + expected > self._ahead:
                return
            self._take(ticket)
            ticket.expected = expected
            self._waiting.end_turn(key)
            ticket.started = time.monotonic()
            try:
                ticket.running = self._submit(ticket.prepared)
            except Exception as error:  # noqa: BLE001 - it is raised where the answer is awaited
                _settle(ticket, None, error)
                continue
            self._running.add(ticket)
            self.running_tokens += ticket.expected
            ticket.running.add_done_callback(functools.partial(self._finish_soon, ticket))

    def _finish_soon(self, ticket: Ticket, _: Future[Any]) -> None:
        """On the engine's thread, which may be this one."""
        if threading.get_ident() == self._thread:
            self._finish(ticket)
            return
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            ticket.answer.get_loop().call_soon_threadsafe(self._finish, ticket)

    def _finish(self, ticket: Ticket) -> None:
        self._running.discard(ticket)
        self.running_tokens -= ticket.expected
        assert ticket.running is not None
        if ticket.running.cancelled():  # by who left, or by an engine that ended: no sign that it does anything
            _settle(ticket, None, unavailable("The request was dropped."))
        else:
            self._last_end = time.monotonic()
            error = ticket.running.exception()
            result = None if error else ticket.running.result()
            if isinstance(result, Decision | OptionLogits):
                computed = 1 - result.reused_tokens / ticket.tokens
                self._computed += LEARNING * (computed - self._computed)
            _settle(ticket, result, error)
        self._pump()

    def _expire(self, ticket: Ticket) -> None:
        if ticket.started is None and not ticket.answer.done():
            self._take(ticket)
            _settle(ticket, None, unavailable("The request waited too long."))

    def _leave(self, ticket: Ticket) -> None:
        """Nobody waits for a ticket any more."""
        if ticket.started is None:
            self._take(ticket)
        elif ticket.running is not None:
            ticket.running.cancel()  # unless its round has begun
        self._per_key[ticket.key] -= 1
        if not self._per_key[ticket.key]:
            del self._per_key[ticket.key]

    def _take(self, ticket: Ticket) -> None:
        """Out of the queue, if it is there."""
        if self._waiting.remove(ticket.key, ticket):
            self.waiting -= 1
            self.waiting_tokens -= ticket.tokens


def _settle(ticket: Ticket, result: Any, error: BaseException | None) -> None:
    ticket.ended = time.monotonic()
    if ticket.answer.done():
        return
    if error is not None:
        ticket.answer.set_exception(error)
    else:
        ticket.answer.set_result(result)
