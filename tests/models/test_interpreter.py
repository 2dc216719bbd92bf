"""The whole model through the Triton kernels, in the interpreter: what runs on CUDA, at the embedded model's sizes."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from flide.layers import attention, gated_delta, norm
from flide.models import Qwen35ForDecision, qwen3_5
from flide.ops.fork_attention.triton import fork_attention_triton
from flide.ops.fork_gated_delta.triton import fork_gated_delta_triton
from flide.ops.fork_schedule import fork_schedule
from flide.ops.gated_norm.triton import gated_norm_triton
from flide.ops.norm_rotary.triton import norm_rotary_triton
from flide.runtime import ForkMetadata, StreamCapacity
from flide.runtime.metadata import fresh_caches
from tests.oracle import random_tree
from tests.tiny_model import tiny_model_directory
from tests.tolerance import LOGITS_FP32

needs_interpreter = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels run on the GPU here: test_cuda.py")


def with_schedule(meta: ForkMetadata, **sizes: int) -> ForkMetadata:
    return replace(meta, schedule=fork_schedule(meta, **sizes))


def paged(query: Tensor, key: Tensor, value: Tensor, *, kv_pool: Tensor, **rest: Any) -> Tensor:
    options = {name: rest.pop(name) for name in ("scale", "depth", "window", "write")}
    schedule = rest.pop("schedule")
    order = ("query_rows", "row_segments", "segment_offsets", "segment_parents", "segment_starts")
    tensors = [rest.pop(name) for name in (*order, "segment_pages", "page_table")]
    assert not rest
    return fork_attention_triton(query, key, value, kv_pool, *tensors, schedule, **options)


def cached(qkv: Tensor, a: Tensor, b: Tensor, **rest: Any) -> Tensor:
    del rest["save_rows"], rest["save_slots"]  # the schedule has them
    weights = [rest.pop(name) for name in ("conv_weight_CW", "A_log_N", "dt_bias_N")]
    pools = [rest.pop(name) for name in ("state_pool", "conv_pool", "scratch")]
    order = ("segment_offsets", "segment_parents", "row_segments", "initial_slots", "final_slots", "schedule")
    return fork_gated_delta_triton(qkv, a, b, *weights, *pools, *(rest.pop(name) for name in order), **rest)


def run_kernels(monkeypatch: pytest.MonkeyPatch, family: ModuleType) -> None:
    """Have the models of a family's module run what they run on CUDA."""
    monkeypatch.setattr(family, "with_schedule", with_schedule)
    monkeypatch.setattr(attention, "fork_attention_paged", paged)
    monkeypatch.setattr(gated_delta, "fork_gated_delta_cached", cached)
    monkeypatch.setattr(attention, "norm_rotary", lambda *inputs, **options: norm_rotary_triton(*inputs, **options))
    monkeypatch.setattr(norm, "gated_norm", gated_norm_triton)


@needs_interpreter
@pytest.mark.parametrize(
    "shapes",
    [pytest.param([(70, [3, 66]), (5, [1])], marks=pytest.mark.slow), [(0, [4, 9])]],
    ids=["two_requests", "no_trunk"],
)
@torch.no_grad()
def test_kernels_and_references_give_the_same_logits(monkeypatch: pytest.MonkeyPatch, shapes: list[Any]) -> None:
    model = Qwen35ForDecision.from_pretrained(tiny_model_directory())
    rows = model.label_rows(list(range(100)))
    generator = torch.Generator().manual_seed(0)
    trees = [random_tree(shape, model.config.vocab_size, generator) for shape in shapes]
    plain = ForkMetadata.pack(trees)
    expected = model.label_logits(model(plain.tokens, plain), rows)

    needed = ForkMetadata.pack(trees, caches=fresh_caches(trees)).capacity
    capacity = StreamCapacity(needed.tokens + 13, needed.segments + 3, needed.readouts + 2, needed.pages + 1)
    meta = ForkMetadata.pack(trees, capacity=capacity, caches=fresh_caches(trees))
    model.merge_projections()
    model.allocate_pools(pages=capacity.pages, parents=len(trees))
    run_kernels(monkeypatch, qwen3_5)
    logits = model.label_logits(model(meta.tokens, meta), rows)[: len(expected)]
    assert (logits - expected).abs().max() <= LOGITS_FP32 * expected.std()
