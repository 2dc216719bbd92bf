"""A run from files to a directory: the engine answers what was trained, and a stopped run goes on bit for bit."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import shutil
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from flide import Engine, EngineConfig
from flide.errors import CheckpointError, ModelOutputError
from flide.evaluation.report import answer_rows
from flide.evaluation.rows import read_rows
from flide.heads import LinearHead, load_head, save_head
from flide.heads.files import HEAD_FILE, WEIGHTS_FILE
from flide.models import AutoModelForDecision
from flide.models.adapter import CONFIG_FILE
from flide.models.adapter import WEIGHTS_FILE as ADAPTER_WEIGHTS
from flide.train import BadRows, TrainConfig, merge, train
from flide.train.run import METRICS_FILE, REPORT_FILE
from flide.train.state import STATE_FILE, TrainingState, hold
from flide.train.trainer import Trainer
from tests.heads.test_heads import BilinearHead
from tests.tiny_model import tiny_engine, tiny_model_directory
from tests.tolerance import PROBABILITY_FP32
from tests.train.data import rows, write

BASE = tiny_model_directory()
KINDS = ["option", "scalar", "linear"]


def config(**options: Any) -> TrainConfig:
    defaults: dict[str, Any] = {"lr": 3e-3, "head_lr": 3e-3, "batch_tokens": 700, "device": "cpu", "epochs": 2}
    return TrainConfig(**{**defaults, **options})


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("data") / "train.jsonl", rows(10))


@pytest.fixture(scope="module")
def val(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("data") / "val.jsonl", rows(4, seed=1))


def hashes(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(directory.iterdir())}


def log_of(directory: Path) -> list[dict[str, Any]]:
    """The metrics, without what depends on the clock."""
    lines = [json.loads(line) for line in (directory / METRICS_FILE).read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


@pytest.mark.parametrize("kind", KINDS)
def test_the_engine_answers_what_the_trainer_evaluates(
    kind: str, data: Path, val: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = hashes(BASE)
    evaluated: list[Any] = []
    own = Trainer.evaluate
    monkeypatch.setattr(Trainer, "evaluate", lambda *arguments: evaluated.append(own(*arguments)) or evaluated[-1])
    result = train(BASE, data, tmp_path / "out", config(head=kind, epochs=3), val=val)
    assert hashes(BASE) == before
    assert len(evaluated) == 3  # after each epoch
    labelled, _ = read_rows(val)
    with Engine.from_pretrained(tmp_path / "out", EngineConfig(device="cpu")) as engine:
        answers = answer_rows(engine, labelled)
        assert engine.model_name == "out"
    with tiny_engine(EngineConfig(device="cpu")) as plain:
        untrained = answer_rows(plain, labelled)
    assert [a.question_id for a in answers] == [a.question_id for a in evaluated[-1]]
    for mine, theirs in zip(answers, evaluated[-1], strict=True):
        assert mine.probabilities == pytest.approx(theirs.probabilities, abs=PROBABILITY_FP32)
        assert (mine.options, mine.target, mine.row) == (theirs.options, theirs.target, theirs.row)
    moved = [abs(a.probabilities[0] - b.probabilities[0]) for a, b in zip(answers, untrained, strict=True)]
    assert max(moved) > 0.1

    names = {METRICS_FILE, REPORT_FILE, HEAD_FILE, CONFIG_FILE, ADAPTER_WEIGHTS}
    names |= {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    names |= set() if kind == "option" else {WEIGHTS_FILE}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    report = json.loads((tmp_path / "out" / REPORT_FILE).read_text())
    assert (report["format_version"], report["rows"], report["steps"]) == (1, 10, result.steps)
    assert report["validation"] == result.validation
    steps = [line for line in log_of(tmp_path / "out") if "loss" in line]
    validations = [line for line in log_of(tmp_path / "out") if "validation" in line]
    assert [line["step"] for line in steps] == list(range(1, result.steps + 1))
    assert [line["epoch"] for line in validations] == [1, 2, 3]
    assert validations[-1]["validation"] == result.validation
    per_epoch = result.steps // 3
    assert sum(x["loss"] for x in steps[-per_epoch:]) < sum(x["loss"] for x in steps[:per_epoch])
    assert steps[0]["loss"] == pytest.approx(steps[0]["cross_entropy"] + 0.1 * steps[0]["brier"])


def test_peft_loads_what_was_trained(data: Path, tmp_path: Path) -> None:
    train(BASE, data, tmp_path / "out", config(epochs=1))
    base = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32, local_files_only=True)
    peft = PeftModel.from_pretrained(base, tmp_path / "out").eval()
    labelled, _ = read_rows(data)
    with Engine.from_pretrained(tmp_path / "out", EngineConfig(device="cpu")) as engine, torch.no_grad():
        decisions = engine.decide([row.request for row in labelled[:2]])
        for row, decision in zip(labelled, decisions, strict=False):
            prompts = engine.format.encode(row.request).prompts
            for prompt, answer in zip(prompts, decision.answers.values(), strict=True):
                count = len(answer.probabilities)
                logits = peft(torch.tensor([prompt]), use_cache=False).logits[0, -1, engine.format.label_ids(count)]
                expected = logits.softmax(-1).tolist()
                assert list(answer.probabilities.values()) == pytest.approx(expected, abs=PROBABILITY_FP32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_weight_of_the_base_changes_a_bit(
    dtype: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainers: list[Trainer] = []
    own = Trainer.__init__

    def noted(self: Trainer, *arguments: Any, **options: Any) -> None:
        trainers.append(self)
        own(self, *arguments, **options)

    monkeypatch.setattr(Trainer, "__init__", noted)
    train(BASE, data, tmp_path / "out", config(head="scalar", epochs=1, dtype=dtype))
    (trainer,) = trainers
    untouched = AutoModelForDecision.from_pretrained(BASE, dtype=getattr(torch, dtype)).state_dict()
    trained = trainer.trainee.state_dict()
    for name, tensor in untouched.items():
        assert torch.equal(trained.pop(f"model.{name}"), tensor), name
    assert trained
    assert all(tensor.dtype == torch.float32 for tensor in trained.values())
    assert {x.dtype for x in load_file(tmp_path / "out" / ADAPTER_WEIGHTS).values()} == {torch.float32}
    with Engine.from_pretrained(tmp_path / "out", EngineConfig(device="cpu", dtype=dtype)) as engine:
        assert engine.decide([rows(1)[0]])


# Stopping and going on


def stop_in_step(monkeypatch: pytest.MonkeyPatch, step: int, action: Any) -> None:
    advance = Trainer.advance

    def stopped(self: Trainer, **options: Any) -> Any:
        report = advance(self, **options)
        if self.step == step:
            action()
        return report

    monkeypatch.setattr(Trainer, "advance", stopped)


@pytest.mark.parametrize(("kind", "number"), [("scalar", signal.SIGINT), ("linear", signal.SIGTERM)])
def test_a_stopped_run_goes_on_bit_for_bit(
    kind: str, number: signal.Signals, data: Path, val: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    options = config(head=kind, batch_tokens=700 if kind == "scalar" else 250)
    train(BASE, data, whole, options, val=val)
    handler = signal.getsignal(number)
    with monkeypatch.context() as patch:
        stop_in_step(patch, 3, lambda: os.kill(os.getpid(), number))
        with pytest.raises(KeyboardInterrupt):
            train(BASE, data, parts, options, val=val)
    assert signal.getsignal(number) == handler
    assert {path.name for path in parts.iterdir()} == {STATE_FILE, METRICS_FILE}
    assert TrainingState.load(parts).step == 3
    assert len(log_of(parts)) < len(log_of(whole))
    torch.manual_seed(123)  # whatever happened in between
    train(BASE, data, parts, options, val=val, resume=True)
    assert log_of(parts) == log_of(whole)
    ours, theirs = hashes(parts), hashes(whole)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if ours[name] != theirs[name]] == [METRICS_FILE]


def test_a_run_that_failed_goes_on_from_its_last_checkpoint(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise OSError("no power")

    options = config(head="linear", batch_tokens=250, save_every=2)
    train(BASE, data, tmp_path / "whole", options)
    with monkeypatch.context() as patch:
        stop_in_step(patch, 3, fail)
        with pytest.raises(OSError, match="no power"):
            train(BASE, data, tmp_path / "parts", options)
    assert TrainingState.load(tmp_path / "parts").step == 2
    with (tmp_path / "parts" / METRICS_FILE).open("a") as file:
        file.write("a line that was being writ")
    train(BASE, data, tmp_path / "parts", TrainConfig(**{**options.to_dict(), "save_every": 50}), resume=True)
    assert log_of(tmp_path / "parts") == log_of(tmp_path / "whole")
    for name in (ADAPTER_WEIGHTS, WEIGHTS_FILE):
        assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.fixture(scope="module")
def stopped(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped early."""
    out = tmp_path_factory.mktemp("stopped") / "out"
    with pytest.MonkeyPatch.context() as patch:
        stop_in_step(patch, 1, lambda: os.kill(os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            train(BASE, data, out, config(head="scalar"))
    return out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"options": {"lr": 1e-3}}, "other options: lr"),
        ({"options": {"head": "linear", "epochs": 3}}, "other options: head, epochs"),
        ({"rows": rows(11)}, "trained on other rows"),
        ({"model": True}, "other options: model"),
        ({"weights": True}, "or with another model"),
        ({"resume": False}, "not empty .*; resume goes on"),
    ],
    ids=["lr", "head-and-epochs", "rows", "model", "weights", "not-resumed"],
)
def test_what_was_another_run_is_not_resumed(
    stopped: Path, data: Path, tmp_path: Path, change: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Path(shutil.copytree(BASE, tmp_path / "model")) if {"model", "weights"} & set(change) else BASE
    if "weights" in change:  # others under the name that the run knows
        tensors = load_file(model / "model.safetensors")
        tensors["model.norm.weight"] += 0.1
        save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
        monkeypatch.setattr("flide.train.run.lasting_name", lambda _: str(BASE))
    data = write(tmp_path / "rows.jsonl", change["rows"]) if "rows" in change else data
    before = hashes(stopped)
    with pytest.raises(ValueError, match=message):
        train(
            model,
            data,
            stopped,
            config(**{"head": "scalar", **change.get("options", {})}),
            resume=change.get("resume", True),
        )
    assert hashes(stopped) == before


def test_bad_checkpoints_are_refused_by_name(stopped: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no run to resume"):
        TrainingState.load(tmp_path)
    content = torch.load(stopped / STATE_FILE, weights_only=True)
    for change, message in (
        ({"format_version": 2}, "format_version 2; this Flide reads 1"),
        ({"step": "1"}, "'step' is not what it should be"),
        ({"step": -1}, "'step' is not what it should be"),
        ({"config": [1]}, "'config' is not what it should be"),
        ({"rng": None}, "'rng' is not what it should be"),
    ):
        torch.save({**content, **change}, tmp_path / STATE_FILE)
        with pytest.raises(CheckpointError, match=message):
            TrainingState.load(tmp_path)
    torch.save({"format_version": 1}, tmp_path / STATE_FILE)
    with pytest.raises(CheckpointError, match="has no 'config'"):
        TrainingState.load(tmp_path)
    (tmp_path / STATE_FILE).unlink()
    (tmp_path / STATE_FILE).mkdir()
    with pytest.raises(CheckpointError, match=r"cannot read training_state\.pt: Is a directory"):
        TrainingState.load(tmp_path)


class RunsCode:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("damage", ["cut", "empty", "text", "garbage", "pickle", "code", "torch-code"])
def test_bytes_that_are_no_checkpoint_are_one_message_and_run_nothing(
    damage: str, stopped: Path, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    whole = (stopped / STATE_FILE).read_bytes()
    cut, garbage = whole[:1000], bytes(random.Random(0).randbytes(5000))
    found = {"cut": cut, "empty": b"", "text": b"hello\n", "garbage": garbage, "pickle": pickle.dumps({"a": 1})}
    code, path = RunsCode(tmp_path / "ran"), tmp_path / STATE_FILE
    if damage == "torch-code":
        torch.save({"format_version": 1, "config": code}, path)
    else:
        path.write_bytes(pickle.dumps(code) if damage == "code" else found[damage])
    with pytest.raises(CheckpointError, match=r"^training_state\.pt is damaged, or not written by Flide$"):
        TrainingState.load(tmp_path)
    assert not code.path.exists()
    assert not recwarn.list


def damaged_state(content: dict[str, Any], part: str) -> dict[str, Any]:
    trained, optimizer = dict(content["trained"]), dict(content["optimizer"])
    name = next(iter(trained))
    if part == "tensor":
        trained[name] = trained[name].long()
    elif part == "no-tensor":
        trained[name] = None
    elif part == "moments":
        optimizer["state"] = {0: {**optimizer["state"][0], "exp_avg": torch.zeros(3)}}
    elif part == "optimizer":
        optimizer = {"state": {0: "x"}, "param_groups": 5}
    elif part == "rng":
        content["rng"] = {"cpu": torch.zeros(3, dtype=torch.uint8)}
    elif part == "steps":
        content["step"] = 10**9
    else:
        content["config"] = {**content["config"], "lora_targets": 5}
    return {**content, "trained": trained, "optimizer": optimizer}


@pytest.mark.parametrize("part", ["tensor", "no-tensor", "moments", "optimizer", "rng", "steps", "config"])
def test_a_checkpoint_that_holds_something_else_is_refused(
    part: str, stopped: Path, data: Path, tmp_path: Path
) -> None:
    out = Path(shutil.copytree(stopped, tmp_path / "out"))
    content = torch.load(out / STATE_FILE, weights_only=True)
    torch.save(damaged_state(content, part), out / STATE_FILE)
    before = hashes(out)
    with pytest.raises(ValueError, match="checkpoint|lora_targets"):
        train(BASE, data, out, config(head="scalar"), resume=True)
    assert hashes(out) == before


def test_the_options_of_the_optimizer_are_those_of_the_run(stopped: Path, data: Path, tmp_path: Path) -> None:
    results = []
    for name, betas in (("as-it-was", None), ("other", (0.0, 0.0))):
        out = Path(shutil.copytree(stopped, tmp_path / name))
        content = torch.load(out / STATE_FILE, weights_only=True)
        for group in content["optimizer"]["param_groups"]:
            group["betas"] = betas or group["betas"]
        torch.save(content, out / STATE_FILE)
        train(BASE, data, out, config(head="scalar"), resume=True)
        results.append((out / ADAPTER_WEIGHTS).read_bytes())
    assert results[0] == results[1]


def test_metrics_that_are_gone_are_not_made_up(stopped: Path, data: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(stopped, tmp_path / "out"))
    (out / METRICS_FILE).unlink()
    train(BASE, data, out, config(head="scalar"), resume=True)
    assert log_of(out)[0]["step"] == 2


def test_a_run_killed_in_its_first_step_can_be_resumed(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt  # as a second Ctrl-C does

    train(BASE, data, tmp_path / "whole", config())
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "advance", killed)
        with pytest.raises(KeyboardInterrupt):
            train(BASE, data, tmp_path / "parts", config())
    assert TrainingState.load(tmp_path / "parts").step == 0
    train(BASE, data, tmp_path / "parts", config(), resume=True)
    assert (tmp_path / "parts" / ADAPTER_WEIGHTS).read_bytes() == (tmp_path / "whole" / ADAPTER_WEIGHTS).read_bytes()


def test_a_directory_has_one_run_at_a_time(
    stopped: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = Path(shutil.copytree(stopped, tmp_path / "out"))
    with (out / METRICS_FILE).open("ab") as file:
        hold(file, "")
        before = hashes(out)
        with pytest.raises(ValueError, match="another run is going on in"):
            train(BASE, data, out, config(head="scalar"), resume=True)
        assert hashes(out) == before
    own = Trainer.__init__

    def other_first(self: Trainer, *arguments: Any, **options: Any) -> None:
        own(self, *arguments, **options)
        shutil.copytree(stopped, tmp_path / "new", dirs_exist_ok=True)

    monkeypatch.setattr(Trainer, "__init__", other_first)
    with pytest.raises(ValueError, match="another run has begun in"):
        train(BASE, data, tmp_path / "new", config(head="scalar"))
    assert hashes(tmp_path / "new") == hashes(stopped)


@pytest.mark.parametrize("stage", ["copy_tokenizer", "save_adapter", "save_head"])
def test_what_is_not_finished_is_no_model(
    stage: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("disk full")

    options = config(head="linear", epochs=1)
    with monkeypatch.context() as patch:
        patch.setattr(f"flide.train.run.{stage}", fail)
        with pytest.raises(OSError, match="disk full"):
            train(BASE, data, tmp_path / "out", options)
    with pytest.raises(CheckpointError, match="a training run that is not finished; --resume"):
        Engine.from_pretrained(tmp_path / "out", EngineConfig(device="cpu"))
    train(BASE, data, tmp_path / "out", options, resume=True)
    with Engine.from_pretrained(tmp_path / "out", EngineConfig(device="cpu")) as engine:
        assert type(engine.reader.head) is LinearHead


def test_a_checkpoint_that_cannot_be_written_is_an_os_error_and_leaves_nothing(
    stopped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = TrainingState.load(stopped)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        state.save(tmp_path)
    assert not list(tmp_path.iterdir())


# What is refused


def test_all_bad_rows_are_listed_and_nothing_is_written(tmp_path: Path) -> None:
    good = rows(3)
    no_target, unknown, empty, long = rows(4, seed=2)
    del no_target["targets"]["team"]
    unknown["targets"]["team"] = "nobody"
    empty["state"] = " \n"
    long["state"] = "word " * 900
    data = write(tmp_path / "train.jsonl", [good[0], no_target, "{", unknown, good[1], long, empty])
    val = write(tmp_path / "val.jsonl", [good[2], no_target])
    with pytest.raises(BadRows) as refused:
        train(BASE, data, tmp_path / "out", config(), val=val)
    assert [(Path(name).name, error.line) for name, error in refused.value.errors] == [
        *(("train.jsonl", line) for line in (2, 3, 4, 6, 7)),
        ("val.jsonl", 2),
    ]
    text = str(refused.value)
    for part in ("targets.team: Field required", "one of the question's options", "state should not be empty"):
        assert part in text
    assert "a batch has at most 700" in text
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_without_a_good_row_is_refused(kind: str, tmp_path: Path) -> None:
    with pytest.raises(BadRows):
        train(BASE, write(tmp_path / "bad.jsonl", ["{}", "[]"]), tmp_path / "out", config(head=kind))
    with pytest.raises(ValueError, match="there are no rows"):
        train(BASE, write(tmp_path / "empty.jsonl", []), tmp_path / "out", config(head=kind))
    with pytest.raises(ValueError, match="cannot read"):
        train(BASE, tmp_path / "none.jsonl", tmp_path / "out", config(head=kind))
    assert not (tmp_path / "out").exists()


def test_labels_of_the_validation_that_training_never_saw_are_bad_rows(data: Path, tmp_path: Path) -> None:
    other = rows(2, seed=3)
    other[1]["questions"]["team"]["criteria"]["legal"] = None
    with pytest.raises(BadRows, match=r"val\.jsonl: line 2: .*no label for 1 of 4"):
        train(BASE, data, tmp_path / "out", config(head="linear"), val=write(tmp_path / "val.jsonl", other))


def test_arguments_are_refused_before_anything_is_written(data: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").touch()
    for out, options, message in (
        (tmp_path / "full", config(), r"not empty \(notes.txt\)"),
        (tmp_path / "full" / "notes.txt", config(), "not a directory"),
        (tmp_path / "out", config(head="span"), "no head of kind 'span'"),
        (tmp_path / "out", config(lora_targets=("q_proj", "mixer")), "no linear layer is called mixer"),
        (tmp_path / "out", config(lora_rank=10**7), "more than the matrices have"),
    ):
        with pytest.raises(ValueError, match=message):
            train(BASE, data, out, options)
    with pytest.raises(ValueError, match="no run to resume"):
        train(BASE, data, tmp_path / "out", config(), resume=True)
    assert not (tmp_path / "out").exists()


def test_without_accelerate_the_extra_is_named(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(ValueError, match=r"pip install 'flide-torch\[train\]'"):
        train(BASE, data, tmp_path / "out", config())


def test_a_loss_that_is_no_number_ends_the_run(data: Path, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(BASE, tmp_path / "model"))
    tensors = load_file(broken / "model.safetensors")
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelOutputError, match="not finite in step 1"):
        train(broken, data, tmp_path / "out", config())


@pytest.mark.parametrize("with_val", [True, False])
def test_a_model_that_the_last_step_broke_is_not_written(with_val: bool, data: Path, val: Path, tmp_path: Path) -> None:
    options = config(lr=1e20, epochs=1, batch_tokens=9999)
    with pytest.raises(ModelOutputError, match="logits are not finite after step 1"):
        train(BASE, data, tmp_path / "out", options, val=val if with_val else None)
    assert not (tmp_path / "out" / CONFIG_FILE).exists()


def test_a_tokenizer_of_another_model_is_refused(data: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(BASE, tmp_path / "model"))
    tensors = load_file(model / "model.safetensors")
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:640].clone()
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**settings, "vocab_size": 640}))
    with pytest.raises(CheckpointError, match="the tokenizer does not belong to the model"):
        train(model, data, tmp_path / "out", config())
    assert not (tmp_path / "out").exists()


def test_a_file_whose_name_is_not_unicode(data: Path, tmp_path: Path) -> None:
    path = tmp_path / "rows\udcff.jsonl"
    shutil.copy(data, path)
    train(BASE, path, tmp_path / "out", config(epochs=1))
    report = json.loads((tmp_path / "out" / REPORT_FILE).read_text(encoding="utf-8"))
    assert report["data"] == [str(tmp_path / "rows\N{REPLACEMENT CHARACTER}.jsonl")]


# Other starts


def test_a_head_alone_a_few_layers_and_a_users_head(data: Path, tmp_path: Path) -> None:
    train(BASE, data, tmp_path / "linear", config(head="linear", lora_rank=0, epochs=1))
    assert not (tmp_path / "linear" / CONFIG_FILE).exists()
    train(BASE, data, tmp_path / "own", config(head="bilinear", lora_rank=2, lora_targets=("q_proj",), epochs=1))
    keys = load_file(tmp_path / "own" / ADAPTER_WEIGHTS).keys()
    assert {key.split(".")[-3] for key in keys} == {"q_proj"}
    for name, kind in (("linear", LinearHead), ("own", BilinearHead)):
        with Engine.from_pretrained(tmp_path / name, EngineConfig(device="cpu")) as engine:
            assert type(engine.reader.head) is kind
            assert engine.decide([rows(1)[0]])


def test_training_goes_on_from_a_merged_models_head_and_refuses_one_that_is_not_merged(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(BASE, data, tmp_path / "first", config(head="linear", epochs=1))
    with pytest.raises(ValueError, match="flide merge"):
        train(tmp_path / "first", data, tmp_path / "second", config(head="linear"))
    merge(tmp_path / "first", tmp_path / "merged")
    seen: list[Any] = []
    own = Trainer.__init__

    def noted(self: Trainer, model: Any, head: Any, *arguments: Any, **options: Any) -> None:
        seen.append({name: tensor.clone() for name, tensor in head.state_dict().items()})
        own(self, model, head, *arguments, **options)

    monkeypatch.setattr(Trainer, "__init__", noted)
    train(tmp_path / "merged", data, tmp_path / "second", config(head="linear", epochs=1))
    first = load_head(tmp_path / "first", 64)
    assert first is not None
    assert all(torch.equal(seen[0][name], tensor) for name, tensor in first.state_dict().items())
    save_head(None, tmp_path / "merged")  # with the letters as its head, a new one is made
    train(tmp_path / "merged", data, tmp_path / "third", config(head="linear", epochs=1))
    assert not any(tensor.any() for tensor in seen[1].values())


def test_a_run_in_another_thread_and_the_progress_bar(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results: list[Any] = []
    options = config(epochs=1)
    thread = threading.Thread(
        target=lambda: results.append(train(BASE, data, tmp_path / "out", options, progress=True))
    )
    thread.start()
    thread.join()
    assert results[0].steps > 1
    assert results[0].validation is None
    out, err = capsys.readouterr()
    assert out == ""
    assert f"{results[0].steps}/{results[0].steps}" in err
    assert "loss=" in err
