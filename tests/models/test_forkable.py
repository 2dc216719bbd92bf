"""Models that cannot be forked exactly are refused with the reason."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from flide import AutoModelForDecision, CheckpointError, Engine
from flide.models.auto import family_of
from flide.models.directory import ModelDirectory
from tests.tiny_model import tiny_model_directory

READOUT: dict[str, tuple[Any, str]] = {
    "noncausal": (
        {"attention_mode": "noncausal_full_attention"},
        "'noncausal_full_attention' cannot be forked.*rows see",
    ),
    "unknown": ({"attention_mode": ["x"]}, "cannot be forked exactly"),
    "packed": ({"attention_mode": "causal", "packed": True}, "all questions in one sequence"),
    "joint": ({"joint": True}, "there are no branches to fork"),
    "codes": ({"format_version": 1, "codes": 255}, "a readout that Flide does not have; docs/add-a-format.md"),
    "no object": ([], "a readout that Flide does not have"),
}


@pytest.mark.parametrize(("content", "message"), READOUT.values(), ids=READOUT.keys())
def test_a_readout_of_others_is_refused_with_the_reason(tmp_path: Path, content: Any, message: str) -> None:
    model = Path(shutil.copytree(tiny_model_directory(), tmp_path / "model"))
    (model / "decision_config.json").write_text(json.dumps(content))
    for load in (AutoModelForDecision.from_pretrained, Engine.from_pretrained):
        with pytest.raises(CheckpointError, match=message):
            load(model)
    (model / "decision_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"cannot read decision_config\.json"):
        ModelDirectory.open(model)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "modernbert"}, "no model family.*modernbert is an encoder: its state's rows see the questions"),
        ({"architectures": ["DebertaV2Model"], "model_type": "deberta-v2"}, "deberta-v2 is an encoder"),
        ({"model_type": "qwen3_5_text", "is_causal": False}, "attention is not causal"),
        ({"model_type": "qwen3_5_text", "attention_mode": "noncausal_full_attention"}, "attention is not causal"),
    ],
    ids=["encoder", "other encoder", "flag", "mode"],
)
def test_what_reads_in_both_directions_is_refused_with_the_reason(config: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        family_of(config)
