"""Merged projections: the same answers, the same names, the same memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flide.layers import GatedMLP
from flide.models import Qwen35ForDecision
from flide.runtime import ForkMetadata
from tests.models.test_qwen3_5 import TREES, VOCAB, copy_weights, readout_logits
from tests.oracle import random_tree, tiny_transformers_model
from tests.tolerance import LOGITS_FP32


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
