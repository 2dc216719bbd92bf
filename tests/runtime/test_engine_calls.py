"""Calling an engine: threads, event loops, interruption, cancellation, closing, forking, copies."""

from __future__ import annotations

import asyncio
import copy
import gc
import json
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import flide.runtime.rounds as rounds_module
from flide import Choice, DecisionRequest, Engine, EngineConfig, Noul, RequestError, Score
from flide.runtime.plan import RoundPlan
from flide.runtime.prompt import ChatFormat
from flide.runtime.rounds import LogitsRequest, PreparedRequest, RoundRunner
from flide.runtime.worker import Job
from tests.tiny_model import tiny_engine
from tests.tolerance import PROBABILITY_FP32

TICKET = json.loads((Path(__file__).parents[2] / "examples" / "ticket.json").read_text())
QUESTIONS = {"q": Noul("Is it damaged?")}
TIMEOUT = 30


class Rounds:
    """What the engine thread runs, by the states of each round; ``hold`` makes every round wait for ``go_on``."""

    def __init__(self) -> None:
        self.states: list[list[Any]] = []
        self.entered, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()

    def hold(self) -> None:
        self.entered.clear()
        self.go_on.clear()


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rounds]:
    seen, run = Rounds(), RoundRunner.begin

    def watched(self: RoundRunner, plan: RoundPlan) -> Any:
        seen.states.append([r.request.state for r in plan.requests])
        seen.entered.set()
        assert seen.go_on.wait(TIMEOUT)
        return run(self, plan)

    monkeypatch.setattr(RoundRunner, "begin", watched)
    yield seen
    seen.go_on.set()


@pytest.fixture
def narrow() -> Iterator[Engine]:
    """An engine whose rounds hold one request."""
    with tiny_engine(EngineConfig(device="cpu", max_round_tokens=1)) as engine:
        yield engine


def named(*states: str) -> list[DecisionRequest]:
    return [DecisionRequest(state, QUESTIONS) for state in states]


def answers_of(engine: Engine, requests: list[Any]) -> tuple[threading.Thread, list[Any]]:
    """A thread that asks, and where its result or error will be."""
    results: list[Any] = []

    def ask() -> None:
        try:
            results.append(engine.decide(requests))
        except Exception as error:  # noqa: BLE001 - the test looks at it
            results.append(error)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    return thread, results


def test_a_single_request_must_be_wrapped(engine: Engine) -> None:
    for single in (TICKET, DecisionRequest("s", QUESTIONS), "text"):
        with pytest.raises(TypeError, match="list"):
            engine.decide(single)
    assert engine.decide([]) == []


def test_decide_and_adecide_work_in_a_running_loop(engine: Engine) -> None:
    async def notebook() -> tuple[Any, Any, Any]:
        first, second = await asyncio.gather(engine.adecide([TICKET]), engine.adecide([TICKET, TICKET]))
        return engine.decide([TICKET]), first, second

    sync, first, second = asyncio.run(notebook())
    assert len(second) == 2
    for name in TICKET["questions"]:
        expected = pytest.approx(sync[0][name].probabilities, abs=PROBABILITY_FP32)
        assert first[0][name].probabilities == expected
        assert second[1][name].probabilities == expected


def test_adecide_raises_and_returns_exceptions_like_decide(engine: Engine) -> None:
    with pytest.raises(RequestError):
        asyncio.run(engine.adecide([TICKET, {}]))
    good, bad = asyncio.run(engine.adecide([TICKET, {}], return_exceptions=True))
    assert good["team"]
    assert isinstance(bad, RequestError)


