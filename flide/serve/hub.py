"""The engine's side of the links: what frontends ask, asked of the engine of this process."""

from __future__ import annotations

import asyncio
import functools
import logging
import socket
from collections.abc import Callable
from typing import Any

from flide.runtime.rounds import LogitsRequest
from flide.serve.backend import LocalBackend
from flide.serve.faults import Fault, unavailable
from flide.serve.link import Link
from flide.serve.scheduler import Ticket

logger = logging.getLogger("flide.serve")


class Hub:
    """Serves links. All frontends share the backend's queue, fairness and counts."""

    def __init__(self, backend: LocalBackend) -> None:
        self._backend = backend

    async def serve(self, sock: socket.socket, *, up: Callable[[], None]) -> None:
        """Answer one frontend until it is gone; then nobody waits for what it asked.

        Args:
            sock: this process's end of the link.
            up: called when the frontend accepts connections.
        """
        frontend = _Frontend(self._backend, up)
        frontend.link = await Link.over(sock, frontend.receive)
        try:
            await asyncio.shield(frontend.link.ended)
        finally:
            frontend.leave()
            await frontend.link.close()


class _Frontend:
    """What one frontend has asked."""

    link: Link

    def __init__(self, backend: LocalBackend, up: Callable[[], None]) -> None:
        self._backend, self._up = backend, up
        self._tasks: set[asyncio.Task[None]] = set()
        self._tickets: dict[int, Ticket] = {}

    def receive(self, kind: str, *rest: Any) -> None:
        if kind == "ask":
            self._ask(*rest)
        elif kind == "drop":
            self._leave(*rest)
        elif kind == "count":
            for method, arguments in rest[0]:
                getattr(self._backend.counts, method)(*arguments)
        elif kind == "tell":
            task = asyncio.get_running_loop().create_task(self._tell(*rest))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            assert kind == "up"
            self._up()

    def leave(self) -> None:
        for task in self._tasks:
            task.cancel()
        for number in list(self._tickets):
            self._leave(number)

    def _ask(self, number: int, key: str, request: LogitsRequest) -> None:
        try:
            ticket = self._backend.ticket(request, key)
        except Fault as fault:
            self.link.send("failed", number, fault)
            return
        self._tickets[number] = ticket
        ticket.answer.add_done_callback(functools.partial(self._answer, number, ticket))

    def _leave(self, number: int) -> None:
        """Nobody waits for an answer any more, or it was given."""
        if number in self._tickets:
            self._tickets.pop(number).leave()

    def _answer(self, number: int, ticket: Ticket, answer: asyncio.Future[Any]) -> None:
        if answer.cancelled():
            return
        error = answer.exception()  # asked for even where nobody waits
        if number not in self._tickets:
            return
        self._leave(number)
        if error is None:
            self.link.send("answer", number, answer.result(), ticket.waited, ticket.ran)
        elif isinstance(error, Fault):
            self.link.send("failed", number, error)
        else:
            # The text of an error may quote what was sent, and its type may be one that cannot be.
            logger.error("a request failed in the engine: %s", type(error).__name__)
            closed = self._backend.closed
            failure = unavailable("The engine is closed.") if closed else RuntimeError(type(error).__name__)
            self.link.send("failed", number, failure)

    async def _tell(self, number: int, what: str) -> None:
        self.link.send("told", number, await getattr(self._backend, what)())
