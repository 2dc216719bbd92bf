"""A request as its handler sees it, and how long it is waited for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar, cast

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from flide.serve.faults import Fault, unavailable
from flide.serve.keys import ANYONE
from flide.serve.protocol import EXCHANGE, Exchange

REQUEST_ID, OPENAI_REQUEST_ID = b"x-typesafe-request-id", b"x-request-id"  # of the same id
Refusal = Callable[[Fault], Response]
_Result = TypeVar("_Result")


class Call:
    """One request.

    Args:
        scope, receive, send: of ASGI.
        refusal: how the route tells what is wrong, until a body says otherwise.

    Attributes:
        key: name of who asks.
        request_id: that every response has.
        body: all of the body, where it is here; otherwise it is to be received (``chunks``).
    """

    __slots__ = ("_direct", "_exchange", "_headers", "_receive", "body", "key", "refusal", "request_id")

    def __init__(self, scope: Scope, receive: Receive, send: Send, refusal: Refusal) -> None:
        self._headers: dict[bytes, bytes] = dict(reversed(scope["headers"]))  # of several the first one counts
        self._receive = receive
        self._exchange = exchange = cast(Exchange | None, scope.get(EXCHANGE))
        self._direct = exchange if exchange is not None and exchange.is_of(receive, send) else None
        self.body = None if self._direct is None else self._direct.body
        self.key, self.refusal = ANYONE, refusal
        self.request_id: str = scope["state"]["request_id"]

    def header(self, name: bytes) -> str | None:
        """The value of a header; its name in lower case."""
        value = self._headers.get(name)
        return None if value is None else value.decode("latin-1")

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as it comes.

        Raises:
            ClientDisconnect: the client left meanwhile.
        """
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            if message.get("body"):
                yield message["body"]
            if not message.get("more_body"):
                return

    def answer(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> Response:
        """The response, which is on its way where the connection takes it at once; ``headers`` as
        :meth:`Exchange.answer`."""
        if self._direct is not None and self._direct.answer(status, [*headers, *ids(self.request_id)], body):
            return _Sent(status_code=status)
        response = Response(body, status)
        response.raw_headers += headers
        return response

    def when_left(self, leave: Callable[[], None]) -> Callable[[], None]:
        """Have ``leave`` called when the client leaves before it has its response, until what is returned is called.
        The body has been read."""
        exchange = self._exchange
        if exchange is not None:
            exchange.on_leaving = leave
            if exchange.has_left:
                leave()

            def forget() -> None:
                exchange.on_leaving = None

            return forget
        # Another server's connection, which can only be waited for.
        watching = asyncio.ensure_future(self._gone())
        watching.add_done_callback(lambda task: None if task.cancelled() else leave())
        return lambda: cast(None, watching.cancel())

    async def _gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass


class _Sent(Response):
    """A response that is on its way."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        return


class Patience:
    """How long what a request needs is waited for: until its time is up, or its client leaves. To be closed.

    Args:
        call: whose body has been read.
        seconds: for all of it.
    """

    __slots__ = ("_forget", "_timer", "_waiting", "_why")

    def __init__(self, call: Call, seconds: float) -> None:
        self._why: Exception | None = None
        self._waiting: asyncio.Future[Any] | None = None
        self._timer = asyncio.get_running_loop().call_later(seconds, self._too_long)
        self._forget = call.when_left(self._leave)

    def close(self) -> None:
        self._timer.cancel()
        self._forget()

    async def wait(self, future: asyncio.Future[_Result]) -> _Result:
        """What becomes of a future, which is cancelled where it takes too long.

        Raises:
            ClientDisconnect: the client left.
            Fault: 503.
        """
        self._waiting = future
        if self._why is not None:
            future.cancel()
        try:
            return await future
        except asyncio.CancelledError:
            if self._why is None:  # by somebody else
                raise
        finally:
            self._waiting = None
        raise self._why

    def _too_long(self) -> None:
        self._end(unavailable("The request took too long."))

    def _leave(self) -> None:
        self._end(ClientDisconnect())

    def _end(self, why: Exception) -> None:
        if self._why is None:
            self._why = why
            if self._waiting is not None:
                self._waiting.cancel()


def ids(request_id: str) -> tuple[tuple[bytes, bytes], ...]:
    """The headers that say a request's id."""
    value = request_id.encode("latin-1")
    return (REQUEST_ID, value), (OPENAI_REQUEST_ID, value)
