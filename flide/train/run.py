"""A training run: from a model and a file of labelled rows to a directory that an engine takes as it is.

The directory holds, in the end: the adapters as PEFT's files, ``head.json`` (and ``head.safetensors``), the tokenizer,
``metrics.jsonl`` and ``training.json``; while the run goes on, or after it was stopped, ``training_state.pt``.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from flide.errors import CheckpointError, FlideError
from flide.evaluation.metrics import Evaluation, evaluate
from flide.evaluation.rows import LabelledRow, RowError, read_rows
from flide.heads import Head, save_head
from flide.heads.head import head_kind
from flide.models.adapter import save_adapter
from flide.models.auto import AutoModelForDecision
from flide.models.decision import ForDecision
from flide.models.directory import ModelDirectory, lasting_name
from flide.runtime.config import EngineConfig
from flide.runtime.format import make_format
from flide.runtime.tokenizer import PromptTokenizer
from flide.train.batches import Example, fingerprint, prepare_examples
from flide.train.config import TrainConfig
from flide.train.merged import copy_tokenizer
from flide.train.signals import StopSignals
from flide.train.state import STATE_FILE, TrainingState, hold
from flide.train.trainer import Trainer

METRICS_FILE = "metrics.jsonl"
REPORT_FILE = "training.json"
FORMAT_VERSION = 1
VALIDATION_METRICS = ("accuracy", "nll", "brier", "ece", "level_mae")


class BadRows(FlideError):
    """Rows that cannot be trained on; nothing was written.

    Attributes:
        errors: (file, what is wrong with a line), in order.
    """

    def __init__(self, errors: Sequence[tuple[str, RowError]]) -> None:
        self.errors = list(errors)
        super().__init__("\n".join(f"{name}: {error}" for name, error in errors))


@dataclass(frozen=True, slots=True)
class TrainResult:
    """What a run came to.

    Attributes:
        directory: with the fine-tuned model.
        steps: of all epochs.
        validation: metrics of the validation rows in the end; None without such rows.
    """

    directory: Path
    steps: int
    validation: dict[str, Any] | None


def train(
    model: str | Path,
    data: str | Path,
    out: str | Path,
    config: TrainConfig | None = None,
    *,
    val: str | Path | None = None,
    resume: bool = False,
    progress: bool | None = None,
) -> TrainResult:
    """Fine-tune a model on labelled rows (``flide.evaluation.rows``).

    SIGINT and SIGTERM end the run after the step that is being done, with a checkpoint that ``resume`` goes on from,
    bit for bit on the same machine.

    Args:
        model: a model directory, or a Hub id; one that was fine-tuned has to be merged first.
        data: JSONL file of rows with a target for every question.
        out: the directory to write, which must not exist yet or be empty, unless ``resume``.
        config: options of the run; to resume, the same as before.
        val: rows to evaluate on after every epoch.
        resume: go on with the run in ``out``.
        progress: show a progress bar on standard error; None to do so where it is a terminal.

    Raises:
        BadRows: rows that cannot be trained on, all of them; nothing was written.
        ValueError: anything else that is wrong with the arguments; nothing was written. That accelerate is missing.
        ModelOutputError: loss, gradients or logits are not finite.
        KeyboardInterrupt: the run was stopped; the checkpoint is written.
    """
    check_accelerate()
    from accelerate import Accelerator

    config, out = config or TrainConfig(), Path(out)
    kind = head_kind(config.head)
    state = _resumed(out, config, model) if resume else None
    if state is None:
        check_empty(out)
    found = ModelDirectory.open(model)
    if not found.is_whole:
        raise CheckpointError(f"{found.path} is fine-tuned already: flide merge makes it a model that can be trained")
    files = [_File.read(path) for path in (data, val) if path is not None]
    if not files[0].rows:
        raise BadRows([(file.name, error) for file in files for error in file.errors])
    tokenizer = PromptTokenizer.from_pretrained(found.path)

    device = EngineConfig(device=config.device, dtype=config.dtype).resolve_device()
    accelerator = Accelerator(cpu=device.type == "cpu", mixed_precision="no")
    torch.manual_seed(config.seed)
    dtype = EngineConfig(dtype=config.dtype).resolve_dtype()
    loaded = AutoModelForDecision.from_pretrained(found.path, dtype=dtype, device=accelerator.device)
    tokenizer.check_vocabulary(loaded.config.vocab_size)
    head = _head_of(loaded, kind, tokenizer, files[0].rows)
    examples = _examples(files, loaded, tokenizer, head, config)
    data_hash = fingerprint(examples[0], loaded.checkpoint_tensors())
    trainer = Trainer(loaded, head, examples[0], config, accelerator=accelerator)
    if state is not None:
        if state.data != data_hash:
            raise CheckpointError(f"the run in {out} was trained on other rows, or with another model")
        trainer.restore(step=state.step, trained=state.trained, optimizer=state.optimizer, rng=state.rng)

    accelerator.wait_for_everyone()  # all have seen that the directory is empty
    run = _Run(trainer, out, config, base=lasting_name(model), data=data_hash, main=accelerator.is_main_process)
    with run.directory(state):
        validation = run.go(examples[1] if val is not None else [], state, progress)
        if val is None:  # no step saw the last update, and no validation
            trainer.evaluate(examples[0][:1])
        if run.main:
            report = {"data": [file.name for file in files], "rows": len(files[0].rows), "validation": validation}
            _finish(run, head, found, report)
        accelerator.wait_for_everyone()
    return TrainResult(out, trainer.steps, validation)


def check_accelerate() -> None:
    """Raise ValueError, naming the extra to install, unless accelerate can be imported."""
    if importlib.util.find_spec("accelerate") is None:
        raise ValueError("training needs accelerate: pip install 'flide-torch[train]'")


def check_empty(directory: Path) -> None:
    """Raise ValueError unless a directory is empty or can be made."""
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"not a directory: {str(directory)!r}")
    if directory.is_dir() and (names := sorted(path.name for path in directory.iterdir())):
        hint = "; resume goes on with the run in it" if STATE_FILE in names else ""
        raise ValueError(f"the directory {str(directory)!r} is not empty ({names[0]}){hint}")


def _resumed(out: Path, config: TrainConfig, model: str | Path) -> TrainingState:
    state = TrainingState.load(out)
    differences = TrainConfig.from_dict(state.config).differences(config)
    if state.model != lasting_name(model):
        differences.append("model")
    if differences:
        raise CheckpointError(f"the run in {out} had other options: {', '.join(differences)}")
    return state


@dataclass(frozen=True, slots=True)
class _File:
    """A file of labelled rows; some good, some bad."""

    name: str
    rows: list[LabelledRow]
    errors: list[RowError]

    @classmethod
    def read(cls, path: str | Path) -> _File:
        try:
            rows, errors = read_rows(path)
        except OSError as error:
            raise ValueError(f"cannot read {str(path)!r}: {error.strerror or error}") from error
        if not rows and not errors:
            raise ValueError(f"there are no rows in {str(path)!r}")
        # A path is bytes; Python's text of it need not be valid Unicode.
        return cls(os.fsencode(path).decode(errors="replace"), rows, errors)


def _head_of(model: ForDecision, kind: type[Head], tokenizer: PromptTokenizer, rows: Sequence[LabelledRow]) -> Head:
    """The model's own head, if it is of the kind, or a new one."""
    head, model.head = model.head, None
    if type(head) is kind:
        return head
    return kind.initial(model, tokenizer, [x for row in rows for x in row.request.questions.values()])


