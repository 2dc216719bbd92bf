"""Fitted temperatures are the ones that held-out NLL is smallest at."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flide.cli import main
from flide.evaluation.calibrate import COLDEST, HOTTEST, fit_temperatures, tempered
from flide.evaluation.metrics import LabelledAnswer, evaluate
from flide.runtime.calibration import CALIBRATION_FILE, load_temperatures
from tests.tiny_model import tiny_model_directory

rng_seeds = pytest.mark.parametrize("seed", range(3))


def softmax(z: Any) -> Any:
    weights = np.exp(z - z.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def sampled(temperature: float, *, count: int, seed: int, kind: str = "choice", soft: bool = False) -> list[Any]:
    """Answers whose targets are drawn from (or are) the softmax of their logits at a temperature."""
    rng = np.random.default_rng(seed)
    found = []
    for row in range(count):
        n = 2 if kind == "noul" else int(rng.integers(2, 6))
        z = 3 * rng.standard_normal(n)
        p, true = softmax(z), softmax(z / temperature)
        target = true if soft else np.eye(n)[rng.choice(n, p=true)]
        options = tuple(map(str, range(n)))
        found.append(LabelledAnswer(row, "q", kind, options, tuple(p.tolist()), tuple(target.tolist())))
    return found


def nll(answers: list[Any], temperature: float) -> float:
    scaled = tempered(answers, dict.fromkeys(("noul", "choice", "score"), temperature))
    return evaluate(scaled, resamples=0).overall.estimates["nll"].value


@rng_seeds
@pytest.mark.parametrize("temperature", [0.4, 1.0, 2.5])
def test_soft_targets_give_their_temperature_back(temperature: float, seed: int) -> None:
    fitted = fit_temperatures(sampled(temperature, count=50, seed=seed, soft=True))
    assert fitted["choice"] == pytest.approx(temperature, rel=1e-9)


@rng_seeds
def test_no_other_temperature_has_a_smaller_nll(seed: int) -> None:
    answers = sampled(1.7, count=400, seed=seed, kind="noul")
    fitted = fit_temperatures(answers)["noul"]
    assert fitted == pytest.approx(1.7, rel=0.25)
    best = nll(answers, fitted)
    assert all(nll(answers, fitted * factor) > best for factor in (0.5, 0.9, 0.99, 1.01, 1.1, 2))


def test_types_are_fitted_apart_and_missing_ones_left_out() -> None:
    answers = sampled(0.5, count=60, seed=0, soft=True) + sampled(3.0, count=60, seed=1, kind="score", soft=True)
    fitted = fit_temperatures(answers)
    assert fitted == {"choice": pytest.approx(0.5), "score": pytest.approx(3.0)}
    assert fit_temperatures([LabelledAnswer(0, "q", "choice", ("a",), (1.0,), (1.0,))]) == {}


@pytest.mark.parametrize(("target", "expected"), [((1.0, 0.0), COLDEST), ((0.0, 1.0), HOTTEST), ((0.5, 0.5), HOTTEST)])
def test_what_has_no_optimum_stays_in_range(target: tuple[float, float], expected: float) -> None:
    answers = [LabelledAnswer(k, "q", "noul", ("true", "false"), (0.8, 0.2), target) for k in range(5)]
    assert fit_temperatures(answers)["noul"] == expected


def test_certain_answers_are_no_infinity() -> None:
    answers = [LabelledAnswer(k, "q", "noul", ("true", "false"), (1.0, 0.0), (k % 2, 1.0 - k % 2)) for k in range(4)]
    assert COLDEST <= fit_temperatures(answers)["noul"] <= HOTTEST


def row(i: int) -> str:
    questions = {
        "late": {"type": "noul", "instructions": "Late?"},
        "who": {"type": "choice", "criteria": {"a": None, "b": None}},
    }
    body = {"model": "m", "state": f"parcel {i} " * (1 + i % 3), "questions": questions}
    return json.dumps({**body, "targets": {"late": i % 3 == 0, "who": "ab"[i % 2]}})


def test_the_command_stores_what_eval_then_uses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = Path(shutil.copytree(tiny_model_directory(), tmp_path / "model"))
    data = tmp_path / "held_out.jsonl"
    data.write_text("\n".join(row(i) for i in range(12)))
    common = ["--model", str(model), "--data", str(data), "--device", "cpu", "--json"]
    assert main(["calibrate", *common]) == 0
    result = json.loads(capsys.readouterr().out)
    assert load_temperatures(model) == pytest.approx(result["temperatures"])
    assert set(result["temperatures"]) == {"noul", "choice"}
    nlls = {w: {t: x["metrics"]["nll"]["value"] for t, x in result[w]["types"].items()} for w in ("before", "after")}
    assert all(nlls["after"][t] <= nlls["before"][t] for t in ("noul", "choice"))
    for given, when in ([], "after"), (["--temperature", "1"], "before"):
        assert main(["eval", *common, "--bootstrap", "0", *given]) == 0
        evaluated = json.loads(capsys.readouterr().out)
        for name in ("noul", "choice"):
            found = evaluated["types"][name]["metrics"]["nll"]["value"]
            assert found == pytest.approx(nlls[when][name], abs=1e-6)
    assert main(["calibrate", *common]) == 0  # again: from temperature 1, not from what is stored
    assert json.loads(capsys.readouterr().out)["temperatures"] == pytest.approx(result["temperatures"], rel=1e-3)


def test_nothing_is_stored_where_rows_are_bad_or_there_is_no_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Path(shutil.copytree(tiny_model_directory(), tmp_path / "model"))
    data = tmp_path / "rows.jsonl"
    data.write_text(row(0) + "\n{}\n")
    assert main(["calibrate", "--model", str(model), "--data", str(data), "--device", "cpu"]) == 2
    assert "line 2" in capsys.readouterr().err
    data.write_text(row(0))
    assert main(["calibrate", "--data", str(data), "--device", "cpu"]) == 2
    assert "--model must be" in capsys.readouterr().err
    assert not (model / CALIBRATION_FILE).exists()
