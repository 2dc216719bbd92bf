"""A server for one test or module, connections to it, and waiting for what it does by itself."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

from flide import Engine
from flide.serve.config import ServeConfig
from tests.serve.conftest import Served


@contextlib.contextmanager
def running(engine: Engine, **options: Any) -> Iterator[str]:
    """The URL of a server that answers with an engine."""
    served = Served(engine, ServeConfig(**options))
    try:
        yield served.url
    finally:
        served.stop()


def connect(url: str) -> socket.socket:
    """A connection to a server."""
    address = urlsplit(url)
    return socket.create_connection((address.hostname, address.port), timeout=60)


def healthy(connection: socket.socket) -> bool:
    """Whether ``/health`` is answered on a connection, which is kept."""
    connection.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    answer = b""
    while not answer.endswith(b"}"):
        piece = connection.recv(4096)
        assert piece, "it was closed"
        answer += piece
    return answer.startswith(b"HTTP/1.1 200")


def wait_until(is_so: Callable[[], bool], what: str = "") -> None:
    """For what happens soon, however busy the machine is."""
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)
