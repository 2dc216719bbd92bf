from __future__ import annotations

import copy
import enum
import json
import sys
import threading
import types
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flide.errors import RequestError
from flide.runtime.request import Choice, DecisionRequest, Noul, Score
from flide.runtime.wire import (
    MAX_DEPTH,
    MAX_ERRORS,
    MAX_LEVELS,
    MAX_OPTIONS,
    parse_body,
    parse_json,
    parse_request,
)

DIGITS = "9" * 5000
MISSING = object()


class Color(enum.StrEnum):
    RED = "red"


def body(question: Any = None, **fields: Any) -> dict[str, Any]:
    question = {"type": "noul"} if question is None else question
    merged = {"model": "jev-latest", "state": "s", "questions": {"q": question}, **fields}
    return {key: value for key, value in merged.items() if value is not MISSING}


def choice(criteria: Any, **fields: Any) -> dict[str, Any]:
    return body({"type": "choice", "criteria": criteria, **fields})


def score(criteria: Any) -> dict[str, Any]:
    return body({"type": "score", "criteria": criteria})


def noul(criteria: Any) -> dict[str, Any]:
    return body({"type": "noul", "criteria": criteria})


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


# --- parse_json


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


# --- parse_body: what is refused


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        pytest.param([], [((), "dict_type")], id="body-array"),
        pytest.param(None, [((), "dict_type")], id="body-null"),
        pytest.param(b"{}", [((), "value_error")], id="body-bytes"),
        pytest.param(
            {}, [(("model",), "missing"), (("state",), "missing"), (("questions",), "missing")], id="body-empty"
        ),
        pytest.param(body(model=1), [(("model",), "string_type")], id="model-number"),
        pytest.param(body(state=None), [(("state",), "string_type")], id="state-null"),
        pytest.param(body(state=1), [(("state",), "string_type")], id="state-number"),
        pytest.param(body(state=True), [(("state",), "string_type")], id="state-bool"),
        pytest.param(body(state=b"s"), [(("state",), "value_error")], id="state-bytes"),
        pytest.param(body(questions={}), [(("questions",), "too_short")], id="no-questions"),
        pytest.param(body(questions=[{"type": "noul"}]), [(("questions",), "dict_type")], id="questions-array"),
        pytest.param(body(assets={"a": {"type": "image"}}), [(("assets",), "value_error")], id="assets"),
        pytest.param(body("noul"), [(("questions", "q"), "dict_type")], id="question-string"),
        pytest.param(body({}), [(("questions", "q"), "union_tag_not_found")], id="no-type"),
        pytest.param(body({"type": "rank"}), [(("questions", "q"), "union_tag_invalid")], id="unknown-type"),
        pytest.param(body({"type": True}), [(("questions", "q"), "union_tag_invalid")], id="type-bool"),
        pytest.param(body({"type": ["noul"]}), [(("questions", "q"), "union_tag_invalid")], id="type-array"),
        pytest.param(body({"type": "box"}), [(("questions", "q"), "union_tag_invalid")], id="box"),
        pytest.param(
            body({"type": "noul", "instructions": 3}),
            [(("questions", "q", "instructions"), "string_type")],
            id="instructions-number",
        ),
        pytest.param(
            body({"type": "choice"}), [(("questions", "q", "criteria"), "missing")], id="choice-without-criteria"
        ),
        pytest.param(choice(None), [(("questions", "q", "criteria"), "dict_type")], id="choice-null"),
        pytest.param(choice(["a", "b"]), [(("questions", "q", "criteria"), "dict_type")], id="choice-array"),
        pytest.param(choice({}), [(("questions", "q", "criteria"), "too_short")], id="no-options"),
        pytest.param(
            choice(dict.fromkeys(map(str, range(MAX_OPTIONS + 1)))),
            [(("questions", "q", "criteria"), "too_long")],
            id="256-options",
        ),
        pytest.param(choice({"a": 1}), [(("questions", "q", "criteria", "a"), "string_type")], id="option-number"),
        pytest.param(
            body({"type": "score"}), [(("questions", "q", "criteria"), "missing")], id="score-without-criteria"
        ),
        pytest.param(score({"0": "a", "1": "b"}), [(("questions", "q", "criteria"), "list_type")], id="score-map"),
        pytest.param(score([]), [(("questions", "q", "criteria"), "too_short")], id="no-levels"),
        pytest.param(
            score(["a"] * (MAX_LEVELS + 1)), [(("questions", "q", "criteria"), "too_long")], id="eleven-levels"
        ),
        pytest.param(score(["a", None]), [(("questions", "q", "criteria", 1), "string_type")], id="level-null"),
        pytest.param(score(["a", 2]), [(("questions", "q", "criteria", 1), "string_type")], id="level-number"),
        pytest.param(noul(["yes"]), [(("questions", "q", "criteria"), "dict_type")], id="noul-array"),
        pytest.param(noul({"yes": "a"}), [(("questions", "q", "criteria", "yes"), "extra_forbidden")], id="noul-key"),
        pytest.param(noul({"true": 1}), [(("questions", "q", "criteria", "true"), "string_type")], id="noul-number"),
        pytest.param(body(state=[1, float("nan")]), [(("state", 1), "finite_number")], id="nan"),
        pytest.param(body(state={"a": -float("inf")}), [(("state", "a"), "finite_number")], id="infinity"),
        pytest.param(body(state=[10**5000]), [(("state", 0), "int_parsing_size")], id="int-too-long"),
        pytest.param(body(state=["\ud800"]), [(("state", 0), "string_unicode")], id="surrogate"),
        pytest.param(body(state={"\udc00": 1}), [(("state",), "string_unicode")], id="surrogate-key"),
        pytest.param(body(state={1: 1}), [(("state",), "invalid_key")], id="number-key"),
        pytest.param(body(questions={1: {"type": "noul"}}), [(("questions",), "invalid_key")], id="number-id"),
        pytest.param(body(state=[b""]), [(("state", 0), "value_error")], id="bytes"),
        pytest.param(body(state=[{1}]), [(("state", 0), "value_error")], id="set"),
        pytest.param(body(state=[np.float64(1)]), [(("state", 0), "value_error")], id="numpy-float"),
        pytest.param(body(state=[np.int64(1)]), [(("state", 0), "value_error")], id="numpy-int"),
        pytest.param(body(state=np.zeros(2)), [(("state",), "value_error")], id="numpy-array"),
        pytest.param(body(state=nested(MAX_DEPTH)), [(("state", 0, 0, 0), "value_error")], id="too-deep"),
        pytest.param(body(x_extra=nested(5000)), [(("x_extra", 0, 0, 0), "value_error")], id="much-too-deep"),
        pytest.param(body(x_extra=object()), [(("x_extra",), "value_error")], id="unknown-field-not-json"),
    ],
)
def test_body_outside_the_contract_is_refused(value: Any, expected: list[Any]) -> None:
    assert refusals(parse_body, value) == expected


