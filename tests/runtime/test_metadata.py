"""Token trees and the stream metadata they are packed into."""

from __future__ import annotations

import time
from dataclasses import FrozenInstanceError, fields
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from flide.runtime import ForkMetadata, StreamCapacity, TokenTree, TrunkCache
from flide.runtime.metadata import MAX_SAVES, PAGE_SIZE, HostArena, arena_size, fresh_caches
from flide.runtime.tree import TreeLayout, prompts_of

ARRAYS = tuple(f.name for f in fields(ForkMetadata) if f.name not in ("capacity", "arena", "schedule"))
INERT = {  # what an unused place of each array holds
    **dict.fromkeys(ARRAYS, 0),
    **dict.fromkeys(
        ("row_segments", "segment_parents", "segment_levels", "final_slots", "save_rows", "save_slots"), -1
    ),
    **dict.fromkeys(("segment_pages", "page_table"), -1),
}

tokens = st.integers(0, 3)  # few, so that prompts share prefixes by accident too
prompts = st.tuples(
    st.lists(tokens, max_size=12), st.lists(st.lists(tokens, min_size=1, max_size=6), min_size=1, max_size=6)
).map(lambda drawn: [[*drawn[0], *tail] for tail in drawn[1]])


def nodes(depth: int) -> st.SearchStrategy[TokenTree]:
    children = st.lists(nodes(depth - 1), max_size=3).map(tuple) if depth else st.just(())
    return st.tuples(st.lists(st.integers(0, 99), max_size=5), children, st.booleans()).map(_node)


def _node(drawn: tuple[list[int], tuple[TokenTree, ...], bool]) -> TokenTree:
    own, children, several = drawn
    if not own:
        return TokenTree(own, children, ())
    return TokenTree(own, children, (0, -1) if several else None)


rounds = st.lists(nodes(2), max_size=4)


def walk(tree: TokenTree) -> list[TokenTree]:
    """Nodes, depth first."""
    return [tree, *(node for child in tree.children for node in walk(child))]


def prompts_in_stream(meta: ForkMetadata, segments: int) -> list[list[int]]:
    """The prompt of every segment without children, rebuilt from the arrays alone; in segment order."""
    offsets, parents = meta.segment_offsets.tolist(), meta.segment_parents.tolist()
    found = []
    for segment in range(segments):
        if segment in parents:
            continue
        prompt: list[int] = []
        while segment >= 0:
            prompt = meta.tokens[offsets[segment] : offsets[segment + 1]].tolist() + prompt
            segment = parents[segment]
        found.append(prompt)
    return found


# Token trees.


@settings(deadline=None)
@given(prompts)
@example([[1, 2, 3]])
@example([[1, 2, 3], [1, 2, 3]])
@example([[1, 2], [1, 2, 3]])
@example([[1, 2, 3], [1, 2]])
@example([[1], [2]])
@example([[0], [0]])
def test_trunk_and_branch_are_the_prompt_and_the_trunk_is_longest(prompts: list[list[int]]) -> None:
    tree = TokenTree.from_prompts(prompts)
    assert [[*tree.tokens, *branch.tokens] for branch in tree.children] == prompts
    assert all(len(branch.tokens) >= 1 for branch in tree.children)
    assert not any(branch.children for branch in tree.children)
    firsts = {branch.tokens[0] for branch in tree.children}
    assert len(firsts) > 1 or min(len(branch.tokens) for branch in tree.children) == 1
    assert tree.num_tokens == len(tree.tokens) + sum(len(branch.tokens) for branch in tree.children)


@settings(deadline=None)
@given(prompts)
def test_kinds_of_sequences_may_be_mixed(prompts: list[list[int]]) -> None:
    mixed = [tuple(prompt) if i % 2 else prompt for i, prompt in enumerate(prompts)]
    tree = TokenTree.from_prompts(mixed)
    assert [[*tree.tokens, *branch.tokens] for branch in tree.children] == prompts
    assert len(tree.tokens) == len(TokenTree.from_prompts(prompts).tokens)


