"""``flide eval`` and ``flide calibrate``: metrics of a model on labelled rows, and temperatures fitted to them.

Imported for its options alone; the rest comes when it runs.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flide.console import (
    BAD_INPUT,
    add_model_options,
    add_temperature_options,
    given_temperatures,
    open_engine,
    print_line,
    printable,
    tell,
    write_json,
)


def add_eval(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the command line's subparsers."""
    parser = commands.add_parser(
        "eval",
        help="accuracy, calibration and intervals of a model on labelled rows",
        description="Answers a JSONL file of System One bodies with 'targets' and compares: true, false or a "
        "probability for a noul, an option's name or an object of weights for a choice, a level's index or a list "
        "of weights for a score. If any line is bad, all bad lines are listed and nothing runs.",
    )
    _add_common_options(parser)
    add_temperature_options(parser)
    parser.add_argument(
        "--bootstrap", metavar="N", type=int, default=1000, help="resamples for the intervals; 0 for none"
    )
    parser.add_argument("--json", action="store_true", help="as one JSON object, with confusion matrices")
    parser.add_argument("--out", metavar="DIR", help="write metrics.json and reliability.png there, too")
    parser.set_defaults(run=_eval)


def add_calibrate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the command line's subparsers."""
    parser = commands.add_parser(
        "calibrate",
        help="fit one temperature per question type on labelled rows and store it beside the model",
        description="Fits temperatures by the negative log-likelihood of held-out labelled rows (see eval), writes "
        "calibration.json into the model's directory and shows the metrics before and after. Rows the model was "
        "trained on, or is judged by, are no use here.",
    )
    _add_common_options(parser)
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    parser.add_argument("--out", metavar="DIR", help="write metrics and diagrams there, into before/ and after/")
    parser.set_defaults(run=_calibrate)


def _add_common_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--data", metavar="FILE", required=True, help="JSONL file of labelled rows; - reads stdin")
    add_model_options(parser)
    parser.add_argument("--equal-mass", action="store_true", help="calibration error with bins of equal mass")


def _eval(arguments: argparse.Namespace) -> int:
    from flide.evaluation.metrics import evaluate
    from flide.evaluation.report import Report

    temperatures = given_temperatures(arguments)
    if arguments.bootstrap < 0:
        raise ValueError(f"--bootstrap must not be negative, got {arguments.bootstrap}")
    out = _directory(arguments.out)
    answered = _answer(arguments, temperatures, [out] if out is not None else [])
    if answered is None:
        return BAD_INPUT
    evaluation = evaluate(answered.answers, binning=_binning(arguments), resamples=arguments.bootstrap)
    report = Report(answered.model, _data_name(arguments), answered.temperatures, evaluation)
    try:
        if out is not None:
            _save(report, out)
    finally:  # what was computed is shown in any case
        _show(report.to_dict() if arguments.json else report.to_text())
    return 0


def _calibrate(arguments: argparse.Namespace) -> int:
    from flide.evaluation.calibrate import fit_temperatures, tempered
    from flide.evaluation.metrics import TYPES, evaluate
    from flide.evaluation.report import Report
    from flide.runtime.calibration import save_temperatures

    if arguments.model is None or not Path(arguments.model).is_dir():
        raise ValueError("--model must be a model's directory: the temperatures are stored there")
    out = _directory(arguments.out)
    outs = [] if out is None else [out / "before", out / "after"]
    answered = _answer(arguments, dict.fromkeys(TYPES, 1.0), outs)
    if answered is None:
        return BAD_INPUT
    temperatures = fit_temperatures(answered.answers)
    reports = [
        Report(answered.model, _data_name(arguments), at, evaluate(answers, binning=_binning(arguments), resamples=0))
        for at, answers in (({}, answered.answers), (temperatures, tempered(answered.answers, temperatures)))
    ]
    try:
        stored = save_temperatures(Path(arguments.model), temperatures)
    except OSError as error:
        raise RuntimeError(f"cannot write to {arguments.model!r}: {error.strerror or error}") from error
    for report, directory in zip(reports, outs, strict=False):
        _save(report, directory)
    if arguments.json:
        before, after = (report.to_dict() for report in reports)
        _show({"temperatures": temperatures, "before": before, "after": after})
    else:
        _show("\n\n".join(f"{when}\n{r.to_text()}" for when, r in zip(("BEFORE", "AFTER"), reports, strict=True)))
        _show(f"\n{', '.join(f'{k} {v:.4g}' for k, v in temperatures.items())}: stored in {stored}")
    return 0


@dataclass(frozen=True, slots=True)
class _Answered:
    """A model's answers to labelled rows, and the temperatures they were given at."""

    model: str
    temperatures: dict[str, float]
    answers: list[Any]


def _answer(arguments: argparse.Namespace, temperatures: dict[str, float], directories: list[Path]) -> _Answered | None:
    """Answer the rows of ``--data``, or list what is wrong with them and return None. The directories are made before
    the work."""
    from tqdm import tqdm

    from flide.evaluation.report import answer_rows, check_rows

    rows, errors = _read(arguments.data)
    if errors:
        _refuse(errors)
        return None
    if not rows:
        raise ValueError(f"there are no rows in {arguments.data!r}")
    with open_engine(arguments, temperatures) as engine:
        if errors := check_rows(engine, rows):
            _refuse(errors)
            return None
        for directory in directories:
            _make(directory)
        silent = not sys.stderr.isatty() or sys.stdout.isatty()
        with tqdm(total=len(rows), unit="row", disable=silent, file=sys.stderr) as progress:
            answers = answer_rows(engine, rows, on_progress=progress.update)
        return _Answered(engine.model_name, dict(engine.config.temperatures or {}), answers)


def _directory(name: str | None) -> Path | None:
    """The directory of ``--out``, which need not exist yet."""
    from flide.evaluation.report import check_drawing

    if name is None:
        return None
    check_drawing()
    if Path(name).exists() and not Path(name).is_dir():
        raise ValueError(f"--out is not a directory: {name!r}")
    return Path(name)


def _binning(arguments: argparse.Namespace) -> Any:
    return "mass" if arguments.equal_mass else "width"


def _data_name(arguments: argparse.Namespace) -> str:
    # A path is bytes; Python's text of it need not be valid Unicode.
    return os.fsencode(arguments.data).decode(errors="replace")


def _save(report: Any, directory: Path) -> None:
    try:
        report.save(directory)
    except OSError as error:
        raise RuntimeError(f"cannot write to {str(directory)!r}: {error.strerror or error}") from error


def _show(output: Any) -> None:
    if isinstance(output, str):
        for line in output.split("\n"):
            print_line(printable(line))
    else:
        write_json(output)


def _read(name: str) -> Any:
    from flide.evaluation.rows import read_rows

    if name == "-" and sys.stdin is None:
        raise ValueError("standard input is closed")
    try:
        return read_rows(sys.stdin.buffer if name == "-" else Path(name))
    except OSError as error:
        raise ValueError(f"cannot read {name!r}: {error.strerror or error}") from error


def _refuse(errors: list[Any]) -> None:
    for error in errors:
        tell(str(error))
    tell(f"{len(errors)} bad row{'' if len(errors) == 1 else 's'}: nothing was run")


def _make(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot make the directory {str(directory)!r}: {error.strerror or error}") from error
