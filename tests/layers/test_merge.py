"""Merged projections: the same answers, the same names, the same memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flide.layers import DeltaNetNames, ForkAttention, ForkGatedDeltaNet, GatedMLP
from flide.layers.lora import add_lora
from flide.models import Qwen35ForDecision
from flide.runtime import ForkMetadata
from tests.layers.test_mixers import randomised
from tests.models.test_qwen3_5 import TREES, VOCAB, copy_weights, readout_logits
from tests.ops.naive import relative_error
from tests.oracle import random_tree, tiny_transformers_model
from tests.tolerance import FP32_RELATIVE, LOGITS_FP32


@pytest.fixture
def pair() -> tuple[Qwen35ForDecision, Qwen35ForDecision]:
    hf = tiny_transformers_model()
    plain, merged = copy_weights(hf), copy_weights(hf)
    merged.merge_projections()
    return plain, merged


@pytest.mark.parametrize("name", ["mixed_round", "depth_three"])
def test_merging_moves_no_answer(pair: Any, name: str) -> None:
    plain, merged = pair
    generator = torch.Generator().manual_seed(2)
    meta = ForkMetadata.pack([random_tree(shape, VOCAB, generator) for shape in TREES[name]])
    expected = readout_logits(plain, meta)
    assert (readout_logits(merged, meta) - expected).abs().max() <= LOGITS_FP32 * expected.std()


def test_names_and_values_stay(pair: Any) -> None:
    plain, merged = pair
    expected, got = plain.state_dict(), merged.state_dict()
    assert list(got) == list(expected)
    assert all(torch.equal(got[name], expected[name]) for name in expected)


def test_parts_are_views_of_the_merged_weight(pair: Any) -> None:
    _, merged = pair
    layer = merged.model.layers[0]
    begin = layer.linear_attn.merged.weight.data_ptr()
    size = layer.linear_attn.merged.weight.untyped_storage().nbytes()
    for part in ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"):
        assert begin <= getattr(layer.linear_attn, part).weight.data_ptr() < begin + size
    with torch.no_grad():
        layer.mlp.up_proj.weight.fill_(3.0)
    assert (layer.mlp.merged.weight[layer.mlp.gate_proj.out_features :] == 3.0).all()


@pytest.mark.parametrize("max_shard_size", ["5GB", 50_000], ids=["single", "sharded"])
def test_a_merged_model_is_saved_like_any_other(pair: Any, tmp_path: Path, max_shard_size: Any) -> None:
    plain, merged = pair
    merged.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    loaded = Qwen35ForDecision.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in plain.state_dict().items())


def test_a_projection_that_is_more_than_linear_stays_apart() -> None:
    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    mlp = GatedMLP(8, 16)
    mlp.up_proj = Doubled(8, 16, bias=False)
    x = torch.randn(3, 8)
    expected = mlp(x)
    mlp.merge_projections()
    assert mlp.merged is None
    assert torch.equal(mlp(x), expected)


class Apart(ForkGatedDeltaNet):
    """Differences from ForkGatedDeltaNet: q, k and v have their own projections and convolutions; other names."""

    names = DeltaNetNames(("q", "k", "v"), "z", "b", "a", ("q_conv", "k_conv", "v_conv"), "o_norm", "o")


class HalfGated(ForkGatedDeltaNet):
    """Differences from ForkGatedDeltaNet: its gate is halved."""

    def project(self, hidden_states_TD: Tensor, query_rows: Tensor | None) -> tuple[Tensor, ...]:
        qkv_TC, z, b_TN, a_TN = super().project(hidden_states_TD, query_rows)
        return qkv_TC, 0.5 * z, b_TN, a_TN


class OwnProducts(ForkGatedDeltaNet):
    """Differences from ForkGatedDeltaNet: it multiplies itself, and halves its gate."""

    def project(self, hidden_states_TD: Tensor, query_rows: Tensor | None) -> tuple[Tensor, ...]:
        rows_QD = hidden_states_TD if query_rows is None else hidden_states_TD[query_rows]
        b_TN, a_TN = self.in_proj_b(hidden_states_TD), self.in_proj_a(hidden_states_TD)
        return self.in_proj_qkv(hidden_states_TD), 0.5 * self.in_proj_z(rows_QD), b_TN, a_TN


class NormedProjections(ForkAttention):
    """Differences from ForkAttention: queries are doubled as they leave their projection."""

    def project(self, hidden_states_TD: Tensor, query_rows: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        query, key_TMH, value_TMH = super().project(hidden_states_TD, query_rows)
        return 2 * query, key_TMH, value_TMH


class TestSubclasses:
    @pytest.fixture
    def plain(self) -> ForkGatedDeltaNet:
        torch.manual_seed(0)
        return randomised(ForkGatedDeltaNet(32, 2, 4, 8, 12))

    @pytest.fixture
    def meta(self) -> ForkMetadata:
        return ForkMetadata.pack([random_tree((9, [3, 70]), VOCAB, torch.Generator().manual_seed(0))])

    @staticmethod
    def ways(mixer: Any, meta: ForkMetadata) -> list[Tensor]:
        """Outputs of all rows and of some, unmerged and merged, without pools and with them."""
        hidden = torch.randn(meta.capacity.tokens, 32, generator=torch.Generator().manual_seed(1))
        found = []
        for merge in (False, True):
            if merge:
                mixer.merge_projections()
                assert mixer.merged is not None
            for rows in (None, meta.readout_rows):
                out = mixer(hidden, None, meta, rows)
                found.append(out if rows is not None else out[meta.readout_rows])
        return found

    def test_projections_and_convolutions_apart(self, plain: Any, meta: ForkMetadata) -> None:
        apart = Apart(32, 2, 4, 8, 12)
        state = plain.state_dict()
        sizes = [plain.key_size, plain.key_size, plain.value_size]
        for kind, name in (("", "in_proj_qkv"), ("_conv", "conv1d")):
            for letter, part in zip("qkv", state.pop(f"{name}.weight").split(sizes), strict=True):
                state[f"{letter}{kind}.weight"] = part
        others = {"z": "in_proj_z", "b": "in_proj_b", "a": "in_proj_a", "o_norm": "norm", "o": "out_proj"}
        for new, old in others.items():
            state[f"{new}.weight"] = state.pop(f"{old}.weight")
        apart.load_state_dict(state)
        apart.requires_grad_(False)
        expected = self.ways(plain, meta)[0]
        for out in self.ways(apart, meta):
            assert relative_error(out, expected) <= FP32_RELATIVE
        assert {name: value.shape for name, value in apart.state_dict().items()} == {
            name: value.shape for name, value in state.items()
        }
        apart.allocate_pools(slots=2, parents=3)
        assert apart.conv_pool.shape == (2, 3, sum(sizes))

    @pytest.mark.parametrize("kind", [HalfGated, OwnProducts])
    def test_a_projection_of_its_own(self, plain: Any, meta: ForkMetadata, kind: type[ForkGatedDeltaNet]) -> None:
        mixer = kind(32, 2, 4, 8, 12).requires_grad_(False)
        mixer.load_state_dict(plain.state_dict())
        plain.in_proj_z.weight *= 0.5
        expected = self.ways(plain, meta)[0]
        for out in self.ways(mixer, meta):
            assert relative_error(out, expected) <= FP32_RELATIVE

    def test_an_attention_with_a_projection_of_its_own(self, meta: ForkMetadata) -> None:
        plain, mixer = (randomised(kind(32, 4, 2, 16)) for kind in (ForkAttention, NormedProjections))
        mixer.load_state_dict(plain.state_dict())
        plain.q_proj.weight *= 2
        expected = self.ways(plain, meta)[0]
        for out in self.ways(mixer, meta):
            assert relative_error(out, expected) <= FP32_RELATIVE

    def test_an_attention_whose_values_are_its_keys(self, meta: ForkMetadata) -> None:
        mixer = randomised(ForkAttention(32, 4, 2, 16, value_proj=False))
        expected, *others = self.ways(mixer, meta)
        assert mixer.merged.weight.shape == (4 * 16 + 2 * 16, 32)
        for out in others:
            assert relative_error(out, expected) <= FP32_RELATIVE

    def test_adapters_keep_projections_apart(self, meta: ForkMetadata) -> None:
        mixer = Apart(32, 2, 4, 8, 12)
        add_lora(mixer, rank=2, scale=1.0, generator=torch.Generator(), targets=["k"])
        mixer.merge_projections()
        assert mixer.merged is None
