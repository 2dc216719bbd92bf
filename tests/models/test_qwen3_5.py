"""Every branch of a forked stream gets what its isolated prompt gets in transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flide.models import Qwen35ForDecision
from flide.runtime import ForkMetadata, StreamCapacity
from flide.runtime.tree import prompts_of
from tests.oracle import isolated_logits, random_tree, tiny_transformers_model
from tests.tolerance import LOGITS_FP32

VOCAB = 97
TREES: dict[str, list[tuple[int, list[Any]]]] = {
    "one_branch": [(9, [3])],
    "no_trunk": [(0, [1, 4, 66])],
    "short_trunks": [(1, [1, 5]), (2, [2, 3]), (3, [4, 1])],
    "single_token_branches": [(12, [1, 1, 1])],
    "around_the_chunk": [(63, [1, 63]), (64, [2, 64]), (65, [3, 65])],
    "long_trunk": [(130, [5, 4, 64])],
    "forty_branches": [(20, [1 + i % 7 for i in range(40)])],
    "mixed_round": [(0, [65]), (130, [1, 2]), (2, [64, 3]), (64, [5])],
    "reversed_round": [(64, [5]), (2, [3, 64]), (130, [2, 1]), (0, [65])],
    "trunk_alone": [(7, []), (5, [2])],
    "depth_three": [(10, [(5, [1, 2, 64]), (3, [7]), 4]), (66, [(1, [1, 1]), (65, [2])])],
}


def copy_weights(hf: Any) -> Qwen35ForDecision:
    model = Qwen35ForDecision.from_config(hf.config)
    model.load_state_dict(hf.state_dict())
    return model.eval()


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def models(request: pytest.FixtureRequest) -> tuple[Any, Qwen35ForDecision]:
    hf = tiny_transformers_model(tie_word_embeddings=request.param)
    return hf, copy_weights(hf)


def readout_logits(model: Any, meta: ForkMetadata) -> torch.Tensor:
    with torch.no_grad():
        return model(meta.tokens, meta) @ model.lm_head.weight.T


@pytest.mark.parametrize("shapes", TREES.values(), ids=TREES.keys())
@pytest.mark.parametrize("padding", [0, 37], ids=["exact", "padded"])
def test_branch_matches_isolated_prompt(models: Any, shapes: list[Any], padding: int) -> None:
    hf, model = models
    generator = torch.Generator().manual_seed(1)
    trees = [random_tree(shape, VOCAB, generator) for shape in shapes]
    meta = ForkMetadata.pack(trees)
    if padding:
        c = meta.capacity
        capacity = StreamCapacity(c.tokens + padding, c.segments + 9, c.readouts + 5, depth=c.depth)
        meta = ForkMetadata.pack(trees, capacity=capacity)
    meta.check()
    logits = readout_logits(model, meta)
    expected = [isolated_logits(hf, prompt) for tree in trees for prompt in prompts_of(tree)]
    error = (logits[: len(expected)] - torch.stack(expected)).abs().max().item()
    scale = torch.stack(expected).std().item()
    assert 0.3 < scale < 3
    assert error <= LOGITS_FP32 * scale
