"""Whose a connection is: the engine's process's while there is nothing to do, otherwise a frontend's."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import select
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from flide import Engine
from flide.serve import direct
from flide.serve.app import DecisionServer
from flide.serve.backend import LocalBackend
from flide.serve.config import ServeConfig
from flide.serve.direct import MOST, Direct
from flide.serve.run import Logs, Server, bound, run_loop, share, uvicorn_settings
from tests.serve.conftest import BODY
from tests.serve.running import connect, healthy, wait_until
from tests.serve.test_cli import serving
from tests.serve.test_frontends import children_of
from tests.tiny_model import tiny_model_directory


@pytest.fixture(scope="module")
def fleet() -> Iterator[tuple[Any, str]]:
    with serving("--model", str(tiny_model_directory()), "--frontends", "2") as running:
        yield running


def is_taken_by(process: int, connections: list[socket.socket]) -> list[bool]:
    """Of connections that were answered, whether a process has their other end."""
    inodes = {}
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, remote, *rest = line.split()
        inodes[local, remote] = rest[6]
    held = set()
    for file in Path(f"/proc/{process}/fd").iterdir():
        try:
            held.add(os.readlink(file))
        except FileNotFoundError:
            continue
    ends = [(end(x.getpeername()), end(x.getsockname())) for x in connections]
    return [f"socket:[{inodes[pair]}]" in held for pair in ends]


def end(address: tuple[str, int]) -> str:
    return f"{int.from_bytes(socket.inet_aton(address[0]), 'little'):08X}:{address[1]:04X}"


def connect_alone(process: int, url: str) -> socket.socket:
    """A connection that the engine's process has, made when it had become quiet: soon after what came before."""
    kept: list[socket.socket] = []

    def is_alone() -> bool:
        time.sleep(0.05)
        one = connect(url)
        if healthy(one) and is_taken_by(process, [one]) == [True]:
            kept.append(one)
        else:
            one.close()
        return bool(kept)

    wait_until(is_alone)
    return kept[0]


def test_who_asks_alone_is_answered_by_the_engine_s_process(fleet: tuple[Any, str]) -> None:
    process, url = fleet
    for _ in range(5):
        connect_alone(process.pid, url).close()


def test_of_many_that_come_at_once_it_takes_few(fleet: tuple[Any, str]) -> None:
    process, url = fleet
    with connect_alone(process.pid, url) as one:
        many = [connect(url) for _ in range(100)]
        assert all(map(healthy, many))
        assert 1 <= sum(is_taken_by(process.pid, [one, *many])) <= MOST
    for connection in many:
        connection.close()


def test_idle_connections_do_not_add_up(fleet: tuple[Any, str]) -> None:
    process, url = fleet
    kept = [connect_alone(process.pid, url) for _ in range(MOST)]
    for _ in range(4):
        time.sleep(0.05)
        kept.append(connect(url))
        assert healthy(kept[-1])
    assert is_taken_by(process.pid, kept) == [True] * MOST + [False] * 4
    for connection in kept:
        connection.close()
    connect_alone(process.pid, url).close()


def test_while_a_request_runs_all_others_are_the_frontends(fleet: tuple[Any, str]) -> None:
    process, url = fleet
    questions = {f"q{i}": {"type": "noul", "instructions": f"Is {i} said?"} for i in range(400)}
    data = json.dumps({**BODY, "questions": questions}).encode()
    head = f"POST /v1/systemone HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(data)}\r\n\r\n"

    def takes_no_others() -> bool:
        """False where the request had not come yet, or was answered before all others were taken."""
        with connect_alone(process.pid, url) as first:
            first.sendall(head.encode() + data)
            time.sleep(0.05)
            others = [connect(url) for _ in range(8)]
            assert all(map(healthy, others))
            was_running = not select.select([first], [], [], 0)[0]
            assert first.recv(4096).startswith(b"HTTP/1.1 200")
            taken = is_taken_by(process.pid, others)
            for connection in others:
                connection.close()
        return was_running and not any(taken)

    wait_until(takes_no_others)


class Doors:
    """Frontends that a test plays, of a server in this process."""

    def __init__(self, engine: Engine) -> None:
        self.reserved = bound(ServeConfig(port=0))
        share(self.reserved)
        self.config = ServeConfig(port=self.reserved.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.config.port}"
        self.backend = LocalBackend(engine, self.config)
        self.doors: list[socket.socket] = []
        self.direct = Direct(self.backend, self.config, Logs("error", "text"), frontends=1, doors=lambda: self.doors)

    async def __aenter__(self) -> Doors:
        await self.backend.start()
        self.direct.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.direct.end()
        await self.backend.drain()
        self.reserved.close()


