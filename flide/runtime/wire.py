"""The parser of System One requests: decoded bodies and ``DecisionRequest`` objects pass the same checks.

    parse_request(parse_json(b'{"model": "jev-latest", "state": "...", "questions": {"q": {"type": "noul"}}}'))

Every refusal is a ``RequestError`` whose entries use pydantic's error types. An entry says where and what is wrong and
never repeats the value that was sent: a ``loc`` ends at the field of the contract, whatever is wrong inside of it, and
the ids and option names in it are shortened.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import replace
from typing import Any, TypeAlias

from flide.errors import RequestError
from flide.runtime.request import Choice, DecisionRequest, Noul, Question, Score
from flide.runtime.strict_json import MAX_DEPTH, NOT_UNICODE, TOO_DEEP, TOO_LONG

MAX_VALUES = 1_000_000  # strings, numbers, objects, ... of one body
MAX_OPTIONS = 255  # of a choice
MAX_LEVELS = 10  # of a score
MAX_SALT = 256  # characters
MAX_CHECKPOINT = (1 << 31) - 1
CACHE_OPTIONS = ("cache_salt", "checkpoint")  # of ``DecisionRequest``, in ``x_flide`` of a body
MAX_ERRORS = 20  # reported at once

_LOC_CHARS = 100

_SCALARS = frozenset({str, int, float, bool, type(None)})
_CONTAINERS = (dict, list, tuple, Mapping)

_Path: TypeAlias = "tuple[_Path, str | int] | None"

_INVALID: Any = object()  # stands where a value was refused, so that it is not refused twice

_NOT_QUESTIONS = "Input should be an object that maps ids to questions"


def place(*parts: Any) -> list[str | int]:
    """The ``loc`` of an error entry: names in it are shortened, whatever was sent."""
    return ["body", *(part if isinstance(part, int) else _shorten(part) for part in parts)]


def as_list(
    requests: Iterable[DecisionRequest | Mapping[str, Any]],
) -> list[DecisionRequest | Mapping[str, Any]]:
    """Several requests; a single one is a mistake, and would be taken for its keys.

    Raises:
        TypeError: it is one.
    """
    if isinstance(requests, str | bytes | Mapping | DecisionRequest):
        raise TypeError("requests must be a list; wrap a single request in [...]")
    return list(requests)


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
    check_cache_options(request.cache_salt, request.checkpoint, (), problems)
    problems.check()
    questions = {question_id: question.to_dict() for question_id, question in questions.items()}
    parsed = parse_body({"model": request.model, "state": request.state, "questions": questions})
    return replace(parsed, cache_salt=request.cache_salt, checkpoint=request.checkpoint)


def _parse_extras(extras: Any, problems: _Problems) -> dict[str, Any]:
    """Check ``x_flide`` of a body, and return the cache options in it."""
    if extras is None or extras is _INVALID:
        return {}
    if not isinstance(extras, dict):
        problems.add(("x_flide",), "Input should be an object or null", "dict_type")
        return {}
    given = cache_options(extras)
    check_cache_options(given.get("cache_salt"), given.get("checkpoint", True), ("x_flide",), problems)
    return given


def cache_options(extras: Mapping[str, Any]) -> dict[str, Any]:
    """The options of ``DecisionRequest`` that ``x_flide`` of a body gives, unchecked."""
    given = {name: extras[name] for name in CACHE_OPTIONS if extras.get(name) is not None}
    number = given.get("checkpoint")
    if isinstance(number, float) and number.is_integer():  # JSON makes no difference between 3 and 3.0
        given["checkpoint"] = int(number)
    return given


def check_cache_options(cache_salt: Any, checkpoint: Any, loc: tuple[str, ...], problems: _Problems) -> None:
    """Check ``DecisionRequest.cache_salt`` and ``checkpoint``, whose place is ``loc``."""
    is_salt = isinstance(cache_salt, str) and 0 < len(cache_salt) <= MAX_SALT and _is_unicode(cache_salt)
    if not (is_salt or cache_salt is None or cache_salt is _INVALID):
        message = f"Input should be null or a string of 1 to {MAX_SALT} characters"
        problems.add((*loc, "cache_salt"), message, "string_type")
    if checkpoint is not _INVALID and not (isinstance(checkpoint, int) and 0 <= checkpoint <= MAX_CHECKPOINT):
        message = "Input should be true, false or how many messages or characters of the state to keep"
        problems.add((*loc, "checkpoint"), message, "int_type")


def parse_body(body: Any, *, questions: Mapping[str, Question] | None = None) -> DecisionRequest:
    """Check a decoded System One body and return it as a request that shares no mutable object with it.

    Tuples count as arrays, and any mapping as an object. Everything else must be of JSON's own types, exactly; of
    subclasses only those of str are taken, and turned into str. Unknown fields are ignored, but must be JSON as well.

    Args:
        body: the whole of it, or where the questions are known what else is in it.
        questions: that were parsed before.

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

    if questions is None:
        questions = _parse_questions(_require(fields, "questions", (), problems), problems)
    options = _parse_extras(fields.get("x_flide"), problems)
    problems.check()
    return DecisionRequest(state=state, questions=questions, model=model, **options)


