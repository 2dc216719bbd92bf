"""The engine's side of the links: what frontends ask, asked of the engine of this process."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Coroutine
from typing import Any

from flide.runtime.rounds import LogitsRequest
from flide.serve.backend import LocalBackend
from flide.serve.faults import Fault, unavailable
from flide.serve.link import Link

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
        link = await Link.over(sock)
        frontend = _Frontend(self._backend, link)
        try:
            async for kind, *rest in link.messages():
                if kind == "up":
                    up()
                else:
                    getattr(frontend, kind)(*rest)
        finally:
            frontend.leave()
            await link.close()


class _Frontend:
    """What one frontend has asked. The methods are the messages it sends."""

    def __init__(self, backend: LocalBackend, link: Link) -> None:
        self._backend, self._link = backend, link
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def ask(self, number: int, key: str, request: LogitsRequest) -> None:
        self._start(number, self._answer(number, key, request))

    def drop(self, number: int) -> None:
        if number in self._tasks:
            self._tasks[number].cancel()

    def count(self, bundle: list[tuple[str, tuple[Any, ...]]]) -> None:
        for method, arguments in bundle:
            getattr(self._backend.counts, method)(*arguments)

    def tell(self, number: int, what: str) -> None:
        self._start(number, self._tell(number, what))

    def leave(self) -> None:
        for task in self._tasks.values():
            task.cancel()

    async def _answer(self, number: int, key: str, request: LogitsRequest) -> None:
        try:
            with self._backend.ticket(request, key) as ticket:
                logits_QO = await ticket.answer
            self._link.send("answer", number, logits_QO, ticket.waited, ticket.ran)
        except Fault as fault:
            self._link.send("failed", number, fault)
        except Exception as error:  # noqa: BLE001 - one request must not take others down
            # The text of an error may quote what was sent, and its type may be one that cannot be.
            logger.error("a request failed in the engine: %s", type(error).__name__)
            closed = self._backend.closed
            failure = unavailable("The engine is closed.") if closed else RuntimeError(type(error).__name__)
            self._link.send("failed", number, failure)

    async def _tell(self, number: int, what: str) -> None:
        self._link.send("told", number, await getattr(self._backend, what)())

    def _start(self, number: int, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks[number] = task
        task.add_done_callback(lambda _: self._tasks.pop(number))
