"""The engine on a loop's thread: whatever is cancelled, closed or raised, every future ends, and nothing is waited for
but the device."""

from __future__ import annotations

import asyncio
import selectors
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from flide.runtime import StreamCapacity
from flide.runtime.loop_worker import AHEAD, LINGER, REHEARSAL, LoopWorker
from flide.runtime.worker import ENOUGH, Job
from tests.runtime.test_worker import TIMEOUT, Picky, Runner, jobs_of


class Clock(asyncio.SelectorEventLoop):
    """A loop whose time passes only while it sleeps, or is looked at: what is late on a busy machine is not late on it.

    Attributes:
        looks: how often somebody looked at it.
    """

    def __init__(self) -> None:
        self.now, self.looks = 0.0, 0
        super().__init__(_Skipping(self))

    def time(self) -> float:
        return self.now

    def perf_counter(self) -> float:
        self.looks += 1
        self.now += 1e-6
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class _Skipping(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    """Does not wait."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> Any:
        found = super().select(None if timeout is None else 0)
        if not found and timeout is not None:
            self._clock.now += timeout
        return found


class Device(Runner):
    """Rounds that are done when they are told, or after some seconds."""

    starts_ahead = can_change_threads = True

    def __init__(self, *, seconds: float | None = None, max_tokens: int = 100, clock: Any = time) -> None:
        super().__init__()
        self.clock = clock
        self.limit = StreamCapacity(max_tokens, 1 << 20, 1 << 20)
        self.seconds, self.pending = seconds, []
        self.begun: list[float] = []
        self.fail: Callable[[list[Any]], None] = lambda names: None
        self.free = 0.0  # when the device is
        self.ahead: list[float] = []  # seconds before the end of a round in which an answer was rehearsed

    def run_on_this_thread(self) -> None:
        self.thread = threading.current_thread()

    def begin(self, plan: Any) -> Any:
        assert threading.current_thread() is self.thread
        names = [request.name for request in plan.requests]
        self.before(names)
        self.rounds.append(names)
        now = self.clock.perf_counter()
        self.begun.append(now)
        self.free = max(self.free, now) + (self.seconds or 0.0)
        pending = Round(self, names, self.free)
        self.pending.append(pending)
        return pending

    def rehearse(self, request: Any) -> None:
        super().rehearse(request)
        self.ahead.append(self.pending[-1].end - self.clock.perf_counter())


class Round:
    def __init__(self, device: Device, names: list[Any], end: float) -> None:
        self.device, self.names, self.end = device, names, end
        self.told = False

    def is_done(self) -> bool:
        return self.told if self.device.seconds is None else self.device.clock.perf_counter() >= self.end

    def results(self) -> list[Any]:
        if not self.told and self.device.seconds is not None:
            self.device.clock.sleep(max(0.0, self.end - self.device.clock.perf_counter()))
        self.device.fail(self.names)
        return [f"answer to {name}" for name in self.names]


def on_a_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def run() -> None:
        asyncio.run(asyncio.wait_for(test(), TIMEOUT))

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


def on_a_clock(test: Callable[[Clock], Coroutine[Any, Any, None]]) -> Callable[[pytest.MonkeyPatch], None]:
    def run(monkeypatch: pytest.MonkeyPatch) -> None:
        with asyncio.Runner(loop_factory=Clock) as runner:
            clock: Any = runner.get_loop()
            monkeypatch.setattr("flide.runtime.loop_worker.time", SimpleNamespace(perf_counter=clock.perf_counter))
            runner.run(asyncio.wait_for(test(clock), TIMEOUT))

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


def worker_of(device: Any) -> LoopWorker:
    return LoopWorker(device, asyncio.get_running_loop())


async def answer(job: Any) -> Any:
    return await asyncio.wrap_future(job.future)


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@on_a_clock
async def test_a_round_begins_at_once_and_its_end_is_seen(clock: Clock) -> None:
    device = Device()
    worker = worker_of(device)
    (job,) = jobs_of("a")
    worker.submit([job])
    assert device.rounds == [["a"]]
    await turns()
    assert not job.future.done()
    device.pending[0].told = True
    assert await answer(job) == "answer to a"
    await turns()
    assert device.rounds == [["a"]], "nothing runs where nothing waits"
    assert worker._again is not None, "who asks again at once is waited for"
    await asyncio.sleep(5 * LINGER)
    assert worker._again is None, "and nobody else"


@on_a_loop
async def test_of_rounds_of_unknown_length_the_next_one_is_started_while_one_runs_and_no_third() -> None:
    device = Device()
    worker = worker_of(device)
    jobs = jobs_of(*"abcde")
    worker.submit(jobs[:1])
    worker.submit(jobs[1:3])
    await turns()
    assert device.rounds == [["a"], ["b", "c"]]
    worker.submit(jobs[3:])
    await turns()
    assert len(device.rounds) == 2
    device.pending[0].told = True
    await answer(jobs[0])
    await turns()
    assert device.rounds[2:] == [["d", "e"]]
    assert not jobs[1].future.done()
    for pending in device.pending:
        pending.told = True
    assert [await answer(job) for job in jobs] == [f"answer to {name}" for name in "abcde"]


@on_a_clock
async def test_of_known_length_it_is_started_as_late_as_may_be(clock: Clock) -> None:
    device = Device(seconds=0.05, clock=clock)
    worker = worker_of(device)
    (first,) = jobs_of("first")
    worker.submit([first])
    await answer(first)
    (second,) = jobs_of("second")
    begun = clock.now
    worker.submit([second])
    jobs = []
    for number in range(3):
        await asyncio.sleep(0.01)
        jobs += jobs_of(number)
        worker.submit(jobs[-1:])
    for job in (second, *jobs):
        await answer(job)
    assert device.rounds == [["first"], ["second"], [0, 1, 2]]
    assert 0.05 - 1.1 * AHEAD < device.begun[2] - begun < 0.05


@on_a_clock
async def test_what_takes_long_to_start_is_started_earlier(clock: Clock) -> None:
    starting = 0.01
    device = Device(seconds=0.1, clock=clock)
    device.before = lambda names: clock.sleep(starting)
    worker = worker_of(device)
    for number in range(3):  # the last one starts while the one before it runs, and has taken so long before
        jobs = jobs_of(2 * number, 2 * number + 1)
        worker.submit(jobs[:1])
        worker.submit(jobs[1:])
        for job in jobs:
            await answer(job)
    first, second = device.pending[-2:]
    assert device.begun[-1] < first.end - starting / 2, "the device might have had nothing to do"
    assert second.end - first.end == pytest.approx(0.1, abs=1e-5)


@on_a_clock
async def test_a_start_that_took_long_once_changes_little(clock: Clock) -> None:
    device = Device(seconds=0.05, clock=clock)
    worker = worker_of(device)
    for held_up in (True, False):
        device.before = lambda names, held_up=held_up: clock.sleep(0.2) if held_up and names == ["slow"] else None
        jobs = jobs_of("first", "slow")
        worker.submit(jobs[:1])
        worker.submit(jobs[1:])
        for job in jobs:
            await answer(job)
    assert device.begun[-1] - device.begun[-2] > 0.02, "as late as may be, again"
    (job,) = jobs_of("alone")
    before = clock.looks
    device.seconds = 0.3
    worker._seconds = dict.fromkeys(worker._seconds, device.seconds)  # which it knows
    worker.submit([job])
    await answer(job)
    assert clock.looks - before < 10_000, "nothing is to be started: nothing is watched for so long"


@on_a_clock
async def test_what_ended_unseen_tells_nothing_of_how_long_it_took(clock: Clock) -> None:
    device = Device(seconds=0.05, clock=clock)
    worker = worker_of(device)
    for held_up in (True, False):
        jobs = jobs_of("first", "second")
        worker.submit(jobs[:1])
        worker.submit(jobs[1:])
        while held_up and len(device.begun) < 2:
            await asyncio.sleep(0)
        if held_up:
            clock.sleep(0.2)  # both end
        for job in jobs:
            await answer(job)
    assert device.begun[-1] - device.begun[-2] > 0.02


@on_a_clock
async def test_the_answer_of_who_has_a_round_alone_is_rehearsed_once_before_it_is_there(clock: Clock) -> None:
    device = Device(seconds=0.05, clock=clock)
    worker = worker_of(device)
    for name in "abc":
        (job,) = jobs_of(name)
        worker.submit([job])
        assert await answer(job) == f"answer to {name}"
    assert device.rehearsed == ["b", "c"], "how long a round lasts is not known before the first one"
    assert all(0.4 * REHEARSAL < seconds < 1.1 * REHEARSAL for seconds in device.ahead)

    several = jobs_of("d", "e")
    worker.submit(several[:1])
    worker.submit(several[1:])  # is waiting when d ends, and then alone
    for job in several:
        await answer(job)
    assert device.rehearsed == ["b", "c", "e"], "others would wait for it"
    for _ in range(2):  # the second time it is known how long so many rows take
        together = jobs_of("f", "g")
        worker.submit(together)
        for job in together:
            await answer(job)
    assert device.rounds[-2:] == [["f", "g"], ["f", "g"]]
    assert device.rehearsed == ["b", "c", "e"]


@on_a_clock
async def test_nothing_is_rehearsed_when_the_answer_may_be_there(clock: Clock) -> None:
    device = Device(seconds=0.05, clock=clock)
    worker = worker_of(device)
    for name in "ab":
        (job,) = jobs_of(name)
        worker.submit([job])
        if name == "b":
            clock.sleep(0.05 - 0.2 * REHEARSAL)  # something else has held the loop
        await answer(job)
    assert device.rehearsed == []


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, asyncio.CancelledError])
def test_an_answer_that_cannot_be_rehearsed_is_given(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    @on_a_clock
    async def test(clock: Clock) -> None:
        device = Device(seconds=0.05, clock=clock)
        worker = worker_of(device)

        def refuse(request: Any) -> None:
            device.rehearsed.append(request.name)
            raise error

        device.rehearse = refuse  # type: ignore[method-assign]
        for name in "abc":
            (job,) = jobs_of(name)
            worker.submit([job])
            assert await answer(job) == f"answer to {name}"
        assert device.rehearsed == ["b", "c"]

    test(monkeypatch)


@on_a_clock
async def test_a_rehearsal_that_takes_too_long_does_not_make_rounds_seem_longer(clock: Clock) -> None:
    device = Device(seconds=0.05, clock=clock)
    took = 1.2 * REHEARSAL
    device.rehearse = lambda request: clock.sleep(took)  # type: ignore[method-assign]
    worker = worker_of(device)
    for number in range(50):
        (job,) = jobs_of(number)
        worker.submit([job])
        await answer(job)
        assert clock.now - device.pending[-1].end < took - REHEARSAL + 1e-4, "each is rehearsed later than the last"


@on_a_clock
async def test_what_was_thought_to_last_longer_is_not_for_good(clock: Clock) -> None:
    device = Device(seconds=0.05, clock=clock)
    device.rehearse = lambda request: clock.sleep(0.7 * REHEARSAL)  # type: ignore[method-assign]
    worker = worker_of(device)
    for number in range(10):
        (job,) = jobs_of(number)
        worker.submit([job])
        await answer(job)
        if number == 0:  # such a rehearsal ends behind the round
            worker._seconds = {kind: seconds + 0.5 * REHEARSAL for kind, seconds in worker._seconds.items()}
    assert clock.now - device.pending[-1].end < 1e-4


@on_a_clock
async def test_what_could_not_begin_is_not_rehearsed(clock: Clock) -> None:
    device = Device(seconds=0.05, clock=clock)
    worker = worker_of(device)
    (good,) = jobs_of("good")
    worker.submit([good])
    await answer(good)

    def refuse(names: list[Any]) -> None:
        clock.sleep(0.05 - 0.7 * REHEARSAL)  # when the answer of another one would be rehearsed
        raise ValueError("no")

    device.before = refuse
    (bad,) = jobs_of("bad")
    worker.submit([bad])
    with pytest.raises(ValueError, match="no"):
        await answer(bad)
    assert device.rehearsed == []


@on_a_clock
async def test_nothing_is_rehearsed_while_a_round_is_held_for_the_end(clock: Clock) -> None:
    device = Device(seconds=0.05, clock=clock)
    worker = worker_of(device)
    (first,) = jobs_of("first")
    worker.submit([first])
    await answer(first)
    running, (large,) = jobs_of("running"), jobs_of("large", num_tokens=1000)
    worker.submit(running)
    worker.submit([large])
    await answer(running[0])
    await answer(large)
    assert device.rounds == [["first"], ["running"], ["large"]]
    assert device.rehearsed == []


@on_a_loop
async def test_while_a_round_runs_the_next_one_is_half_of_all() -> None:
    device = Device(max_tokens=100 * ENOUGH)
    worker = worker_of(device)
    worker.submit(jobs_of(0, num_tokens=ENOUGH))
    worker.submit(jobs_of(*range(1, 6), num_tokens=ENOUGH))
    await turns()
    assert device.rounds == [[0], [1, 2, 3]]


@on_a_loop
async def test_a_round_that_nothing_was_captured_for_waits_for_the_one_before_it() -> None:
    device = Device(max_tokens=10)
    worker = worker_of(device)
    small, large = jobs_of("small", num_tokens=5) + jobs_of("large", num_tokens=11)
    worker.submit([small])
    worker.submit([large])
    await turns()
    assert device.rounds == [["small"]]
    device.pending[0].told = True
    await answer(small)
    await turns()
    assert device.rounds == [["small"], ["large"]]
    device.pending[1].told = True
    assert await answer(large) == "answer to large"


@on_a_loop
async def test_cancelled_jobs_are_dropped_and_leave_nothing_that_is_waited_for() -> None:
    device = Device()
    worker = worker_of(device)
    first, *others = jobs_of("first", "a", "b")
    for job in others:
        job.future.cancel()
    worker.submit(others)
    await turns()
    assert not device.rounds
    worker.submit([first])
    device.pending[0].told = True
    assert await answer(first) == "answer to first"
    # What is cancelled while something runs takes no room.
    running, cancelled, last = jobs_of("running", "cancelled", "last")
    worker.submit([running])
    cancelled.future.cancel()
    worker.submit([cancelled, last])
    await turns()
    assert device.rounds[1:] == [["running"], ["last"]]
    for pending in device.pending:
        pending.told = True
    await answer(last)


@on_a_loop
async def test_who_is_answered_can_ask_again_at_once() -> None:
    device = Device()
    worker = worker_of(device)
    first, second = jobs_of("first", "second")
    first.future.add_done_callback(lambda _: worker.submit([second]))
    worker.submit([first])
    device.pending[0].told = True
    await answer(first)
    await turns()
    device.pending[1].told = True
    assert await answer(second) == "answer to second"


@on_a_loop
async def test_other_threads_can_ask_and_wait_and_this_one_cannot_wait() -> None:
    device = Device(seconds=0.001)
    worker = worker_of(device)

    def ask() -> Any:
        (job,) = jobs_of("a")
        worker.submit([job], waits=True)
        return job.future.result(TIMEOUT)

    assert await asyncio.to_thread(ask) == "answer to a"
    with pytest.raises(RuntimeError, match="cannot wait"):
        worker.submit(jobs_of("b"), waits=True)
    assert device.rounds == [["a"]]


@on_a_loop
async def test_closing_on_the_loop_finishes_what_was_submitted() -> None:
    device = Device(seconds=0.01, max_tokens=10)
    worker = worker_of(device)
    jobs = jobs_of(*range(5), num_tokens=3) + jobs_of("large", num_tokens=11)
    worker.submit(jobs)
    worker.close()
    assert all(job.future.done() for job in jobs)
    assert worker.closed
    with pytest.raises(RuntimeError, match="closed"):
        worker.submit(jobs_of("late"))
    await turns()
    worker.close()


@on_a_loop
async def test_another_thread_can_close() -> None:
    worker = worker_of(Device(seconds=0.01))
    jobs = jobs_of(*range(3))
    worker.submit(jobs)
    await asyncio.to_thread(worker.close)
    assert all(job.future.done() for job in jobs)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_when_the_loop_has_ended_closing_still_finishes(elsewhere: bool) -> None:
    device, jobs = Device(seconds=0.02), jobs_of(*"ab")

    async def submit() -> LoopWorker:
        worker = worker_of(device)
        worker.submit(jobs[:1])
        worker.submit(jobs[1:])
        return worker

    worker = asyncio.run(submit())
    if elsewhere:
        thread = threading.Thread(target=worker.close)
        thread.start()
        thread.join(TIMEOUT)
    else:
        worker.close()
    assert [job.future.result(0) for job in jobs] == ["answer to a", "answer to b"]


@pytest.mark.parametrize("is_closed", [False, True])
def test_what_comes_from_elsewhere_to_a_loop_that_has_ended_ends_too(is_closed: bool) -> None:
    loop, (job,) = asyncio.new_event_loop(), jobs_of("a")

    async def make() -> LoopWorker:
        return worker_of(Device(seconds=0.01))

    worker = loop.run_until_complete(make())
    if is_closed:
        loop.close()
        with ThreadPoolExecutor(1) as pool, pytest.raises(RuntimeError, match="closed"):
            pool.submit(worker.submit, [job]).result(TIMEOUT)
        assert not job.future.done()
        worker.close()
        return
    with ThreadPoolExecutor(1) as pool:
        pool.submit(worker.submit, [job]).result(TIMEOUT)
        assert not job.future.done()
        pool.submit(worker.close).result(TIMEOUT)
    assert job.future.result(0) == "answer to a"
    loop.close()


@on_a_loop
async def test_who_submits_while_another_closes_is_answered_or_refused() -> None:
    for _ in range(20):
        worker, jobs = worker_of(Device(seconds=0.0)), jobs_of(*range(50))
        begun = threading.Event()

        def ask(worker: LoopWorker = worker, jobs: list[Any] = jobs, begun: threading.Event = begun) -> int:
            for number, job in enumerate(jobs):
                begun.set()
                try:
                    worker.submit([job])
                except RuntimeError:
                    return number
            return len(jobs)

        asking = asyncio.create_task(asyncio.to_thread(ask))
        await asyncio.to_thread(begun.wait)
        worker.close()
        submitted = await asking
        for job in jobs[:submitted]:
            error = await asyncio.to_thread(job.future.exception, TIMEOUT)
            assert error is None or "closed" in str(error)


@on_a_loop
async def test_a_round_that_cannot_begin_and_one_that_fails_at_its_end_are_told_and_the_next_one_runs() -> None:
    device = Device(seconds=0.0)
    worker = worker_of(device)

    def refuse(names: list[Any]) -> None:
        if "bad" in names:
            raise ValueError("no")

    device.before = refuse
    good, bad = jobs_of("good", "bad")
    worker.submit([good, bad])
    assert await answer(good) == "answer to good"
    with pytest.raises(ValueError, match="no"):
        await answer(bad)
    device.before, device.fail = lambda names: None, refuse
    good, bad = jobs_of("good", "bad")
    worker.submit([good, bad])
    assert await answer(good) == "answer to good"
    with pytest.raises(ValueError, match="no"):
        await answer(bad)


@on_a_loop
async def test_a_device_that_cannot_be_asked_has_failed() -> None:
    device = Device()
    worker = worker_of(device)
    (job,) = jobs_of("a")
    worker.submit([job])

    def broken() -> bool:
        raise RuntimeError("an illegal address")

    def fail(names: list[Any]) -> None:
        raise RuntimeError("an illegal address")

    device.pending[0].is_done, device.fail = broken, fail
    with pytest.raises(RuntimeError, match="illegal"):
        await answer(job)


class PickyDevice(Picky, Device):
    def __init__(self, check: Callable[[Any], None]) -> None:
        Device.__init__(self, seconds=0.0)
        self.check = check

    begin = Device.begin


@on_a_loop
async def test_a_request_that_cannot_be_planned_fails_alone() -> None:
    def check(name: Any) -> None:
        if name == "bad":
            raise ValueError("no")

    worker = worker_of(PickyDevice(check))
    jobs = jobs_of("bad", "good")
    worker.submit(jobs)
    assert await answer(jobs[1]) == "answer to good"
    with pytest.raises(ValueError, match="no"):
        await answer(jobs[0])
    only = jobs_of("bad")
    worker.submit(only)
    with pytest.raises(ValueError, match="no"):
        await answer(only[0])


@on_a_loop
async def test_many_who_ask_again_and_again_are_all_answered() -> None:
    device = Device(seconds=0.002, max_tokens=8)
    worker = worker_of(device)

    async def ask(client: int) -> None:
        for number in range(20):
            job = Job(jobs_of((client, number))[0].prepared)
            worker.submit([job])
            assert await answer(job) == f"answer to {(client, number)}"

    await asyncio.gather(*map(ask, range(30)))
    assert sum(map(len, device.rounds)) == 600
    assert max(map(len, device.rounds)) == 8
