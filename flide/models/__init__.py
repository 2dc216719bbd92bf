"""Tree-aware models. One file per family; each reads top to bottom."""

from flide.models.auto import AutoModelForDecision, register
from flide.models.config import ConfigReader
from flide.models.decision import ForDecision, config_fields
from flide.models.gemma4 import Gemma4Config, Gemma4ForDecision
from flide.models.qwen3_5 import Qwen35Config, Qwen35ForDecision

__all__ = [
    "AutoModelForDecision",
    "ConfigReader",
    "ForDecision",
    "Gemma4Config",
    "Gemma4ForDecision",
    "Qwen35Config",
    "Qwen35ForDecision",
    "config_fields",
    "register",
]
