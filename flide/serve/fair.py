"""A queue that is fair between keys: of those that have something in it, one after another."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Items by key, those of a key in the order in which they came."""

    def __init__(self) -> None:
        self._queues: OrderedDict[str, deque[T]] = OrderedDict()  # none is empty; the first one is next

    def __bool__(self) -> bool:
        return bool(self._queues)

    def append(self, key: str, item: T) -> None:
        self._queues.setdefault(key, deque()).append(item)

    def first(self) -> tuple[str, T]:
        """Whose turn it is, and the key's first item. There has to be one."""
        key, queue = next(iter(self._queues.items()))
        return key, queue[0]

    def end_turn(self, key: str) -> None:
        """What is left of a key comes after all others."""
        if key in self._queues:
            self._queues.move_to_end(key)

    def remove(self, key: str, item: T) -> bool:
        """Take an item out, wherever it stands. Whether it was there."""
        queue = self._queues.get(key)
        if queue is None or item not in queue:
            return False
        queue.remove(item)
        if not queue:
            del self._queues[key]
        return True

    def of(self, key: str) -> Sequence[T]:
        """The items of a key."""
        return self._queues.get(key, ())

    def by_key(self) -> Iterable[Sequence[T]]:
        """The items of every key that has some."""
        return self._queues.values()
