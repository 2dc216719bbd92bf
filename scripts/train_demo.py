"""Make the embedded demo model from nothing: rows, tokenizer, training, calibration, judgement, model card.

python -m scripts.train_demo OUT                 # for one H200; training.jsonl tells the speed
python -m scripts.train_demo OUT --smoke         # every step at a tiny size, about a minute on a CPU

OUT gets model/ (what is shipped), val.jsonl and test.jsonl (labelled rows for flide calibrate and flide eval),
results.json, reliability.png and training.jsonl.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import torch

from flide import Engine, EngineConfig
from flide.evaluation.calibrate import fit_temperatures
from flide.evaluation.metrics import TYPES, LabelledAnswer, evaluate
from flide.evaluation.report import Report, answer_rows, check_drawing, check_rows, draw_reliability
from flide.evaluation.rows import LabelledRow, read_rows
from flide.runtime.calibration import save_temperatures
from flide.runtime.tokenizer import PromptTokenizer
from scripts.demo import baseline
from scripts.demo.data import rows, write_rows
from scripts.demo.report import case_lines, compare, question_table, table, write_card
from scripts.demo.tokenizer import write_demo_tokenizer
from scripts.demo.training import DemoConfig, make_samples, new_model, train

CASES = Path(__file__).parent.parent / "examples" / "demo_cases.jsonl"
TOKENIZER_ROWS = 12_000
MOST_LABELS = 26  # that training reads; no generated question has more options
MOST_PARAMETERS, MOST_BYTES = 8_000_000, 16_000_000
SMOKE: dict[str, Any] = {"rows": 400, "val_rows": 60, "test_rows": 60, "steps": 12, "batch_questions": 32, "warmup": 4}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--smoke", action="store_true", help="every step at a tiny size")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for field in fields(DemoConfig):
        kind = type(field.default)
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, help=f"default: {field.default}")
    arguments = parser.parse_args()
    given = {f.name: getattr(arguments, f.name) for f in fields(DemoConfig) if getattr(arguments, f.name) is not None}
    config = replace(DemoConfig(), **{**(SMOKE if arguments.smoke else {}), **given})
    make(arguments.out, config, torch.device(arguments.device))


def make(out: Path, config: DemoConfig, device: torch.device) -> dict[str, Any]:
    """All steps; returns what results.json holds."""
    check_drawing()  # not after minutes of work
    started = time.monotonic()
    model_directory = out / "model"
    model_directory.mkdir(parents=True, exist_ok=True)

    _say(started, "tokenizer")
    write_demo_tokenizer(model_directory, rows("train", min(TOKENIZER_ROWS, max(config.rows, 1500))))
    tokenizer = PromptTokenizer.from_pretrained(model_directory)
    for split, count in (("val", config.val_rows), ("test", config.test_rows)):
        write_rows(out / f"{split}.jsonl", rows(split, count))

    _say(started, f"encoding {config.rows:,} rows")
    samples = make_samples("train", config.rows, model_directory, dropped_words=config.dropped_words)
    held_out = make_samples("val", min(config.val_rows, 500), model_directory)

    model = new_model(config, tokenizer.vocab_size).to(device)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert parameters <= MOST_PARAMETERS, f"{parameters:,} parameters"
    _say(started, f"training {parameters:,} parameters on {device}")
    label_ids = [label.id for label in tokenizer.labels(MOST_LABELS)]
    reports = train(model, samples, held_out, config, label_ids)
    (out / "training.jsonl").write_text("".join(json.dumps(report) + "\n" for report in reports), encoding="utf-8")
    model.eval().to("cpu", torch.bfloat16).save_pretrained(model_directory)
    size = (model_directory / "model.safetensors").stat().st_size
    assert size <= MOST_BYTES, f"{size:,} bytes"
    questions_per_row = sum(len(sample.branches) for sample in samples) / len(samples)
    del samples

    _say(started, "calibration and evaluation")
    val_rows, test_rows, cases = (_read(path) for path in (out / "val.jsonl", out / "test.jsonl", CASES))
    untempered = dict.fromkeys(TYPES, 1.0)
    temperatures = fit_temperatures(_answers(model_directory, device, val_rows, untempered))
    save_temperatures(model_directory, temperatures)
    before = _answers(model_directory, device, test_rows, untempered)
    after = _answers(model_directory, device, test_rows, None)

    _say(started, "baseline")
    train_bags, _ = baseline.read_bags("train", config.rows)
    val_bags, _ = baseline.read_bags("val", config.val_rows)
    test_bags, told = baseline.read_bags("test", config.test_rows)
    bag_answers = baseline.answers(baseline.fit(train_bags, val_bags, device=device), test_bags, told)

    numbers = compare({"baseline": bag_answers, "before calibration": before, "calibrated": after})
    report = Report("flide-demo", "test.jsonl", temperatures, evaluate(after))
    tables = {**report.evaluation.types, "overall": report.evaluation.overall}
    draw_reliability(tables, out / "reliability.png")
    with _engine(model_directory, device, None) as engine:
        lines, right, asked = case_lines(engine, cases)
    results = {
        "numbers": numbers,
        "temperatures": temperatures,
        "cases": {"right": right, "questions": asked, "answers": lines},
        "parameters": parameters,
        "bytes": size,
        "questions_per_row": questions_per_row,
        "minutes": (time.monotonic() - started) / 60,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "a CPU",
        "report": report.to_dict(),
        **asdict(config),
    }
    (out / "results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    write_card(model_directory, results)
    print(table(numbers), question_table(numbers), "\n".join(lines), f"{right} of {asked} right", sep="\n\n")
    _say(started, f"done: {model_directory}")
    return results


def _read(path: Path) -> list[LabelledRow]:
    found, errors = read_rows(path)
    assert not errors, errors[0]
    return found


def _engine(directory: Path, device: torch.device, temperatures: dict[str, float] | None) -> Engine:
    # Compiling would take longer than all the answers.
    config = EngineConfig(device=device, compile=False, graphs="off", temperatures=temperatures)
    return Engine.from_pretrained(directory, config)


def _answers(
    directory: Path, device: torch.device, these: list[LabelledRow], temperatures: dict[str, float] | None
) -> list[LabelledAnswer]:
    with _engine(directory, device, temperatures) as engine:
        errors = check_rows(engine, these)
        assert not errors, errors[0]
        return answer_rows(engine, these)


def _say(started: float, text: str) -> None:
    print(f"[{time.monotonic() - started:6.1f} s] {text}", flush=True)


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    main()
