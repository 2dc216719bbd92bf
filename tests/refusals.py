"""Refusals as tests read them, and the nested values that provoke some."""

from __future__ import annotations

import json
from typing import Any

import pytest

from flide.errors import RequestError
from flide.runtime.wire import MAX_ERRORS


def nested(levels: int, *, kind: type = list) -> Any:
    value: Any = "x"
    for _ in range(levels):
        value = [value] if kind is list else {"a": value}
    return value


def check_errors(error: RequestError) -> list[dict[str, Any]]:
    """The errors, once they are seen to be what a server can send."""
    assert 1 <= len(error.errors) <= MAX_ERRORS
    for entry in error.errors:
        assert set(entry) == {"loc", "msg", "type"}
        assert entry["loc"][0] == "body"
        assert all(isinstance(part, str | int) for part in entry["loc"])
        assert isinstance(entry["msg"], str)
        assert entry["msg"]
        assert isinstance(entry["type"], str)
        assert len(json.dumps(entry)) < 20_000
    json.dumps(error.errors, ensure_ascii=False, allow_nan=False).encode()
    str(error)
    return error.errors


def refusals(function: Any, value: Any) -> list[tuple[tuple[Any, ...], str]]:
    with pytest.raises(RequestError) as info:
        function(value)
    return [(tuple(entry["loc"][1:]), entry["type"]) for entry in check_errors(info.value)]
