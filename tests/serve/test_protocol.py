"""What a connection may send before there is a request."""

from __future__ import annotations

import contextlib
import json
import socket
import time

import pytest

from flide.serve import protocol
from tests.serve.conftest import BODY, Served

GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
POST = b"POST /v1/systemone HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
DATA = json.dumps(BODY).encode()


def connect(served: Served) -> socket.socket:
    host, port = served.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def exchanged(served: Served, data: bytes) -> bytes:
    """What is answered until the server closes."""
    answer = b""
    with connect(served) as connection:
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
    with connect(served) as connection:
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
    post = POST.replace(b"Transfer-Encoding: chunked", b"Content-Length: %d" % len(DATA)) + DATA
    assert not exchanged(served, post + b"no request\r\n\r\n").startswith(b"HTTP/1.1 400")


def test_heads_that_do_not_come(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.3)
    unread = b"POST /v1/nothing HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n"
    connections = {data: connect(served) for data in (b"", b"GET", GET + b"\r\nGET", unread)}
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
    assert time.monotonic() - began < 3
    assert answers[b""] == b""
    assert answers[b"GET"].startswith(b"HTTP/1.1 408")
    assert answers[GET + b"\r\nGET"].startswith(b"HTTP/1.1 200")
    assert answers[unread].startswith(b"HTTP/1.1 404")


def test_connections_that_stay_busy_are_kept(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.3)
    with connect(served) as connection:
        for _ in range(5):
            connection.sendall(GET + b"\r\n")
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")
            time.sleep(0.1)


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
    with connect(served) as connection:
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
