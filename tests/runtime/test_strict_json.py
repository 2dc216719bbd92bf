"""Text of any shape is decoded with one meaning or refused, and never costs more than time."""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flide.errors import RequestError
from flide.runtime.strict_json import MAX_DEPTH, parse_json
from tests.refusals import check_errors, nested, refusals

DIGITS = "9" * 5000


@pytest.mark.parametrize(
    ("data", "position"),
    [
        pytest.param(b"", 0, id="empty"),
        pytest.param(" \n\t", 0, id="blank"),
        pytest.param(b"{", 1, id="unfinished"),
        pytest.param('{"a": 1} x', 9, id="trailing-text"),
        pytest.param("{'a': 1}", 1, id="single-quotes"),
        pytest.param('["a\nb"]', 3, id="raw-newline"),
        pytest.param('["\\x"]', 2, id="bad-escape"),
        pytest.param(b'["\xc3\xa9\xff"]', 3, id="invalid-utf8"),
        pytest.param(b'["\xed\xa0\x80"]', 2, id="utf8-surrogate"),
        pytest.param(b"\xef\xbb\xbf{}", 0, id="byte-order-mark"),
        pytest.param('["a"]'.encode("utf-16"), 0, id="utf16"),
        pytest.param('["a\ud800"]', 3, id="raw-surrogate"),
        pytest.param('["ab\\ud800"]', 4, id="lone-high"),
        pytest.param('{"\\udc00": 1}', 2, id="lone-low-in-key"),
        pytest.param('["\\\\\\ud800\\ud83d\\ude00"]', 4, id="high-before-pair"),
        pytest.param('["\\ude00\\ud83d"]', 2, id="pair-reversed"),
        pytest.param('{"a": 1, "a": 1}', None, id="repeated-key"),
        pytest.param('[{"a": {"b": 1, "\\u0062": 2}}]', None, id="repeated-escaped-key"),
        pytest.param("[NaN]", None, id="nan"),
        pytest.param("-Infinity", None, id="infinity"),
        pytest.param("[1e999]", None, id="float-overflow"),
        pytest.param(f"[-{DIGITS}.5]", None, id="long-float-overflow"),
        pytest.param(f"[{DIGITS}]", None, id="int-too-long"),
        pytest.param("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), None, id="too-deep"),
        pytest.param("[" * 3000 + "]" * 3000, None, id="beyond-recursion-limit"),
        pytest.param("[" * 100_000, MAX_DEPTH, id="flood-of-arrays"),
        pytest.param('{"a":' * 100_000, MAX_DEPTH * 5, id="flood-of-objects"),
    ],
)
def test_json_that_is_not_strict_is_refused(data: bytes | str, position: int | None) -> None:
    loc = () if position is None else (position,)
    assert refusals(parse_json, data) == [(loc, "json_invalid")]


@pytest.mark.parametrize(
    ("data", "value"),
    [
        pytest.param('"\\ud83d\\ude00"', "\U0001f600", id="surrogate-pair"),
        pytest.param('"\\\\ud800"', "\\ud800", id="escaped-backslash"),
        pytest.param('"\U0001f600"'.encode(), "\U0001f600", id="utf8"),
        pytest.param(' {"b": 1, "a": [-0.5, true, null]}\n', {"b": 1, "a": [-0.5, True, None]}, id="object"),
        pytest.param("1e-999", 0.0, id="underflow"),
        pytest.param(bytearray(b'["a"]'), ["a"], id="bytearray"),
        pytest.param(json.dumps("[{" * 5000), "[{" * 5000, id="brackets-in-a-string"),
        pytest.param(json.dumps(nested(MAX_DEPTH)), nested(MAX_DEPTH), id="deepest"),
        pytest.param(json.dumps([[]] * 5000 + ['"\\[']), [[]] * 5000 + ['"\\['], id="many-arrays"),
    ],
)
def test_strict_json_is_decoded(data: bytes | str, value: Any) -> None:
    assert parse_json(data) == value


def test_depth_cannot_overflow_the_stack_of_a_process_that_raised_its_recursion_limit() -> None:
    found: list[Any] = []
    limit = sys.getrecursionlimit()
    thread = threading.Thread(target=lambda: found.extend(refusals(parse_json, '{"a":[' * 100_000)))
    try:
        sys.setrecursionlimit(1_000_000)
        thread.start()
        thread.join()
    finally:
        sys.setrecursionlimit(limit)
    assert found == [((MAX_DEPTH // 2 * 6,), "json_invalid")]


def test_refused_json_keeps_no_reference_to_the_text() -> None:
    with pytest.raises(RequestError) as info:
        parse_json('{"password": "hunter2" oops}')
    assert info.value.__context__ is None
    assert "hunter2" not in repr(info.value)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60) | st.text(alphabet=st.characters(exclude_categories=()), max_size=60))
def test_any_text_is_decoded_or_refused(data: bytes | str) -> None:
    try:
        parse_json(data)
    except RequestError as error:
        check_errors(error)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(['"', "\\", "[", "]", "{", "}", ",", ":", "a", '"a"', "\\ud800", "1"]), max_size=30))
def test_json_fragments_are_decoded_as_the_standard_library_does_or_refused(parts: list[str]) -> None:
    text = "".join(parts)
    try:
        value = parse_json(text)
    except RequestError as error:
        check_errors(error)
    else:
        assert value == json.loads(text)
