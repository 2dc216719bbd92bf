"""Connections that the engine's process takes itself, with no frontend before it: those that come while it is quiet.

Who asks alone waits for one process instead of two, and for no messages between them. All others are the frontends',
so that the engine's thread shares its interpreter with few. The kernel chooses: sockets that listen at one address are
a group, in which this process is the first, and a program of a few instructions names one of them for every new
connection. What comes before the kernel is told otherwise is handed to a frontend.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import itertools
import logging
import socket
import struct
from collections.abc import Callable, Sequence

from flide.serve.app import DecisionServer
from flide.serve.backend import LocalBackend
from flide.serve.config import ServeConfig
from flide.serve.protocol import BoundedProtocol
from flide.serve.run import BACKLOG, Logs, Server, bound, uvicorn_settings

logger = logging.getLogger("flide.serve")

QUIET = 0.005  # seconds in which nothing came
MOST = 4  # connections of this process
FULL = 0.5  # seconds that it waits where it may open no more files

_ATTACH = 51  # SO_ATTACH_REUSEPORT_CBPF, which the socket module does not name
# Classic BPF: operation, two jumps, operand.
_LOAD, _MODULO, _ADD, _RETURN, _RETURN_LOADED = 0x20, 0x94, 0x04, 0x06, 0x16
_RANDOM = 0xFFFFF000 + 56  # SKF_AD_OFF + SKF_AD_RANDOM: a word that is random


class Direct:
    """The engine's process as a server beside its frontends.

    Args:
        backend: started, and drained, by its owner.
        config: host and port, at which frontends are going to listen.
        logs: levels.
        frontends: how many there are to be.
        doors: says over which sockets those that are up are handed connections.
    """

    def __init__(
        self,
        backend: LocalBackend,
        config: ServeConfig,
        logs: Logs,
        *,
        frontends: int,
        doors: Callable[[], Sequence[socket.socket]],
    ) -> None:
        self._backend, self._config, self._frontends, self._doors = backend, config, frontends, doors
        self._decisions = DecisionServer(backend, config)
        settings = uvicorn_settings(self._decisions.app(), config, logs.level, protocol=self._protocol())
        settings.lifespan = "off"  # which is the backend's
        self._server = Server(settings, signals=False)
        self._turn = itertools.count()
        self._listening: socket.socket | None = None
        self._serving: asyncio.Task[None] | None = None
        self._takes_next = True
        self._last = 0.0  # when something came, in seconds of the loop's clock

    def start(self) -> None:
        """Listen, before any frontend does: the first socket of a group is the one numbered 0."""
        listening = bound(self._config, shared=True)
        try:
            _attach(listening, _to_the_first())
        except OSError as error:
            listening.close()
            logger.info("the engine's process takes no connections: this kernel cannot choose them (%s)", error)
            return
        listening.listen(BACKLOG)
        listening.setblocking(False)
        self._listening = listening
        loop = asyncio.get_running_loop()
        self._serving = loop.create_task(self._server.serve(sockets=[]))
        loop.add_reader(listening.fileno(), self._accept, listening)

    async def end(self) -> None:
        """Answer what was taken, and take nothing new."""
        listening, self._listening = self._listening, None
        if listening is not None:
            asyncio.get_running_loop().remove_reader(listening.fileno())
            self._server.accept_all(listening)
            listening.close()
        self._server.should_exit = True
        if self._serving is not None:
            await self._serving
        self._decisions.end()

    def hurry(self) -> None:
        """Do not wait for what was taken: nobody is answered any more."""
        self._server.should_exit = self._server.force_exit = True
        for task in self._server.server_state.tasks:
            task.cancel()

    def _accept(self, listening: socket.socket) -> None:
        """Take the connection that waits."""
        try:
            sock, _ = listening.accept()
        except BlockingIOError:  # it has left
            return
        except OSError as error:  # of the connection, or of too many open files
            logger.warning("a connection was not accepted: %s", error)
            loop = asyncio.get_running_loop()
            loop.remove_reader(listening.fileno())
            self._choose(False)
            loop.call_later(FULL, self._accept_again)
            return
        if self._is_quiet() or not self._hand_over(sock):
            self._server.adopt(sock)
            self._stir()

    def _accept_again(self) -> None:
        if self._listening is not None:
            asyncio.get_running_loop().add_reader(self._listening.fileno(), self._accept, self._listening)
            self._look()

    def _is_quiet(self) -> bool:
        scheduler = self._backend.scheduler
        return (
            not (self._decisions.is_deciding or scheduler.waiting or scheduler.running_tokens)
            and asyncio.get_running_loop().time() - self._last >= QUIET
            and len(self._server.server_state.connections) < MOST
        )

    def _hand_over(self, sock: socket.socket) -> bool:
        """Give a connection to a frontend; False if none takes it."""
        doors = self._doors()
        for _ in doors:
            door = doors[next(self._turn) % len(doors)]
            with contextlib.suppress(OSError):  # it ended, or has no time
                socket.send_fds(door, [b"\0"], [sock.fileno()])
                sock.close()
                return True
        return False

    def _stir(self) -> None:
        """Something came: the next connection is a frontend's, until all has become quiet."""
        loop = asyncio.get_running_loop()
        self._last = loop.time()
        if self._takes_next:
            self._choose(False)
            loop.call_later(QUIET, self._look)

    def _look(self) -> None:
        if self._is_quiet():
            self._choose(True)
        elif not self._server.should_exit:
            asyncio.get_running_loop().call_later(QUIET, self._look)

    def _choose(self, takes_next: bool) -> None:
        self._takes_next = takes_next
        if self._listening is not None:
            _attach(self._listening, _to_the_first() if takes_next else _to_others(self._frontends))

    def _protocol(self) -> type[BoundedProtocol]:
        """Of connections that tell when something comes."""
        stir = self._stir

        class Protocol(BoundedProtocol):
            def data_received(self, data: bytes) -> None:
                stir()
                super().data_received(data)

        return Protocol


def _to_the_first() -> bytes:
    return _instruction(_RETURN, 0)


def _to_others(count: int) -> bytes:
    """To a random one of those numbered 1 to ``count``; where it is missing, the kernel takes any."""
    steps = ((_LOAD, _RANDOM), (_MODULO, count), (_ADD, 1), (_RETURN_LOADED, 0))
    return b"".join(_instruction(*step) for step in steps)


def _instruction(operation: int, operand: int) -> bytes:
    return struct.pack("HBBI", operation, 0, 0, operand)


def _attach(sock: socket.socket, program: bytes) -> None:
    """Let a program choose among the sockets of a group.

    Raises:
        OSError: the kernel cannot.
    """
    memory = ctypes.create_string_buffer(program, len(program))  # copied by the kernel
    header = struct.pack("HP", len(program) // len(_to_the_first()), ctypes.addressof(memory))
    sock.setsockopt(socket.SOL_SOCKET, _ATTACH, header)
