"""Answers of an engine to labelled rows, and the report on them: text, JSON, a reliability diagram.

    rows, errors = read_rows("dev.jsonl")
    evaluation = evaluate(answer_rows(engine, rows))
    print(Report(engine.model_name, "dev.jsonl", {}, evaluation).to_text())

Only drawing needs matplotlib, which is imported then.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flide.errors import RequestError
from flide.evaluation.metrics import TYPES, Evaluation, LabelledAnswer, Metrics
from flide.evaluation.rows import LabelledRow, RowError
from flide.runtime.engine import Engine

__all__ = ["Report", "answer_rows", "check_drawing", "check_rows", "draw_reliability"]

ROWS_AT_ONCE = 64
METRICS_FILE = "metrics.json"
DIAGRAM_FILE = "reliability.png"

_NAMES = {"accuracy": "accuracy", "nll": "NLL", "brier": "Brier", "aurc": "AURC", "level_mae": "level MAE"}


def check_rows(engine: Engine, rows: Sequence[LabelledRow]) -> list[RowError]:
    """What the engine would refuse: prompts that are too long, more options than there are labels. Nothing runs."""
    errors = []
    for row in rows:
        try:
            engine.prepare(row.request)
        except RequestError as error:
            errors.append(RowError(row.line, str(error)))
    return errors


def answer_rows(
    engine: Engine,
    rows: Sequence[LabelledRow],
    *,
    on_progress: Callable[[int], object] | None = None,
) -> list[LabelledAnswer]:
    """The engine's answers to every question that has a target.

    Args:
        engine: what answers.
        rows: with what should be answered.
        on_progress: called with the number of rows that were answered since it was called last.

    Raises:
        RequestError: the engine refuses a row; see :func:`check_rows`.
        RuntimeError: the model fails on a row; the message names its line.
    """
    answers: list[LabelledAnswer] = []
    for start in range(0, len(rows), ROWS_AT_ONCE):
        batch = rows[start : start + ROWS_AT_ONCE]
        decisions = engine.decide([row.request for row in batch], return_exceptions=True)
        for row, decision in zip(batch, decisions, strict=True):
            if isinstance(decision, RequestError):
                raise decision
            if isinstance(decision, Exception):
                raise RuntimeError(f"line {row.line}: {str(decision) or type(decision).__name__}") from decision
            for question_id, target in row.targets.items():
                answer = decision[question_id]
                options, probabilities = tuple(answer.probabilities), tuple(answer.probabilities.values())
                answers.append(LabelledAnswer(row.line, question_id, answer.type, options, probabilities, target))
        if on_progress is not None:
            on_progress(len(batch))
    return answers


@dataclass(frozen=True, slots=True)
class Report:
    """An evaluation, with what was evaluated.

    Attributes:
        model: name of the model.
        data: name of the file of labelled rows.
        temperatures: type -> the temperature of its logits, 1 where missing.
        evaluation: the metrics.
    """

    model: str
    data: str
    temperatures: Mapping[str, float]
    evaluation: Evaluation

    def to_dict(self) -> dict[str, Any]:
        """The report as a JSON object, without NaN."""
        temperatures = {name: self.temperatures.get(name, 1.0) for name in TYPES}
        return {
            "model": self.model,
            "data": self.data,
            "temperature": temperatures,
            **self.evaluation.to_dict(),
        }

    def to_text(self) -> str:
        """A table per type, and one of all questions if there are several types."""
        evaluation, overall = self.evaluation, self.evaluation.overall
        lines = [f"{self.model} on {self.data}: {_count(overall.rows, 'row')}, {_count(overall.questions, 'question')}"]
        if any(temperature != 1 for temperature in self.temperatures.values()):
            by_type = ", ".join(f"{name} {self.temperatures.get(name, 1.0):g}" for name in TYPES)
            lines.append(f"temperature: {by_type}")
        if any(estimate.low is not None for estimate in overall.estimates.values()):
            resamples = f"{evaluation.resamples:,} resample{'s' if evaluation.resamples > 1 else ''} of the rows"
            lines.append(f"in brackets: {100 * evaluation.level:g} % intervals from {resamples}")
        for title, metrics in self._tables().items():
            lines += ["", f"{title}: {_count(metrics.questions, 'question')} in {_count(metrics.rows, 'row')}"]
            names = {key: self._name(key) for key in metrics.estimates}
            width = max(map(len, names.values()))
            for key, estimate in metrics.estimates.items():
                interval = "" if estimate.low is None else f"  [{estimate.low:.4f}, {estimate.high:.4f}]"
                lines.append(f"  {names[key]:<{width}}  {estimate.value:7.4f}{interval}")
        return "\n".join(lines)

    def save(self, directory: Path) -> None:
        """Write ``metrics.json`` and ``reliability.png`` into a directory that exists.

        Raises:
            ValueError: matplotlib is missing.
            OSError: a file cannot be written.
        """
        check_drawing()
        text = json.dumps(self.to_dict(), ensure_ascii=False, allow_nan=False, indent=2)
        (directory / METRICS_FILE).write_text(text + "\n", encoding="utf-8")
        draw_reliability(self._tables(), directory / DIAGRAM_FILE)

    def _tables(self) -> dict[str, Metrics]:
        types = self.evaluation.types
        return {**types, **({"overall": self.evaluation.overall} if len(types) > 1 else {})}

    def _name(self, key: str) -> str:
        if key == "ece":
            kind = {"width": "equal width", "mass": "equal mass"}[self.evaluation.binning]
            return f"ECE ({_count(self.evaluation.bins, 'bin')} of {kind})"
        if key.startswith("accuracy_at_"):
            return f"accuracy at {key.removeprefix('accuracy_at_')} % coverage"
        return _NAMES[key]


def check_drawing() -> None:
    """Raise ValueError, naming the extra to install, unless matplotlib can be imported."""
    try:
        import matplotlib.backends.backend_agg
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        message = "drawing a reliability diagram needs matplotlib: pip install 'flide-torch[eval]'"
        raise ValueError(f"{message} ({error})") from error


def draw_reliability(tables: Mapping[str, Metrics], path: Path) -> None:
    """Draw accuracy against confidence, bin by bin, and below how many questions the bins hold, as a PNG.

    On the diagonal confidence equals accuracy; points below it are overconfident.

    Args:
        tables: title -> metrics, one column each.
        path: the file to write.

    Raises:
        ValueError: matplotlib is missing.
        OSError: the file cannot be written.
    """
    check_drawing()
    # Not pyplot, which keeps global state and may look for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(0.6 + 3.4 * len(tables), 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(
        2, len(tables), squeeze=False, sharex=True, sharey="row", gridspec_kw={"height_ratios": [3, 1]}
    )
    for column, (title, metrics) in enumerate(tables.items()):
        upper, lower = axes[0][column], axes[1][column]
        bins = metrics.reliability
        left = [bin_.lower for bin_ in bins]
        widths = [bin_.upper - bin_.lower for bin_ in bins]
        confidences, accuracies = [bin_.confidence for bin_ in bins], [bin_.accuracy for bin_ in bins]
        upper.bar(left, accuracies, widths, align="edge", color="#9ecae1", edgecolor="#4a90b8", label="accuracy")
        upper.plot([0, 1], [0, 1], linestyle="--", color="#555555", linewidth=1, label="confidence = accuracy")
        upper.vlines(confidences, confidences, accuracies, color="#c0392b", linewidth=1.5)
        upper.plot(
            confidences, accuracies, "o", color="#c0392b", markersize=4, clip_on=False, label="at mean confidence"
        )
        upper.set_title(f"{title}: ECE {metrics.estimates['ece'].value:.3f}", fontsize=10)
        lower.bar(left, [bin_.questions / metrics.questions for bin_ in bins], widths, align="edge", color="#bbbbbb")
        lower.set_xlabel(f"confidence ({_count(metrics.questions, 'question')})")
        upper.set(xlim=(0, 1), ylim=(0, 1.02))
    axes[0][0].set_ylabel("accuracy")
    axes[1][0].set_ylabel("share")
    axes[0][0].legend(fontsize=7, loc="upper left")
    figure.savefig(path, format="png", dpi=150)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
