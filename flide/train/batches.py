"""Batches: labelled rows packed into streams, as an engine packs rounds.

Shapes: Q questions, O most options of a question; ``ForkMetadata`` has those of the stream.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flide.errors import FlideError, RequestError
from flide.evaluation.rows import LabelledRow, RowError
from flide.heads import Head
from flide.runtime.format import DecisionFormat
from flide.runtime.metadata import ForkMetadata
from flide.runtime.reads import OptionReads
from flide.runtime.rounds import PreparedRequest


@dataclass(frozen=True, slots=True)
class Example:
    """A labelled row, ready to be packed."""

    row: LabelledRow
    prepared: PreparedRequest

    @property
    def num_tokens(self) -> int:
        return self.prepared.needed.tokens

    @property
    def reads(self) -> OptionReads:
        assert isinstance(self.prepared.reads, OptionReads), "formats that make more of their rows are not trained"
        return self.prepared.reads

    @property
    def num_questions(self) -> int:
        return len(self.row.targets)


@dataclass(frozen=True, slots=True)
class Batch:
    """One stream, and what its answers should be.

    Attributes:
        meta: the stream, on the device.
        rows_QO, columns_QO: int64 place of each option's logit in the head's output.
        is_option_QO, is_zero_QO: see ``OptionReads``.
        targets_QO: float32 probabilities; unused places are 0.
    """

    meta: ForkMetadata
    rows_QO: Tensor
    columns_QO: Tensor
    is_option_QO: Tensor
    is_zero_QO: Tensor
    targets_QO: Tensor

    @property
    def num_questions(self) -> int:
        return self.targets_QO.shape[0]


def prepare_examples(
    rows: Sequence[LabelledRow], format: DecisionFormat, head: Head, *, batch_tokens: int
) -> tuple[list[Example], list[RowError]]:
    """Encode rows, and find what is wrong with each that cannot be trained on.

    Raises:
        ValueError: the format makes more of its rows than columns of the head: losses know only those.
    """
    examples, errors = [], []
    for row in rows:
        try:
            example = Example(row, PreparedRequest.encode(row.request, format, head))
        except RequestError as error:
            errors.append(RowError(row.line, str(error)))
            continue
        if not isinstance(example.prepared.reads, OptionReads):
            raise FlideError(f"a {type(format).__name__} cannot be trained: its options are not columns of a head")
        if example.num_tokens > batch_tokens:
            message = f"the request has {example.num_tokens} tokens; a batch has at most {batch_tokens} (batch_tokens)"
            errors.append(RowError(row.line, message))
        else:
            examples.append(example)
    return examples, errors


def plan_epoch(examples: Sequence[Example], *, batch_tokens: int, seed: int, epoch: int) -> list[list[int]]:
    """The batches of one epoch, as indices of examples: a random order, cut where a batch is full."""
    return _cut(np.random.default_rng((seed, epoch)).permutation(len(examples)).tolist(), examples, batch_tokens)


def in_order(examples: Sequence[Example], *, batch_tokens: int) -> list[list[int]]:
    """Batches in the order of the examples."""
    return _cut(list(range(len(examples))), examples, batch_tokens)


def _cut(order: list[int], examples: Sequence[Example], batch_tokens: int) -> list[list[int]]:
    batches: list[list[int]] = []
    room = 0
    for index in order:
        needed = examples[index].num_tokens
        if not batches or needed > room:
            batches.append([])
            room = batch_tokens
        batches[-1].append(index)
        room -= needed
    return batches


def collate(examples: Sequence[Example], device: torch.device | str) -> Batch:
    """Pack examples into one stream."""
    reads = [example.reads for example in examples]
    first_rows = np.cumsum([0, *(x.num_rows for x in reads)])
    width = max(x.is_option_QO.shape[1] for x in reads)

    def joined(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
        return np.concatenate([np.pad(part, ((0, 0), (0, width - part.shape[1]))) for part in parts])

    is_option_QO = joined([x.is_option_QO for x in reads])
    targets_QO = np.zeros(is_option_QO.shape, np.float32)
    targets_QO[is_option_QO] = [p for example in examples for target in example.row.targets.values() for p in target]
    arrays = {
        "rows_QO": joined([x.rows_QO + row for x, row in zip(reads, first_rows, strict=False)]),
        "columns_QO": joined([x.columns_QO for x in reads]),
        "is_option_QO": is_option_QO,
        "is_zero_QO": joined([x.is_zero_QO for x in reads]),
        "targets_QO": targets_QO,
    }
    meta = ForkMetadata.pack([example.prepared.layout for example in examples]).to(device)
    return Batch(meta=meta, **{name: torch.from_numpy(array).to(device) for name, array in arrays.items()})


SAMPLES = 64  # of a weight, in a fingerprint


def fingerprint(examples: Sequence[Example], weights: Mapping[str, Tensor]) -> str:
    """SHA-256 of all tokens, trees and targets, in order, and of samples of every weight: whether a run goes on with
    the same data and model."""
    digest = hashlib.sha256()
    for name, weight in weights.items():
        flat = weight.detach().flatten()
        digest.update(f"{name} {tuple(weight.shape)}".encode())
        digest.update(flat[:: max(1, len(flat) // SAMPLES)].float().cpu().numpy().tobytes())
    for example in examples:
        layout = example.prepared.layout
        for array in (layout.rows, layout.nodes, example.reads.columns_QO):
            digest.update(np.ascontiguousarray(array).tobytes())
            digest.update(b"|")
        digest.update(repr(list(example.row.targets.values())).encode())
    return digest.hexdigest()