def test_many_threads_share_one_engine(engine: Engine) -> None:
    (expected,) = engine.decide([TICKET])
    failures: list[str] = []

    def ask() -> None:
        for _ in range(5):
            (decision,) = engine.decide([TICKET])
            for name, answer in decision.answers.items():
                if answer.probabilities != pytest.approx(expected[name].probabilities, abs=PROBABILITY_FP32):
                    failures.append(name)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_ctrl_c_interrupts_the_caller_and_spares_the_engine(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    run, entered = RoundRunner.begin, threading.Event()

    def slow(self: RoundRunner, plan: RoundPlan) -> Any:
        entered.set()
        threading.Event().wait(0.5)
        return run(self, plan)

    with monkeypatch.context() as patch:
        patch.setattr(RoundRunner, "begin", slow)

        def interrupt() -> None:
            entered.wait()
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            engine.decide([TICKET])
        thread.join()
    (decision,) = engine.decide([TICKET])
    assert decision["team"].probabilities


def test_close_is_idempotent_and_final() -> None:
    engine = tiny_engine(EngineConfig(device="cpu"))
    with engine:
        engine.decide([TICKET])
    engine.close()
    assert engine.closed
    with pytest.raises(RuntimeError, match="closed"):
        engine.decide([TICKET])


def test_a_forgotten_engine_stops_its_thread() -> None:
    before = threading.active_count()
    engine = tiny_engine(EngineConfig(device="cpu"))
    engine.decide([TICKET])
    assert threading.active_count() == before + 1
    del engine
    gc.collect()
    deadline = time.monotonic() + TIMEOUT
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.001)
    assert threading.active_count() == before


def test_a_process_ends_without_close() -> None:
    code = (
        "from flide import *; e = Engine.default(EngineConfig(device='cpu')); "
        "print(e.decide([DecisionRequest('s', {'q': Noul('?')})])[0]['q'].value)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert 0 <= float(done.stdout) <= 1


# --- requests


@pytest.mark.parametrize(
    "wrap", [iter, tuple, lambda bodies: dict(enumerate(bodies)).values(), lambda b: (x for x in b)]
)
def test_any_iterable_is_read_once_by_the_caller(engine: Engine, wrap: Any) -> None:
    (expected,) = engine.decide([TICKET])
    assert [d.usage for d in engine.decide(wrap([TICKET, TICKET]))] == [expected.usage] * 2
    assert [d.usage for d in asyncio.run(engine.adecide(wrap([TICKET, TICKET])))] == [expected.usage] * 2


def test_a_generator_runs_on_the_callers_thread_and_its_errors_are_the_callers(engine: Engine) -> None:
    seen: list[threading.Thread] = []

    def bodies() -> Iterator[Any]:
        seen.append(threading.current_thread())
        yield TICKET
        raise LookupError("no more")

    with pytest.raises(LookupError):
        engine.decide(bodies())
    with pytest.raises(LookupError):
        asyncio.run(engine.adecide(bodies()))
    assert seen == [threading.main_thread()] * 2


def test_changing_a_request_while_it_runs_changes_nothing(engine: Engine, rounds: Rounds) -> None:
    body = copy.deepcopy(TICKET)
    (expected,) = engine.decide([body])
    rounds.hold()
    thread, results = answers_of(engine, [body])
    rounds.entered.wait(TIMEOUT)
    body["questions"]["team"]["criteria"].clear()
    body["questions"]["anger"]["criteria"][0] = "changed"
    del body["questions"]["damaged"]
    body["state"] = None
    rounds.go_on.set()
    thread.join(TIMEOUT)
    ((decision,),) = results
    assert decision.to_dict().keys() == expected.to_dict().keys()
    assert decision["anger"].legend == expected["anger"].legend
    assert decision.answers.keys() == expected.answers.keys()


def test_requests_results_and_errors_survive_copies_and_pickles(engine: Engine) -> None:
    questions = {"n": Noul("?", {"true": "x"}), "c": Choice("?", ["a", "b"]), "s": Score("?", ["low", ["high"]])}
    request = DecisionRequest({"a": [1]}, questions)
    decision, error = engine.decide([request, {}], return_exceptions=True)
    for clone in (copy.copy, copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))):
        assert clone(request) == request
        assert clone(decision) == decision
        twin = clone(error)
        assert (type(twin), twin.errors, twin.index, str(twin)) == (RequestError, error.errors, 1, str(error))


# --- interruption and cancellation


