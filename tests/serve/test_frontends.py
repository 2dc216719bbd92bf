"""Frontends: the link in one process, and ``flide serve --frontends`` as processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from flide import Engine
from flide.cli import main
from flide.errors import FlideError, ModelOutputError
from flide.runtime.rounds import OptionLogits
from flide.runtime.wire import parse_body
from flide.serve.backend import LocalBackend
from flide.serve.config import ServeConfig
from flide.serve.faults import Fault
from flide.serve.hub import Hub
from flide.serve.remote import RemoteBackend
from flide.serve.run import bound, ending, share
from tests.serve.conftest import BODY
from tests.serve.running import wait_until
from tests.serve.test_cli import ask, serving
from tests.tiny_model import tiny_model_directory


class Linked:
    """A frontend's backend and the engine's, on one event loop."""

    def __init__(self, engine: Engine, **options: Any) -> None:
        self.local = LocalBackend(engine, ServeConfig(**options))
        self.ours, theirs = socket.socketpair()
        self.is_up, self.is_gone = asyncio.Event(), asyncio.Event()
        self.remote = RemoteBackend(engine.reader.on_cpu(), theirs, gone=self.is_gone.set)

    async def __aenter__(self) -> Linked:
        await self.local.start()
        self.serving = asyncio.create_task(Hub(self.local).serve(self.ours, up=self.is_up.set))
        await self.remote.start()
        await asyncio.wait_for(self.is_up.wait(), 60)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.remote.drain()
        await asyncio.wait_for(self.serving, 60)
        await self.local.drain()

    async def ask(self, body: Any = BODY, key: str = "k") -> Any:
        with self.remote.ticket(self.remote.reader.encode(parse_body(body)), key) as place:
            decision = await place.answer
        assert place.ran > 0
        return decision


def in_a_loop(test: Callable[[Engine], Coroutine[Any, Any, None]]) -> Callable[[Engine], None]:
    def run(engine: Engine) -> None:
        asyncio.run(asyncio.wait_for(test(engine), 120))

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@in_a_loop
async def test_decisions_over_a_link_are_the_engine_s(engine: Engine) -> None:
    async with Linked(engine) as linked:
        found = await asyncio.gather(*[linked.ask() for _ in range(20)])
    (wanted,) = engine.decide([BODY])
    assert all(decision.usage == wanted.usage for decision in found)
    for decision in found:
        for name, answer in wanted.answers.items():
            assert decision[name].probabilities == pytest.approx(dict(answer.probabilities), abs=1e-5)


@in_a_loop
async def test_what_the_queue_refuses_is_refused_where_it_was_asked(engine: Engine) -> None:
    async with Linked(engine, max_per_key=1) as linked:
        first, second, other = await asyncio.gather(
            linked.ask(), linked.ask(), linked.ask(key="other"), return_exceptions=True
        )
        assert isinstance(second, Fault)
        assert second.status == 429
        assert second.headers["Retry-After"]
        assert not isinstance(first, Exception)
        assert not isinstance(other, Exception)


@in_a_loop
async def test_what_nobody_waits_for_is_dropped(engine: Engine) -> None:
    held: list[Any] = []
    async with Linked(engine) as linked:
        submit = linked.local.scheduler._submit
        linked.local.scheduler._submit = lambda request: held.append(submit(request).__class__()) or held[-1]
        tasks = [asyncio.create_task(linked.ask()) for _ in range(3)]
        while len(held) < 3:
            await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        while not all(future.cancelled() for future in held):
            await asyncio.sleep(0.01)
        while linked.local.scheduler.running_tokens:
            await asyncio.sleep(0.01)


@in_a_loop
async def test_an_error_in_the_engine_is_one_request_s(engine: Engine) -> None:
    async with Linked(engine) as linked:
        submit = linked.local.scheduler._submit

        def fail(request: Any) -> Any:
            raise ZeroDivisionError("a secret state")

        linked.local.scheduler._submit = fail
        with pytest.raises(RuntimeError, match=r"^ZeroDivisionError$"):
            await linked.ask()
        linked.local.scheduler._submit = submit
        await linked.ask()


@in_a_loop
async def test_logits_that_are_not_finite_fail_one_request(engine: Engine) -> None:
    async with Linked(engine) as linked:
        prepared = linked.remote.reader.encode(parse_body(BODY))
        wrong = OptionLogits(np.full(prepared.reads.is_option_QO.shape, np.nan))
        assert isinstance(linked.remote.reader.decision(prepared, wrong), ModelOutputError)
        await linked.ask()


@in_a_loop
async def test_a_decision_that_cannot_be_made_fails_one_request(engine: Engine) -> None:
    class Broken:
        def __getattr__(self, name: str) -> Any:
            return getattr(reader, name)

        def decision(self, *_: Any) -> Any:
            raise ZeroDivisionError

    async with Linked(engine) as linked:
        reader = linked.remote.reader
        linked.remote.reader = Broken()  # type: ignore[assignment]
        with pytest.raises(ZeroDivisionError):
            await linked.ask()
        linked.remote.reader = reader
        await linked.ask()


@in_a_loop
async def test_a_frontend_without_an_engine_says_so(engine: Engine) -> None:
    linked = Linked(engine)
    async with linked:
        linked.local.scheduler._submit = lambda request: engine.submit(engine.prepare(BODY)).__class__()
        waiting = asyncio.create_task(linked.ask())
        while not linked.remote._places:
            await asyncio.sleep(0.01)
        linked.serving.cancel()
        with pytest.raises(Fault) as found:
            await waiting
        assert found.value.status == 503
        await asyncio.wait_for(linked.is_gone.wait(), 60)
        with pytest.raises(Fault):
            await linked.ask()
        with pytest.raises(Fault):
            await linked.remote.metrics()
        assert linked.remote.closed
        linked.serving = asyncio.create_task(asyncio.sleep(0))  # for the end of the block


@in_a_loop
async def test_counts_are_kept_by_the_engine_s_process(engine: Engine) -> None:
    async with Linked(engine) as linked:
        linked.remote.counts.request("systemone", 200)
        linked.remote.counts.reject("overloaded_error")
        linked.remote.counts.answered(["noul", "noul"], 0.1, 0.2)
        text = (await linked.remote.metrics()).decode()
        assert 'flide_requests_total{route="systemone",status="200"} 1.0' in text
        assert 'flide_rejects_total{reason="overloaded_error"} 1.0' in text
        assert 'flide_questions_total{type="noul"} 2.0' in text
        assert await linked.remote.stuck_for() == 0


@pytest.fixture(scope="module")
def fleet() -> Iterator[tuple[Any, str]]:
    options = ("--api-key", "k", "--alias", "nick", "--max-queue-ms", "60000")
    with serving("--model", str(tiny_model_directory()), "--frontends", "2", *options) as running:
        yield running


KEY = {"Authorization": "Bearer k"}


def test_processes_answer_as_one_server(fleet: tuple[Any, str], engine: Engine) -> None:
    _, url = fleet
    (wanted,) = engine.decide([BODY])
    for _ in range(8):  # every connection may be another process's
        response = httpx.post(f"{url}/v1/systemone", json={**BODY, "model": "nick"}, headers=KEY, timeout=60)
        assert response.status_code == 200
        for name, answer in response.json()["answers"].items():
            if "probabilities" in answer:
                assert answer["probabilities"] == pytest.approx(dict(wanted[name].probabilities), abs=1e-4)
        assert re.search(r"read;dur=[\d.]+, wait;dur=[\d.]+, run;dur=[\d.]+", response.headers["Server-Timing"])
        assert response.json()["x_flide"]["model_hash"] == engine.model_hash
    assert httpx.post(f"{url}/v1/systemone", json=BODY, timeout=60).status_code == 401
    assert httpx.post(f"{url}/v1/systemone", json={**BODY, "model": "x"}, headers=KEY, timeout=60).status_code == 400
    assert httpx.post(f"{url}/v1/systemone", json={"model": "nick"}, headers=KEY, timeout=60).status_code == 422
    assert httpx.get(f"{url}/ready", timeout=60).json() == {"status": "ready"}

    def metrics() -> str:
        return httpx.get(f"{url}/metrics", headers=KEY, timeout=60).text

    wait_until(lambda: 'status="200"} 8.0' in metrics())
    assert "flide_rounds_total" in metrics()


def test_the_address_is_one_server_s() -> None:
    config = ServeConfig(port=0)
    with bound(config) as reserved:
        share(reserved)
        config = replace(config, port=reserved.getsockname()[1])
        with bound(config, shared=True) as first, bound(config, shared=True) as second:
            first.listen()
            second.listen()
            with pytest.raises(FlideError, match="cannot listen"):
                bound(config)


def test_a_terminal_interrupts_the_first_process_only(fleet: tuple[Any, str]) -> None:
    for child in children_of(fleet[0].pid):
        os.kill(child, signal.SIGINT)
        blocked = re.search(r"SigBlk:\s*([0-9a-f]+)", Path(f"/proc/{child}/status").read_text())
        assert blocked
        assert int(blocked[1], 16) & 1 << signal.SIGINT - 1


def test_a_frontend_that_ends_is_replaced(fleet: tuple[Any, str]) -> None:
    process, url = fleet
    children = children_of(process.pid)
    assert len(children) == 2
    os.kill(children[0], signal.SIGKILL)
    wait_until(lambda: children_of(process.pid) != children and len(children_of(process.pid)) == 2)
    good = 0

    def is_good() -> bool:
        nonlocal good
        # A connection to the one that ended may still break.
        with contextlib.suppress(httpx.TransportError):
            good += httpx.post(f"{url}/v1/systemone", json=BODY, headers=KEY, timeout=60).status_code == 200
        return good == 8

    wait_until(is_good)


def test_frontends_answer_what_they_took_before_they_end(fleet: tuple[Any, str]) -> None:
    process, url = fleet
    long = {**BODY, "questions": {f"q{i}": {"type": "noul", "instructions": f"Is {i} said?"} for i in range(100)}}
    children = children_of(process.pid)
    asked = [ask(url, long, **KEY) for _ in range(8)]
    process.send_signal(signal.SIGTERM)
    assert [connection.getresponse().status for connection in asked] == [200] * 8
    assert process.wait(60) == 0
    assert not any(Path(f"/proc/{child}").exists() for child in children)


@pytest.mark.slow
def test_frontends_that_end_again_and_again_are_replaced() -> None:
    with serving("--frontends", "2") as (process, url):
        for _ in range(4):
            before = children_of(process.pid)
            for child in before:
                os.kill(child, signal.SIGKILL)
            wait_until(lambda before=before: len(set(children_of(process.pid)) - set(before)) == 2)

        def is_ready() -> bool:
            with contextlib.suppress(httpx.TransportError):
                return httpx.get(f"{url}/ready", timeout=60).status_code == 200
            return False

        wait_until(is_ready)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


@pytest.mark.slow
def test_frontends_end_with_the_process_that_has_the_engine() -> None:
    with serving("--frontends", "1") as (process, _):
        children = children_of(process.pid)
        assert children
        process.kill()
        wait_until(lambda: not any(Path(f"/proc/{child}").exists() for child in children))


def test_an_engine_that_does_not_end_is_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    with ending(10):
        pass
    with ending(0.01):
        wait_until(lambda: bool(codes))
    assert codes == [1]
    assert "does not end" in capsys.readouterr().err


@pytest.mark.parametrize("count", ["-1", "1000"])
def test_bad_counts(count: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--frontends", count]) == 2
    assert "frontends should be 1 to 64" in capsys.readouterr().err


def children_of(pid: int) -> list[int]:
    """Frontends of a server."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return sorted(int(child) for child in children if "spawn_main" in Path(f"/proc/{child}/cmdline").read_text())
