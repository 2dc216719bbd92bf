"""The forked gated delta rule against the recurrence, token by token along each isolated path."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from flide.ops import fork_gated_delta, fork_gated_delta_cached
from flide.runtime import ForkMetadata, StreamCapacity, TrunkCache
from tests.ops.naive import (
    BRANCHES,
    SMALL_TREES,
    TREES,
    TRUNKS,
    DeltaInputs,
    Shape,
    active_rows,
    leaf_segments,
    naive_delta_path,
    naive_gated_delta,
    pack,
    relative_error,
    rows_of_path,
    rows_of_request,
    same_bits,
    shuffled_pages,
)
from tests.tolerance import FP32_RELATIVE, FP64, LOW_PRECISION_BUDGET

HEADS: dict[str, Any] = {"num_key_heads": 2, "key_dim": 4}  # beside N = 4 value heads of V = 6
RESUME_TOTAL = 210  # tokens of the trunk that the resume tests cut
NAMES = DeltaInputs._fields
trees = pytest.mark.parametrize("shapes", TREES.values(), ids=TREES.keys())
small_trees = pytest.mark.parametrize("shapes", SMALL_TREES.values(), ids=SMALL_TREES.keys())


def random_inputs(
    rows: int,
    *,
    num_key_heads: int = 2,
    heads: int = 4,
    key_dim: int = 4,
    value_dim: int = 6,
    width: int = 4,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> DeltaInputs:
    """Decay factors from about 0.2 to 0.99; A_log is never of lower precision than float32."""
    generator = torch.Generator().manual_seed(seed)
    channels = 2 * num_key_heads * key_dim + heads * value_dim
    shapes = (rows, channels), (rows, heads), (rows, heads), (channels, width), (heads,), (heads,)
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    drawn[3] *= width**-0.5
    inputs = DeltaInputs(*drawn[:4], drawn[4] * 0.7 - 1.5, drawn[5] * 0.5)
    cast = DeltaInputs(*(x.to(dtype) for x in inputs))
    return cast if dtype.itemsize > 2 else cast._replace(A_log_N=inputs.A_log_N.float())


def delta(inputs: DeltaInputs, meta: ForkMetadata, **options: Any) -> Tensor:
    qkv, a, b, conv_weight, A_log, dt_bias = inputs
    return fork_gated_delta(
        qkv,
        a,
        b,
        conv_weight_CW=conv_weight,
        A_log_N=A_log,
        dt_bias_N=dt_bias,
        segment_offsets=meta.segment_offsets,
        segment_parents=meta.segment_parents,
        **{**HEADS, **options},
    )


def delta_cached(
    inputs: DeltaInputs, meta: ForkMetadata, state_pool: Tensor, conv_pool: Tensor, **options: Any
) -> Tensor:
    qkv, a, b, conv_weight, A_log, dt_bias = inputs
    return fork_gated_delta_cached(
        qkv,
        a,
        b,
        conv_weight_CW=conv_weight,
        A_log_N=A_log,
        dt_bias_N=dt_bias,
        state_pool=state_pool,
        conv_pool=conv_pool,
        scratch=state_pool[:0].float(),
        segment_offsets=meta.segment_offsets,
        segment_parents=meta.segment_parents,
        initial_slots=meta.initial_slots,
        final_slots=meta.final_slots,
        row_segments=meta.row_segments,
        save_rows=meta.save_rows,
        save_slots=meta.save_slots,
        **{**HEADS, **options},
    )


def pools(inputs: DeltaInputs, *, slots: int = 12, canary: float | None = None) -> tuple[Tensor, Tensor]:
    """State and conv pools (float64, so that a checkpoint loses nothing); slot 0 zero, the others random or canary."""
    channels, width = inputs.conv_weight_CW.shape
    heads = len(inputs.A_log_N)
    value_dim = (channels - 2 * HEADS["num_key_heads"] * HEADS["key_dim"]) // heads
    generator = torch.Generator().manual_seed(7)
    shapes = (slots, heads, HEADS["key_dim"], value_dim), (slots, width - 1, channels)
    made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    for pool in made:
        if canary is not None:
            pool.fill_(canary)
        pool[0] = 0
    return made[0], made[1]


def cache(length: int, total: int, *, slot: int | None = None, saves: tuple[tuple[int, int], ...] = ()) -> TrunkCache:
    """A trunk that resumes after ``length`` of ``total`` tokens (from slot 1 unless told)."""
    (pages,) = shuffled_pages([total], pool_pages=8)
    return TrunkCache(length, slot=int(length > 0) if slot is None else slot, pages=pages, saves=saves)


# What every row gets.


@trees
@pytest.mark.parametrize("padding", [0, 5], ids=["exact", "padded"])
def test_every_row_follows_its_isolated_path(shapes: list[Shape], padding: int) -> None:
    meta = pack(shapes, padding=padding)
    inputs = random_inputs(meta.capacity.tokens)
    expected = naive_gated_delta(inputs, meta, **HEADS)
    assert relative_error(delta(inputs, meta), expected) <= FP64
    single = DeltaInputs(*(x.float() for x in inputs))
    assert relative_error(delta(single, meta), expected) <= FP32_RELATIVE


@pytest.mark.parametrize("width", [1, 2, 4], ids=lambda w: f"width_{w}")
@pytest.mark.parametrize("beta_scale", [1.0, 2.0], ids=lambda b: f"beta_{b:.0f}")
@pytest.mark.parametrize(
    ("num_key_heads", "heads", "key_dim", "value_dim"),
    [(1, 1, 8, 8), (3, 3, 4, 2), (1, 4, 2, 5)],
    ids=["square", "wide_keys", "four_values_per_key"],
)
def test_head_layouts_widths_and_beta(
    num_key_heads: int, heads: int, key_dim: int, value_dim: int, beta_scale: float, width: int
) -> None:
    meta = pack([(2, [1, 4]), (0, [(1, [2, 3]), 1]), (66, [2])], padding=2)
    sizes = {"num_key_heads": num_key_heads, "key_dim": key_dim}
    inputs = random_inputs(meta.capacity.tokens, heads=heads, value_dim=value_dim, width=width, **sizes)
    expected = naive_gated_delta(inputs, meta, beta_scale=beta_scale, **sizes)
    assert relative_error(delta(inputs, meta, beta_scale=beta_scale, **sizes), expected) <= FP64


@pytest.mark.parametrize("log_rate", [-20.0, 4.0], ids=["no_decay", "total_decay"])
def test_extreme_decays_stay_finite(log_rate: float) -> None:
    meta = pack([(130, [5, 65])])
    inputs = random_inputs(meta.capacity.tokens)
    inputs = inputs._replace(A_log_N=torch.full_like(inputs.A_log_N, log_rate))
    expected = naive_gated_delta(inputs, meta, **HEADS)
    single = delta(DeltaInputs(*(x.float() for x in inputs)), meta)
    assert relative_error(delta(inputs, meta), expected) <= FP64
    assert single.isfinite().all()


@small_trees
def test_views_of_a_merged_projection_equal_contiguous_inputs(shapes: list[Shape]) -> None:
    meta = pack(shapes, padding=2)
    inputs = random_inputs(meta.capacity.tokens)
    channels = inputs.qkv_TC.shape[1]
    merged = torch.cat([inputs.b_TN, inputs.qkv_TC, inputs.a_TN], -1)
    b, qkv, a = merged.split([4, channels, 4], -1)
    conv_weight = inputs.conv_weight_CW.T.contiguous().T
    assert not qkv.is_contiguous()
    out = delta(inputs._replace(qkv_TC=qkv, a_TN=a, b_TN=b, conv_weight_CW=conv_weight), meta)
    assert out.is_contiguous()
    assert (
        relative_error(out, delta(inputs, meta)) <= FP64
    )  # not the same bits: strided pointwise loops round otherwise


@pytest.mark.parametrize("poison", [float("nan"), float("inf")], ids=["nan", "inf"])
@small_trees
def test_padding_is_zero_and_inert(shapes: list[Shape], poison: float) -> None:
    meta = pack(shapes, padding=6)
    active = active_rows(meta)
    inputs = random_inputs(meta.capacity.tokens, dtype=torch.float32)
    clean = delta(inputs, meta)
    for x in inputs[:3]:
        x[active:] = poison
    out = delta(inputs, meta)
    assert (out[active:] == 0).all()
    assert same_bits(out[:active], clean[:active])


@pytest.mark.parametrize("poison", [float("nan"), float("inf")], ids=["nan", "inf"])
@pytest.mark.parametrize(
    "segment", [0, 1, 3, 4, 9], ids=["request", "other_request", "branch", "branch_with_leaves", "leaf"]
)
def test_other_requests_and_siblings_keep_their_bits(segment: int, poison: float) -> None:
    meta = pack([(6, [3, (5, [1, 4])]), (2, [2, 1, 66])])
    poisoned = rows_of_request(meta, segment)
    inputs = random_inputs(meta.capacity.tokens, dtype=torch.float32)
    clean = delta(inputs, meta)
    for x in inputs[:3]:
        x[poisoned] = poison
    others = [row for row in range(active_rows(meta)) if row not in poisoned]
    out = delta(inputs, meta)
    assert same_bits(out[others], clean[others])
    assert out[poisoned].isnan().any(-1).all()


def test_a_stream_without_active_rows_is_zero() -> None:
    meta = ForkMetadata.allocate(StreamCapacity(4, 3, 1))
    inputs = DeltaInputs(*(x.requires_grad_() for x in random_inputs(4)))
    out = delta(inputs, meta)
    assert (out == 0).all()
    out.sum().backward()
    assert all((x.grad == 0).all() for x in inputs)


# Checkpoints.


@trees
def test_fresh_trunks_with_pools_equal_the_functional_op(shapes: list[Shape]) -> None:
    meta = pack(shapes, padding=3)
    inputs = random_inputs(meta.capacity.tokens)
    state_pool, conv_pool = pools(inputs)
    before = state_pool.clone(), conv_pool.clone()
    assert torch.equal(delta_cached(inputs, meta, state_pool, conv_pool), delta(inputs, meta))
    assert torch.equal(state_pool, before[0])
    assert torch.equal(conv_pool, before[1])


@pytest.mark.parametrize("length", [1, 2, 3, 63, 64, 65, 127, 128, 129, 200, RESUME_TOTAL])
def test_resumed_trunk_equals_a_fresh_one(length: int) -> None:
    branches = [1, (3, [2])]
    fresh = pack([(RESUME_TOTAL, branches)], caches=[cache(0, RESUME_TOTAL, saves=((length, 1),))])
    inputs = random_inputs(fresh.capacity.tokens)
    state_pool, conv_pool = pools(inputs, canary=float("nan"))
    expected = delta_cached(inputs, fresh, state_pool, conv_pool)
    run = naive_delta_path(inputs.rows(slice(RESUME_TOTAL)), **HEADS)
    assert relative_error(state_pool[1], run.states[length - 1]) <= FP64
    assert torch.equal(conv_pool[1], run.windows[length - 1])

    resumed = pack([(RESUME_TOTAL - length, branches)], caches=[cache(length, RESUME_TOTAL)])
    out = delta_cached(inputs.rows(slice(length, None)), resumed, state_pool, conv_pool)
    assert relative_error(out, expected[length:]) <= FP64


def test_several_saves_in_one_trunk() -> None:
    saves = ((64, 5), (2, 3), (65, 8), (70, 1))
    meta = pack([(70, [2])], caches=[cache(0, 70, saves=saves)])
    inputs = random_inputs(meta.capacity.tokens)
    state_pool, conv_pool = pools(inputs)
    before = state_pool.clone(), conv_pool.clone()
    out = delta_cached(inputs, meta, state_pool, conv_pool)
    assert torch.equal(out, delta(inputs, meta))
    run = naive_delta_path(inputs.rows(slice(70)), **HEADS)
    for length, slot in saves:
        assert relative_error(state_pool[slot], run.states[length - 1]) <= FP64
        assert torch.equal(conv_pool[slot], run.windows[length - 1])
    others = [slot for slot in range(len(state_pool)) if slot not in dict(saves).values()]
    assert same_bits(state_pool[others], before[0][others])
    assert same_bits(conv_pool[others], before[1][others])
    assert not state_pool[0].any()
    assert not conv_pool[0].any()


def test_saves_of_many_requests_go_to_their_own_slots() -> None:
    news = [(7 * i) % 67 for i in range(40)]  # more than one batch of the reference; fresh, empty and resumed trunks
    caches = []
    for i, new in enumerate(news):
        old = i % 3
        saves = ((old + max(1, new - i % 2), 41 + i),) if new else ()
        caches.append(cache(old, old + new, slot=1 + i if old else 0, saves=saves))
    meta = pack([(new, [1 + i % 2]) for i, new in enumerate(news)], padding=2, caches=caches)
    inputs = random_inputs(meta.capacity.tokens)
    state_pool, conv_pool = pools(inputs, slots=90)
    before = state_pool.clone(), conv_pool.clone()
    out = delta_cached(inputs, meta, state_pool, conv_pool)
    for i, trunk in enumerate(caches):
        start = {"state_NKV": before[0][trunk.slot], "window_WC": before[1][trunk.slot]}
        path = rows_of_path(meta, len(news) + i)
        run = naive_delta_path(inputs.rows(path), **HEADS, **start)
        assert relative_error(out[path], run.out_LNV) <= FP64
        for length, slot in trunk.saves:
            assert relative_error(state_pool[slot], run.states[length - trunk.length - 1]) <= FP64
            assert torch.equal(conv_pool[slot], run.windows[length - trunk.length - 1])
    kept = [slot for slot in range(90) if slot not in {slot for trunk in caches for _, slot in trunk.saves}]
    assert same_bits(state_pool[kept], before[0][kept])
    assert same_bits(conv_pool[kept], before[1][kept])


@pytest.mark.parametrize("cuts", [(1, 2), (1, 3, 64), (2, 3, 4, 5), (64, 65, 128, 200)], ids=str)
def test_chain_of_resumes_equals_a_fresh_trunk(cuts: tuple[int, ...]) -> None:
    inputs = random_inputs(RESUME_TOTAL)
    state_pool, conv_pool = pools(inputs, canary=float("nan"))
    outs = []
    for slot, (begin, end) in enumerate(zip((0, *cuts), (*cuts, RESUME_TOTAL), strict=True)):
        saves = ((end, slot + 1),) if end < RESUME_TOTAL else ()
        meta = pack([(end - begin, [])], caches=[cache(begin, end, slot=slot, saves=saves)])
        outs.append(delta_cached(inputs.rows(slice(begin, end)), meta, state_pool, conv_pool))
    assert relative_error(torch.cat(outs), delta(inputs, pack([(RESUME_TOTAL, [])]))) <= FP64


@pytest.mark.parametrize("width", [2, 4], ids=lambda w: f"width_{w}")
@pytest.mark.parametrize("resumed_at", [1, 2, 3])
@pytest.mark.parametrize("new", [0, 1, 2, 3])
def test_conv_window_reaches_past_short_trunks(new: int, resumed_at: int, width: int) -> None:
    branches: list[Any] = [1, 2, (1, [1, 5]), (0, [3])]
    total = resumed_at + new
    saves = ((total, 2),) if new else ()
    fresh = pack([(total, branches)])
    inputs = random_inputs(fresh.capacity.tokens, width=width)
    expected = naive_gated_delta(inputs, fresh, **HEADS)
    state_pool, conv_pool = pools(inputs, canary=float("nan"))
    first = pack([(resumed_at, [2])], caches=[cache(0, resumed_at, saves=((resumed_at, 1),))])
    rows = [*range(resumed_at), *range(total, total + 2)]
    delta_cached(inputs.rows(rows), first, state_pool, conv_pool)
    second = pack([(new, branches)], caches=[cache(resumed_at, total, saves=saves)])
    out = delta_cached(inputs.rows(slice(resumed_at, None)), second, state_pool, conv_pool)
    assert relative_error(out, expected[resumed_at:]) <= FP64
    if new:
        run = naive_delta_path(inputs.rows(slice(total)), **HEADS)
        assert torch.equal(conv_pool[2], run.windows[-1])
        assert relative_error(state_pool[2], run.states[-1]) <= FP64


def test_poison_in_one_request_stays_out_of_other_slots() -> None:
    caches = [cache(0, 66, saves=((66, 1), (3, 2))), cache(0, 5, saves=((5, 3), (2, 4)))]
    meta = pack([(66, [3]), (5, [4])], caches=caches)
    inputs = random_inputs(meta.capacity.tokens, dtype=torch.float32)
    clean, poisoned = pools(inputs), pools(inputs)
    expected = delta_cached(inputs, meta, *clean)
    for x in inputs[:3]:
        x[rows_of_request(meta, 0)] = float("nan")
    others = rows_of_request(meta, 1)
    assert same_bits(delta_cached(inputs, meta, *poisoned)[others], expected[others])
    for pool, same in zip(poisoned, clean, strict=True):
        assert same_bits(pool[3:], same[3:])
        assert pool[1].isnan().any()
        assert not pool[0].any()


# Gradients.


@pytest.mark.parametrize("beta_scale", [1.0, 2.0], ids=lambda b: f"beta_{b:.0f}")
@pytest.mark.parametrize("fast", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["projected", "whole"])
def test_gradients_match_finite_differences(fast: bool, beta_scale: float) -> None:
    meta = pack([(2, [1, (1, [2])]), (0, [1])], padding=1)
    sizes = {"num_key_heads": 1, "key_dim": 2}
    inputs = random_inputs(meta.capacity.tokens, heads=2, value_dim=3, width=3, **sizes)

    def op(*x: Tensor) -> Tensor:
        return delta(DeltaInputs(*x), meta, beta_scale=beta_scale, **sizes)

    assert torch.autograd.gradcheck(op, [x.requires_grad_() for x in inputs], fast_mode=fast)


@pytest.mark.parametrize("rows", [(5, 2, 5, 7), (0, 6)], ids=str)
def test_gradients_of_some_rows_match_finite_differences(rows: tuple[int, ...]) -> None:
    meta = pack([(2, [1, (1, [2])]), (0, [1])], padding=1)
    inputs = random_inputs(meta.capacity.tokens)

    def op(*x: Tensor) -> Tensor:
        return delta(DeltaInputs(*x), meta).index_select(0, torch.tensor(rows, dtype=torch.int32))

    assert torch.autograd.gradcheck(op, [x.requires_grad_() for x in inputs], fast_mode=True)


@small_trees
def test_gradients_are_sums_over_isolated_paths(shapes: list[Shape]) -> None:
    meta = pack(shapes, padding=2)
    inputs = DeltaInputs(*(x.requires_grad_() for x in random_inputs(meta.capacity.tokens)))
    cotangent = torch.randn(meta.capacity.tokens, 4, 6, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    expected = [torch.zeros_like(x) for x in inputs]
    used = torch.zeros(meta.capacity.tokens, 1, 1, dtype=torch.float64)
    for leaf in leaf_segments(meta):
        path = rows_of_path(meta, leaf)
        own = path[-int(meta.segment_offsets[leaf + 1] - meta.segment_offsets[leaf]) :]
        used[own] = 1
        isolated = DeltaInputs(*(x.detach().requires_grad_() for x in inputs))
        out = naive_delta_path(isolated.rows(path), **HEADS).out_LNV[-len(own) :]
        for total, gradient in zip(expected, torch.autograd.grad(out, isolated, cotangent[own]), strict=True):
            total += gradient
    gradients = torch.autograd.grad(delta(inputs, meta), inputs, cotangent * used)
    for gradient, total in zip(gradients, expected, strict=True):
        assert relative_error(gradient, total) <= FP64


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (3,), (4,), (5,), (0, 4)], ids=str)
def test_inputs_may_do_without_gradients(wanted: tuple[int, ...]) -> None:
    meta = pack([(3, [2, 1])])
    full = DeltaInputs(*(x.requires_grad_() for x in random_inputs(meta.capacity.tokens)))
    expected = torch.autograd.grad(delta(full, meta).square().sum(), full)
    some = DeltaInputs(*(x.detach().requires_grad_(i in wanted) for i, x in enumerate(full)))
    delta(some, meta).square().sum().backward()
    for i, x in enumerate(some):
        assert (x.grad is None) == (i not in wanted)
        assert x.grad is None or torch.equal(x.grad, expected[i])


def test_gradients_survive_a_dispatch_mode() -> None:
    meta = pack([(3, [2, 1])])
    inputs = DeltaInputs(*(x.requires_grad_() for x in random_inputs(meta.capacity.tokens)))
    expected = torch.autograd.grad(delta(inputs, meta).square().sum(), inputs)
    with FlopCounterMode(display=False):
        gradients = torch.autograd.grad(delta(inputs, meta).square().sum(), inputs)
    for gradient, same in zip(gradients, expected, strict=True):
        assert torch.equal(gradient, same)


@pytest.mark.parametrize("name", NAMES)
def test_training_through_pools_is_refused(name: str) -> None:
    meta = pack([(3, [2, 1])])
    inputs = random_inputs(meta.capacity.tokens)
    getattr(inputs, name).requires_grad_()
    with pytest.raises(RuntimeError, match="no gradient"):
        delta_cached(inputs, meta, *pools(inputs))
    with torch.no_grad():
        assert not delta_cached(inputs, meta, *pools(inputs)).requires_grad


# The ops as torch sees them.


def op_arguments(name: str, *, layout: str = "contiguous", dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    """Positional arguments of ``torch.ops.flide.<name>``."""
    caches = [cache(2, 5, saves=((4, 2), (5, 3))), cache(0, 0)]
    meta = pack([(3, [2, 1]), (0, [4])], padding=2, caches=caches)
    inputs = random_inputs(meta.capacity.tokens, dtype=dtype)
    grad = torch.randn(meta.capacity.tokens, 4, 6, generator=torch.Generator().manual_seed(1)).to(dtype)
    if layout == "split":
        qkv, a, b = torch.cat(inputs[:3], -1).split([inputs.qkv_TC.shape[1], 4, 4], -1)
        inputs, grad = inputs._replace(qkv_TC=qkv, a_TN=a, b_TN=b), torch.cat([grad, grad], -1)[..., :6]
    elif layout == "transposed":
        inputs = DeltaInputs(*(x.T.contiguous().T if x.ndim == 2 else x for x in inputs))
        grad = grad.transpose(0, 1).contiguous().transpose(0, 1)
    tree, sizes = (meta.segment_offsets, meta.segment_parents), (*HEADS.values(), 1.0)
    if name == "fork_gated_delta":
        return *inputs, *tree, *sizes
    if name == "fork_gated_delta_backward":
        return grad, *inputs, *tree, *sizes
    state_pool, conv_pool = pools(inputs)
    scratch = torch.zeros(2, *state_pool.shape[1:])
    slots = (meta.initial_slots, meta.final_slots, meta.row_segments, meta.save_rows, meta.save_slots)
    return *inputs, state_pool.float(), conv_pool.to(dtype), scratch, *tree, *slots, [], *sizes, 3


OPS = ("fork_gated_delta", "fork_gated_delta_backward", "fork_gated_delta_cached")


@pytest.mark.parametrize("name", OPS)
def test_op_registration(name: str) -> None:
    arguments = op_arguments(name)
    torch.library.opcheck(getattr(torch.ops.flide, name), arguments)
    if name == "fork_gated_delta":
        trained = [x.requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x for x in arguments]
        torch.library.opcheck(torch.ops.flide.fork_gated_delta, tuple(trained))


@pytest.mark.parametrize("layout", ["contiguous", "split", "transposed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", OPS)
def test_fake_outputs_look_like_real_ones(name: str, dtype: torch.dtype, layout: str) -> None:
    arguments, op = op_arguments(name, layout=layout, dtype=dtype), getattr(torch.ops.flide, name)
    with FakeTensorMode() as mode:
        fakes = op(*(mode.from_tensor(x) if isinstance(x, Tensor) else x for x in arguments))
    reals = op(*arguments)
    for fake, real in zip(*((x,) if isinstance(x, Tensor) else x for x in (fakes, reals)), strict=True):
        assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)
        assert real.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("cached", [False, True], ids=["functional", "pools"])
def test_low_precision_costs_no_more_than_its_rounding(dtype: torch.dtype, cached: bool) -> None:
    meta = pack([(130, [5, 64]), (3, [2, 1])])
    inputs, rounded = (random_inputs(meta.capacity.tokens, dtype=d) for d in (torch.float64, dtype))
    exact = naive_gated_delta(inputs, meta, **HEADS)
    best = naive_gated_delta(DeltaInputs(*(x.double() for x in rounded)), meta, **HEADS).to(dtype)
    out = delta_cached(rounded, meta, *pools(inputs)) if cached else delta(rounded, meta)
    assert out.dtype == dtype
    assert relative_error(out, exact) <= LOW_PRECISION_BUDGET * relative_error(best, exact)


COMPILED_TREES: list[list[Shape]] = [[(3, [2, 1]), (0, [4])], [(10, [])], [(1, [(1, [1, 2]), 3])], [(0, [2, 2, 2])]]


def same_capacity(shapes: list[Shape], *, tokens: int = 14) -> ForkMetadata:
    """A round of one capacity whose trunks save after their last token."""
    saves = [((length, 2 + i),) if length else () for i, (length, _) in enumerate(shapes)]
    caches = [TrunkCache(saves=s) for s in saves]
    return pack(shapes, capacity=StreamCapacity(tokens, 7, 5, 4, depth=3), caches=caches)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_one_compilation_serves_every_tree(fresh_compiler: None, dynamic: bool) -> None:
    def both(inputs: DeltaInputs, state: Tensor, conv: Tensor, meta: ForkMetadata) -> tuple[Tensor, Tensor]:
        doubled = inputs._replace(qkv_TC=inputs.qkv_TC * 2)
        return delta_cached(doubled, meta, state, conv) + 1, delta(inputs, meta).index_select(0, meta.readout_rows)

    compiled = torch.compile(both, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for k, shapes in enumerate(COMPILED_TREES):
        meta = same_capacity(shapes, tokens=14 + 3 * k if dynamic else 14)
        inputs = random_inputs(meta.capacity.tokens, dtype=torch.float32, seed=k)
        state, conv = pools(inputs)
        twins = state.clone(), conv.clone()
        with torch.compiler.set_stance("fail_on_recompile" if k else "default"):
            out = compiled(inputs, state, conv, meta)
        for actual, expected in zip(out, both(inputs, *twins, meta), strict=True):
            assert torch.equal(actual, expected)
        assert torch.equal(state, twins[0])
        assert torch.equal(conv, twins[1])


def test_training_under_compile_gives_the_same_gradients(fresh_compiler: None) -> None:
    def loss(inputs: DeltaInputs, meta: ForkMetadata) -> Tensor:
        scaled = inputs._replace(qkv_TC=inputs.qkv_TC * 1.5)
        return (delta(scaled, meta, beta_scale=2.0) * inputs.b_TN[..., None]).square().mean()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for k, shapes in enumerate(COMPILED_TREES):
        meta = same_capacity(shapes)
        drawn = random_inputs(meta.capacity.tokens, dtype=torch.float32, seed=k)
        inputs = DeltaInputs(*(x.requires_grad_() for x in drawn))
        with torch.compiler.set_stance("fail_on_recompile" if k else "default"):
            gradients = torch.autograd.grad(compiled(inputs, meta), inputs)
        for actual, expected in zip(gradients, torch.autograd.grad(loss(inputs, meta), inputs), strict=True):
            assert relative_error(actual, expected) <= FP32_RELATIVE


# Sweeps.


@pytest.mark.slow
@pytest.mark.parametrize("trunk", TRUNKS)
@pytest.mark.parametrize("width", [2, 4], ids=lambda w: f"width_{w}")
def test_sweep_of_lengths(trunk: int, width: int) -> None:
    meta = pack([(trunk, list(BRANCHES)), (1, [2]), (trunk, [(branch, [1, 3]) for branch in BRANCHES])], padding=3)
    inputs = random_inputs(meta.capacity.tokens, width=width)
    expected = naive_gated_delta(inputs, meta, beta_scale=2.0, **HEADS)
    assert relative_error(delta(inputs, meta, beta_scale=2.0), expected) <= FP64
    single = DeltaInputs(*(x.float() for x in inputs))
    assert relative_error(delta(single, meta, beta_scale=2.0), expected) <= FP32_RELATIVE


lengths = st.integers(0, 9) | st.sampled_from([63, 64, 65])
shapes_of_any_depth = st.lists(
    st.tuples(lengths, st.lists(lengths | st.tuples(lengths, st.lists(lengths, max_size=3)), max_size=4)),
    min_size=1,
    max_size=4,
).filter(lambda shapes: any(leaf_segments(pack(shapes))))


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(shapes_of_any_depth, st.sampled_from([1, 2, 4]), st.integers(0, 5))
def test_any_tree(shapes: list[Shape], width: int, padding: int) -> None:
    meta = pack(shapes, padding=padding)
    inputs = random_inputs(meta.capacity.tokens, width=width)
    assert relative_error(delta(inputs, meta), naive_gated_delta(inputs, meta, **HEADS)) <= FP64


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_chain_of_checkpoints(data: st.DataObject) -> None:
    total = data.draw(st.integers(2, 140), label="total")
    cuts = sorted(data.draw(st.sets(st.integers(1, total - 1), min_size=1, max_size=6), label="cuts"))
    inputs = random_inputs(total)
    state_pool, conv_pool = pools(inputs, canary=float("nan"))
    run = naive_delta_path(inputs, **HEADS)
    begin, slot = 0, 0
    while begin < total:
        end = data.draw(st.sampled_from([c for c in cuts if c > begin] + [total]), label="end")
        saves = tuple((c, 1 + i) for i, c in enumerate(cuts) if begin < c <= end)[-4:]
        meta = pack([(end - begin, [])], caches=[cache(begin, end, slot=slot, saves=saves)])
        out = delta_cached(inputs.rows(slice(begin, end)), meta, state_pool, conv_pool)
        assert relative_error(out, run.out_LNV[begin:end]) <= FP64
        for length, saved in saves:
            assert relative_error(state_pool[saved], run.states[length - 1]) <= FP64
            assert torch.equal(conv_pool[saved], run.windows[length - 1])
        if not saves:
            break
        begin, slot = saves[-1]
