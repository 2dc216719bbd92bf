"""Metrics of answers next to their targets, with bootstrap intervals. Numpy only.

Formulas, for n questions with probabilities p_i and target probabilities t_i over the options of question i:

    accuracy      share of questions whose most probable option is a most probable option of the target. Of equally
                  probable options Flide's own rule picks the answer: of a choice the name that sorts first, otherwise
                  the first in order (true before false, low before high). Where the target is tied each of its most
                  probable options is right.
    nll           mean of -sum_j t_ij ln p_ij, in nats: the logarithmic score (Good 1952), the cross entropy for soft
                  targets. A p below 2^-52 counts as 2^-52, as in scikit-learn's ``log_loss``: no question costs more
                  than 36.1.
    brier         mean of sum_j (p_ij - t_ij)^2, from 0 to 2 (Brier 1950, over all options).
    ece           sum over bins b of |right_b - confidence_b| / n, where the two are sums over the questions in b; a
                  question's confidence is max_j p_ij (Naeini et al. 2015; Guo et al. 2017). With binning="width", bin
                  k of M holds k/M < confidence <= (k+1)/M. With binning="mass" (Nguyen & O'Connor 2015; Nixon et al.
                  2019), questions are ranked by confidence and bin k holds the ranks r = 1 .. n with
                  k/M <= (r - 1/2)/n < (k+1)/M; questions of equal confidence all have the middle of their ranks.
    accuracy_at_c accuracy of the ceil(c n / 100) questions of highest confidence (selective accuracy at coverage c %;
                  El-Yaniv & Wiener 2010, Geifman & El-Yaniv 2017).
    aurc          mean over k = 1 .. n of the error rate of the k questions of highest confidence: the area under the
                  risk-coverage curve (Geifman, Uziel & El-Yaniv 2019).
    level_mae     scores only: mean of |sum_j j p_ij - sum_j j t_ij|, in levels.

Where the cut of accuracy_at_c, or one of aurc, falls among questions of equal confidence, the expectation over a random
order of them is meant: the order of the data changes nothing.

Intervals are percentile bootstrap intervals (Efron & Tibshirani 1993, section 13.3) over rows drawn with replacement,
each with all its questions: the questions of one request are correlated (a cluster bootstrap; Field & Welsh 2007). All
metrics of all groups share the resamples. Resampling adds to calibration error, so that the interval of an ECE lies
high and, where the ECE is small, may even exclude it.

Shapes: B resamples, R rows, n questions, G groups of questions of equal confidence, M bins.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "COVERAGES",
    "TYPES",
    "Binning",
    "Confusion",
    "Estimate",
    "Evaluation",
    "LabelledAnswer",
    "Metrics",
    "ReliabilityBin",
    "evaluate",
    "temper",
]

TYPES = ("noul", "choice", "score")
COVERAGES = (50, 80, 90, 95, 100)  # percent
SMALLEST_P = 2.0**-52

Binning: TypeAlias = Literal["width", "mass"]
_Floats: TypeAlias = NDArray[np.float64]
_Ints: TypeAlias = NDArray[np.int64]

_TOLERANCE = 1e-6  # of the sum of probabilities
_VALUES_AT_ONCE = 1 << 17  # of B n, so that what the bootstrap works on stays in a cache


@dataclass(frozen=True, slots=True)
class LabelledAnswer:
    """The answer to one question, with its target.

    Attributes:
        row: number of the request the question belongs to.
        question_id: its id in the request.
        type: "noul", "choice" or "score".
        options: names: ("true", "false"), a choice's options, a score's ("0", "1", ...).
        probabilities: one per option, summing to 1.
        target: the same of the target.
    """

    row: int
    question_id: str
    type: str
    options: tuple[str, ...]
    probabilities: tuple[float, ...]
    target: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A metric, with the ends of its interval, which are None where there is none."""

    value: float
    low: float | None = None
    high: float | None = None

    def to_dict(self) -> dict[str, float | None]:
        return {"value": self.value, "low": self.low, "high": self.high}


@dataclass(frozen=True, slots=True)
class ReliabilityBin:
    """One bin of the calibration error.

    Attributes:
        lower, upper: its edges; with equal mass the smallest and the largest confidence in it.
        questions: how many there are in it, at least one.
        confidence, accuracy: their means.
    """

    lower: float
    upper: float
    questions: int
    confidence: float
    accuracy: float

    def to_dict(self) -> dict[str, float | int]:
        return {
            "lower": self.lower,
            "upper": self.upper,
            "questions": self.questions,
            "confidence": self.confidence,
            "accuracy": self.accuracy,
        }


