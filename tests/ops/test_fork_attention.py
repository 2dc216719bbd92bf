"""Fork attention against a softmax over each row's explicit path, and what must hold of the op itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from flide.ops import fork_attention, fork_attention_paged
from flide.ops.fork_attention import reference
from flide.runtime import ForkMetadata, StreamCapacity, TrunkCache
from flide.runtime.metadata import PAGE_SIZE
from tests.ops.naive import (
    BRANCHES,
    SMALL_TREES,
    TREES,
    TRUNKS,
    Shape,
    active_rows,
    leaf_segments,
    naive_attention,
    pack,
    relative_error,
    rows_of_path,
    rows_of_request,
    same_bits,
    shuffled_pages,
)
from tests.tolerance import FP32_RELATIVE, FP64, LOW_PRECISION_BUDGET

SCALE = 0.3
POOL_PAGES = 12
RESUME_TOTAL = 210  # tokens of the trunk that the resume tests cut
trees = pytest.mark.parametrize("shapes", TREES.values(), ids=TREES.keys())
small_trees = pytest.mark.parametrize("shapes", SMALL_TREES.values(), ids=SMALL_TREES.keys())


def random_inputs(
    rows: int,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 8,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((rows, heads, head_dim), (rows, kv_heads, head_dim), (rows, kv_heads, head_dim))
    query, key, value = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return query.to(dtype), key.to(dtype), value.to(dtype)


def attend(query: Tensor, key: Tensor, value: Tensor, meta: ForkMetadata, **options: Any) -> Tensor:
    offsets, parents = meta.segment_offsets, meta.segment_parents
    options = {"scale": SCALE, **options}
    return fork_attention(query, key, value, segment_offsets=offsets, segment_parents=parents, **options)


def attend_paged(query: Tensor, key: Tensor, value: Tensor, meta: ForkMetadata, pool: Tensor, **options: Any) -> Tensor:
    return fork_attention_paged(
        query,
        key,
        value,
        kv_pool=pool,
        segment_offsets=meta.segment_offsets,
        segment_parents=meta.segment_parents,
        segment_starts=meta.segment_starts,
        segment_pages=meta.segment_pages,
        page_table=meta.page_table,
        row_segments=meta.row_segments,
        scale=SCALE,
        **options,
    )


def pack_paged(shapes: list[Shape], *, cached: int = 0, padding: int = 0) -> ForkMetadata:
    """Every trunk on pages of its own; the first one resumes after ``cached`` tokens."""
    lengths = [cached, *[0] * (len(shapes) - 1)]
    totals = [length + shape[0] for length, shape in zip(lengths, shapes, strict=True)]
    pages = shuffled_pages(totals, pool_pages=max(POOL_PAGES, len(shapes) + 4))
    caches = [TrunkCache(length, slot=int(length > 0), pages=p) for length, p in zip(lengths, pages, strict=True)]
    return pack(shapes, padding=padding, caches=caches)


def random_pool(meta: ForkMetadata, key: Tensor, *, canary: float | None = None) -> Tensor:
    num_pages = max(POOL_PAGES, int(meta.page_table.max()) + 1 if meta.page_table.numel() else 0)
    shape = (num_pages, 2, key.shape[1], PAGE_SIZE, key.shape[2])
    if canary is not None:
        return torch.full(shape, canary, dtype=key.dtype)
    return torch.randn(shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64).to(key.dtype)


def pool_rows(meta: ForkMetadata, trunk: int, begin: int, end: int) -> tuple[Tensor, Tensor]:
    """(page, place in the page) of tokens ``begin`` to ``end`` of a trunk."""
    time = torch.arange(begin, end)
    return meta.page_table[int(meta.segment_pages[trunk]) + time // PAGE_SIZE].long(), time % PAGE_SIZE


# What every row gets.


@trees
@pytest.mark.parametrize("padding", [0, 5], ids=["exact", "padded"])
def test_every_row_attends_over_its_own_path(shapes: list[Shape], padding: int) -> None:
    meta = pack(shapes, padding=padding)
    inputs = random_inputs(meta.capacity.tokens)
    expected = naive_attention(*inputs, meta, scale=SCALE)
    assert relative_error(attend(*inputs, meta), expected) <= FP64
    assert relative_error(attend(*(x.float() for x in inputs), meta), expected) <= FP32_RELATIVE


@pytest.mark.parametrize("window", [1, 2, 5, 64, 1000])
@pytest.mark.parametrize(
    "shapes",
    [[(0, [1, 7])], [(5, [3, 66]), (2, [1])], [(10, [(5, [1, 2, 64]), (3, [7]), 4])], [(130, [(1, [(3)]), 2])]],
    ids=["no_trunk", "two_requests", "depth_three", "long_trunk"],
)
def test_window_keeps_the_last_keys_of_the_path(shapes: list[Shape], window: int) -> None:
    meta = pack(shapes, padding=3)
    inputs = random_inputs(meta.capacity.tokens)
    expected = naive_attention(*inputs, meta, scale=SCALE, window=window)
    assert relative_error(attend(*inputs, meta, window=window), expected) <= FP64


@pytest.mark.parametrize("past", [-1, 0, 1], ids=["w_minus_1", "w", "w_plus_1"])
@pytest.mark.parametrize("window", [4, 64])
def test_window_crosses_the_fork(window: int, past: int) -> None:
    meta = pack([(window + past, [1, 3, window + 1]), (window + past, [(window + past, [2, 1])])])
    inputs = random_inputs(meta.capacity.tokens)
    expected = naive_attention(*inputs, meta, scale=SCALE, window=window)
    assert relative_error(attend(*inputs, meta, window=window), expected) <= FP64


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(2, 2, 8), (4, 1, 16), (8, 2, 4), (2, 1, 512)], ids=["mha", "mqa", "gqa", "512"]
)
def test_head_layouts(heads: int, kv_heads: int, head_dim: int) -> None:
    meta = pack([(3, [2, 4]), (0, [5])])
    inputs = random_inputs(meta.capacity.tokens, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    expected = naive_attention(*inputs, meta, scale=SCALE)
    assert relative_error(attend(*inputs, meta), expected) <= FP64
    assert relative_error(attend(*(x.float() for x in inputs), meta), expected) <= FP32_RELATIVE


@small_trees
@pytest.mark.parametrize("window", [0, 6])
def test_query_rows_select_from_the_full_computation(shapes: list[Shape], window: int) -> None:
    meta = pack(shapes, padding=4)
    query, key, value = random_inputs(meta.capacity.tokens)
    active, generator = active_rows(meta), torch.Generator().manual_seed(3)
    unordered = torch.randperm(active, generator=generator)[: active // 2]
    rows = torch.cat([unordered, unordered[:3], torch.tensor([0, 0, active, meta.capacity.tokens - 1])]).int()
    selected = attend(query[rows], key, value, meta, window=window, query_rows=rows)
    assert relative_error(selected, attend(query, key, value, meta, window=window)[rows]) <= FP64
    expected = naive_attention(query[rows], key, value, meta, scale=SCALE, window=window, query_rows=rows)
    assert relative_error(selected, expected) <= FP64
    assert (selected[-2:] == 0).all()


def test_repeated_query_rows_may_hold_different_queries() -> None:
    meta = pack([(3, [2, 4])])
    query, key, value = random_inputs(meta.capacity.tokens)
    rows = torch.tensor([4, 4, 8, 4], dtype=torch.int32)
    expected = naive_attention(query[:4], key, value, meta, scale=SCALE, query_rows=rows)
    assert relative_error(attend(query[:4], key, value, meta, query_rows=rows), expected) <= FP64


@pytest.mark.parametrize("window", [0, 9])
def test_blocks_of_queries_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch, window: int) -> None:
    meta = pack(TREES["mixed_round"])
    inputs = random_inputs(meta.capacity.tokens)
    whole = attend(*inputs, meta, window=window)
    monkeypatch.setattr(reference, "QUERY_BLOCK", 7)
    assert relative_error(attend(*inputs, meta, window=window), whole) <= FP64


@small_trees
def test_views_of_a_merged_projection_equal_contiguous_inputs(shapes: list[Shape]) -> None:
    meta = pack(shapes, padding=2)
    merged = torch.randn(meta.capacity.tokens, 8, 8, generator=torch.Generator().manual_seed(0))
    views = merged.split([4, 2, 2], dim=1)
    assert not views[1].is_contiguous()
    out = attend(*views, meta)
    assert out.is_contiguous()
    assert torch.equal(out, attend(*(x.contiguous() for x in views), meta))
    gated = torch.randn(meta.capacity.tokens, 4, 16, generator=torch.Generator().manual_seed(1))
    query = gated.chunk(2, -1)[0]  # heads interleaved with their gates
    assert torch.equal(attend(query, *views[1:], meta), attend(query.contiguous(), *views[1:], meta))


@pytest.mark.parametrize("poison", [float("nan"), float("inf")], ids=["nan", "inf"])
@small_trees
def test_padding_is_zero_and_inert(shapes: list[Shape], poison: float) -> None:
    meta = pack(shapes, padding=6)
    active = active_rows(meta)
    inputs = random_inputs(meta.capacity.tokens, dtype=torch.float32)
    clean = attend(*inputs, meta)
    for x in inputs:
        x[active:] = poison
    out = attend(*inputs, meta)
    assert (out[active:] == 0).all()
    assert same_bits(out[:active], clean[:active])


@pytest.mark.parametrize("poison", [float("nan"), float("inf")], ids=["nan", "inf"])
@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize(
    "segment", [0, 1, 3, 4, 9], ids=["request", "other_request", "branch", "branch_with_leaves", "leaf"]
)
def test_other_requests_and_siblings_keep_their_bits(segment: int, window: int, poison: float) -> None:
    meta = pack([(6, [3, (5, [1, 4])]), (2, [2, 1, 66])])
    poisoned = rows_of_request(meta, segment)
    inputs = random_inputs(meta.capacity.tokens, dtype=torch.float32)
    clean = attend(*inputs, meta, window=window)
    for x in inputs:
        x[poisoned] = poison
    others = [row for row in range(active_rows(meta)) if row not in poisoned]
    out = attend(*inputs, meta, window=window)
    assert same_bits(out[others], clean[others])
    assert out[poisoned].isnan().all()


def test_a_stream_without_active_rows_is_zero() -> None:
    meta = ForkMetadata.allocate(StreamCapacity(4, 3, 1))
    query, key, value = random_inputs(4)
    query.requires_grad_()
    out = attend(query, key, value, meta)
    assert (out == 0).all()
    out.sum().backward()
    assert (query.grad == 0).all()


def test_memory_that_is_not_written_would_show() -> None:
    scope: dict[str, Any] = {"__name__": "flide.ops.probe", "torch": torch}
    exec("x = torch.empty(3); y = torch.empty_like(x, dtype=torch.int32); z = x.new_empty(2)", scope)
    assert scope["x"].isnan().all()
    assert scope["z"].isnan().all()
    assert (scope["y"] < -(1 << 29)).all()
    assert torch.empty(3, dtype=torch.float64).shape == (3,)


# Trunks in a paged pool.


@trees
@pytest.mark.parametrize("window", [0, 5])
def test_fresh_trunks_through_the_pool_equal_the_functional_op(shapes: list[Shape], window: int) -> None:
    meta = pack_paged(shapes, padding=3)
    inputs = random_inputs(meta.capacity.tokens)
    pool = random_pool(meta, inputs[1], canary=float("nan"))
    assert torch.equal(attend_paged(*inputs, meta, pool, window=window), attend(*inputs, meta, window=window))


@pytest.mark.parametrize("cached", [0, 1, 63, 64, 70])
def test_only_the_new_rows_of_trunks_are_written(cached: int) -> None:
    shapes: list[Shape] = [(67, [3, 2]), (0, [4]), (5, [(2, [1])]), (64, [])]
    meta = pack_paged(shapes, cached=cached, padding=3)
    inputs = random_inputs(meta.capacity.tokens)
    pool = random_pool(meta, inputs[1])
    expected, offsets = pool.clone(), meta.segment_offsets.tolist()
    attend_paged(*inputs, meta, pool)
    for trunk in range(len(shapes)):
        start, begin, end = int(meta.segment_starts[trunk]), offsets[trunk], offsets[trunk + 1]
        page, place = pool_rows(meta, trunk, start, start + end - begin)
        expected[page, 0, :, place] = inputs[1][begin:end]
        expected[page, 1, :, place] = inputs[2][begin:end]
    assert same_bits(pool, expected)


@pytest.mark.parametrize("window", [0, 5, 100])
@pytest.mark.parametrize("length", [1, 2, 3, 63, 64, 65, 127, 128, 129, 200, RESUME_TOTAL])
def test_resumed_trunk_equals_a_fresh_one(length: int, window: int) -> None:
    branches = [1, (3, [2])]
    fresh = pack_paged([(RESUME_TOTAL, branches)])
    inputs = random_inputs(fresh.capacity.tokens)
    expected = attend(*inputs, fresh, window=window)[length:]

    pool = random_pool(fresh, inputs[1], canary=float("nan"))
    resumed = pack_paged([(RESUME_TOTAL - length, branches)], cached=length)
    first = pack([(length, [])], caches=[TrunkCache(pages=tuple(resumed.page_table.tolist())[: -(-length // 64)])])
    attend_paged(*(x[:length] for x in inputs), first, pool)
    out = attend_paged(*(x[length:] for x in inputs), resumed, pool, window=window)
    assert relative_error(out, expected) <= FP64
    prefixes = {0: (inputs[1][:length], inputs[2][:length])}
    suffix = tuple(x[length:] for x in inputs)
    naive = naive_attention(*suffix, resumed, scale=SCALE, window=window, prefixes=prefixes)
    assert relative_error(out, naive) <= FP64


def test_chain_of_resumes_equals_a_fresh_trunk() -> None:
    cuts = [0, 1, 3, 64, 65, 129, 200, RESUME_TOTAL]
    inputs = random_inputs(RESUME_TOTAL)
    (pages,) = shuffled_pages([RESUME_TOTAL], pool_pages=POOL_PAGES)
    pool = torch.full((POOL_PAGES, 2, 2, PAGE_SIZE, 8), float("nan"), dtype=torch.float64)
    outs = []
    for begin, end in zip(cuts, cuts[1:], strict=False):
        cache = TrunkCache(begin, slot=int(begin > 0), pages=pages[: -(-end // PAGE_SIZE)])
        meta = pack([(end - begin, [])], caches=[cache])
        outs.append(attend_paged(*(x[begin:end] for x in inputs), meta, pool))
    assert relative_error(torch.cat(outs), attend(*inputs, pack([(RESUME_TOTAL, [])]))) <= FP64


def test_round_of_resumed_and_fresh_trunks() -> None:
    shapes: list[Shape] = [(2, [3, 1]), (0, [4]), (65, [(2, [1, 3]), 1])]
    meta = pack_paged(shapes, cached=70, padding=2)
    inputs = random_inputs(meta.capacity.tokens)
    pool = random_pool(meta, inputs[1])
    page, place = pool_rows(meta, 0, 0, 70)
    prefixes = {0: (pool[page, 0, :, place], pool[page, 1, :, place])}
    for rows in (None, meta.readout_rows):
        query = inputs[0] if rows is None else inputs[0][rows]
        out = attend_paged(query, *inputs[1:], meta, pool.clone(), query_rows=rows)
        expected = naive_attention(query, *inputs[1:], meta, scale=SCALE, query_rows=rows, prefixes=prefixes)
        assert relative_error(out, expected) <= FP64


def test_poison_in_one_request_stays_out_of_other_pages() -> None:
    meta = pack_paged([(67, [3, 2]), (5, [4])])
    inputs = random_inputs(meta.capacity.tokens, dtype=torch.float32)
    clean = attend_paged(*inputs, meta, random_pool(meta, inputs[1]))
    poisoned, others = rows_of_request(meta, 0), rows_of_request(meta, 1)
    for x in inputs:
        x[poisoned] = float("nan")
    assert same_bits(attend_paged(*inputs, meta, random_pool(meta, inputs[1]))[others], clean[others])


@pytest.mark.parametrize("window", [0, 5])
def test_keys_that_were_written_are_read_and_not_written_again(window: int) -> None:
    meta = pack_paged([(70, [3, (2, [1])]), (6, [4])], cached=9)
    inputs = random_inputs(meta.capacity.tokens)
    pool = random_pool(meta, inputs[1])
    expected = attend_paged(*inputs, meta, pool, window=window)
    query, *others = inputs
    trunks = meta.segment_levels[meta.row_segments] == 0
    key, value = (torch.where(trunks[:, None, None], float("nan"), x) for x in others)
    written = pool.clone()
    assert same_bits(attend_paged(query, key, value, meta, pool, window=window, write=False), expected)
    assert same_bits(pool, written)


def test_a_trunk_without_pages_is_refused() -> None:
    meta = pack([(5, [2])])
    query, key, value = random_inputs(meta.capacity.tokens)
    with pytest.raises(ValueError, match="needs KV pages"):
        attend_paged(query, key, value, meta, random_pool(meta, key))
    resumed = pack_paged([(5, [2])], cached=3)
    with pytest.raises(ValueError, match="needs a KV pool"):
        reference.fork_attention_reference(
            query,
            key,
            value,
            None,
            resumed.segment_offsets,
            resumed.segment_parents,
            scale=SCALE,
            window=0,
            segment_starts=resumed.segment_starts,
        )


# Gradients.


@pytest.mark.parametrize("window", [0, 2])
@pytest.mark.parametrize("rows", [None, (5, 2, 5, 7)], ids=["all", "query_rows"])
@pytest.mark.parametrize("fast", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["projected", "whole"])
def test_gradients_match_finite_differences(fast: bool, rows: tuple[int, ...] | None, window: int) -> None:
    meta = pack([(2, [1, (1, [2])]), (0, [1])], padding=1)
    query, key, value = random_inputs(meta.capacity.tokens, heads=2, kv_heads=1, head_dim=3)
    query_rows = None if rows is None else torch.tensor(rows, dtype=torch.int32)
    inputs = [x.requires_grad_() for x in (query if rows is None else query[list(rows)], key, value)]

    def op(*x: Tensor) -> Tensor:
        return attend(*x, meta, window=window, query_rows=query_rows)

    assert torch.autograd.gradcheck(op, inputs, fast_mode=fast)


@small_trees
def test_gradients_are_sums_over_isolated_paths(shapes: list[Shape]) -> None:
    meta = pack(shapes, padding=2)
    inputs = [x.requires_grad_() for x in random_inputs(meta.capacity.tokens)]
    cotangent = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    expected = [torch.zeros_like(x) for x in inputs]
    used = torch.zeros(meta.capacity.tokens, 1, 1, dtype=torch.float64)
    for leaf in leaf_segments(meta):
        path = rows_of_path(meta, leaf)
        own = path[-int(meta.segment_offsets[leaf + 1] - meta.segment_offsets[leaf]) :]
        used[own] = 1
        isolated = [x.detach()[path].requires_grad_() for x in inputs]
        alone, last = pack([(len(path), [])]), torch.arange(len(path))[-len(own) :]
        out = naive_attention(isolated[0][last], *isolated[1:], alone, scale=SCALE, query_rows=last)
        for total, grad in zip(expected, torch.autograd.grad(out, isolated, cotangent[own]), strict=True):
            total.index_add_(0, torch.tensor(path), grad)
    gradients = torch.autograd.grad(attend(*inputs, meta), inputs, cotangent * used)
    for gradient, total in zip(gradients, expected, strict=True):
        assert relative_error(gradient, total) <= FP64


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2)], ids=str)
def test_inputs_may_do_without_gradients(wanted: tuple[int, ...]) -> None:
    meta = pack([(3, [2, 1])])
    full = [x.requires_grad_() for x in random_inputs(meta.capacity.tokens)]
    expected = torch.autograd.grad(attend(*full, meta).square().sum(), full)
    some = [x.detach().requires_grad_(i in wanted) for i, x in enumerate(full)]
    attend(*some, meta).square().sum().backward()
    for i, x in enumerate(some):
        assert (x.grad is None) == (i not in wanted)
        assert x.grad is None or torch.equal(x.grad, expected[i])


def test_gradients_survive_a_dispatch_mode() -> None:
    meta = pack([(3, [2, 1])])
    inputs = [x.requires_grad_() for x in random_inputs(meta.capacity.tokens)]
    expected = torch.autograd.grad(attend(*inputs, meta).square().sum(), inputs)
    with FlopCounterMode(display=False):
        gradients = torch.autograd.grad(attend(*inputs, meta).square().sum(), inputs)
    for gradient, same in zip(gradients, expected, strict=True):
        assert torch.equal(gradient, same)


@pytest.mark.parametrize("index", [0, 1, 2], ids=["query", "key", "value"])
def test_training_through_a_pool_is_refused(index: int) -> None:
    meta = pack_paged([(3, [2, 1])])
    inputs = random_inputs(meta.capacity.tokens)
    inputs[index].requires_grad_()
    with pytest.raises(RuntimeError, match="no gradient"):
        attend_paged(*inputs, meta, random_pool(meta, inputs[1]))
    with torch.no_grad():
        assert not attend_paged(*inputs, meta, random_pool(meta, inputs[1])).requires_grad


# The ops as torch sees them.


def op_arguments(
    name: str, *, layout: str = "contiguous", selected: bool = False, dtype: torch.dtype = torch.float32
) -> tuple[Any, ...]:
    """Positional arguments of ``torch.ops.flide.<name>``; selected: queries of the readout rows only."""
    meta = pack_paged([(3, [2, 1]), (0, [4])], padding=2)
    rows = meta.capacity.tokens
    query, key, value = random_inputs(rows, dtype=dtype)
    query_rows = meta.readout_rows if selected else None
    grad = random_inputs(rows if query_rows is None else len(query_rows), dtype=dtype, seed=1)[0]
    query = query[: len(grad)]
    if layout == "split":
        key, value = torch.cat([key, value], 1).split([2, 2], 1)
        query, grad = torch.cat([query, grad], -1).chunk(2, -1)
    elif layout == "transposed":
        query, key, value, grad = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (query, key, value, grad))
    tree = (query_rows, meta.segment_offsets, meta.segment_parents)
    if name == "fork_attention":
        return query, key, value, *tree, SCALE, 0
    if name == "fork_attention_backward":
        return grad, query, key, value, *tree, SCALE, 0
    pool = random_pool(meta, key)
    pages = (meta.segment_starts, meta.segment_pages, meta.page_table)
    return query, key, value, pool, *tree, *pages, meta.row_segments, [], SCALE, 0, 3, True


OPS = ("fork_attention", "fork_attention_backward", "fork_attention_paged")


@pytest.mark.parametrize("selected", [False, True], ids=["all_rows", "query_rows"])
@pytest.mark.parametrize("name", OPS)
def test_op_registration(name: str, selected: bool) -> None:
    arguments = op_arguments(name, selected=selected)
    torch.library.opcheck(getattr(torch.ops.flide, name), arguments)
    if name == "fork_attention":
        trained = [x.requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x for x in arguments]
        torch.library.opcheck(torch.ops.flide.fork_attention, tuple(trained))


@pytest.mark.parametrize("layout", ["contiguous", "split", "transposed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("selected", [False, True], ids=["all_rows", "query_rows"])
@pytest.mark.parametrize("name", OPS)
def test_fake_outputs_look_like_real_ones(name: str, selected: bool, dtype: torch.dtype, layout: str) -> None:
    arguments = op_arguments(name, layout=layout, selected=selected, dtype=dtype)
    op = getattr(torch.ops.flide, name)
    with FakeTensorMode() as mode:
        fakes = op(*(mode.from_tensor(x) if isinstance(x, Tensor) else x for x in arguments))
    reals = op(*arguments)
    for fake, real in zip(*((x,) if isinstance(x, Tensor) else x for x in (fakes, reals)), strict=True):
        assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)
        assert real.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("paged", [False, True], ids=["stream", "pool"])
def test_low_precision_costs_no_more_than_its_rounding(dtype: torch.dtype, paged: bool) -> None:
    meta = pack_paged([(130, [5, 64]), (3, [2, 1])])
    inputs = random_inputs(meta.capacity.tokens)
    rounded = tuple(x.to(dtype) for x in inputs)
    exact = naive_attention(*inputs, meta, scale=SCALE)
    best = naive_attention(*(x.double() for x in rounded), meta, scale=SCALE).to(dtype)
    out = attend_paged(*rounded, meta, random_pool(meta, rounded[1])) if paged else attend(*rounded, meta)
    assert out.dtype == dtype
    assert relative_error(out, exact) <= LOW_PRECISION_BUDGET * relative_error(best, exact)


COMPILED_TREES: list[list[Shape]] = [[(3, [2, 1]), (0, [4])], [(10, [])], [(1, [(1, [1, 2]), 3])], [(0, [2, 2, 2])]]


def same_capacity(shapes: list[Shape], *, tokens: int = 14) -> ForkMetadata:
    pages = shuffled_pages([length for length, _ in shapes], pool_pages=POOL_PAGES)
    return pack(shapes, capacity=StreamCapacity(tokens, 7, 5, 4, depth=3), caches=[TrunkCache(pages=p) for p in pages])


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_one_compilation_serves_every_tree(fresh_compiler: None, dynamic: bool) -> None:
    def both(query: Tensor, key: Tensor, value: Tensor, pool: Tensor, meta: ForkMetadata) -> tuple[Tensor, Tensor]:
        rows = meta.readout_rows
        last = attend(query.index_select(0, rows), key, value, meta, query_rows=rows)
        return attend_paged(query * 2, key, value, meta, pool) + 1, last

    compiled = torch.compile(both, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for k, shapes in enumerate(COMPILED_TREES):
        # 17: no size or offset equals another in the first round, or dynamic shapes would tie them together.
        meta = same_capacity(shapes, tokens=17 + 3 * k if dynamic else 17)
        inputs = random_inputs(meta.capacity.tokens, dtype=torch.float32, seed=k)
        pools = [random_pool(meta, inputs[1]) for _ in range(2)]
        with torch.compiler.set_stance("fail_on_recompile" if k else "default"):
            out = compiled(*inputs, pools[0], meta)
        for actual, expected in zip(out, both(*inputs, pools[1], meta), strict=True):
            assert torch.equal(actual, expected)
        assert same_bits(*pools)


def test_training_under_compile_gives_the_same_gradients(fresh_compiler: None) -> None:
    def loss(query: Tensor, key: Tensor, value: Tensor, meta: ForkMetadata) -> Tensor:
        return (attend(query * 1.5, key, value, meta, window=4) * key.repeat_interleave(2, 1)).square().mean()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for k, shapes in enumerate(COMPILED_TREES):
        meta = same_capacity(shapes)
        inputs = [x.requires_grad_() for x in random_inputs(meta.capacity.tokens, dtype=torch.float32, seed=k)]
        with torch.compiler.set_stance("fail_on_recompile" if k else "default"):
            gradients = torch.autograd.grad(compiled(*inputs, meta), inputs)
        for actual, expected in zip(gradients, torch.autograd.grad(loss(*inputs, meta), inputs), strict=True):
            assert relative_error(actual, expected) <= FP32_RELATIVE


# Sweeps.


@pytest.mark.slow
@pytest.mark.parametrize("trunk", TRUNKS)
@pytest.mark.parametrize("window", [0, 1, 64, 65])
def test_sweep_of_lengths(trunk: int, window: int) -> None:
    meta = pack([(trunk, list(BRANCHES)), (1, [2]), (trunk, [(branch, [1, 3]) for branch in BRANCHES])], padding=3)
    inputs = random_inputs(meta.capacity.tokens)
    expected = naive_attention(*inputs, meta, scale=SCALE, window=window)
    assert relative_error(attend(*inputs, meta, window=window), expected) <= FP64
    assert relative_error(attend(*(x.float() for x in inputs), meta, window=window), expected) <= FP32_RELATIVE
    paged = pack_paged([(trunk, list(BRANCHES)), (1, [2]), (trunk, [(branch, [1, 3]) for branch in BRANCHES])])
    pool = random_pool(paged, inputs[1], canary=float("nan"))
    out = attend_paged(*(x[: paged.capacity.tokens] for x in inputs), paged, pool, window=window)
    assert relative_error(out, expected[: paged.capacity.tokens]) <= FP64


lengths = st.integers(0, 9) | st.sampled_from([63, 64, 65])
shapes_of_any_depth = st.lists(
    st.tuples(lengths, st.lists(lengths | st.tuples(lengths, st.lists(lengths, max_size=3)), max_size=4)),
    min_size=1,
    max_size=4,
)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(shapes_of_any_depth, st.sampled_from([0, 0, 1, 3, 64]), st.integers(0, 5))
def test_any_tree(shapes: list[Shape], window: int, padding: int) -> None:
    meta = pack_paged(shapes, padding=padding)
    inputs = random_inputs(meta.capacity.tokens)
    expected = naive_attention(*inputs, meta, scale=SCALE, window=window)
    assert relative_error(attend(*inputs, meta, window=window), expected) <= FP64
    pool = random_pool(meta, inputs[1], canary=float("nan"))
    assert relative_error(attend_paged(*inputs, meta, pool, window=window), expected) <= FP64


@pytest.mark.slow
def test_segments_longer_than_a_block_of_queries() -> None:
    meta = pack([(reference.QUERY_BLOCK + 90, [reference.QUERY_BLOCK + 1, 3])])
    inputs = random_inputs(meta.capacity.tokens, heads=2, kv_heads=1, head_dim=4)
    for window in (0, 70):
        expected = naive_attention(*inputs, meta, scale=SCALE, window=window)
        assert relative_error(attend(*inputs, meta, window=window), expected) <= FP64