def test_all_problems_are_reported_together_in_order() -> None:
    value = {
        "state": [float("nan")],
        "questions": {"a": {"type": "choice", "criteria": {}}, "b": {"type": "score", "criteria": [None, "x", 1]}},
    }
    assert refusals(parse_body, value) == [
        (("state", 0), "finite_number"),
        (("model",), "missing"),
        (("questions", "a", "criteria"), "too_short"),
        (("questions", "b", "criteria", 0), "string_type"),
        (("questions", "b", "criteria", 2), "string_type"),
    ]


def test_only_the_first_problems_are_reported() -> None:
    found = refusals(parse_body, body(questions={f"q{i}": {} for i in range(1000)}))
    assert found == [(("questions", f"q{i}"), "union_tag_not_found") for i in range(MAX_ERRORS)]


def test_cyclic_values_are_refused() -> None:
    line: list[Any] = []
    line.append(line)
    tree: dict[str, Any] = {}
    tree.update({str(i): tree for i in range(10)})
    for value in (line, tree):
        assert [kind for _, kind in refusals(parse_body, body(state=value))] == ["value_error"]


def test_few_shared_objects_cannot_stand_for_billions_of_values() -> None:
    value: Any = ["x"] * 1000
    for _ in range(4):
        value = [value] * 1000
    assert [kind for _, kind in refusals(parse_body, body(state=value))] == ["too_long"]


