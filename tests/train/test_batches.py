"""Batches: every row once an epoch, none over the limit, every option where the engine reads it."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from flide.evaluation.rows import LabelledRow, read_rows
from flide.heads import LinearHead, OptionHead, ScalarHead
from flide.models import Qwen35ForDecision
from flide.runtime.prompt import ChatFormat
from flide.runtime.tokenizer import PromptTokenizer
from flide.train.batches import Example, collate, fingerprint, in_order, plan_epoch, prepare_examples
from flide.train.trainee import Trainee, decision_losses
from tests.tiny_model import tiny_model_directory
from tests.tolerance import FP32_ROUNDING
from tests.train.data import rows


@pytest.fixture(scope="module")
def tokenizer() -> PromptTokenizer:
    return PromptTokenizer.from_pretrained(tiny_model_directory())


@pytest.fixture(scope="module")
def model() -> Qwen35ForDecision:
    return Qwen35ForDecision.from_pretrained(tiny_model_directory())


def labelled(values: list[dict[str, Any]]) -> list[LabelledRow]:
    found, errors = read_rows([json.dumps(value) for value in values])
    assert errors == []
    return found


def examples_of(tokenizer: PromptTokenizer, head: Any, count: int = 20, **options: Any) -> list[Example]:
    format = ChatFormat(tokenizer, style=head.prompt_style)
    examples, errors = prepare_examples(labelled(rows(count)), format, head, batch_tokens=options.get("limit", 9999))
    assert errors == []
    return examples


def test_an_epoch_has_every_row_once_in_an_order_of_its_own(
    tokenizer: PromptTokenizer, model: Qwen35ForDecision
) -> None:
    examples = examples_of(tokenizer, OptionHead.initial(model, tokenizer, []))
    longest = max(example.num_tokens for example in examples)
    orders = []
    for seed, epoch in ((0, 0), (0, 1), (1, 0)):
        plan = plan_epoch(examples, batch_tokens=longest + 150, seed=seed, epoch=epoch)
        assert plan == plan_epoch(examples, batch_tokens=longest + 150, seed=seed, epoch=epoch)
        assert all(sum(examples[i].num_tokens for i in batch) <= longest + 150 for batch in plan)
        assert len(plan) < len(examples)
        orders.append([i for batch in plan for i in batch])
        assert sorted(orders[-1]) == list(range(len(examples)))
    assert orders[0] != orders[1] != orders[2] != orders[0]
    assert [i for batch in in_order(examples, batch_tokens=longest) for i in batch] == list(range(len(examples)))


@pytest.mark.parametrize("kind", [OptionHead, ScalarHead, LinearHead], ids=lambda kind: kind.kind)
def test_a_batch_reads_what_each_request_alone_reads(
    tokenizer: PromptTokenizer, model: Qwen35ForDecision, kind: Any
) -> None:
    questions = [x for row in labelled(rows(3)) for x in row.request.questions.values()]
    head = kind.initial(model, tokenizer, questions)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(0))
    examples = examples_of(tokenizer, head, 3)
    trainee = Trainee(model, head).eval()
    with torch.no_grad():
        batch = collate(examples, "cpu")
        together = trainee(batch)
        alone = torch.cat([trainee(collate([example], "cpu")) for example in examples])
        losses = decision_losses(together, batch)
    assert together.shape == (9, 3)
    assert torch.equal(torch.isinf(together), ~batch.is_option_QO)
    finite = batch.is_option_QO
    assert (together[finite] - alone[finite]).abs().max() <= 1e-4
    assert batch.targets_QO.sum(-1).tolist() == pytest.approx([1.0] * 9)
    for q, row in enumerate(together.double().numpy()):
        n, target = int(finite[q].sum()), batch.targets_QO[q].double().numpy()
        p = np.exp(row[:n]) / np.exp(row[:n]).sum()
        nll, brier = -(target[:n] * np.log(p)).sum(), ((p - target[:n]) ** 2).sum()
        assert losses.cross_entropy_Q[q].item() == pytest.approx(nll, rel=FP32_ROUNDING, abs=FP32_ROUNDING)
        assert losses.brier_Q[q].item() == pytest.approx(brier, rel=FP32_ROUNDING, abs=FP32_ROUNDING)


def test_rows_that_do_not_fit_are_told_with_their_lines(tokenizer: PromptTokenizer, model: Qwen35ForDecision) -> None:
    values = rows(4)
    values[1]["state"] = "word " * 300
    values[3]["questions"]["team"]["criteria"] = {**values[3]["questions"]["team"]["criteria"], "nobody": None}
    head = LinearHead.initial(model, tokenizer, labelled(rows(1))[0].request.questions.values())
    format = ChatFormat(tokenizer, style=head.prompt_style)
    examples, errors = prepare_examples(labelled(values), format, head, batch_tokens=200)
    assert [example.row.line for example in examples] == [1, 3]
    assert [error.line for error in errors] == [2, 4]
    assert "a batch has at most 200" in errors[0].message
    assert "no label for 1 of 4 options" in errors[1].message
    short = ChatFormat(tokenizer, style=head.prompt_style, max_prompt_tokens=100)
    assert "at most 100 are allowed" in prepare_examples(labelled(values), short, head, batch_tokens=9999)[1][0].message


def test_a_fingerprint_knows_tokens_targets_and_weights(tokenizer: PromptTokenizer, model: Qwen35ForDecision) -> None:
    head = OptionHead.initial(model, tokenizer, [])
    format = ChatFormat(tokenizer)

    def print_of(values: list[dict[str, Any]], scale: float = 1.0) -> str:
        weights = {name: scale * weight for name, weight in model.checkpoint_tensors().items()}
        return fingerprint(prepare_examples(labelled(values), format, head, batch_tokens=9999)[0], weights)

    first = print_of(rows(3))
    other_target, other_state = rows(3), rows(3)
    other_target[2]["targets"]["late"] = 0.91
    other_state[0]["state"] += "!"
    prints = {first, print_of(other_target), print_of(other_state), print_of(rows(3)[::-1]), print_of(rows(2))}
    prints.add(print_of(rows(3), scale=1.1))
    assert len(prints) == 6
    assert print_of(rows(3)) == first
