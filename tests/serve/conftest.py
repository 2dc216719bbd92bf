"""One engine and one server for the tests of a session, on a port of its own."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from flide import Engine, EngineConfig
from flide.serve.app import DecisionServer
from flide.serve.config import ServeConfig
from flide.serve.run import Server, uvicorn_settings
from tests.tiny_model import tiny_engine

BODY: dict[str, Any] = {
    "model": "jev-latest",
    "state": "The parcel came late and one cup was broken.",
    "questions": {
        "late": {"type": "noul", "instructions": "Was the parcel late?"},
        "team": {"type": "choice", "criteria": {"shipping": "delivery and damage", "billing": None}},
        "anger": {"type": "score", "instructions": "How angry?", "criteria": ["calm", "annoyed", "angry"]},
    },
}


class Served:
    """A server in a thread. ``around``: a middleware."""

    def __init__(self, engine: Engine, config: ServeConfig, *, around: Callable[[Any], Any] = lambda app: app) -> None:
        self.decisions = DecisionServer(engine, config)
        listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        self._server = Server(uvicorn_settings(around(self.decisions.app()), config, "error"), signals=False)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listening]}, daemon=True)
        self._thread.start()
        deadline = time.monotonic() + 60
        while not self._server.started:
            assert time.monotonic() < deadline, "the server does not start"
            time.sleep(0.01)

    def end(self) -> None:
        """As a signal does."""
        self._server.should_exit = True

    def stop(self) -> None:
        self.end()
        self._thread.join(60)
        assert not self._thread.is_alive()


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    with tiny_engine(EngineConfig(device="cpu")) as engine:
        yield engine


@pytest.fixture(scope="session")
def served(engine: Engine) -> Iterator[Served]:
    served = Served(engine, ServeConfig(body_timeout=4.0, max_wait=60.0, max_body_bytes=1 << 20))
    yield served
    served.stop()


@pytest.fixture(scope="session")
def client(served: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=60) as client:
        yield client
