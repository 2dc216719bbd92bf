"""Calibration of a model: one temperature per question type, in a file beside its weights.

    {"format_version": 1, "temperatures": {"noul": 1.31, "choice": 0.94, "score": 1.0}}

A type's logits are divided by its temperature (Guo et al. 2017). What a caller asks for replaces a temperature of the
file, it never multiplies it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flide.errors import CheckpointError

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
    path = directory / CALIBRATION_FILE
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot read {CALIBRATION_FILE}: {error}") from error
    version = content.get("format_version") if isinstance(content, dict) else None
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise CheckpointError(f"{CALIBRATION_FILE} has no format_version")
    if version > FORMAT_VERSION:
        raise CheckpointError(f"{CALIBRATION_FILE} has format_version {version}; this Flide reads {FORMAT_VERSION}")
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
    text = json.dumps({"format_version": FORMAT_VERSION, "temperatures": dict(temperatures)}, indent=2)
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(text + "\n", encoding="utf-8")
    os.replace(unfinished, path)
    return path
