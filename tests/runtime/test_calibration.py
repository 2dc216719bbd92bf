"""Stored temperatures: what is written is read, what is wrong is refused, what is asked for replaces them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from flide import Choice, DecisionRequest, Engine, EngineConfig, Noul, Score
from flide.errors import CheckpointError
from flide.evaluation.metrics import temper
from flide.runtime.calibration import CALIBRATION_FILE, load_temperatures, save_temperatures
from tests.tiny_model import tiny_model_directory
from tests.tolerance import PROBABILITY_FP32

REQUEST = DecisionRequest(
    "The box was crushed.",
    {
        "n": Noul("Is it damaged?"),
        "c": Choice("Which team?", ["shipping", "billing", "sales"]),
        "s": Score("?", ["a", "b", "c"]),
    },
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(tiny_model_directory(), tmp_path_factory.mktemp("calibrated") / "model"))


def answers(directory: Path, **options: Any) -> dict[str, tuple[float, ...]]:
    with Engine.from_pretrained(directory, EngineConfig(device="cpu", **options)) as engine:
        (decision,) = engine.decide([REQUEST])
    return {name: tuple(decision[name].probabilities.values()) for name in decision}


def test_stored_temperatures_divide_logits_and_given_ones_replace_them(directory: Path) -> None:
    plain = answers(directory)
    save_temperatures(directory, {"noul": 2.0, "choice": 0.5})
    for given, expected in (
        (None, {"n": 2.0, "c": 0.5, "s": 1.0}),
        ({"choice": 3.0, "score": 4}, {"n": 2.0, "c": 3.0, "s": 4.0}),
        ({"noul": 1.0, "choice": 1.0}, {"n": 1.0, "c": 1.0, "s": 1.0}),
    ):
        got = answers(directory, temperatures=given)
        for name, temperature in expected.items():
            assert got[name] == pytest.approx(temper(plain[name], temperature), abs=PROBABILITY_FP32)
    (directory / CALIBRATION_FILE).unlink()
    assert answers(directory) == plain


def test_what_is_stored_is_read(tmp_path: Path) -> None:
    assert load_temperatures(tmp_path) == {}
    save_temperatures(tmp_path, {"noul": 1.25, "score": 3})
    assert load_temperatures(tmp_path) == {"noul": 1.25, "score": 3.0}
    assert [path.name for path in tmp_path.iterdir()] == [CALIBRATION_FILE]
    assert json.loads((tmp_path / CALIBRATION_FILE).read_text())["format_version"] == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"format_version": 2, "temperatures": {}}', "format_version 2; this Flide reads 1"),
        ('{"temperatures": {}}', "no format_version"),
        ('{"format_version": true, "temperatures": {}}', "no format_version"),
        ("[]", "no format_version"),
        ("{", "cannot read"),
        ("[" * 100_000, "cannot read"),
        ('{"format_version": 1, "temperatures": {"noul": 1' + "0" * 400 + "}}", "above 0"),
        ('{"format_version": 1}', "no temperatures"),
        ('{"format_version": 1, "temperatures": {"box": 1}}', "'box'"),
        ('{"format_version": 1, "temperatures": {"noul": 0}}', "above 0"),
        ('{"format_version": 1, "temperatures": {"noul": NaN}}', "above 0"),
        ('{"format_version": 1, "temperatures": {"noul": "1"}}', "above 0"),
    ],
)
def test_a_bad_file_is_refused_by_name(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / CALIBRATION_FILE).write_text(content)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_temperatures(tmp_path)
    assert CALIBRATION_FILE in str(caught.value)


@pytest.mark.parametrize("bad", [{"box": 1.0}, {"noul": 0.0}, {"score": -1}, {"choice": float("inf")}, {"noul": True}])
def test_bad_temperatures_are_refused(tmp_path: Path, bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="temperature"):
        EngineConfig(temperatures=bad)
    with pytest.raises(ValueError, match="temperature"):
        save_temperatures(tmp_path, bad)
    assert not list(tmp_path.iterdir())
