"""What a connection may send before there is a request, and what becomes of connections when the server ends."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from flide import Engine
from flide.serve import protocol, run
from flide.serve.app import DecisionServer
from flide.serve.config import ServeConfig
from flide.serve.run import Logs, Server, uvicorn_settings
from tests.serve.conftest import BODY, Served
from tests.serve.running import connect, healthy, wait_until

GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
POST = b"POST /v1/systemone HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
DATA = json.dumps(BODY).encode()
WHOLE = POST.replace(b"Transfer-Encoding: chunked", b"Content-Length: %d" % len(DATA)) + DATA


def exchanged(served: Served, data: bytes) -> bytes:
    """What is answered until the server closes."""
    answer = b""
    with connect(served.url) as connection:
        connection.sendall(data)
        while piece := connection.recv(1 << 16):
            answer += piece
    return answer


@pytest.mark.parametrize(
    ("begin", "endless"),
    [
        (b"GET /", b"a"),
        (GET, b"a"),
        (GET + b"A: ", b"a"),
        (GET, b"A: a\r\n"),
        (POST + b"1;", b"a"),
        (POST + b"1\r\n{\r\n0\r\nA: ", b"a"),
        (POST + b"1\r\n{\r\n0\r\n", b"A: a\r\n"),
    ],
)
def test_what_has_no_end_is_cut(served: Served, begin: bytes, endless: bytes) -> None:
    piece = endless * (10_000 // len(endless))
    sent, answer = 0, b""
    with connect(served.url) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(begin)
            while sent < 8 << 20:
                connection.sendall(piece)
                sent += len(piece)
        with contextlib.suppress(ConnectionError):
            answer = connection.recv(1 << 16)
    assert sent < 8 << 20
    assert not answer or answer.startswith((b"HTTP/1.1 431", b"HTTP/1.1 400"))


def test_a_head_that_is_too_large_is_refused_as_json(served: Served) -> None:
    head, _, body = exchanged(served, GET + b"A: " + b"a" * 70_000 + b"\r\n\r\n").partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 431")
    assert b"content-type: application/json" in head
    assert json.loads(body)["detail"]["error_type"] == "request_too_large"
    assert exchanged(served, GET + b"A: " + b"a" * 30_000 + b"\r\nConnection: close\r\n\r\n").startswith(
        b"HTTP/1.1 200"
    )


@pytest.mark.parametrize(
    "data", [b"\x16\x03\x01\x02\x00a secret\r\n\r\n", POST + b"a secret\r\n", GET + b"a secret\r\n"]
)
def test_what_is_no_http_is_refused_as_json(served: Served, data: bytes) -> None:
    head, _, body = exchanged(served, data).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400")
    assert json.loads(body)["detail"]["error_type"] == "invalid_http_error"
    assert b"secret" not in head + body


def test_a_refusal_is_not_taken_for_the_answer_before_it(served: Served) -> None:
    assert not exchanged(served, WHOLE + b"no request\r\n\r\n").startswith(b"HTTP/1.1 400")


def test_heads_that_do_not_come(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    otherwise = protocol.HEAD_SECONDS
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.3)
    unread = b"POST /v1/nothing HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n"
    connections = {data: connect(served.url) for data in (b"", b"GET", GET + b"\r\nGET", unread)}
    for data, connection in connections.items():
        connection.sendall(data)
    began, answers = time.monotonic(), {}
    for data, connection in connections.items():
        dripping, answer = data == unread, b""
        while piece := connection.recv(1 << 16):
            answer += piece
            if dripping:
                connection.sendall(b"x")
        answers[data] = answer
        connection.close()
    assert time.monotonic() - began < otherwise
    assert answers[b""] == b""
    assert answers[b"GET"].startswith(b"HTTP/1.1 408")
    assert answers[GET + b"\r\nGET"].startswith(b"HTTP/1.1 200")
    assert answers[unread].startswith(b"HTTP/1.1 404")


def test_connections_that_stay_busy_are_kept(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 1.5)
    with connect(served.url) as connection:
        for _ in range(5):
            assert healthy(connection)
            time.sleep(0.4)


@pytest.mark.parametrize("step", [1 << 20, 7])
@pytest.mark.parametrize("chunked", [False, True])
def test_requests_that_would_upgrade_are_answered(served: Served, step: int, chunked: bool) -> None:
    """Java's client sends such."""
    upgrade = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAM\r\n\r\n"
    head = POST.removesuffix(b"\r\n") + upgrade
    body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(DATA), DATA)
    if not chunked:
        head, body = head.replace(b"Transfer-Encoding: chunked", b"Content-Length: %d" % len(DATA)), DATA
    data = GET + upgrade + head + body + GET + b"Connection: close\r\n\r\n"
    with connect(served.url) as connection:
        for begin in range(0, len(data), step):
            connection.sendall(data[begin : begin + step])
        answer = b""
        while piece := connection.recv(1 << 16):
            answer += piece
    assert answer.count(b"HTTP/1.1 200") == 3
    assert b'"answers"' in answer


