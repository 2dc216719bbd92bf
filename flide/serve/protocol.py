"""HTTP/1.1 on a connection: uvicorn's, with bounds on what a client may send before there is a request, and on the time
that it may take for that. Bodies are bounded by who reads them."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any, cast

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from flide.serve.faults import Fault

MOST_HEAD_BYTES = 64 << 10  # of a request line with its headers; also of trailers, and of what frames a body
MOST_UPGRADES = 8  # to other protocols, that requests ask for which come together
ON_LEAVING = "flide.on_leaving"  # where a request's scope has its OnLeaving
HEAD_SECONDS = 10.0  # in which a head has to be there; longer than a connection is kept that sends nothing


class OnLeaving:
    """What is called when the client leaves before it has its response. An object, so that copies of a scope share it.

    Attributes:
        call: for the application to set.
    """

    __slots__ = ("call",)

    def __init__(self) -> None:
        self.call: Callable[[], None] | None = None


class BoundedProtocol(HttpToolsProtocol):
    """See the module."""

    _named = 0  # bytes of the address and headers of this message
    _idle = 0  # bytes since something came of them
    _came_to_something = False
    _arrived = b""
    _upgrades = 0
    _is_again = False  # a head is read that was read before
    _refusal: Fault | None = None
    _patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)
        if self.cycle is not None and self.cycle.disconnected:
            leaving: OnLeaving = cast(dict[str, Any], self.cycle.scope)[ON_LEAVING]
            if leaving.call is not None:
                leaving.call()

    def data_received(self, data: bytes) -> None:
        self._came_to_something = False
        self._arrived, self._upgrades = data, 0
        super().data_received(data)
        self._idle = 0 if self._came_to_something else self._idle + len(data)
        if self._idle > MOST_HEAD_BYTES and not self.transport.is_closing():
            self._refusal = _too_large()
            self.send_400_response("")

    def on_message_begin(self) -> None:
        if not self._is_again:
            self._named = 0
            super().on_message_begin()
            cast(dict[str, Any], self.scope)[ON_LEAVING] = OnLeaving()

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
            self._came_to_something = True
            self._stop_waiting()
            super().on_headers_complete()
        self._is_again = False

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()

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
        super().on_response_complete()
        if self.cycle.response_complete and not self.transport.is_closing():
            self._await_head()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no request, or too large for one. Where a request before it still waits for its response, that
        would be taken for it."""
        if self.transport.is_closing():
            return
        cycle = self.cycle
        if cycle is None or cycle.response_complete or (cycle.more_body and not cycle.response_started):
            self.transport.write(_response(self._refusal or Fault.of(400, "invalid_http_error", "This is no HTTP.")))
        self.transport.close()

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
