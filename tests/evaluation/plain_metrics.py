"""The metrics again, question by question in plain Python: what flide.evaluation.metrics is compared with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import groupby

from flide.evaluation.metrics import LabelledAnswer


def answered(answer: LabelledAnswer) -> int:
    if answer.type == "choice":
        ranked = sorted(zip(answer.probabilities, answer.options, strict=True), key=lambda pair: (-pair[0], pair[1]))
        return answer.options.index(ranked[0][1])
    return answer.probabilities.index(max(answer.probabilities))


def is_right(answer: LabelledAnswer) -> bool:
    return answer.target[answered(answer)] == max(answer.target)


def nll(answer: LabelledAnswer) -> float:
    pairs = zip(answer.probabilities, answer.target, strict=True)
    return -sum(t * math.log(max(p, 2**-52)) for p, t in pairs)


def brier(answer: LabelledAnswer) -> float:
    return sum((p - t) ** 2 for p, t in zip(answer.probabilities, answer.target, strict=True))


def level_error(answer: LabelledAnswer) -> float:
    pairs = zip(answer.probabilities, answer.target, strict=True)
    return abs(sum(level * (p - t) for level, (p, t) in enumerate(pairs)))


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def equal_width_ece(answers: Sequence[LabelledAnswer], bins: int) -> float:
    total = 0.0
    for k in range(bins):
        inside = [a for a in answers if k / bins < max(a.probabilities) <= (k + 1) / bins]
        total += abs(sum(is_right(a) - max(a.probabilities) for a in inside))
    return total / len(answers)


def equal_mass_ece(answers: Sequence[LabelledAnswer], bins: int) -> float:
    n = len(answers)
    sums = [0.0] * bins
    rank = 0
    for confidence, group in groupby(
        sorted(answers, key=lambda a: max(a.probabilities)), lambda a: max(a.probabilities)
    ):
        tied = list(group)
        middle = Fraction(sum(range(rank + 1, rank + len(tied) + 1)), len(tied))
        k = math.floor(bins * (middle - Fraction(1, 2)) / n)
        sums[k] += sum(is_right(a) - confidence for a in tied)
        rank += len(tied)
    return sum(map(abs, sums)) / n


def expected_right(answers: Sequence[LabelledAnswer]) -> list[Fraction]:
    """How many of the k most confident answers are right, k = 1 .. n, each tied one standing for all tied ones."""
    found, result = Fraction(0), []
    ranked = sorted(answers, key=lambda a: -max(a.probabilities))
    for _, group in groupby(ranked, lambda a: max(a.probabilities)):
        tied = list(group)
        for _ in tied:
            found += Fraction(sum(map(is_right, tied)), len(tied))
            result.append(found)
    return result


def selective_accuracy(answers: Sequence[LabelledAnswer], percent: int) -> float:
    k = math.ceil(Fraction(percent * len(answers), 100))
    return float(expected_right(answers)[k - 1] / k)


def aurc(answers: Sequence[LabelledAnswer]) -> float:
    right = expected_right(answers)
    return float(sum(1 - found / k for k, found in enumerate(right, 1)) / len(right))


def all_metrics(answers: Sequence[LabelledAnswer], bins: int, binning: str) -> dict[str, float]:
    result = {
        "accuracy": mean([is_right(a) for a in answers]),
        "nll": mean([nll(a) for a in answers]),
        "brier": mean([brier(a) for a in answers]),
        "ece": (equal_width_ece if binning == "width" else equal_mass_ece)(answers, bins),
        **{f"accuracy_at_{c}": selective_accuracy(answers, c) for c in (50, 80, 90, 95, 100)},
        "aurc": aurc(answers),
    }
    if all(a.type == "score" for a in answers):
        result["level_mae"] = mean([level_error(a) for a in answers])
    return result