def _examples(
    files: Sequence[_File],
    model: ForDecision,
    tokenizer: PromptTokenizer,
    head: Head,
    config: TrainConfig,
) -> list[list[Example]]:
    """The examples of each file.

    Raises:
        BadRows: some rows are bad.
    """
    limit = min(model.config.max_position_embeddings, head.max_prompt_tokens or sys.maxsize)
    format = make_format(head.prompt_style, tokenizer, max_prompt_tokens=limit)
    prepared, bad = [], []
    for file in files:
        examples, refused = prepare_examples(file.rows, format, head, batch_tokens=config.batch_tokens)
        prepared.append(examples)
        bad += [(file.name, error) for error in sorted([*file.errors, *refused], key=lambda error: error.line)]
    if bad:
        raise BadRows(bad)
    return prepared


class _Run:
    """The loop of one process, and the files that the main one writes meanwhile."""

    def __init__(self, trainer: Trainer, out: Path, config: TrainConfig, *, base: str, data: str, main: bool) -> None:
        self.trainer, self.out, self.config = trainer, out, config
        self.base, self.main = base, main
        self._data = data
        self._metrics: BinaryIO | None = None

    def go(self, val: Sequence[Example], state: TrainingState | None, progress: bool | None) -> dict[str, Any] | None:
        """All steps that are left; returns the metrics of ``val`` in the end."""
        from tqdm import tqdm

        trainer, validation = self.trainer, None
        shown = self.main and (sys.stderr.isatty() if progress is None else progress)
        with (
            StopSignals() as stop,
            tqdm(total=trainer.steps, initial=trainer.step, unit="step", disable=not shown, file=sys.stderr) as bar,
        ):
            if state is None:  # from here on the run can be resumed whatever ends it
                self._save()
            while trainer.step < trainer.steps:
                began = time.perf_counter()
                report = trainer.advance()
                self._log({**asdict(report), "seconds": round(time.perf_counter() - began, 4)})
                bar.update()
                bar.set_postfix(loss=f"{report.loss:.4f}", lr=f"{report.lr:.1e}", refresh=False)
                if trainer.ends_epoch and val:
                    validation = self._validate(val, report.epoch)
                stopping = trainer.any_process(stop.asked)
                if stopping or trainer.ends_epoch or trainer.step % self.config.save_every == 0:
                    self._save()
                if stopping and trainer.step < trainer.steps:
                    raise KeyboardInterrupt
            if validation is None and val:  # stopped between the last step and the end
                validation = _compact(evaluate(trainer.evaluate(val), resamples=0)) if self.main else None
        return validation

    def _validate(self, val: Sequence[Example], epoch: int) -> dict[str, Any] | None:
        if not self.main:
            return None
        validation = _compact(evaluate(self.trainer.evaluate(val), resamples=0))
        self._log({"step": self.trainer.step, "epoch": epoch, "validation": validation})
        return validation

    @contextlib.contextmanager
    def directory(self, state: TrainingState | None) -> Iterator[None]:
        """Hold the directory, for this run alone. Metrics are written from where the checkpoint was: what a run logged
        after that it will log again.

        Raises:
            ValueError: another run holds it, or was faster.
            OSError: it cannot be written.
        """
        if not self.main:
            yield
            return
        self.out.mkdir(parents=True, exist_ok=True)
        try:
            file = (self.out / METRICS_FILE).open("xb" if state is None else "ab")
        except FileExistsError:
            raise ValueError(f"another run has begun in {str(self.out)!r}") from None
        with file as self._metrics:
            hold(file, f"another run is going on in {str(self.out)!r}")
            if state is not None:
                if TrainingState.load(self.out).step != state.step:
                    raise CheckpointError(f"another run has gone on in {str(self.out)!r}")
                file.truncate(min(state.metrics_bytes, file.seek(0, os.SEEK_END)))
            file.seek(0, os.SEEK_END)
            try:
                yield
            except BaseException:
                if state is None and not (self.out / STATE_FILE).exists():  # the same command can be given again
                    (self.out / METRICS_FILE).unlink(missing_ok=True)
                raise

    def _log(self, fields: dict[str, Any]) -> None:
        if self._metrics is not None:
            self._metrics.write(json.dumps(fields).encode() + b"\n")
            self._metrics.flush()

    def _save(self) -> None:
        if self._metrics is not None:
            state = TrainingState(
                config=self.config.to_dict(),
                model=self.base,
                data=self._data,
                metrics_bytes=self._metrics.tell(),
                **self.trainer.state(),
            )
            state.save(self.out)


