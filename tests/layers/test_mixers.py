"""Mixers: row selection, subclasses, windows and pools."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flide.layers import (
    ForkAttention,
    ForkAttentionReader,
    ForkGatedDeltaNet,
    GatedForkAttention,
    RMSNorm,
    RotaryEmbedding,
    RotaryTables,
    apply_rotary,
)
from flide.runtime import ForkMetadata, StreamCapacity, TokenTree, TrunkCache
from tests.ops.naive import (
    SMALL_TREES,
    DeltaInputs,
    Shape,
    active_rows,
    naive_attention,
    naive_gated_delta,
    pack,
    relative_error,
    shuffled_pages,
)
from tests.tolerance import FP32_RELATIVE

SIZE, HEADS, KV_HEADS, HEAD_DIM = 32, 4, 2, 16
POOL_PAGES = 12
small_trees = pytest.mark.parametrize("shapes", SMALL_TREES.values(), ids=SMALL_TREES.keys())


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """The tensors are tiny: waking a second thread for them costs more than it saves."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class NormedAttention(ForkAttention):
    """Differences from ForkAttention: RMSNorm on queries and keys, as subclasses of real families set it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.q_norm = RMSNorm(self.head_dim, 1e-6)
        self.k_norm = RMSNorm(self.head_dim, 1e-6)


class SharedKeyValue(ForkAttention):
    """Differences from ForkAttention: values are the keys, before their norm and rotation."""

    def project_key_value(self, hidden_states_TD: Tensor) -> tuple[Tensor, Tensor]:
        key_TMH = self.k_proj(hidden_states_TD).unflatten(-1, (-1, self.head_dim))
        return key_TMH, key_TMH


class OneProjection(ForkAttention):
    """Differences from ForkAttention: there is no ``v_proj``; queries, keys and values pass norms."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, value_proj=False, **options)
        self.q_norm, self.k_norm = RMSNorm(self.head_dim, 1e-6), RMSNorm(self.head_dim, 1e-6)
        self.v_norm = RMSNorm(self.head_dim, 1e-6, elementwise_affine=False)