def test_errors_do_not_repeat_values_and_shorten_names() -> None:
    secret = "hunter2"
    long_id = "q" * 100_000
    value = {
        "model": [secret],
        "state": {secret.encode(): 1},
        "questions": {long_id: {"type": secret}, "c": {"type": "choice", "criteria": [secret]}},
    }
    with pytest.raises(RequestError) as info:
        parse_body(value)
    errors = check_errors(info.value)
    assert len(errors) == 4
    assert secret not in json.dumps(errors)
    assert len(json.dumps(errors)) < 2000


# --- parse_body: what is accepted


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(body(state=[]), id="state-array"),
        pytest.param(body(state={"a": [1, None, True, 0.5]}), id="state-object"),
        pytest.param(body(state=""), id="state-empty"),
        pytest.param(body(questions={"": {"type": "noul"}}), id="empty-id"),
        pytest.param(body({"type": "noul", "instructions": ["a", {"b": 1}]}), id="structured-instructions"),
        pytest.param(noul({}), id="noul-no-side"),
        pytest.param(noul({"true": None, "false": {"a": 1}}), id="noul-two-sides"),
        pytest.param(choice({"only": None}), id="one-option"),
        pytest.param(choice(dict.fromkeys(map(str, range(MAX_OPTIONS)))), id="255-options"),
        pytest.param(score(["a"]), id="one-level"),
        pytest.param(score([["a"], {"b": None}, ""]), id="structured-levels"),
        pytest.param(body(state=nested(MAX_DEPTH - 1)), id="deepest-arrays"),
        pytest.param(body(state=nested(MAX_DEPTH - 1, kind=dict)), id="deepest-objects"),
    ],
)
def test_body_within_the_contract_survives_unchanged(value: dict[str, Any]) -> None:
    request = parse_body(value)
    assert request.to_dict() == value
    assert parse_request(request) == request
    assert parse_body(parse_json(json.dumps(value))) == request


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(body(seed=1, x_trace_id={"a": [1]}), id="unknown-fields"),
        pytest.param(body({"type": "noul", "weight": 2}), id="unknown-question-fields"),
        pytest.param(body(assets={}), id="empty-assets"),
        pytest.param(body(assets=None), id="null-assets"),
        pytest.param(body({"type": "noul", "instructions": None, "criteria": None}), id="nulls"),
        pytest.param(types.MappingProxyType(body()), id="mapping"),
    ],
)
def test_what_means_nothing_is_ignored(value: Any) -> None:
    assert parse_body(value) == parse_body(body())


def test_python_types_become_plain_json_types() -> None:
    options = OrderedDict.fromkeys(["b", "a"])
    options.move_to_end("b")
    state = ("a", {"k": (1, Color.RED), Color.RED: None})
    request = parse_body(choice(options, instructions=Color.RED) | {"state": state})
    assert request.state == ["a", {"k": [1, "red"], "red": None}]
    assert type(request.state[1]["k"][1]) is str
    assert [type(key) for key in request.state[1]] == [str, str]
    assert list(request.questions["q"].criteria) == ["a", "b"]
    assert type(request.questions["q"].instructions) is str


