"""The Triton kernels against the references: on the CPU in float32 by Triton's interpreter, on a GPU for real.

The interpreter's bfloat16 products are wrong, so that dtype is checked on the GPU only.
"""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flide.ops import fork_attention_paged, fork_gated_delta_cached
from flide.ops.fork_attention.reference import fork_attention_reference
from flide.ops.fork_gated_delta.reference import DeltaCache, fork_gated_delta_reference
from flide.ops.fork_schedule import ForkSchedule, schedule_inputs
from flide.ops.fork_schedule.reference import fork_schedule_reference
from flide.ops.launch import SM_86, LaunchTable, launch_table
from flide.runtime import ForkMetadata, StreamCapacity, TokenTree, TrunkCache
from flide.runtime.metadata import PAGE_SIZE
from tests.ops.naive import Shape, relative_error, same_bits, token_tree
from tests.tolerance import FP32_RELATIVE, KERNEL_BUDGET

triton = pytest.importorskip("triton", reason="Triton is not available on this platform")

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
NAN = float("nan")
slow = pytest.mark.slow  # variants of what the fast tier tests, too
ROUNDS: dict[str, list[Shape]] = {
    "one": [(9, [3])],
    "empty_trunk": [(0, [1, 4, 66])],
    "short_trunks": [(1, [1, 5]), (2, [2, 3]), (3, [4, 1])],
    "around_the_chunk": [(63, [1, 63]), (64, [2, 64]), (65, [3, 65])],
    "two_chunks": [(127, [1]), (128, [2]), (129, [3, 127, 129])],
    "zero_length_branch": [(5, [0, 3, 0]), (0, [0])],
    "many_branches": [(20, [1 + i % 7 for i in range(40)])],
    "short_last_chunks": [(70, [80, (81, [1, 144, 145]), (80, [65, 129]), 64])],
    "depth_three": [(10, [(5, [1, 2, 64]), (3, [7]), 4]), (66, [(1, [1, 1]), (65, [2])])],
}
too_large_in_float32 = pytest.mark.skipif(ON_GPU, reason="in float32 of this size only the interpreter has room")
FAST = ("empty_trunk", "around_the_chunk", "zero_length_branch", "depth_three")
TELLING = ("around_the_chunk", "depth_three")


def on_rounds(names: str, variants: dict[str, tuple[int, ...]]) -> pytest.MarkDecorator:
    """All rounds in all variants; the fast tier has some of the first, and of the others the most telling."""
    cases = []
    for index, (variant, values) in enumerate(variants.items()):
        for name, shapes in ROUNDS.items():
            marks = [] if name in (TELLING if index else FAST) else [slow]
            cases.append(pytest.param(shapes, *values, id=f"{name}-{variant}", marks=marks))
    return pytest.mark.parametrize(f"shapes, {names}", cases)


