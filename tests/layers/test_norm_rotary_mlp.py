"""Norms, rotary embedding and MLP against the modules of transformers' Qwen3.5."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Gemma4TextConfig
from transformers.models.gemma4 import modeling_gemma4 as gemma4
from transformers.models.qwen3_5 import modeling_qwen3_5 as hf

from flide.layers import (
    ForkGatedDeltaNet,
    GatedMLP,
    GatedRMSNorm,
    RMSNorm,
    RotaryEmbedding,
    RotaryTables,
    ScaledEmbedding,
    apply_rotary,
)
from flide.layers.residual import add_residual
from tests.oracle import tiny_config
from tests.tolerance import FP32_ROUNDING, LOW_PRECISION_BUDGET

ROWS, SIZE = 33, 40
ROPES: dict[str, tuple[int, float, float, list[int]]] = {  # head_dim, theta, rotated part, sections
    "tiny": (32, 1e4, 0.25, [2, 1, 1]),
    "published": (256, 1e7, 0.25, [11, 11, 10]),
    "uneven": (64, 1e6, 1.0, [20, 8, 4]),
}
CASTS = {
    "to_bfloat16": lambda module: module.to(torch.bfloat16),
    "to_keyword": lambda module: module.to(dtype=torch.float16),
    "half": lambda module: module.half(),
    "bfloat16": lambda module: module.bfloat16(),
    "inside_a_model": lambda module: nn.Sequential(nn.Sequential(module)).bfloat16()[0][0],
}
casts = pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS.keys())


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_rounded_alike(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=FP32_ROUNDING, atol=FP32_ROUNDING)


def same_weights(module: nn.Module, other: nn.Module) -> None:
    other.load_state_dict(module.state_dict())


@pytest.mark.parametrize("eps", [1e-6, 1e-2])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 300.0])
def test_rms_norm_matches_transformers(scale: float, eps: float) -> None:
    ours, theirs = RMSNorm(SIZE, eps, offset=1.0), hf.Qwen3_5RMSNorm(SIZE, eps)
    ours.weight.data.copy_(randn(SIZE, seed=1))
    same_weights(ours, theirs)
    x = randn(ROWS, SIZE) * scale
    assert_rounded_alike(ours(x), theirs(x))
    low = x.bfloat16()
    assert torch.equal(ours(low), theirs(low))


def test_rms_norm_without_offset_is_the_plain_one() -> None:
    norm = RMSNorm(SIZE, 1e-6)
    norm.weight.data.copy_(randn(SIZE, seed=1))
    x = randn(ROWS, SIZE)
    assert_rounded_alike(norm(x), nn.functional.rms_norm(x, (SIZE,), norm.weight, 1e-6))


def test_rms_norm_without_weight_is_the_plain_one() -> None:
    norm, x = RMSNorm(SIZE, 1e-2, elementwise_affine=False), randn(ROWS, SIZE)
    norm.reset_parameters()
    assert not [*norm.parameters()]
    assert_rounded_alike(norm(x), nn.functional.rms_norm(x, (SIZE,), None, 1e-2))


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_reset_rms_norm_only_normalises(offset: float) -> None:
    norm = RMSNorm(SIZE, 0.0, offset=offset)
    norm.reset_parameters()
    assert_rounded_alike(norm(randn(ROWS, SIZE)).square().mean(-1), torch.ones(ROWS))


@pytest.mark.parametrize("leading", [(ROWS,), (ROWS, 3), (2, ROWS, 3)])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 300.0])
def test_gated_rms_norm_matches_transformers(scale: float, leading: tuple[int, ...]) -> None:
    ours, theirs = GatedRMSNorm(SIZE, 1e-6), hf.Qwen3_5RMSNormGated(SIZE, 1e-6)
    ours.weight.data.copy_(randn(SIZE, seed=1))
    same_weights(ours, theirs)
    x, gate = randn(*leading, SIZE) * scale, randn(*leading, SIZE, seed=2)
    assert_rounded_alike(ours(x, gate), theirs(x, gate))


def test_gated_rms_norm_rounds_once_in_low_precision() -> None:
    norm = GatedRMSNorm(SIZE, 1e-6)
    norm.weight.data.copy_(randn(SIZE, seed=1))
    x, gate = randn(ROWS, SIZE).bfloat16(), randn(ROWS, SIZE, seed=2).bfloat16()
    exact = norm(x.float(), gate.float())
    assert torch.equal(norm(x, gate), exact.bfloat16())


def test_mlp_matches_transformers() -> None:
    config = tiny_config()
    ours = GatedMLP(config.hidden_size, config.intermediate_size)
    theirs = hf.Qwen3_5MLP(config, config.intermediate_size)
    same_weights(ours, theirs)
    x = randn(ROWS, config.hidden_size)
    assert_rounded_alike(ours(x), theirs(x))


def test_mlp_subclass_may_change_the_activation() -> None:
    class Tanh(GatedMLP):
        def activate(self, gate_TI: Tensor) -> Tensor:
            return gate_TI.tanh()

    mlp, x = Tanh(8, 12), randn(ROWS, 8)
    expected = mlp.down_proj(mlp.gate_proj(x).tanh() * mlp.up_proj(x))
    assert torch.equal(mlp(x), expected)
    mlp.merge_projections()
    assert_rounded_alike(mlp(x), expected)


@pytest.mark.parametrize("size", [1536, 2560, 3840, 2816, 5376, 256])
def test_embedding_scale_is_rounded_as_in_transformers(size: int) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        theirs = gemma4.Gemma4TextScaledWordEmbedding(7, 4, 0, embed_scale=size**0.5).to(dtype)
        theirs.weight.data.copy_(randn(7, 4))
        ours = ScaledEmbedding(7, 4, size**0.5).to(dtype)
        same_weights(theirs, ours)
        assert torch.equal(ours(torch.arange(7)), theirs(torch.arange(7)))
    assert ScaledEmbedding(7, 4, 1536**0.5).scales[torch.bfloat16] == 39.25


def test_rows_are_looked_up_by_indices_of_64_bits() -> None:
    """Compiled code computes addresses in the dtype of the indices; published tables have more than 2^31 elements."""

    class Seen(TorchDispatchMode):
        dtypes: ClassVar[list[torch.dtype]] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.embedding.default:
                self.dtypes.append(args[1].dtype)
            return func(*args, **(kwargs or {}))

    with Seen():
        ScaledEmbedding(7, 4, 2.0)(torch.arange(7, dtype=torch.int32))
    assert Seen.dtypes == [torch.int64]


def test_proportional_rotary_matches_transformers() -> None:
    """Only a quarter of the pairs turns; they are pairs of the whole head."""
    config = Gemma4TextConfig(num_hidden_layers=6)
    theirs = gemma4.Gemma4TextRotaryEmbedding(config)
    ours = {
        "sliding_attention": RotaryEmbedding(256, 1e4),
        "full_attention": RotaryEmbedding(512, 1e6, num_frequencies=64),
    }
    positions = torch.cat([torch.arange(300), 100_000 + torch.arange(9)])[None]
    for kind, rotary in ours.items():
        tables, heads = rotary(positions.expand(3, -1)), randn(309, 2, 2 * rotary.inv_freq_F.numel())
        cos, sin = theirs(heads, positions, kind)
        assert torch.equal(tables.cos_TF, cos[0, :, : cos.shape[-1] // 2])
        expected = gemma4.apply_rotary_pos_emb(heads[None], cos, sin, unsqueeze_dim=2)[0]
        assert_rounded_alike(apply_rotary(heads, tables), expected)
    assert torch.equal(apply_rotary(heads, tables)[..., 64:256], heads[..., 64:256])


def rope(name: str) -> tuple[RotaryEmbedding, Any, int]:
    """(ours, transformers', head dim)."""
    head_dim, theta, part, sections = ROPES[name]
    config = tiny_config(
        head_dim=head_dim,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": theta,
            "partial_rotary_factor": part,
            "mrope_section": sections,
            "mrope_interleaved": True,
        },
    )
    ours = RotaryEmbedding(int(head_dim * part), theta, sections=(sections[0], sections[1], sections[2]))
    return ours, hf.Qwen3_5TextRotaryEmbedding(config), head_dim


