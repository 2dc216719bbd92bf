"""The engine thread: whatever is cancelled, closed, forgotten or raised, every future ends and nothing blocks."""

from __future__ import annotations

import gc
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from flide.runtime import StreamCapacity
from flide.runtime.plan import RoundPlan
from flide.runtime.rounds import RoundRunner
from flide.runtime.worker import ENOUGH, Job, Worker

TIMEOUT = 20


class Request:
    """What a worker sees of a prepared request."""

    def __init__(self, name: Any = "", num_tokens: int = 1) -> None:
        self.name, self.needed = name, StreamCapacity(num_tokens, 1, 1)


class Runner:
    """Answers with the request's name; ``before`` can hold up or break a round."""

    starts_ahead, max_requests = False, 100

    def __init__(self, before: Callable[[list[Any]], Any] = lambda names: None) -> None:
        self.before, self.rounds, self.log = before, [], []
        self.rehearsed: list[Any] = []

    def start(self) -> None:
        self.thread = threading.current_thread()

    def expect(self, requests: Any) -> None:
        pass

    def plan(self) -> RoundPlan:
        return RoundPlan(self.limit, self.max_requests)

    def begin(self, plan: Any) -> Any:
        names = [request.name for request in plan.requests]
        self.before(names)
        self.rounds.append(names)
        self.log.append(("begin", *names))
        return Pending(self, names)

    begin_alone = RoundRunner.begin_alone

    def rehearse(self, request: Any) -> None:
        self.rehearsed.append(request.name)


class Picky(Runner):
    """Can expect nothing, and plans only what ``check`` lets through."""

    def __init__(self, check: Callable[[Any], None], before: Callable[[list[Any]], Any] = lambda names: None) -> None:
        super().__init__(before)
        self.check = check

    def expect(self, requests: Any) -> None:
        raise MemoryError("no memory")

    def plan(self) -> RoundPlan:
        check = self.check

        class Plan(RoundPlan):
            def add(self, request: Any) -> bool:
                check(request.name)
                return super().add(request)

        return Plan(self.limit, self.max_requests)


class Pending:
    def __init__(self, runner: Runner, names: list[Any]) -> None:
        self.runner, self.names = runner, names

    def results(self) -> list[Any]:
        self.runner.log.append(("finish", *self.names))
        return [f"answer to {name}" for name in self.names]


class Gate:
    """Holds up rounds until it is opened."""

    def __init__(self) -> None:
        self.entered, self.opened = threading.Event(), threading.Event()

    def __call__(self, names: list[Any]) -> None:
        self.entered.set()
        assert self.opened.wait(TIMEOUT)


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.opened.set()


def jobs_of(*names: Any, num_tokens: int = 1) -> list[Any]:
    return [Job(Request(name, num_tokens)) for name in names]


def start(runner: Any, max_tokens: int = 100) -> Worker:
    runner.limit = StreamCapacity(max_tokens, 1 << 20, 1 << 20)
    return Worker(runner)


def in_thread(function: Callable[[], Any]) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


def held_up(worker: Worker, gate: Gate) -> Any:
    """A job whose round has begun and waits at the gate."""
    (job,) = jobs = jobs_of("first")
    worker.submit(jobs)
    assert gate.entered.wait(TIMEOUT)
    return job


def test_what_waits_shares_rounds_in_order_up_to_the_limit(gate: Gate) -> None:
    runner = Runner(gate)
    worker = start(runner, max_tokens=10)
    first = held_up(worker, gate)
    batches = [jobs_of("a", "b", num_tokens=4), jobs_of("c", num_tokens=4), jobs_of("huge", num_tokens=50)]
    batches += [[], jobs_of("d"), jobs_of("e", num_tokens=9)]
    for jobs in batches:
        worker.submit(jobs)
    gate.opened.set()
    answers = [job.future.result(TIMEOUT) for job in [first, *sum(batches, [])]]
    assert answers == [f"answer to {name}" for name in ["first", "a", "b", "c", "huge", "d", "e"]]
    assert runner.rounds == [["first"], ["a", "b"], ["c"], ["huge"], ["d", "e"]]
    worker.close()


