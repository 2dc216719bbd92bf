"""``flide eval``: metrics of a model on labelled rows. Imported for its options alone; the rest comes when it runs."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from flide.console import BAD_INPUT, add_model_options, open_engine, print_line, printable, tell, write_json


def add_eval(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the command line's subparsers."""
    parser = commands.add_parser(
        "eval",
        help="accuracy, calibration and intervals of a model on labelled rows",
        description="Answers a JSONL file of System One bodies with 'targets' and compares: true, false or a "
        "probability for a noul, an option's name or an object of weights for a choice, a level's index or a list "
        "of weights for a score. If any line is bad, all bad lines are listed and nothing runs.",
    )
    parser.add_argument("--data", metavar="FILE", required=True, help="JSONL file of labelled rows; - reads stdin")
    add_model_options(parser)
    parser.add_argument(
        "--temperature", metavar="T", type=float, default=1.0, help="bring probabilities p to p^(1/T) (default: 1)"
    )
    for name in ("noul", "choice", "score"):
        parser.add_argument(
            f"--temperature-{name}", metavar="T", type=float, help=f"of {name}s, in place of --temperature"
        )
    parser.add_argument("--equal-mass", action="store_true", help="calibration error with bins of equal mass")
    parser.add_argument(
        "--bootstrap", metavar="N", type=int, default=1000, help="resamples for the intervals; 0 for none"
    )
    parser.add_argument("--json", action="store_true", help="as one JSON object, with confusion matrices")
    parser.add_argument("--out", metavar="DIR", help="write metrics.json and reliability.png there, too")
    parser.set_defaults(run=_eval)


def _eval(arguments: argparse.Namespace) -> int:
    from tqdm import tqdm

    from flide.evaluation.metrics import TYPES, check_temperature, evaluate
    from flide.evaluation.report import Report, answer_rows, check_drawing, check_rows

    temperatures = {}
    for name in TYPES:
        given = getattr(arguments, f"temperature_{name}")
        temperatures[name] = arguments.temperature if given is None else given
        check_temperature(temperatures[name])
    if arguments.bootstrap < 0:
        raise ValueError(f"--bootstrap must not be negative, got {arguments.bootstrap}")
    out = None if arguments.out is None else Path(arguments.out)
    if out is not None:
        check_drawing()
        if out.exists() and not out.is_dir():
            raise ValueError(f"--out is not a directory: {arguments.out!r}")

    rows, errors = _read(arguments.data)
    if errors:
        return _refuse(errors)
    if not rows:
        raise ValueError(f"there are no rows in {arguments.data!r}")
    with open_engine(arguments) as engine:
        if errors := check_rows(engine, rows):
            return _refuse(errors)
        if out is not None:
            _make(out)  # before the work, in case it fails
        silent = not sys.stderr.isatty() or sys.stdout.isatty()
        with tqdm(total=len(rows), unit="row", disable=silent, file=sys.stderr) as progress:
            answers = answer_rows(engine, rows, temperatures, on_progress=progress.update)
        model = engine.model_name
    binning: Any = "mass" if arguments.equal_mass else "width"
    evaluation = evaluate(answers, binning=binning, resamples=arguments.bootstrap)
    # A path is bytes; Python's text of it need not be valid Unicode.
    report = Report(model, os.fsencode(arguments.data).decode(errors="replace"), temperatures, evaluation)
    try:
        if out is not None:
            report.save(out)
    except OSError as error:
        raise RuntimeError(f"cannot write to {arguments.out!r}: {error.strerror or error}") from error
    finally:  # what was computed is shown in any case
        if arguments.json:
            write_json(report.to_dict())
        else:
            for line in report.to_text().split("\n"):
                print_line(printable(line))
    return 0


def _read(name: str) -> Any:
    from flide.evaluation.rows import read_rows

    if name == "-" and sys.stdin is None:
        raise ValueError("standard input is closed")
    try:
        return read_rows(sys.stdin.buffer if name == "-" else Path(name))
    except OSError as error:
        raise ValueError(f"cannot read {name!r}: {error.strerror or error}") from error


def _refuse(errors: list[Any]) -> int:
    for error in errors:
        tell(str(error))
    tell(f"{len(errors)} bad row{'' if len(errors) == 1 else 's'}: nothing was run")
    return BAD_INPUT


def _make(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot make the directory {str(directory)!r}: {error.strerror or error}") from error
