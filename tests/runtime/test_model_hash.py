"""The name of a model: the same however it is stored and run, another where anything that decides an answer differs."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from flide import Engine, EngineConfig
from flide.heads.kinds import LinearHead
from flide.models import Qwen35ForDecision
from flide.runtime.calibration import save_temperatures
from flide.runtime.model_hash import model_hash
from flide.runtime.tokenizer import PromptTokenizer
from tests.tiny_model import tiny_engine, tiny_model_directory

DIRECTORY = tiny_model_directory()
TOKENIZER = PromptTokenizer.from_pretrained(DIRECTORY)


def load(directory: Path = DIRECTORY, dtype: torch.dtype | None = None) -> Qwen35ForDecision:
    return Qwen35ForDecision.from_pretrained(directory, dtype=dtype)


def name(model: Qwen35ForDecision, temperatures: dict[str, float] | None = None) -> str:
    return model_hash(model, TOKENIZER, temperatures or {})


EXPECTED = name(load())


def test_a_name_is_sixteen_digits_and_the_engines() -> None:
    assert len(EXPECTED) == 16
    assert int(EXPECTED, 16) >= 0
    with tiny_engine(EngineConfig(device="cpu", model_name="any")) as engine:
        assert engine.model_hash == EXPECTED


def test_how_a_model_is_stored_and_run_is_not_in_its_name(tmp_path: Path) -> None:
    model = load()
    model.save_pretrained(tmp_path, max_shard_size=200_000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert name(load(tmp_path)) == EXPECTED
    model.merge_projections()
    assert name(model) == EXPECTED
    narrow = load(dtype=torch.bfloat16)
    assert name(narrow.float()) == name(load(dtype=torch.bfloat16))
    assert name(load(), {"noul": 1}) == EXPECTED


def _flip_a_bit(model: Qwen35ForDecision) -> None:
    weight = model.lm_head.weight.data
    weight.view(torch.int32)[-1, -1] ^= 1


def _swap_two_weights(model: Qwen35ForDecision) -> None:
    flat = model.lm_head.weight.data.view(-1)
    places = torch.tensor([5, 5 + 3 * 1024])  # of one column of the sums
    flat[places] = flat[places.flip(0)]


def _swap_two_layers(model: Qwen35ForDecision) -> None:
    first, second = model.model.layers[0], model.model.layers[1]
    states = [{k: v.clone() for k, v in layer.state_dict().items()} for layer in (second, first)]
    for layer, state in zip((first, second), states, strict=True):
        layer.load_state_dict(state)


def _give_a_head(model: Qwen35ForDecision) -> None:
    model.head = LinearHead.from_settings({"labels": ["a", "b"]}, model.lm_head.in_features)


@pytest.mark.parametrize("change", [_flip_a_bit, _swap_two_weights, _swap_two_layers, _give_a_head])
def test_other_weights_have_another_name(change: Callable[[Qwen35ForDecision], None]) -> None:
    model = load()
    change(model)
    assert name(model) != EXPECTED


def test_labels_of_a_head_are_in_the_name() -> None:
    names = set()
    for labels in (["a", "b"], ["b", "a"]):
        model = load()
        model.head = LinearHead.from_settings({"labels": labels}, model.lm_head.in_features)
        names.add(name(model))
    assert len(names) == 2


def test_temperatures_template_and_configuration_are_in_the_name(tmp_path: Path) -> None:
    def changed(index: int, change: Callable[[Path], object]) -> str:
        directory = Path(shutil.copytree(DIRECTORY, tmp_path / str(index)))
        change(directory)
        with Engine.from_pretrained(directory, EngineConfig(device="cpu")) as engine:
            return engine.model_hash

    def edit(file: str, old: str, new: str) -> Callable[[Path], object]:
        def change(directory: Path) -> None:
            text = (directory / file).read_text(encoding="utf-8")
            assert old in text
            (directory / file).write_text(text.replace(old, new, 1), encoding="utf-8")

        return change

    changes: list[Callable[[Path], object]] = [
        lambda directory: None,
        lambda directory: save_temperatures(directory, {"noul": 2.0}),
        edit("chat_template.jinja", "<think>", "<think> "),
        edit("config.json", '"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'),
    ]
    names = [changed(index, change) for index, change in enumerate(changes)]
    assert names[0] == EXPECTED
    assert len(set(names)) == len(names)
