"""Training the demo model from nothing: the model and the loop.

Shapes: as in ``scripts/demo/batched.py``.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from flide.models import Qwen35Config, Qwen35ForDecision
from flide.train.config import BRIER_WEIGHT, CLIP_NORM
from flide.train.trainee import decision_losses
from scripts.demo.batched import (
    BatchShape,
    PaddedBatch,
    forward,
    next_token_loss,
    option_logits,
    option_row_logits,
)
from scripts.demo.config import DemoConfig
from scripts.demo.samples import Sample

FULL, LINEAR = "full_attention", "linear_attention"
DECAY_STEPS = (1e-3, 1e-1)  # of softplus(dt_bias), as Gated DeltaNet models are initialised for training
UNKNOWN_SHARE = 0.02  # of the trunks' tokens that become others, so that unknown words are nothing new
FIRST_PLAIN_ID = 256  # ids below are single bytes
SORTED_BATCHES = 32  # that are filled by length together, so that padding is small
QUESTIONS_PER_ROW = 4.4  # about
# Lengths that batches are padded to, all whole chunks: few, since each pair of them is a CUDA graph.
TRUNK_LENGTHS, BRANCH_LENGTHS = (64, 128, 192, 256, 384, 512, 768, 1024), (48, 64, 96, 128, 192, 256, 512)
ROWS_PER_QUESTION = 0.25  # at most, of a batch that is padded


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
        max_position_embeddings=32768,
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


Keep = Callable[[Qwen35ForDecision], None]


def train(
    model: Qwen35ForDecision,
    samples: Iterable[Sample],
    held_out: Sequence[Sample],
    config: DemoConfig,
    label_ids: Sequence[int],
    *,
    report_every: int = 100,
    judge_every: int = 500,
    keep: Keep | None = None,
) -> list[dict[str, float]]:
    """Train all parameters in place, on the model's device; returns what was reported.

    Args:
        model: is trained.
        samples: taken in order, as many as the steps need.
        held_out: what the model is judged by every ``judge_every`` steps.
        config: what decides the result.
        label_ids: of the options' letters.
        report_every: steps.
        judge_every: steps.
        keep: called with the model whenever it was judged, to save it.
    """

    def run() -> list[dict[str, float]]:
        return _train(model, samples, held_out, config, label_ids, report_every, judge_every, keep)

    if model.lm_head.weight.device.type != "cuda":
        return run()
    torch.cuda.synchronize()  # the weights were moved on another stream
    with torch.cuda.stream(torch.cuda.Stream()):  # captures need one of their own
        return run()


def _train(
    model: Qwen35ForDecision,
    samples: Iterable[Sample],
    held_out: Sequence[Sample],
    config: DemoConfig,
    label_ids: Sequence[int],
    report_every: int,
    judge_every: int,
    keep: Keep | None,
) -> list[dict[str, float]]:
    device = model.lm_head.weight.device
    labels = torch.tensor(label_ids, device=device)
    generator = torch.Generator(device).manual_seed(config.seed)
    batches = _batches(samples, config)
    torch.backends.cuda.matmul.allow_tf32 = True
    step_of = _Step(model, labels, config)
    run = _CapturedStep(step_of) if device.type == "cuda" else step_of
    started, waited, rows, questions, tokens, reports = time.monotonic(), 0.0, 0, 0, 0, []
    for step in range(config.steps):
        step_of.set_lr(config.lr * _factor(step, config))
        asked = time.monotonic()
        chosen = next(batches)
        waited += time.monotonic() - asked
        shape = _common_shape(chosen, config, len(label_ids)) if device.type == "cuda" else None
        run(_with_unknowns(PaddedBatch.of(chosen, shape).to(device), generator, model.config.vocab_size))
        rows += len(chosen)
        questions += _num_questions(chosen)
        tokens += sum(sample.num_tokens for sample in chosen)
        is_last = step + 1 == config.steps
        if (step + 1) % report_every and not is_last:
            continue
        nll, accuracy, words_nll, found_nll = step_of.means()
        seconds = time.monotonic() - started
        report = {
            "step": step + 1,
            "nll": nll,
            "accuracy": accuracy,
            "next_token_nll": words_nll,
            "option_row_nll": found_nll,
            "rows": rows,
            "questions": questions,
            "seconds": round(seconds, 1),
            "seconds_without_rows": round(waited, 1),
            "rows_per_second": round(rows / seconds),
            "tokens_per_second": round(tokens / seconds),
        }
        if (step + 1) % judge_every == 0 or is_last:
            report["val_accuracy"], report["val_nll"] = accuracy_of(model, held_out, labels)
            if keep:
                keep(model)
        reports.append(report)
        print(" ".join(f"{key} {value:.4g}" for key, value in report.items()), flush=True)
    return reports


class _Step:
    """One step of the optimiser: gradients of all losses, and the weights moved."""

    def __init__(self, model: Qwen35ForDecision, labels: Tensor, config: DemoConfig) -> None:
        self.model, self._labels, self._config = model, labels, config
        self._device = labels.device
        self._probe = torch.nn.Linear(config.hidden_size, 1, device=self._device)
        torch.nn.init.zeros_(self._probe.weight)
        matrices = [p for p in model.parameters() if p.ndim == 2]
        others = [*(p for p in model.parameters() if p.ndim != 2), *self._probe.parameters()]
        groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
        on_cuda = self._device.type == "cuda"
        # The rate is a tensor, which a captured step reads.
        rate = torch.tensor(config.lr, device=self._device)
        self._optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98), fused=on_cuda, capturable=on_cuda)
        self._sums = torch.zeros(5, device=self._device)

    def set_lr(self, lr: float) -> None:
        for group in self._optimizer.param_groups:
            group["lr"].fill_(lr)

    def means(self) -> list[float]:
        """Cross entropy and accuracy of the answers, and the auxiliary losses: means of the steps since the last
        call."""
        *sums, steps = self._sums.tolist()
        self._sums.zero_()
        return [x / steps for x in sums]

    def __call__(self, batch: PaddedBatch) -> None:
        model, config = self.model, self._config
        # No cache of cast weights: it would outlive a capture.
        with torch.autocast(
            self._device.type, torch.bfloat16, enabled=self._device.type == "cuda", cache_enabled=False
        ):
            hidden = forward(model, batch)
            logits_QO = option_logits(model, hidden, batch, self._labels)
            cross_entropy_Q, brier_Q = decision_losses(logits_QO, batch)
            found_Q = decision_losses(option_row_logits(self._probe, hidden, batch), batch).cross_entropy_Q
            asked_Q = batch.is_option_QO[:, :2].all(1).float()

            def mean(x_Q: Tensor) -> Tensor:
                return (x_Q * asked_Q).sum() / asked_Q.sum()

            loss = mean(cross_entropy_Q + BRIER_WEIGHT * brier_Q)
            words, found = next_token_loss(model, hidden, batch), mean(found_Q)
        self._optimizer.zero_grad(set_to_none=True)
        (loss + config.next_token_weight * words + config.option_row_weight * found).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        self._optimizer.step()
        right = mean((logits_QO.argmax(-1) == batch.targets_QO.argmax(-1)).float())
        self._sums += torch.stack([mean(cross_entropy_Q), right, words, found, torch.ones_like(right)]).detach()


class _CapturedStep:
    """The same step as a CUDA graph for every shape: launching its kernels one by one takes longer than running them.

    The first batch of a shape runs as it is, which also loads what it needs; the second one is captured.
    """

    def __init__(self, step: _Step) -> None:
        self._step, self._pool = step, torch.cuda.graph_pool_handle()
        self._seen: set[BatchShape] = set()
        self._graphs: dict[BatchShape, tuple[PaddedBatch, torch.cuda.CUDAGraph]] = {}

    def __call__(self, batch: PaddedBatch) -> None:
        shape = BatchShape(*batch.trunks_RP.shape, *batch.branches_QL.shape, batch.targets_QO.shape[1])
        if shape not in self._seen:
            self._seen.add(shape)
            self._step(batch)
            return
        if shape not in self._graphs:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=torch.cuda.current_stream()):
                self._step(batch)
            self._graphs[shape] = batch, graph
        inputs, graph = self._graphs[shape]
        if inputs is not batch:
            inputs.copy_(batch)
        graph.replay()


@torch.no_grad()
def accuracy_of(
    model: Qwen35ForDecision, samples: Sequence[Sample], labels: Tensor, *, batch_rows: int = 128
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


def _batches(samples: Iterable[Sample], config: DemoConfig) -> Iterator[list[Sample]]:
    """Batches of rows as they come, sorted by length within stretches, the stretches' batches in random order."""
    rng, left = np.random.default_rng(config.seed), iter(samples)
    stretch = max(1, round(SORTED_BATCHES * config.batch_questions / QUESTIONS_PER_ROW))
    while rows := sorted(itertools.islice(left, stretch), key=_length_class):
        made = list(_filled(rows, config))
        for i in rng.permutation(len(made)).tolist():
            yield made[i]


