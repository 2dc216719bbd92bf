"""What is trained: a frozen model with adapters and a head, from a packed stream to the logits of its options.

Shapes: N readout rows, C columns of the head, Q questions, O most options of a question.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flide.heads import Head
from flide.layers.lora import add_lora
from flide.models.decision import ForDecision
from flide.train.batches import Batch
from flide.train.config import TrainConfig


class Trainee(nn.Module):
    """A model without pools and merged projections, and the head that reads it.

    Gradients flow through the fork: every branch's reach its trunk, so that a request's questions share one pass and
    have the gradients of their isolated prompts.
    """

    def __init__(self, model: ForDecision, head: Head) -> None:
        super().__init__()
        self.model, self.head = model, head

    @classmethod
    def adapt(cls, model: ForDecision, head: Head, config: TrainConfig) -> Trainee:
        """Freeze a model, give it new adapters and have its layers recomputed in the backward pass, all in place.

        Raises:
            ValueError: no layer has one of ``config.lora_targets`` or the rank; there is nothing to train.
        """
        model.requires_grad_(False)
        if config.lora_rank:
            generator = torch.Generator().manual_seed(config.seed)
            targets, scale = config.lora_targets, config.lora_scale
            add_lora(model, rank=config.lora_rank, scale=scale, generator=generator, targets=targets)
            checkpoint_layers(model)
        trainee = cls(model, head.requires_grad_(True))
        if not trainee.trained():
            raise ValueError(f"there is nothing to train: the {head.kind} head has no parameters, and lora_rank is 0")
        return trainee

    def forward(self, batch: Batch) -> Tensor:
        """``[Q, O]`` float32 logits of every question's options; unused places are -inf."""
        hidden_states_ND = self.model(batch.meta.tokens, batch.meta)
        logits_QO: Tensor = self.head(hidden_states_ND)[batch.rows_QO, batch.columns_QO]
        return logits_QO.masked_fill(batch.is_zero_QO, 0.0).masked_fill(~batch.is_option_QO, float("-inf"))

    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters that are trained, by name."""
        return {name: parameter for name, parameter in self.named_parameters() if parameter.requires_grad}


class Losses(NamedTuple):
    """Of each question, ``[Q]``."""

    cross_entropy_Q: Tensor
    brier_Q: Tensor


def decision_losses(logits_QO: Tensor, batch: Batch) -> Losses:
    """``-sum_o t_o log p_o`` and ``sum_o (p_o - t_o)^2`` with p = softmax(logits), for soft or hard targets t."""
    log_p_QO = logits_QO.log_softmax(-1).masked_fill(~batch.is_option_QO, 0.0)
    cross_entropy_Q = -(batch.targets_QO * log_p_QO).sum(-1)
    brier_Q = (logits_QO.softmax(-1) - batch.targets_QO).square().sum(-1)
    return Losses(cross_entropy_Q, brier_Q)


def checkpoint_layers(model: nn.Module) -> None:
    """Keep each layer's input alone in the forward pass, and compute the rest again in the backward pass."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList):
            for layer in module:
                layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