class BiasedAttention(ForkAttention):
    """Differences from ForkAttention: the query projection has a bias."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.q_proj = nn.Linear(self.q_proj.in_features, self.q_proj.out_features, bias=True)


def attention(kind: type[ForkAttention], **options: Any) -> ForkAttention:
    return kind(SIZE, HEADS, KV_HEADS, HEAD_DIM, **options)


MIXERS: dict[str, Callable[[], nn.Module]] = {
    "attention": lambda: attention(ForkAttention),
    "window": lambda: attention(ForkAttention, window=5),
    "scale": lambda: attention(ForkAttention, scale=1.0),
    "gated": lambda: attention(GatedForkAttention),
    "gated_window": lambda: attention(GatedForkAttention, window=3),
    "normed": lambda: attention(NormedAttention),
    "shared_key_value": lambda: attention(SharedKeyValue),
    "one_projection": lambda: attention(OneProjection),
    "biased": lambda: attention(BiasedAttention),
    "delta": lambda: ForkGatedDeltaNet(SIZE, 2, 4, 8, 12),
    "delta_width_2": lambda: ForkGatedDeltaNet(SIZE, 1, 4, 8, 4, conv_width=2, beta_scale=2.0),
}
mixers = pytest.mark.parametrize("make", MIXERS.values(), ids=MIXERS.keys())


def randomised(mixer: nn.Module) -> Any:
    generator = torch.Generator().manual_seed(0)
    for parameter in mixer.parameters():
        std = 0.5 if parameter.ndim == 1 else parameter[0].numel() ** -0.5
        parameter.data.normal_(std=std, generator=generator)
    return mixer.requires_grad_(False)


def round_of(meta: ForkMetadata) -> tuple[Tensor, RotaryTables]:
    """Hidden states of every row, and rotary tables of its positions."""
    hidden = torch.randn(meta.capacity.tokens, SIZE, generator=torch.Generator().manual_seed(1))
    return hidden, RotaryEmbedding(8, 1e4, sections=(2, 1, 1))(meta.positions)


@mixers
@small_trees
def test_query_rows_select_from_the_full_computation(make: Callable[[], nn.Module], shapes: list[Shape]) -> None:
    meta = pack(shapes, padding=3)
    mixer = randomised(make())
    hidden, rotary = round_of(meta)
    full = mixer(hidden, rotary, meta)
    assert full.shape == hidden.shape
    repeated = torch.tensor([1, 0, 1, active_rows(meta) - 1], dtype=torch.int32)
    for rows in (meta.readout_rows, repeated):
        assert relative_error(mixer(hidden, rotary, meta, rows), full[rows]) <= FP32_RELATIVE


@pytest.mark.parametrize("window", [0, 3, 64])
@pytest.mark.parametrize("rotated", [True, False], ids=["rotated", "unrotated"])
@pytest.mark.parametrize(
    "kind", [ForkAttention, NormedAttention, SharedKeyValue, OneProjection, BiasedAttention, GatedForkAttention]
)
def test_attention_is_projection_then_path_attention(kind: type[ForkAttention], rotated: bool, window: int) -> None:
    meta = pack([(5, [3, (66, [1, 4])]), (2, [1])], padding=2)
    mixer = randomised(attention(kind, window=window))
    hidden, tables = round_of(meta)
    rotary = tables if rotated else None

    query, gate = mixer.q_proj(hidden).unflatten(-1, (HEADS, -1)), None
    if kind is GatedForkAttention:
        query, gate = query[..., :HEAD_DIM], query[..., HEAD_DIM:]
    key = (hidden @ mixer.k_proj.weight.T).unflatten(-1, (KV_HEADS, HEAD_DIM))
    values_are_keys = kind in (SharedKeyValue, OneProjection)
    value = key if values_are_keys else (hidden @ mixer.v_proj.weight.T).unflatten(-1, (KV_HEADS, HEAD_DIM))
    if kind is OneProjection:
        value = nn.functional.rms_norm(value, (HEAD_DIM,), None, 1e-6)
    if kind in (NormedAttention, OneProjection):
        query, key = (
            nn.functional.rms_norm(x, (HEAD_DIM,), norm.weight, 1e-6)
            for x, norm in ((query, mixer.q_norm), (key, mixer.k_norm))
        )
    if rotated:
        query, key = apply_rotary(query, tables), apply_rotary(key, tables)
    out = naive_attention(query.double(), key.double(), value.double(), meta, scale=HEAD_DIM**-0.5, window=window)
    out = out if gate is None else out * gate.double().sigmoid()
    expected = out.flatten(1) @ mixer.o_proj.weight.double().T
    assert relative_error(mixer(hidden, rotary, meta), expected) <= FP32_RELATIVE


def test_window_hides_what_lies_before_it() -> None:
    meta = pack([(9, [2])])
    narrow, wide = (randomised(attention(ForkAttention, window=window)) for window in (3, 0))
    hidden, rotary = round_of(meta)
    changed = hidden.clone()
    changed[:8] += 1
    assert torch.equal(narrow(hidden, rotary, meta)[10], narrow(changed, rotary, meta)[10])
    assert not torch.equal(wide(hidden, rotary, meta)[10], wide(changed, rotary, meta)[10])


@small_trees
@pytest.mark.parametrize("window", [0, 3])
def test_a_reader_attends_to_what_another_layer_wrote(shapes: list[Shape], window: int) -> None:
    """As a layer does that has written the same keys and values, all rows or some; pools are left alone."""
    pages = shuffled_pages([length for length, _ in shapes], pool_pages=POOL_PAGES)
    meta = pack(shapes, padding=3, caches=[TrunkCache(pages=p) for p in pages])
    writer = randomised(attention(NormedAttention, window=window))
    reader = ForkAttentionReader(SIZE, HEADS, HEAD_DIM, window=window)
    reader.q_norm = RMSNorm(HEAD_DIM, 1e-6)
    reader.requires_grad_(False).load_state_dict({k: v for k, v in writer.state_dict().items() if k[0] in "qo"})
    hidden, rotary = round_of(meta)
    expected = writer(hidden, rotary, meta)
    for pooled in (False, True):
        if pooled:
            allocate_pools(writer, pages=POOL_PAGES, slots=2)
            writer(hidden, rotary, meta)
        _, key, value = writer.project(hidden, None)
        key_value = writer.key_value(key, value, rotary)
        assert torch.equal(reader(hidden, rotary, key_value, meta), expected)
        rows = meta.readout_rows
        selected = reader(hidden[rows], rotary.select(rows), key_value, meta, rows)
        assert relative_error(selected, expected[rows]) <= FP32_RELATIVE


@small_trees
@pytest.mark.parametrize("options", [{}, {"beta_scale": 2.0, "conv_width": 2}], ids=["published", "beta_2_width_2"])
def test_delta_net_is_the_recurrence_between_its_projections(shapes: list[Shape], options: dict[str, Any]) -> None:
    meta = pack(shapes)
    mixer = randomised(ForkGatedDeltaNet(SIZE, 2, 4, 8, 12, **options))
    hidden, _ = round_of(meta)
    inputs = DeltaInputs(
        hidden @ mixer.in_proj_qkv.weight.T,
        hidden @ mixer.in_proj_a.weight.T,
        hidden @ mixer.in_proj_b.weight.T,
        mixer.conv1d.weight[:, 0],
        mixer.A_log,
        mixer.dt_bias,
    )
    sizes = {"num_key_heads": 2, "key_dim": 8, "beta_scale": options.get("beta_scale", 1.0)}
    out = naive_gated_delta(DeltaInputs(*(x.double() for x in inputs)), meta, **sizes)
    gate = (hidden @ mixer.in_proj_z.weight.T).unflatten(-1, (4, 12)).double()
    normed = out / (out.square().mean(-1, keepdim=True) + 1e-6).sqrt() * mixer.norm.weight * gate * gate.sigmoid()
    expected = normed.flatten(1) @ mixer.out_proj.weight.double().T
    # The norm divides by the size of the recurrence's output and so multiplies its absolute error.
    tolerance = FP32_RELATIVE / out.square().mean(-1).sqrt().min().clamp(max=1).item()
    assert relative_error(mixer(hidden, None, meta), expected) <= tolerance


class PlainDecay(ForkGatedDeltaNet):
    """Differences from ForkGatedDeltaNet: a decay that does not depend on the token."""

    def delta_rule(self, qkv_TC: Tensor, a_TN: Tensor, b_TN: Tensor, meta: ForkMetadata) -> Tensor:
        return super().delta_rule(qkv_TC, torch.zeros_like(a_TN), b_TN, meta)


def test_delta_net_subclass_may_change_what_enters_the_rule() -> None:
    meta = pack([(5, [2, 3])])
    changed, plain = (randomised(kind(SIZE, 2, 4, 8, 12)) for kind in (PlainDecay, ForkGatedDeltaNet))
    hidden, _ = round_of(meta)
    plain.in_proj_a.weight.zero_()
    assert torch.equal(changed(hidden, None, meta), plain(hidden, None, meta))


def allocate_pools(mixer: nn.Module, *, pages: int, slots: int) -> None:
    if isinstance(mixer, ForkGatedDeltaNet):
        mixer.allocate_pools(slots=slots, parents=3)
    else:
        mixer.allocate_pools(pages=pages)


@mixers
@small_trees
def test_pools_change_nothing_for_a_fresh_round(make: Callable[[], nn.Module], shapes: list[Shape]) -> None:
    pages = shuffled_pages([length for length, _ in shapes], pool_pages=POOL_PAGES)
    meta = pack(shapes, padding=3, caches=[TrunkCache(pages=p) for p in pages])
    mixer = randomised(make())
    hidden, rotary = round_of(meta)
    without = mixer(hidden, rotary, meta)
    selected = mixer(hidden, rotary, meta, meta.readout_rows)
    allocate_pools(mixer, pages=POOL_PAGES, slots=2)
    assert torch.equal(mixer(hidden, rotary, meta), without)
    assert torch.equal(mixer(hidden, rotary, meta, meta.readout_rows), selected)


@mixers
@pytest.mark.parametrize("length", [1, 2, 64, 70])
def test_resumed_trunk_equals_a_fresh_one(make: Callable[[], nn.Module], length: int) -> None:
    total, branches = 70, [2, (1, [1, 3])]
    (pages,) = shuffled_pages([total], pool_pages=POOL_PAGES)
    fresh = pack([(total, branches)], caches=[TrunkCache(pages=pages, saves=((length, 1),))])
    resumed = pack([(total - length, branches)], caches=[TrunkCache(length, slot=1, pages=pages)])
    mixer = randomised(make())
    allocate_pools(mixer, pages=POOL_PAGES, slots=2)
    hidden, rotary = round_of(fresh)
    expected = mixer(hidden, rotary, fresh)[length:]
    suffix = RotaryTables(rotary.cos_TF[length:], rotary.sin_TF[length:])
    assert relative_error(mixer(hidden[length:], suffix, resumed), expected) <= FP32_RELATIVE


@pytest.mark.parametrize("make", [MIXERS["gated"], MIXERS["delta"]], ids=["gated", "delta"])
def test_pools_have_the_layers_dtype_and_are_not_saved(make: Callable[[], nn.Module]) -> None:
    mixer = randomised(make()).bfloat16()
    saved = set(mixer.state_dict())
    allocate_pools(mixer, pages=3, slots=5)
    shapes = {name: (tuple(x.shape), x.dtype) for name, x in mixer.named_buffers()}
    if isinstance(mixer, ForkGatedDeltaNet):
        expected = {"state_pool": ((5, 4, 8, 12), torch.float32), "conv_pool": ((5, 3, 80), torch.bfloat16)}
        expected["scratch"] = ((3, 4, 8, 12), torch.float32)
    else:
        expected = {"kv_pool": ((3, 2, KV_HEADS, 64, HEAD_DIM), torch.bfloat16)}
    assert shapes == expected
    assert not any(x.any() for x in mixer.buffers())
    assert set(mixer.state_dict()) == saved


@mixers
def test_training_reaches_every_parameter(make: Callable[[], nn.Module]) -> None:
    meta = pack([(3, [2, (1, [2])]), (0, [2])])
    mixer = randomised(make()).requires_grad_(True)
    hidden, rotary = round_of(meta)
    hidden.requires_grad_()
    mixer(hidden, rotary, meta, meta.readout_rows).square().sum().backward()
    unused = {"v_proj.weight"} if isinstance(mixer, SharedKeyValue) else set()
    assert {name for name, p in mixer.named_parameters() if p.grad is None or not p.grad.any()} == unused
    assert hidden.grad.isfinite().all()


@pytest.mark.parametrize("make", [MIXERS["gated_window"], MIXERS["delta"]], ids=["gated_window", "delta"])
def test_one_compilation_serves_rounds_of_one_capacity(make: Callable[[], nn.Module]) -> None:
    torch.compiler.reset()
    mixer = randomised(make())
    compiled = torch.compile(mixer, fullgraph=True, backend="aot_eager")
    rounds: list[list[Shape]] = [[(3, [2, 1]), (0, [4])], [(10, [2])], [(1, [(1, [1, 2]), 3])]]
    for k, shapes in enumerate(rounds):
        meta = pack(shapes, capacity=StreamCapacity(14, 7, 5, depth=3))
        hidden, rotary = round_of(meta)
        with torch.compiler.set_stance("fail_on_recompile" if k else "default"):
            out = compiled(hidden, rotary, meta, meta.readout_rows)
        assert relative_error(out, mixer(hidden, rotary, meta, meta.readout_rows)) <= FP32_RELATIVE
    torch.compiler.reset()


def test_hooks_of_head_norms_are_called() -> None:
    attention = GatedForkAttention(32, 4, 2, 16)
    attention.q_norm, attention.k_norm = RMSNorm(16, 1e-6), RMSNorm(16, 1e-6)
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter)
    meta = ForkMetadata.pack([TokenTree([1] * 5, (TokenTree([2] * 3),))])
    x, tables = torch.randn(8, 32), RotaryEmbedding(8, 1e4)(meta.positions)
    plain = attention(x, tables, meta)
    seen: list[int] = []
    for norm in (attention.q_norm, attention.k_norm):
        norm.register_forward_hook(lambda *_: seen.append(1))
    torch.testing.assert_close(attention(x, tables, meta), plain)
    assert len(seen) == 2
