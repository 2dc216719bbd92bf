"""The contract of System One bodies, point by point."""

from __future__ import annotations

import copy
import enum
import json
import types
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest

from flide.errors import RequestError
from flide.runtime.request import Choice, DecisionRequest, Noul, Score
from flide.runtime.strict_json import MAX_DEPTH, parse_json
from flide.runtime.wire import MAX_CHECKPOINT, MAX_ERRORS, MAX_LEVELS, MAX_OPTIONS, MAX_SALT, parse_body, parse_request
from tests.refusals import check_errors, nested, refusals

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
        pytest.param(body(x_flide="fast"), [(("x_flide",), "dict_type")], id="extras-string"),
        pytest.param(body(x_flide=[]), [(("x_flide",), "dict_type")], id="extras-array"),
        *(
            pytest.param(body(x_flide={"cache_salt": salt}), [(("x_flide", "cache_salt"), "string_type")])
            for salt in ("", "x" * (MAX_SALT + 1), 7, True, ["a"], {"a": "b"})
        ),
        *(
            pytest.param(body(x_flide={"checkpoint": place}), [(("x_flide", "checkpoint"), "int_type")])
            for place in (-1, MAX_CHECKPOINT + 1, 1.5, -1.0, "end", [3], {})
        ),
        pytest.param(
            body(x_flide={"checkpoint": "a", "cache_salt": 1}),
            [(("x_flide", "cache_salt"), "string_type"), (("x_flide", "checkpoint"), "int_type")],
            id="extras-both",
        ),
        pytest.param(
            body(x_flide={"cache_salt": "\ud800"}), [(("x_flide", "cache_salt"), "string_unicode")], id="salt"
        ),
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
        pytest.param(body(state=[1, float("nan")]), [(("state",), "finite_number")], id="nan"),
        pytest.param(body(state={"a": -float("inf")}), [(("state",), "finite_number")], id="infinity"),
        pytest.param(body(state=[10**5000]), [(("state",), "int_parsing_size")], id="int-too-long"),
        pytest.param(body(state=["\ud800"]), [(("state",), "string_unicode")], id="surrogate"),
        pytest.param(body(state={"\udc00": 1}), [(("state",), "string_unicode")], id="surrogate-key"),
        pytest.param(body(state={1: 1}), [(("state",), "invalid_key")], id="number-key"),
        pytest.param(body(questions={1: {"type": "noul"}}), [(("questions",), "invalid_key")], id="number-id"),
        pytest.param(body(state=[b""]), [(("state",), "value_error")], id="bytes"),
        pytest.param(body(state=[{1}]), [(("state",), "value_error")], id="set"),
        pytest.param(body(state=[np.float64(1)]), [(("state",), "value_error")], id="numpy-float"),
        pytest.param(body(state=[np.int64(1)]), [(("state",), "value_error")], id="numpy-int"),
        pytest.param(body(state=np.zeros(2)), [(("state",), "value_error")], id="numpy-array"),
        pytest.param(body(state=nested(MAX_DEPTH)), [(("state",), "value_error")], id="too-deep"),
        pytest.param(body(x_extra=nested(5000)), [(("x_extra",), "value_error")], id="much-too-deep"),
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
        (("state",), "finite_number"),
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


def test_places_end_at_the_field_that_holds_the_users_content() -> None:
    wrong = {"my secret": [{"name": float("nan")}], b"k": 1}
    questions = {
        "q": {"type": "choice", "instructions": wrong, "criteria": {"option": wrong, "other": None}},
        "s": {"type": "score", "instructions": ["?"], "criteria": ["low", wrong], "note": wrong},
        "n": {"type": "noul", "criteria": {"true": wrong}},
    }
    with pytest.raises(RequestError) as info:
        parse_body(body(questions=questions, state=wrong, x_trace=wrong))
    places = {tuple(entry["loc"][1:]) for entry in check_errors(info.value)}
    assert places == {
        ("state",),
        ("x_trace",),
        ("questions", "q", "instructions"),
        ("questions", "q", "criteria", "option"),
        ("questions", "s", "criteria", 1),
        ("questions", "s", "note"),
        ("questions", "n", "criteria", "true"),
    }
    assert "secret" not in str(info.value)


def test_many_problems_in_one_place_are_one_entry() -> None:
    assert refusals(parse_body, body(state=[float("nan")] * 1000)) == [(("state",), "finite_number")]


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
        pytest.param(body(x_flide={"cache_salt": "team \u00e9"}), id="salt"),
        pytest.param(body(x_flide={"cache_salt": "x" * MAX_SALT, "checkpoint": False}), id="salt-and-checkpoint"),
        pytest.param(body(x_flide={"checkpoint": 0}), id="checkpoint-0"),
        pytest.param(body(x_flide={"checkpoint": MAX_CHECKPOINT}), id="checkpoint-number"),
        pytest.param(body(state=nested(MAX_DEPTH - 1)), id="deepest-arrays"),
        pytest.param(body(state=nested(MAX_DEPTH - 1, kind=dict)), id="deepest-objects"),
    ],
)
def test_body_within_the_contract_survives_unchanged(value: dict[str, Any]) -> None:
    request = parse_body(value)
    assert request.to_dict() == value
    assert parse_request(request) == request
    assert parse_body(parse_json(json.dumps(value))) == request


def test_a_checkpoint_is_a_whole_number_however_it_is_written() -> None:
    found = parse_body(body(x_flide={"checkpoint": 3.0})).checkpoint
    assert (found, type(found)) == (3, int)


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(body(seed=1, x_trace_id={"a": [1]}), id="unknown-fields"),
        pytest.param(body({"type": "noul", "weight": 2}), id="unknown-question-fields"),
        pytest.param(body(x_flide=None), id="null-extras"),
        pytest.param(body(x_flide={"reused_tokens": 7, "cache_salt": None, "checkpoint": None}), id="other-extras"),
        pytest.param(body(x_flide={"checkpoint": True}), id="checkpoint-as-it-is"),
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


def test_cache_options_of_objects_are_those_of_bodies() -> None:
    for salt, place in (("a", True), (None, False), ("a", 3), (None, 0)):
        request = DecisionRequest("s", {"q": Noul()}, cache_salt=salt, checkpoint=place)
        parsed = parse_body(request.to_dict())
        assert parsed == parse_request(request) == parse_request(parsed)
        assert (parsed.cache_salt, parsed.checkpoint) == (salt, place)
        assert type(parsed.checkpoint) is type(place)
    for options in ({"cache_salt": ""}, {"cache_salt": "\ud800"}, {"checkpoint": None}, {"checkpoint": -1}):
        (found,) = refusals(parse_request, DecisionRequest("s", {"q": Noul()}, **options))
        assert found[0] == tuple(options)


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
