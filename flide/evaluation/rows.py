"""Labelled rows: requests with a target for every question, one JSON object per line.

    {"model": "m", "state": "...", "questions": {"q": {"type": "noul"}}, "targets": {"q": true}}

A row is a System One body, exactly what ``flide.runtime.wire.parse_request`` accepts, and ``"targets"``:

    noul     true, false, or the probability of true, in [0, 1]
    choice   an option's name, or {name: weight}
    score    a level's index, {index as a string: weight}, or a list of weights, one per level

Weights are finite, not negative and not all 0. They are scaled to sum to 1; options that are not named weigh 0.
"""

from __future__ import annotations

import codecs
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from flide.errors import RequestError
from flide.runtime.decision import num_options
from flide.runtime.request import Choice, DecisionRequest, Noul, Question
from flide.runtime.strict_json import parse_json
from flide.runtime.wire import MAX_ERRORS, parse_request, place

__all__ = ["LabelledRow", "RowError", "Source", "iter_rows", "parse_row", "read_rows"]

# A path, or the lines themselves.
Source: TypeAlias = "str | os.PathLike[str] | Iterable[bytes | str]"


@dataclass(frozen=True, slots=True)
class LabelledRow:
    """A request and what its answers should be.

    Attributes:
        request: the parsed body.
        targets: question id -> one probability per option, summing to 1, in the order in which Flide answers: that of a
            choice's criteria, of a score's levels, [true, false] of a noul. Ids are in the order of the questions.
        line: where the row is, from 1.
    """

    request: DecisionRequest
    targets: Mapping[str, tuple[float, ...]]
    line: int


@dataclass(frozen=True, slots=True)
class RowError:
    """What is wrong with a line, from 1. The message is that of the ``RequestError`` which the line would be."""

    line: int
    message: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.message}"


def read_rows(source: Source, *, partial: bool = False) -> tuple[list[LabelledRow], list[RowError]]:
    """Read all rows, and find what is wrong with each of the others.

    Args:
        source: path of a JSONL file in UTF-8, or its lines. Blank lines are skipped, and a byte order mark before the
            first; lines may end with CRLF and the last one with nothing.
        partial: let rows leave questions without a target, even all of them.

    Returns:
        The good rows and the bad lines, each in the order of the file.

    Raises:
        OSError: the file cannot be read.
    """
    rows: list[LabelledRow] = []
    errors: list[RowError] = []
    for item in iter_rows(source, partial=partial):
        if isinstance(item, RowError):
            errors.append(item)
        else:
            rows.append(item)
    return rows, errors


def iter_rows(source: Source, *, partial: bool = False) -> Iterator[LabelledRow | RowError]:
    """:func:`read_rows` one line after the other: no more than one is in memory."""
    if isinstance(source, str | os.PathLike):
        with Path(source).open("rb") as lines:
            yield from _parse_lines(lines, partial)
    else:
        yield from _parse_lines(source, partial)


def parse_row(data: bytes | str, line: int, *, partial: bool = False) -> LabelledRow:
    """The row that a line holds.

    Raises:
        RequestError: as ``parse_json`` and ``parse_request``; also for an empty state and for bad targets, whose loc is
            ``["body", "targets", question id, option]``.
    """
    body = parse_json(data)
    request = parse_request(body)
    problems: list[dict[str, Any]] = []
    if not (request.state.strip() if isinstance(request.state, str) else request.state):
        problems.append(_problem("A labelled row's state should not be empty", "too_short", "state"))
    targets = _parse_targets(body, request.questions, partial, problems)
    if problems:
        raise RequestError(problems[:MAX_ERRORS])
    return LabelledRow(request, targets, line)