def test_upgrades_without_end(served: Served) -> None:
    upgrade = GET + b"Connection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
    with contextlib.suppress(ConnectionError):
        exchanged(served, upgrade * 2000)
    assert exchanged(served, GET + b"Connection: close\r\n\r\n").startswith(b"HTTP/1.1 200")


@pytest.fixture
def ending(engine: Engine) -> Iterator[Served]:
    """A server for a test to end."""
    served = Served(engine, ServeConfig())
    yield served
    served.stop()


def answer_on(connection: socket.socket) -> bytes:
    """All that comes."""
    answer = b""
    while piece := connection.recv(1 << 16):
        answer += piece
    return answer


def accepts(served: Served) -> bool:
    try:
        connect(served.url).close()
    except ConnectionError:
        return False
    return True


@pytest.mark.parametrize("is_new", [True, False], ids=["new", "kept"])
def test_what_comes_on_a_connection_while_the_server_ends_is_answered(
    ending: Served, monkeypatch: pytest.MonkeyPatch, is_new: bool
) -> None:
    monkeypatch.setattr(protocol, "LAST_SECONDS", 60.0)
    with connect(ending.url) as connection:
        if not is_new:
            assert healthy(connection)
        ending.end()
        wait_until(lambda: not accepts(ending))
        connection.sendall(WHOLE[:30])
        connection.sendall(WHOLE[30:])
        answer = answer_on(connection)
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"connection: close" in answer


def test_of_requests_that_come_together_while_the_server_ends_all_are_answered(
    ending: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "LAST_SECONDS", 60.0)
    with connect(ending.url) as connection:
        ending.end()
        wait_until(lambda: not accepts(ending))
        connection.sendall(GET + b"\r\n" + WHOLE + GET + b"\r\n" + WHOLE)
        assert answer_on(connection).count(b"HTTP/1.1 200") == 4


def test_what_is_refused_before_it_is_read_while_the_server_ends_is_read(
    ending: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To close at once would reset the connection, and might take the refusal along."""
    monkeypatch.setattr(protocol, "LAST_SECONDS", 3.0)
    size = 1 << 20
    with connect(ending.url) as connection:
        ending.end()
        wait_until(lambda: not accepts(ending))
        connection.sendall(b"POST /v1/nothing HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % size)
        assert connection.recv(12) == b"HTTP/1.1 404"
        connection.sendall(b" " * size)
        assert answer_on(connection)


def test_many_that_come_while_the_server_ends_do_not_hold_it_up(monkeypatch: pytest.MonkeyPatch) -> None:
    class Flooded:
        came = 0

        def setblocking(self, flag: bool) -> None:
            assert not flag

        def accept(self) -> Any:
            self.came += 1
            if self.came == 2:
                raise ConnectionAbortedError
            return self.came, None

    monkeypatch.setattr(run, "BACKLOG", 5)
    server, flooded, adopted = Server(uvicorn_settings(None, ServeConfig(), "error")), Flooded(), []  # type: ignore[arg-type]
    monkeypatch.setattr(server, "adopt", adopted.append)
    server.accept_all(flooded)  # type: ignore[arg-type]
    assert adopted == [1, 3, 4, 5, 6]


def test_a_signal_that_comes_before_the_first_connection_ends_the_server(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = Server.run

    def late(server: Server, **options: Any) -> None:
        signal.raise_signal(signal.SIGTERM)
        loop(server, **options)

    monkeypatch.setattr(Server, "run", late)
    before = signal.getsignal(signal.SIGTERM)
    try:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            run.run_uvicorn(
                DecisionServer(engine, ServeConfig()).app(), ServeConfig(), Logs("error", "text"), listening
            )
    finally:
        signal.signal(signal.SIGTERM, before)


def test_connections_on_which_nothing_comes_do_not_keep_the_server(ending: Served) -> None:
    with connect(ending.url) as silent, connect(ending.url) as begun, connect(ending.url) as kept:
        begun.sendall(GET)
        assert healthy(kept)
        began = time.monotonic()
        ending.stop()
        assert time.monotonic() - began < protocol.HEAD_SECONDS
        assert answer_on(silent) == answer_on(kept) == b""
        with contextlib.suppress(ConnectionResetError):  # a part of a head was not read
            assert answer_on(begun) == b""


def test_no_connection_is_reset_when_the_server_ends(ending: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor those that it has not accepted yet, nor those whose requests it has not read."""
    let_go, admit = threading.Event(), DecisionServer._admit

    def hold_up(*arguments: Any) -> Any:  # on the event loop
        assert let_go.wait(60)
        return admit(*arguments)

    monkeypatch.setattr(DecisionServer, "_admit", hold_up)
    asked = [connect(ending.url) for _ in range(100)]
    for connection in asked:
        assert healthy(connection)
    with connect(ending.url) as held_up:
        held_up.sendall(WHOLE)
        asked += [connect(ending.url) for _ in range(100)]
        for connection in asked:
            connection.sendall(GET + b"\r\n")
        ending.end()
        time.sleep(0.2)  # so that it looks for its end first
        let_go.set()
        assert answer_on(held_up).startswith(b"HTTP/1.1 200")
    for connection in asked:
        with connection:
            assert answer_on(connection).startswith(b"HTTP/1.1 200")