def pack(shapes: list[Shape], *, padding: int = 5, caches: list[TrunkCache] | None = None) -> ForkMetadata:
    """A padded round on the test's device; every trunk has pages of its own."""
    trees = [token_tree(shape) for shape in shapes]
    if caches is None:
        caches, page = [], 1
        for tree in trees:
            count = -(-len(tree.tokens) // PAGE_SIZE)
            caches.append(TrunkCache(pages=tuple(range(page, page + count))))
            page += count
    c = ForkMetadata.pack(trees, caches=caches).capacity
    capacity = StreamCapacity(c.tokens + padding, c.segments + padding, c.readouts + padding, c.pages, c.depth)
    return ForkMetadata.pack(trees, caches=caches, capacity=capacity).to(DEVICE)


def schedule_of(meta: ForkMetadata, *, width: int, block: int) -> ForkSchedule:
    """The kernel's schedule, everything it leaves unwritten poisoned."""
    from flide.ops.fork_schedule.triton import fork_schedule_triton

    like = fork_schedule_reference(*schedule_inputs(meta), conv_width=width, query_block=block)
    poisoned = ForkSchedule(*(torch.full_like(x, -(10**9)) for x in like))
    return fork_schedule_triton(*schedule_inputs(meta), conv_width=width, query_block=block, schedule=poisoned)


def assert_same_schedule(meta: ForkMetadata, *, width: int, block: int) -> None:
    expected = fork_schedule_reference(*schedule_inputs(meta), conv_width=width, query_block=block)
    got = schedule_of(meta, width=width, block=block)
    chunks, (tiles, readouts) = int(expected.chunk_offsets[-1]), expected.tile_counts.tolist()
    counts = dict.fromkeys(("chunk_segments", "chunk_rows", "chunk_saves"), chunks)
    counts |= {"tiles": tiles, "readout_tiles": readouts}
    for name, want, have in zip(ForkSchedule._fields, expected, got, strict=True):
        used = counts.get(name, len(want))
        assert torch.equal(want[:used], have[:used]), name


@on_rounds("width, block", {"4_taps": (4, 32), "2_taps": (2, 16), "small_tiles": (4, 8), "no_taps": (1, 16)})
def test_schedule_equals_its_reference(shapes: list[Shape], width: int, block: int) -> None:
    assert_same_schedule(pack(shapes), width=width, block=block)


def test_schedule_cuts_chunks_where_states_are_saved() -> None:
    saves = ((71, 2), (134, 3), (135, 4))
    caches = [TrunkCache(70, slot=1, pages=(1, 2, 3, 4), saves=saves), TrunkCache(pages=(5,), saves=((1, 6),))]
    meta = pack([(130, [2, 70]), (5, [1])], caches=caches)
    assert_same_schedule(meta, width=4, block=32)
    schedule = schedule_of(meta, width=4, block=32)
    rows = schedule.chunk_rows[: int(schedule.chunk_offsets[1])].tolist()
    assert rows == [[0, 1], [1, 64], [64, 65], [65, 129], [129, 130]]


@pytest.mark.slow
def test_schedule_of_random_rounds() -> None:
    rng = random.Random(0)
    sizes = [0, 1, 2, 3, 17, 40, 63, 64, 65, 130, 200]

    def branch() -> Any:
        return rng.choice(sizes) if rng.random() < 0.7 else (3, [1, 70])

    for _ in range(150):
        shapes: list[Shape] = [
            (rng.choice(sizes), [branch() for _ in range(rng.randint(0, 7))]) for _ in range(rng.randint(1, 4))
        ]
        assert_same_schedule(pack(shapes), width=4, block=rng.choice([8, 16, 32]))


class Delta:
    """Random inputs of one layer, some of them split views of one merged projection. Values have the size of keys
    unless it is given."""

    def __init__(
        self,
        rows: int,
        dtype: torch.dtype,
        *,
        key_heads: int,
        heads: int,
        dim: int,
        value_dim: int | None = None,
        beta_scale: float = 1.0,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        value_dim = value_dim or dim
        channels = 2 * key_heads * dim + heads * value_dim

        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        merged = randn(rows, channels + 2 * heads).to(dtype).to(DEVICE)
        self.qkv, self.a, self.b = merged.split([channels, heads, heads], -1)
        self.conv_weight = (randn(channels, 4) * 0.5).to(dtype).to(DEVICE)
        self.A_log = randn(heads).to(DEVICE)
        self.dt_bias = randn(heads).to(dtype).to(DEVICE)
        self.state_pool = randn(9, heads, dim, value_dim).to(DEVICE)
        self.conv_pool = randn(9, 3, channels).to(dtype).to(DEVICE)
        self.state_pool[0], self.conv_pool[0] = 0, 0
        self.sizes = {"num_key_heads": key_heads, "key_dim": dim, "beta_scale": beta_scale}

    def inputs(self, dtype: torch.dtype | None = None) -> list[Tensor]:
        inputs = [self.qkv, self.a, self.b, self.conv_weight, self.A_log, self.dt_bias]
        return [x if dtype is None else x.to(dtype) for x in inputs]

    def reference(self, meta: ForkMetadata, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        pools = self.state_pool.to(dtype), self.conv_pool.to(dtype)
        cache = DeltaCache(*pools, meta.initial_slots, meta.save_rows, meta.save_slots)
        tree = meta.segment_offsets, meta.segment_parents
        out = fork_gated_delta_reference(*self.inputs(dtype), *tree, **self.sizes, cache=cache)
        return out, *pools

    def kernel(self, meta: ForkMetadata) -> tuple[Tensor, Tensor, Tensor]:
        qkv, a, b, conv_weight, A_log, dt_bias = self.inputs()
        pools = self.state_pool.clone(), self.conv_pool.clone()
        scratch = self.state_pool.new_full((meta.segment_parents.shape[0], *self.state_pool.shape[1:]), float("nan"))
        schedule = schedule_of(meta, width=4, block=32)
        if ON_GPU:
            out = fork_gated_delta_cached(
                qkv,
                a,
                b,
                conv_weight_CW=conv_weight,
                A_log_N=A_log,
                dt_bias_N=dt_bias,
                state_pool=pools[0],
                conv_pool=pools[1],
                scratch=scratch,
                segment_offsets=meta.segment_offsets,
                segment_parents=meta.segment_parents,
                initial_slots=meta.initial_slots,
                final_slots=meta.final_slots,
                row_segments=meta.row_segments,
                save_rows=meta.save_rows,
                save_slots=meta.save_slots,
                schedule=schedule,
                depth=meta.capacity.depth,
                **self.sizes,
            )
        else:
            from flide.ops.fork_gated_delta.triton import fork_gated_delta_triton

            slots = meta.row_segments, meta.initial_slots, meta.final_slots
            tree = meta.segment_offsets, meta.segment_parents, *slots
            out = fork_gated_delta_triton(
                *self.inputs(),
                *pools,
                scratch,
                *tree,
                schedule,
                depth=meta.capacity.depth,
                **self.sizes,
            )
        return out, *pools


@on_rounds("key_heads, heads", {"grouped": (1, 2), "equal_heads": (2, 2)})
def test_delta_rule_in_float32(shapes: list[Shape], key_heads: int, heads: int) -> None:
    meta = pack(shapes)
    delta = Delta(meta.tokens.shape[0], torch.float32, key_heads=key_heads, heads=heads, dim=32)
    out, state_pool, conv_pool = delta.kernel(meta)
    expected, *_ = delta.reference(meta, torch.float64)
    assert relative_error(out.double(), expected) <= FP32_RELATIVE
    assert torch.equal(state_pool, delta.state_pool)
    assert torch.equal(conv_pool, delta.conv_pool)
    rows = int(meta.segment_offsets[-1])
    assert not out[rows:].any()


def check_without_a_pipeline(shapes: list[Shape]) -> None:
    meta = pack(shapes)
    delta = Delta(meta.tokens.shape[0], torch.float32, key_heads=1, heads=2, dim=32, value_dim=64)
    out, *_ = delta.kernel(meta)
    expected, *_ = delta.reference(meta, torch.float64)
    assert relative_error(out.double(), expected) <= FP32_RELATIVE
    assert not out[int(meta.segment_offsets[-1]) :].any()


@pytest.mark.parametrize("shapes", [pytest.param(ROUNDS[name], id=name) for name in (*FAST, "short_last_chunks")])
def test_delta_rule_of_branches_without_a_pipeline(shapes: list[Shape]) -> None:
    """From 64 columns on. Leaves of one chunk start from rounded states; short last chunks have small tiles."""
    check_without_a_pipeline(shapes)


AROUND_THE_TILE: list[Shape] = [(15, [16, 17]), (80, [(81, [79]), 1]), (64, [])]


@pytest.mark.parametrize(
    "shapes",
    [
        pytest.param(AROUND_THE_TILE, id="around_the_tile"),
        *(pytest.param(shapes, id=name, marks=slow) for name, shapes in ROUNDS.items()),
    ],
)
def test_delta_rule_of_large_rounds(large_rounds: None, shapes: list[Shape]) -> None:
    check_without_a_pipeline(shapes)


@pytest.mark.parametrize(("key_dim", "value_dim"), [(32, 32), pytest.param(48, 80, marks=slow)])
def test_large_rounds_resume_and_save_at_any_row(large_rounds: None, key_dim: int, value_dim: int) -> None:
    """Chunks are cut where they are saved: short ones need not be the last."""
    caches = [
        TrunkCache(5, slot=3, pages=(1, 2), saves=((9, 4), (75, 5))),
        TrunkCache(pages=(4, 5), saves=((1, 6), (64, 7), (82, 8))),
    ]
    meta = pack([(70, [3]), (100, [1])], caches=caches)
    delta = Delta(meta.tokens.shape[0], torch.float32, key_heads=1, heads=2, dim=key_dim, value_dim=value_dim)
    for got, want in zip(delta.kernel(meta), delta.reference(meta, torch.float64), strict=True):
        assert relative_error(got.double(), want) <= FP32_RELATIVE


def test_delta_rule_resumes_and_saves_at_any_row() -> None:
    caches = [
        TrunkCache(5, slot=3, pages=(1, 2), saves=((9, 4), (75, 5))),
        TrunkCache(2, slot=1, pages=(3,), saves=((3, 2),)),
        TrunkCache(pages=(4, 5, 6), saves=((1, 6), (64, 7), (65, 8))),
    ]
    meta = pack([(70, [3, 66]), (1, [2]), (130, [1])], caches=caches)
    delta = Delta(meta.tokens.shape[0], torch.float32, key_heads=1, heads=2, dim=32)
    for got, want in zip(delta.kernel(meta), delta.reference(meta, torch.float64), strict=True):
        assert relative_error(got.double(), want) <= FP32_RELATIVE


@pytest.mark.parametrize(
    ("key_dim", "value_dim"), [(96, 192), *(pytest.param(*sizes, marks=slow) for sizes in ((48, 80), (32, 48)))]
)
def test_delta_rule_of_heads_that_are_no_powers_of_two(key_dim: int, value_dim: int) -> None:
    """Tiles are padded; what lies behind a head, another head or nothing, must not be seen."""
    caches = [TrunkCache(5, slot=3, pages=(1, 2), saves=((9, 4), (75, 5))), TrunkCache(pages=(3,), saves=((2, 6),))]
    meta = pack([(70, [3, (2, [66])]), (2, [1])], caches=caches)
    rows = meta.tokens.shape[0]
    delta = Delta(rows, torch.float32, key_heads=1, heads=2, dim=key_dim, value_dim=value_dim, beta_scale=2.0)
    out, *pools = delta.kernel(meta)
    for got, want in zip((out, *pools), delta.reference(meta, torch.float64), strict=True):
        assert relative_error(got.double(), want) <= FP32_RELATIVE
    assert not out[int(meta.segment_offsets[-1]) :].any()
    spare = set(range(9)) - {slot for cache in caches for _, slot in cache.saves}
    assert all(torch.equal(pools[0][i], delta.state_pool[i]) for i in spare)


def test_delta_rule_of_equal_keys_that_never_decay() -> None:
    """The chunk's triangle is all ones: the powers inside a block grow as far as they can."""
    meta = pack([(130, [64, 3])])
    delta = Delta(meta.tokens.shape[0], torch.float32, key_heads=1, heads=2, dim=32)
    delta.qkv[:, :64] = delta.qkv[:1, :64]
    delta.a.fill_(-30.0)
    delta.b.fill_(30.0)
    out, *_ = delta.kernel(meta)
    assert relative_error(out.double(), delta.reference(meta, torch.float64)[0]) <= 50 * FP32_RELATIVE


class Attention:
    """Random queries, keys and values of one layer, keys and values views of one projection."""

    def __init__(
        self, rows: int, dtype: torch.dtype, *, heads: int, kv_heads: int, dim: int, window: int = 0, seed: int = 0
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.query = torch.randn(rows, heads, dim, generator=generator).to(dtype).to(DEVICE)
        merged = torch.randn(rows, 2 * kv_heads, dim, generator=generator).to(dtype).to(DEVICE)
        self.key, self.value = merged.split([kv_heads, kv_heads], 1)
        self.pool = torch.full((16, 2, kv_heads, PAGE_SIZE, dim), float("nan")).to(dtype).to(DEVICE)
        self.scale, self.group, self.window = dim**-0.5, heads // kv_heads, window

    def reference(self, meta: ForkMetadata, rows: Tensor | None, dtype: torch.dtype) -> Tensor:
        query = self.query if rows is None else self.query[: len(rows)]
        return fork_attention_reference(
            query.to(dtype),
            self.key.to(dtype),
            self.value.to(dtype),
            rows,
            meta.segment_offsets,
            meta.segment_parents,
            scale=self.scale,
            window=self.window,
            segment_starts=meta.segment_starts,
            kv_pool=self.pool.to(dtype),
            segment_pages=meta.segment_pages,
            page_table=meta.page_table,
        )

    def kernel(self, meta: ForkMetadata, rows: Tensor | None, *, pool: Tensor | None = None) -> Tensor:
        """With a pool, as a layer that reads it: another one wrote it."""
        options = {"scale": self.scale, "window": self.window, "depth": meta.capacity.depth, "write": pool is None}
        query = self.query if rows is None else self.query[: len(rows)]
        table = launch_table(meta.arena.device).attention_of(self.query.shape[2])
        schedule = schedule_of(meta, width=4, block=table.query_block(self.group))
        pool = self.pool.clone() if pool is None else pool
        if ON_GPU:
            return fork_attention_paged(
                query,
                self.key,
                self.value,
                kv_pool=pool,
                segment_offsets=meta.segment_offsets,
                segment_parents=meta.segment_parents,
                segment_starts=meta.segment_starts,
                segment_pages=meta.segment_pages,
                page_table=meta.page_table,
                row_segments=meta.row_segments,
                query_rows=rows,
                schedule=schedule,
                **options,
            )
        from flide.ops.fork_attention.triton import fork_attention_triton

        return fork_attention_triton(
            query,
            self.key,
            self.value,
            pool,
            rows,
            meta.row_segments,
            meta.segment_offsets,
            meta.segment_parents,
            meta.segment_starts,
            meta.segment_pages,
            meta.page_table,
            schedule,
            **options,
        )


@on_rounds("heads, kv_heads", {"group_2": (4, 2), "group_6": (6, 1), "group_1": (2, 2)})
@pytest.mark.parametrize("selected", [False, True], ids=["all_rows", "readout_rows"])
def test_attention_in_float32(shapes: list[Shape], selected: bool, heads: int, kv_heads: int) -> None:
    meta = pack(shapes)
    attention = Attention(meta.tokens.shape[0], torch.float32, heads=heads, kv_heads=kv_heads, dim=32)
    rows = meta.readout_rows if selected else None
    out = attention.kernel(meta, rows)
    assert relative_error(out.double(), attention.reference(meta, rows, torch.float64)) <= FP32_RELATIVE
    if rows is None:
        assert not out[int(meta.segment_offsets[-1]) :].any()


@pytest.mark.parametrize("cached", [64, *(pytest.param(cached, marks=slow) for cached in (1, 63, 65, 130))])
def test_attention_resumes_from_pages(cached: int) -> None:
    pages = tuple(range(1, 1 + -(-(cached + 70) // PAGE_SIZE)))
    meta = pack([(70, [3, 66, 1]), (2, [4])], caches=[TrunkCache(cached, slot=1, pages=pages), TrunkCache(pages=(9,))])
    attention = Attention(meta.tokens.shape[0], torch.float32, heads=4, kv_heads=2, dim=32)
    attention.pool.normal_()
    for rows in (None, meta.readout_rows):
        out = attention.kernel(meta, rows)
        assert relative_error(out.double(), attention.reference(meta, rows, torch.float64)) <= FP32_RELATIVE


def windowed_round() -> tuple[ForkMetadata, list[int]]:
    """Trunks, branches and leaves of lengths around windows and blocks, one trunk resumed; rows read out in no order.
    And the pages that hold what the resumed one has."""

    def node(length: int, *children: TokenTree, reads: tuple[int, ...] | None = None) -> TokenTree:
        return TokenTree([1] * length, children, readouts=reads)

    leaves = node(1), node(66, reads=(65, 1, 40)), node(2)
    deep = node(130, node(3), node(70, *leaves, reads=(69, 0, 30)), node(5, *leaves), reads=(129, 7, 64))
    trees = [
        deep,
        node(0, node(4), node(101)),
        node(12, node(99, reads=(98, 0, 5)), node(1), node(2)),
        node(1, node(1)),
    ]
    resumed = (8, 4)
    caches = [TrunkCache(pages=(3, 1, 6)), TrunkCache(), TrunkCache(70, slot=1, pages=resumed), TrunkCache(pages=(5,))]
    c = ForkMetadata.pack(trees, caches=caches).capacity
    capacity = StreamCapacity(c.tokens + 9, c.segments + 3, c.readouts + 5, c.pages, c.depth)
    return ForkMetadata.pack(trees, caches=caches, capacity=capacity).to(DEVICE), list(resumed)


def check_windows(window: int, *, heads: int, kv_heads: int, dim: int) -> None:
    meta, resumed = windowed_round()
    sizes = {"heads": heads, "kv_heads": kv_heads, "dim": dim, "window": window}
    attention = Attention(meta.tokens.shape[0], torch.float32, **sizes)
    attention.pool[resumed] = torch.randn(attention.pool[resumed].shape).to(DEVICE)
    for rows in (None, meta.readout_rows):
        out = attention.kernel(meta, rows)
        assert relative_error(out.double(), attention.reference(meta, rows, torch.float64)) <= FP32_RELATIVE
        if rows is None:
            assert not out[int(meta.segment_offsets[-1]) :].any()


@pytest.mark.parametrize(
    "window", [pytest.param(1, marks=slow), 5, *(pytest.param(window, marks=slow) for window in (64, 100))]
)
def test_attention_in_a_window(window: int) -> None:
    check_windows(window, heads=2, kv_heads=1, dim=16)


@pytest.mark.slow
@pytest.mark.parametrize("window", [2, 63, 65, 127, 128, 129, 1000])
def test_attention_in_more_windows(window: int) -> None:
    check_windows(window, heads=6, kv_heads=2, dim=16)


@pytest.mark.slow
@too_large_in_float32
@pytest.mark.parametrize("window", [0, 64])
def test_attention_of_512_channels_in_any_round(window: int) -> None:
    check_windows(window, heads=4, kv_heads=1, dim=512)


@too_large_in_float32
def test_attention_of_512_channels() -> None:
    meta = pack([(70, [3, 20]), (0, [5])])
    attention = Attention(meta.tokens.shape[0], torch.float32, heads=4, kv_heads=1, dim=512)
    for rows in (None, meta.readout_rows):
        out = attention.kernel(meta, rows)
        assert relative_error(out.double(), attention.reference(meta, rows, torch.float64)) <= FP32_RELATIVE


@pytest.mark.parametrize("window", [pytest.param(0, marks=slow), 40])
def test_attention_to_what_another_layer_wrote(window: int) -> None:
    """Trunks are read from the pool alone, which stays as it is."""
    resumed = [3, 1]
    meta = pack([(20, [70, (2, [3])]), (5, [1])], caches=[TrunkCache(66, slot=1, pages=resumed), TrunkCache(pages=[2])])
    attention = Attention(meta.tokens.shape[0], torch.float32, heads=2, kv_heads=1, dim=16, window=window)
    attention.pool[resumed] = torch.randn(attention.pool[resumed].shape).to(DEVICE)
    both = None, meta.readout_rows
    expected = [attention.kernel(meta, rows) for rows in both]
    pool = attention.pool  # which the reference fills
    attention.reference(meta, None, torch.float32)
    before = pool.clone()
    is_trunk = meta.segment_parents[meta.row_segments] < 0
    attention.key, attention.value = (
        x.masked_fill(is_trunk[:, None, None], NAN) for x in (attention.key, attention.value)
    )
    for rows, want in zip(both, expected, strict=True):
        assert torch.equal(attention.kernel(meta, rows, pool=pool), want)
    assert same_bits(pool, before)


# The second cuts pages into blocks of keys, which so far no GPU needs.
SMALL_TABLES = {
    "sm_86": SM_86,
    "quarter_pages": replace(SM_86, attention=replace(SM_86.attention, key_block=16), scan_columns=16),
}


@pytest.fixture(
    params=[SMALL_TABLES["sm_86"], pytest.param(SMALL_TABLES["quarter_pages"], marks=slow)], ids=SMALL_TABLES
)
def small_table(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> LaunchTable:
    """Everything here is launched with the table of a GPU of 99 KB."""
    from flide.ops.fork_attention import triton as attention
    from flide.ops.fork_gated_delta import triton as delta

    for module in (attention, delta, sys.modules[__name__]):
        monkeypatch.setattr(module, "launch_table", lambda device: request.param)
    return request.param


def small_table_round() -> ForkMetadata:
    """Trunks that begin and end inside pages and chunks, one resumed; all depths; more rows than a tile has."""
    caches = [
        TrunkCache(65, slot=1, pages=(1, 2, 3, 4), saves=((70, 2), (194, 3))),
        TrunkCache(pages=(5, 6), saves=((66, 4),)),
    ]
    return pack([(129, [3, (9, [1, 20]), 0]), (66, [(1, [1, 1]), 40])], caches=caches)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "window"),
    [pytest.param(4, 2, 0, marks=slow), pytest.param(6, 1, 0, marks=slow), (4, 2, 40)],
    ids=["group_2", "group_6", "window"],
)
def test_attention_of_smaller_gpus(small_table: LaunchTable, heads: int, kv_heads: int, window: int) -> None:
    meta = small_table_round()
    sizes = {"heads": heads, "kv_heads": kv_heads, "dim": 32, "window": window}
    attention = Attention(meta.tokens.shape[0], torch.float32, **sizes)
    attention.pool.normal_()
    for rows in (None, meta.readout_rows):
        out = attention.kernel(meta, rows)
        assert relative_error(out.double(), attention.reference(meta, rows, torch.float64)) <= FP32_RELATIVE


def test_delta_rule_of_smaller_gpus(small_table: LaunchTable) -> None:
    meta = small_table_round()
    delta = Delta(meta.tokens.shape[0], torch.float32, key_heads=1, heads=2, dim=64)
    for got, want in zip(delta.kernel(meta), delta.reference(meta, torch.float64), strict=True):
        assert relative_error(got.double(), want) <= FP32_RELATIVE


def error_norm(actual: Tensor, exact: Tensor) -> float:
    return (actual.double() - exact).norm().item()


@pytest.mark.gpu
def test_kernels_of_smaller_gpus_in_bfloat16(small_table: LaunchTable) -> None:
    """Errors no larger than a small multiple of the one that rounding the exact result makes. (With the tables of
    large GPUs: test_kernel_limits.py.)"""
    meta = small_table_round()
    rows = meta.tokens.shape[0]
    for key_heads, heads in ((16, 16), (16, 32)):
        delta = Delta(rows, torch.bfloat16, key_heads=key_heads, heads=heads, dim=128)
        exact = delta.reference(meta, torch.float64)[0]
        assert error_norm(delta.kernel(meta)[0], exact) <= KERNEL_BUDGET * error_norm(exact.bfloat16(), exact)
    delta = Delta(rows, torch.bfloat16, key_heads=16, heads=16, dim=96, value_dim=192)
    exact = delta.reference(meta, torch.float64)[0]
    assert error_norm(delta.kernel(meta)[0], exact) <= KERNEL_BUDGET * error_norm(exact.bfloat16(), exact)
    for heads, kv_heads, dim, window in (
        (8, 2, 256, 0),
        (16, 4, 256, 0),
        (24, 4, 256, 0),
        (8, 1, 256, 40),
        (8, 1, 512, 0),
    ):
        sizes = {"heads": heads, "kv_heads": kv_heads, "dim": dim, "window": window}
        attention = Attention(rows, torch.bfloat16, **sizes)
        attention.pool.normal_()
        for query_rows in (None, meta.readout_rows):
            exact = attention.reference(meta, query_rows, torch.float64)
            out = attention.kernel(meta, query_rows)
            assert error_norm(out, exact) <= KERNEL_BUDGET * error_norm(exact.bfloat16(), exact)
