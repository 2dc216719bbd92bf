"""Turns of keys, and room for bodies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from flide.serve.body import WELCOME, Room, read_body
from flide.serve.faults import Fault
from flide.serve.turns import Turns


class Reading:
    """Turns that last until they are told to end."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self.order: list[str] = []
        self.end = asyncio.Semaphore(0)

    async def _take(self, name: str) -> None:
        async with self._turns.turn(name[0]):
            self.order.append(name)
            await self.end.acquire()

    async def ask(self, *names: str) -> list[asyncio.Task[None]]:
        tasks = [asyncio.create_task(self._take(name)) for name in names]
        await settle()
        return tasks


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def in_a_loop(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    def run() -> None:
        asyncio.run(asyncio.wait_for(_await(test), 20))

    async def _await(test: Callable[[], Awaitable[None]]) -> None:
        await test()

    run.__name__ = test.__name__
    return run


@in_a_loop
async def test_keys_take_turns() -> None:
    turns = Turns(1, 100)
    reading = Reading(turns)
    tasks = await reading.ask("a1", "a2", "a3", "a4", "b1", "c1", "b2")
    for _ in tasks:
        reading.end.release()
        await settle()
    assert reading.order == ["a1", "a2", "b1", "c1", "a3", "b2", "a4"]
    assert turns.waiting == 0


@in_a_loop
async def test_who_leaves_takes_no_turn() -> None:
    turns = Turns(2, 100)
    reading = Reading(turns)
    tasks = await reading.ask("a1", "a2", "a3", "b1", "b2")
    for index in (2, 0):  # one that waits, one that has a turn
        tasks[index].cancel()
        await settle()
    assert reading.order == ["a1", "a2", "b1"]
    tasks[1].cancel()  # its turn goes to b2, who leaves in the same moment
    await asyncio.sleep(0)
    tasks[4].cancel()
    tasks[3].cancel()
    await settle()
    (last, *_) = await reading.ask("d1", "d2", "d3")
    assert reading.order[-2:] == ["d1", "d2"]
    assert turns.waiting == 1
    last.cancel()
    await settle()
    assert reading.order[-1] == "d3"


@in_a_loop
async def test_more_than_may_wait_are_refused() -> None:
    reading = Reading(Turns(1, 2))
    tasks = await reading.ask("a1", "a2", "a3", "a4")
    assert isinstance(fault := tasks[3].exception(), Fault)
    assert fault.status == 529
    assert fault.headers["Retry-After"]


def test_large_bodies_have_to_fit_and_small_ones_always_do() -> None:
    room = Room(100_000)

    async def chunks(size: int) -> AsyncIterator[bytes]:
        for _ in range(size // 1000):
            yield bytes(1000)

    def read(size: int) -> int:
        with room.hold() as held:
            chunked = read_body(chunks(size), declared=None, max_bytes=1 << 20, timeout=5, grow=held.grow)
            return len(asyncio.run(chunked))

    assert read(WELCOME // 1000 * 1000 + 100_000) > WELCOME
    with room.hold() as held:
        held.grow(WELCOME + 90_000)
        assert room.held == 90_000
        assert read(60_000) == 60_000
        with pytest.raises(Fault) as caught:
            read(WELCOME + 20_000)
        assert caught.value.status == 529
        assert caught.value.headers["Connection"] == "close"
        held.grow(0)
        assert read(WELCOME + 20_000) > WELCOME
    assert room.held == 0
