"""The parser of System One requests: JSON text, decoded bodies and ``DecisionRequest`` objects pass the same checks.

    parse_request(parse_json(b'{"model": "jev-latest", "state": "...", "questions": {"q": {"type": "noul"}}}'))

Every refusal is a ``RequestError`` whose entries use pydantic's error types. An entry says where and what is wrong and
never repeats the value that was sent; names in a ``loc`` are shortened.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence, Sized
from typing import Any, Never, TypeAlias

from flide.errors import RequestError
from flide.runtime.request import Choice, DecisionRequest, Noul, Question, Score

MAX_DEPTH = 128  # nested objects and arrays, the body included
MAX_VALUES = 1_000_000  # strings, numbers, objects, ... of one body
MAX_OPTIONS = 255  # of a choice
MAX_LEVELS = 10  # of a score
MAX_ERRORS = 20  # reported at once

_LOC_PARTS = 16
_LOC_CHARS = 100

# Below this many brackets the C decoder is safe on any thread's stack, whatever the recursion limit was raised to.
_SAFE_BRACKETS = 4096
# One match per bracket outside of strings. Possessive, and also matching at the end: linear for every input.
_BRACKET = re.compile(r'(?:[^"\[\]{}]++|"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z))*+([\[\]{}]|\Z)', re.DOTALL)
# One match per escape; the group is an escaped surrogate outside of a pair.
_ESCAPE = re.compile(r"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]..|(u[dD][89a-fA-F]..)|.)", re.DOTALL)

_STEP = {"[": 1, "{": 1, "]": -1, "}": -1, "": 0}

_SCALARS = frozenset({str, int, float, bool, type(None)})
_CONTAINERS = (dict, list, tuple, Mapping)

_Path: TypeAlias = "tuple[_Path, str | int] | None"

_INVALID: Any = object()  # stands where a value was refused, so that it is not refused twice

_NOT_UNICODE = "Input should be valid Unicode text without lone surrogates"
_NOT_QUESTIONS = "Input should be an object that maps ids to questions"
_TOO_LONG = "Integer has too many digits"
_TOO_DEEP = f"Input should be nested at most {MAX_DEPTH} levels deep"


def parse_json(data: bytes | str) -> Any:
    """Decode strict JSON: UTF-8 without a byte order mark, well-formed text, finite numbers, no repeated keys.

    Raises:
        RequestError: one ``json_invalid`` entry, with loc ``["body", character]`` where the position is known. Also for
            more than ``MAX_DEPTH`` nested objects and arrays.
    """
    text = _decode(data)
    if not text.strip(" \t\r\n"):
        raise _json_invalid("The body is empty", 0)
    if text.count("[") + text.count("{") > _SAFE_BRACKETS:
        _check_brackets(text)
    body, refusal = None, None
    try:
        body = json.loads(text, object_pairs_hook=_unique_keys, parse_float=_finite, parse_constant=_refuse_constant)
    except RequestError:
        raise
    except json.JSONDecodeError as error:
        refusal = _json_invalid(error.msg, error.pos)
    except RecursionError:
        refusal = _json_invalid(_TOO_DEEP)
    except ValueError:  # the interpreter's limit for the digits of an integer
        refusal = _json_invalid(_TOO_LONG)
    if refusal is not None:
        raise refusal  # out here, where the decoder's error and the text it holds are no longer its context
    if "\\u" in text:
        for escape in _ESCAPE.finditer(text):
            if escape[1]:
                raise _json_invalid(_NOT_UNICODE, escape.start())
    depth, level = 0, [body]
    while level := [value for value in level if isinstance(value, dict | list)]:
        depth += 1
        if depth > MAX_DEPTH:
            raise _json_invalid(_TOO_DEEP)
        level = [child for value in level for child in (value.values() if isinstance(value, dict) else value)]
    return body


def parse_request(request: DecisionRequest | Mapping[str, Any]) -> DecisionRequest:
    """Check a request given as an object or as a decoded System One body, and return a copy of it.

    Raises:
        RequestError: as ``parse_body``; also when ``request`` is neither, or holds something else than questions.
    """
    if not isinstance(request, DecisionRequest):
        return parse_body(request)
    questions: Any = request.questions
    problems = _Problems()
    if not isinstance(questions, Mapping):
        problems.add(("questions",), _NOT_QUESTIONS, "dict_type")
        problems.check()
    for question_id, question in questions.items():
        if not isinstance(question, Question):
            problems.add(("questions", question_id), "Input should be a Choice, a Noul or a Score", "value_error")
    problems.check()
    questions = {question_id: question.to_dict() for question_id, question in questions.items()}
    return parse_body({"model": request.model, "state": request.state, "questions": questions})


def parse_body(body: Any) -> DecisionRequest:
    """Check a decoded System One body and return it as a request that shares no mutable object with it.

    Tuples count as arrays, and any mapping as an object. Everything else must be of JSON's own types, exactly; of
    subclasses only those of str are taken, and turned into str. Unknown fields are ignored, but must be JSON as well.

    Raises:
        RequestError: with the first ``MAX_ERRORS`` problems found.
    """
    problems = _Problems()
    fields = _copy(body, problems)
    if not isinstance(fields, dict):
        if fields is not _INVALID:
            problems.add((), "Input should be an object", "dict_type")
        problems.check()
    assert isinstance(fields, dict)
    model = _require(fields, "model", (), problems)
    if model is not _INVALID and not isinstance(model, str):
        problems.add(("model",), "Input should be a string", "string_type")
    state = _require(fields, "state", (), problems)
    _check_text(state, ("state",), problems, null=False)
    assets = fields.get("assets")
    if assets is not _INVALID and assets:
        problems.add(("assets",), "Assets are not supported: only text can be read", "value_error")

    questions = _require(fields, "questions", (), problems)
    parsed: dict[str, Question] = {}
    if questions is not _INVALID and not isinstance(questions, dict):
        problems.add(("questions",), _NOT_QUESTIONS, "dict_type")
    elif isinstance(questions, dict):
        if not questions:
            problems.add(("questions",), "Input should have at least 1 question", "too_short")
        for question_id, question in questions.items():
            result = _parse_question(question, ("questions", question_id), problems)
            if result is not None:
                parsed[question_id] = result
    problems.check()
    return DecisionRequest(state=state, questions=parsed, model=model)


def _parse_question(fields: Any, loc: tuple[str, ...], problems: _Problems) -> Question | None:
    """The question, or None where its kind is unknown; what it holds is right only if no problem was added."""
    if not isinstance(fields, dict):
        if fields is not _INVALID:
            problems.add(loc, "Input should be an object", "dict_type")
        return None
    if "type" not in fields:
        problems.add(loc, "Question should have a 'type': 'noul', 'choice' or 'score'", "union_tag_not_found")
        return None
    kind, instructions, criteria = fields["type"], fields.get("instructions"), fields.get("criteria")
    where = (*loc, "criteria")
    if kind in ("noul", "choice", "score"):
        _check_text(instructions, (*loc, "instructions"), problems)
    if kind == "noul":
        _check_sides(criteria, where, problems)
        return Noul(instructions, criteria)
    if kind == "choice":
        criteria = _require(fields, "criteria", loc, problems)
        _check_options(criteria, where, problems)
        return Choice(instructions, criteria)
    if kind == "score":
        criteria = _require(fields, "criteria", loc, problems)
        _check_levels(criteria, where, problems)
        return Score(instructions, criteria)
    if kind == "box":
        problems.add(loc, "Questions of type 'box' are not supported: only text can be read", "union_tag_invalid")
    elif kind is not _INVALID:
        problems.add(loc, "Question's 'type' should be 'noul', 'choice' or 'score'", "union_tag_invalid")
    return None


def _check_sides(criteria: Any, loc: tuple[str, ...], problems: _Problems) -> None:
    if isinstance(criteria, dict):
        for side, description in criteria.items():
            if side in ("true", "false"):
                _check_text(description, (*loc, side), problems)
            elif description is not _INVALID:
                problems.add((*loc, side), "Only the keys 'true' and 'false' are permitted", "extra_forbidden")
    elif criteria is not None and criteria is not _INVALID:
        problems.add(loc, "Input should be an object with the keys 'true' and 'false', or null", "dict_type")


def _check_options(criteria: Any, loc: tuple[str, ...], problems: _Problems) -> None:
    if isinstance(criteria, dict):
        if _check_size(criteria, MAX_OPTIONS, "option", loc, problems):
            for name, description in criteria.items():
                _check_text(description, (*loc, name), problems)
    elif criteria is not _INVALID:
        problems.add(loc, "Input should be an object that maps distinct option names to descriptions", "dict_type")


def _check_levels(criteria: Any, loc: tuple[str, ...], problems: _Problems) -> None:
    if isinstance(criteria, list):
        if _check_size(criteria, MAX_LEVELS, "level", loc, problems):
            for index, level in enumerate(criteria):
                _check_text(level, (*loc, index), problems, null=False)
    elif criteria is not _INVALID:
        problems.add(loc, "Input should be an array of levels, from low to high", "list_type")


def _check_size(items: Sized, most: int, noun: str, loc: tuple[str, ...], problems: _Problems) -> bool:
    if not items:
        problems.add(loc, f"Input should have at least 1 {noun}", "too_short")
    elif len(items) > most:
        problems.add(loc, f"Input should have at most {most} {noun}s, not {len(items)}", "too_long")
    return 1 <= len(items) <= most


def _check_text(value: Any, loc: Sequence[str | int], problems: _Problems, *, null: bool = True) -> None:
    if not (value is _INVALID or isinstance(value, str | dict | list) or (null and value is None)):
        kinds = "a string, an object, an array or null" if null else "a string, an object or an array"
        problems.add(loc, f"Input should be {kinds}", "string_type")


def _require(fields: dict[str, Any], name: str, loc: tuple[str, ...], problems: _Problems) -> Any:
    if name not in fields:
        problems.add((*loc, name), "Field required", "missing")
        return _INVALID
    return fields[name]


class _Problems:
    """The ``detail`` list of a refusal; raises by itself once it is full."""

    def __init__(self) -> None:
        self.errors: list[dict[str, Any]] = []

    def add(self, loc: Sequence[Any], msg: str, kind: str) -> None:
        parts = [part if isinstance(part, int) else _shorten(part) for part in loc[:_LOC_PARTS]]
        self.errors.append({"loc": ["body", *parts], "msg": msg, "type": kind})
        if len(self.errors) >= MAX_ERRORS:
            self.check()

    def check(self) -> None:
        if self.errors:
            raise RequestError(self.errors)


def _copy(body: Any, problems: _Problems) -> Any:
    """A copy made of plain JSON types, with ``_INVALID`` for what was refused. Iterative: depth costs no stack."""
    root: list[Any] = []
    todo: list[tuple[Any, Any, _Path, int]] = [([body], root, None, 0)]
    count = 0
    while todo:
        source, target, path, depth = todo.pop()
        # Objects can be shared, so that few of them are a body of billions of values.
        count += len(source)
        if count > MAX_VALUES:
            problems.add(_loc(path)[:3], f"Body should have at most {MAX_VALUES} values", "too_long")
            problems.check()
        is_object = isinstance(target, dict)
        children: list[tuple[Any, Any, _Path, int]] = []
        for key, value in source.items() if is_object else enumerate(source):
            if is_object and (problem := _key_problem(key)):
                problems.add(_loc(path), *problem)
                target[_shorten(key)] = _INVALID
                continue
            copied: Any = value
            if value is None or (type(value) is str and value.isascii()):
                pass  # the common cases, without a call
            elif type(value) not in _SCALARS and isinstance(value, _CONTAINERS):
                copied = [] if isinstance(value, list | tuple) else {}
                children.append((value, copied, (path, key) if depth else None, depth + 1))
            elif problem := _scalar_problem(value):
                copied = _INVALID
                problems.add(_loc((path, key) if depth else None), *problem)
            elif isinstance(value, str):
                copied = str.__str__(value)
            if is_object:
                target[str.__str__(key)] = copied
            else:
                target.append(copied)
        if children and depth == MAX_DEPTH:
            problems.add(_loc(path)[:4], _TOO_DEEP, "value_error")
            problems.check()
        todo.extend(reversed(children))
    return root[0]


def _loc(path: _Path) -> list[str | int]:
    loc: list[str | int] = []
    while path is not None:
        path, part = path
        loc.append(part)
    return loc[::-1]


def _key_problem(key: Any) -> tuple[str, str] | None:
    if not isinstance(key, str):
        return "Keys should be strings", "invalid_key"
    return None if _is_unicode(key) else (_NOT_UNICODE, "string_unicode")


def _scalar_problem(value: Any) -> tuple[str, str] | None:
    """Message and type of what is wrong with a value that is neither object nor array, or None."""
    if isinstance(value, str):
        return None if _is_unicode(value) else (_NOT_UNICODE, "string_unicode")
    if type(value) not in _SCALARS:
        return f"Input should be a JSON value, not a Python {_shorten(type(value).__name__)}", "value_error"
    if type(value) is float and not math.isfinite(value):
        return "Input should be a finite number", "finite_number"
    if type(value) is int and value.bit_length() > 64:
        try:
            str(value)
        except ValueError:
            return _TOO_LONG, "int_parsing_size"
    return None


def _is_unicode(text: str) -> bool:
    if str.isascii(text):
        return True
    try:
        str.encode(text)
    except UnicodeEncodeError:
        return False
    return True


def _shorten(name: Any) -> str:
    """A name as it may stand in an error: short and well-formed, whatever was sent."""
    if not isinstance(name, str):
        return f"<{_shorten(type(name).__name__)}>"
    short = name if len(name) <= _LOC_CHARS else name[:_LOC_CHARS] + "..."
    return short.encode("utf-8", "replace").decode()


def _json_invalid(msg: str, position: int | None = None) -> RequestError:
    loc = ["body"] if position is None else ["body", position]
    return RequestError([{"loc": loc, "msg": f"JSON decode error: {msg}", "type": "json_invalid"}])


def _decode(data: bytes | str) -> str:
    try:
        if not isinstance(data, str):
            return str(data, "utf-8")
        data.encode()
        return data
    except UnicodeEncodeError as error:
        position = error.start
    except UnicodeDecodeError as error:
        position = len(error.object[: error.start].decode())
    raise _json_invalid("Body is not valid UTF-8", position)


def _check_brackets(text: str) -> None:
    depth = 0
    for bracket in _BRACKET.finditer(text):
        depth += _STEP[bracket[1]]
        if depth > MAX_DEPTH:
            raise _json_invalid(_TOO_DEEP, bracket.end() - 1)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise _json_invalid("An object has the same key twice")
    return value


def _finite(literal: str) -> float:
    number = float(literal)
    if math.isinf(number):
        raise _json_invalid("Number is too large")
    return number


def _refuse_constant(literal: str) -> Never:
    raise _json_invalid("NaN and Infinity are not JSON")