@pytest.mark.parametrize(
    ("prompts", "trunk", "branches"),
    [
        ([[1, 2, 3]], [1, 2], [[3]]),
        ([[7]], [], [[7]]),
        ([[1, 2, 3], [1, 2, 3]], [1, 2], [[3], [3]]),
        ([[1, 2], [1, 2, 3, 4]], [1], [[2], [2, 3, 4]]),
        ([[1, 2, 3, 4], [1, 2]], [1], [[2, 3, 4], [2]]),
        ([[1, 2, 9], [1, 2, 8], [1, 5]], [1], [[2, 9], [2, 8], [5]]),
        ([[4, 1], [5, 1]], [], [[4, 1], [5, 1]]),
    ],
    ids=["single", "single_token", "identical", "prefix_first", "prefix_last", "three", "nothing_shared"],
)
def test_fork_of(prompts: list[list[int]], trunk: list[int], branches: list[list[int]]) -> None:
    assert TokenTree.from_prompts(prompts) == TokenTree(trunk, tuple(TokenTree(branch) for branch in branches))


@pytest.mark.parametrize("prompts", [[], [[]], [[1], []]], ids=["none", "empty", "one_empty"])
def test_no_prompt_and_empty_prompts_are_refused(prompts: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="at least one"):
        TokenTree.from_prompts(prompts)


@pytest.mark.parametrize("readouts", [(2,), (-3,), (0, 5)], ids=str)
def test_readouts_outside_their_node_are_refused(readouts: tuple[int, ...]) -> None:
    tree = TokenTree([1], (TokenTree([1, 2], readouts=readouts),))
    with pytest.raises(ValueError, match="lie outside"):
        ForkMetadata.pack([tree])


def test_readouts_default_to_the_last_row_of_childless_nodes() -> None:
    assert TokenTree([1, 2, 3]).readout_offsets == (2,)
    assert TokenTree([1, 2, 3], (TokenTree([4]),)).readout_offsets == ()
    assert TokenTree([1, 2, 3], (TokenTree([4]),), readouts=(-1, 0)).readout_offsets == (2, 0)


# Packing.


@settings(deadline=None)
@given(rounds, st.integers(0, 9))
def test_a_round_survives_packing(trees: list[TokenTree], padding: int) -> None:
    meta = ForkMetadata.pack(trees)
    if padding:
        c = meta.capacity
        meta = ForkMetadata.pack(trees, capacity=StreamCapacity(*(n + padding for n in _sizes(c)), depth=c.depth))
    meta.check()
    everything = [node for tree in trees for node in walk(tree)]
    rows, segments = sum(len(node.tokens) for node in everything), len(everything)

    active = int(meta.segment_offsets[-1])
    assert active == rows
    assert meta.segment_offsets[segments:].tolist() == [rows] * (meta.capacity.segments + 1 - segments)
    expected = [prompt for tree in trees for prompt in prompts_of(tree)]
    assert sorted(prompts_in_stream(meta, segments)) == sorted(expected)

    # Trunks first, then branches, then leaves, and within a level in request order.
    levels = meta.segment_levels[:segments].tolist()
    assert levels == sorted(levels)
    stream = [token for level in range(3) for tree in trees for node in _at(tree, level) for token in node.tokens]
    assert meta.tokens[:rows].tolist() == stream

    # Readouts depth first, request by request.
    last = [node.tokens[offset] for node in everything for offset in node.readout_offsets]
    read = meta.tokens[meta.readout_rows.long()].tolist()
    assert read[: len(last)] == last

    # Final states: one scratch slot per segment with children, numbered from 0 in segment order.
    with_children = sorted(set(meta.segment_parents.tolist()) - {-1})
    assert [int(meta.final_slots[s]) for s in with_children] == list(range(len(with_children)))
    assert int((meta.final_slots >= 0).sum()) == len(with_children)

    # Padding.
    assert (meta.positions == meta.positions[0]).all()
    for name, used in _used(meta, rows, segments, len(last)).items():
        assert (getattr(meta, name)[..., used:] == INERT[name]).all(), name


def _sizes(capacity: StreamCapacity) -> tuple[int, int, int, int]:
    return capacity.tokens, capacity.segments, capacity.readouts, capacity.pages


def _at(tree: TokenTree, level: int) -> list[TokenTree]:
    return [tree] if level == 0 else [node for child in tree.children for node in _at(child, level - 1)]


def _used(meta: ForkMetadata, rows: int, segments: int, readouts: int) -> dict[str, int]:
    per_row = dict.fromkeys(("tokens", "positions", "row_segments"), rows)
    names = ("parents", "levels", "starts", "pages")
    per_segment = dict.fromkeys((*(f"segment_{name}" for name in names), "initial_slots", "final_slots"), segments)
    return {**per_row, **per_segment, "page_table": 0, "readout_rows": readouts}


