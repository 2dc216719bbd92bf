"""What requests and answers look like on each route."""

from __future__ import annotations

import json
from typing import Any, Protocol

import orjson
from starlette.responses import JSONResponse, Response

from flide.errors import RequestError
from flide.runtime.decision import Decision
from flide.runtime.known_bodies import KnownBodies
from flide.runtime.request import DecisionRequest
from flide.runtime.strict_json import parse_json
from flide.runtime.wire import parse_body
from flide.serve.call import Call
from flide.serve.decisions import Translated, in_this_shape, is_systemone, translate
from flide.serve.faults import Fault


class Shape(Protocol):
    """What a request and its answer look like on some route."""

    def parse(self, body: bytes) -> DecisionRequest:
        """The request in a body. Raises RequestError."""

    def tell(self, error: RequestError) -> RequestError:
        """In the route's words what is wrong with a request that was parsed."""

    def answer(self, decision: Decision) -> dict[str, Any]:
        """The body of the response."""


class SystemOne:
    """System One's.

    Args:
        known: bodies whose questions came before.
        key: name of who asks.
    """

    def __init__(self, known: KnownBodies, key: str) -> None:
        self._known, self._key = known, key

    def parse(self, body: bytes) -> DecisionRequest:
        return self._known.parse(body, self._key)

    def tell(self, error: RequestError) -> RequestError:
        return error

    def answer(self, decision: Decision) -> dict[str, Any]:
        return decision.to_dict()


class Decisions:
    """OpenAI's Decisions; a body in System One's shape is answered, and refused, in that one.

    Args:
        call: whose body it is.
    """

    def __init__(self, call: Call) -> None:
        self._call = call
        self._translated: Translated | None = None

    def parse(self, body: bytes) -> DecisionRequest:
        parsed = parse_json(body)
        if is_systemone(parsed):
            self._call.refusal = refusal_of_systemone
            return parse_body(parsed)
        self._translated = translate(parsed)
        return self._translated.request

    def tell(self, error: RequestError) -> RequestError:
        return error if self._translated is None else in_this_shape(error)

    def answer(self, decision: Decision) -> dict[str, Any]:
        return decision.to_dict() if self._translated is None else self._translated.response(decision)


def to_json(content: Any) -> bytes:
    """A body, written by orjson: numbers are most of an answer, and it writes these ten times as fast as others.

    Raises:
        ValueError: a number is none.
    """
    try:
        written = orjson.dumps(content)
    except orjson.JSONEncodeError:  # of integers with more than 64 bits, which levels of a score may hold
        return _slowly(content)
    # NaN would be null, too: where there is one, the standard library writes it, which refuses NaN.
    return _slowly(content) if b"null" in written else written


def _slowly(content: Any) -> bytes:
    return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def refusal_of_systemone(fault: Fault) -> Response:
    """What is wrong, as System One says it."""
    return JSONResponse({"detail": fault.detail}, status_code=fault.status, headers=fault.headers)
