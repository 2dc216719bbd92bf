"""Calibration of a model: one temperature per question type, in a file beside its weights.

    {"format_version": 1, "temperatures": {"noul": 1.31, "choice": 0.94, "score": 1.0}}

A type's logits are divided by its temperature (Guo et al. 2017). What a caller asks for replaces a temperature of the
file, it never multiplies it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from flide.errors import CheckpointError
from flide.stored_json import check_version, read_json_file, write_json_file

CALIBRATION_FILE = "calibration.json"
FORMAT_VERSION = 1
TYPES = ("noul", "choice", "score")


def check_temperatures(temperatures: Mapping[str, float]) -> None:
    """See that temperatures belong to question types and are finite numbers above 0.

    Raises:
        ValueError: they are not.
    """
    for name, value in temperatures.items():
        if name not in TYPES:
            raise ValueError(f"a temperature belongs to one of {', '.join(TYPES)}, not to {name!r}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
            raise ValueError(f"a temperature must be a finite number above 0, got {value!r} for {name}")


def load_temperatures(directory: Path) -> dict[str, float]:
    """The temperatures stored beside a model; empty where it was not calibrated.

    Raises:
        CheckpointError: the file cannot be read, is of a newer format, or holds anything but temperatures.
    """
    try:
        content = read_json_file(directory / CALIBRATION_FILE)
    except FileNotFoundError:
        return {}
    check_version(CALIBRATION_FILE, content, FORMAT_VERSION)
    temperatures = content.get("temperatures")
    if not isinstance(temperatures, dict):
        raise CheckpointError(f"{CALIBRATION_FILE} has no temperatures")
    try:
        check_temperatures(temperatures)
    except ValueError as error:
        raise CheckpointError(f"{CALIBRATION_FILE}: {error}") from error
    return {name: float(value) for name, value in temperatures.items()}


def save_temperatures(directory: Path, temperatures: Mapping[str, float]) -> Path:
    """Store temperatures beside a model, all or nothing; returns the file.

    Raises:
        ValueError: see :func:`check_temperatures`.
        OSError: the file cannot be written.
    """
    check_temperatures(temperatures)
    path = directory / CALIBRATION_FILE
    write_json_file(path, {"format_version": FORMAT_VERSION, "temperatures": dict(temperatures)})
    return path