@settings(deadline=None)
@given(rounds)
def test_readout_row_ends_the_prompt_it_answers(trees: list[TokenTree]) -> None:
    meta = ForkMetadata.pack(trees)
    everything = [node for tree in trees for node in walk(tree)]
    ancestors = {id(child): node for node in everything for child in node.children}
    row = iter(meta.readout_rows.tolist())
    offsets, parents = meta.segment_offsets.tolist(), meta.segment_parents.tolist()
    for node in everything:
        for offset in node.readout_offsets:
            r = next(row)
            path = list(node.tokens[: offset + 1])
            up = node
            while id(up) in ancestors:
                up = ancestors[id(up)]
                path = [*up.tokens, *path]
            segment = int(meta.row_segments[r])
            seen = meta.tokens[offsets[segment] : r + 1].tolist()
            while parents[segment] >= 0:
                segment = parents[segment]
                seen = meta.tokens[offsets[segment] : offsets[segment + 1]].tolist() + seen
            assert seen == path
            assert meta.positions[:, r].tolist() == [len(path) - 1] * 3


@settings(max_examples=50, deadline=None)
@given(tree=nodes(2))
def test_what_prompts_share_is_what_they_have_more_than_the_tree(tree: TokenTree) -> None:
    def isolated(node: TokenTree, before: int) -> int:
        end = before + len(node.tokens)
        return sum(isolated(child, end) for child in node.children) if node.children else end

    assert TreeLayout.of(tree).num_shared_tokens == isolated(tree, 0) - tree.num_tokens


def test_docstring_example() -> None:
    tree = TokenTree([10, 11, 12], (TokenTree([20, 21]), TokenTree([30])))
    meta = ForkMetadata.pack([tree], capacity=StreamCapacity(8, 4, 4))
    assert meta.tokens.tolist() == [10, 11, 12, 20, 21, 30, 0, 0]
    assert meta.positions.tolist() == [[0, 1, 2, 3, 4, 3, 0, 0]] * 3
    assert meta.row_segments.tolist() == [0, 0, 0, 1, 1, 2, -1, -1]
    assert meta.segment_offsets.tolist() == [0, 3, 5, 6, 6]
    assert meta.segment_parents.tolist() == [-1, 0, 0, -1]
    assert meta.segment_levels.tolist() == [0, 1, 1, -1]
    assert meta.segment_starts.tolist() == [0, 3, 3, 0]
    assert meta.initial_slots.tolist() == [0, 0, 0, 0]
    assert meta.final_slots.tolist() == [0, -1, -1, -1]
    assert meta.save_rows.tolist() == [[-1] * MAX_SAVES] * 4
    assert meta.save_slots.tolist() == [[-1] * MAX_SAVES] * 4
    assert meta.segment_pages.tolist() == [-1] * 4
    assert meta.page_table.tolist() == []
    assert meta.readout_rows.tolist() == [4, 5, 0, 0]


def test_two_requests_of_depth_three() -> None:
    first = TokenTree([1], (TokenTree([2, 3], (TokenTree([4]), TokenTree([5, 6]))), TokenTree([7])))
    second = TokenTree([8, 9], (TokenTree([10], (TokenTree([11]),), readouts=(0,)),))
    meta = ForkMetadata.pack([first, second])
    meta.check()
    assert meta.capacity == StreamCapacity(12 - 1, 8, 5, depth=3)
    assert meta.tokens.tolist() == [1, 8, 9, 2, 3, 7, 10, 4, 5, 6, 11]
    assert meta.segment_parents.tolist() == [-1, -1, 0, 0, 1, 2, 2, 4]
    assert meta.segment_starts.tolist() == [0, 0, 1, 1, 2, 3, 3, 3]
    assert meta.tokens[meta.readout_rows.long()].tolist() == [4, 6, 7, 10, 11]
    assert meta.final_slots.tolist() == [0, 1, 2, -1, 3, -1, -1, -1]


def test_four_levels_are_refused() -> None:
    leaf = TokenTree([1], (TokenTree([2], (TokenTree([3], (TokenTree([4]),)),)),))
    with pytest.raises(ValueError, match="at most 3 levels"):
        ForkMetadata.pack([leaf])


