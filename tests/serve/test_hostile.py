"""Connections that stall, break off or come by the hundred: the next good request is answered."""

from __future__ import annotations

import asyncio
import json
import resource
import threading
import time
from typing import Any

import httpx
import pytest

from flide import Engine
from flide.runtime.request import DecisionRequest
from flide.runtime.rounds import PreparedRequest
from flide.serve.app import MOST_READERS, DecisionServer
from flide.serve.body import SHORT
from flide.serve.config import ServeConfig
from tests.serve.conftest import BODY, Served
from tests.serve.running import wait_until

DATA = json.dumps(BODY).encode()
HEAD = b"POST /v1/systemone HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"


def run(test: Any) -> None:
    asyncio.run(asyncio.wait_for(test, 120))


async def connect(served: Served) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = served.url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


async def good(served: Served) -> float:
    async with httpx.AsyncClient(base_url=served.url, timeout=60) as client:
        began = time.perf_counter()
        response = await client.post("/v1/systemone", json=BODY)
        assert response.status_code == 200
        return time.perf_counter() - began


def test_stalled_uploads_hold_nobody_up(served: Served) -> None:
    async def test() -> None:
        stalled = [await connect(served) for _ in range(64)]
        for _, writer in stalled:
            writer.write(HEAD % len(DATA) + DATA[:10])
            await writer.drain()
        await good(served)
        statuses = [await asyncio.wait_for(reader.readline(), 60) for reader, _ in stalled]
        assert all(b" 408 " in status for status in statuses)
        for _, writer in stalled:
            writer.close()

    run(test())


def test_bodies_that_break_off_leave_nothing_behind(served: Served) -> None:
    async def test() -> None:
        for cut in (0, 1, len(DATA) // 2, len(DATA) - 1):
            _, writer = await connect(served)
            writer.write(HEAD % len(DATA) + DATA[:cut])
            await writer.drain()
            writer.transport.abort()
        for _ in range(100):  # complete requests whose senders do not wait
            _, writer = await connect(served)
            writer.write(HEAD % len(DATA) + DATA)
            await writer.drain()
            writer.transport.abort()
        await good(served)
        scheduler = served.decisions.backend.scheduler

        def is_over() -> bool:
            return not (scheduler.waiting or scheduler.running_tokens or scheduler._per_key)

        await asyncio.to_thread(wait_until, is_over, "something is still waiting")

    run(test())


def test_what_is_no_http_is_sent_away(served: Served) -> None:
    async def test() -> None:
        for data in (b"\x16\x03\x01\x02\x00", b"GET / HTTP/9.9\r\n\r\n", b"nonsense\r\n\r\n", b"GET " + b"x" * 100_000):
            reader, writer = await connect(served)
            writer.write(data)
            await writer.drain()
            writer.write_eof()
            answer = await asyncio.wait_for(reader.read(), 60)
            assert not answer or answer.startswith((b"HTTP/1.1 400", b"HTTP/1.1 4"))
            writer.close()
        await good(served)

    run(test())


def test_health_answers_while_the_engine_works(served: Served) -> None:
    async def test() -> None:
        slow = {**BODY, "questions": {f"q{i}": {"type": "noul", "instructions": f"Is {i} said?"} for i in range(200)}}
        async with httpx.AsyncClient(base_url=served.url, timeout=60) as client:
            work = [asyncio.ensure_future(client.post("/v1/systemone", json=slow)) for _ in range(4)]
            times, start = [], time.perf_counter()
            while not all(task.done() for task in work):
                began = time.perf_counter()
                assert (await client.get("/health")).status_code == 200
                times.append(time.perf_counter() - began)
                await asyncio.sleep(0.01)
            assert all(task.result().status_code == 200 for task in work)
        took = time.perf_counter() - start
        assert len(times) > 5
        # A tenth of a second on an idle machine; a quarter of all where rounds held it up.
        assert sorted(times)[int(0.9 * len(times))] < max(1.0, took / 8)

    run(test())


@pytest.mark.slow
def test_two_thousand_connections_at_once(served: Served) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 5000:
        pytest.skip("the machine allows too few open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 5000), hard))

    async def test() -> None:
        idle = await asyncio.gather(*(connect(served) for _ in range(2000)))
        await good(served)
        request = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
        for _, writer in idle:
            writer.write(request)
        lines = await asyncio.gather(*(asyncio.wait_for(reader.readline(), 60) for reader, _ in idle))
        assert all(line == b"HTTP/1.1 200 OK\r\n" for line in lines)
        for _, writer in idle:
            writer.close()
        await good(served)

    run(test())


def test_reading_stops_for_who_left_and_ends_in_time(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes long to read holds up neither those who come later nor those who asked for it."""
    let_go, begun = threading.Event(), []
    long = {**BODY, "state": "long " * SHORT}  # what is short is read at once
    data = json.dumps(long).encode()

    def slow(self: DecisionServer, request: DecisionRequest, key: str) -> PreparedRequest:
        begun.append(request)
        assert let_go.wait(60)
        return self.backend.reader.encode(request)

    async def test() -> None:
        served = Served(engine, ServeConfig(request_timeout=0.5))
        try:
            with monkeypatch.context() as patch:
                patch.setattr(DecisionServer, "_admit", slow)
                async with httpx.AsyncClient(base_url=served.url, timeout=60) as client:
                    assert (await client.post("/v1/systemone", json=long)).status_code == 503
                served.decisions.config = ServeConfig()
                writers = [(await connect(served))[1] for _ in range(30)]
                for writer in writers:
                    writer.write(HEAD % len(data) + data)
                    await writer.drain()
                turns = served.decisions._turns
                await asyncio.to_thread(wait_until, lambda: turns.waiting >= len(writers) - MOST_READERS)
                for writer in writers:
                    writer.transport.abort()
                await asyncio.to_thread(wait_until, lambda: not turns.waiting)
                let_go.set()
                async with httpx.AsyncClient(base_url=served.url, timeout=60) as client:  # read after all before it
                    assert (await client.post("/v1/systemone", json=long)).status_code == 422  # longer than allowed
                assert len(begun) < 20
            await good(served)
        finally:
            let_go.set()
            await asyncio.to_thread(served.stop)

    run(test())


@pytest.mark.parametrize("as_object", [False, True])
def test_short_bodies_whose_prompts_are_long_are_read_off_the_event_loop(
    as_object: bool, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some formats repeat a question's instructions in a prompt for every option."""
    readers = []
    admit = DecisionServer._admit

    def watched(self: DecisionServer, request: DecisionRequest, key: str) -> PreparedRequest:
        readers.append(threading.current_thread().name.startswith("flide-read"))
        return admit(self, request, key)

    monkeypatch.setattr(DecisionServer, "_admit", watched)
    for options, length in ((2, 8000), (100, 100), (100, 8000)):
        instructions = {"ask": "x" * length} if as_object else "x" * length
        criteria = {str(number): None for number in range(options)}
        question = {"type": "choice", "instructions": instructions, "criteria": criteria}
        body = {**BODY, "questions": {"q": question}}
        assert len(json.dumps(body)) < SHORT
        httpx.post(served.url + "/v1/systemone", json=body, timeout=60)
    assert readers[0] is False
    assert readers[2] is True
    assert as_object or readers[1] is False
    wait_until(lambda: not served.decisions.is_deciding)