def test_after_ctrl_c_nothing_else_of_the_call_runs(narrow: Engine, rounds: Rounds) -> None:
    rounds.hold()

    def interrupt() -> None:
        rounds.entered.wait(TIMEOUT)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        narrow.decide(named("a", "b", "c"))
    rounds.go_on.set()
    narrow.decide(named("next"))
    assert rounds.states == [["a"], ["next"]]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_after_a_failure_nothing_else_of_the_call_runs(
    narrow: Engine, rounds: Rounds, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    run = RoundRunner.begin

    def fail(self: RoundRunner, plan: RoundPlan) -> Any:
        results = run(self, plan)
        if plan.requests[0].request.state == "bad":
            raise MemoryError("no memory")
        # What comes behind the failure must see it handled.
        threading.Event().wait(0.2 if plan.requests[0].request.state == "held" else 0)
        return results

    monkeypatch.setattr(RoundRunner, "begin", fail)
    requests = named("ok", "bad", "held", "never", "never")
    with pytest.raises(MemoryError):
        asyncio.run(narrow.adecide(requests)) if asynchronous else narrow.decide(requests)
    narrow.decide(named("next"))
    assert ["never"] not in rounds.states
    results = narrow.decide(requests[:3], return_exceptions=True)
    assert [isinstance(result, MemoryError) for result in results] == [False, True, False]


def test_cancelling_adecide_while_it_prepares_stops_that(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    encode, begun, go_on = ChatFormat.encode, threading.Event(), threading.Event()
    encoded: list[Any] = []

    def slow(self: ChatFormat, request: Any) -> Any:
        encoded.append(request.state)
        begun.set()
        go_on.wait(TIMEOUT)
        return encode(self, request)

    async def cancelled() -> None:
        task = asyncio.create_task(engine.adecide(named("a", "b", "c")))
        await asyncio.to_thread(begun.wait, TIMEOUT)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        go_on.set()

    monkeypatch.setattr(ChatFormat, "encode", slow)
    asyncio.run(cancelled())  # waits for the threads it used
    assert encoded == ["a"]
    assert engine.decide(named("next"))


def test_cancelling_adecide_drops_what_waits_and_spares_the_rest(narrow: Engine, rounds: Rounds) -> None:
    rounds.hold()

    async def cancelled() -> Any:
        running = asyncio.create_task(narrow.adecide(named("a", "b")))
        await asyncio.to_thread(rounds.entered.wait, TIMEOUT)
        waiting = asyncio.create_task(narrow.adecide(named("c", "d")))
        other = asyncio.create_task(narrow.adecide(named("other")))
        while narrow._worker._arrivals.qsize() < 2:  # both are submitted
            await asyncio.sleep(0.001)
        for task in (running, waiting):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        rounds.go_on.set()
        return await other

    (decision,) = asyncio.run(cancelled())
    assert decision["q"]
    assert rounds.states == [["a"], ["other"]]


def test_nothing_of_a_call_is_kept(engine: Engine) -> None:
    async def ask_and_leave() -> None:
        await engine.adecide(named("a", "b"))
        task = asyncio.create_task(engine.adecide(named("c")))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    engine.decide(named("a"))
    asyncio.run(ask_and_leave())
    engine.decide(named("b"))
    gc.collect()
    # Other libraries' futures may be about; ours are held by jobs.
    assert [o for o in gc.get_objects() if type(o) in (Job, PreparedRequest)] == []


# --- rehearsals


@pytest.mark.parametrize("temperatures", [None, {"choice": 2.0, "score": 0.5}])
def test_a_rehearsal_goes_the_way_of_an_answer_and_changes_nothing(
    temperatures: dict[str, float] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = {f"q{i}": Choice("x", ["a", "b", "c"][: 2 + i % 2]) for i in range(10)}
    few = {**first, "noul": Noul("x"), "score": Score("x", ["low", "high", "higher"])}
    many = {**few, **{f"r{i}": Choice("x", ["a", "b", "c", "d"]) for i in range(40)}}
    with tiny_engine(EngineConfig(device="cpu", temperatures=temperatures)) as engine:
        made: list[Any] = []

        def answer_questions(*arguments: Any) -> Any:
            made.append(original(*arguments))
            return made[-1]

        original = rounds_module.answer_questions
        monkeypatch.setattr(rounds_module, "answer_questions", answer_questions)
        for questions in (few, many, {"noul": Noul("x")}):
            prepared = engine.prepare(DecisionRequest("it", questions))
            before = engine.submit(prepared).result(TIMEOUT)
            made.clear()
            engine._runner.rehearse(prepared)
            (answers,) = made
            assert list(answers) == list(questions)[: rounds_module.MOST_REHEARSED], "more would take long"
            # As answers mostly are: where two options are as probable, another way is taken.
            for name in answers.keys() & first.keys():
                assert len(set(answers[name].probabilities.values())) == len(first[name].criteria)
            engine._runner.rehearse(LogitsRequest.of(prepared))
            assert len(made) == 1, "its answers are made elsewhere"
            assert engine.submit(prepared).result(TIMEOUT) == before


@pytest.mark.parametrize(
    ("questions", "rehearsed"),
    [
        ({f"q{i}": Noul("x") for i in range(100)}, 32),
        ({f"q{i}": Score("x", [str(k) for k in range(10)]) for i in range(32)}, 16),
        ({f"q{i}": Choice("x", [str(k) for k in range(255)]) for i in range(3)}, 1),
        ({"small": Noul("x"), "wide": Choice("x", [str(k) for k in range(255)])}, 1),
    ],
)
def test_rehearsals_are_short(questions: dict[str, Any], rehearsed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes longer than a round has left would hold its answer up."""
    with tiny_engine(EngineConfig(device="cpu")) as engine:
        prepared = engine.prepare(DecisionRequest("it", questions))
        shapes: list[Any] = []
        monkeypatch.setattr(
            rounds_module, "answer_questions", lambda asked, weights_QO, counts: shapes.append(weights_QO.shape)
        )
        engine._runner.rehearse(prepared)
        assert shapes == [(rehearsed, max(prepared.num_options[:rehearsed]))]


# --- closing


def test_callers_that_wait_when_the_engine_is_closed_get_their_answers(rounds: Rounds) -> None:
    engine = tiny_engine(EngineConfig(device="cpu", max_round_tokens=1))
    rounds.hold()

    async def ask_and_close() -> Any:
        task = asyncio.create_task(engine.adecide(named("a", "b")))
        await asyncio.to_thread(rounds.entered.wait, TIMEOUT)
        thread, results = answers_of(engine, named("c", "d"))
        while engine._worker._arrivals.empty():
            await asyncio.sleep(0.001)
        closing = asyncio.create_task(asyncio.to_thread(engine.close))
        while not engine.closed:
            await asyncio.sleep(0.001)
        with pytest.raises(RuntimeError, match="closed"):  # does not block this loop until the others are done
            await engine.adecide(named("late"))
        rounds.go_on.set()
        await asyncio.gather(task, closing)
        await asyncio.to_thread(thread.join, TIMEOUT)
        return [*task.result(), *results[0]]

    assert len(asyncio.run(ask_and_close())) == 4
    assert rounds.states == [["a"], ["b"], ["c"], ["d"]]


def test_an_engine_in_use_is_not_collected() -> None:
    def ask() -> Any:
        return tiny_engine(EngineConfig(device="cpu")).decide(named("a"))

    assert ask()[0]["q"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_is_told_to_make_its_own_engine(engine: Engine) -> None:
    child = os.fork()
    if child == 0:
        code = 1
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(TIMEOUT)  # a hanging child must not outlive the test
        try:
            engine.decide(named("a"))
        except RuntimeError as error:
            code = 0 if "fork" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert engine.decide(named("a"))


@pytest.mark.slow
def test_floods_of_requests_threads_and_cancelled_tasks(engine: Engine) -> None:
    assert len(engine.decide(named(*map(str, range(10_000))))) == 10_000
    callers = [answers_of(engine, named(str(i))) for i in range(300)]
    for thread, _ in callers:
        thread.join(600)
    assert all(results[0][0]["q"] for _, results in callers)

    async def storm() -> None:
        rng = random.Random(0)
        for _ in range(50):
            tasks = [asyncio.create_task(engine.adecide(named(*["s"] * rng.randint(1, 50)))) for _ in range(10)]
            await asyncio.sleep(rng.random() * 0.05)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(storm())
    engine.decide(named("s"))
    busy = time.process_time()
    time.sleep(1)
    assert time.process_time() - busy < 0.2