def test_an_empty_round_is_inert() -> None:
    packed, allocated = ForkMetadata.pack([]), ForkMetadata.allocate(StreamCapacity(1, 1, 1))
    assert packed.capacity == allocated.capacity
    assert torch.equal(packed.arena, allocated.arena)
    packed.check()
    for name in ARRAYS:
        assert (getattr(allocated, name) == INERT[name]).all(), name


# Capacities.

TREE = TokenTree([1, 2, 3], (TokenTree([4, 5]), TokenTree([6])))
PAGED = TrunkCache(pages=(7,))


@pytest.mark.parametrize(
    "short",
    [StreamCapacity(5, 3, 2, 1), StreamCapacity(6, 2, 2, 1), StreamCapacity(6, 3, 1, 1), StreamCapacity(6, 3, 2, 0)],
    ids=["tokens", "segments", "readouts", "pages"],
)
def test_a_round_beyond_its_capacity_is_refused(short: StreamCapacity) -> None:
    exact = StreamCapacity(6, 3, 2, 1)
    assert ForkMetadata.pack([TREE], caches=[PAGED]).capacity == exact
    assert ForkMetadata.pack([TREE], caches=[PAGED], capacity=exact).capacity == exact
    assert exact.holds(exact)
    assert not short.holds(exact)
    with pytest.raises(ValueError, match="does not fit"):
        ForkMetadata.pack([TREE], caches=[PAGED], capacity=short)


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 0, 1), (1, 1, 0), (-1, 1, 1), (1, 1, 1, -1)], ids=str)
def test_a_capacity_needs_positive_sizes(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="positive sizes"):
        StreamCapacity(*sizes)


# Trunk caches.


def packed_trunk(cache: TrunkCache, *, new: int = 5, others: list[TrunkCache] | None = None) -> ForkMetadata:
    caches = [cache, *(others or [])]
    trees = [TokenTree(list(range(new)), (TokenTree([50, 51]),)) for _ in caches]
    meta = ForkMetadata.pack(trees, caches=caches)
    meta.check()
    return meta


def test_resumed_trunks_continue_their_positions() -> None:
    meta = packed_trunk(TrunkCache(70, slot=3, pages=(9, 4)), others=[TrunkCache()])
    assert meta.segment_starts.tolist() == [70, 0, 75, 5]
    assert meta.initial_slots.tolist() == [3, 0, 0, 0]
    assert meta.positions[0].tolist() == [70, 71, 72, 73, 74, 0, 1, 2, 3, 4, 75, 76, 5, 6]
    assert meta.segment_pages.tolist() == [0, -1, -1, -1]
    assert meta.page_table.tolist() == [9, 4]


def test_pages_follow_each_other_request_by_request() -> None:
    caches = [TrunkCache(pages=(3,)), TrunkCache(), TrunkCache(64, slot=1, pages=(8, 2)), TrunkCache(pages=(5,))]
    trees = [TokenTree([1, 2], (TokenTree([3]),)) for _ in caches]
    capacity = StreamCapacity(20, 10, 9, 6)
    meta = ForkMetadata.pack(trees, caches=caches, capacity=capacity)
    assert meta.segment_pages.tolist() == [0, -1, 1, 3, *[-1] * 6]
    assert meta.page_table.tolist() == [3, 8, 2, 5, -1, -1]


