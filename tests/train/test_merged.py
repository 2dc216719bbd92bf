"""A merged model is a plain checkpoint that answers what the fine-tuned one answers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from flide import Engine, EngineConfig
from flide.heads import save_head
from flide.heads.files import HEAD_FILE
from flide.models import AutoModelForDecision
from flide.models.weights import SINGLE_NAME
from flide.runtime.calibration import CALIBRATION_FILE, load_temperatures, save_temperatures
from flide.train import TrainConfig, merge, train
from tests.oracle import isolated_logits
from tests.tiny_model import tiny_model_directory
from tests.tolerance import LOGITS_FP32, PROBABILITY_FP32
from tests.train.data import rows, write


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(tiny_model_directory(), tmp_path_factory.mktemp("model") / "base"))


@pytest.fixture(scope="module")
def tuned(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    out = tmp_path_factory.mktemp("tuned")
    data = write(out / "train.jsonl", rows(4))
    for kind in ("option", "scalar"):
        options = TrainConfig(head=kind, lr=5e-3, epochs=2, batch_tokens=700, device="cpu")
        train(base, data, out / kind, options)
    return {kind: out / kind for kind in ("option", "scalar")}


def answers(model: Path) -> list[Any]:
    with Engine.from_pretrained(model, EngineConfig(device="cpu")) as engine:
        (decision,) = engine.decide([rows(1)[0]])
    return [p for answer in decision.answers.values() for p in answer.probabilities.values()]


@pytest.mark.parametrize("kind", ["option", "scalar"])
def test_a_merged_model_needs_no_base_and_answers_alike(
    kind: str, base: Path, tuned: dict[str, Path], tmp_path: Path
) -> None:
    save_temperatures(tuned[kind], {"noul": 2.0})
    expected = answers(tuned[kind])
    assert merge(tuned[kind], tmp_path / "out", dtype=torch.float32) == tmp_path / "out"
    away = base.rename(base.with_name("away"))
    try:
        assert answers(tmp_path / "out") == pytest.approx(expected, abs=PROBABILITY_FP32)
        with pytest.raises(ValueError, match="belongs to cannot be had"):
            answers(tuned[kind])
    finally:
        away.rename(base)
    assert load_temperatures(tmp_path / "out") == {"noul": 2.0}
    (tuned[kind] / CALIBRATION_FILE).unlink()
    assert (tmp_path / "out" / HEAD_FILE).exists() == (kind == "scalar")
    if kind == "scalar":
        assert "base_model" not in json.loads((tmp_path / "out" / HEAD_FILE).read_text())
    folded = AutoModelForDecision.from_pretrained(tuned[kind])
    hf = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32, local_files_only=True).eval()
    hidden = folded.state_dict()
    for name, tensor in hf.state_dict().items():
        assert torch.equal(hidden[name], tensor), name
    logits = isolated_logits(hf, [5, 6, 7])
    assert torch.isfinite(logits).all()
    assert logits.std() > LOGITS_FP32


def test_the_dtype_is_the_bases_and_what_was_not_trained_keeps_its_bits(
    base: Path, tuned: dict[str, Path], tmp_path: Path
) -> None:
    merge(tuned["option"], tmp_path / "out")
    merged, original = load_file(tmp_path / "out" / SINGLE_NAME), load_file(base / SINGLE_NAME)
    assert {k: (v.dtype, v.shape) for k, v in merged.items()} == {k: (v.dtype, v.shape) for k, v in original.items()}
    adapted = {name for name in merged if not torch.equal(merged[name], original[name])}
    assert adapted
    assert all(name.rpartition(".")[0].endswith("_proj") or "in_proj" in name for name in adapted)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


@pytest.mark.parametrize("way", ["there", "link", "dangling", "here"])
def test_an_empty_directory_is_filled_whatever_leads_to_it(
    way: str, tuned: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    link.symlink_to(target)
    if way != "dangling":
        target.mkdir()
    monkeypatch.chdir(target if way == "here" else tmp_path)
    out = {"there": target, "here": Path()}.get(way, link)
    inode = None if way == "dangling" else target.stat().st_ino
    assert merge(tuned["scalar"], out) == out
    assert inode in (None, target.stat().st_ino)
    assert link.is_symlink()
    assert answers(target)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "target"]
    assert not any(path.is_dir() for path in target.iterdir())


@pytest.mark.parametrize("damage", ["int8", "missing"])
def test_a_base_that_cannot_be_loaded_is_told(damage: str, base: Path, tmp_path: Path) -> None:
    own = Path(shutil.copytree(base, tmp_path / "base"))
    (tmp_path / "tuned").mkdir()
    save_head(None, tmp_path / "tuned", base_model=str(own))
    tensors = load_file(own / SINGLE_NAME)
    embedding = tensors.pop("model.embed_tokens.weight")
    save_file(
        {**tensors, **({"model.embed_tokens.weight": embedding.to(torch.int8)} if damage == "int8" else {})},
        own / SINGLE_NAME,
    )
    with pytest.raises(ValueError, match="embed_tokens"):
        merge(tmp_path / "tuned", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_merged_is_refused(
    base: Path, tuned: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="nothing to merge"):
        merge(base, tmp_path / "out")
    (tmp_path / "file").touch()
    for taken in (tmp_path, tmp_path / "file"):
        with pytest.raises(ValueError, match="not an empty directory"):
            merge(tuned["option"], taken)

    def fail(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("flide.train.merged.copy_tokenizer", fail)
    with pytest.raises(OSError, match="disk full"):
        merge(tuned["option"], tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]
