"""Every bad engine option is one clear error."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flide import EngineConfig


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "tpu"}, "unknown device"),
        ({"device": ""}, "unknown device"),
        ({"device": None}, "unknown device"),
        ({"device": 1.5}, "unknown device"),
        ({"device": "meta"}, "not supported"),
        ({"device": "cuda:99"}, "sees .* CUDA devices"),
        ({"dtype": "int8"}, "unknown dtype"),
        ({"dtype": torch.int8}, "unknown dtype"),
        ({"dtype": torch.complex64}, "unknown dtype"),
        ({"dtype": None}, "unknown dtype"),
        ({"dtype": []}, "unknown dtype"),
        ({"max_round_tokens": 0}, "max_round_tokens"),
        ({"max_round_tokens": 1.0}, "max_round_tokens"),
        ({"max_prompt_tokens": -1}, "max_prompt_tokens"),
        ({"max_prompt_tokens": True}, "max_prompt_tokens"),
        ({"max_request_tokens": 0}, "max_request_tokens"),
        ({"depth": 4}, "depth must be 2 or 3"),
        ({"escape_control_tokens": 1}, "escape_control_tokens"),
        ({"checkpoint_gb": -1}, "checkpoint_gb"),
        ({"checkpoint_gb": True}, "checkpoint_gb"),
        ({"checkpoint_gb": float("nan")}, "checkpoint_gb"),
        ({"checkpoint_gb": 10**400}, "checkpoint_gb must be a number from 0 to 1e"),
        ({"checkpoint_gb": 1e308}, "checkpoint_gb must be a number from 0 to 1e"),
        ({"checkpoint_host_gb": 1}, "needs checkpoint_gb"),
        ({"checkpoint_dtype": "float16"}, "checkpoint_dtype"),
        ({"checkpoint_gb": 1, "fork": False}, "needs fork=True"),
        ({"model_name": ""}, "model_name"),
        ({"model_name": 7}, "model_name"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        EngineConfig(**options).resolve_device()
    assert "\n" not in str(caught.value)


def test_a_cuda_device_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for good in ("cuda", "cuda:1", torch.device("cuda", 0), "auto"):
        assert EngineConfig(device=good).resolve_device().type == "cuda"
    with pytest.raises(ValueError, match="'cuda:2' was asked for, but torch sees 2 CUDA devices"):
        EngineConfig(device="cuda:2").resolve_device()


def test_names_and_dtypes_mean_the_same() -> None:
    assert EngineConfig().resolve_dtype() is None
    for name in ("float32", "bfloat16", "float16", "float64"):
        assert EngineConfig(dtype=name).resolve_dtype() is getattr(torch, name)
        assert EngineConfig(dtype=getattr(torch, name)).resolve_dtype() is getattr(torch, name)
