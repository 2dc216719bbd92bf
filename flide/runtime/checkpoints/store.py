"""CheckpointStore: which checkpoints there are, what a round resumes from and what it saves. It belongs to the thread
that runs the rounds; only its counts may be read by others.

A checkpoint is the recurrent states and convolution windows after m tokens of a trunk (a slot), and the keys and values
of these tokens (pages, shared with other checkpoints of the same path). Its place in a radix tree is its tokens. Pages
are never written again once their round is over: a trunk that resumes inside a page takes a copy of it.

What a round saves can be found as soon as the round was submitted, since all rounds run in one order, and stays if the
round's answers are right. What goes wrong is gone, and so is all that resumed from it (``StoredRound.is_stale``).
"""

from __future__ import annotations

import heapq
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from flide.runtime.checkpoints.budget import Budget, Budgets, ItemBytes
from flide.runtime.checkpoints.pools import CheckpointPools
from flide.runtime.checkpoints.radix import TOKEN_BYTES, RadixNode, RadixTree
from flide.runtime.checkpoints.stats import CheckpointStats
from flide.runtime.metadata import MAX_SAVES, PAGE_SIZE, TrunkCache, num_pages

logger = logging.getLogger("flide.engine")

MOST_EXPECTED = 0.25  # of the device's pages or slots, brought there ahead: more would drive out one another
DEVICE, HOST = 0, 1  # tiers
Cost: TypeAlias = Callable[[int, int], float]  # of computing a trunk's tokens ``begin`` to ``end``
_Where: TypeAlias = "tuple[str, str | None]"  # namespace and salt
COUNTS = ("hits", "misses", "saved_tokens", "saves", "evictions", "offloads", "restores")


@dataclass(slots=True, eq=False)
class PageRun:
    """Pages behind those of ``parent``: a branch of a tree whose paths are the pages of checkpoints.

    Attributes:
        numbers: of the pages in each tier; None where they are not.
        users: checkpoints of each tier that end here, and runs there that go on from here. A tier has the pages as long
            as there are any.
        num_pages: these, and those before them.
    """

    parent: PageRun | None
    numbers: list[list[int] | None]
    num_pages: int
    users: list[int] = field(default_factory=lambda: [0, 0])

    @classmethod
    def behind(cls, parent: PageRun | None, numbers: list[int]) -> PageRun:
        """New ones on the device."""
        return cls(parent, [numbers, None], len(numbers) + (0 if parent is None else parent.num_pages))

    def path(self) -> list[PageRun]:
        """From the first page's on."""
        run: PageRun | None = self
        found = []
        while run is not None:
            found.append(run)
            run = run.parent
        return found[::-1]


@dataclass(slots=True, eq=False)
class Checkpoint:
    """What is kept after ``length`` tokens.

    Attributes:
        pages: the last ones of these tokens. All are in its tier, and may be in the other one, too.
        where: whose tree it is in, and ``node`` its tokens there.
        tier, slot: where its states are.
        pins: rounds that read or write it. It is neither moved nor dropped as long as there are any.
        gone: it is no more. What resumed from it, while it was pinned, is worth nothing.
        stamp: of its valid entry in the order of eviction.
    """

    length: int
    pages: PageRun
    where: _Where
    slot: int
    tier: int = DEVICE
    pins: int = 1
    gone: bool = False
    stamp: int = -1
    node: RadixNode[Checkpoint] = field(init=False)


@dataclass(frozen=True, slots=True)
class Trunk:
    """What is asked for one trunk of a round.

    Attributes:
        key: its tokens (``radix.key_of``).
        salt: of who asks.
        saves: lengths after which to keep a checkpoint, ascending, at most ``MAX_SAVES``.
        source: the checkpoint that it resumes from, pinned, or None.
    """

    key: bytes
    salt: str | None
    saves: tuple[int, ...] = ()
    source: Checkpoint | None = None

    @property
    def resumed(self) -> int:
        """Tokens that need not be computed."""
        return 0 if self.source is None else self.source.length


class _Tier:
    """What is free on the device or the host, and what is dropped first."""

    def __init__(self, budget: Budget, *, first_page: int, first_slot: int) -> None:
        self.budget = budget
        self.pages = [*range(first_page, first_page + budget.pages)][::-1]
        self.slots = [*range(first_slot, first_slot + budget.slots)][::-1]
        self.lengths: dict[int, int] = {}  # tokens behind the states of each slot in use
        self.order: list[tuple[float, int, Checkpoint]] = []  # a heap; entries may be out of date
        self.clock = 0.0

    def used_bytes(self, item: ItemBytes) -> int:
        used = Budget(self.budget.pages - len(self.pages), self.budget.slots - len(self.slots))
        return used.bytes(item)


