"""What the model has to beat: a logistic regression on bags of words and their crosses, trained on the same rows.

An option's score is linear in hashed features: the option's words; question word x option word; state word x option
word; and of yes-or-no questions, whose options' words say little, state word x question word for Yes. A question's
probabilities are the softmax of its options' scores. The penalty is picked on the validation split.

Shapes: as in ``scripts/demo/bags.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from flide.evaluation.metrics import LabelledAnswer
from scripts.demo.bags import MOST_OPTIONS, Bags, Told

SLOTS = 1 << 21  # of the hashed features
PENALTIES = (0.0, 1e-6)
EPOCHS = 2
BATCH = 1024
LR = 0.02


class Baseline(torch.nn.Module):
    """The weights of all features."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(SLOTS))

    def forward(self, bags: Sequence[Tensor]) -> Tensor:
        """``[Q, O]`` log-probabilities of a :class:`Bags` of tensors; -inf where there is no option."""
        state_QS, asked_QI, options_QOW, _, noul_Q, count_Q = bags
        width = int(count_Q.max())
        options_QOW = options_QOW[:, :width]
        scores_QO = self._sum(options_QOW[..., None], 0, options_QOW[..., None])
        scores_QO = scores_QO + self._sum(options_QOW[..., None], 1, asked_QI[:, None, None, :])
        scores_QO = scores_QO + self._sum(options_QOW[..., None], 2, state_QS[:, None, None, :])
        yes_Q1 = self._sum(asked_QI[:, None, :, None], 3, state_QS[:, None, None, :]) * noul_Q[:, None]
        scores_QO = scores_QO + torch.nn.functional.pad(yes_Q1, (0, width - 1))
        is_option_QO = torch.arange(width, device=count_Q.device) < count_Q[:, None]
        return scores_QO.masked_fill(~is_option_QO, float("-inf")).log_softmax(-1)

    def _sum(self, a: Tensor, kind: int, b: Tensor) -> Tensor:
        """The sum of the weights of all pairs, over the root of their number."""
        slots = (a.long() * 1_000_003 + b.long() * 998_244_353 + kind * 104_729) % 2_147_483_647 % SLOTS
        seen = (a > 0) & (b > 0)
        weights = self.weight.gather(0, slots.flatten()).view_as(slots)  # backwards, indexing would sort all slots
        return (weights * seen).flatten(2).sum(2) / seen.flatten(2).sum(2).clamp(min=1).sqrt()


def fit(train: Bags, val: Bags, *, device: torch.device, epochs: int = EPOCHS, seed: int = 0) -> Baseline:
    """The regression whose penalty does best on the validation split."""
    fitted = [_fit(train, penalty, device=device, epochs=epochs, seed=seed) for penalty in PENALTIES]
    targets = torch.from_numpy(val.targets_QO)
    return min(fitted, key=lambda model: float(-(targets * log_probabilities(model, val).clamp(min=-30)).sum()))


@torch.no_grad()
def log_probabilities(model: Baseline, bags: Bags) -> Tensor:
    """``[Q, MOST_OPTIONS]`` on the CPU."""
    parts = []
    for begin in range(0, len(bags.count_Q), BATCH):
        part = [torch.from_numpy(array[begin : begin + BATCH]).to(model.weight.device) for array in bags]
        log_p_QO = model(part)
        pad = MOST_OPTIONS - log_p_QO.shape[1]
        parts.append(torch.nn.functional.pad(log_p_QO, (0, pad), value=float("-inf")).cpu())
    return torch.cat(parts)


def answers(model: Baseline, bags: Bags, told: Sequence[Told]) -> list[LabelledAnswer]:
    """Answers as an engine's, for the same metrics."""
    found = []
    for this, p, target in zip(
        told, log_probabilities(model, bags).double().exp().numpy(), bags.targets_QO, strict=True
    ):
        n = len(this.options)
        probabilities, wanted = p[:n] / p[:n].sum(), target[:n].astype(float)
        found.append(LabelledAnswer(*this, tuple(probabilities.tolist()), tuple(wanted.tolist())))
    return found


def _fit(train: Bags, penalty: float, *, device: torch.device, epochs: int, seed: int) -> Baseline:
    model = Baseline().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    rng = np.random.default_rng(seed)
    on_device = [torch.from_numpy(array).to(device) for array in train]
    steps = epochs * -(-len(train.count_Q) // BATCH)
    step = 0
    for _ in range(epochs):
        order = torch.from_numpy(rng.permutation(len(train.count_Q))).to(device)
        for chosen in order.split(BATCH):
            optimizer.param_groups[0]["lr"] = LR * (1 - step / steps)
            bags = [array[chosen] for array in on_device]
            log_p_QO = model(bags)
            targets_QO = bags[3][:, : log_p_QO.shape[1]]
            loss = -(targets_QO * log_p_QO.masked_fill(log_p_QO.isinf(), 0.0)).sum(-1).mean()
            if penalty:
                loss = loss + penalty * model.weight.square().sum()
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            step += 1
    return model