def test_order_of_questions_options_and_keys_is_kept() -> None:
    names = ["z", "10", "9", "a", "\U0001f600", ""]
    questions = {name: {"type": "choice", "criteria": dict.fromkeys(names)} for name in names}
    request = parse_body(parse_json(json.dumps(body(questions=questions, state=dict.fromkeys(names, 1)))))
    assert list(request.questions) == names
    assert list(request.state) == names
    assert all(list(question.criteria) == names for question in request.questions.values())


def test_result_does_not_change_with_the_body() -> None:
    value = choice({"a": ["x"], "b": None}, instructions={"k": ["v"]}) | {"state": {"s": [{"t": 1}]}}
    request = parse_body(value)
    before = copy.deepcopy(request)
    value["state"]["s"][0]["t"] = 2
    value["questions"]["q"]["instructions"]["k"].append("w")
    value["questions"]["q"]["criteria"]["a"].clear()
    value["questions"]["q"]["criteria"]["c"] = None
    value["questions"]["p"] = {}
    assert request == before


# --- parse_request


def test_objects_and_bodies_parse_to_the_same_request() -> None:
    request = DecisionRequest(
        state={"mail": "late again"},
        questions={
            "n": Noul("Is it late?", {"true": "late"}),
            "c": Choice("Who?", ["a", "b"]),
            "d": Choice(criteria={"a": "first", "b": None}),
            "s": Score(["How bad?"], ("fine", {"text": "bad"})),
        },
    )
    parsed = parse_request(request)
    assert parsed == parse_request(request.to_dict()) == parse_request(json.loads(json.dumps(request.to_dict())))
    assert parsed.to_dict() == request.to_dict()
    assert parsed.model == "jev-latest"
    assert parsed.questions["c"] == Choice("Who?", {"a": None, "b": None})


@pytest.mark.parametrize(
    ("question", "kind"),
    [
        pytest.param(Choice("q"), "too_short", id="no-options"),
        pytest.param(Choice("q", ["a", "a"]), "dict_type", id="repeated-option"),
        pytest.param(Choice("q", "ab"), "dict_type", id="options-in-a-string"),
        pytest.param(Choice("q", [["a"]]), "dict_type", id="option-not-a-string"),
        pytest.param(Choice("q", 3), "dict_type", id="options-number"),
        pytest.param(Score("q"), "too_short", id="no-levels"),
        pytest.param(Score("q", "ab"), "list_type", id="levels-in-a-string"),
        pytest.param(Score("q", {"0": "a"}), "list_type", id="levels-in-a-map"),
        pytest.param(Noul("q", "yes"), "dict_type", id="sides-in-a-string"),
    ],
)
def test_wrong_question_objects_are_refused_by_the_parser_only(question: Any, kind: str) -> None:
    found = refusals(parse_request, DecisionRequest("s", {"q": question}))
    assert found == [(("questions", "q", "criteria"), kind)]


@pytest.mark.parametrize(
    ("value", "loc"),
    [
        pytest.param("text", (), id="string"),
        pytest.param(None, (), id="none"),
        pytest.param(Noul("q"), (), id="bare-question"),
        pytest.param(DecisionRequest("s", {"q": {"type": "noul"}}), ("questions", "q"), id="dict-question"),
        pytest.param(DecisionRequest("s", {"q": Noul}), ("questions", "q"), id="class"),
        pytest.param(DecisionRequest("s", {7: None}), ("questions", 7), id="number-id"),
        pytest.param(DecisionRequest("s", {"\ud800": None}), ("questions", "?"), id="surrogate-id"),
        pytest.param(DecisionRequest("s", {b"x": None}), ("questions", "<bytes>"), id="bytes-id"),
        pytest.param(DecisionRequest("s", [Noul("q")]), ("questions",), id="list"),
        pytest.param(DecisionRequest(None, {"q": Noul("q")}), ("state",), id="no-state"),
    ],
)
def test_foreign_objects_are_refused(value: Any, loc: tuple[Any, ...]) -> None:
    assert [found for found, _ in refusals(parse_request, value)] == [loc]


# --- properties

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
