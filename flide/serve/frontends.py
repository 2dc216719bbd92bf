"""Several processes that read requests and write answers, in front of the one that has the engine.

Python reads and writes on one core at a time. Where that, and not the device, limits how many requests are answered,
frontends do all that needs no model: sockets, bodies, keys, prompts, tokens, and decisions from logits. The kernel
spreads connections over them, but for those that come while there is nothing to do (``direct.py``).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess

from flide.console import import_modules
from flide.errors import FlideError
from flide.runtime.engine import Engine
from flide.runtime.reader import RequestReader
from flide.serve.app import DecisionServer
from flide.serve.backend import LocalBackend
from flide.serve.config import ServeConfig
from flide.serve.direct import Direct
from flide.serve.hub import Hub
from flide.serve.remote import RemoteBackend
from flide.serve.run import BACKLOG, SWITCH_SECONDS, Logs, bound, keep_from_collector, run_loop, run_uvicorn, share

logger = logging.getLogger("flide.serve")

MOST_FRONTENDS = 64
MOST_ENDS = 5  # that frontends may meet on their own within a minute, times their number
START_SECONDS = 120.0  # that all of them may take


@dataclass(frozen=True, slots=True)
class _Settings:
    """What a frontend needs to begin."""

    reader: RequestReader
    config: ServeConfig
    logs: Logs
    imports: Sequence[str]


@dataclass(eq=False, slots=True)
class _Frontend:
    """A process that waits for its settings, and our ends of what leads to it."""

    process: SpawnProcess
    settings: Connection
    sock: socket.socket
    door: socket.socket
    is_up: bool = False

    @classmethod
    def spawn(cls, imports: Sequence[str]) -> _Frontend:
        context = multiprocessing.get_context("spawn")
        ours, theirs = socket.socketpair()
        door, inside = socket.socketpair(type=socket.SOCK_SEQPACKET)  # each message is one connection
        door.setblocking(False)
        receiving, sending = context.Pipe(duplex=False)
        arguments = (theirs, inside, receiving, imports)
        process = context.Process(target=_run_frontend, args=arguments, name="flide-frontend", daemon=True)
        # A terminal sends SIGINT to all processes: the first one ends the others. What is blocked now is so in them.
        resource_tracker.ensure_running()  # whose start would end the block
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for end in (theirs, inside, receiving):
            end.close()
        return cls(process, sending, ours, door)

    def set_up(self) -> None:
        self.is_up = True


class Frontends:
    """The frontends of one engine. They are started at once, so that their imports overlap with making it ready.

    Args:
        count: of processes.
        imports: what they import first, as ``--import`` takes it: the model's head may be a class from there.

    Raises:
        FlideError: the platform cannot spread connections, or there are too many.
    """

    def __init__(self, count: int, *, imports: Sequence[str] = ()) -> None:
        if sys.platform != "linux":
            raise FlideError("several frontends need Linux, whose kernel spreads connections over processes")
        if not 1 <= count <= MOST_FRONTENDS:
            raise FlideError(f"frontends should be 1 to {MOST_FRONTENDS}")
        self._imports = imports
        self._frontends = [_Frontend.spawn(imports) for _ in range(count)]

    def serve(
        self, engine: Engine, config: ServeConfig, logs: Logs, *, listening: Callable[[socket.socket], None]
    ) -> int:
        """Answer until SIGTERM or SIGINT, then all that was taken.

        Args:
            engine: made ready.
            config: limits and where to listen.
            logs: of the frontends.
            listening: called with a socket at the address when all frontends accept connections.

        Returns:
            The exit code.

        Raises:
            FlideError: the port cannot be had, or the frontends do not start.
        """
        # Bound but not listening: the port stays ours, and the kernel gives this socket no connections.
        with bound(config) as reserved:
            share(reserved)
            config = replace(config, port=reserved.getsockname()[1])
            fleet = _Fleet(
                self._frontends,
                LocalBackend(engine, config),
                _Settings(engine.reader.on_cpu(), config, logs, self._imports),
            )
            return run_loop(fleet.serve(lambda: listening(reserved)))

    def end(self) -> None:
        """End processes that still run."""
        for frontend in self._frontends:
            frontend.settings.close()
            frontend.sock.close()
            frontend.door.close()
            frontend.process.kill()
            frontend.process.join()


class _Fleet:
    """Frontends while they serve. On the event loop."""

    def __init__(self, frontends: list[_Frontend], backend: LocalBackend, settings: _Settings) -> None:
        self._frontends, self._backend, self._settings = frontends, backend, settings
        self._hub = Hub(backend)
        self._direct = Direct(backend, settings.config, settings.logs, frontends=len(frontends), doors=self._doors)
        self._links: set[asyncio.Task[None]] = set()
        self._ends: deque[float] = deque()  # of the last minute, in seconds on the monotonic clock
        self._code = 0
        self._stop = asyncio.Event()
        self._hurries = False

    async def serve(self, listening: Callable[[], None]) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._end_with, 130 if number == signal.SIGINT else 0)
        await self._backend.start()
        if self._backend.engine.can_run_on_a_loop:
            self._backend.engine.run_on(loop)  # which passes messages, and little else
        self._direct.start()
        for frontend in self._frontends:
            self._begin(frontend)
        deadline = time.monotonic() + START_SECONDS
        while not (self._stop.is_set() or all(frontend.is_up for frontend in self._frontends)):
            if time.monotonic() > deadline:
                for frontend in self._frontends:  # or what is sent to them would be waited for
                    frontend.process.kill()
                raise FlideError("the frontends do not start")
            await asyncio.sleep(0.02)
        if not self._stop.is_set():
            listening()
        await self._stop.wait()
        for frontend in self._frontends:
            loop.remove_reader(frontend.process.sentinel)
            frontend.process.terminate()
        ending = asyncio.create_task(self._direct.end())
        deadline = time.monotonic() + self._settings.config.request_timeout + 2
        while any(frontend.process.is_alive() for frontend in self._frontends) and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
            if self._hurries:
                break
        for frontend in self._frontends:
            frontend.process.kill()
        await asyncio.gather(ending, *self._links, return_exceptions=True)
        await self._backend.drain()
        return self._code

    def _doors(self) -> list[socket.socket]:
        return [frontend.door for frontend in self._frontends if frontend.is_up]

    def _end_with(self, code: int) -> None:
        """A second time: at once."""
        self._hurries = self._stop.is_set()
        self._code = code
        self._stop.set()
        if self._hurries:
            self._direct.hurry()

    def _begin(self, frontend: _Frontend) -> None:
        asyncio.get_running_loop().add_reader(frontend.process.sentinel, self._has_ended, frontend)
        link = asyncio.create_task(self._link(frontend))
        self._links.add(link)
        link.add_done_callback(self._links.discard)

    async def _link(self, frontend: _Frontend) -> None:
        with contextlib.suppress(OSError):  # it ended already, which its sentinel tells
            await asyncio.to_thread(frontend.settings.send, self._settings)  # it may still be importing
        await self._hub.serve(frontend.sock, up=frontend.set_up)

    def _has_ended(self, frontend: _Frontend) -> None:
        """A frontend ended on its own: another one takes its place."""
        asyncio.get_running_loop().remove_reader(frontend.process.sentinel)
        if self._stop.is_set():
            return
        frontend.process.join()
        logger.error("a frontend ended with %s", frontend.process.exitcode)
        self._ends.append(time.monotonic())
        while self._ends[0] < self._ends[-1] - 60:
            self._ends.popleft()
        if len(self._ends) > MOST_ENDS * len(self._frontends):
            logger.error("too many frontends ended")
            self._end_with(1)
            return
        another = _Frontend.spawn(self._settings.imports)
        self._frontends[self._frontends.index(frontend)] = another
        frontend.door.close()
        frontend.settings.close()
        frontend.process.close()
        self._begin(another)


def _run_frontend(sock: socket.socket, door: socket.socket, settings: Connection, imports: Sequence[str]) -> None:
    """The process of one frontend."""
    import_modules(imports)
    try:
        given: _Settings = settings.recv()
    except EOFError:  # the engine was not made
        return
    given.logs.set_up()
    sys.setswitchinterval(SWITCH_SECONDS)
    backend = RemoteBackend(given.reader, sock, gone=lambda: os.kill(os.getpid(), signal.SIGTERM))
    server = DecisionServer(backend, given.config)
    keep_from_collector()
    with bound(given.config, shared=True) as listening:
        listening.listen(BACKLOG)
        run_uvicorn(server.app(), given.config, given.logs, listening, door=door)