def _parse_lines(lines: Iterable[bytes | str], partial: bool) -> Iterator[LabelledRow | RowError]:
    for number, line in enumerate(lines, 1):
        # Without its end, so that positions in a message do not depend on where the line comes from.
        if isinstance(line, str):
            line = (line.removeprefix("\ufeff") if number == 1 else line).rstrip("\r\n")
            blank = not line.strip(" \t\r\n\v\f")
        else:
            line = (line.removeprefix(codecs.BOM_UTF8) if number == 1 else line).rstrip(b"\r\n")
            blank = not line.strip()
        if blank:
            continue
        try:
            row = parse_row(line, number, partial=partial)
        except RequestError as error:
            yield RowError(number, str(error))
        else:
            yield row


def _parse_targets(
    body: dict[str, Any], questions: Mapping[str, Question], partial: bool, problems: list[dict[str, Any]]
) -> dict[str, tuple[float, ...]]:
    if "targets" not in body:
        problems.append(_problem("Field required", "missing", "targets"))
        return {}
    given = body["targets"]
    if not isinstance(given, dict):
        problems.append(_problem("Input should be an object that maps question ids to targets", "dict_type", "targets"))
        return {}
    for question_id in given:
        if question_id not in questions:
            problems.append(_problem("Target should belong to a question", "extra_forbidden", "targets", question_id))
    targets = {}
    for question_id, question in questions.items():
        if question_id not in given:
            if not partial:
                problems.append(_problem("Field required", "missing", "targets", question_id))
            continue
        try:
            targets[question_id] = _probabilities(question, given[question_id])
        except _TargetError as error:
            problems.append(_problem(error.message, "value_error", "targets", question_id, *error.loc))
    return targets


class _TargetError(Exception):
    def __init__(self, message: str, *loc: str | int) -> None:
        self.message, self.loc = message, loc


def _probabilities(question: Question, target: Any) -> tuple[float, ...]:
    n = num_options(question)
    if isinstance(question, Noul):
        if isinstance(target, bool):
            target = float(target)
        if not _is_number(target) or not 0 <= target <= 1:
            raise _TargetError("Target of a noul should be true, false or a probability in [0, 1]")
        p = float(target) + 0.0  # -0.0 is a number, too
        return p, 1.0 - p
    if isinstance(question, Choice):
        names = {name: index for index, name in enumerate(question.criteria)}
        if isinstance(target, str):
            if target not in names:
                raise _TargetError("Target should be one of the question's options", target)
            return _one_hot(names[target], n)
        if not isinstance(target, dict):
            raise _TargetError("Target of a choice should be an option's name or an object of weights")
    else:
        names = {str(index): index for index in range(n)}
        if isinstance(target, int) and not isinstance(target, bool):
            if not 0 <= target < n:
                raise _TargetError(f"Target should be a level from 0 to {n - 1}")
            return _one_hot(target, n)
        if isinstance(target, list):
            if len(target) != n:
                raise _TargetError(f"Target should have one weight per level: {n}, not {len(target)}")
            return _scaled([_weight(weight, index) for index, weight in enumerate(target)])
        if not isinstance(target, dict):
            raise _TargetError("Target of a score should be a level's index, an object of weights or a list of weights")
    weights = [0.0] * n
    for name, weight in target.items():
        if name not in names:
            raise _TargetError("Weight should belong to one of the question's options", name)
        weights[names[name]] = _weight(weight, name)
    return _scaled(weights)


def _weight(value: Any, name: str | int) -> float:
    if not _is_number(value) or value < 0:
        raise _TargetError("Weight should be a finite number that is not negative", name)
    try:
        return float(value)
    except OverflowError:  # an integer
        raise _TargetError("Weight should be a finite number that is not negative", name) from None


def _scaled(weights: list[float]) -> tuple[float, ...]:
    largest = max(weights)
    if largest == 0:
        raise _TargetError("Weights should not all be 0")
    weights = [weight / largest for weight in weights]  # a sum of large ones could overflow
    total = math.fsum(weights)
    return tuple(weight / total + 0.0 for weight in weights)


def _one_hot(index: int, n: int) -> tuple[float, ...]:
    return tuple(float(i == index) for i in range(n))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _problem(message: str, kind: str, *loc: str | int) -> dict[str, Any]:
    return {"loc": place(*loc), "msg": message, "type": kind}
