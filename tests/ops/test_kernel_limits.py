"""The Triton kernels at the limits of what they must serve.

On a GPU, in bfloat16 at the sizes of real models: errors against a plain low-precision computation of every isolated
path, offsets that need 64 bits, padding that holds NaN, equal bits on repetition. On the CPU, by the interpreter in
float32 at small sizes: the shapes and the padding.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from flide.runtime import ForkMetadata, TrunkCache
from flide.runtime.metadata import PAGE_SIZE
from scripts.workloads import FIXED
from tests.ops import naive, test_kernels
from tests.ops.isolated import CHUNK, isolated_attention, isolated_delta
from tests.ops.naive import DeltaInputs, Shape, relative_error, rows_of_request, same_bits, shuffled_pages
from tests.ops.test_kernels import Attention, Delta
from tests.tolerance import FP32_RELATIVE, FP64, LOW_PRECISION_BUDGET, SEGMENT_BUDGET

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAN = float("nan")
BEYOND = 2**31  # elements; an offset this large does not fit 32 bits

LENGTHS = (1, 2, 3, 63, 64, 65, 127, 128, 129)
SWEEP: dict[str, list[Shape]] = {
    "trunks_up_to_3": [(trunk, [0, *LENGTHS]) for trunk in (0, 1, 2, 3)],
    "trunks_around_64": [(trunk, [0, *LENGTHS]) for trunk in (63, 64, 65)],
    "trunks_around_128": [(trunk, [*LENGTHS, 0]) for trunk in (127, 128, 129)],
    "500_one_token_branches": [(130, [*[1] * 250, 1000, *[1] * 250])],
    "500_one_token_segments": [*[(1, [1])] * 125, (1000, [1, 1000]), *[(1, [1])] * 125],
    "leaves": [(65, [(1, [1, 64, 0]), (64, [2, 128]), (0, [3]), 0]), (0, [(0, [1]), (3, [129])])],
}
SMALL_SWEEP: dict[str, list[Shape]] = {
    "lengths": [
        *[(trunk, [2, 0, 1, 3, 0]) for trunk in (0, 1, 2, 3)],
        *[(63, [0, 65, 1]), (64, [64, 2, 0]), (65, [3, 63])],
    ],
    "one_token_segments": [*[(1, [])] * 5, (3, [*[1] * 50, 130, *[1] * 50]), (0, [1]), (1, [1])],
}
DELTA_HEADS = pytest.mark.parametrize(("key_heads", "heads"), [(16, 16), (16, 32)], ids=["16_heads", "32_heads"])
ATTENTION_HEADS = pytest.mark.parametrize(
    ("heads", "kv_heads"), [(8, 2), (16, 4), (24, 4)], ids=["8_heads", "16_heads", "24_heads"]
)
on_sweep = pytest.mark.parametrize("name", SWEEP)
on_small_sweep = pytest.mark.parametrize(
    "name", ["lengths", pytest.param("one_token_segments", marks=pytest.mark.slow)]
)


def pack(shapes: list[Shape], *, padding: int = 5, caches: list[TrunkCache] | None = None) -> ForkMetadata:
    """A padded round on the test's device; fresh trunks have pages in no order."""
    if caches is None:
        lengths = [trunk for trunk, _ in shapes]
        count = sum(-(-n // PAGE_SIZE) for n in lengths)
        caches = [TrunkCache(pages=pages) for pages in shuffled_pages(lengths, pool_pages=count)]
    return naive.pack(shapes, padding=padding, caches=caches).to(DEVICE)


def seed_of(name: str) -> int:
    """A seed of each case's own."""
    return sum(ord(c) << (i % 16) for i, c in enumerate(name))


def attention_layer(meta: ForkMetadata, dtype: torch.dtype, **sizes: Any) -> Attention:
    """Random inputs, all of them views (a head's query stands beside its gate), and a pool of NaN."""
    layer = Attention(meta.tokens.shape[0], dtype, **sizes)
    layer.query = torch.stack([layer.query, layer.query + 1], 2)[:, :, 0]
    pages = int(meta.page_table.max()) + 2 if len(meta.page_table) else 1
    layer.pool = torch.full((pages, *layer.pool.shape[1:]), NAN, dtype=dtype, device=DEVICE)
    return layer


def delta_layer(meta: ForkMetadata, dtype: torch.dtype, *, heads: int, **sizes: Any) -> Delta:
    """Random inputs; from heads that keep their state over a whole path to heads that forget it within a row."""
    layer = Delta(meta.tokens.shape[0], dtype, heads=heads, **sizes)
    layer.A_log = torch.linspace(-6, 2, heads, device=DEVICE)
    return layer


def delta_inputs(layer: Delta) -> DeltaInputs:
    return DeltaInputs(layer.qkv, layer.a, layer.b, layer.conv_weight, layer.A_log, layer.dt_bias)


def in_float64(inputs: DeltaInputs) -> DeltaInputs:
    return DeltaInputs(*(x.double() for x in inputs))


# Correct: float64 and low precision


@pytest.mark.parametrize("name", ["around_the_chunk", "empty_branches", "empty_middles", "many_requests"])
def test_isolated_paths_equal_the_row_by_row_oracles(name: str) -> None:
    """What the kernels are held to in this file, at float64."""
    meta = pack(naive.TREES[name]).to("cpu")
    layer = delta_layer(meta, torch.float64, key_heads=1, heads=2, dim=16, seed=seed_of(name))
    sizes = {"num_key_heads": 1, "key_dim": 16}
    inputs = DeltaInputs(*(x.cpu() for x in in_float64(delta_inputs(layer))))
    expected = naive.naive_gated_delta(inputs, meta, **sizes)
    assert relative_error(isolated_delta(inputs, meta, dtype=torch.float64, **sizes), expected) <= FP64
    query, key, value = torch.randn(3, meta.tokens.shape[0], 2, 16, dtype=torch.float64)
    for rows in (None, meta.readout_rows):
        selected = query if rows is None else query[: len(rows)]
        for window in (0, 5):
            options: dict[str, Any] = {"scale": 0.3, "window": window, "query_rows": rows}
            expected = naive.naive_attention(selected, key, value, meta, **options)
            out = isolated_attention(selected, key, value, meta, dtype=torch.float64, **options)
            assert relative_error(out, expected) <= FP64


@on_small_sweep
def test_delta_rule_of_small_shapes(name: str) -> None:
    meta = pack(SMALL_SWEEP[name])
    layer = delta_layer(meta, torch.float32, key_heads=1, heads=2, dim=32, seed=seed_of(name))
    exact = isolated_delta(in_float64(delta_inputs(layer)), meta, num_key_heads=1, key_dim=32, dtype=torch.float64)
    out = layer.kernel(meta)[0]
    assert relative_error(out, exact) <= FP32_RELATIVE
    assert not out[naive.active_rows(meta) :].any()


@on_small_sweep
def test_attention_of_small_shapes(name: str) -> None:
    meta = pack(SMALL_SWEEP[name])
    layer = attention_layer(meta, torch.float32, heads=2, kv_heads=1, dim=32, seed=seed_of(name))
    for rows in (None, meta.readout_rows):
        exact = exact_attention(layer, meta, rows)
        out = layer.kernel(meta, rows)
        assert relative_error(out, exact) <= FP32_RELATIVE
        if rows is None:
            assert not out[naive.active_rows(meta) :].any()


def exact_attention(layer: Attention, meta: ForkMetadata, rows: Tensor | None) -> Tensor:
    query = layer.query if rows is None else layer.query[: len(rows)]
    query, key, value = (x.double() for x in (query, layer.key, layer.value))
    options: dict[str, Any] = {"scale": layer.scale, "window": layer.window, "query_rows": rows}
    return isolated_attention(query, key, value, meta, dtype=torch.float64, **options)


@pytest.mark.gpu
@on_sweep
@DELTA_HEADS
def test_delta_rule_errs_no_more_than_plain_bfloat16(name: str, key_heads: int, heads: int) -> None:
    check_delta_errors(SWEEP[name], torch.bfloat16, key_heads=key_heads, heads=heads, dim=128, seed=seed_of(name))


@pytest.mark.gpu
@on_sweep
@DELTA_HEADS
def test_delta_rule_of_large_rounds_errs_no_more_than_plain_bfloat16(
    large_rounds: None, name: str, key_heads: int, heads: int
) -> None:
    check_delta_errors(SWEEP[name], torch.bfloat16, key_heads=key_heads, heads=heads, dim=128, seed=seed_of(name))


@pytest.mark.gpu
@on_sweep
def test_delta_rule_of_padded_heads_errs_no_more_than_plain_bfloat16(name: str) -> None:
    sizes = {"key_heads": 30, "heads": 30, "dim": 96, "value_dim": 192}
    check_delta_errors(SWEEP[name], torch.bfloat16, seed=seed_of(name), **sizes)


@pytest.mark.gpu
@on_sweep
@ATTENTION_HEADS
def test_attention_errs_no_more_than_plain_bfloat16(name: str, heads: int, kv_heads: int) -> None:
    check_attention_errors(SWEEP[name], torch.bfloat16, heads=heads, kv_heads=kv_heads, dim=256, seed=seed_of(name))


# What Gemma 4's layers have: E2B, E4B, 12B and 31B.
GEMMA = {
    "e2b_sliding": {"heads": 8, "kv_heads": 1, "dim": 256, "window": 512},
    "e4b_sliding": {"heads": 8, "kv_heads": 2, "dim": 256, "window": 512},
    "12b_sliding": {"heads": 4, "kv_heads": 2, "dim": 256, "window": 1024},
    "e2b_full": {"heads": 8, "kv_heads": 1, "dim": 512},
    "e4b_full": {"heads": 8, "kv_heads": 2, "dim": 512},
    "12b_full": {"heads": 16, "kv_heads": 1, "dim": 512},
}
ON_GEMMA = pytest.mark.parametrize("sizes", GEMMA.values(), ids=GEMMA)
LONG: list[Shape] = [(4804, [103, 103, 1, 0, 600, (70, [1, 103, 64]), (1100, [5])]), (509, [1, 2, 3, 4, 5, 103])]


@pytest.mark.gpu
@ON_GEMMA
@pytest.mark.parametrize("name", ["trunks_around_64", "leaves", "long"])
def test_attention_of_gemma_errs_no_more_than_plain_bfloat16(name: str, sizes: dict[str, int]) -> None:
    """With windows of 20 in the rounds of short paths."""
    sizes = sizes if name == "long" or "window" not in sizes else sizes | {"window": 20}
    check_attention_errors({**SWEEP, "long": LONG}[name], torch.bfloat16, seed=seed_of(name), **sizes)


def check_delta_errors(
    shapes: list[Shape],
    dtype: torch.dtype,
    *,
    key_heads: int,
    heads: int,
    dim: int,
    seed: int,
    value_dim: int | None = None,
) -> None:
    meta = pack(shapes)
    layer = delta_layer(meta, dtype, key_heads=key_heads, heads=heads, dim=dim, value_dim=value_dim, seed=seed)
    sizes = {"num_key_heads": key_heads, "key_dim": dim}
    plain = isolated_delta(delta_inputs(layer), meta, dtype=dtype, **sizes)
    exact = isolated_delta(in_float64(delta_inputs(layer)), meta, dtype=torch.float64, **sizes)
    assert_errs_no_more(layer.kernel(meta)[0], plain, exact, meta, meta.row_segments, segment_budget=SEGMENT_BUDGET)


def check_attention_errors(shapes: list[Shape], dtype: torch.dtype, **sizes: int) -> None:
    meta = pack(shapes)
    layer = attention_layer(meta, dtype, **sizes)
    for rows in (None, meta.readout_rows):
        query = layer.query if rows is None else layer.query[: len(rows)]
        inputs = query, layer.key, layer.value
        options: dict[str, Any] = {"scale": layer.scale, "window": layer.window, "query_rows": rows}
        plain = isolated_attention(*inputs, meta, dtype=dtype, **options)
        owners = meta.row_segments if rows is None else meta.row_segments[rows]
        exact = exact_attention(layer, meta, rows)
        assert_errs_no_more(layer.kernel(meta, rows), plain, exact, meta, owners, segment_budget=LOW_PRECISION_BUDGET)


def assert_errs_no_more(
    out: Tensor, plain: Tensor, exact: Tensor, meta: ForkMetadata, owners: Tensor, *, segment_budget: float
) -> None:
    """RMS errors against those of ``plain``: over the round, over all segments of one length, over each segment.

    ``owners``: segment of each row; rows of nobody are zero.
    """
    assert out.dtype == plain.dtype
    assert not out[owners < 0].any()
    owners, out, plain, exact = (x[owners >= 0] for x in (owners, out, plain, exact))
    owners = owners.long()
    groups = {
        "round": (torch.zeros_like(owners), LOW_PRECISION_BUDGET),
        "segments of one length": (meta.segment_offsets.diff()[owners].long(), LOW_PRECISION_BUDGET),
        "segment": (owners, segment_budget),
    }
    for name, (group, budget) in groups.items():
        ours, theirs = (error_norms(x, exact, group) for x in (out, plain))
        ratio = torch.where(ours == 0, 0.0, ours / theirs)
        print(f"{name}: error over plain {out.dtype} at most {ratio.max():.2f}")
        assert (ours <= budget * theirs).all(), f"{name} {int(ratio.argmax())}: {ratio.max():.2f} times the plain error"
    # The comparison means something only where the plain computation is right.
    assert (plain.double() - exact).norm() <= 2 * torch.finfo(out.dtype).eps * exact.norm()


def error_norms(x: Tensor, exact: Tensor, group: Tensor) -> Tensor:
    """Norm of the difference over the rows of each group."""
    squares = (x.double() - exact).square().sum((1, 2))
    return squares.new_zeros(int(group.max()) + 1).index_add_(0, group, squares).sqrt()


# Padding and unused memory hold NaN

PADDED: list[Shape] = [(66, [3, 0, 65]), (0, [2]), (5, [(1, [1, 2])])]
RESUMED, SAVED = 3, (5, 6)  # state-pool slots
RESUMED_LENGTH = 70


def padded_round(padding: int) -> ForkMetadata:
    """A trunk resumed inside a page, one without rows, a deep request; states saved inside a trunk and at its end."""
    caches = [
        TrunkCache(RESUMED_LENGTH, slot=RESUMED, pages=(7, 2, 4), saves=((75, SAVED[0]),)),
        TrunkCache(),
        TrunkCache(pages=(5,), saves=((5, SAVED[1]),)),
    ]
    return pack(PADDED, padding=padding, caches=caches)


def check_attention_padding(dtype: torch.dtype, *, kv_heads: int, dim: int, **sizes: int) -> None:
    padded, exact = padded_round(40), padded_round(0)
    active = naive.active_rows(padded)
    layer = attention_layer(padded, dtype, kv_heads=kv_heads, dim=dim, seed=1, **sizes)
    cached = torch.randn(2, 2, kv_heads, PAGE_SIZE, dim, generator=torch.Generator().manual_seed(2)).to(layer.pool)

    def run(meta: ForkMetadata, filler: float, *, readouts: bool) -> tuple[Tensor, Tensor]:
        """Outputs of active queries and of padding."""
        used = copy.copy(layer)
        used.query, used.key, used.value = (
            x[: meta.tokens.shape[0]].clone() for x in (used.query, used.key, used.value)
        )
        used.key[active:], used.value[active:] = filler, filler
        if not readouts:  # else queries are those of readouts, and padding reads row 0
            used.query[active:] = filler
        used.pool = torch.full_like(layer.pool, filler)
        used.pool[[7, 2]] = cached
        used.pool[2, :, :, RESUMED_LENGTH - PAGE_SIZE :] = filler
        out = used.kernel(meta, meta.readout_rows if readouts else None)
        count = len(exact.readout_rows) if readouts else active
        return out[:count], out[count:]

    for readouts in (False, True):
        runs = [run(padded, filler, readouts=readouts) for filler in (0.0, NAN)]
        if not readouts:
            runs.append(run(exact, NAN, readouts=False))
        expected = runs[0][0]
        assert expected.isfinite().all()
        for out, padding in runs:
            assert torch.equal(out, expected)
            assert padding.isfinite().all()
            assert readouts or not padding.any()


def check_delta_padding(dtype: torch.dtype, *, key_heads: int, heads: int, dim: int) -> None:
    padded, exact = padded_round(40), padded_round(0)
    active = naive.active_rows(padded)
    layer = delta_layer(padded, dtype, key_heads=key_heads, heads=heads, dim=dim, seed=1)
    slots = range(len(layer.state_pool))

    def run(meta: ForkMetadata, filler: float) -> list[Tensor]:
        """Outputs of active rows and the saved states and windows."""
        used = copy.copy(layer)
        used.qkv, used.a, used.b = (x[: meta.tokens.shape[0]].clone() for x in (used.qkv, used.a, used.b))
        used.state_pool, used.conv_pool = used.state_pool.clone(), used.conv_pool.clone()
        for x in (used.qkv, used.a, used.b):
            x[active:] = filler
        for pool in (used.state_pool, used.conv_pool):
            pool[[slot for slot in slots if slot not in (0, RESUMED)]] = filler
        out, *pools = used.kernel(meta)
        for pool, before in zip(pools, (used.state_pool, used.conv_pool), strict=True):
            untouched = [slot for slot in slots if slot not in SAVED]
            assert same_bits(pool[untouched], before[untouched])
        assert not out[active:].any()
        return [out[:active], *(pool[list(SAVED)] for pool in pools)]

    runs = [run(padded, filler) for filler in (0.0, NAN)]
    runs.append(run(exact, NAN))
    assert all(x.isfinite().all() for x in runs[0])
    for other in runs[1:]:
        assert all(torch.equal(x, y) for x, y in zip(other, runs[0], strict=True))


@pytest.mark.parametrize("window", [pytest.param(0, marks=pytest.mark.slow), 40])
def test_attention_padding_in_float32(window: int) -> None:
    check_attention_padding(torch.float32, heads=2, kv_heads=1, dim=32, window=window)


def test_delta_rule_padding_in_float32() -> None:
    check_delta_padding(torch.float32, key_heads=1, heads=2, dim=32)


@pytest.mark.gpu
@ATTENTION_HEADS
def test_attention_padding_in_bfloat16(heads: int, kv_heads: int) -> None:
    check_attention_padding(torch.bfloat16, heads=heads, kv_heads=kv_heads, dim=256)


@pytest.mark.gpu
@ON_GEMMA
def test_attention_padding_of_gemma_in_bfloat16(sizes: dict[str, int]) -> None:
    check_attention_padding(torch.bfloat16, **sizes | ({"window": 40} if "window" in sizes else {}))


@pytest.mark.gpu
@DELTA_HEADS
def test_delta_rule_padding_in_bfloat16(key_heads: int, heads: int) -> None:
    check_delta_padding(torch.bfloat16, key_heads=key_heads, heads=heads, dim=128)


# Offsets beyond 32 bits

ROUND: list[Shape] = [(130, [3, 0, 66]), (2, [4])]


@pytest.fixture
def gpu_memory() -> Iterator[Callable[[int], None]]:
    """``gpu_memory(n)`` skips the test where fewer than n GiB are free. What the test takes is given back."""

    def need(gib: int) -> None:
        gc.collect()
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0] >> 30
        if free < gib:
            pytest.skip(f"needs {gib} GiB of GPU memory, {free} are free")

    yield need
    gc.collect()
    torch.cuda.empty_cache()


def same_rows_apart(x_TX: Tensor) -> Tensor:
    """The same rows so far apart that from row 100 on their offsets need 64 bits."""
    apart = x_TX.new_empty(x_TX.shape[0], BEYOND // 100 // 16 * 16)
    apart[:, : x_TX.shape[1]] = x_TX
    return apart[:, : x_TX.shape[1]]


@pytest.mark.gpu
def test_attention_of_rows_far_apart(gpu_memory: Callable[[int], None]) -> None:
    gpu_memory(16)
    meta, (heads, kv_heads, dim) = pack(ROUND), (24, 4, 256)
    layer = attention_layer(meta, torch.bfloat16, heads=heads, kv_heads=kv_heads, dim=dim, seed=3)
    near = [layer.kernel(meta, rows) for rows in (None, meta.readout_rows)]
    merged = same_rows_apart(torch.cat([x.flatten(1) for x in (layer.query, layer.key, layer.value)], 1))
    layer.query, layer.key, layer.value = merged.unflatten(1, (-1, dim)).split([heads, kv_heads, kv_heads], 1)
    assert layer.key.stride(0) * (naive.active_rows(meta) - 1) > BEYOND
    far = [layer.kernel(meta, rows) for rows in (None, meta.readout_rows)]
    assert all(torch.equal(x, y) for x, y in zip(near, far, strict=True))


@pytest.mark.gpu
def test_delta_rule_of_rows_far_apart(gpu_memory: Callable[[int], None]) -> None:
    gpu_memory(16)
    meta = pack(ROUND)
    layer = delta_layer(meta, torch.bfloat16, key_heads=16, heads=32, dim=128, seed=3)
    near = layer.kernel(meta)[0]
    merged = same_rows_apart(torch.cat([layer.qkv, layer.a, layer.b], 1))
    layer.qkv, layer.a, layer.b = merged.split([layer.qkv.shape[1], 32, 32], 1)
    assert layer.qkv.stride(0) * (naive.active_rows(meta) - 1) > BEYOND
    assert torch.equal(layer.kernel(meta)[0], near)


@pytest.mark.gpu
def test_attention_through_far_pages(gpu_memory: Callable[[int], None]) -> None:
    gpu_memory(16)
    heads, kv_heads, dim = 16, 4, 256
    cached = torch.randn(2, 2, kv_heads, PAGE_SIZE, dim, generator=torch.Generator().manual_seed(4))
    outs = []
    for first in (0, BEYOND // (2 * kv_heads * PAGE_SIZE * dim) + 1):
        pages = tuple(first + page for page in (5, 1, 4, 2))
        caches = [TrunkCache(70, slot=1, pages=pages), TrunkCache(pages=(first + 3,))]
        meta = pack(ROUND, caches=caches)
        layer = attention_layer(meta, torch.bfloat16, heads=heads, kv_heads=kv_heads, dim=dim, seed=3)
        layer.pool[list(pages[:2])] = cached.to(layer.pool)
        outs.append([layer.kernel(meta, rows) for rows in (None, meta.readout_rows)])
    assert all(torch.equal(x, y) for x, y in zip(*outs, strict=True))


@pytest.mark.gpu
def test_delta_rule_through_far_slots(gpu_memory: Callable[[int], None]) -> None:
    gpu_memory(32)
    key_heads, heads, dim = 16, 32, 128
    runs = []
    for first in (0, BEYOND // (heads * dim * dim) + 1):
        saved = [first + 2, first + 3]
        caches = [
            TrunkCache(70, slot=first + 1, pages=(0, 1, 2, 3), saves=((75, saved[0]), (200, saved[1]))),
            TrunkCache(pages=(4,)),
        ]
        meta = pack(ROUND, caches=caches)
        layer = delta_layer(meta, torch.bfloat16, key_heads=key_heads, heads=heads, dim=dim, seed=3)
        state, window = layer.state_pool[1].clone(), layer.conv_pool[1].clone()
        layer.state_pool, layer.conv_pool = (
            x.new_zeros(first + 4, *x.shape[1:]) for x in (layer.state_pool, layer.conv_pool)
        )
        layer.state_pool[first + 1], layer.conv_pool[first + 1] = state, window
        out, *pools = layer.kernel(meta)
        runs.append([out, *(pool[saved] for pool in pools)])
    assert all(torch.equal(x, y) for x, y in zip(*runs, strict=True))


@pytest.mark.gpu
def test_delta_rule_through_far_scratch(gpu_memory: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Final states of trunks and of branches with leaves."""
    gpu_memory(16)
    meta = pack([*ROUND, (5, [(66, [1, 65])])])
    layer = delta_layer(meta, torch.bfloat16, key_heads=16, heads=32, dim=128, seed=3)
    near = layer.kernel(meta)[0]
    first = BEYOND // (32 * 128 * 128) + 1
    meta.final_slots[meta.final_slots >= 0] += first
    call = test_kernels.fork_gated_delta_cached

    def with_far_scratch(*args: Any, scratch: Tensor, **options: Any) -> Tensor:
        scratch = scratch.new_full((first + len(scratch), *scratch.shape[1:]), NAN)
        return call(*args, scratch=scratch, **options)

    monkeypatch.setattr(test_kernels, "fork_gated_delta_cached", with_far_scratch)
    assert torch.equal(layer.kernel(meta)[0], near)


def behind_others(rows: int, fillers: int) -> ForkMetadata:
    """ROUND behind ``fillers`` other trunks, of ``rows`` rows in all."""
    return pack([*[(-(-rows // fillers), [])] * fillers, *ROUND])


def rows_of_round(meta: ForkMetadata, first: int) -> list[int]:
    """Stream rows of ROUND's requests, of which the first is request ``first``."""
    host = meta.to("cpu")
    return [row for i in range(len(ROUND)) for row in rows_of_request(host, first + i)]


def place(x_T: Tensor, rows: int, where: list[int]) -> Tensor:
    """``[rows, ...]``: the rows of ``x`` at the stream rows ``where``, zeros elsewhere."""
    out = x_T.new_zeros(rows, *x_T.shape[1:])
    out[where] = x_T
    return out


@pytest.mark.gpu
def test_attention_at_the_end_of_a_long_stream(gpu_memory: Callable[[int], None]) -> None:
    """Queries and outputs beyond 32-bit offsets."""
    gpu_memory(24)
    heads, kv_heads, dim = 24, 4, 256
    near_meta = pack(ROUND, padding=0)
    layer = attention_layer(near_meta, torch.bfloat16, heads=heads, kv_heads=kv_heads, dim=dim, seed=3)
    near = layer.kernel(near_meta, None)
    meta = behind_others(BEYOND // (heads * dim), fillers=64)
    near_rows, far_rows = rows_of_round(near_meta, 0), rows_of_round(meta, 64)
    rows = meta.tokens.shape[0]
    layer.query, layer.key, layer.value = (
        place(x[near_rows], rows, far_rows) for x in (layer.query, layer.key, layer.value)
    )
    assert layer.query.stride(0) * min(far_rows) >= BEYOND
    layer.pool = layer.pool.new_full((int(meta.page_table.max()) + 1, *layer.pool.shape[1:]), NAN)
    assert torch.equal(layer.kernel(meta, None)[far_rows], near[near_rows])


@pytest.mark.gpu
def test_delta_rule_at_the_end_of_a_long_stream(gpu_memory: Callable[[int], None]) -> None:
    """Rows beyond 32-bit offsets in the input, the output and every workspace, whose narrowest has CHUNK per head."""
    gpu_memory(80)
    key_heads, heads, dim = 16, 32, 128
    near_meta = pack(ROUND, padding=0)
    layer = delta_layer(near_meta, torch.bfloat16, key_heads=key_heads, heads=heads, dim=dim, seed=3)
    near = layer.kernel(near_meta)[0]
    meta = behind_others(BEYOND // (heads * CHUNK), fillers=8)
    near_rows, far_rows = rows_of_round(near_meta, 0), rows_of_round(meta, 8)
    rows = meta.tokens.shape[0]
    layer.qkv, layer.a, layer.b = (place(x[near_rows], rows, far_rows) for x in (layer.qkv, layer.a, layer.b))
    assert heads * CHUNK * min(far_rows) >= BEYOND
    assert torch.equal(layer.kernel(meta)[0][far_rows], near[near_rows])


# The same call gives the same bits

REPETITIONS = 20


def quality_round() -> ForkMetadata:
    shape = FIXED["quality_all"]
    return pack([(shape.trunk, list(shape.branches))])


@pytest.mark.gpu
@ATTENTION_HEADS
def test_attention_repeats_its_bits(heads: int, kv_heads: int) -> None:
    check_repetition(heads=heads, kv_heads=kv_heads, dim=256)


@pytest.mark.gpu
@ON_GEMMA
def test_attention_of_gemma_repeats_its_bits(sizes: dict[str, int]) -> None:
    check_repetition(**sizes)


def check_repetition(**sizes: int) -> None:
    meta = quality_round()
    layer = attention_layer(meta, torch.bfloat16, seed=5, **sizes)
    for rows in (None, meta.readout_rows):
        first = layer.kernel(meta, rows)
        assert all(torch.equal(layer.kernel(meta, rows), first) for _ in range(REPETITIONS - 1))


@pytest.mark.gpu
@DELTA_HEADS
def test_delta_rule_repeats_its_bits(key_heads: int, heads: int) -> None:
    meta = quality_round()
    layer = delta_layer(meta, torch.bfloat16, key_heads=key_heads, heads=heads, dim=128, seed=5)
    first = layer.kernel(meta)[0]
    assert all(torch.equal(layer.kernel(meta)[0], first) for _ in range(REPETITIONS - 1))