def _parse_questions(questions: Any, problems: _Problems) -> dict[str, Question]:
    """The questions that are of a known kind; what they hold is right only if no problem was added."""
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
    return parsed


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
                if description is not None and type(description) is not str:
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
    """The ``detail`` list of a refusal; raises by itself once there are too many."""

    def __init__(self) -> None:
        self.errors: list[dict[str, Any]] = []
        self._count = 0

    def add(self, loc: Sequence[Any], msg: str, kind: str) -> None:
        entry = {"loc": place(*_field(loc)), "msg": msg, "type": kind}
        if entry not in self.errors:
            self.errors.append(entry)
        self._count += 1
        if self._count >= MAX_ERRORS:
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
            problems.add(_loc(path), f"Body should have at most {MAX_VALUES} values", "too_long")
            problems.check()
        is_object = isinstance(target, dict)
        children: list[tuple[Any, Any, _Path, int]] = []
        for key, value in source.items() if is_object else enumerate(source):
            if not is_object or (type(key) is str and key.isascii()):  # the common cases, without a call
                name = key
            elif problem := _key_problem(key):
                problems.add(_loc(path), *problem)
                target[_shorten(key)] = _INVALID
                continue
            else:
                name = str.__str__(key)
            copied: Any = value
            if value is None or (type(value) is str and value.isascii()):
                pass
            elif type(value) not in _SCALARS and isinstance(value, _CONTAINERS):
                copied = [] if isinstance(value, list | tuple) else {}
                children.append((value, copied, (path, key) if depth else None, depth + 1))
            elif problem := _scalar_problem(value):
                copied = _INVALID
                problems.add(_loc((path, key) if depth else None), *problem)
            elif isinstance(value, str):
                copied = str.__str__(value)
            if is_object:
                target[name] = copied
            else:
                target.append(copied)
        if children and depth == MAX_DEPTH:
            problems.add(_loc(path), TOO_DEEP, "value_error")
            problems.check()
        todo.extend(reversed(children))
    return root[0]


def _loc(path: _Path) -> list[str | int]:
    loc: list[str | int] = []
    while path is not None:
        path, part = path
        loc.append(part)
    return loc[::-1]


def _field(loc: Sequence[Any]) -> Sequence[Any]:
    """The part of a location that the contract names; what lies deeper are names of the user's own content."""
    if loc and loc[0] == "x_flide":
        return loc[:2]
    if not loc or loc[0] != "questions":
        return loc[:1]
    return loc[:4] if len(loc) > 2 and loc[2] == "criteria" else loc[:3]


def _key_problem(key: Any) -> tuple[str, str] | None:
    if not isinstance(key, str):
        return "Keys should be strings", "invalid_key"
    return None if _is_unicode(key) else (NOT_UNICODE, "string_unicode")


def _scalar_problem(value: Any) -> tuple[str, str] | None:
    """Message and type of what is wrong with a value that is neither object nor array, or None."""
    if isinstance(value, str):
        return None if _is_unicode(value) else (NOT_UNICODE, "string_unicode")
    if type(value) not in _SCALARS:
        return f"Input should be a JSON value, not a Python {_shorten(type(value).__name__)}", "value_error"
    if type(value) is float and not math.isfinite(value):
        return "Input should be a finite number", "finite_number"
    if type(value) is int and value.bit_length() > 64:
        try:
            str(value)
        except ValueError:
            return TOO_LONG, "int_parsing_size"
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
