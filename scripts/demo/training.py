"""Training the demo model from nothing: rows to samples, the model, the loop.

Shapes: as in ``scripts/demo/batched.py``.
"""

from __future__ import annotations

import functools
import json
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flide.evaluation.rows import parse_row
from flide.models import Qwen35Config, Qwen35ForDecision
from flide.runtime.prompt import ChatFormat
from flide.runtime.tokenizer import PromptTokenizer
from flide.train.config import BRIER_WEIGHT, CLIP_NORM
from flide.train.trainee import decision_losses
from scripts.demo.batched import (
    PaddedBatch,
    Regions,
    Sample,
    forward,
    next_token_loss,
    option_logits,
    option_row_logits,
)
from scripts.demo.data import make_row, with_words_dropped
from scripts.demo.parallel import over_rows

FULL, LINEAR = "full_attention", "linear_attention"
DECAY_STEPS = (1e-3, 1e-1)  # of softplus(dt_bias), as Gated DeltaNet models are initialised for training
UNKNOWN_SHARE = 0.02  # of the trunks' tokens that become others, so that unknown words are nothing new
FIRST_PLAIN_ID = 256  # ids below are single bytes
SORTED_BATCHES = 32  # that are filled by length together, so that padding is small


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoConfig:
    """Everything that decides what comes out.

    Attributes:
        rows: training rows; val_rows and test_rows likewise.
        steps, batch_rows: of the optimiser; rows are drawn in random order, pass after pass.
        lr: the highest rate; it rises for ``warmup`` steps and falls to a tenth as a cosine.
        next_token_weight, option_row_weight: of the auxiliary losses (``next_token_loss``, ``option_row_logits``).
        dropped_words: share of the words that half of the training rows lack.
        hidden_size, intermediate_size, layers: of the model; an L is a Gated DeltaNet layer, an F full attention.
        seed: of the weights and the order.
    """

    rows: int = 200_000
    val_rows: int = 2_000
    test_rows: int = 3_000
    steps: int = 4_500
    batch_rows: int = 128
    lr: float = 1e-3
    warmup: int = 300
    weight_decay: float = 0.05
    next_token_weight: float = 0.1
    option_row_weight: float = 0.3
    dropped_words: float = 0.12
    hidden_size: int = 256
    intermediate_size: int = 512
    layers: str = "LLFLLF"
    seed: int = 1


def model_config(config: DemoConfig, vocab_size: int) -> Qwen35Config:
    """Heads are those of the published models, for which there are CUDA kernels."""
    return Qwen35Config(
        vocab_size=vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        layer_types=tuple({"L": LINEAR, "F": FULL}[layer] for layer in config.layers),
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=256,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
        rope_theta=10000.0,
        partial_rotary_factor=0.25,
        mrope_section=(11, 11, 10),
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
    )


def new_model(config: DemoConfig, vocab_size: int) -> Qwen35ForDecision:
    """Random float32 weights to start from, on the CPU: the same from the same seed."""
    torch.manual_seed(config.seed)
    model = Qwen35ForDecision.from_config(model_config(config, vocab_size), dtype=torch.float32)
    low, high = (math.log(step) for step in DECAY_STEPS)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("conv1d.weight"):
                parameter.uniform_(-0.5, 0.5)
            elif name.endswith("dt_bias"):
                step = torch.empty_like(parameter).uniform_(low, high).exp()
                parameter.copy_(step + torch.log(-torch.expm1(-step)))  # the inverse of softplus
            elif parameter.ndim == 2:
                # Products of unit rows are unit rows; what is added to the residual sum starts small.
                adds = name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight"))
                parameter.normal_(std=parameter.shape[1] ** -0.5 * ((2 * len(config.layers)) ** -0.5 if adds else 1.0))
    return model.train()


def make_samples(
    split: str, count: int, tokenizer: Path, *, dropped_words: float = 0.0, processes: int | None = None
) -> list[Sample]:
    """The first rows of a split, parsed and encoded as an engine does it; of every other one words are dropped."""
    work = functools.partial(_encode_rows, directory=tokenizer, dropped_words=dropped_words)
    return [sample for part in over_rows(work, split, count, processes=processes) for sample in part]


def _encode_rows(split: str, first: int, last: int, *, directory: Path, dropped_words: float) -> list[Sample]:
    format = ChatFormat(PromptTokenizer.from_pretrained(directory))
    line_ends = line_end_ids(format.tokenizer)
    samples = []
    for index in range(first, last):
        row = make_row(split, index)
        if dropped_words and index % 2:
            row = with_words_dropped(row, random.Random(index), share=dropped_words)
        samples.append(encode_row(row, format, line_ends))
    return samples


def line_end_ids(tokenizer: PromptTokenizer) -> frozenset[int]:
    """Tokens that end a line."""
    return frozenset(i for i in range(tokenizer.max_prompt_id() + 1) if tokenizer.decode([i]).endswith("\n"))


def encode_row(row: dict[str, Any], format: ChatFormat, line_ends: frozenset[int]) -> Sample:
    """A row as a sample. Its questions and options are lines: they hold no line breaks."""
    labelled = parse_row(json.dumps(row), 1)
    encoded = format.encode(labelled.request)
    # The first line is the question.
    ends = [
        [i for i, token in enumerate(tail) if token in line_ends][1 : n + 1]
        for tail, n in zip(encoded.tails, encoded.num_options, strict=True)
    ]
    return Sample(
        np.array(encoded.shared, np.int16),
        [np.array(tail, np.int16) for tail in encoded.tails],
        ends,
        list(labelled.targets.values()),
    )


