"""What the responses of a server mean."""

from __future__ import annotations

import email.utils
import json
import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flide.errors import RequestError, ServerError
from flide.runtime.decision import Answer, ChoiceAnswer, Decision, NoulAnswer, ScoreAnswer, Usage
from flide.runtime.request import Choice, DecisionRequest, Noul, Question

if TYPE_CHECKING:
    import httpx


def retry_after(response: httpx.Response) -> float | None:
    """Seconds that a server asks to wait; None where it does not say, or says nothing that makes sense."""
    seconds: float | None = None
    for name, unit in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        given = response.headers.get(name)
        if given is None or seconds is not None:
            continue
        try:
            seconds = float(given) * unit
        except ValueError:
            try:
                seconds = max(0.0, email.utils.parsedate_to_datetime(given).timestamp() - time.time())
            except (ValueError, OverflowError):
                continue
    return seconds if seconds is not None and seconds >= 0 else None


def read_response(outcome: httpx.Response | httpx.RequestError, request: DecisionRequest) -> Decision:
    """The decision in a response.

    Raises:
        RequestError: 422.
        ServerError: anything else but 200 with an answer to every question.
    """
    if isinstance(outcome, Exception):
        raise ServerError(f"no answer from the server: {type(outcome).__name__}: {outcome}") from outcome
    status, request_id = outcome.status_code, outcome.headers.get("x-typesafe-request-id")
    try:
        body = json.loads(outcome.content)
    except (ValueError, RecursionError):
        body = None
    if status == 200:
        try:
            return _decision(body, request)
        except (KeyError, TypeError, ValueError):
            raise ServerError(
                "the server's answer is not one to this request", status=status, request_id=request_id
            ) from None
    detail = body.get("detail") if isinstance(body, dict) else None
    if status == 422 and isinstance(detail, list) and detail and all(map(_is_entry, detail)):
        raise RequestError([{name: entry[name] for name in ("loc", "msg", "type")} for entry in detail])
    told = detail if isinstance(detail, dict) else {}
    message, kind = (told[name] if isinstance(told.get(name), str) else None for name in ("message", "error_type"))
    text = f"the server answered {status}" + ("" if message is None else f": {message}")
    raise ServerError(text, status=status, kind=kind, request_id=request_id)


def _is_entry(entry: Any) -> bool:
    """Whether an error entry is as :class:`RequestError` describes it."""
    return (
        isinstance(entry, dict)
        and isinstance(entry.get("loc"), list)
        and isinstance(entry.get("msg"), str)
        and isinstance(entry.get("type"), str)
    )


def _decision(body: Any, request: DecisionRequest) -> Decision:
    """The decision in a decoded body; KeyError, TypeError or ValueError where it is none."""
    answers = {
        question_id: _answer(body["answers"][question_id], question)
        for question_id, question in request.questions.items()
    }
    extras = body.get("x_flide")
    extras = extras if isinstance(extras, dict) else {}  # other servers do not say
    shared, reused = (_count(extras.get(name, 0)) for name in ("shared_tokens", "reused_tokens"))
    usage = Usage(_count(body["usage"]["input_tokens"]), _count(body["usage"]["output_tokens"]), shared, reused)
    if not isinstance(body["model"], str):
        raise TypeError
    return Decision(body["model"], answers, usage)


def _answer(fields: Any, question: Question) -> Answer:
    if fields["type"] != question.type:
        raise ValueError
    if isinstance(question, Noul):
        return NoulAnswer(_number(fields["noul"]))
    names = list(question.criteria) if isinstance(question, Choice) else _level_names(question.criteria)
    probabilities = {name: _number(fields["probabilities"][name]) for name in names}
    confidence = _number(fields["confidence"])
    if isinstance(question, Choice):
        if fields["choice"] not in probabilities:
            raise ValueError
        return ChoiceAnswer(fields["choice"], probabilities, confidence)
    legend = dict(zip(names, question.criteria, strict=True))
    return ScoreAnswer(_number(fields["score"]), legend, probabilities, confidence)


def _level_names(levels: Sequence[Any]) -> list[str]:
    return [str(index) for index in range(len(levels))]


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise TypeError
    return float(value)


def _count(value: Any) -> int:
    if type(value) is not int:
        raise TypeError
    return value
