"""Labelled rows, and how good a model's answers to them are. Light on purpose: no model is loaded, nothing is drawn."""

from typing import TYPE_CHECKING

from flide.lazy import lazy_exports as _lazy_exports

if TYPE_CHECKING:
    from flide.evaluation.metrics import Evaluation, LabelledAnswer, evaluate, temper
    from flide.evaluation.rows import LabelledRow, RowError, iter_rows, read_rows

__getattr__ = _lazy_exports(
    __name__,
    {
        "flide.evaluation.metrics": ("Evaluation", "LabelledAnswer", "evaluate", "temper"),
        "flide.evaluation.rows": ("LabelledRow", "RowError", "iter_rows", "read_rows"),
    },
)


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