def train(
    model: Qwen35ForDecision,
    samples: Sequence[Sample],
    held_out: Sequence[Sample],
    config: DemoConfig,
    label_ids: Sequence[int],
    *,
    report_every: int = 100,
) -> list[dict[str, float]]:
    """Train all parameters in place, on the model's device; returns what was reported."""
    device = model.lm_head.weight.device
    labels = torch.tensor(label_ids, device=device)
    probe = torch.nn.Linear(config.hidden_size, 1, device=device)
    torch.nn.init.zeros_(probe.weight)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [*(p for p in model.parameters() if p.ndim != 2), *probe.parameters()]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    on_cuda = device.type == "cuda"
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.98), fused=on_cuda)
    regions = Regions.compiled() if on_cuda else Regions.plain()
    generator = torch.Generator(device).manual_seed(config.seed)
    batches = _batches(samples, config)
    torch.backends.cuda.matmul.allow_tf32 = True
    started, tokens, reports = time.monotonic(), 0, []
    running = torch.zeros(4, device=device)
    for step in range(config.steps):
        for group in optimizer.param_groups:
            group["lr"] = config.lr * _factor(step, config)
        chosen = next(batches)
        batch = _with_unknowns(PaddedBatch.of(chosen).to(device), generator, model.config.vocab_size)
        with torch.autocast(device.type, torch.bfloat16, enabled=on_cuda):
            hidden = forward(model, batch, regions)
            logits_QO = option_logits(model, hidden, batch, labels)
            cross_entropy_Q, brier_Q = decision_losses(logits_QO, batch)
            loss = (cross_entropy_Q + BRIER_WEIGHT * brier_Q).mean()
            words = next_token_loss(model, hidden, batch)
            found = decision_losses(option_row_logits(probe, hidden, batch), batch).cross_entropy_Q.mean()
        optimizer.zero_grad(set_to_none=True)
        (loss + config.next_token_weight * words + config.option_row_weight * found).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        tokens += sum(sample.num_tokens for sample in chosen)
        right = (logits_QO.argmax(-1) == batch.targets_QO.argmax(-1)).float().mean()
        running += torch.stack([cross_entropy_Q.mean(), right, words, found]).detach()
        if (step + 1) % report_every == 0 or step + 1 == config.steps:
            count = step % report_every + 1
            nll, accuracy, words_nll, found_nll = (running / count).tolist()
            running.zero_()
            seconds = time.monotonic() - started
            held_accuracy, held_nll = accuracy_of(model, held_out, labels, batch_rows=config.batch_rows)
            reports.append(
                {
                    "step": step + 1,
                    "nll": nll,
                    "accuracy": accuracy,
                    "next_token_nll": words_nll,
                    "option_row_nll": found_nll,
                    "val_nll": held_nll,
                    "val_accuracy": held_accuracy,
                    "seconds": round(seconds, 1),
                    "tokens_per_second": round(tokens / seconds),
                }
            )
            print(" ".join(f"{key} {value:.4g}" for key, value in reports[-1].items()), flush=True)
    return reports


@torch.no_grad()
def accuracy_of(
    model: Qwen35ForDecision, samples: Sequence[Sample], labels: Tensor, *, batch_rows: int
) -> tuple[float, float]:
    """Accuracy and mean negative log-likelihood over the questions of samples."""
    right, nll, questions = 0.0, 0.0, 0
    for begin in range(0, len(samples), batch_rows):
        batch = PaddedBatch.of(samples[begin : begin + batch_rows]).to(labels.device)
        logits_QO = option_logits(model, forward(model, batch), batch, labels)
        right += float((logits_QO.argmax(-1) == batch.targets_QO.argmax(-1)).sum())
        nll += float(decision_losses(logits_QO, batch).cross_entropy_Q.sum())
        questions += len(logits_QO)
    return right / questions, nll / questions


def _factor(step: int, config: DemoConfig) -> float:
    if step < config.warmup:
        return (step + 1) / config.warmup
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - config.warmup) / max(1, config.steps - config.warmup)))


def _batches(samples: Sequence[Sample], config: DemoConfig) -> Iterator[list[Sample]]:
    """Batches without end: random rows, sorted by length within stretches, the stretches' batches in random order."""
    rng = np.random.default_rng(config.seed)
    while True:
        order = rng.permutation(len(samples))
        for begin in range(0, len(order), config.batch_rows * SORTED_BATCHES):
            stretch = sorted(
                order[begin : begin + config.batch_rows * SORTED_BATCHES], key=lambda i: _length_class(samples[i])
            )
            starts = range(0, len(stretch), config.batch_rows)
            for start in rng.permutation(np.array(starts)).tolist():
                yield [samples[i] for i in stretch[start : start + config.batch_rows]]


def _length_class(sample: Sample) -> tuple[int, int]:
    """What rows of one batch should agree in: 0.71 of a batch's places then hold tokens, and 0.35 of random rows'."""
    return max(map(len, sample.branches)) // 12, len(sample.trunk)


def _with_unknowns(batch: PaddedBatch, generator: torch.Generator, vocab_size: int) -> PaddedBatch:
    """The batch with some of the trunks' plain tokens replaced, in place."""
    trunks = batch.trunks_RP
    chance = torch.rand(trunks.shape, generator=generator, device=trunks.device)
    plain = (trunks >= FIRST_PLAIN_ID) & (trunks < vocab_size - 16) & (chance < UNKNOWN_SHARE)
    others = torch.randint(FIRST_PLAIN_ID, vocab_size - 16, trunks.shape, generator=generator, device=trunks.device)
    trunks.copy_(torch.where(plain, others, trunks))
    return batch
