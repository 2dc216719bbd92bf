"""Options of a run: what is refused, what a schedule is, what a resumed run may change."""

from __future__ import annotations

import json
from typing import Any

import pytest

from flide.train import TrainConfig


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lora_rank": -1}, "lora_rank must be an integer of at least 0"),
        ({"epochs": 0}, "epochs must be"),
        ({"epochs": 1.5}, "epochs must be"),
        ({"batch_tokens": True}, "batch_tokens must be"),
        ({"lr": 0}, "lr must be a finite number above 0"),
        ({"head_lr": float("inf")}, "head_lr must be"),
        ({"lora_alpha": -1.0}, "lora_alpha must be"),
        ({"warmup": 1.5}, "warmup must be a share"),
        ({"lr": 10**400}, "lr must be a finite number above 0"),
        ({"lr": 1e38}, "lr must be a finite number above 0"),
        ({"lora_alpha": True}, "lora_alpha must be"),
        ({"seed": 1 << 64}, "seed must be less than"),
        ({"device": "cuda:1"}, "device must be auto, cpu or cuda"),
        ({"device": ["cpu"]}, "device must be"),
        ({"dtype": "float16"}, "dtype must be auto, float32 or bfloat16"),
        ({"lora_targets": ()}, "lora_targets must be a tuple of names"),
        ({"lora_targets": "q_proj"}, "lora_targets must be"),
        ({"lora_targets": (["q_proj"],)}, "lora_targets must be"),
        ({"lora_rank": 0}, "nothing to train"),
    ],
)
def test_bad_options_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainConfig(**options)


@pytest.mark.parametrize(("steps", "warmup"), [(100, 0.1), (7, 0.03), (1, 0.03), (5, 0.0), (3, 1.0)])
def test_rates_rise_in_the_warm_up_and_then_fall(steps: int, warmup: float) -> None:
    config = TrainConfig(warmup=warmup)
    factors = [config.lr_factor(step, steps) for step in range(steps)]
    assert all(0 < factor <= 1 for factor in factors)
    top = factors.index(max(factors))
    assert max(factors) == 1
    assert factors[: top + 1] == sorted(factors[: top + 1])
    assert factors[top:] == sorted(factors[top:], reverse=True)
    if steps == 100:
        assert factors[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
        assert factors[55] == pytest.approx(0.5)
        assert factors[-1] < 0.001


def test_options_survive_a_file_and_tell_in_what_they_differ() -> None:
    config = TrainConfig(head="scalar", lora_targets=("q_proj", "v_proj"), lora_alpha=3)
    again = TrainConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert again == config
    assert (TrainConfig().lora_scale, config.lora_scale) == (2.0, 0.375)
    assert config.differences(TrainConfig.from_dict({**config.to_dict(), "save_every": 1})) == []
    assert config.differences(TrainConfig()) == ["head", "lora_alpha", "lora_targets"]
    with pytest.raises(ValueError, match="unknown training options: speed"):
        TrainConfig.from_dict({"speed": 1})
    with pytest.raises(ValueError, match="lora_targets must be"):
        TrainConfig.from_dict({"lora_targets": 5})
