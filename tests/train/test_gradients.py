"""The gradients of one forked pass are those of isolated prompts, one at a time, through transformers and PEFT."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor

from flide import Choice, DecisionRequest, Noul
from flide.evaluation.rows import LabelledRow
from flide.heads import Head, LinearHead, OptionHead, OptionReads, ScalarHead
from flide.models import Qwen35ForDecision
from flide.models.adapter import save_adapter
from flide.runtime.rounds import PreparedRequest
from flide.runtime.tree import prompts_of
from flide.train.batches import Batch, Example, collate
from flide.train.config import BRIER_WEIGHT, TrainConfig
from flide.train.determinism import deterministic_algorithms
from flide.train.trainee import Trainee, decision_losses
from tests.oracle import TINY, random_tree, tiny_transformers_model
from tests.tolerance import GRADIENT_FP32

D = TINY["hidden_size"]
CONFIG = TrainConfig(head="scalar", lora_rank=4)
# Per request: tokens of the trunk, and for each question those of its branch and its target. Where a question has
# candidates they are leaves of the branch.
SHAPES: list[tuple[int, list[tuple[int, tuple[float, ...]]]]] = [
    (20, [(5, (1.0, 0.0)), (3, (0.2, 0.5, 0.3)), (66, (0.0, 0.0, 1.0, 0.0))]),
    (3, [(2, (0.7, 0.3))]),
    (70, [(1, (0.0, 1.0)), (4, (1.0,))]),
]


def new_head(kind: str, model: Any) -> Head:
    generator = torch.Generator().manual_seed(2)
    head: Head
    if kind == "option":
        head = OptionHead(model.label_rows([5, 3, 8, 1]))
    else:
        head = ScalarHead(D) if kind == "scalar" else LinearHead(["a", "b", "c", "d"], D)
        with torch.no_grad():
            for parameter in head.parameters():
                parameter.normal_(generator=generator, std=D**-0.5)
    return head


def examples(kind: str) -> list[Example]:
    """Requests of random tokens. In the linear head's case options have their columns in another order."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for trunk, questions in SHAPES:
        leaves = [[6] * len(target) if kind == "scalar" and len(target) != 2 else [] for _, target in questions]
        branches = [(length, below) for (length, _), below in zip(questions, leaves, strict=True)]
        tree = random_tree((trunk, branches), TINY["vocab_size"], generator)
        targets = [target for _, target in questions]
        if kind == "scalar":
            columns = [(0, -1) if len(target) == 2 else [0] * len(target) for target in targets]
        else:
            columns = [range(len(t)) if kind == "option" else list(range(len(t)))[::-1] for t in targets]
        reads = OptionReads.of(columns, row_per_option=kind == "scalar")
        asked = {str(i): Noul() if len(t) == 2 else Choice(None, list("wxyz"[: len(t)])) for i, t in enumerate(targets)}
        prepared = PreparedRequest.of(DecisionRequest("s", asked), tree, [len(t) for t in targets], reads)
        row = LabelledRow(prepared.request, {str(i): target for i, target in enumerate(targets)}, 1)
        found.append(Example(row, prepared))
    return found


def new_trainee(kind: str, *, rank: int = 4) -> Trainee:
    hf = tiny_transformers_model()
    model = Qwen35ForDecision.from_config(hf.config)
    model.load_state_dict(hf.state_dict())
    config = TrainConfig(head="scalar", lora_rank=rank)
    trainee = Trainee.adapt(model.eval(), new_head(kind, model), config)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in trainee.model.named_parameters():
            if "lora_B" in name:  # zero in the beginning, which would hide the gradients of A
                parameter.normal_(generator=generator, std=0.05)
    return trainee


def mean_loss(trainee: Callable[[Batch], Tensor], batch: Batch) -> Tensor:
    losses = decision_losses(trainee(batch), batch)
    return (losses.cross_entropy_Q + BRIER_WEIGHT * losses.brier_Q).mean()


def gradients(trainee: Trainee) -> dict[str, Tensor]:
    found = {name: parameter.grad for name, parameter in trainee.trained().items()}
    assert all(gradient is not None for gradient in found.values())
    return {name: gradient.clone() for name, gradient in found.items() if gradient is not None}


