"""What answers hold beside the shape of their API."""

from __future__ import annotations

from typing import Any

from flide.runtime.decision import Decision


def extras(decision: Decision, model_hash: str) -> dict[str, Any]:
    """``x_flide``: which model answered (``Engine.model_hash``), and tokens that questions did not have to read because
    they share them, and tokens that a checkpoint saved (``Usage``). Times stand in ``Server-Timing``."""
    usage = decision.usage
    fields = {"model_hash": model_hash, "shared_tokens": usage.shared_tokens, "reused_tokens": usage.reused_tokens}
    return {"x_flide": fields}
