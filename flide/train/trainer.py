"""The trainer: steps over packed batches, evaluation, and what a checkpoint needs. No files, no progress bar.

Shapes: Q questions, O most options of a question.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flide.errors import CheckpointError, ModelOutputError
from flide.evaluation.metrics import LabelledAnswer
from flide.heads import Head
from flide.models.decision import ForDecision
from flide.runtime.decision import answer_question
from flide.train.batches import Example, collate, in_order, plan_epoch
from flide.train.config import BETAS, BRIER_WEIGHT, CLIP_NORM, EPS, WEIGHT_DECAY, TrainConfig
from flide.train.determinism import deterministic_algorithms
from flide.train.state import rng_state, set_rng_state
from flide.train.trainee import Trainee, decision_losses


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one step did.

    Attributes:
        step: its number, from 1.
        epoch: the epoch it belongs to, from 1.
        loss, cross_entropy, brier, accuracy: means over its questions, before the update.
        grad_norm: of the gradients, before they were clipped.
        lr, head_lr: learning rates of the update.
        tokens, questions: how many there were.
    """

    step: int
    epoch: int
    loss: float
    cross_entropy: float
    brier: float
    accuracy: float
    grad_norm: float
    lr: float
    head_lr: float
    tokens: int
    questions: int


class Trainer:
    """Trains adapters and a head.

    One step is one batch per process. AdamW; the rates rise and fall over all steps (``TrainConfig.lr_factor``). The
    loss is the mean over a step's questions of cross entropy + 0.1 Brier.

    Args:
        model: loaded and on its device; it is adapted in place (``Trainee.adapt``) and its own weights stay as they
            are, to the bit.
        head: what reads it, on the same device.
        examples: at least one, each within ``config.batch_tokens``.
        config: options of the run.
        accelerator: ``accelerate.Accelerator`` without mixed precision: the base, adapters and head have dtypes of
            their own.

    Attributes:
        step, steps: steps done, and how many there are.
    """

    def __init__(
        self, model: ForDecision, head: Head, examples: Sequence[Example], config: TrainConfig, *, accelerator: Any
    ) -> None:
        self.config, self._examples, self._accelerator = config, examples, accelerator
        self.trainee = Trainee.adapt(model, head, config)
        self._plan = _plan(examples, config, accelerator.num_processes)
        self.step, self.steps = 0, len(self._plan)
        trained = self.trainee.trained()
        groups = [
            {"params": [p for name, p in trained.items() if name.startswith("head.") == is_head], "highest_lr": lr}
            for is_head, lr in ((False, config.lr), (True, config.head_lr))
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.0, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY)
        self._parameters = list(trained.values())
        # In several processes the first averages gradients over them.
        self._forward, self._optimizer = accelerator.prepare(self.trainee, optimizer)

    @deterministic_algorithms()
    def advance(self) -> StepReport:
        """One step, the same to the bit whenever it is done again.

        Raises:
            ModelOutputError: loss or gradients are not finite; nothing was updated.
        """
        epoch, batches = self._plan[self.step]
        rank, processes = self._accelerator.process_index, self._accelerator.num_processes
        # The last step of an epoch may have too few batches: the other processes take part without weight.
        weight = float(rank < len(batches))
        mine = [self._examples[i] for i in batches[rank if weight else 0]]
        questions = sum(self._examples[i].num_questions for batch in batches for i in batch)
        rates = self._set_rates()

        self.trainee.train()
        batch = collate(mine, self._accelerator.device)
        logits_QO = self._forward(batch)
        cross_entropy_Q, brier_Q = decision_losses(logits_QO, batch)
        loss = (cross_entropy_Q + BRIER_WEIGHT * brier_Q).sum() * (weight * processes / questions)
        self._accelerator.backward(loss)
        grad_norm = float(self._accelerator.clip_grad_norm_(self._parameters, CLIP_NORM))

        with torch.no_grad():
            right = (logits_QO.argmax(-1) == batch.targets_QO.argmax(-1)).sum()
            sums = torch.stack([cross_entropy_Q.sum(), brier_Q.sum(), right.float()]) * weight
            cross_entropy, brier, accuracy = self._accelerator.reduce(sums, "sum").tolist()
        cross_entropy, brier, accuracy = (x / questions for x in (cross_entropy, brier, accuracy))
        if not np.isfinite([cross_entropy, brier, grad_norm]).all():
            self._optimizer.zero_grad(set_to_none=True)
            raise ModelOutputError(f"loss or gradients are not finite in step {self.step + 1}")
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.step += 1
        return StepReport(
            step=self.step,
            epoch=epoch + 1,
            loss=cross_entropy + BRIER_WEIGHT * brier,
            cross_entropy=cross_entropy,
            brier=brier,
            accuracy=accuracy,
            grad_norm=grad_norm,
            lr=rates[0],
            head_lr=rates[1],
            tokens=sum(self._examples[i].num_tokens for x in batches for i in x),
            questions=questions,
        )

    def any_process(self, flag: bool) -> bool:
        """Whether a flag is set in some process; all have to ask."""
        return bool(self._accelerator.reduce(torch.tensor(float(flag), device=self._accelerator.device), "sum") > 0)

    @property
    def ends_epoch(self) -> bool:
        """Whether the step done last was its epoch's last."""
        return self.step > 0 and (self.step == self.steps or self._plan[self.step][0] != self._plan[self.step - 1][0])

    @torch.no_grad()
    def evaluate(self, examples: Sequence[Example]) -> list[LabelledAnswer]:
        """The answers that the trainee gives now, computed as an engine computes them.

        Raises:
            ModelOutputError: its logits are not finite.
        """
        self.trainee.eval()
        answers: list[LabelledAnswer] = []
        for indices in in_order(examples, batch_tokens=self.config.batch_tokens):
            batch = [examples[i] for i in indices]
            packed = collate(batch, self._accelerator.device)
            logits = self.trainee(packed)
            if not logits[packed.is_option_QO].isfinite().all():
                raise ModelOutputError(f"logits are not finite after step {self.step}")
            logits_QO = logits.double().cpu().numpy()
            weights_QO = iter(np.exp(logits_QO - logits_QO.max(1, keepdims=True)).tolist())
            for example in batch:
                row = example.row
                for question_id, target in row.targets.items():
                    answer = answer_question(row.request.questions[question_id], next(weights_QO)[: len(target)])
                    options, probabilities = tuple(answer.probabilities), tuple(answer.probabilities.values())
                    answers.append(LabelledAnswer(row.line, question_id, answer.type, options, probabilities, target))
        return answers

    def state(self) -> dict[str, Any]:
        """What :meth:`restore` needs: fields of a ``TrainingState``."""
        trained = {name: parameter.detach().cpu().clone() for name, parameter in self.trainee.trained().items()}
        return {
            "step": self.step,
            "trained": trained,
            "optimizer": self._optimizer.state_dict(),
            "rng": rng_state(),
        }

    def restore(
        self, *, step: int, trained: dict[str, Tensor], optimizer: dict[str, Any], rng: dict[str, Tensor]
    ) -> None:
        """Go on after a step of a run with the same model, examples and options.

        Raises:
            CheckpointError: the parameters are not those of this run.
        """
        parameters = self.trainee.trained()
        if _forms(trained) != _forms(parameters) or step > self.steps:
            raise CheckpointError("the checkpoint holds other parameters, or more steps, than this run trains")
        moments, count = optimizer.get("state"), torch.zeros(())
        # A parameter that never had a gradient has none.
        expected = {i: _forms({"step": count, "exp_avg": p, "exp_avg_sq": p}) for i, p in enumerate(self._parameters)}
        if not isinstance(moments, dict) or any(expected.get(i) != _forms(x) for i, x in moments.items()):
            raise CheckpointError("the checkpoint holds another optimizer's state than this run's")
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(trained[name])
        try:
            # The options are this run's: of the optimizer's state the moments alone are taken.
            self._optimizer.load_state_dict({**self._optimizer.state_dict(), "state": moments})
            set_rng_state(rng)
        except (TypeError, ValueError, RuntimeError, KeyError, AttributeError, IndexError) as error:
            raise CheckpointError(f"the checkpoint is damaged: {str(error).partition(chr(10))[0]}") from error
        self.step = step

    def _set_rates(self) -> list[float]:
        factor = self.config.lr_factor(self.step, self.steps)
        for group in self._optimizer.param_groups:
            group["lr"] = group["highest_lr"] * factor
        return [group["lr"] for group in self._optimizer.param_groups]


def _forms(tensors: Any) -> Any:
    """Name -> shape and dtype of tensors; what is none stays as it is."""
    if not isinstance(tensors, dict):
        return tensors
    return {k: (x.shape, x.dtype) if isinstance(x, Tensor) and not x.is_meta else x for k, x in tensors.items()}


def _plan(examples: Sequence[Example], config: TrainConfig, processes: int) -> list[tuple[int, list[list[int]]]]:
    """Every step of the run: its epoch, and a batch for each process."""
    steps = []
    for epoch in range(config.epochs):
        batches = plan_epoch(examples, batch_tokens=config.batch_tokens, seed=config.seed, epoch=epoch)
        steps += [(epoch, batches[i : i + processes]) for i in range(0, len(batches), processes)]
    return steps
