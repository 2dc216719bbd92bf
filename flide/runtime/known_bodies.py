"""System One bodies whose questions came before, byte for byte: only what is in front of them is parsed.

A body is cut in front of the comma before its questions. The end of another body may stand there if that is the same
bytes, and if what is in front, closed by a brace, is an object with members: then both are one object, whose members
are those of the two. Where anything else is the case, the body is parsed as any other.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

from flide.errors import RequestError
from flide.runtime.questionnaire import Questionnaire
from flide.runtime.request import DecisionRequest
from flide.runtime.seen import Seen
from flide.runtime.strict_json import parse_json
from flide.runtime.wire import MAX_VALUES, parse_body

__all__ = ["KnownBodies"]

MOST_BYTES = 32 << 20  # of what is kept
LARGEST = 1 << 18  # bytes of an end that is kept
LARGEST_SHARE = 8  # one end and what is made of it may take one in so many of the bytes
MOST_SEEN = 1 << 14  # ends that came once

_BLANKS = b" \t\r\n"
_ENTRY = 1000  # bytes that an end takes beside what is in it

_Key: TypeAlias = "tuple[str, bytes]"


@dataclass(eq=False, slots=True)
class _End:
    """The end of a body.

    Attributes:
        questions: in it.
        others: its other fields.
        size: bytes that it takes, with what was made of it.
    """

    questions: Questionnaire
    others: dict[str, Any]
    size: int


class KnownBodies:
    """Parses bodies, and keeps the ends of those that come again. Threads may share it."""

    def __init__(self) -> None:
        self._known: OrderedDict[_Key, _End] = OrderedDict()
        self._seen = Seen(MOST_SEEN)
        self._size = 0
        self._lock = threading.Lock()

    def parse(self, data: bytes, owner: str) -> DecisionRequest:
        """``parse_body(parse_json(data))``.

        Args:
            data: a body.
            owner: what came of others is not known to this one, so that no time tells of it.

        Raises:
            RequestError: as these two.
        """
        # Each value takes two bytes at least: a body of so few need not be counted again, whose end is not copied.
        cut = _cut(data) if len(data) <= MAX_VALUES else None
        if cut is None or b'"x_flide"' in data[:cut]:  # in which there may be a salt, to which nothing is known
            return parse_body(parse_json(data))
        key = owner, data[cut:]
        with self._lock:
            end = self._known.get(key)
            if end is not None:
                self._known.move_to_end(key)
        if end is not None:
            found = _continued(data[:cut], end)
            if found is not None:
                return found
        request = parse_body(parse_json(data))
        if end is None and len(key[1]) <= LARGEST:
            self._keep(key, request)
        return request

    def _keep(self, key: _Key, request: DecisionRequest) -> None:
        """Keep the end of a body, if it came before."""
        end = key[1]
        with self._lock:
            if not self._seen.again(key):
                return
        try:
            alone = parse_json(b'{"":0' + end)
        except RequestError:  # another key "", or no end
            return
        if "questions" not in alone:  # but in another object
            return
        questions = Questionnaire(dict(request.questions), functools.partial(self._grow, key))
        others = {name: alone[name] for name in alone if name not in ("questions", "")}
        parts = [[question.instructions, question.criteria] for question in request.questions.values()]
        size = _ENTRY + sys.getsizeof(end) + _size_of([alone["questions"].keys(), parts, others])
        with self._lock:
            if key not in self._known:
                self._known[key] = _End(questions, others, 0)
        if not self._grow(key, size):
            with self._lock:
                self._known.pop(key, None)

    def _grow(self, key: _Key, size: int) -> bool:
        """Make room for more bytes of an end; False if it may not have so many."""
        with self._lock:
            end = self._known.get(key)
            if end is None or end.size + size > MOST_BYTES // LARGEST_SHARE:
                return False
            end.size += size
            self._size += size
            self._known.move_to_end(key)
            while self._size > MOST_BYTES:
                self._size -= self._known.popitem(last=False)[1].size
        return True


def _size_of(value: Any) -> int:
    """Bytes of a value of plain JSON types, and of all that is in it."""
    size, todo = 0, [value]
    while todo:
        value = todo.pop()
        size += sys.getsizeof(value)
        if isinstance(value, dict):
            todo += [*value.keys(), *value.values()]
        elif not isinstance(value, str) and isinstance(value, Iterable):
            todo += value
    return size


def _cut(data: bytes) -> int | None:
    """Where the comma stands before what looks like the questions of a body."""
    at = data.find(b'"questions"') - 1
    while at > 0 and data[at] in _BLANKS:
        at -= 1
    return at if at > 0 and data[at] == ord(",") else None


def _continued(begin: bytes, end: _End) -> DecisionRequest | None:
    """The request of a body with a known end; None where it is to be parsed as any other."""
    try:
        fields = parse_json(begin + b"}")
        if not fields or not fields.keys().isdisjoint(("questions", "x_flide", *end.others)):
            return None
        return parse_body({**fields, **end.others}, questions=end.questions)
    except RequestError:  # which tells of other places than those of the body
        return None
