"""OpenAI's Decisions shape of requests, answers and refusals, translated to the same questions.

    predicate   a noul
    choice      a choice between values; ``true`` and ``"true"`` are two of them
    score       a score; a level is its label, or ``label: description``

``input`` becomes the state. A string is the state, and so is the text of a single user message. Any other list of
messages is the array ``[{"role": ..., "content": ...}, ...]``, in which no text can pass for a message. Parts of a
message, and of instructions, are lines; JSON parts are written as JSON. Only text can be read.

``x_flide`` is as in System One's shape. Other fields that are not of the shape are ignored, and so are
``prompt_cache_key``, ``prompt_cache_options`` and ``safety_identifier``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from starlette.responses import JSONResponse, Response

from flide.errors import RequestError
from flide.runtime.decision import Answer, ChoiceAnswer, Decision, NoulAnswer
from flide.runtime.prompt import render_value
from flide.runtime.request import Choice, DecisionRequest, Noul, Question, Score, Value
from flide.runtime.wire import (
    CACHE_OPTIONS,
    MAX_LEVELS,
    MAX_OPTIONS,
    MAX_VALUES,
    cache_options,
    parse_request,
    place,
)
from flide.serve.faults import Fault

ROLES = ("user", "assistant", "developer", "system")
TEXT_FIELDS = {"input_text": "text", "output_text": "text", "refusal": "refusal"}  # part type -> where its text is

Loc: TypeAlias = "tuple[str | int, ...]"


@dataclass(frozen=True, slots=True)
class Translated:
    """A request in OpenAI's shape.

    Attributes:
        request: the same in ours; the ids of questions are their positions.
        names: of the questions, or None.
        values: of each question's options: what a choice chooses from, or the labels of levels.
    """

    request: DecisionRequest
    names: list[str | None]
    values: list[list[str | bool]]

    def response(self, decision: Decision) -> dict[str, Any]:
        """The body of the response. No question is refused."""
        usage = decision.usage
        return {
            "model": decision.model,
            "answers": [
                {**_answer(answer, values), "name": name}
                for answer, name, values in zip(decision.answers.values(), self.names, self.values, strict=True)
            ],
            "usage": {
                "input_tokens": usage.input_tokens,
                "input_tokens_details": {"cached_tokens": usage.reused_tokens, "cache_write_tokens": 0},
                "output_tokens": usage.output_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage.input_tokens + usage.output_tokens,
            },
        }


def is_systemone(body: Any) -> bool:
    """Whether a decoded body has System One's shape: a state and a map of questions, not an input and a list."""
    if not isinstance(body, dict):
        return False
    if ("state" in body) != ("input" in body):
        return "state" in body
    return isinstance(body.get("questions"), dict)


def translate(body: Any) -> Translated:
    """The request in a decoded body of OpenAI's shape.

    Raises:
        RequestError: one entry, whose ``loc`` is a path in that body.
    """
    _check(body, dict, "an object", ())
    _check_count(body)
    model = _field(body, "model", str, "a string", ())
    state = _state(_field(body, "input", str | list, "a string or an array of messages", ()))
    questions = _field(body, "questions", list, "an array of questions", ())
    if not questions:
        raise _problem(("questions",), "Input should have at least 1 question", "too_short")
    parsed: dict[str, Question] = {}
    names, values = [], []
    for index, fields in enumerate(questions):
        loc = ("questions", index)
        _check(fields, dict, "an object", loc)
        name = fields.get("name")
        _check(name, str | None, "a string or null", (*loc, "name"))
        parsed[str(index)], options = _question(fields, loc)
        names.append(name)
        values.append(options)
    extras = body.get("x_flide")
    _check(extras, dict | None, "an object or null", ("x_flide",))
    cache = cache_options(extras or {})
    try:
        request = parse_request(DecisionRequest(state, parsed, model, **cache))
    except RequestError as error:
        raise in_this_shape(error) from None
    return Translated(request, names, values)


