"""Flide: decision inference in PyTorch. A long state runs once and forks exactly into every question.

    from flide import Choice, DecisionRequest, Engine

    with Engine.from_pretrained("Qwen/Qwen3.5-0.8B") as engine:
        request = DecisionRequest("The parcel arrived crushed.", {"team": Choice("Who?", ["shipping", "billing"])})
        (decision,) = engine.decide([request])
        decision["team"].probabilities

For research without the engine see ``flide.models``; for the stream see ``flide.runtime``.
"""

import logging as _logging

from flide.errors import CheckpointError, FlideError, ModelOutputError, RequestError
from flide.models import AutoModelForDecision
from flide.runtime.config import EngineConfig
from flide.runtime.decision import ChoiceAnswer, Decision, NoulAnswer, ScoreAnswer, Usage
from flide.runtime.engine import Engine, embedded_model_directory
from flide.runtime.request import Choice, DecisionRequest, Noul, Score
from flide.version import __version__

_logging.getLogger("flide").addHandler(_logging.NullHandler())

__all__ = [
    "AutoModelForDecision",
    "CheckpointError",
    "Choice",
    "ChoiceAnswer",
    "Decision",
    "DecisionRequest",
    "Engine",
    "EngineConfig",
    "FlideError",
    "ModelOutputError",
    "Noul",
    "NoulAnswer",
    "RequestError",
    "Score",
    "ScoreAnswer",
    "Usage",
    "__version__",
    "embedded_model_directory",
]