def test_cancelled_jobs_are_dropped_and_take_no_room(gate: Gate) -> None:
    runner = Runner(gate)
    worker = start(runner, max_tokens=10)
    first = held_up(worker, gate)
    jobs = jobs_of(*range(6), num_tokens=4)
    worker.submit(jobs)
    assert not first.future.cancel()  # its round runs
    assert all(job.future.cancel() for job in jobs[:5] if job is not jobs[2])
    gate.opened.set()
    assert jobs[5].future.result(TIMEOUT) == "answer to 5"
    assert runner.rounds == [["first"], [2, 5]]
    worker.close()


def test_close_finishes_what_was_submitted_and_every_closer_waits_for_it(gate: Gate) -> None:
    runner = Runner(gate)
    worker = start(runner, max_tokens=1)
    held_up(worker, gate)
    jobs = jobs_of(*range(5))
    worker.submit(jobs)
    answered: list[bool] = []

    def close() -> None:
        worker.close()
        answered.append(all(job.future.done() for job in jobs))

    closers = [in_thread(close) for _ in range(3)]
    while not worker.closed:
        time.sleep(0.001)
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="closed"):  # at once, not when the others are done
        worker.submit(jobs_of("late"))
    assert time.monotonic() - started < TIMEOUT / 2
    gate.opened.set()
    for closer in closers:
        closer.join(TIMEOUT)
    assert answered == [True] * 3
    assert [job.future.result() for job in jobs] == [f"answer to {i}" for i in range(5)]
    worker.close()


def test_the_thread_itself_can_close_while_others_wait_for_its_end() -> None:
    other_waits = threading.Event()

    def close(names: list[Any]) -> None:
        closer = in_thread(worker.close)
        while not worker.closed:
            time.sleep(0.001)
        worker.close()
        other_waits.set()
        assert closer.is_alive()

    worker = start(Runner(close))
    (job,) = jobs = jobs_of("a")
    worker.submit(jobs)
    assert job.future.result(TIMEOUT) == "answer to a"
    assert other_waits.is_set()


def test_a_callback_can_close() -> None:
    worker, closed = start(Runner()), threading.Event()
    (job,) = jobs = jobs_of("a")
    job.future.add_done_callback(lambda _: (worker.close(), closed.set()))
    worker.submit(jobs)
    assert closed.wait(TIMEOUT)


def test_no_future_is_left_when_submitting_races_closing() -> None:
    for _ in range(30):
        worker, jobs, begin = start(Runner(), max_tokens=3), [], threading.Barrier(5)

        def submit(worker: Worker = worker, jobs: list[Any] = jobs, begin: threading.Barrier = begin) -> None:
            begin.wait()
            for _ in range(30):
                new = jobs_of("x", "y")
                try:
                    worker.submit(new)
                except RuntimeError:
                    return
                jobs += new

        threads = [in_thread(submit) for _ in range(4)]
        begin.wait()
        worker.close()
        for thread in threads:
            thread.join(TIMEOUT)
        for job in jobs:
            error = job.future.exception(TIMEOUT)
            assert error is None or "closed" in str(error)


def test_closing_amid_a_submission_of_the_same_thread_leaves_no_future() -> None:
    """As a signal handler does it."""
    worker = start(Runner())

    check = worker.check
    worker.check = lambda: (check(), worker.close())
    (job,) = jobs = jobs_of("a")
    worker.submit(jobs)
    with pytest.raises(RuntimeError, match="closed"):
        job.future.result(TIMEOUT)


def test_collecting_a_worker_neither_waits_for_a_round_nor_leaves_its_thread(gate: Gate) -> None:
    worker = start(Runner(gate))
    held_up(worker, gate)
    thread = worker._thread
    del worker  # would block here until the gate opens
    gc.collect()
    assert thread.is_alive()
    gate.opened.set()
    thread.join(TIMEOUT)
    assert not thread.is_alive()