def in_this_shape(error: RequestError) -> RequestError:
    """What is wrong with a translated request, at its places in the one that was sent."""

    def moved(loc: Sequence[str | int]) -> list[str | int]:
        if list(loc[1:2]) == ["state"]:
            return place("input")
        if loc[1:] and loc[1] in CACHE_OPTIONS:
            return place("x_flide", loc[1])
        return place("questions", *(int(part) for part in loc[2:3])) if list(loc[1:2]) == ["questions"] else [*loc]

    return RequestError([{**entry, "loc": moved(entry["loc"])} for entry in error.errors])


def refusal(fault: Fault) -> Response:
    """A fault in OpenAI's envelope. What is wrong with a request is always a 400."""
    return JSONResponse(envelope(fault), status_code=_status(fault), headers=fault.headers)


def envelope(fault: Fault) -> dict[str, Any]:
    """OpenAI's words for a fault: of several problems, the first."""
    param = None
    if isinstance(fault.detail, list):
        first = fault.detail[0]
        param, code = _param(first["loc"]), _CODES.get(first["type"], "invalid_value")
        message = first["msg"] if param is None else f"{param}: {first['msg']}"
    else:
        message, code = fault.detail["message"], fault.detail["error_type"]
        if code == "api_usage_error":
            param, code = "model", "model_not_found"
    status = _status(fault)
    kind = _KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _status(fault: Fault) -> int:
    return 400 if fault.status == 422 else fault.status


_KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error", 529: "overloaded_error"}
_CODES = {
    "missing": "missing_required_parameter",
    "dict_type": "invalid_type",
    "list_type": "invalid_type",
    "string_type": "invalid_type",
    "int_type": "invalid_type",
    "too_short": "array_below_min_length",
    "too_long": "array_above_max_length",
    "json_invalid": "invalid_json",
    "prompt_too_long": "context_length_exceeded",
    "request_too_long": "context_length_exceeded",
    "unsupported": "unsupported_value",
}


def _param(loc: Sequence[str | int]) -> str | None:
    """``questions[0].choices[1].value``; None where the body as a whole is wrong."""
    if len(loc) < 2 or isinstance(loc[1], int):
        return None
    return str(loc[1]) + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc[2:])


def _state(given: str | list[Any]) -> Value:
    if isinstance(given, str):
        return given
    if not given:
        raise _problem(("input",), "Input should have at least 1 message", "too_short")
    messages: list[dict[str, str]] = []
    for index, fields in enumerate(given):
        loc = ("input", index)
        _check(fields, dict, "an object", loc)
        if fields.get("type", "message") != "message":
            raise _problem((*loc, "type"), "Only messages can be read, no calls and no outputs of tools", "unsupported")
        role = _field(fields, "role", str, "a string", loc)
        if role not in ROLES:
            raise _problem((*loc, "role"), f"Input should be one of {', '.join(ROLES)}", "value_error")
        content = _field(fields, "content", str | list, "a string or an array of parts", loc)
        messages.append({"role": role, "content": _text(content, (*loc, "content"))})
    if len(messages) == 1 and messages[0]["role"] == "user":
        return messages[0]["content"]
    return messages


def _text(content: str | list[Any], loc: Loc) -> str:
    """A text, or the lines that parts make."""
    if isinstance(content, str):
        return content
    if not content:
        raise _problem(loc, "Input should have at least 1 part", "too_short")
    return "\n".join(_part(part, (*loc, index)) for index, part in enumerate(content))


def _part(part: Any, loc: Loc) -> str:
    _check(part, dict, "an object", loc)
    kind = _field(part, "type", str, "a string", loc)
    if kind in TEXT_FIELDS:
        return str(_field(part, TEXT_FIELDS[kind], str, "a string", loc))
    if kind != "input_json":
        raise _problem((*loc, "type"), "Only parts of text or JSON can be read", "unsupported")
    data = _field(part, "data", dict | list, "an object or an array", loc)
    try:
        return render_value(data)
    except ValueError:
        raise _problem((*loc, "data"), "Input should be JSON", "value_error") from None


