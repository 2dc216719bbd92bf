"""Training on a GPU: the same gradients, a bfloat16 base that learns, and an engine there that answers alike."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flide import Engine, EngineConfig
from flide.evaluation.report import answer_rows
from flide.evaluation.rows import read_rows
from flide.train import TrainConfig, train
from flide.train.batches import collate
from flide.train.run import METRICS_FILE
from tests.tiny_model import tiny_model_directory
from tests.tolerance import GRADIENT_FP32, PROBABILITY_FP32
from tests.train.data import rows, write
from tests.train.test_gradients import examples, gradients, mean_loss, new_trainee

pytestmark = pytest.mark.gpu

KINDS = ["option", "scalar", "linear"]


@pytest.mark.parametrize("kind", KINDS)
def test_float32_gradients_are_those_of_the_cpu(kind: str) -> None:
    found = []
    for device in ("cpu", "cuda"):
        trainee = new_trainee(kind).to(device)
        mean_loss(trainee, collate(examples(kind), device)).backward()
        found.append({name: gradient.cpu() for name, gradient in gradients(trainee).items()})
    expected, on_cuda = found
    assert expected.keys() == on_cuda.keys()
    for name, gradient in expected.items():
        largest = gradient.abs().max().clamp(min=1)
        assert (on_cuda[name] - gradient).abs().max() <= GRADIENT_FP32 * largest, name


@pytest.mark.parametrize("kind", KINDS)
def test_a_bfloat16_base_learns_and_serves_what_it_learnt(kind: str, tmp_path: Path) -> None:
    """With layers computed again in the backward pass, as is the default; the engine has kernels and graphs."""
    data = write(tmp_path / "train.jsonl", rows(24))
    config = TrainConfig(head=kind, lr=1e-2, head_lr=1e-2, batch_tokens=700, epochs=8, device="cuda")
    train(tiny_model_directory(), data, tmp_path / "out", config)
    lines = [json.loads(line) for line in (tmp_path / "out" / METRICS_FILE).read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    per_epoch = len(losses) // 8
    assert sum(losses[-per_epoch:]) < 0.9 * sum(losses[:per_epoch])
    labelled, _ = read_rows(data)
    answers = []
    for device in ("cpu", "cuda"):
        with Engine.from_pretrained(tmp_path / "out", EngineConfig(device=device, dtype="float32")) as engine:
            answers.append(answer_rows(engine, labelled))
    for on_cpu, on_cuda in zip(*answers, strict=True):
        assert on_cuda.probabilities == pytest.approx(on_cpu.probabilities, abs=PROBABILITY_FP32)