def test_what_is_done_is_not_kept() -> None:
    worker = start(Runner())
    jobs = jobs_of("a", "b")
    requests = [weakref.ref(job.prepared) for job in jobs]
    futures = [weakref.ref(job.future) for job in jobs]
    worker.submit(jobs)
    assert [job.future.result(TIMEOUT) for job in jobs] == ["answer to a", "answer to b"]
    del jobs
    deadline = time.monotonic() + TIMEOUT
    while any(ref() is not None for ref in requests + futures):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    worker.close()


@pytest.mark.parametrize("kind", [StopIteration, SystemExit, KeyboardInterrupt, GeneratorExit])
def test_errors_that_end_threads_and_loops_are_reported_as_failures(kind: type[BaseException]) -> None:
    error = kind("x")

    def fail(names: list[Any]) -> None:
        if "bad" in names:
            raise error

    worker = start(Runner(fail))
    good, bad, other = jobs = jobs_of("good", "bad", "other")
    worker.submit(jobs)
    with pytest.raises(RuntimeError, match=f"running the model failed: {kind.__name__}") as caught:
        bad.future.result(TIMEOUT)
    assert caught.value.__cause__ is error
    assert good.future.result(TIMEOUT) == "answer to good"
    assert other.future.result(TIMEOUT) == "answer to other"
    worker.close()


def test_a_log_handler_that_raises_does_not_end_the_thread() -> None:
    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise OSError("no space for logs")

    def fail(names: list[Any]) -> None:
        raise MemoryError

    runner, handler = Runner(fail), Broken()
    worker = start(runner)
    logger = logging.getLogger("flide.engine")
    logger.addHandler(handler)
    try:
        jobs = jobs_of("a", "b")
        worker.submit(jobs)
        for job in jobs:
            assert isinstance(job.future.exception(TIMEOUT), OSError | MemoryError)
    finally:
        logger.removeHandler(handler)
    runner.before = lambda names: None
    worker.submit(again := jobs_of("c"))
    assert again[0].future.result(TIMEOUT) == "answer to c"
    worker.close()


def test_a_round_is_started_while_the_one_before_it_runs(gate: Gate) -> None:
    runner = Runner(gate)
    runner.starts_ahead = True
    worker = start(runner, max_tokens=2)
    first = held_up(worker, gate)
    jobs = jobs_of("a", "b", "c", "d")
    worker.submit(jobs)
    gate.opened.set()
    for job in [first, *jobs]:
        assert job.future.result(TIMEOUT) == f"answer to {job.prepared.name}"
    assert runner.log == [
        ("begin", "first"),
        ("begin", "a", "b"),
        ("finish", "first"),
        ("begin", "c", "d"),
        ("finish", "a", "b"),
        ("finish", "c", "d"),
    ]
    worker.close()


