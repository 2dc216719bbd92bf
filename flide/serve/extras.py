"""What answers hold beside the shape of their API."""

from __future__ import annotations

from typing import Any

from flide.runtime.decision import Decision


def extras(decision: Decision, model_hash: str) -> dict[str, Any]:
    """``x_flide``: which model answered (``Engine.model_hash``), and tokens that questions did not have to read because
    they share them (``Usage.reused_tokens``). Times stand in ``Server-Timing``."""
    return {"x_flide": {"model_hash": model_hash, "reused_tokens": decision.usage.reused_tokens}}
