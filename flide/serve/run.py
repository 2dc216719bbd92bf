"""What every process that serves does: its log, its socket, uvicorn."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import uvicorn
from starlette.types import ASGIApp

from flide.console import FAILED, tell
from flide.errors import FlideError
from flide.serve.config import ServeConfig
from flide.serve.protocol import BoundedProtocol

logger = logging.getLogger("flide.serve")

BACKLOG = 2048  # connections that wait to be accepted
Result = TypeVar("Result")
END_SECONDS = 30.0  # for the round that runs when all is answered
SWITCH_SECONDS = 5e-4  # a thread may keep the interpreter while another one, the engine's above all, waits for it


@dataclass(frozen=True, slots=True)
class Logs:
    """How to log: the name of a level, in lower case, and "text" or "json"."""

    level: str
    format: str

    def set_up(self) -> None:
        """To standard error."""
        logging.basicConfig(format="%(name)s: %(message)s", stream=sys.stderr)
        for handler in logging.getLogger().handlers:
            handler.setLevel(self.level.upper())
            if self.format == "json":
                handler.setFormatter(_JsonLines())
        logging.getLogger().setLevel(self.level.upper())


class _JsonLines(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        line = {"time": self.formatTime(record), "level": record.levelname.lower(), "logger": record.name}
        return json.dumps({**line, "message": record.getMessage()}, ensure_ascii=False)


def bound(config: ServeConfig, *, shared: bool = False) -> socket.socket:
    """A socket at the server's address, which does not listen yet.

    Args:
        config: host and port.
        shared: with the socket given to :func:`share`, and all others like this one.

    Raises:
        FlideError: the address cannot be had.
    """
    sock = socket.socket(socket.AF_INET6 if ":" in config.host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind((config.host, config.port))
    except (OSError, OverflowError) as error:
        sock.close()
        reason = getattr(error, "strerror", None) or error
        raise FlideError(f"cannot listen on {config.host}:{config.port}: {reason}") from error
    return sock


def share(sock: socket.socket) -> None:
    """Let frontends bind to the address of a socket that was bound alone, so that it was not another server's. The
    kernel spreads connections over those that listen."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)


def keep_from_collector() -> None:
    """What is here now stays. Collecting it again and again would halt everything for half a second each time."""
    gc.collect()
    gc.freeze()


@contextlib.contextmanager
def ending(seconds: float = END_SECONDS) -> Iterator[None]:
    """Around what ends a process whose requests are answered: it ends by force where that takes too long."""

    def end() -> None:
        tell("the engine does not end")
        os._exit(FAILED)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def raise_file_limit() -> None:
    """As many open connections as this process may have; shells give far fewer by themselves."""
    with contextlib.suppress(ImportError, OSError, ValueError):  # not on this platform
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


class Server(uvicorn.Server):
    """uvicorn's, which takes connections that others accepted, too.

    Args:
        settings: see :func:`uvicorn_settings`.
        signals: end on SIGTERM and SIGINT.
        door: a socket over which another process hands connections.
    """

    def __init__(self, settings: uvicorn.Config, *, signals: bool = True, door: socket.socket | None = None) -> None:
        super().__init__(settings)
        self._signals, self._door = signals, door
        self._adopting: set[asyncio.Task[None]] = set()

    def accept_all(self, listening: socket.socket) -> None:
        """Serve the connections that wait to be accepted. To close the socket would reset them."""
        listening.setblocking(False)
        for _ in range(BACKLOG + 1):  # as many as can wait; who comes meanwhile, again and again, would have no end
            try:
                self.adopt(listening.accept()[0])
            except ConnectionAbortedError:
                continue
            except OSError:  # no more are there, or may be opened
                return

    def adopt(self, sock: socket.socket) -> None:
        """Serve an accepted connection."""
        sock.setblocking(False)
        task = asyncio.get_running_loop().create_task(self._adopt(sock))
        self._adopting.add(task)
        task.add_done_callback(self._adopting.discard)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self._door is not None:
            self._door.setblocking(False)
            asyncio.get_running_loop().add_reader(self._door.fileno(), self._at_the_door, self._door)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for listening in sockets or []:
            self.accept_all(listening)
        for server in self.servers:  # before anything is waited for, in which others could come
            server.close()
        if self._door is not None:
            self._at_the_door(self._door)
            self._close_the_door()  # which the other process sees
        if self._adopting:
            await asyncio.wait(self._adopting)
        for _ in range(3):  # turns, in which asyncio makes a connection of what it has accepted
            await asyncio.sleep(0)
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        with super().capture_signals() if self._signals else contextlib.nullcontext():
            yield

    async def _adopt(self, sock: socket.socket) -> None:
        settings = self.config
        protocol: Any = settings.http_protocol_class

        def connection() -> asyncio.Protocol:
            made: asyncio.Protocol = protocol(
                config=settings, server_state=self.server_state, app_state=self.lifespan.state
            )
            return made

        try:
            await asyncio.get_running_loop().connect_accepted_socket(connection, sock)
        except OSError:  # it is gone already
            sock.close()

    def _at_the_door(self, door: socket.socket) -> None:
        """Take all connections that are there."""
        while True:
            try:
                message, files, _, _ = socket.recv_fds(door, 1, 1)
            except BlockingIOError:
                return
            except OSError:
                message, files = b"", []
            if not message:  # the other process is gone
                self._close_the_door()
                return
            if not files:
                logger.warning("a connection is lost: this process may open no more files")
            for file in files:
                self.adopt(socket.socket(fileno=file))

    def _close_the_door(self) -> None:
        if self._door is not None:
            asyncio.get_running_loop().remove_reader(self._door.fileno())
            self._door.close()
            self._door = None


def uvicorn_settings(
    app: ASGIApp, config: ServeConfig, log_level: str, *, protocol: type[BoundedProtocol] = BoundedProtocol
) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=protocol,
        ws="none",  # it would log addresses that were asked for
        root_path=config.root_path,
        log_config=None,
        log_level=log_level,
        access_log=False,
        proxy_headers=False,  # nothing asks for the client's address
        server_header=False,
        timeout_graceful_shutdown=int(config.request_timeout) + 1,
    )


def run_loop(main: Coroutine[Any, Any, Result]) -> Result:
    """``asyncio.run`` on the loop that uvicorn takes: uvloop where there is one."""
    with asyncio.Runner(loop_factory=uvicorn.Config("", log_config=None).get_loop_factory()) as runner:
        return runner.run(main)


def run_uvicorn(
    app: ASGIApp, config: ServeConfig, logs: Logs, listening: socket.socket, *, door: socket.socket | None = None
) -> None:
    """Serve until SIGTERM or SIGINT, and then answer what was taken. ``door``: see :class:`Server`."""
    server = Server(uvicorn_settings(app, config, logs.level), door=door)

    def end(number: int, frame: object) -> None:
        server.should_exit = True

    # Until uvicorn waits for it; and uvicorn raises the signal that ended it once more, when all is answered.
    signal.signal(signal.SIGTERM, end)
    server.run(sockets=[listening])