class CheckpointStore:
    """Keeps checkpoints within fixed budgets. Where there is no room, the one goes first that saves least work for its
    bytes, unless it was used lately (greedy dual size): every use puts a checkpoint that far ahead of the last one that
    had to go.

    Args:
        pools: of the model.
        budgets: how many pages and slots there are.
        first_page: pages of the device before it are the rounds' own (:meth:`begin`).
        namespace: all but tokens and salt that decides what a checkpoint holds.
        cost: the work that a checkpoint saves.
    """

    def __init__(
        self,
        pools: CheckpointPools,
        budgets: Budgets,
        *,
        first_page: int,
        namespace: str,
        cost: Cost,
    ) -> None:
        self._pools, self._item, self._cost = pools, budgets.item, cost
        self._first_page, self._namespace = first_page, namespace
        self._tiers = (
            _Tier(budgets.device, first_page=first_page, first_slot=1),
            _Tier(budgets.host, first_page=0, first_slot=0),
        )
        self._trees: dict[_Where, RadixTree[Checkpoint]] = {}
        self._expected: set[Checkpoint] = set()  # brought here for requests that wait
        self._stamps = itertools.count()
        self._counts = Counter(dict.fromkeys(COUNTS, 0))

    def find(self, salt: str | None, key: bytes) -> Checkpoint | None:
        """The longest beginning of a trunk that is kept on the device, or can be brought there; it is pinned until
        :meth:`release`, or the end of the round that is begun with it."""
        tree = self._trees.get((self._namespace, salt))
        for found in reversed(tree.path(key)) if tree is not None else ():
            if found.gone:  # dropped, to make room for a longer one that still had none
                continue
            self._pin(found)
            if found.tier == DEVICE or self._move(found, DEVICE):
                self._expected.discard(found)
                self._check_lengths(found)
                return found
            self.release(found)
        return None

    def expect(self, salt: str | None, key: bytes) -> None:
        """Begin to bring to the device what a trunk that waits will resume from."""
        budget, pages = self._tiers[DEVICE].budget, sum(x.pages.num_pages for x in self._expected)
        if max(pages / budget.pages, len(self._expected) / budget.slots) > MOST_EXPECTED:
            return
        before = self._counts["restores"]
        found = self.find(salt, key)
        if found is not None:
            self.release(found)
            if self._counts["restores"] > before:
                self._expected.add(found)

    @property
    def has_host_tier(self) -> bool:
        return self._tiers[HOST].budget.slots > 0

    def release(self, checkpoint: Checkpoint) -> None:
        """Undo a pin."""
        checkpoint.pins -= 1
        if not checkpoint.pins and not checkpoint.gone:
            self._rank(checkpoint)

    def begin(self, trunks: Sequence[Trunk]) -> StoredRound:
        """Decide what a round reads and writes. What it saves can be found by the rounds after it.

        Pages that no checkpoint needs are the round's own, numbered from 0.
        """
        caches, copies, saved, own = [], [], [], 0
        for trunk in trunks:
            source, total, done = trunk.source, len(trunk.key) // TOKEN_BYTES, trunk.resumed
            pages = [] if source is None else _numbers(source.pages.path(), DEVICE)
            torn = [pages.pop()] if done % PAGE_SIZE and done < total else []
            fresh, saves = self._save(trunk)
            missing = num_pages(total) - len(pages) - len(fresh)
            fresh += range(own, own + missing)
            own += missing
            copies += [(page, fresh[0]) for page in torn]
            slots = tuple((checkpoint.length, checkpoint.slot) for checkpoint in saves)
            caches.append(TrunkCache(done, 0 if source is None else source.slot, pages + fresh, slots))
            saved.append(saves)
        assert own <= self._first_page, "a round has enough pages of its own"
        return StoredRound(self, trunks, caches, copies, saved)

    def stats(self) -> CheckpointStats:
        device, host = self._tiers
        return CheckpointStats(
            **self._counts,
            checkpoints=len(device.lengths),
            host_checkpoints=len(host.lengths),
            bytes=device.used_bytes(self._item),
            host_bytes=host.used_bytes(self._item),
            capacity_bytes=device.budget.bytes(self._item),
            host_capacity_bytes=host.budget.bytes(self._item),
        )

    def check(self) -> None:
        """Assert that every page and slot is accounted for (tests and debugging)."""
        found = [checkpoint for tree in self._trees.values() for checkpoint in tree.values()]
        runs = {id(run): run for checkpoint in found for run in checkpoint.pages.path()}.values()
        for index, tier in enumerate(self._tiers):
            inside = [checkpoint for checkpoint in found if checkpoint.tier == index]
            present = {id(run): run for checkpoint in inside for run in checkpoint.pages.path()}
            users = Counter(id(checkpoint.pages) for checkpoint in inside)
            users.update(id(run.parent) for run in present.values() if run.parent is not None)
            assert all(run.users[index] == users[id(run)] for run in runs), "users are counted"
            assert all((run.numbers[index] is not None) == (id(run) in present) for run in runs), "no page is idle"
            taken = _numbers(present.values(), index)
            first = self._first_page if index == DEVICE else 0
            assert sorted([*taken, *tier.pages]) == [*range(first, first + tier.budget.pages)], "no page is lost"
            slots = [checkpoint.slot for checkpoint in inside]
            first = 1 if index == DEVICE else 0
            assert sorted([*slots, *tier.slots]) == [*range(first, first + tier.budget.slots)], "no slot is lost"
            assert {x.slot: x.length for x in inside} == tier.lengths, "slots have the states of their checkpoints"
        for checkpoint in found:
            self._check_lengths(checkpoint)
            assert not checkpoint.gone, "what went wrong is gone"

    def count(self, **amounts: int) -> None:
        self._counts.update(amounts)

    def _save(self, trunk: Trunk) -> tuple[list[int], list[Checkpoint]]:
        """New pages behind the whole ones of the trunk's source, and the checkpoints for which they are: of those that
        are asked for and not there yet, as many as there is room for, shorter ones first."""
        where = self._namespace, trunk.salt
        known = {found.length for found in self._trees[where].path(trunk.key)} if where in self._trees else set()
        wanted = [length for length in trunk.saves if length > trunk.resumed and length not in known]
        assert len(wanted) <= MAX_SAVES
        shared = trunk.resumed // PAGE_SIZE
        while wanted and not self._make_room(DEVICE, num_pages(wanted[-1]) - shared, len(wanted)):
            wanted.pop()
        if not wanted:
            return [], []
        device, tree = self._tiers[DEVICE], self._trees.setdefault(where, RadixTree())
        # Whole pages of the source are the end of a run.
        run = None if trunk.source is None else trunk.source.pages
        if run is not None and run.num_pages > shared:
            run = run.parent
        assert (0 if run is None else run.num_pages) == shared
        pages, saves = [], []
        for length in wanted:
            for end in (length // PAGE_SIZE, num_pages(length)):  # whole pages, and a broken one
                count = end - (0 if run is None else run.num_pages)
                if count > 0:
                    run = PageRun.behind(run, [device.pages.pop() for _ in range(count)])
                    pages += _numbers([run], DEVICE)
            assert run is not None
            made = Checkpoint(length, run, where, device.slots.pop())
            made.node = tree.insert(trunk.key[: length * TOKEN_BYTES], made)
            device.lengths[made.slot] = length
            self._use(run, DEVICE)
            self._check_lengths(made)
            saves.append(made)
        return pages, saves

    def _make_room(self, tier: int, pages: int, slots: int) -> bool:
        """See that there are so many free pages and slots; False if that cannot be."""
        here = self._tiers[tier]
        if pages > here.budget.pages or slots > here.budget.slots:
            return False
        while len(here.pages) < pages or len(here.slots) < slots:
            victim = self._next_victim(tier)
            if victim is None:
                return False
            if tier == DEVICE and self._move(victim, HOST):
                self._rank(victim)
            else:
                self.remove(victim)
                self.count(evictions=1)
        return True

    def _move(self, checkpoint: Checkpoint, to: int) -> bool:
        """Bring a checkpoint to another tier, if there is room."""
        origin = checkpoint.tier
        self._use(checkpoint.pages, to)  # what is there already must stay
        missing = [run for run in checkpoint.pages.path() if run.numbers[to] is None]
        pages = _numbers(missing, origin)
        if not self._make_room(to, len(pages), 1):
            self._leave(checkpoint.pages, to)
            return False
        here = self._tiers[to]
        for run in missing:
            run.numbers[to] = [here.pages.pop() for _ in _numbers([run], origin)]
        slot = here.slots.pop()
        pairs = [*zip(pages, _numbers(missing, to), strict=True)]
        copy = self._pools.offload if to == HOST else self._pools.restore
        try:
            copy(pairs, (checkpoint.slot, slot))
        except Exception:  # the thread that plans rounds must go on
            logger.exception("a checkpoint could not be moved")
            here.slots.append(slot)
            self._leave(checkpoint.pages, to)
            return False
        self.count(**{("restores", "offloads")[to]: 1})
        self._expected.discard(checkpoint)
        self._free_slot(checkpoint)
        self._leave(checkpoint.pages, origin)
        checkpoint.tier, checkpoint.slot = to, slot
        here.lengths[slot] = checkpoint.length
        return True

    def remove(self, checkpoint: Checkpoint) -> None:
        """Drop a checkpoint. Pins that it has are to be released all the same."""
        checkpoint.gone, checkpoint.stamp = True, -1
        self._expected.discard(checkpoint)
        tree = self._trees[checkpoint.where]
        tree.remove(checkpoint.node)
        if not tree:
            del self._trees[checkpoint.where]
        self._free_slot(checkpoint)
        self._leave(checkpoint.pages, checkpoint.tier)

    def _free_slot(self, checkpoint: Checkpoint) -> None:
        tier = self._tiers[checkpoint.tier]
        del tier.lengths[checkpoint.slot]
        tier.slots.append(checkpoint.slot)

    def _use(self, run: PageRun | None, tier: int) -> None:
        while run is not None:
            run.users[tier] += 1
            run = run.parent if run.users[tier] == 1 else None

    def _leave(self, run: PageRun | None, tier: int) -> None:
        while run is not None:
            run.users[tier] -= 1
            if run.users[tier]:
                return
            self._tiers[tier].pages += run.numbers[tier] or ()
            run.numbers[tier] = None
            run = run.parent

    def _pin(self, checkpoint: Checkpoint) -> None:
        checkpoint.pins += 1
        checkpoint.stamp = -1

    def _rank(self, checkpoint: Checkpoint) -> None:
        """Give an unpinned checkpoint its place in the order of eviction, as one that was just used."""
        tier = self._tiers[checkpoint.tier]
        above = checkpoint.node.nearest_above()
        begin = 0 if above is None else above.length
        size = self._item.slot + num_pages(checkpoint.length - begin) * self._item.page
        checkpoint.stamp = next(self._stamps)
        rank = tier.clock + self._cost(begin, checkpoint.length) / size
        heapq.heappush(tier.order, (rank, checkpoint.stamp, checkpoint))
        if len(tier.order) > 64 + 2 * len(tier.lengths):
            tier.order = [entry for entry in tier.order if entry[1] == entry[2].stamp]
            heapq.heapify(tier.order)

    def _next_victim(self, tier: int) -> Checkpoint | None:
        here = self._tiers[tier]
        while here.order:
            rank, stamp, checkpoint = heapq.heappop(here.order)
            if stamp == checkpoint.stamp:
                here.clock = max(here.clock, rank)
                return checkpoint
        return None

    def _check_lengths(self, checkpoint: Checkpoint) -> None:
        length, tier = checkpoint.length, self._tiers[checkpoint.tier]
        assert tier.lengths[checkpoint.slot] == length, "states and windows are those after the checkpoint's tokens"
        assert checkpoint.pages.num_pages == num_pages(length), "keys and values are those of the checkpoint's tokens"
        assert checkpoint.node.num_tokens == length, "the key is the checkpoint's tokens"


@dataclass(frozen=True, slots=True, eq=False)
class StoredRound:
    """What a round reads and writes.

    Attributes:
        caches: of each trunk.
        copies: (from, to) of pages to copy before the round runs.
    """

    store: CheckpointStore
    trunks: Sequence[Trunk]
    caches: list[TrunkCache]
    copies: list[tuple[int, int]]
    saved: list[list[Checkpoint]]

    def is_stale(self, index: int) -> bool:
        """Whether a trunk resumed from what is worth nothing: to be computed again."""
        source = self.trunks[index].source
        return source is not None and source.gone

    def finish(self, good: Sequence[bool]) -> None:
        """Keep what trunks saved whose answers are there and right; to be called once."""
        for trunk, saves, is_good in zip(self.trunks, self.saved, good, strict=True):
            for checkpoint in saves:
                if not is_good:
                    self.store.remove(checkpoint)
                self.store.release(checkpoint)
            if trunk.source is not None:
                self.store.release(trunk.source)
            if is_good:
                hit = trunk.source is not None
                self.store.count(hits=hit, misses=not hit, saved_tokens=trunk.resumed, saves=len(saves))


def _numbers(runs: Iterable[PageRun], tier: int) -> list[int]:
    """The pages of runs that a tier has."""
    found: list[int] = []
    for run in runs:
        numbers = run.numbers[tier]
        assert numbers is not None, "a checkpoint's pages are where it is"
        found += numbers
    return found


__all__ = ["Checkpoint", "CheckpointStore", "StoredRound", "Trunk"]