@dataclass(frozen=True, slots=True)
class Confusion:
    """How often an option was right (index of ``counts``) and how often another was answered (index of its entries).

    Where the target is tied the right option is the one that was answered, if it is among them, so that the diagonal
    holds the right answers.

    Attributes:
        labels: all levels of a score, in order; of a choice those options that were right or answered, sorted.
        counts: one list per label, of as many numbers.
    """

    labels: list[str]
    counts: list[list[int]]

    def to_dict(self) -> dict[str, Any]:
        return {"labels": list(self.labels), "counts": [list(row) for row in self.counts]}


@dataclass(frozen=True, slots=True)
class Metrics:
    """The metrics of some questions: of a type, or of all.

    Attributes:
        rows: how many have such questions.
        questions: how many there are.
        estimates: name -> estimate, by the names at the top of this module.
        reliability: the bins of the calibration error that are not empty, in order.
        confusion: question id -> confusion matrix; of choices and scores only.
    """

    rows: int
    questions: int
    estimates: dict[str, Estimate]
    reliability: list[ReliabilityBin]
    confusion: dict[str, Confusion]

    def to_dict(self) -> dict[str, Any]:
        return {
            "rows": self.rows,
            "questions": self.questions,
            "metrics": {name: estimate.to_dict() for name, estimate in self.estimates.items()},
            "reliability": [bin_.to_dict() for bin_ in self.reliability],
            "confusion": {question_id: matrix.to_dict() for question_id, matrix in self.confusion.items()},
        }


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The metrics of all questions, and of each type that occurs, with what they were computed with.

    ``bins`` are the confidence bins of the calibration error, of equal width or equal mass as ``binning`` says;
    ``level`` is the coverage that intervals aim for, from ``resamples`` resamples.
    """

    overall: Metrics
    types: dict[str, Metrics]
    bins: int
    binning: Binning
    resamples: int
    seed: int
    level: float

    def to_dict(self) -> dict[str, Any]:
        return {
            "ece": {"bins": self.bins, "binning": self.binning},
            "bootstrap": {"resamples": self.resamples, "seed": self.seed, "level": self.level},
            "overall": self.overall.to_dict(),
            "types": {name: metrics.to_dict() for name, metrics in self.types.items()},
        }


def temper(probabilities: Sequence[float], temperature: float) -> tuple[float, ...]:
    """Probabilities at another temperature: p^(1/T), scaled to sum to 1.

    For p = softmax(z) that is softmax(z / T), temperature scaling (Guo et al. 2017). What is 0 stays 0.

    Raises:
        ValueError: the temperature is not a finite number above 0.
    """
    check_temperature(temperature)
    if temperature == 1:
        return tuple(probabilities)
    with np.errstate(divide="ignore", over="ignore"):
        log_p = np.log(np.asarray(probabilities, np.float64))
        powers = np.exp((log_p - log_p.max()) / temperature)
    return tuple((powers / powers.sum()).tolist())


def check_temperature(temperature: float) -> None:
    """Raise ValueError unless the temperature is a finite number above 0."""
    if not (math.isfinite(temperature) and temperature > 0):
        raise ValueError(f"a temperature must be a finite number above 0, got {temperature}")


def evaluate(
    answers: Sequence[LabelledAnswer],
    *,
    bins: int = 15,
    binning: Binning = "width",
    resamples: int = 1000,
    seed: int = 0,
    level: float = 0.95,
) -> Evaluation:
    """All metrics of the answers, of each type and overall, where every question counts the same.

    The points do not depend on the order of the answers; the intervals do through the random numbers, and on nothing
    but the answers and ``seed``. There are no intervals without resamples or with fewer than two rows.

    Args:
        answers: at least one.
        bins: of the calibration error.
        binning: bins of equal "width" or of equal "mass".
        resamples: for the intervals; 0 for none.
        seed: of the resamples.
        level: the share of resamples between the ends of an interval.

    Raises:
        ValueError: there are no answers, one is not two distributions over its options, or an argument is out of range.
    """
    if not answers:
        raise ValueError("there are no answers to evaluate")
    if bins < 1:
        raise ValueError(f"bins must be at least 1, got {bins}")
    if binning not in ("width", "mass"):
        raise ValueError(f"binning must be 'width' or 'mass', got {binning!r}")
    if resamples < 0:
        raise ValueError(f"resamples must not be negative, got {resamples}")
    if not 0 < level < 1:
        raise ValueError(f"level must be between 0 and 1, got {level}")
    for index, answer in enumerate(answers):
        _check(answer, index)

    rows_n, row_n = np.unique([answer.row for answer in answers], return_inverse=True)
    present = [name for name in TYPES if any(answer.type == name for answer in answers)]
    groups = {name: [i for i, answer in enumerate(answers) if answer.type == name] for name in present}
    samples = {
        name: _Sample([answers[i] for i in chosen], row_n[chosen], bins, binning) for name, chosen in groups.items()
    }
    everything = present[0] if len(present) == 1 else "overall"
    if everything == "overall":
        samples[everything] = _Sample(answers, row_n, bins, binning)
    points = {name: sample.points() for name, sample in samples.items()}
    ends = _bootstrap(samples, len(rows_n), resamples, seed, level) if len(rows_n) > 1 and resamples else {}

    def metrics(name: str, *, is_overall: bool) -> Metrics:
        sample = samples[name]
        return Metrics(
            rows=len(np.unique(sample.row_n)),
            questions=len(sample.row_n),
            estimates={
                key: Estimate(value, *ends.get((name, key), (None, None)))
                for key, value in points[name].items()
                if key != "level_mae" or not is_overall
            },
            reliability=sample.reliability(),
            confusion={} if is_overall or name == "noul" else _confusion([answers[i] for i in groups[name]]),
        )

    types = {name: metrics(name, is_overall=False) for name in present}
    return Evaluation(metrics(everything, is_overall=True), types, bins, binning, resamples, seed, level)


class _Sample:
    """Questions as arrays, sorted by falling confidence, and their metrics under any number of weightings.

    A weighting counts how often each question occurs: all ones for the data, counts of its row in a resample. All
    metrics are functions of sums over questions and over those of at least some confidence.
    """

    def __init__(self, answers: Sequence[LabelledAnswer], row_n: _Ints, bins: int, binning: Binning) -> None:
        confidence = np.array([max(answer.probabilities) for answer in answers])
        order = np.argsort(-confidence, kind="stable")
        ranked = [answers[i] for i in order]
        self.bins, self.binning = bins, binning
        self.row_n = row_n[order]
        self.confidence_n = confidence[order]
        self.right_n = np.array([float(_is_right(answer, _answered(answer))) for answer in ranked])
        self.means_n = {"nll": _nll(ranked), "brier": _brier(ranked)}
        if all(answer.type == "score" for answer in ranked):
            self.means_n["level_mae"] = _level_error(ranked)
        self.starts_G = np.flatnonzero(np.diff(self.confidence_n, prepend=np.inf))
        self.confidence_G = self.confidence_n[self.starts_G]
        self.edges = np.arange(bins + 1) / bins
        # What falls outside of the edges by rounding belongs to the bins at the ends.
        self.bin_G = np.clip(np.searchsorted(self.edges, self.confidence_G, side="left") - 1, 0, bins - 1)

    def points(self) -> dict[str, float]:
        return {name: float(values[0]) for name, values in self.metrics(np.ones((1, len(self.row_n)))).items()}

    def metrics(self, weights_Bn: _Floats) -> dict[str, _Floats]:
        """Metric -> one value per weighting; NaN where all weights are 0. Weights are whole numbers."""
        weights_BG = np.add.reduceat(weights_Bn, self.starts_G, axis=1)
        right_BG = np.add.reduceat(weights_Bn * self.right_n, self.starts_G, axis=1)
        # How many questions, and how many right ones, have at least the confidence of a group.
        depth_BG, found_BG = weights_BG.cumsum(axis=1), right_BG.cumsum(axis=1)
        total_B = depth_BG[:, -1]
        with np.errstate(invalid="ignore", divide="ignore"):
            result = {"accuracy": found_BG[:, -1] / total_B}
            result |= {name: weights_Bn @ values / total_B for name, values in self.means_n.items()}
            result["ece"] = self._ece(weights_BG, right_BG, depth_BG)
        # Between the ends of a group the expected number of right answers grows evenly.
        rate_BG = np.divide(right_BG, weights_BG, out=np.zeros_like(right_BG), where=weights_BG > 0)
        before_BG, found_before_BG = depth_BG - weights_BG, found_BG - right_BG
        for coverage in COVERAGES:
            cut_B = np.maximum(-(-coverage * total_B // 100), 1)
            group_B = [np.searchsorted(depth_G, cut) for depth_G, cut in zip(depth_BG, cut_B, strict=True)]
            at = np.arange(len(cut_B)), np.minimum(group_B, depth_BG.shape[1] - 1)
            accuracy_B = (found_before_BG[at] + (cut_B - before_BG[at]) * rate_BG[at]) / cut_B
            result[f"accuracy_at_{coverage}"] = np.where(total_B > 0, accuracy_B, np.nan)
        result["aurc"] = self._aurc(weights_BG, 1 - rate_BG, before_BG, before_BG - found_before_BG)
        order = ["accuracy", "nll", "brier", "ece", *(f"accuracy_at_{c}" for c in COVERAGES), "aurc", "level_mae"]
        return {name: result[name] for name in order if name in result}

    def reliability(self) -> list[ReliabilityBin]:
        weights_G = np.add.reduceat(np.ones(len(self.row_n)), self.starts_G)
        bin_G = self._bins(weights_G[None], weights_G.cumsum()[None])[0]
        bin_n = np.repeat(bin_G, weights_G.astype(np.int64))
        result = []
        for index in np.unique(bin_n):
            inside = bin_n == index
            confidence = self.confidence_n[inside]
            lower, upper = confidence.min(), confidence.max()
            if self.binning == "width":
                lower, upper = self.edges[index], self.edges[index + 1]
            accuracy = float(self.right_n[inside].mean())
            result.append(
                ReliabilityBin(float(lower), float(upper), len(confidence), float(confidence.mean()), accuracy)
            )
        return result

    def _bins(self, weights_BG: _Floats, depth_BG: _Floats) -> _Ints:
        """The bin of each group, (B, G), or (1, G) where weights do not matter."""
        if self.binning == "width":
            return self.bin_G[None]
        total_B1 = depth_BG[:, -1:]
        # Twice the middle of a group's ranks, less 1; ranks count from the lowest confidence. Whole numbers are exact.
        twice_BG = 2 * (total_B1 - depth_BG) + weights_BG
        bin_BG = twice_BG * self.bins // np.maximum(2 * total_B1, 1)
        return np.minimum(bin_BG, self.bins - 1).astype(np.int64)

    def _ece(self, weights_BG: _Floats, right_BG: _Floats, depth_BG: _Floats) -> _Floats:
        gap_BG = right_BG - weights_BG * self.confidence_G
        bin_BG = np.broadcast_to(self._bins(weights_BG, depth_BG), gap_BG.shape)
        B = len(gap_BG)
        index_BG = bin_BG + self.bins * np.arange(B)[:, None]
        sums_BM = np.bincount(index_BG.ravel(), gap_BG.ravel(), minlength=B * self.bins).reshape(B, self.bins)
        ece_B: _Floats = np.abs(sums_BM).sum(axis=1) / depth_BG[:, -1]
        return ece_B

    def _aurc(self, weights_BG: _Floats, risk_BG: _Floats, before_BG: _Floats, wrong_before_BG: _Floats) -> _Floats:
        """The sum over k of (wrong_before + (k - before) risk) / k in each group, by harmonic numbers."""
        depth_BG = before_BG + weights_BG
        total_B = depth_BG[:, -1]
        harmonic = np.concatenate([[0.0], np.cumsum(1 / np.arange(1, int(total_B.max()) + 1))])
        steps_BG = harmonic[depth_BG.astype(np.int64)] - harmonic[before_BG.astype(np.int64)]
        sums_B = (weights_BG * risk_BG + (wrong_before_BG - before_BG * risk_BG) * steps_BG).sum(axis=1)
        aurc_B: _Floats = np.divide(sums_B, total_B, out=np.full_like(sums_B, np.nan), where=total_B > 0)
        return np.clip(aurc_B, 0.0, 1.0)  # rounding may leave -1e-17


def _bootstrap(
    samples: Mapping[str, _Sample], R: int, resamples: int, seed: int, level: float
) -> dict[tuple[str, str], tuple[float, float]]:
    """(sample, metric) -> the ends of its interval. Resamples without a question of a type say nothing about it."""
    random = np.random.default_rng(seed)
    most = max(R, *(len(sample.row_n) for sample in samples.values()))
    step = max(1, _VALUES_AT_ONCE // most)
    values: dict[tuple[str, str], list[_Floats]] = {}
    for start in range(0, resamples, step):
        B = min(step, resamples - start)
        drawn_BR = random.integers(R, size=(B, R)) + R * np.arange(B)[:, None]
        counts_BR = np.bincount(drawn_BR.ravel(), minlength=B * R).reshape(B, R).astype(np.float64)
        for name, sample in samples.items():
            for metric, values_B in sample.metrics(counts_BR[:, sample.row_n]).items():
                values.setdefault((name, metric), []).append(values_B)
    ends = {}
    for key, parts in values.items():
        every = np.concatenate(parts)
        every = every[~np.isnan(every)]
        if len(every):
            low, high = np.quantile(every, [(1 - level) / 2, (1 + level) / 2])
            ends[key] = float(low), float(high)
    return ends


def _nll(answers: Sequence[LabelledAnswer]) -> _Floats:
    p, t, starts = _flat(answers)
    return np.add.reduceat(-t * np.log(np.maximum(p, SMALLEST_P)), starts) + 0.0  # not -0.0


def _brier(answers: Sequence[LabelledAnswer]) -> _Floats:
    p, t, starts = _flat(answers)
    return np.add.reduceat((p - t) ** 2, starts)


def _level_error(answers: Sequence[LabelledAnswer]) -> _Floats:
    p, t, starts = _flat(answers)
    level = np.concatenate([np.arange(len(answer.options)) for answer in answers])
    error_n: _Floats = np.abs(np.add.reduceat(level * p, starts) - np.add.reduceat(level * t, starts))
    return error_n


def _flat(answers: Sequence[LabelledAnswer]) -> tuple[_Floats, _Floats, _Ints]:
    """Probabilities and targets of all questions in a row, and where each question begins."""
    p = np.concatenate([np.asarray(answer.probabilities, np.float64) for answer in answers])
    t = np.concatenate([np.asarray(answer.target, np.float64) for answer in answers])
    return p, t, np.cumsum([0, *(len(answer.options) for answer in answers[:-1])])


def _answered(answer: LabelledAnswer) -> int:
    return _first_of_largest(answer, answer.probabilities)


def _is_right(answer: LabelledAnswer, option: int) -> bool:
    return answer.target[option] == max(answer.target)


def _first_of_largest(answer: LabelledAnswer, values: Sequence[float]) -> int:
    largest = max(values)
    best = [index for index, value in enumerate(values) if value == largest]
    return min(best, key=lambda index: answer.options[index]) if answer.type == "choice" else best[0]


def _confusion(answers: Sequence[LabelledAnswer]) -> dict[str, Confusion]:
    pairs: dict[str, list[tuple[str, str]]] = {}
    levels: dict[str, int] = {}
    for answer in answers:
        option = _answered(answer)
        right = option if _is_right(answer, option) else _first_of_largest(answer, answer.target)
        pairs.setdefault(answer.question_id, []).append((answer.options[right], answer.options[option]))
        levels[answer.question_id] = max(levels.get(answer.question_id, 0), len(answer.options))
    result = {}
    for question_id, of_question in sorted(pairs.items()):
        if answers[0].type == "score":
            labels = [str(level) for level in range(levels[question_id])]
        else:
            labels = sorted({name for pair in of_question for name in pair})
        place = {name: index for index, name in enumerate(labels)}
        counts = [[0] * len(labels) for _ in labels]
        for right_name, answered_name in of_question:
            counts[place[right_name]][place[answered_name]] += 1
        result[question_id] = Confusion(labels, counts)
    return result


def _check(answer: LabelledAnswer, index: int) -> None:
    if answer.type not in TYPES:
        raise ValueError(f"answer {index}: type must be one of {', '.join(TYPES)}, got {answer.type!r}")
    for name in ("probabilities", "target"):
        values = getattr(answer, name)
        if len(values) != len(answer.options) or not values:
            raise ValueError(f"answer {index}: {name} must be one number per option")
        if not all(math.isfinite(p) and p >= 0 for p in values) or abs(math.fsum(values) - 1) > _TOLERANCE:
            raise ValueError(f"answer {index}: {name} must be finite, not negative and sum to 1")