def _finish(run: _Run, head: Head, found: ModelDirectory, report: dict[str, Any]) -> None:
    """Write the fine-tuned model; the checkpoint goes last, so that a run that fails here can be resumed."""
    copy_tokenizer(found, run.out)
    if run.config.lora_rank:
        save_adapter(run.trainer.trainee.model, run.out, base_model=run.base)
    content = {
        "format_version": FORMAT_VERSION,
        "model": run.base,
        **report,
        "steps": run.trainer.steps,
        "config": run.config.to_dict(),
    }
    text = json.dumps(content, ensure_ascii=False, indent=2)
    (run.out / REPORT_FILE).write_text(text + "\n", encoding="utf-8")
    save_head(head, run.out, base_model=run.base)
    (run.out / STATE_FILE).unlink(missing_ok=True)


def _compact(evaluation: Evaluation) -> dict[str, dict[str, float]]:
    """Type, or "overall" -> metric -> value."""
    tables = {**evaluation.types, "overall": evaluation.overall}
    return {
        name: {key: x.value for key, x in metrics.estimates.items() if key in VALIDATION_METRICS}
        for name, metrics in tables.items()
    }


__all__ = ["METRICS_FILE", "REPORT_FILE", "BadRows", "TrainResult", "check_accelerate", "check_empty", "train"]