def _filled(rows: Sequence[Sample], config: DemoConfig) -> Iterator[list[Sample]]:
    """Rows in order, as many a batch as it has room for."""
    batch: list[Sample] = []
    questions, most_rows = 0, _most_rows(config)
    for row in rows:
        if batch and (questions + len(row.branches) > config.batch_questions or len(batch) == most_rows):
            yield batch
            batch, questions = [], 0
        batch.append(row)
        questions += len(row.branches)
    yield batch


def _num_questions(samples: Sequence[Sample]) -> int:
    return sum(len(sample.branches) for sample in samples)


def _most_rows(config: DemoConfig) -> int:
    return max(1, int(config.batch_questions * ROWS_PER_QUESTION))


def _length_class(sample: Sample) -> tuple[int, int]:
    """What rows of one batch should agree in."""
    return _at_least(max(map(len, sample.branches)), BRANCH_LENGTHS), len(sample.trunk)


def _common_shape(samples: Sequence[Sample], config: DemoConfig, options: int) -> BatchShape:
    """The shape a batch is padded to: one of few."""
    exact = BatchShape.of(samples)
    trunk, branch = _at_least(exact.trunk, TRUNK_LENGTHS), _at_least(exact.branch, BRANCH_LENGTHS)
    return BatchShape(_most_rows(config), trunk, config.batch_questions, branch, options)


def _at_least(length: int, lengths: Sequence[int]) -> int:
    return next(x for x in lengths if x >= length)


def _with_unknowns(batch: PaddedBatch, generator: torch.Generator, vocab_size: int) -> PaddedBatch:
    """The batch with some of the trunks' plain tokens replaced, in place."""
    trunks = batch.trunks_RP
    chance = torch.rand(trunks.shape, generator=generator, device=trunks.device)
    plain = (trunks >= FIRST_PLAIN_ID) & (trunks < vocab_size - 16) & (chance < UNKNOWN_SHARE)
    others = torch.randint(FIRST_PLAIN_ID, vocab_size - 16, trunks.shape, generator=generator, device=trunks.device)
    trunks.copy_(torch.where(plain, others, trunks))
    return batch
