"""The queue: order, fairness, bounds, deadlines, leaving. The engine is a list of futures that the test ends."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

import pytest

from flide.runtime.decision import Decision, Usage
from flide.runtime.rounds import PreparedRequest
from flide.serve.faults import Fault
from flide.serve.scheduler import Scheduler, Ticket

ROUND = 100


def request(tokens: int = ROUND) -> PreparedRequest:
    return cast(PreparedRequest, SimpleNamespace(needed=SimpleNamespace(tokens=tokens)))


class FakeEngine:
    def __init__(self) -> None:
        self.given: list[tuple[PreparedRequest, Future[Decision]]] = []

    def submit(self, prepared: PreparedRequest) -> Future[Decision]:
        future: Future[Decision] = Future()
        self.given.append((prepared, future))
        return future

    def finish(self, index: int, error: Exception | None = None, *, reused: int = 0) -> None:
        future = self.given[index][1]
        if not future.set_running_or_notify_cancel():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(Decision("m", {}, Usage(1, 0, reused_tokens=reused)))


def run(test: Callable[[FakeEngine, Callable[..., Scheduler]], Awaitable[None]]) -> None:
    engine = FakeEngine()

    def scheduler(**options: Any) -> Scheduler:
        limits = {"max_waiting": 100, "max_waiting_tokens": 10_000, "max_per_key": None, "max_wait": 5.0, **options}
        return Scheduler(engine.submit, round_tokens=ROUND, **limits)

    asyncio.run(asyncio.wait_for(_await(test, engine, scheduler), 20))


async def _await(test: Any, engine: FakeEngine, scheduler: Any) -> None:
    await test(engine, scheduler)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def decide(scheduler: Scheduler, prepared: PreparedRequest, key: str) -> Ticket:
    with scheduler.ticket(prepared, key) as ticket:
        await ticket.answer
        return ticket


def ask(scheduler: Scheduler, key: str = "a", tokens: int = ROUND) -> asyncio.Task[Ticket]:
    return asyncio.ensure_future(decide(scheduler, request(tokens), key))


def test_the_engine_is_given_as_many_as_two_rounds_hold_when_most_of_them_is_reused() -> None:
    async def test(engine: FakeEngine, make: Any) -> None:
        scheduler = make()
        tasks = [ask(scheduler) for _ in range(90)]
        for index in range(30):
            await settle()
            engine.finish(index, reused=90)
        await settle()
        running = len(engine.given) - 30
        assert 12 <= running <= 20  # of 10 to 15 rows each, instead of 2 of 100
        assert scheduler.running_tokens <= 2 * ROUND
        for index in range(30, 90):  # and less again when nothing is
            engine.finish(index)
            await settle()
        assert scheduler.running_tokens == 0
        await asyncio.gather(*tasks)
        tasks = [ask(scheduler) for _ in range(5)]
        await settle()
        assert len(engine.given) == 92
        for index in range(90, 95):
            engine.finish(index)
            await settle()
        await asyncio.gather(*tasks)

    run(test)


def test_the_engine_is_given_two_rounds_and_no_more() -> None:
    async def test(engine: FakeEngine, make: Any) -> None:
        scheduler = make()
        tasks = [ask(scheduler) for _ in range(5)]
        await settle()
        assert (len(engine.given), scheduler.waiting, scheduler.running_tokens) == (2, 3, 200)
        engine.finish(0)
        await settle()
        assert (len(engine.given), scheduler.waiting) == (3, 2)
        for index in range(1, 5):
            engine.finish(index)
            await settle()
        tickets = await asyncio.gather(*tasks)
        assert all(t.started is not None and t.ended is not None and t.arrived <= t.started <= t.ended for t in tickets)
        assert (scheduler.waiting, scheduler.waiting_tokens, scheduler.running_tokens) == (0, 0, 0)

    run(test)


def test_a_request_larger_than_two_rounds_runs_alone() -> None:
    async def test(engine: FakeEngine, make: Any) -> None:
        scheduler = make()
        tasks = [ask(scheduler, tokens=1000), ask(scheduler, tokens=1)]
        await settle()
        assert len(engine.given) == 1
        engine.finish(0)
        await settle()
        assert len(engine.given) == 2
        engine.finish(1)
        await asyncio.gather(*tasks)

    run(test)


def test_keys_take_turns() -> None:
    async def test(engine: FakeEngine, make: Any) -> None:
        scheduler = make()
        order: list[str] = []

        async def one(key: str) -> None:
            await decide(scheduler, request(2 * ROUND), key)
            order.append(key)

        tasks = [asyncio.ensure_future(one(key)) for key in "aaaabbc"]
        for index in range(7):
            await settle()
            engine.finish(index)
        await asyncio.gather(*tasks)
        assert "".join(order) == "aabcaba" or "".join(order) == "abcabaa"
        assert order.index("c") <= 3

    run(test)


def test_what_is_too_much_is_refused() -> None:
    async def test(engine: FakeEngine, make: Any) -> None:
        scheduler = make(max_waiting=2, max_waiting_tokens=250)
        tasks = [ask(scheduler) for _ in range(4)]
        await settle()
        with pytest.raises(Fault) as caught:
            await decide(scheduler, request(1), "a")
        assert caught.value.status == 529
        assert caught.value.headers["Retry-After"] == "1"
        engine.finish(0)
        await settle()
        with pytest.raises(Fault):
            await decide(scheduler, request(200), "b")  # too many tokens
        small = ask(scheduler, tokens=150)
        await settle()
        for index in range(1, 5):
            engine.finish(index)
            await settle()
        await asyncio.gather(*tasks, small)

    run(test)


def test_a_key_has_its_limit() -> None:
    async def test(engine: FakeEngine, make: Any) -> None:
        scheduler = make(max_per_key=1)
        first = ask(scheduler)
        await settle()
        with pytest.raises(Fault) as caught:
            await decide(scheduler, request(), "a")
        assert caught.value.status == 429
        other = ask(scheduler, "b")
        await settle()
        engine.finish(0)
        engine.finish(1)
        await asyncio.gather(first, other)
        again = ask(scheduler)
        await settle()
        engine.finish(2)
        await again

    run(test)


def test_who_waits_too_long_is_sent_away_and_forgotten() -> None:
    async def test(engine: FakeEngine, make: Any) -> None:
        scheduler = make(max_wait=0.05)
        tasks = [ask(scheduler) for _ in range(3)]
        with pytest.raises(Fault) as caught:
            await tasks[2]
        assert caught.value.status == 503
        assert scheduler.waiting == 0
        engine.finish(0)
        engine.finish(1)
        await asyncio.gather(*tasks[:2])
        assert len(engine.given) == 2

    run(test)


def test_who_leaves_is_dropped() -> None:
    async def test(engine: FakeEngine, make: Any) -> None:
        scheduler = make(max_per_key=3)
        tasks = [ask(scheduler) for _ in range(3)]
        await settle()
        tasks[2].cancel()  # waits
        tasks[1].cancel()  # was given to the engine
        await settle()
        assert engine.given[1][1].cancelled()
        assert (scheduler.waiting, scheduler.running_tokens) == (0, ROUND)
        engine.finish(0)
        await tasks[0]
        assert scheduler._per_key == {}

    run(test)


def test_errors_of_the_engine_reach_who_asked_and_nobody_else() -> None:
    async def test(engine: FakeEngine, make: Any) -> None:
        scheduler = make()
        tasks = [ask(scheduler) for _ in range(3)]
        await settle()
        engine.finish(0, RuntimeError("boom"))
        await settle()
        engine.finish(1)
        engine.finish(2)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(results[0], RuntimeError)
        assert all(isinstance(x, Ticket) for x in results[1:])

    run(test)


def test_an_engine_that_refuses_does_not_stop_the_queue() -> None:
    async def test(engine: FakeEngine, make: Any) -> None:
        scheduler = make()
        submit = engine.submit
        engine.submit = lambda prepared: (_ for _ in ()).throw(RuntimeError("closed"))  # type: ignore[method-assign]
        scheduler._submit = engine.submit
        with pytest.raises(RuntimeError, match="closed"):
            await decide(scheduler, request(), "a")
        scheduler._submit = submit
        task = ask(scheduler)
        await settle()
        engine.finish(0)
        await task

    run(test)


def test_draining_answers_what_was_taken_and_takes_nothing_new() -> None:
    async def test(engine: FakeEngine, make: Any) -> None:
        scheduler = make()
        tasks = [ask(scheduler) for _ in range(3)]
        await settle()
        draining = asyncio.ensure_future(scheduler.drain())
        await settle()
        with pytest.raises(Fault) as caught:
            await decide(scheduler, request(), "a")
        assert caught.value.status == 503
        for index in range(3):
            engine.finish(index)
            await settle()
        await asyncio.gather(*tasks)
        await draining

    run(test)


def test_a_key_that_fills_the_queue_makes_room_for_others() -> None:
    async def test(engine: FakeEngine, make: Any) -> None:
        scheduler = make(max_waiting=4)
        flood = [ask(scheduler, "a") for _ in range(8)]  # two run, four wait, two are refused
        await settle()
        others = [ask(scheduler, "b") for _ in range(3)]
        await settle()
        for index in range(6):
            engine.finish(index)
            await settle()
        found = [await asyncio.gather(*tasks, return_exceptions=True) for tasks in (flood, others)]
        assert [[isinstance(one, Fault) for one in tasks] for tasks in found] == [
            [False] * 4 + [True] * 4,
            [False, False, True],
        ]
        assert all(one.status == 529 for tasks in found for one in tasks if isinstance(one, Fault))
        assert (scheduler.waiting, scheduler.waiting_tokens, scheduler.running_tokens) == (0, 0, 0)

    run(test)


def test_room_in_tokens_is_made_by_tokens() -> None:
    async def test(engine: FakeEngine, make: Any) -> None:
        scheduler = make(max_waiting_tokens=1000)
        tasks = [ask(scheduler, "a") for _ in range(12)]
        await settle()
        assert scheduler.waiting_tokens == 1000
        with pytest.raises(Fault):
            await decide(scheduler, request(900), "b")  # more than the other key would have left
        small = ask(scheduler, "b", tokens=300)
        await settle()
        assert scheduler.waiting_tokens == 1000
        for index in range(len(engine.given) + 8):
            engine.finish(index)
            await settle()
        found = await asyncio.gather(*tasks, small, return_exceptions=True)
        assert [isinstance(one, Fault) for one in found] == [False] * 9 + [True] * 3 + [False]

    run(test)


def test_draining_waits_for_nothing_that_nobody_waits_for() -> None:
    async def test(engine: FakeEngine, make: Any) -> None:
        scheduler = make()
        task = ask(scheduler)
        await settle()
        assert engine.given[0][1].set_running_or_notify_cancel()  # and it never ends
        task.cancel()
        await asyncio.wait_for(scheduler.drain(), 20)

    run(test)


def test_what_the_engine_drops_is_refused() -> None:
    async def test(engine: FakeEngine, make: Any) -> None:
        task = ask(make())
        await settle()
        engine.given[0][1].cancel()
        with pytest.raises(Fault) as caught:
            await task
        assert caught.value.status == 503

    run(test)


def test_clients_that_leave_an_engine_that_hangs_do_not_hide_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("flide.serve.scheduler.time", SimpleNamespace(monotonic=lambda: now))

    async def test(engine: FakeEngine, make: Any) -> None:
        nonlocal now
        scheduler = make()
        hung = ask(scheduler)
        await settle()
        assert engine.given[0][1].set_running_or_notify_cancel()  # its round has begun and does not end
        for seconds in range(10, 60, 10):
            impatient = ask(scheduler)
            await settle()
            now += 10
            impatient.cancel()
            await settle()
            assert scheduler.stuck_for == seconds
        engine.given[0][1].set_result(Decision("m", {}, Usage(1, 0)))
        await hung
        assert scheduler.stuck_for == 0

    run(test)


def test_the_engine_hangs_when_it_ends_nothing_not_when_much_was_given_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("flide.serve.scheduler.time", SimpleNamespace(monotonic=lambda: now))

    async def test(engine: FakeEngine, make: Any) -> None:
        nonlocal now
        scheduler = make()
        now += 50
        assert scheduler.stuck_for == 0  # nothing to do
        tasks = [ask(scheduler) for _ in range(3)]
        await settle()
        now += 40
        assert scheduler.stuck_for == 40
        engine.finish(0)
        await settle()
        assert scheduler.stuck_for == 0
        now += 30
        assert scheduler.stuck_for == 30  # the second one was given 70 seconds ago, behind the first
        tasks[1].cancel()
        tasks[2].cancel()
        await settle()
        assert scheduler.stuck_for == 0
        await tasks[0]

    run(test)
