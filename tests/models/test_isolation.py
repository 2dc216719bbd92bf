"""What one request holds cannot reach another: not even NaN."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flide.models import Qwen35ForDecision
from flide.runtime import ForkMetadata, TokenTree
from tests.oracle import TINY, random_tree, tiny_transformers_model

GARBAGE = 96  # a token whose embedding is NaN
SHAPES: list[tuple[int, list[Any]]] = [(70, [3, 66, 1]), (0, [5, 2]), (2, [1, 64]), (129, [4])]


@pytest.fixture(scope="module")
def model() -> Qwen35ForDecision:
    hf = tiny_transformers_model()
    model = Qwen35ForDecision.from_config(hf.config)
    model.load_state_dict(hf.state_dict())
    model.model.embed_tokens.weight.data[GARBAGE] = float("nan")
    return model.eval()


def garbage(tree: TokenTree) -> TokenTree:
    return TokenTree([GARBAGE] * len(tree.tokens), tuple(garbage(child) for child in tree.children))


@torch.no_grad()
def run(model: Qwen35ForDecision, trees: list[TokenTree]) -> torch.Tensor:
    meta = ForkMetadata.pack(trees)
    return model(meta.tokens, meta)


@pytest.mark.parametrize("victim", range(len(SHAPES)))
def test_garbage_in_one_request_leaves_the_others_bit_identical(model: Qwen35ForDecision, victim: int) -> None:
    generator = torch.Generator().manual_seed(5)
    trees = [random_tree(shape, TINY["vocab_size"] - 1, generator) for shape in SHAPES]
    clean = run(model, trees)
    dirty = run(model, [garbage(tree) if i == victim else tree for i, tree in enumerate(trees)])
    owner = torch.tensor([i for i, tree in enumerate(trees) for _ in tree.children])
    assert torch.equal(clean[owner != victim], dirty[owner != victim])
    assert dirty[owner == victim].isnan().all()
    assert clean.isfinite().all()


def test_garbage_in_one_branch_leaves_its_siblings_bit_identical(model: Qwen35ForDecision) -> None:
    generator = torch.Generator().manual_seed(6)
    tree = random_tree((67, [5, 40, 3]), TINY["vocab_size"] - 1, generator)
    clean = run(model, [tree])
    first, second, third = tree.children
    dirty = run(model, [TokenTree(tree.tokens, (first, garbage(second), third))])
    assert torch.equal(clean[[0, 2]], dirty[[0, 2]])
    assert dirty[1].isnan().all()
