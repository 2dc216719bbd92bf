"""Labelled rows, and how good a model's answers to them are. Light on purpose: no model is loaded, nothing is drawn."""

from flide.evaluation.metrics import Evaluation, LabelledAnswer, evaluate, temper
from flide.evaluation.rows import LabelledRow, RowError, iter_rows, read_rows

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