def test_while_a_round_runs_the_next_one_is_half_of_all(gate: Gate) -> None:
    """Of large requests: of small ones a round takes all there are."""
    runner = Runner(before=gate)
    runner.starts_ahead, runner.max_requests = True, 1000
    for rows, first, rest in ((ENOUGH // 8, 16, 32), (1, 16, 48)):
        runner.rounds.clear()
        gate.entered.clear()
        gate.opened.clear()
        worker = start(runner, max_tokens=100 * ENOUGH)
        early, late = jobs_of(*range(16), num_tokens=rows), jobs_of(*range(48), num_tokens=rows)
        worker.submit(early)
        assert gate.entered.wait(TIMEOUT)
        worker.submit(late)
        gate.opened.set()
        for job in [*early, *late]:
            job.future.result(TIMEOUT)
        worker.close()
        assert list(map(len, runner.rounds))[:2] == [first, rest]
        assert sum(map(len, runner.rounds)) == 64


def test_rounds_keep_within_every_limit(gate: Gate) -> None:
    runner = Runner(gate)
    runner.max_requests = 3
    worker = start(runner)
    runner.limit = StreamCapacity(100, 2, 1 << 20)
    held_up(worker, gate)
    jobs = jobs_of(*"abcde")
    worker.submit(jobs)
    gate.opened.set()
    for job in jobs:
        job.future.result(TIMEOUT)
    assert runner.rounds == [["first"], ["a", "b"], ["c", "d"], ["e"]]
    runner.limit = StreamCapacity(100, 100, 1 << 20)
    worker.close()


@pytest.mark.parametrize("ahead", [False, True])
def test_a_round_that_fails_at_its_end_is_run_again_one_by_one(gate: Gate, ahead: bool) -> None:
    class Broken(Pending):
        def results(self) -> list[Any]:
            if "bad" in self.names:
                raise MemoryError("no memory")
            return super().results()

    class Breaking(Runner):
        def begin(self, requests: list[Request]) -> Any:
            return Broken(self, super().begin(requests).names)

    runner = Breaking(gate)
    runner.starts_ahead = ahead
    worker = start(runner, max_tokens=2)
    held_up(worker, gate)
    good, bad, other = jobs = jobs_of("good", "bad", "other")
    worker.submit(jobs)
    gate.opened.set()
    assert good.future.result(TIMEOUT) == "answer to good"
    assert isinstance(bad.future.exception(TIMEOUT), MemoryError)
    assert other.future.result(TIMEOUT) == "answer to other"
    worker.close()


def test_a_request_that_cannot_be_planned_fails_alone() -> None:
    def check(name: Any) -> None:
        if name == "bad":
            raise MemoryError("no memory")

    worker = start(Picky(check))
    jobs = jobs_of("a", "bad", "b")
    worker.submit(jobs)
    assert [jobs[i].future.result(TIMEOUT) for i in (0, 2)] == ["answer to a", "answer to b"]
    with pytest.raises(MemoryError):
        jobs[1].future.result(TIMEOUT)
    worker.close()


def test_a_runner_that_cannot_start_is_reported_and_leaves_no_thread() -> None:
    class Broken(Runner):
        def start(self) -> None:
            super().start()
            raise MemoryError("no memory for graphs")

    runner = Broken()
    with pytest.raises(MemoryError, match="graphs"):
        start(runner)
    runner.thread.join(TIMEOUT)
    assert not runner.thread.is_alive()


def test_a_round_that_nothing_was_captured_for_does_not_hold_up_the_one_before_it(gate: Gate) -> None:
    runner = Runner(gate)
    runner.starts_ahead = True
    worker = start(runner, max_tokens=2)
    held_up(worker, gate)
    jobs = [*jobs_of("a"), *jobs_of("huge", num_tokens=50)]
    worker.submit(jobs)
    gate.opened.set()
    for job in jobs:
        job.future.result(TIMEOUT)
    order = [("begin", "first"), ("begin", "a"), ("finish", "first"), ("finish", "a"), ("begin", "huge")]
    assert runner.log == [*order, ("finish", "huge")]
    worker.close()


def test_a_request_that_cannot_be_planned_again_takes_nobody_along(
    gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    """The round of all fails, and then one of them cannot be planned by itself."""
    again = False

    def fail(names: list[Any]) -> None:
        nonlocal again
        gate(names)
        if len(names) > 1:
            again = True
            raise MemoryError("no memory for all")

    def check(name: Any) -> None:
        if again and name == "bad":
            raise ZeroDivisionError

    worker = start(Picky(check, fail))
    held_up(worker, gate)
    good, bad, other = jobs = jobs_of("good", "bad", "other")
    worker.submit(jobs)
    gate.opened.set()
    assert good.future.result(TIMEOUT) == "answer to good"
    assert isinstance(bad.future.exception(TIMEOUT), ZeroDivisionError)
    assert other.future.result(TIMEOUT) == "answer to other"
    assert "could not be brought ahead" in caplog.text
    worker.close()
