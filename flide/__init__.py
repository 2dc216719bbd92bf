"""Flide: decision inference in PyTorch. A long state runs once and forks exactly into every question.

    from flide import Choice, DecisionRequest, Engine

    with Engine.from_pretrained("Qwen/Qwen3.5-0.8B") as engine:
        request = DecisionRequest("The parcel arrived crushed.", {"team": Choice("Who?", ["shipping", "billing"])})
        (decision,) = engine.decide([request])
        decision["team"].probabilities

For research without the engine see ``flide.models``; for the stream see ``flide.runtime``.
"""

import logging as _logging
from typing import TYPE_CHECKING

from flide.errors import CheckpointError, FlideError, ModelOutputError, RequestError, ServerError
from flide.lazy import lazy_exports as _lazy_exports
from flide.version import __version__

if TYPE_CHECKING:
    from flide.client import AsyncClient, Client
    from flide.models import AutoModelForDecision
    from flide.runtime.config import EngineConfig
    from flide.runtime.decision import ChoiceAnswer, Decision, NoulAnswer, ScoreAnswer, Usage
    from flide.runtime.engine import Engine, embedded_model_directory
    from flide.runtime.request import Choice, DecisionRequest, Noul, Score

__getattr__ = _lazy_exports(
    __name__,
    {
        "flide.client": ("AsyncClient", "Client"),
        "flide.models": ("AutoModelForDecision",),
        "flide.runtime.config": ("EngineConfig",),
        "flide.runtime.decision": ("ChoiceAnswer", "Decision", "NoulAnswer", "ScoreAnswer", "Usage"),
        "flide.runtime.engine": ("Engine", "embedded_model_directory"),
        "flide.runtime.request": ("Choice", "DecisionRequest", "Noul", "Score"),
    },
)

_logging.getLogger("flide").addHandler(_logging.NullHandler())


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ = [
    "AsyncClient",
    "AutoModelForDecision",
    "CheckpointError",
    "Choice",
    "ChoiceAnswer",
    "Client",
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
    "ServerError",
    "Usage",
    "__version__",
    "embedded_model_directory",
]
