"""Models that cannot be forked, and why. A state runs once only if it cannot see the questions behind it.

A trunk's hidden states must not depend on what follows. That holds for causal models asked one question per sequence,
and for nothing else; such models are refused by name instead of being answered wrongly.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from flide.errors import CheckpointError
from flide.stored_json import read_json_file

READOUT_FILE = "decision_config.json"  # of d3, AutoJev and others with a trained readout
NONCAUSAL = "noncausal_full_attention"
# Families that read in both directions.
_ENCODERS = {
    *("albert", "bert", "camembert", "deberta", "deberta-v2", "distilbert", "electra", "eurobert", "modernbert"),
    *("mpnet", "nomic_bert", "roberta", "t5", "t5gemma", "xlm-roberta"),
}


def check_causal(config: Mapping[str, Any]) -> None:
    """See that a config.json does not say that the model's attention reads in both directions.

    Raises:
        CheckpointError: it does.
    """
    if config.get("is_causal") is False or config.get("attention_mode") == NONCAUSAL:
        raise CheckpointError(f"the model's attention is not causal: {_SEES}")


def reason_against(names: Iterable[object]) -> str:
    """Why models of some type can have no family here, as the end of an error; empty where they could."""
    found = next((name for name in names if isinstance(name, str) and name in _ENCODERS), None)
    return "" if found is None else f". {found} is an encoder: {_SEES}"


def check_readout(directory: Path) -> None:
    """See that a directory does not name a readout that is not ours.

    Raises:
        CheckpointError: it does, or its file cannot be read.
    """
    try:
        content = read_json_file(directory / READOUT_FILE)
    except FileNotFoundError:
        return
    fields = content if isinstance(content, dict) else {}
    mode = fields.get("attention_mode", "causal")
    if mode != "causal":
        raise CheckpointError(f"{READOUT_FILE}: attention_mode {str(mode)[:40]!r} cannot be forked exactly: {_SEES}")
    if fields.get("packed") or fields.get("joint"):
        raise CheckpointError(
            f"{READOUT_FILE}: the model reads all questions in one sequence, where each sees those before it: its "
            "answers depend on what is asked beside them, and there are no branches to fork"
        )
    raise CheckpointError(
        f"{READOUT_FILE} describes a readout that Flide does not have; docs/add-a-format.md says how to add it"
    )


_SEES = "its state's rows see the questions behind them, so that a state cannot be run before its questions are known"

__all__ = ["READOUT_FILE", "check_causal", "check_readout", "reason_against"]
