"""Fitting one temperature per question type by held-out NLL (Guo et al. 2017)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from flide.evaluation.metrics import SMALLEST_P, TYPES, LabelledAnswer, temper

COLDEST, HOTTEST = 0.05, 20.0
STEPS = 60  # of a bisection: far below float64's resolution of a temperature


def fit_temperatures(answers: Sequence[LabelledAnswer]) -> dict[str, float]:
    """The temperature of each type that minimises the mean NLL of its questions.

    In b = 1/T the NLL of softmax(b z) against a target t, with z = ln p, is convex; its derivative is the mean over
    questions of E_softmax(bz)[z] - E_t[z], whose zero is found by bisection. At the ends of the range the end is taken.

    Args:
        answers: of an engine that applies no temperature (all 1).

    Returns:
        Type -> temperature in [0.05, 20], for types that have questions with more than one option.
    """
    return {
        name: _fit([answer for answer in answers if answer.type == name])
        for name in TYPES
        if any(answer.type == name and len(answer.options) > 1 for answer in answers)
    }


def tempered(answers: Sequence[LabelledAnswer], temperatures: dict[str, float]) -> list[LabelledAnswer]:
    """The answers at other temperatures; a type that is missing stays as it is."""
    return [
        replace(answer, probabilities=temper(answer.probabilities, temperatures.get(answer.type, 1.0)))
        for answer in answers
    ]


def _fit(answers: Sequence[LabelledAnswer]) -> float:
    width = max(len(answer.options) for answer in answers)
    log_p = np.full((len(answers), width), -np.inf)
    target = np.zeros((len(answers), width))
    for row, answer in enumerate(answers):
        log_p[row, : len(answer.options)] = np.log(np.maximum(answer.probabilities, SMALLEST_P))
        target[row, : len(answer.options)] = answer.target
    z = np.where(np.isfinite(log_p), log_p, 0.0)
    wanted = (target * z).sum(1)

    def slope(b: float) -> float:
        weights = np.exp(b * (log_p - log_p.max(1, keepdims=True)))
        return float(((weights * z).sum(1) / weights.sum(1) - wanted).mean())

    low, high = 1 / HOTTEST, 1 / COLDEST
    if slope(low) >= 0:
        return HOTTEST
    if slope(high) <= 0:
        return COLDEST
    for _ in range(STEPS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if slope(middle) < 0 else (low, middle)
    return 1 / math.sqrt(low * high)
