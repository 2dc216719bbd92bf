"""A short name for what decides an answer: it differs where the model differs in any bit.

Hashed are the configuration, every weight, the head, the tokenizer with its chat template, and the temperatures. Not
hashed is where and how the model runs: the device, the split into files, whether projections are merged, and whether
16-bit weights were widened. Weights are summed up on their own device, so that even a large model takes a moment.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from flide.models.decision import ForDecision
from flide.runtime.tokenizer import PromptTokenizer

_HEX_DIGITS = 16
_WIDTH = 1024  # of the squares that weights are summed up in


def model_hash(
    model: ForDecision, tokenizer: PromptTokenizer, temperatures: Mapping[str, float], *, escape: bool = False
) -> str:
    """16 hexadecimal digits of a SHA-256. No proof against those who want two models to look alike.

    Args:
        model, tokenizer, temperatures: of an engine.
        escape: whether control tokens are kept out of users' text against the format's own habit.
    """
    head = model.head
    found = hashlib.sha256()
    for part in (
        [type(model).__name__, model.config.to_hf()],
        None if head is None else [head.kind, head.settings()],
        tokenizer.definition,
        {name: float(value) for name, value in temperatures.items() if value != 1},
        *(["escape"] if escape else []),
    ):
        found.update(_digest(json.dumps(part, sort_keys=True).encode()))
    tensors = model.state_dict()
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    for name in sorted(tensors):
        tensor = tensors[name]
        found.update(_digest(json.dumps([name, list(tensor.shape)]).encode()))
        found.update(_sums(tensor).cpu().numpy().tobytes())
    return found.hexdigest()[:_HEX_DIGITS]


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


@torch.no_grad()
def _sums(tensor: Tensor) -> Tensor:
    """A tensor's bits, laid out in squares, summed up by row and by column. Integers wrap alike everywhere."""
    values = tensor.detach().reshape(-1)
    sums: list[Tensor] = []
    for begin in range(0, len(values), _WIDTH * _WIDTH):
        bits = _bits(values[begin : begin + _WIDTH * _WIDTH])
        square = F.pad(bits, (0, -len(bits) % _WIDTH)).view(-1, _WIDTH)
        sums += [square.sum(0), square.sum(1)]
    return torch.cat(sums) if sums else torch.zeros(0, dtype=torch.int64)


def _bits(values: Tensor) -> Tensor:
    """As int64; those of 16-bit numbers are what they are in 32 bits."""
    if not values.is_floating_point():
        return values.long()
    if values.dtype == torch.float64:
        return values.view(torch.int64)
    return values.float().view(torch.int32).long()


__all__ = ["model_hash"]