def test_where_no_frontend_takes_a_connection_it_is_the_engine_s(engine: Engine) -> None:
    async def test() -> None:
        async with Doors(engine) as played:
            gone, other = socket.socketpair(type=socket.SOCK_SEQPACKET)
            other.close()
            full, unread = socket.socketpair(type=socket.SOCK_SEQPACKET)
            full.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    full.send(b"x" * 1000)
            for doors in ([], [gone], [gone, full]):
                played.doors = doors
                answers = await asyncio.gather(
                    *(asyncio.to_thread(httpx.get, f"{played.url}/health") for _ in range(9))
                )
                assert [answer.status_code for answer in answers] == [200] * 9
            for sock in (gone, full, unread):
                sock.close()

    run_loop(test())


def test_where_it_may_open_no_more_files_connections_are_the_frontends_for_a_while(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct, "FULL", 0.2)

    async def test() -> None:
        async with Doors(engine) as played:
            listening = played.direct._listening
            assert listening is not None

            class Full:
                def fileno(self) -> int:
                    return listening.fileno()

                def accept(self) -> Any:
                    raise OSError(errno.EMFILE, "Too many open files")

            assert played.direct._takes_next
            played.direct._accept(Full())  # type: ignore[arg-type]
            assert not played.direct._takes_next
            answer = await asyncio.to_thread(httpx.get, f"{played.url}/health", timeout=60)
            assert answer.status_code == 200, "it takes connections again, of which it is the only one here"
            while not played.direct._takes_next:
                await asyncio.sleep(0.01)

    run_loop(test())


def test_a_kernel_that_cannot_choose_leaves_all_to_the_frontends(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(sock: socket.socket, program: bytes) -> None:
        raise OSError(92, "Protocol not available")

    monkeypatch.setattr(direct, "_attach", refuse)
    caplog.set_level("INFO", "flide.serve")

    async def test() -> None:
        async with Doors(engine) as played:
            with pytest.raises(ConnectionRefusedError):
                connect(played.url)

    run_loop(test())
    assert "takes no connections" in caplog.text


def test_a_connection_that_is_lost_at_the_door_takes_no_other_along(engine: Engine) -> None:
    """As where a process may open no more files: the message comes without one."""

    async def test() -> None:
        inside, outside = socket.socketpair(type=socket.SOCK_SEQPACKET)
        server = Server(
            uvicorn_settings(DecisionServer(engine, ServeConfig()).app(), ServeConfig(), "error"),
            signals=False,
            door=inside,
        )
        serving = asyncio.create_task(server.serve(sockets=[]))
        with bound(ServeConfig(port=0)) as listening:
            listening.listen()
            for _ in range(3):
                outside.send(b"\0")
                client = socket.create_connection(listening.getsockname())
                accepted, _ = listening.accept()
                socket.send_fds(outside, [b"\0"], [accepted.fileno()])
                accepted.close()
                assert await asyncio.to_thread(healthy, client)
                client.close()
        server.should_exit = True
        await serving
        with pytest.raises(BrokenPipeError):
            outside.send(b"\0")
        outside.close()

    run_loop(test())


UNFINISHED = b"POST /v1/systemone HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\n\r\n{"


def test_a_frontend_that_ends_is_handed_no_more(fleet: tuple[Any, str]) -> None:
    process, url = fleet
    files = Path(f"/proc/{process.pid}/fd")
    before = len(list(files.iterdir()))
    held = [connect(url) for _ in range(20)]  # which both frontends wait for before they end
    for connection in held:
        connection.sendall(UNFINISHED)
    processes = [process.pid, *children_of(process.pid)]
    wait_until(lambda: all(map(any, zip(*(is_taken_by(one, held) for one in processes), strict=True))))
    ending = children_of(process.pid)[0]
    os.kill(ending, signal.SIGTERM)
    for _ in range(20):
        burst = [connect(url) for _ in range(6)]
        assert all(map(healthy, burst))
        for connection in burst:
            connection.close()
    assert Path(f"/proc/{ending}").exists(), "it has not ended yet"
    for connection in held:
        connection.close()

    def is_replaced() -> bool:
        children = children_of(process.pid)
        return ending not in children and len(children) == 2 and len(list(files.iterdir())) <= before

    wait_until(is_replaced, "another one takes its place, and nothing is left of it")


def test_a_second_signal_does_not_wait_for_what_was_taken() -> None:
    with serving("--model", str(tiny_model_directory()), "--frontends", "1") as (process, url), connect(url) as one:
        # A request that never comes whole.
        one.sendall(UNFINISHED)
        wait_until(lambda: is_taken_by(process.pid, [one]) == [True])
        process.send_signal(signal.SIGTERM)
        time.sleep(1)
        assert process.poll() is None, "it waits"
        process.send_signal(signal.SIGTERM)
        process.wait(60)
