"""Rounds find a capacity that holds them with little padding."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from flide.runtime import ForkMetadata, StreamCapacity
from flide.runtime.capacity import capacity_ladder, smallest_that_holds
from flide.runtime.metadata import fresh_caches
from scripts.workloads import FIXED, SEEDED, Shape, realistic

LADDER = capacity_ladder(16_384)


def needed(*shapes: Shape) -> StreamCapacity:
    trees = [shape.tree() for shape in shapes]
    return ForkMetadata.pack(trees, caches=fresh_caches(trees)).capacity


def test_the_ladder_rises_to_its_end() -> None:
    sizes = sorted({capacity.tokens for capacity in LADDER})
    assert (sizes[0], sizes[-1]) == (64, 16_384)
    assert all(b <= max(1.025 * a, a + (32 if a < 2048 else 64)) for a, b in itertools.pairwise(sizes))
    assert len(set(LADDER)) == len(LADDER) <= 320
    for tokens in sizes:
        classes = [c.segments for c in LADDER if c.tokens == tokens]
        assert classes == ([16, 128] if tokens <= 1024 else [128] if tokens < 2048 else [128, tokens // 8])


def test_rounds_that_are_there_for_throughput_are_padded_little() -> None:
    sizes = sorted({capacity.tokens for capacity in capacity_ladder(40_000)})
    assert sizes[-1] == 40_000
    assert [size for size in sizes if size < 16_384] == sorted({capacity.tokens for capacity in LADDER})[:-1]
    huge = [size for size in sizes if size >= 16_384]
    assert all(b <= 1.0125 * a for a, b in itertools.pairwise(huge))
    for capacity in capacity_ladder(40_000):
        assert capacity.segments in (256, capacity.tokens // 8) or capacity.tokens <= 16_384
    assert len(huge) < 90


def test_three_levels_add_capacities_and_take_none_from_two() -> None:
    deep = capacity_ladder(16_384, depth=3)
    assert tuple(capacity for capacity in deep if capacity.depth == 2) == LADDER
    assert [capacity.tokens for capacity in deep] == sorted(capacity.tokens for capacity in deep)
    assert deep[-1] == replace(LADDER[-1], depth=3)
    assert min(capacity.tokens for capacity in deep if capacity.depth == 3) == 256
    assert capacity_ladder(64, depth=3)[-1].depth == 3
    for capacity in LADDER:
        assert smallest_that_holds(deep, capacity) == capacity
        found = smallest_that_holds(deep, replace(capacity, depth=3))
        assert found is not None
        assert found.depth == 3


@pytest.mark.parametrize("max_tokens", [0, 63, 100, -64])
def test_a_size_the_ladder_cannot_end_at_is_refused(max_tokens: int) -> None:
    with pytest.raises(ValueError, match="multiple"):
        capacity_ladder(max_tokens)


@pytest.mark.parametrize("name", FIXED)
def test_fixed_shapes_fit_and_few_questions_take_few_rows(name: str) -> None:
    capacity = smallest_that_holds(LADDER, needed(FIXED[name]))
    assert capacity is not None
    assert capacity.tokens <= 1.025 * FIXED[name].rows + 64
    assert capacity.segments == (16 if len(FIXED[name].branches) < 16 else 128)


@pytest.mark.parametrize("name", SEEDED)
def test_padding_is_small_on_average(name: str) -> None:
    """Single requests; rounds of several are larger and pad less."""
    rows = padded = 0
    for shape in itertools.islice(realistic(name), 300):
        capacity = smallest_that_holds(LADDER, needed(shape))
        if capacity is not None:
            rows, padded = rows + shape.rows, padded + capacity.tokens
    assert rows / padded >= 0.95  # 12 % is what may be wasted


def test_nothing_holds_a_round_that_is_too_large() -> None:
    assert smallest_that_holds(LADDER, needed(Shape(16_000, (400,)))) is None
    assert smallest_that_holds(LADDER, needed(*[Shape(1, (1,))] * 2000)) is None
