"""flide train and flide merge, as a shell sees them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from flide.cli import main
from flide.train.config import TrainConfig
from flide.train.run import METRICS_FILE
from flide.train.state import STATE_FILE, TrainingState
from flide.train.trainer import Trainer
from tests.tiny_model import tiny_model_directory
from tests.train.data import rows, write

BASE = str(tiny_model_directory())


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("data") / "train.jsonl", rows(6))


def run(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, str, str]:
    code = main([str(argument) for argument in arguments])
    return code, *capsys.readouterr()


def test_train_merge_and_info(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, merged = tmp_path / "out", tmp_path / "merged"
    options: list[Any] = ["--head", "linear", "--lora-rank", 4, "--lr", "1e-3", "--batch-tokens", 250]
    options += ["--device", "cpu"]
    options += ["--lora-targets", "q_proj, v_proj"]
    code, printed, err = run(capsys, "train", "--model", BASE, "--data", data, "--out", out, "--val", data, *options)
    assert (code, err) == (0, "")
    result = json.loads(printed)
    assert result["directory"] == str(out)
    assert set(result["validation"]) == {"noul", "choice", "score", "overall"}
    config = json.loads((out / "training.json").read_text())["config"]
    assert (config["lora_rank"], config["lora_targets"], config["lr"]) == (4, ["q_proj", "v_proj"], 1e-3)
    assert (config["epochs"], config["seed"]) == (1, 0)  # TrainConfig's own
    code, printed, _ = run(capsys, "info", out)
    assert code == 0
    assert "LoRA of 2 matrices" in printed
    assert "linear, 8 columns" in printed
    assert run(capsys, "merge", "--model", out, "--out", merged) == (0, f"{merged}\n", "")
    code, printed, _ = run(capsys, "eval", "--model", merged, "--data", data, "--device", "cpu", "--json")
    assert code == 0
    assert json.loads(printed)["model"] == "merged"
    code, _, err = run(capsys, "merge", "--model", out, "--out", merged)
    assert (code, "not an empty directory" in err) == (2, True)


def test_bad_rows_are_listed_one_per_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = rows(3)
    bad[1]["targets"]["anger"] = 9
    del bad[2]["targets"]["late"]
    data = write(tmp_path / "train.jsonl", bad)
    code, out, err = run(
        capsys, "train", "--model", BASE, "--data", data, "--out", tmp_path / "out", "--device", "cpu", "--epochs", 2
    )
    assert (code, out) == (2, "")
    first, second, last = err.splitlines()
    assert first.startswith(f"flide: {data}: line 2: body.targets.anger:")
    assert second.startswith(f"flide: {data}: line 3: body.targets.late: Field required")
    assert last == "flide: 2 bad rows: nothing was written"
    assert not (tmp_path / "out").exists()


def test_ctrl_c_is_told_and_resume_needs_no_option_again(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    advance = Trainer.advance

    def interrupted(self: Trainer, **options: Any) -> Any:
        if self.step == 0:
            os.kill(os.getpid(), signal.SIGINT)
        return advance(self, **options)

    out = tmp_path / "out"
    common = ["train", "--model", BASE, "--data", data, "--out", out]
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "advance", interrupted)
        code, printed, err = run(capsys, *common, "--device", "cpu", "--batch-tokens", 300, "--head", "linear")
    assert (code, printed) == (130, "")
    assert err == "flide: stopped; the same command with --resume goes on\n"
    assert TrainingState.load(out).step == 1
    code, _, err = run(capsys, *common, "--resume", "--batch-tokens", 400)
    assert (code, "other options: batch_tokens" in err) == (2, True)
    code, printed, err = run(capsys, *common, "--resume", "--head", "linear")
    assert (code, err) == (0, "")
    assert not (out / STATE_FILE).exists()
    assert json.loads((out / "training.json").read_text())["config"]["batch_tokens"] == 300
    code, _, err = run(capsys, *common, "--resume")
    assert (code, "no run to resume" in err) == (2, True)


def test_a_directory_that_cannot_be_written_is_a_failure(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("flide.train.state.TrainingState.save", full)
    code, out, err = run(capsys, "train", "--model", BASE, "--data", data, "--out", tmp_path / "out", "--device", "cpu")
    assert (code, out) == (1, "")
    assert err == f"flide: cannot write to {str(tmp_path / 'out')!r}: No space left on device\n"
    assert not list((tmp_path / "out").iterdir())  # so that the same command can be given again


def test_the_help_tells_the_defaults_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    help_text = " ".join(capsys.readouterr().out.split())
    defaults = TrainConfig().to_dict()
    for name, value in defaults.items():
        if name not in ("lora_alpha", "lora_targets"):  # computed, and all
            entry = help_text.split(f" --{name.replace('_', '-')} ")[-1]
            told = entry.partition("(default: ")[2].partition(")")[0]
            assert (float(told) if isinstance(value, int | float) else told) == value, name


@pytest.mark.parametrize("command", ["train", "merge"])
def test_help_waits_for_no_library(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = (
        "import sys; from flide.cli import main\n"
        f"try: main([{command!r}, '--help'])\n"
        "except SystemExit: pass\n"
        "loaded = {'torch', 'numpy', 'accelerate', 'transformers'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "--out" in done.stdout


def test_a_missing_accelerate_is_one_line(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)
    code, _, err = run(capsys, "train", "--model", BASE, "--data", data, "--out", tmp_path / "out")
    assert code == 2
    assert err == "flide: training needs accelerate: pip install 'flide-torch[train]'\n"


@pytest.mark.slow
def test_a_real_ctrl_c_in_a_real_process_leaves_a_run_that_goes_on(data: Path, tmp_path: Path) -> None:
    def command(out: Path, *more: str) -> list[str]:
        options = ["--device", "cpu", "--batch-tokens", "250", "--epochs", "6", "--seed", "3"]
        arguments = ["--model", BASE, "--data", str(data), "--out", str(out), *options, *more]
        return [sys.executable, "-m", "flide", "train", *arguments]

    whole, parts = tmp_path / "whole", tmp_path / "parts"
    subprocess.run(command(whole), check=True, timeout=300, capture_output=True)
    process = subprocess.Popen(command(parts), stderr=subprocess.PIPE, stdout=subprocess.PIPE)
    deadline = time.monotonic() + 200
    while not ((parts / METRICS_FILE).exists() and len((parts / METRICS_FILE).read_bytes().splitlines()) >= 4):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=100)
    assert process.returncode == 130
    assert b"--resume goes on" in err
    subprocess.run(command(parts, "--resume"), check=True, timeout=300, capture_output=True)
    for name in ("adapter_model.safetensors", "adapter_config.json", "head.json"):
        assert (parts / name).read_bytes() == (whole / name).read_bytes()


@pytest.mark.slow
def test_two_processes_train_one_model(data: Path, tmp_path: Path) -> None:
    launch = "-m accelerate.commands.launch --cpu --num_processes 2 --num_machines 1 --mixed_precision no"
    options = "--dynamo_backend no -m flide train --device cpu --batch-tokens 160 --head linear"
    out = tmp_path / "out"
    files = ["--model", BASE, "--data", str(data), "--val", str(data), "--out", str(out)]
    subprocess.run([sys.executable, *launch.split(), *options.split(), *files], check=True, timeout=400)
    lines = [json.loads(line) for line in (out / METRICS_FILE).read_text().splitlines()]
    assert sum(line["questions"] for line in lines if "loss" in line) == 18
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, len(lines)))
