"""Who is read next: some requests at a time, and where more wait, one of each key in turn."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from flide.serve.fair import FairQueue
from flide.serve.faults import queue_full


class Turns:
    """To be used on one event loop.

    Args:
        at_once: how many may have a turn.
        most: that may wait for one.
    """

    def __init__(self, at_once: int, most: int) -> None:
        self._free, self._most = at_once, most
        self._waiting: FairQueue[asyncio.Future[None]] = FairQueue()
        self.waiting = 0

    @contextlib.asynccontextmanager
    async def turn(self, key: str) -> AsyncIterator[None]:
        """Waits for a turn, which lasts as long as the block.

        Raises:
            Fault: 529.
        """
        if self._free:
            self._free -= 1
        else:
            await self._wait(key)
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, key: str) -> None:
        if self.waiting >= self._most:
            raise queue_full()
        begun = asyncio.get_running_loop().create_future()
        self._waiting.append(key, begun)
        self.waiting += 1
        try:
            await begun
        except asyncio.CancelledError:
            if not begun.cancelled():  # the turn had just come
                self._pass_on()
            else:
                self._forget(key, begun)
            raise

    def _pass_on(self) -> None:
        """A turn is over."""
        while self._waiting:
            key, begun = self._waiting.first()
            self._forget(key, begun)
            if not begun.cancelled():  # else its task is about to tell
                self._waiting.end_turn(key)
                begun.set_result(None)
                return
        self._free += 1

    def _forget(self, key: str, begun: asyncio.Future[None]) -> None:
        if self._waiting.remove(key, begun):
            self.waiting -= 1
