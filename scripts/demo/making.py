"""From rows and a tokenizer to a model that was trained, calibrated and judged, with its card."""

from __future__ import annotations

import copy
import functools
import itertools
import json
import os
import time
from collections.abc import Generator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch

from flide import Engine, EngineConfig
from flide.evaluation.calibrate import fit_temperatures, tempered
from flide.evaluation.metrics import TYPES, LabelledAnswer, evaluate
from flide.evaluation.report import Report, answer_rows, check_drawing, draw_reliability
from flide.evaluation.rows import read_rows
from flide.models import Qwen35ForDecision
from flide.runtime.calibration import save_temperatures
from flide.runtime.tokenizer import PromptTokenizer
from scripts.demo import baseline
from scripts.demo.bags import joined, read_bags
from scripts.demo.config import DemoConfig
from scripts.demo.parallel import Workers
from scripts.demo.report import case_lines, compare, question_table, table, write_card
from scripts.demo.samples import Sample
from scripts.demo.training import new_model, train

CASES = Path(__file__).parent.parent.parent / "examples" / "demo_cases.jsonl"
MOST_LABELS = 26  # that training reads; no generated question has more options
MOST_PARAMETERS, MOST_BYTES = 8_000_000, 16_000_000
RESAMPLES = 200  # for the intervals in results.json


class Prepared(NamedTuple):
    """What there is before torch is loaded.

    Attributes:
        started: when, by ``time.monotonic``.
        samples: of training, stretch by stretch, without end.
        held_out: some validation rows.
    """

    started: float
    samples: Generator[list[Sample], None, None]
    held_out: Generator[list[Sample], None, None]


def say(started: float, text: str) -> None:
    """Print what begins now."""
    print(f"[{time.monotonic() - started:6.1f} s] {text}", flush=True)


def make(out: Path, config: DemoConfig, device: torch.device, prepared: Prepared, workers: Workers) -> dict[str, Any]:
    """Everything after the tokenizer; returns what results.json holds."""
    check_drawing()  # not after minutes of work
    started, model_directory = prepared.started, out / "model"
    tokenizer = PromptTokenizer.from_pretrained(model_directory)
    model = new_model(config, tokenizer.vocab_size).to(device)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert parameters <= MOST_PARAMETERS, f"{parameters:,} parameters"
    held_out = list(itertools.chain.from_iterable(prepared.held_out))

    say(started, f"training {parameters:,} parameters on {device}, rows from {workers.processes} processes")
    label_ids = [label.id for label in tokenizer.labels(MOST_LABELS)]
    samples = itertools.chain.from_iterable(prepared.samples)
    keep = functools.partial(_save, directory=model_directory, unfinished=out / "unfinished")
    reports = train(model, samples, held_out, config, label_ids, keep=keep)
    prepared.samples.close()
    (out / "training.jsonl").write_text("".join(json.dumps(report) + "\n" for report in reports), encoding="utf-8")
    size = (model_directory / "model.safetensors").stat().st_size
    assert size <= MOST_BYTES, f"{size:,} bytes"
    of_baseline = {"train": config.baseline_rows, "val": config.val_rows, "test": config.test_rows}
    readings = {split: workers.stretches(read_bags, split, count) for split, count in of_baseline.items()}

    say(started, "calibration and evaluation")
    untempered = EngineConfig(
        device=device,
        compile=False,  # nor graphs: making them would take longer than all the answers
        graphs="off",
        temperatures=dict.fromkeys(TYPES, 1.0),
    )
    with Engine.from_pretrained(model_directory, untempered) as engine:
        temperatures = fit_temperatures(_answers(engine, out / "val.jsonl"))
        save_temperatures(model_directory, temperatures)
        before = _answers(engine, out / "test.jsonl")
        cases = tempered(_answers(engine, CASES), temperatures)
    after = tempered(before, temperatures)
    lines, right = case_lines(cases)
    numbers = compare({"before calibration": before, "calibrated": after})
    print(table(numbers), question_table(numbers), "\n".join(lines), f"{right} of {len(cases)} right", sep="\n\n")

    say(started, "baseline")
    bags = {split: joined(parts) for split, parts in readings.items()}
    fitted = baseline.fit(bags["train"][0], bags["val"][0], device=device)
    numbers = compare({"baseline": baseline.answers(fitted, *bags["test"])}) | numbers

    report = Report("flide-demo", "test.jsonl", temperatures, evaluate(after, resamples=RESAMPLES))
    draw_reliability({**report.evaluation.types, "overall": report.evaluation.overall}, out / "reliability.png")
    results = {
        "numbers": numbers,
        "temperatures": temperatures,
        "cases": {"right": right, "questions": len(cases), "answers": lines},
        "parameters": parameters,
        "bytes": size,
        "rows": reports[-1]["rows"],
        "questions_per_row": reports[-1]["questions"] / reports[-1]["rows"],
        "minutes": (time.monotonic() - started) / 60,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU",
        "report": report.to_dict(),
        **asdict(config),
    }
    (out / "results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    write_card(model_directory, results)
    print(table(numbers), question_table(numbers), sep="\n\n")
    say(started, f"done: {model_directory}")
    return results


def _save(model: Qwen35ForDecision, directory: Path, unfinished: Path) -> None:
    """In bfloat16, each file replaced when the new one is whole."""
    copy.deepcopy(model).eval().to("cpu", torch.bfloat16).save_pretrained(unfinished)
    for path in unfinished.iterdir():
        os.replace(path, directory / path.name)
    unfinished.rmdir()


def _answers(engine: Engine, path: Path) -> list[LabelledAnswer]:
    found, errors = read_rows(path)
    assert not errors, errors[0]
    return answer_rows(engine, found)
