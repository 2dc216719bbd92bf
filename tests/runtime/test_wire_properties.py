"""Whatever is sent, a body is parsed or refused, and a valid one means the same however it comes."""

from __future__ import annotations

import enum
import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from flide.errors import RequestError
from flide.runtime.request import Choice, DecisionRequest, Noul, Score
from flide.runtime.strict_json import parse_json
from flide.runtime.wire import parse_body, parse_request
from tests.refusals import check_errors, nested


class Color(enum.StrEnum):
    RED = "red"


texts = st.text(max_size=8)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3), max_leaves=6
)
structured = texts | st.lists(values, max_size=3) | st.dictionaries(texts, values, max_size=3)
instructions = {"instructions": structured | st.none()}
questions = st.one_of(
    st.fixed_dictionaries(
        {"type": st.just("noul")},
        optional=instructions
        | {"criteria": st.none() | st.dictionaries(st.sampled_from(["true", "false"]), structured | st.none())},
    ),
    st.fixed_dictionaries(
        {
            "type": st.just("choice"),
            "criteria": st.dictionaries(texts, structured | st.none(), min_size=1, max_size=4),
        },
        optional=instructions,
    ),
    st.fixed_dictionaries(
        {"type": st.just("score"), "criteria": st.lists(structured, min_size=1, max_size=4)}, optional=instructions
    ),
)
bodies = st.fixed_dictionaries(
    {"model": texts, "state": structured, "questions": st.dictionaries(texts, questions, min_size=1, max_size=3)},
    optional={"x_extra": values},
)

strange = st.sampled_from(
    [
        float("nan"),
        "\ud800",
        b"x",
        (1, 2),
        {3},
        object(),
        1j,
        Color.RED,
        Noul("q"),
        nested(200),
        "noul",
        "box",
    ]
)
keys = st.sampled_from(
    ["model", "state", "questions", "assets", "type", "instructions", "criteria", "true", "", "\udfff", 1, None, b"k"]
)
junk = st.recursive(
    scalars | strange, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=6)
)
shaped_junk = st.fixed_dictionaries(
    {"model": junk | texts, "state": junk | texts, "questions": junk | st.dictionaries(texts, junk | questions)}
)


@settings(max_examples=100, deadline=None)
@given(bodies)
def test_any_valid_body_parses_to_the_same_request_before_and_after_json(value: dict[str, Any]) -> None:
    request = parse_body(value)
    assert parse_body(parse_json(json.dumps(value))) == request
    assert parse_body(parse_json(json.dumps(value, ensure_ascii=False).encode())) == request
    assert parse_request(request) == request
    assert list(request.questions) == list(value["questions"])


@settings(max_examples=200, deadline=None)
@given(junk | shaped_junk)
def test_any_junk_parses_or_is_refused_with_errors_a_server_can_send(value: Any) -> None:
    for function in (parse_body, parse_request):
        try:
            request = function(value)
        except RequestError as error:
            check_errors(error)
        else:
            json.dumps(request.to_dict(), ensure_ascii=False, allow_nan=False).encode()


@settings(max_examples=100, deadline=None)
@given(junk, st.dictionaries(keys, st.builds(Choice, junk, junk) | st.builds(Score, junk, junk) | junk))
def test_any_request_object_parses_or_is_refused(state: Any, contents: Any) -> None:
    try:
        parse_request(DecisionRequest(state, contents))
    except RequestError as error:
        check_errors(error)
