"""RoundPlan: which requests share the next round."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from flide.runtime.capacity import MAX_REQUESTS
from flide.runtime.checkpoints.radix import key_of
from flide.runtime.metadata import StreamCapacity
from flide.runtime.tree import TreeLayout

if TYPE_CHECKING:
    from flide.runtime.checkpoints.store import Checkpoint, CheckpointStore
    from flide.runtime.rounds import Runnable


class RoundPlan:
    """Requests of one round; to be made and used on the thread that runs it.

    Args:
        limit: what the requests keep within, unless there is only one.
        max_requests: how many there may be.
        store: where trunks may resume from.

    Attributes:
        requests: in order.
        keys, sources: of each, its trunk and what it resumes from (pinned); empty without a store.
    """

    def __init__(self, limit: StreamCapacity, max_requests: int, store: CheckpointStore | None = None) -> None:
        self._limit, self._max_requests, self._store = limit, max_requests, store
        self.requests: list[Runnable] = []
        self.keys: list[bytes] = []
        self.sources: list[Checkpoint | None] = []
        self._needed: list[StreamCapacity] = []  # by the first request, the first two, ...

    @property
    def needed(self) -> StreamCapacity:
        """What the requests need together, each by itself."""
        return self._needed[-1]

    @property
    def rows(self) -> int:
        """Rows of the round; 0 of one without requests."""
        return self.needed.tokens if self.requests else 0

    @property
    def fits(self) -> bool:
        """Whether the requests keep within the limit; one alone need not."""
        return self._limit.holds(self.needed)

    def add(self, request: Runnable) -> bool:
        """Take one more request, if there is room for it; the first one always has."""
        if len(self.requests) >= self._max_requests:
            return False
        needed, source = request.needed, None
        if self._store is not None:
            key = trunk_key(request.layout)
            source = self._store.find(request.reuse.salt, key)
            if source is not None:
                needed = replace(needed, tokens=needed.tokens - source.length)
        if self.requests:
            needed = self.needed + needed
            if not (self._limit.holds(needed) and self._have_scratch(request, needed.depth)):
                if self._store is not None and source is not None:
                    self._store.release(source)
                return False
        self.requests.append(request)
        self._needed.append(needed)
        if self._store is not None:
            self.keys.append(key)
            self.sources.append(source)
        return True

    def undo(self) -> None:
        """Leave the last request out."""
        self.requests.pop()
        self._needed.pop()
        if self._store is not None:
            self.keys.pop()
            self.release(-1)
            self.sources.pop()

    def release(self, index: int) -> None:
        """Let a request start from nothing."""
        source = self.sources[index]
        if source is not None:
            assert self._store is not None, "where there are sources"
            self._store.release(source)
            self.sources[index] = None

    def _have_scratch(self, request: Runnable, depth: int) -> bool:
        """Whether there is a scratch state for each trunk and each branch with leaves. With two levels only requests,
        which are no more than there is scratch for, have one."""
        parents = (max(1, x.layout.num_parents) for x in (*self.requests, request))
        return depth == 2 or sum(parents) <= MAX_REQUESTS


def trunk_key(layout: TreeLayout) -> bytes:
    return key_of(layout.rows[0, : layout.trunk_length])


__all__ = ["RoundPlan", "trunk_key"]