@pytest.mark.parametrize("cached", [0, 70], ids=["fresh", "resumed"])
def test_saves_name_the_last_row_they_cover(cached: int) -> None:
    saves = ((cached + 1, 4), (cached + 5, 2), (cached + 3, 9))
    slot, pages = (1, (0, 1)) if cached else (0, ())
    meta = packed_trunk(TrunkCache(cached, slot=slot, pages=pages, saves=saves), others=[TrunkCache(saves=((2, 6),))])
    assert meta.save_rows[0].tolist() == [0, 2, 4, -1]
    assert meta.save_slots[0].tolist() == [4, 9, 2, -1]
    assert meta.save_rows[1].tolist() == [6, -1, -1, -1]
    assert meta.save_slots[1].tolist() == [6, -1, -1, -1]
    for (length, _), row in zip(sorted(saves), meta.save_rows[0].tolist(), strict=False):
        assert meta.positions[0, row] == length - 1
    assert (meta.save_rows[2:] == -1).all()
    assert (meta.save_slots[2:] == -1).all()


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        (TrunkCache(3, slot=1), "slot and the pages"),
        (TrunkCache(3, pages=(1,)), "slot and the pages"),
        (TrunkCache(60, slot=1, pages=(1,)), "needs 2 pages, got 1"),
        (TrunkCache(pages=(1, 2)), "needs 1 pages, got 2"),
        (TrunkCache(saves=tuple((1 + i, 1 + i) for i in range(MAX_SAVES + 1))), f"at most {MAX_SAVES}"),
        (TrunkCache(saves=((0, 1),)), "cannot save after 0"),
        (TrunkCache(saves=((6, 1),)), "cannot save after 6"),
        (TrunkCache(3, slot=1, pages=(1,), saves=((3, 2),)), "cannot save after 3 tokens: this round computes 4 to 8"),
        (TrunkCache(saves=((2, 0),)), "slot 0"),
        (TrunkCache(saves=((2, -1),)), "slot -1"),
        (TrunkCache(3, slot=1, pages=(1,), saves=((4, 1),)), "slot"),
        (TrunkCache(saves=((2, 1), (3, 1))), "saved to twice"),
    ],
    ids=[
        "no_pages",
        "no_slot",
        "too_few_pages",
        "too_many_pages",
        "too_many_saves",
        "save_of_nothing",
        "save_past_the_end",
        "save_of_the_cached_part",
        "zero_slot",
        "negative_slot",
        "slot_it_resumes_from",
        "slot_saved_twice",
    ],
)
def test_impossible_caches_are_refused(cache: TrunkCache, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        packed_trunk(cache)


@pytest.mark.parametrize(
    "other",
    [
        TrunkCache(saves=((2, 5),)),
        TrunkCache(3, slot=5, pages=(1,)),
        TrunkCache(3, slot=4, pages=(1,), saves=((4, 6),)),
    ],
    ids=["two_writers", "reader_and_writer", "writer_and_reader"],
)
def test_requests_of_a_round_may_not_share_a_written_slot(other: TrunkCache) -> None:
    cache = TrunkCache(3, slot=6, pages=(0,), saves=((4, 5),))
    for order in ([cache, other], [other, cache]):
        with pytest.raises(ValueError, match="no state slot"):
            packed_trunk(order[0], others=order[1:])


def test_requests_of_a_round_may_resume_from_one_slot() -> None:
    cache = TrunkCache(64, slot=6, pages=(0, 1))
    meta = packed_trunk(cache, others=[TrunkCache(64, slot=6, pages=(0, 2))])
    assert meta.initial_slots.tolist() == [6, 6, 0, 0]


def test_caches_must_be_one_per_request() -> None:
    with pytest.raises(ValueError, match="1 requests but 2"):
        ForkMetadata.pack([TREE], caches=[TrunkCache(), TrunkCache()])


def test_a_trunk_may_be_cached_whole() -> None:
    meta = packed_trunk(TrunkCache(PAGE_SIZE, slot=1, pages=(3,)), new=0)
    assert meta.segment_offsets.tolist() == [0, 0, 2]
    assert meta.positions[0].tolist() == [PAGE_SIZE, PAGE_SIZE + 1]
    assert meta.final_slots.tolist() == [0, -1]


# The arena.


@settings(deadline=None)
@given(st.builds(StreamCapacity, *[st.integers(1, 40)] * 3, st.integers(0, 9)))
def test_fields_are_aligned_views_that_fill_one_arena(capacity: StreamCapacity) -> None:
    meta = ForkMetadata.allocate(capacity)
    storage, end = meta.arena.untyped_storage().data_ptr(), 4 * meta.tokens.storage_offset()
    assert meta.arena.data_ptr() % 16 == 0
    fields: list[Tensor] = [getattr(meta, name) for name in ARRAYS]
    for x in sorted(fields, key=Tensor.storage_offset):
        assert x.dtype == torch.int32
        assert x.is_contiguous()
        assert x.untyped_storage().data_ptr() == storage
        begin = 4 * x.storage_offset()
        assert begin % 16 == 0
        assert end <= begin < end + 16, "fields neither overlap nor leave gaps"
        end = begin + 4 * x.numel()
    assert end <= 4 * meta.arena.numel() < end + 16
    meta.check()


@settings(deadline=None)
@given(rounds, rounds)
def test_copy_replaces_the_whole_round_in_place(before: list[TokenTree], after: list[TokenTree]) -> None:
    sizes = zip(*(_sizes(_needed(r)) for r in (before, after)), strict=True)
    capacity = StreamCapacity(*(max(pair) for pair in sizes), depth=3)
    meta, other = (ForkMetadata.pack(trees, capacity=capacity) for trees in (before, after))
    addresses = {name: getattr(meta, name).data_ptr() for name in ARRAYS}
    meta.copy_(other)
    meta.check()
    for name in ARRAYS:
        assert torch.equal(getattr(meta, name), getattr(other, name))
        assert getattr(meta, name).data_ptr() == addresses[name]
    assert meta.arena.data_ptr() != other.arena.data_ptr()


def _needed(trees: list[TokenTree]) -> StreamCapacity:
    return ForkMetadata.pack(trees).capacity


def test_copy_between_capacities_is_refused() -> None:
    meta = ForkMetadata.allocate(StreamCapacity(8, 4, 4))
    with pytest.raises(ValueError, match="cannot copy"):
        meta.copy_(ForkMetadata.allocate(StreamCapacity(8, 4, 5)))


def test_move_takes_every_field_along_in_one_arena() -> None:
    meta = ForkMetadata.pack([TREE], caches=[PAGED]).to("meta")
    for name in ARRAYS:
        assert getattr(meta, name).is_meta
        assert getattr(meta, name)._base is meta.arena
    assert meta.capacity == StreamCapacity(6, 3, 2, 1)


def test_metadata_is_frozen_and_compares_by_identity() -> None:
    meta = ForkMetadata.pack([TREE])
    with pytest.raises(FrozenInstanceError):
        meta.tokens = meta.tokens
    assert meta != ForkMetadata.pack([TREE])
    assert len({meta, meta}) == 1


# The check.


@pytest.mark.parametrize(
    ("name", "place", "value"),
    [
        ("segment_offsets", 0, 1),
        ("segment_offsets", 1, 6),
        ("segment_parents", 1, -1),
        ("segment_parents", 1, 2),
        ("segment_levels", 2, 2),
        ("segment_starts", 1, 2),
        ("row_segments", 0, 1),
        ("row_segments", 7, 0),
        ("positions", (0, 4), 3),
        ("tokens", 6, 5),
        ("readout_rows", 0, 6),
        ("readout_rows", 3, -1),
    ],
    ids=str,
)
def test_check_notices_damage(name: str, place: Any, value: int) -> None:
    meta = ForkMetadata.pack([TREE], capacity=StreamCapacity(8, 4, 4))
    meta.check()
    getattr(meta, name)[place] = value
    with pytest.raises(AssertionError):
        meta.check()


@settings(deadline=None)
@given(rounds, st.integers(0, 9))
def test_rounds_of_fresh_trunks_are_packed_as_with_their_caches(trees: list[TokenTree], padding: int) -> None:
    layouts = [TreeLayout.of(tree) for tree in trees]
    caches = fresh_caches(layouts)
    exact = ForkMetadata.pack(layouts, caches=caches).capacity
    capacity = StreamCapacity(*(n + padding for n in _sizes(exact)), depth=exact.depth)
    expected, found = (np.full(arena_size(capacity), 77, np.int32) for _ in range(2))
    HostArena(expected, capacity).pack(layouts, caches)
    HostArena(found, capacity).pack(layouts)
    assert np.array_equal(found, expected)


@pytest.mark.parametrize("short", [(5, 3, 2, 1), (6, 2, 2, 1), (6, 3, 1, 1), (6, 3, 2, 0)], ids=str)
def test_a_fresh_tree_beyond_a_capacity_is_refused(short: tuple[int, ...]) -> None:
    layout, capacity = TreeLayout.of(TREE), StreamCapacity(*short)
    with pytest.raises(ValueError, match="does not fit"):
        HostArena(np.zeros(arena_size(capacity), np.int32), capacity).pack([layout])


# Speed.


def test_a_thousand_branches_pack_quickly() -> None:
    tree = TokenTree(list(range(5000)), tuple(TokenTree(list(range(10))) for _ in range(1000)))
    best = float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        meta = ForkMetadata.pack([tree])
        best = min(best, time.perf_counter() - begin)
    assert meta.capacity == StreamCapacity(15_000, 1001, 1000)
    assert best < 0.1


@pytest.mark.slow
@settings(max_examples=2000, deadline=None)
@given(rounds, st.integers(0, 9))
def test_many_rounds_survive_packing(trees: list[TokenTree], padding: int) -> None:
    test_a_round_survives_packing.hypothesis.inner_test(trees, padding)