def image_positions() -> Tensor:
    """Text, then an image whose time, height and width differ in every row, then text at large positions."""
    text = torch.arange(5).expand(3, -1)
    height, width = torch.arange(4).repeat_interleave(6), torch.arange(6).repeat(4)
    image = 5 + torch.stack([torch.arange(24) // 12, height, width])
    return torch.cat([text, image, 200_000 + text], 1).int()


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("kind", ["text", "image"])
def test_rotary_matches_transformers(name: str, kind: str) -> None:
    ours, theirs, head_dim = rope(name)
    positions = image_positions() if kind == "image" else torch.arange(300, dtype=torch.int32).expand(3, -1)
    tables = ours(positions)
    query, key = (randn(positions.shape[1], heads, head_dim, seed=heads) for heads in (4, 2))
    cos, sin = theirs(query, positions[:, None])
    frequencies = tables.cos_TF.shape[1]
    assert torch.equal(tables.cos_TF, cos[0, :, :frequencies])
    assert torch.equal(tables.sin_TF, sin[0, :, :frequencies])
    expected = hf.apply_rotary_pos_emb(query.transpose(0, 1)[None], key.transpose(0, 1)[None], cos, sin)
    for x, y in zip((query, key), expected, strict=True):
        assert_rounded_alike(apply_rotary(x, tables), y[0].transpose(0, 1))


def test_equal_positions_make_sections_irrelevant() -> None:
    positions = torch.arange(50).expand(3, -1)
    with_sections, without = RotaryEmbedding(32, 1e4, sections=(6, 5, 5)), RotaryEmbedding(32, 1e4)
    for x, y in zip(with_sections(positions), without(positions), strict=True):
        assert torch.equal(x, y)


def test_different_positions_reach_their_own_frequencies() -> None:
    rotary = RotaryEmbedding(16, 1e4, sections=(3, 3, 2))
    assert rotary.axis_F.tolist() == [0, 1, 2, 0, 1, 2, 0, 1]


def test_rotary_keeps_the_rest_and_its_dtype() -> None:
    ours, _, head_dim = rope("published")
    tables = ours(image_positions())
    x = randn(tables.cos_TF.shape[0], 2, head_dim)
    rotated = apply_rotary(x, tables)
    assert torch.equal(rotated[..., 64:], x[..., 64:])
    assert_rounded_alike(rotated.norm(dim=-1), x.norm(dim=-1))
    low = apply_rotary(x.bfloat16(), tables)
    assert low.dtype == torch.bfloat16
    assert torch.equal(low, apply_rotary(x.bfloat16().float(), tables).bfloat16())


def test_selected_tables_rotate_selected_rows() -> None:
    ours, _, head_dim = rope("tiny")
    tables = ours(image_positions())
    x, rows = randn(tables.cos_TF.shape[0], 2, head_dim), torch.tensor([7, 0, 7, 33], dtype=torch.int32)
    assert torch.equal(apply_rotary(x[rows], tables.select(rows)), apply_rotary(x, tables)[rows])
    assert tables.select(None) is tables


# What must stay float32.


@casts
def test_gated_norm_weight_stays_float32(cast: Any) -> None:
    norm = GatedRMSNorm(SIZE, 1e-6)
    norm.reset_parameters()
    assert cast(norm).weight.dtype == torch.float32


@casts
def test_rotary_frequencies_stay_float32(cast: Any) -> None:
    rotary = RotaryEmbedding(64, 1e7, sections=(11, 11, 10))
    expected = rotary(image_positions())
    tables = cast(copy.deepcopy(rotary))(image_positions())
    assert isinstance(tables, RotaryTables)
    for x, y in zip(tables, expected, strict=True):
        assert torch.equal(x, y)


@casts
def test_delta_net_keeps_decay_rate_and_states_in_float32(cast: Any) -> None:
    mixer = ForkGatedDeltaNet(16, 1, 2, 4, 4)
    mixer.reset_parameters()
    mixer.norm.reset_parameters()
    mixer.allocate_pools(slots=2, parents=1)
    rate = mixer.A_log.detach().clone()
    dtypes = {name: x.dtype for name, x in [*cast(mixer).named_parameters(), *mixer.named_buffers()]}
    kept = {"A_log", "norm.weight", "state_pool", "scratch"}
    assert {name for name, dtype in dtypes.items() if dtype == torch.float32} == kept
    assert torch.equal(mixer.A_log, rate)


def test_gradients_of_float32_parameters_stay_float32_too() -> None:
    norm = GatedRMSNorm(SIZE, 1e-6)
    norm.reset_parameters()
    norm(randn(ROWS, SIZE), randn(ROWS, SIZE)).sum().backward()
    gradient = norm.weight.grad.clone()
    norm.bfloat16()
    assert norm.weight.grad.dtype == torch.float32
    assert torch.equal(norm.weight.grad, gradient)


def test_float32_parameters_follow_moves_and_copies() -> None:
    mixer = ForkGatedDeltaNet(16, 1, 2, 4, 4).bfloat16()
    assert mixer.to("meta").A_log.is_meta
    assert mixer.to_empty(device="cpu").A_log.dtype == torch.float32
    assert copy.deepcopy(mixer).A_log.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_norms_in_low_precision_cost_no_more_than_rounding(dtype: torch.dtype) -> None:
    x = randn(ROWS, SIZE)
    norm = RMSNorm(SIZE, 1e-6, offset=1.0)
    norm.weight.data.copy_(randn(SIZE, seed=1))
    exact = norm(x)
    best = (norm(x.to(dtype).float()).to(dtype).float() - exact).abs().max()
    assert (norm(x.to(dtype)).float() - exact).abs().max() <= LOW_PRECISION_BUDGET * best


@pytest.mark.parametrize("dtypes", [("bfloat16", "bfloat16"), ("float32", "bfloat16"), ("float64", "float64")])
def test_residual_sum_has_the_bits_of_the_sum(dtypes: tuple[str, str]) -> None:
    a, b = (torch.randn(50, 7).to(getattr(torch, dtype)) for dtype in dtypes)
    total = add_residual(a, b)
    assert total.dtype == (a + b).dtype
    assert torch.equal(total, a + b)
