"""The same promises on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flide import DecisionRequest, Engine, EngineConfig, Noul
from flide.models import Qwen35ForDecision
from flide.models.decision import ForDecision
from flide.runtime import ForkMetadata, StreamCapacity
from flide.runtime.metadata import fresh_caches
from flide.runtime.tree import prompts_of
from tests.models.test_qwen3_5 import TREES, VOCAB
from tests.oracle import isolated_logits, random_tree, tiny_transformers_model
from tests.tiny_model import tiny_engine
from tests.tolerance import BF16_ERROR_RATIO, LOGITS_FP32, PROBABILITY_FP32

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def hf() -> Any:
    return tiny_transformers_model(linear_value_head_dim=32)


def load(hf: Any, dtype: torch.dtype) -> Qwen35ForDecision:
    model = Qwen35ForDecision.from_config(hf.config, dtype=dtype, device="cuda")
    model.load_state_dict(hf.state_dict())
    model.check_kernels()
    return model.eval()


@torch.no_grad()
def logits_of(model: ForDecision, trees: list[Any], *, kernels: bool = True) -> torch.Tensor:
    """``[N, vocab]`` on the CPU, through the kernels or through the references on the GPU."""
    caches = fresh_caches(trees)
    c = ForkMetadata.pack(trees, caches=caches).capacity
    capacity = StreamCapacity(c.tokens + 13, c.segments + 3, c.readouts, c.pages, c.depth)
    meta = ForkMetadata.pack(trees, capacity=capacity, caches=caches, pin_memory=True).to("cuda", non_blocking=True)
    if kernels:
        model.allocate_pools(pages=c.pages + 1, parents=c.segments)
    return model.label_logits(model(meta.tokens, meta), model.label_rows(list(range(VOCAB)))).cpu()


@pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "references"])
@pytest.mark.parametrize("shapes", TREES.values(), ids=TREES.keys())
def test_branch_matches_isolated_prompt_in_float32(hf: Any, shapes: list[Any], kernels: bool) -> None:
    trees = [random_tree(shape, VOCAB, torch.Generator().manual_seed(1)) for shape in shapes]
    expected = torch.stack([isolated_logits(hf, prompt) for tree in trees for prompt in prompts_of(tree)])
    error = (logits_of(load(hf, torch.float32), trees, kernels=kernels) - expected).abs().max()
    assert error <= LOGITS_FP32 * expected.std()


def test_bfloat16_error_is_like_that_of_transformers(hf: Any) -> None:
    generator = torch.Generator().manual_seed(2)
    trees = [random_tree(shape, VOCAB, generator) for shapes in TREES.values() for shape in shapes]
    prompts = [prompt for tree in trees for prompt in prompts_of(tree)]
    expected = torch.stack([isolated_logits(hf, prompt) for prompt in prompts])
    rounded = tiny_transformers_model(dtype=torch.bfloat16, linear_value_head_dim=32)
    theirs = torch.stack([isolated_logits(rounded, prompt).float() for prompt in prompts])
    ours = logits_of(load(hf, torch.bfloat16), trees)
    our_rms, their_rms = ((x - expected).square().mean().sqrt().item() for x in (ours, theirs))
    print(f"bf16 RMS logit error: ours {our_rms:.4f}, transformers {their_rms:.4f}, {len(prompts)} prompts")
    assert our_rms <= BF16_ERROR_RATIO * their_rms


def test_the_engine_gives_the_cpu_answers_on_cuda(engine: Engine) -> None:
    requests = [DecisionRequest(f"state {i} " * i, {str(k): Noul(f"Is {k}?") for k in range(5)}) for i in range(4)]
    with tiny_engine(EngineConfig(device="cuda", dtype="float32")) as cuda:
        for got, want in zip(cuda.decide(requests), engine.decide(requests), strict=True):
            for name in want:
                assert got[name].value == pytest.approx(want[name].value, abs=PROBABILITY_FP32)
