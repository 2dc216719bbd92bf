"""A server for one test or module: in a thread, on a port of its own."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import uvicorn

from flide import Engine
from flide.serve.app import DecisionServer
from flide.serve.config import ServeConfig


@contextlib.contextmanager
def running(engine: Engine, **options: Any) -> Iterator[str]:
    """The URL of a server that answers with an engine."""
    app = DecisionServer(engine, ServeConfig(**options)).app()
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", access_log=False, server_header=False))
    listening = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    deadline = time.monotonic() + 30
    while not server.started:
        assert time.monotonic() < deadline, "the server does not start"
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()
