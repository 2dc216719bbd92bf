"""The whole forward is one graph, and one graph serves different trees."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from flide.models import Qwen35ForDecision
from flide.runtime import ForkMetadata, StreamCapacity
from flide.runtime.tree import prompts_of
from tests.oracle import isolated_logits, random_tree, tiny_transformers_model
from tests.tolerance import LOGITS_FP32

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None, reason="Inductor needs a C++ compiler on the CPU"
)
VOCAB = 97
CAPACITY = StreamCapacity(tokens=160, segments=24, readouts=20, depth=3)
OTHER_CAPACITY = StreamCapacity(tokens=96, segments=40, readouts=32, depth=3)
ROUNDS: dict[str, list[tuple[int, list[Any]]]] = {
    "one": [(9, [3])],
    "three": [(0, [65, 2]), (30, [1, 2]), (2, [4, 3])],
    "many": [(12, [1 + i % 4 for i in range(18)])],
    "deep": [(10, [(5, [1, 2]), (3, [7]), 4])],
}


@pytest.fixture(scope="module")
def models() -> tuple[Any, Qwen35ForDecision]:
    hf = tiny_transformers_model()
    model = Qwen35ForDecision.from_config(hf.config)
    model.load_state_dict(hf.state_dict())
    return hf, model.eval()


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Counting:
    """A forward captured by Dynamo and run eagerly, that counts how many graphs were made."""

    def __init__(self, model: torch.nn.Module, *, dynamic: bool) -> None:
        self.graphs = 0

        def counted(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
            self.graphs += 1
            return graph.forward

        self.forward = torch.compile(model, backend=counted, fullgraph=True, dynamic=dynamic)

    def __call__(self, meta: ForkMetadata) -> torch.Tensor:
        with torch.no_grad():
            return self.forward(meta.tokens, meta)


def pack(name: str, capacity: StreamCapacity | None) -> tuple[list[Any], ForkMetadata]:
    generator = torch.Generator().manual_seed(3)
    trees = [random_tree(shape, VOCAB, generator) for shape in ROUNDS[name]]
    return trees, ForkMetadata.pack(trees, capacity=capacity)


def assert_matches(hf: Any, model: Qwen35ForDecision, trees: list[Any], hidden_states: torch.Tensor) -> None:
    expected = torch.stack([isolated_logits(hf, prompt) for tree in trees for prompt in prompts_of(tree)])
    logits = hidden_states[: len(expected)] @ model.lm_head.weight.T
    assert (logits - expected).abs().max() <= LOGITS_FP32 * expected.std()


def test_one_graph_serves_every_tree_of_a_capacity(models: Any) -> None:
    hf, model = models
    compiled = Counting(model, dynamic=False)
    meta = ForkMetadata.allocate(CAPACITY)
    for name in ROUNDS:
        trees, packed = pack(name, CAPACITY)
        meta.copy_(packed)
        assert_matches(hf, model, trees, compiled(meta))
    assert compiled.graphs == 1


def test_one_dynamic_graph_serves_every_capacity(models: Any) -> None:
    hf, model = models
    compiled = Counting(model, dynamic=True)
    for name, capacity in [
        ("three", CAPACITY),
        ("many", OTHER_CAPACITY),
        ("deep", StreamCapacity(tokens=333, segments=17, readouts=9, depth=3)),
    ]:
        trees, meta = pack(name, capacity)
        assert_matches(hf, model, trees, compiled(meta))
    assert compiled.graphs == 1


@needs_compiler
@pytest.mark.slow  # the fast tier compiles an engine (tests/runtime/test_streams.py)
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_inductor_matches_isolated_prompts(models: Any, mode: str) -> None:
    hf, model = models
    compiled = torch.compile(model, fullgraph=True, dynamic=True, mode=mode)
    with torch.no_grad():
        for name, capacity in [("three", CAPACITY), ("many", OTHER_CAPACITY)]:
            trees, meta = pack(name, capacity)
            assert_matches(hf, model, trees, compiled(meta.tokens, meta))
        with torch.compiler.set_stance("fail_on_recompile"):
            trees, meta = pack("deep", CAPACITY)
            assert_matches(hf, model, trees, compiled(meta.tokens, meta))
