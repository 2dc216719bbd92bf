"""Strict JSON: what this decodes has one meaning everywhere, and no text of any shape costs more than time.

    parse_json(b'{"state": "..."}')

Refusals are ``RequestError``, like those of the parser of bodies, and never repeat the text.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, Never

from flide.errors import RequestError

MAX_DEPTH = 128  # nested objects and arrays, the body included

NOT_UNICODE = "Input should be valid Unicode text without lone surrogates"
TOO_LONG = "Integer has too many digits"
TOO_DEEP = f"Input should be nested at most {MAX_DEPTH} levels deep"

# Below this many brackets the C decoder is safe on any thread's stack, whatever the recursion limit was raised to.
_SAFE_BRACKETS = 4096
# One match per bracket outside of strings. Possessive, and also matching at the end: linear for every input.
_BRACKET = re.compile(r'(?:[^"\[\]{}]++|"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z))*+([\[\]{}]|\Z)', re.DOTALL)
# One match per escape; the group is an escaped surrogate outside of a pair.
_ESCAPE = re.compile(r"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]..|(u[dD][89a-fA-F]..)|.)", re.DOTALL)

_CONTAINERS = (dict, list)  # a tuple: a union would be made anew for every value
_STEP = {"[": 1, "{": 1, "]": -1, "}": -1, "": 0}


def parse_json(data: bytes | str) -> Any:
    """Decode strict JSON: UTF-8 without a byte order mark, well-formed text, finite numbers, no repeated keys.

    Raises:
        RequestError: one ``json_invalid`` entry, with loc ``["body", character]`` where the position is known. Also for
            more than ``MAX_DEPTH`` nested objects and arrays.
    """
    text = _decode(data)
    if text.startswith("\ufeff"):
        raise _json_invalid("Body begins with a byte order mark", 0)
    if not text.strip(" \t\r\n"):
        raise _json_invalid("The body is empty", 0)
    if text.count("[") + text.count("{") > _SAFE_BRACKETS:
        _check_brackets(text)
    body, refusal = None, None
    try:
        body = _DECODER.decode(text)
    except RequestError:
        raise
    except json.JSONDecodeError as error:
        refusal = _json_invalid(error.msg, error.pos)
    except RecursionError:
        refusal = _json_invalid(TOO_DEEP)
    except ValueError:  # the interpreter's limit for the digits of an integer
        refusal = _json_invalid(TOO_LONG)
    if refusal is not None:
        raise refusal  # out here, where the decoder's error and the text it holds are no longer its context
    if "\\u" in text:
        for escape in _ESCAPE.finditer(text):
            if escape[1]:
                raise _json_invalid(NOT_UNICODE, escape.start())
    depth, level = 0, [body]
    while level := [value for value in level if isinstance(value, _CONTAINERS)]:
        depth += 1
        if depth > MAX_DEPTH:
            raise _json_invalid(TOO_DEEP)
        level = [child for value in level for child in (value.values() if isinstance(value, dict) else value)]
    return body


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
            raise _json_invalid(TOO_DEEP, bracket.end() - 1)


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


_DECODER = json.JSONDecoder(object_pairs_hook=_unique_keys, parse_float=_finite, parse_constant=_refuse_constant)
