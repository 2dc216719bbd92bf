"""HTTP/1.1 on a connection: uvicorn's, with bounds on what a client may send before there is a request, and on the time
that it may take for that. Bodies are bounded by who reads them."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, cast

import httptools
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from flide.serve.faults import Fault

MOST_HEAD_BYTES = 64 << 10  # of a request line with its headers; also of trailers, and of what frames a body
MOST_UPGRADES = 8  # to other protocols, that requests ask for which come together
EXCHANGE = "flide.exchange"  # where a request's scope has its Exchange
HEAD_SECONDS = 10.0  # in which a head has to be there; longer than a connection is kept that sends nothing
LAST_SECONDS = 0.2  # for which a server that ends waits for requests that are on their way


class Exchange:
    """What a connection gives the application, and takes from it, beside ASGI: of a short request that is all, in one
    step each instead of several. An object, so that copies of a scope share it.

    Attributes:
        body: all of the body, where it came together with the head; None where it is to be received.
        on_leaving: for the application to set: called when the client leaves before it has its response.
    """

    __slots__ = ("_cycle", "body", "on_leaving")

    def __init__(self) -> None:
        self.body: bytes | None = None
        self.on_leaving: Callable[[], None] | None = None
        self._cycle: RequestResponseCycle | None = None

    def begin(self, cycle: RequestResponseCycle) -> None:
        """The head is there."""
        self._cycle = cycle

    @property
    def has_left(self) -> bool:
        """Whether the client is gone."""
        return self._cycle is not None and self._cycle.disconnected

    def leave(self) -> None:
        """The client leaves."""
        cycle = self._cycle
        if cycle is None or cycle.response_complete:
            return
        cycle.disconnected = True
        cycle.message_event.set()
        if self.on_leaving is not None:
            self.on_leaving()

    def is_of(self, receive: Any, send: Any) -> bool:
        """Whether an application was given the connection's own ends: nothing stands between that would change what is
        received or sent."""
        cycle = self._cycle
        return cycle is not None and all(getattr(end, "__self__", None) is cycle for end in (receive, send))

    def answer(self, status: int, headers: Iterable[tuple[bytes, bytes]], body: bytes) -> bool:
        """Send a whole response; False where nothing can be sent now, or something was: then ASGI is to be used.

        Args:
            status: of one that has a body.
            headers: none that says how the body is framed. Their values have no control characters.
            body: of a request that was no HEAD.
        """
        cycle = self._cycle
        if cycle is None or cycle.response_started or cycle.flow.write_paused:
            return False
        if cycle.disconnected or cycle.transport.is_closing():
            cycle.disconnected = True  # which ASGI's way respects, too
            return False
        cycle.response_started = cycle.response_complete = True
        parts = [STATUS_LINE[status]]
        for name, value in (*cycle.default_headers, *headers):
            parts += (name, b": ", value, b"\r\n")
        parts.append(b"content-length: %d\r\n" % len(body))
        parts.append(b"\r\n" if cycle.keep_alive else b"connection: close\r\n\r\n")
        parts.append(body)
        cycle.transport.write(b"".join(parts))
        cycle.message_event.set()
        if not cycle.keep_alive:
            cycle.transport.close()
        cycle.on_response()
        return True


class BoundedProtocol(HttpToolsProtocol):
    """See the module."""

    _named = 0  # bytes of the address and headers of this message
    _idle = 0  # bytes since something came of them
    _came_to_something = False
    _arrived = b""
    _upgrades = 0
    _is_again = False  # a head is read that was read before
    _head_is_new = False  # what comes now came together with the head
    _is_ending = False  # the server is
    _refusal: Fault | None = None
    _patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._unanswered: deque[Exchange] = deque()  # whose heads are here; answered in order
        transport.set_write_buffer_limits(high=0)  # uvloop sends at once, not when all that is to be done now is done
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)
        for exchange in self._unanswered:
            exchange.leave()

    def data_received(self, data: bytes) -> None:
        self._came_to_something = self._head_is_new = False
        self._arrived, self._upgrades = data, 0
        super().data_received(data)
        if self._is_ending:
            self._announce_end()
        self._idle = 0 if self._came_to_something else self._idle + len(data)
        if self._idle > MOST_HEAD_BYTES and not self.transport.is_closing():
            self._refusal = _too_large()
            self.send_400_response("")

    def on_message_begin(self) -> None:
        if not self._is_again:
            self._named = 0
            super().on_message_begin()
            cast(dict[str, Any], self.scope)[EXCHANGE] = Exchange()

    def on_url(self, url: bytes) -> None:
        if not self._is_again:
            self._name(len(url))
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_again:
            self._name(len(name) + len(value))
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if not self._is_again:
            self._came_to_something = self._head_is_new = True
            self._stop_waiting()
            super().on_headers_complete()
            exchange = _exchange_of(self.scope)
            exchange.begin(self.cycle)
            self._unanswered.append(exchange)
        self._is_again = False

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()
            # A longer one has stopped the reading, which goes on where it is received.
            if self._head_is_new and len(self.cycle.body) <= HIGH_WATER_LIMIT:
                _exchange_of(self.cycle.scope).body = bytes(self.cycle.body)

    def _unsupported_upgrade_warning(self) -> None:
        """Stay with HTTP/1.1, as servers may: Java's client asks every one for HTTP/2. The parser has stopped behind
        the head; another one goes on from there, and is told how the body is framed."""
        stopped = sys.exc_info()[1]
        left = self._arrived[stopped.args[0] :] if isinstance(stopped, httptools.HttpParserUpgrade) else b""
        framing = [(n, v) for n, v in self.headers if n in (b"content-length", b"transfer-encoding")]
        head = b"POST / HTTP/1.1\r\n" + b"".join(b"%b: %b\r\n" % field for field in framing) + b"\r\n"
        self.parser, self._is_again = httptools.HttpRequestParser(self), True
        self._arrived, self._upgrades = head + left, self._upgrades + 1
        if self._upgrades > MOST_UPGRADES:
            self.send_400_response("")
        else:
            super().data_received(self._arrived)

    def on_body(self, body: bytes) -> None:
        self._came_to_something = True
        super().on_body(body)

    def on_response_complete(self) -> None:
        self._unanswered.popleft()
        super().on_response_complete()
        if self.cycle.response_complete and not self.transport.is_closing():
            self._await_head()

    def shutdown(self) -> None:
        """The server ends: what was asked is answered, also what has not been read yet. To close a connection with that
        on it would reset it, and nobody could tell whether the request was taken."""
        self._is_ending = True
        self._announce_end()
        half = LAST_SECONDS / 2
        # Two timers, since a loop that is late runs those that are due before it reads.
        self.loop.call_later(half, self.loop.call_later, half, super().shutdown)

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no request, or too large for one. Where a request before it still waits for its response, that
        would be taken for it."""
        if self.transport.is_closing():
            return
        waiting, cycle = len(self._unanswered), self.cycle
        if not waiting or (waiting == 1 and cycle.more_body and not cycle.response_started):
            self.transport.write(_response(self._refusal or Fault.of(400, "invalid_http_error", "This is no HTTP.")))
        self.transport.close()

    def _announce_end(self) -> None:
        """The last of the requests that are here ends the connection, once all of it is here."""
        if self.cycle is not None and not (self.cycle.response_complete or self.cycle.more_body):
            self.cycle.keep_alive = False

    def _name(self, size: int) -> None:
        self._named += size
        if self._named > MOST_HEAD_BYTES:
            self._refusal = _too_large()
            raise ValueError("too large")  # which ends in send_400_response

    def _await_head(self) -> None:
        self._stop_waiting()
        self._patience = self.loop.call_later(HEAD_SECONDS, self._too_late)

    def _stop_waiting(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _too_late(self) -> None:
        if self._idle:
            message = f"The request did not arrive within {HEAD_SECONDS:g} seconds."
            self._refusal = Fault.of(408, "request_timeout", message)
            self.send_400_response("")
        self.transport.close()


def _exchange_of(scope: Any) -> Exchange:
    exchange: Exchange = scope[EXCHANGE]
    return exchange


def _too_large() -> Fault:
    return Fault.of(431, "request_too_large", f"The headers are larger than {MOST_HEAD_BYTES} bytes.")


def _response(fault: Fault) -> bytes:
    body = json.dumps({"detail": fault.detail}).encode()
    headers: dict[str, Any] = {
        **fault.headers,
        "content-type": "application/json",
        "content-length": len(body),
        "connection": "close",
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return STATUS_LINE[fault.status] + lines.encode() + b"\r\n" + body
