"""A frontend's side of a link: the engine of another process as the server's backend."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

from flide.errors import ModelOutputError
from flide.runtime.decision import Decision
from flide.runtime.reader import RequestReader
from flide.runtime.rounds import LogitsRequest, PreparedRequest
from flide.serve.backend import COUNTS_EVERY
from flide.serve.faults import Fault, unavailable
from flide.serve.link import Link

PATIENCE = 2.0  # seconds for a question about the engine, which its process answers at once


@dataclass(eq=False, slots=True)
class RemotePlace:
    """See ``backend.Place``."""

    backend: RemoteBackend
    number: int
    prepared: PreparedRequest
    answer: asyncio.Future[Decision]
    waited: float = 0.0
    ran: float = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.backend._leave(self.number)

    def give_up(self, error: Exception) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


class RemoteBackend:
    """See ``backend.Backend``.

    Args:
        reader: of the engine.
        sock: this process's end of the link.
        gone: called when the other end is gone, after which nothing can be answered.
    """

    def __init__(self, reader: RequestReader, sock: socket.socket, *, gone: Callable[[], None]) -> None:
        self.reader, self._sock, self._gone = reader, sock, gone
        self._link: Link | None = None
        self._numbers = itertools.count()
        self._places: dict[int, RemotePlace] = {}
        self._questions: dict[int, asyncio.Future[Any]] = {}
        self._draining = self.closed = False
        self.counts = _SentCounts(self._send)

    async def start(self) -> None:
        self._link = await Link.over(self._sock, self._receive)
        self._link.ended.add_done_callback(lambda _: self._end())
        self._send("up")

    async def drain(self) -> None:
        self._draining = True
        while self._places and not self.closed:
            await asyncio.sleep(0.01)
        self.counts.flush()
        if self._link is not None:
            await self._link.close()

    def ticket(self, prepared: PreparedRequest, key: str) -> RemotePlace:
        if self._draining:
            raise unavailable("The server is shutting down.")
        if self.closed:
            raise _gone()
        number = next(self._numbers)
        self._send("ask", number, key, LogitsRequest.of(prepared))
        place = RemotePlace(self, number, prepared, asyncio.get_running_loop().create_future())
        self._places[number] = place
        return place

    def _leave(self, number: int) -> None:
        """Nobody waits for an answer any more."""
        if self._places.pop(number, None) is not None:
            self._send("drop", number)

    async def stuck_for(self) -> float:
        try:
            return float(await self._told("stuck_for"))
        except TimeoutError:
            return float("inf")

    async def metrics(self) -> bytes:
        self.counts.flush()
        try:
            return bytes(await self._told("metrics"))
        except TimeoutError:
            raise unavailable("The engine's process does not answer.") from None

    async def _told(self, what: str) -> Any:
        if self.closed:
            raise _gone()
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        self._questions[number] = answer
        try:
            self._send("tell", number, what)
            async with asyncio.timeout(PATIENCE):
                return await answer
        finally:
            del self._questions[number]

    def _send(self, *message: Any) -> None:
        assert self._link is not None, "started"
        self._link.send(*message)

    def _receive(self, kind: str, number: int, *rest: Any) -> None:
        if kind == "told":
            if number in self._questions and not self._questions[number].done():
                self._questions[number].set_result(rest[0])
            return
        place = self._places.pop(number, None)
        if place is None or place.answer.done():  # nobody waits for it any more
            return
        try:
            if kind == "answer":
                logits_QO, place.waited, place.ran = rest
                _settle(place, self.reader.decision(place.prepared, logits_QO))
            else:
                _settle(place, rest[0])
        except Exception as error:  # noqa: BLE001 - one request must not take others down
            place.give_up(error)

    def _end(self) -> None:
        """The engine's process is gone, or the link was closed."""
        self.closed = True
        for place in self._places.values():
            place.give_up(_gone())
        for question in self._questions.values():
            if not question.done():
                question.set_exception(_gone())
        if not self._draining:
            self._gone()


class _SentCounts:
    """``Counts`` that are kept by the engine's process, to which they go in bundles."""

    def __init__(self, send: Callable[..., None]) -> None:
        self._send = send
        self._bundle: list[tuple[str, tuple[Any, ...]]] = []

    def request(self, route: str, status: int) -> None:
        self._add("request", route, status)

    def reject(self, reason: str) -> None:
        self._add("reject", reason)

    def answered(self, types: Sequence[str], waited: float, ran: float) -> None:
        self._add("answered", list(types), waited, ran)

    def _add(self, method: str, *arguments: Any) -> None:
        if not self._bundle:
            asyncio.get_running_loop().call_later(COUNTS_EVERY, self.flush)
        self._bundle.append((method, arguments))

    def flush(self) -> None:
        if self._bundle:
            self._send("count", self._bundle)
            self._bundle = []


def _settle(place: RemotePlace, result: Decision | ModelOutputError | Exception) -> None:
    if isinstance(result, Exception):
        place.answer.set_exception(result)
    else:
        place.answer.set_result(result)


def _gone() -> Fault:
    return unavailable("The engine's process is gone.")