def isolated_gradients(trainee: Trainee, kind: str, directory: Path) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients with every prompt run alone, unpadded, through transformers with PEFT's own layers."""
    save_adapter(trainee.model, directory, base_model="")
    peft = PeftModel.from_pretrained(tiny_transformers_model(), directory, is_trainable=True)
    head = new_head(kind, trainee.model)
    losses = []
    for example in examples(kind):
        rows = []
        for prompt in prompts_of(example.prepared.tree):
            hidden = peft.base_model.model.model(torch.tensor([prompt]), use_cache=False).last_hidden_state[0, -1]
            rows.append(head(hidden[None])[0])
        rest = iter(rows)
        for target in example.row.targets.values():
            t = torch.tensor(target)
            if kind == "scalar":
                scores = [next(rest)[0] for _ in range(1 if len(target) == 2 else len(target))]
                logits = torch.stack([*scores, *[torch.zeros(())] * (len(target) - len(scores))])
            else:
                row = next(rest)[: len(target)]
                logits = row if kind == "option" else row.flip(0)
            p = torch.exp(logits) / torch.exp(logits).sum()
            losses.append(-(t * p.log()).sum() + 0.1 * ((p - t) ** 2).sum())
    loss = torch.stack(losses).mean()
    loss.backward()
    found = {}
    for name, parameter in peft.named_parameters():
        if parameter.requires_grad:
            found["model." + name.removeprefix("base_model.model.").replace(".default", "")] = parameter.grad
    found |= {f"head.{name}": parameter.grad for name, parameter in head.named_parameters()}
    return loss.item(), found


@pytest.mark.parametrize("kind", ["option", "scalar", "linear"])
def test_a_forked_batch_has_the_gradients_of_isolated_prompts(kind: str, tmp_path: Path) -> None:
    trainee = new_trainee(kind)
    batch = collate(examples(kind), "cpu")
    loss = mean_loss(trainee, batch)
    loss.backward()
    expected_loss, expected = isolated_gradients(trainee, kind, tmp_path)
    found = gradients(trainee)
    assert loss.item() == pytest.approx(expected_loss, abs=1e-6)
    assert found.keys() == expected.keys()
    assert sum(name.startswith("head.") for name in found) == (0 if kind == "option" else 2)
    largest = max(gradient.abs().max().item() for gradient in expected.values())
    assert 0.01 < largest < 10
    for name, gradient in found.items():
        assert gradient.abs().max() > 1e-5 * largest, name  # a gradient that is there
        assert (gradient - expected[name]).abs().max().item() <= GRADIENT_FP32 * max(1.0, largest), name
    for name, parameter in trainee.named_parameters():
        assert parameter.requires_grad == (name in found)
        assert parameter.requires_grad or parameter.grad is None


def test_layers_that_are_computed_again_give_the_same_bits() -> None:
    plain, again = new_trainee("scalar"), new_trainee("scalar")
    for layer in plain.model.model.layers:
        del layer.forward  # the class has its own
    batch = collate(examples("scalar"), "cpu")
    for trainee in (plain, again):
        with deterministic_algorithms():
            mean_loss(trainee, batch).backward()
    found = gradients(again)
    for name, gradient in gradients(plain).items():
        assert torch.equal(gradient, found[name]), name


def test_a_head_alone_takes_no_gradients_through_the_model() -> None:
    trainee = new_trainee("scalar", rank=0)
    logits = trainee.model(*(lambda meta: (meta.tokens, meta))(collate(examples("scalar"), "cpu").meta))
    assert not logits.requires_grad
    mean_loss(trainee, collate(examples("scalar"), "cpu")).backward()
    assert set(gradients(trainee)) == {"head.score.weight", "head.score.bias"}
    with pytest.raises(ValueError, match="nothing to train"):
        new_trainee("option", rank=0)


@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_training_has_the_same_gradients_and_no_fallback(backend: str) -> None:
    torch._dynamo.reset()
    batch = collate(examples("scalar"), "cpu")
    eager, trainee = new_trainee("scalar"), new_trainee("scalar")
    mean_loss(eager, batch).backward()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*autograd.*")
        mean_loss(torch.compile(trainee, backend=backend, fullgraph=True), batch).backward()
    expected = gradients(eager)
    for name, gradient in gradients(trainee).items():
        assert (gradient - expected[name]).abs().max().item() <= GRADIENT_FP32, name
    torch._dynamo.reset()