def _question(fields: dict[str, Any], loc: Loc) -> tuple[Question, list[str | bool]]:
    kind = _field(fields, "type", str, "a string", loc)
    if kind not in ("predicate", "choice", "score"):
        raise _problem((*loc, "type"), "Input should be 'predicate', 'choice' or 'score'", "value_error")
    instructions = _text(
        _field(fields, "instructions", str | list, "a string or an array of parts", loc), (*loc, "instructions")
    )
    if kind == "predicate":
        return Noul(instructions), []
    if kind == "choice":
        options = _options(fields, "choices", "value", str | bool, "a string or a boolean", MAX_OPTIONS, loc)
        values = [value for value, _ in options]
        if len({(type(value), value) for value in values}) < len(values):
            raise _problem((*loc, "choices"), "Input should have distinct values", "value_error")
        return Choice(instructions, dict(zip(_names(values), (text for _, text in options), strict=True))), values
    levels = _options(fields, "levels", "label", str, "a string", MAX_LEVELS, loc)
    texts = [label if text is None else f"{label}: {text}" for label, text in levels]
    return Score(instructions, texts), [label for label, _ in levels]


def _options(
    fields: dict[str, Any], name: str, key: str, kind: Any, what: str, most: int, loc: Loc
) -> list[tuple[Any, str | None]]:
    """The options of a question, each with its description."""
    items, where = _field(fields, name, list, "an array", loc), (*loc, name)
    if not items:
        raise _problem(where, "Input should have at least 1 entry", "too_short")
    if len(items) > most:
        raise _problem(where, f"Input should have at most {most} entries, not {len(items)}", "too_long")
    options = []
    for index, item in enumerate(items):
        _check(item, dict, "an object", (*where, index))
        value, text = _field(item, key, kind, what, (*where, index)), item.get("description")
        _check(text, str | None, "a string or null", (*where, index, "description"))
        options.append((value, text))
    return options


def _names(values: Iterable[str | bool]) -> list[str]:
    """What the model sees of values: strings as they are and booleans as JSON; where both are one text, the string is
    quoted."""
    values = list(values)
    taken = {json.dumps(value) for value in values if isinstance(value, bool)}
    strings = {value for value in values if isinstance(value, str)}

    def name(value: str | bool) -> str:
        if isinstance(value, bool):
            return json.dumps(value)
        shown = value
        while shown in taken or (shown != value and shown in strings):
            shown = json.dumps(shown)
        return shown

    return [name(value) for value in values]


def _answer(answer: Answer, values: Sequence[str | bool]) -> dict[str, Any]:
    if isinstance(answer, NoulAnswer):
        return {"type": "predicate", "probability": answer.noul}
    if isinstance(answer, ChoiceAnswer):
        chosen = list(answer.probabilities).index(answer.choice)
        pairs = zip(values, answer.probabilities.values(), strict=True)
        return {
            "type": "choice",
            "choice": values[chosen],
            "confidence": answer.confidence,
            "probabilities": [{"value": value, "probability": p} for value, p in pairs],
        }
    levels = enumerate(zip(values, answer.probabilities.values(), strict=True))
    return {
        "type": "score",
        "score": answer.score,
        "confidence": answer.confidence,
        "probabilities": [{"value": index, "label": label, "probability": p} for index, (label, p) in levels],
    }


def _field(fields: Mapping[str, Any], name: str, kind: Any, what: str, loc: Loc) -> Any:
    if name not in fields:
        raise _problem((*loc, name), "Field required", "missing")
    _check(fields[name], kind, what, (*loc, name))
    return fields[name]


def _check(value: Any, kind: Any, what: str, loc: Loc) -> None:
    if not isinstance(value, kind):
        raise _problem(loc, f"Input should be {what}", "string_type")


def _check_count(body: dict[str, Any]) -> None:
    """As many values as in a body of System One, so that no step takes long."""
    count = 0
    level: list[Any] = [body]
    while level:
        count += sum(map(len, level))
        if count > MAX_VALUES:
            raise _problem((), f"Body should have at most {MAX_VALUES} values", "too_long")
        children = (child for item in level for child in (item.values() if isinstance(item, dict) else item))
        level = [child for child in children if isinstance(child, dict | list)]


def _problem(loc: Loc, message: str, kind: str) -> RequestError:
    return RequestError([{"loc": place(*loc), "msg": message, "type": kind}])
