"""What the store keeps, drops and hands out, and that no round reads what it writes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from flide.runtime.checkpoints.budget import Budget, Budgets, ItemBytes
from flide.runtime.checkpoints.radix import key_of
from flide.runtime.checkpoints.store import CheckpointStore, Trunk
from flide.runtime.metadata import PAGE_SIZE, TrunkCache
from tests.runtime.checkpoints.asker import Asker, request, tokens
from tests.runtime.checkpoints.test_resume import MODELS, histories

OWN_PAGES = 1000


class NoPools:
    """Copies nothing."""

    def offload(self, *_: Any) -> None:
        pass

    restore = offload


class Kept:
    """A store alone, asked for trunks whose tokens are all the same."""

    def __init__(
        self, *, pages: int, slots: int, host: Budget | None = None, cost: Callable[[int, int], float] | None = None
    ) -> None:
        budgets = Budgets(Budget(pages, slots), host or Budget(), ItemBytes(page=1, slot=1))
        cost = cost or (lambda begin, end: end - begin)
        pools: Any = NoPools()
        self.store = CheckpointStore(pools, budgets, first_page=OWN_PAGES, namespace="n", cost=cost)

    def ask(self, token: int, length: int, saves: Sequence[int] = ()) -> int:
        """Where one trunk resumes; its answers are right."""
        key = key_of(np.full(length, token, np.int32))
        source = self.store.find(None, key)
        self.store.begin([Trunk(key, None, tuple(saves), source)]).finish([True])
        self.store.check()
        return 0 if source is None else source.length

    def has(self, token: int, length: int) -> bool:
        """Whether something is kept; it is not used by this."""
        tree = self.store._trees.get(("n", None))
        return tree is not None and length in [x.length for x in tree.path(key_of(np.full(length, token, np.int32)))]


def test_of_checkpoints_that_are_alike_the_one_that_was_used_longest_ago_goes() -> None:
    kept = Kept(pages=100, slots=3)
    for token in (1, 2, 3):
        kept.ask(token, 64, [64])
    assert kept.ask(1, 70) == 64
    kept.ask(4, 64, [64])
    assert [kept.has(token, 64) for token in (1, 2, 3, 4)] == [True, False, True, True]
    assert kept.ask(3, 70) == 64
    kept.ask(5, 64, [64])
    assert [kept.has(token, 64) for token in (1, 3, 4, 5)] == [False, True, True, True]


def test_what_saves_most_work_for_its_bytes_stays_although_it_was_used_before() -> None:
    kept = Kept(pages=1000, slots=3, cost=lambda begin, end: end**2 - begin**2)
    kept.ask(1, 6400, [6400])
    for token in range(2, 9):
        kept.ask(token, 64, [64])
        assert kept.has(1, 6400)
    # Behind one that is there anyway little is saved.
    kept = Kept(pages=1000, slots=3)
    kept.ask(1, 2 * PAGE_SIZE, [2 * PAGE_SIZE - 1])
    kept.ask(1, 2 * PAGE_SIZE, [2 * PAGE_SIZE])
    kept.ask(2, 64, [64])
    kept.ask(3, 64, [64])
    assert [kept.has(1, 2 * PAGE_SIZE - 1), kept.has(1, 2 * PAGE_SIZE)] == [True, False]


def test_what_was_used_is_not_kept_for_ever() -> None:
    """Recency wins in the end: what saves most is dropped once others were asked for often enough."""
    kept = Kept(pages=1000, slots=2, cost=lambda begin, end: end**2 - begin**2)
    kept.ask(1, 640, [640])
    for n in range(200):
        kept.ask(2 + n, 64, [64])
    assert not kept.has(1, 640)


def test_what_a_round_uses_is_neither_moved_nor_dropped() -> None:
    kept = Kept(pages=4, slots=2, host=Budget(10, 10))
    kept.ask(1, 64, [64])
    source = kept.store.find(None, key_of(np.full(70, 1, np.int32)))
    assert source is not None
    for token in range(2, 9):
        kept.ask(token, 128, [64, 128])  # one of them at most has room
        assert (source.tier, source.gone, kept.has(1, 64)) == (0, False, True)
    kept.store.release(source)
    kept.ask(9, 128, [64, 128])
    assert source.tier == 1
    kept.store.check()


def test_positions_that_do_not_agree_are_noticed() -> None:
    """States, keys and values, and tokens end at one place, which is asserted when they are found."""
    spoils: list[Callable[[Any, Any], None]] = [
        lambda store, found: store._tiers[0].lengths.update({found.slot: 63}),
        lambda store, found: setattr(found.pages, "num_pages", 2),
        lambda store, found: setattr(found.node, "num_tokens", 63),
    ]
    for spoil in spoils:
        kept = Kept(pages=10, slots=4)
        kept.ask(1, 64, [64])
        assert kept.ask(1, 64) == 64
        (found,) = next(iter(kept.store._trees.values())).values()
        spoil(kept.store, found)
        with pytest.raises(AssertionError):
            kept.ask(1, 64)


def check_round(caches: Sequence[TrunkCache], copies: Sequence[tuple[int, int]], totals: Sequence[int]) -> None:
    """What trunks read and what they write has nothing in common, and nothing is written twice."""
    read_pages, written_pages = {source for source, _ in copies}, []
    read_slots, written_slots = {0}, []
    for cache, total in zip(caches, totals, strict=True):
        pages = list(cache.pages)
        assert len(pages) == -(-total // PAGE_SIZE)
        first = cache.length // PAGE_SIZE if cache.length < total else len(pages)
        read_pages |= set(pages[:first])
        written_pages += pages[first:]
        read_slots.add(cache.slot)
        written_slots += [slot for _, slot in cache.saves]
        assert len(cache.saves) <= 4
        assert all(cache.length < length <= total for length, _ in cache.saves)
    assert {to for _, to in copies} <= set(written_pages)
    for read, written in ((read_pages, written_pages), (read_slots, written_slots)):
        assert len(written) == len(set(written))
        assert read.isdisjoint(written)


@pytest.mark.parametrize("host", [0.0, 0.7])
def test_no_round_reads_a_slot_or_page_that_it_writes(monkeypatch: pytest.MonkeyPatch, host: float) -> None:
    kept = Asker(MODELS["qwen"](), pages=24, slots=9, host=host)
    streams, rng, checked = kept.runner.streams, random.Random(11), []
    submit: Any = streams.submit

    def spy(layouts: Any, needed: Any, caches: Any, copies: Any) -> Any:
        totals = [cache.length + layout.trunk_length for cache, layout in zip(caches, layouts, strict=True)]
        check_round(caches, copies, totals)
        checked.append(len(copies))
        return submit(layouts, needed, caches, copies)

    monkeypatch.setattr(streams, "submit", spy)
    asked = histories(rng, kept.vocab)
    for _ in range(30):
        kept.ask(*next(asked))
    assert len(checked) == 30
    assert sum(checked) > 3  # pages that were broken
    assert kept.store.stats().evictions > 0


@pytest.mark.parametrize("model", MODELS)
def test_a_way_to_the_host_and_back_keeps_bits(model: str) -> None:
    rng = random.Random(1010)
    kept, roomy = Asker(MODELS[model](), pages=20, slots=6, host=30.0), Asker(MODELS[model](), pages=200, slots=200)
    state = tokens(rng, 200, kept.vocab)
    first, then = request(state[:150], [[1]], saves=[70, 150]), request(state, [[1], [2, 3]])
    for asker in (kept, roomy):
        asker.ask(first)
    for _ in range(20):
        kept.ask(request(tokens(rng, 200, kept.vocab), [[1]], saves=[200]))
    before = kept.store.stats()
    assert before.host_checkpoints > 2
    (got, reused), (want, expected) = *kept.ask(then), *roomy.ask(then)
    assert reused == expected == 150
    assert kept.store.stats().restores > before.restores
    assert np.array_equal(got, want)
