"""The engine on the event loop of the process that has it, behind frontends and beside them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from flide.runtime.config import EngineConfig
from flide.runtime.engine import Engine
from flide.runtime.loop_worker import LoopWorker
from flide.runtime.wire import parse_body
from flide.serve.backend import LocalBackend
from flide.serve.config import ServeConfig
from tests.serve.conftest import BODY
from tests.serve.test_frontends import Linked


@pytest.fixture
def own_engine() -> Iterator[Engine]:
    """Of this test alone. The CPU holds the loop while a round runs, which changes no answer."""
    with Engine.default(EngineConfig(device="cpu")) as engine:
        engine._runner.can_change_threads = True
        yield engine


def test_answers_are_those_of_the_engine_s_own_thread(own_engine: Engine) -> None:
    bodies = [{**BODY, "state": f"The parcel of order {number} arrived crushed."} for number in range(6)]
    expected = [decision.to_dict() for decision in own_engine.decide(bodies)]

    async def ask() -> list[Any]:
        own_engine.run_on(asyncio.get_running_loop())
        assert isinstance(own_engine._worker, LoopWorker)
        async with Linked(own_engine) as linked:
            over_link = await asyncio.gather(*map(linked.ask, bodies))
        return [over_link, await own_engine.adecide(bodies)]

    for decisions in asyncio.run(asyncio.wait_for(ask(), 60)):
        for decision, known in zip(decisions, expected, strict=True):
            for question_id, answer in decision.to_dict()["answers"].items():
                if "probabilities" in answer:
                    assert answer["probabilities"] == pytest.approx(
                        known["answers"][question_id]["probabilities"], abs=1e-4
                    )
                else:
                    assert answer["noul"] == pytest.approx(known["answers"][question_id]["noul"], abs=1e-4)


def test_the_scheduler_is_told_by_the_same_thread(own_engine: Engine) -> None:
    async def ask() -> None:
        own_engine.run_on(asyncio.get_running_loop())
        backend = LocalBackend(own_engine, ServeConfig())
        await backend.start()
        prepared = backend.reader.encode(parse_body(json.loads(json.dumps(BODY))))
        with backend.ticket(prepared, "k") as ticket:
            decision = await ticket.answer
        assert decision.answers
        assert ticket.ran > 0
        await backend.drain()
        assert b"flide_rounds_total" in await backend.metrics()

    asyncio.run(asyncio.wait_for(ask(), 60))


def test_what_would_wait_for_itself_is_refused_and_the_engine_closes(own_engine: Engine) -> None:
    async def ask() -> None:
        own_engine.run_on(asyncio.get_running_loop())
        with pytest.raises(RuntimeError, match="use adecide"):
            own_engine.decide([BODY])
        assert len(await asyncio.to_thread(own_engine.decide, [BODY])) == 1
        assert not own_engine.closed

    asyncio.run(asyncio.wait_for(ask(), 60))
    own_engine.close()
    assert own_engine.closed
    with pytest.raises(RuntimeError, match="closed"):
        own_engine.decide([BODY])


def test_an_engine_whose_rounds_would_hold_the_loop_stays_on_its_thread() -> None:
    async def ask(engine: Engine) -> None:
        with pytest.raises(ValueError, match="hold the loop"):
            engine.run_on(asyncio.get_running_loop())
        assert len(await engine.adecide([BODY])) == 1

    with Engine.default(EngineConfig(device="cpu")) as engine:
        assert not engine.can_run_on_a_loop
        asyncio.run(asyncio.wait_for(ask(engine), 60))
