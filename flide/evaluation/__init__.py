"""Labelled rows, and how good a model's answers to them are. Light on purpose: no model is loaded, nothing is drawn."""

import importlib as _importlib
from typing import TYPE_CHECKING
from typing import Any as _Any

if TYPE_CHECKING:
    from flide.evaluation.metrics import Evaluation, LabelledAnswer, evaluate, temper
    from flide.evaluation.rows import LabelledRow, RowError, iter_rows, read_rows

# Imported when they are asked for: the command line reads its options from this package.
_LATER = {
    "flide.evaluation.metrics": ("Evaluation", "LabelledAnswer", "evaluate", "temper"),
    "flide.evaluation.rows": ("LabelledRow", "RowError", "iter_rows", "read_rows"),
}


def __getattr__(name: str) -> _Any:
    for module, names in _LATER.items():
        if name in names:
            value = globals()[name] = getattr(_importlib.import_module(module), name)
            return value
    raise AttributeError(f"module 'flide.evaluation' has no attribute {name!r}")


__all__ = [
    "Evaluation",
    "LabelledAnswer",
    "LabelledRow",
    "RowError",
    "evaluate",
    "iter_rows",
    "read_rows",
    "temper",
]
