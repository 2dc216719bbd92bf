"""OpenAI's Decisions: the translator, the route, and OpenAI's own client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.decision import Decision as OpenAIDecision
from starlette.testclient import TestClient

from flide import Engine
from flide.errors import RequestError
from flide.runtime.decision import Decision, Usage, answer_question
from flide.runtime.request import Choice, Noul, Score
from flide.runtime.wire import MAX_LEVELS, MAX_OPTIONS, MAX_VALUES
from flide.serve.app import DecisionServer
from flide.serve.config import ServeConfig
from flide.serve.decisions import is_systemone, translate
from flide.serve.keys import KeyRing
from tests.refusals import check_errors, nested
from tests.serve.running import running

STATE = "The parcel came late and one cup was broken."
PREDICATE = {"type": "predicate", "name": "late", "instructions": "The parcel was late."}
CHOICE = {
    "type": "choice",
    "instructions": "Who should answer?",
    "choices": [{"value": "shipping", "description": "delivery and damage"}, {"value": True}, {"value": "true"}],
}
SCORE = {
    "type": "score",
    "name": "anger",
    "instructions": [{"type": "input_text", "text": "How angry?"}, {"type": "input_json", "data": {"scale": "é"}}],
    "levels": [{"label": "calm"}, {"label": "annoyed", "description": "but polite"}, {"label": "furious"}],
}
BODY: dict[str, Any] = {"model": "jev-latest", "input": STATE, "questions": [PREDICATE, CHOICE, SCORE]}
SYSTEM_ONE: dict[str, Any] = {
    "model": "jev-latest",
    "state": STATE,
    "questions": {
        "late": {"type": "noul", "instructions": "The parcel was late."},
        "team": {
            "type": "choice",
            "instructions": "Who should answer?",
            "criteria": {"shipping": "delivery and damage", "true": None, '"true"': None},
        },
        "anger": {
            "type": "score",
            "instructions": 'How angry?\n{"scale": "é"}',
            "criteria": ["calm", "annoyed: but polite", "furious"],
        },
    },
}


def without(fields: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key != name}


def asking(**changes: Any) -> dict[str, Any]:
    """A body whose only question is a predicate, with other fields."""
    return {**BODY, "questions": [{**PREDICATE, **changes}]}


def saying(*items: Any) -> dict[str, Any]:
    return {**BODY, "input": list(items)}


# ------------------------------------------------------------------------------------------------------ the translator


def test_a_request_is_the_same_request() -> None:
    asked = translate(BODY)
    assert asked.request.model == "jev-latest"
    assert asked.request.state == STATE
    expected = [
        Noul("The parcel was late."),
        Choice("Who should answer?", {"shipping": "delivery and damage", "true": None, '"true"': None}),
        Score('How angry?\n{"scale": "é"}', ["calm", "annoyed: but polite", "furious"]),
    ]
    assert list(asked.request.questions.values()) == expected
    assert asked.names == ["late", None, "anger"]
    assert asked.values == [[], ["shipping", True, "true"], ["calm", "annoyed", "furious"]]


def test_a_decision_is_the_same_decision() -> None:
    asked = translate(BODY)
    probabilities = [[0.75, 0.25], [0.25, 0.25, 0.5], [0.5, 0.25, 0.25]]
    pairs = zip(asked.request.questions.items(), probabilities, strict=True)
    answers = {key: answer_question(question, p) for (key, question), p in pairs}
    assert asked.response(Decision("tiny", answers, Usage(70, 3))) == {
        "model": "tiny",
        "answers": [
            {"type": "predicate", "name": "late", "probability": 0.75},
            {
                "type": "choice",
                "name": None,
                "choice": "true",
                "confidence": pytest.approx(0.25),
                "probabilities": [
                    {"value": "shipping", "probability": 0.25},
                    {"value": True, "probability": 0.25},
                    {"value": "true", "probability": 0.5},
                ],
            },
            {
                "type": "score",
                "name": "anger",
                "score": 0.75,
                "confidence": 0.0,  # max(0, 1 - 0.75 * 1.5)
                "probabilities": [
                    {"value": 0, "label": "calm", "probability": 0.5},
                    {"value": 1, "label": "annoyed", "probability": 0.25},
                    {"value": 2, "label": "furious", "probability": 0.25},
                ],
            },
        ],
        "usage": {
            "input_tokens": 70,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": 3,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 73,
        },
    }


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ([True, False], ["true", "false"]),
        (["true", "false"], ["true", "false"]),
        ([True, "true", "True"], ["true", '"true"', "True"]),
        (["true", True], ['"true"', "true"]),
        (["true", '"true"', True], ['"\\"true\\""', '"true"', "true"]),
        (["", " ", "é"], ["", " ", "é"]),
    ],
)
def test_values_of_any_kind_are_distinct_options(values: list[Any], shown: list[str]) -> None:
    question = {"type": "choice", "instructions": "?", "choices": [{"value": value} for value in values]}
    asked = translate({**BODY, "questions": [question]})
    choice = asked.request.questions["0"]
    assert isinstance(choice, Choice)
    assert list(choice.criteria) == shown
    assert [(type(value), value) for value in asked.values[0]] == [(type(value), value) for value in values]


USER = {"role": "user", "content": "Hello"}


@pytest.mark.parametrize(
    ("given_input", "state"),
    [
        ("Hello", "Hello"),
        ("", ""),
        ([USER], "Hello"),
        ([{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello"}]}], "Hello"),
        (
            [{"role": "user", "content": [{"type": "input_text", "text": "A"}, {"type": "input_json", "data": [{}]}]}],
            "A\n[{}]",
        ),
        ([{"role": "assistant", "content": "Hi"}], [{"role": "assistant", "content": "Hi"}]),
        (
            [USER, {"role": "assistant", "content": [{"type": "output_text", "text": "Hi"}]}],
            [USER, {"role": "assistant", "content": "Hi"}],
        ),
        (
            [USER, {"role": "assistant", "content": [{"type": "refusal", "refusal": "No"}], "phase": None}],
            [USER, {"role": "assistant", "content": "No"}],
        ),
        (
            [{"role": "system", "content": "Be brief"}, {"role": "developer", "content": "x"}, USER],
            [{"role": "system", "content": "Be brief"}, {"role": "developer", "content": "x"}, USER],
        ),
    ],
)
def test_messages_are_the_state(given_input: Any, state: Any) -> None:
    assert translate({**BODY, "input": given_input}).request.state == state


def test_fields_of_openai_that_change_nothing_are_taken() -> None:
    more = {"prompt_cache_key": "k", "prompt_cache_options": {"mode": "explicit"}, "safety_identifier": None, "x": 1}
    assert translate({**BODY, **more}) == translate(BODY)


def test_cache_options_are_those_of_system_one() -> None:
    for options in ({"cache_salt": "a", "checkpoint": 2}, {"checkpoint": False}, {"cache_salt": None}, {"x": 1}, None):
        request = translate({**BODY, "x_flide": options}).request
        given = options or {}
        assert (request.cache_salt, request.checkpoint) == (given.get("cache_salt"), given.get("checkpoint", True))
    assert translate({**BODY, "x_flide": {"checkpoint": 3.0}}).request.checkpoint == 3


@pytest.mark.parametrize(
    ("body", "is_ours"),
    [
        (BODY, False),
        (SYSTEM_ONE, True),
        ({**SYSTEM_ONE, "input": "ignored"}, True),
        ({**BODY, "state": "ignored"}, False),
        ({"state": "x"}, True),
        ({"state": "x", "questions": []}, True),
        ({"questions": {}}, True),
        ({"input": "x", "questions": {}}, False),
        ({}, False),
        ([], False),
        (None, False),
    ],
)
def test_the_body_says_which_shape_it_has(body: Any, is_ours: bool) -> None:
    assert is_systemone(body) is is_ours


def image() -> dict[str, Any]:
    return {"type": "input_image", "image_url": "data:image/png;base64,SECRET"}


def levels(count: int) -> dict[str, Any]:
    return {**SCORE, "levels": [{"label": "SECRET"}] * count}


def choices(count: int) -> dict[str, Any]:
    return {**CHOICE, "choices": [{"value": f"SECRET {i}"} for i in range(count)]}


FAULTS: dict[str, tuple[Any, str | None, str]] = {
    "no object": ([], None, "invalid_type"),
    "null": (None, None, "invalid_type"),
    "no model": (without(BODY, "model"), "model", "missing_required_parameter"),
    "model": ({**BODY, "model": 7}, "model", "invalid_type"),
    "no input": (without(BODY, "input"), "input", "missing_required_parameter"),
    "input null": ({**BODY, "input": None}, "input", "invalid_type"),
    "input object": ({**BODY, "input": {"SECRET": 1}}, "input", "invalid_type"),
    "input empty": ({**BODY, "input": []}, "input", "array_below_min_length"),
    "message": (saying("SECRET"), "input[0]", "invalid_type"),
    "no role": (saying(USER, {"content": "SECRET"}), "input[1].role", "missing_required_parameter"),
    "role": (saying({"role": "SECRET", "content": "x"}), "input[0].role", "invalid_value"),
    "role kind": (saying({"role": ["SECRET"], "content": "x"}), "input[0].role", "invalid_type"),
    "no content": (saying({"role": "user"}), "input[0].content", "missing_required_parameter"),
    "content null": (saying({"role": "user", "content": None}), "input[0].content", "invalid_type"),
    "no parts": (saying({"role": "user", "content": []}), "input[0].content", "array_below_min_length"),
    "part": (saying({"role": "user", "content": ["SECRET"]}), "input[0].content[0]", "invalid_type"),
    "part type": (saying({"role": "user", "content": [{}]}), "input[0].content[0].type", "missing_required_parameter"),
    "image": (saying({"role": "user", "content": [image()]}), "input[0].content[0].type", "unsupported_value"),
    "text": (
        saying({"role": "user", "content": [{"type": "input_text", "text": 7}]}),
        "input[0].content[0].text",
        "invalid_type",
    ),
    "json": (
        saying({"role": "user", "content": [{"type": "input_json", "data": "SECRET"}]}),
        "input[0].content[0].data",
        "invalid_type",
    ),
    "call": (
        saying(USER, {"type": "function_call", "call_id": "SECRET", "name": "f", "arguments": "{}"}),
        "input[1].type",
        "unsupported_value",
    ),
    "output": (
        saying(USER, {"type": "custom_tool_call_output", "call_id": "c", "output": "SECRET"}),
        "input[1].type",
        "unsupported_value",
    ),
    "message type": (saying({**USER, "type": None}), "input[0].type", "unsupported_value"),
    "no questions": (without(BODY, "questions"), "questions", "missing_required_parameter"),
    "questions map": ({**BODY, "questions": {"SECRET": PREDICATE}}, "questions", "invalid_type"),
    "questions empty": ({**BODY, "questions": []}, "questions", "array_below_min_length"),
    "question": ({**BODY, "questions": [PREDICATE, "SECRET"]}, "questions[1]", "invalid_type"),
    "kind": (asking(type="SECRET"), "questions[0].type", "invalid_value"),
    "kind kind": (asking(type={"SECRET": 1}), "questions[0].type", "invalid_type"),
    "noul": (asking(type="noul"), "questions[0].type", "invalid_value"),
    "no kind": ({**BODY, "questions": [{}]}, "questions[0].type", "missing_required_parameter"),
    "name": (asking(name=7), "questions[0].name", "invalid_type"),
    "no instructions": (
        {**BODY, "questions": [without(PREDICATE, "instructions")]},
        "questions[0].instructions",
        "missing_required_parameter",
    ),
    "instructions": (asking(instructions=None), "questions[0].instructions", "invalid_type"),
    "image asked": (asking(instructions=[image()]), "questions[0].instructions[0].type", "unsupported_value"),
    "no choices": (asking(type="choice"), "questions[0].choices", "missing_required_parameter"),
    "choices map": (asking(type="choice", choices={"SECRET": None}), "questions[0].choices", "invalid_type"),
    "0 choices": ({**BODY, "questions": [choices(0)]}, "questions[0].choices", "array_below_min_length"),
    "256 choices": (
        {**BODY, "questions": [PREDICATE, choices(MAX_OPTIONS + 1)]},
        "questions[1].choices",
        "array_above_max_length",
    ),
    "choice": (asking(type="choice", choices=["SECRET"]), "questions[0].choices[0]", "invalid_type"),
    "value": (asking(type="choice", choices=[{"value": 1}]), "questions[0].choices[0].value", "invalid_type"),
    "no value": (asking(type="choice", choices=[{}]), "questions[0].choices[0].value", "missing_required_parameter"),
    "twice": (
        asking(type="choice", choices=[{"value": "SECRET"}, {"value": "SECRET"}]),
        "questions[0].choices",
        "invalid_value",
    ),
    "description": (
        asking(type="choice", choices=[{"value": "a", "description": ["SECRET"]}]),
        "questions[0].choices[0].description",
        "invalid_type",
    ),
    "no levels": (asking(type="score"), "questions[0].levels", "missing_required_parameter"),
    "0 levels": ({**BODY, "questions": [levels(0)]}, "questions[0].levels", "array_below_min_length"),
    "11 levels": ({**BODY, "questions": [levels(MAX_LEVELS + 1)]}, "questions[0].levels", "array_above_max_length"),
    "level": (asking(type="score", levels=["SECRET"]), "questions[0].levels[0]", "invalid_type"),
    "label": (asking(type="score", levels=[{"label": None}]), "questions[0].levels[0].label", "invalid_type"),
    "extras": ({**BODY, "x_flide": "SECRET"}, "x_flide", "invalid_type"),
    "salt": ({**BODY, "x_flide": {"cache_salt": ["SECRET"]}}, "x_flide.cache_salt", "invalid_type"),
    "checkpoint": ({**BODY, "x_flide": {"checkpoint": "SECRET"}}, "x_flide.checkpoint", "invalid_type"),
    "model name": ({**BODY, "model": "SECRET"}, "model", "model_not_found"),
}


@pytest.mark.parametrize(
    "body",
    [
        {**BODY, "x": [0] * MAX_VALUES},
        {**BODY, "questions": [PREDICATE] * (MAX_VALUES // 3)},
        saying({"role": "user", "content": [{"type": "input_json", "data": [[0] * 1000] * 1000}]}),
    ],
    ids=["unknown field", "questions", "json"],
)
def test_bodies_of_too_many_values_are_refused_at_once(body: Any) -> None:
    with pytest.raises(RequestError) as info:
        translate(body)
    assert check_errors(info.value) == [
        {"loc": ["body"], "msg": f"Body should have at most {MAX_VALUES} values", "type": "too_long"}
    ]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FIELDS = ["type", "name", "instructions", "choices", "levels", "value", "label", "description", "role", "content"]
KINDS = ["predicate", "choice", "score", "input_text", "input_json", "message", "user"]
near_values = st.recursive(
    json_values | st.sampled_from(KINDS),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*FIELDS, "text", "data"]), inner, max_size=5)
    ),
    max_leaves=20,
)
near_bodies = st.fixed_dictionaries(
    {"model": st.just("jev-latest")}, optional={"input": near_values, "questions": near_values}
)


@given(json_values | near_bodies | near_values.map(lambda value: {**BODY, "questions": [value]}))
@settings(max_examples=500, deadline=None)
def test_whatever_is_sent_is_translated_or_refused(body: Any) -> None:
    try:
        translate(body)
    except RequestError as error:
        check_errors(error)


# ----------------------------------------------------------------------------------------------------------- the route


@pytest.fixture(scope="module")
def client(engine: Engine) -> Iterator[TestClient]:
    app = DecisionServer(engine, ServeConfig(max_body_bytes=1 << 20)).app()
    with TestClient(app, base_url="http://localhost") as client:
        yield client


def probabilities_of(answer: dict[str, Any]) -> list[float]:
    if answer["type"] in ("noul", "predicate"):
        return [answer.get("noul", answer.get("probability"))]
    given = answer["probabilities"]
    return list(given.values()) if isinstance(given, dict) else [entry["probability"] for entry in given]


def check_same(answers: list[dict[str, Any]], ours: list[dict[str, Any]]) -> None:
    assert len(answers) == len(ours)
    for answer, expected in zip(answers, ours, strict=True):
        assert probabilities_of(answer) == pytest.approx(probabilities_of(expected), abs=1e-6)
        for name in ("confidence", "score"):
            assert answer.get(name) == (pytest.approx(expected[name], abs=1e-5) if name in expected else None)


def test_answers_are_those_of_system_one(client: TestClient) -> None:
    response = client.post("/v1/decisions", json=BODY)
    assert response.status_code == 200
    ours = client.post("/v1/systemone", json=SYSTEM_ONE)
    check_same(response.json()["answers"], list(ours.json()["answers"].values()))
    assert response.json()["model"] == ours.json()["model"]
    assert response.json()["usage"]["input_tokens"] == ours.json()["usage"]["input_tokens"]
    assert response.headers["x-request-id"] == response.headers["x-typesafe-request-id"]
    assert "run;dur=" in response.headers["server-timing"]


def test_a_conversation_is_the_state_of_messages(client: TestClient) -> None:
    messages = [USER, {"role": "assistant", "content": "Hi"}]
    response = client.post("/v1/decisions", json={**BODY, "input": messages})
    ours = client.post("/v1/systemone", json={**SYSTEM_ONE, "state": messages})
    check_same(response.json()["answers"], list(ours.json()["answers"].values()))


def test_other_questions_and_their_order_change_nothing(client: TestClient) -> None:
    answers = client.post("/v1/decisions", json=BODY).json()["answers"]
    turned = client.post("/v1/decisions", json={**BODY, "questions": BODY["questions"][::-1]}).json()["answers"]
    check_same(turned[::-1], answers)
    assert [answer["name"] for answer in turned] == ["anger", None, "late"]


@pytest.mark.parametrize("count", [1, 2, 26, 27, MAX_OPTIONS])
def test_as_many_choices_as_system_one(client: TestClient, count: int) -> None:
    response = client.post("/v1/decisions", json={**BODY, "questions": [choices(count)]})
    (answer,) = response.json()["answers"]
    assert [entry["value"] for entry in answer["probabilities"]] == [f"SECRET {i}" for i in range(count)]
    assert sum(probabilities_of(answer)) == pytest.approx(1)
    if count == 1:
        assert probabilities_of(answer) == [1.0]


@pytest.mark.parametrize("count", [1, 2, MAX_LEVELS])
def test_as_many_levels_as_system_one(client: TestClient, count: int) -> None:
    (answer,) = client.post("/v1/decisions", json={**BODY, "questions": [levels(count)]}).json()["answers"]
    assert [entry["value"] for entry in answer["probabilities"]] == list(range(count))
    assert sum(probabilities_of(answer)) == pytest.approx(1)


def test_a_thousand_questions(client: TestClient) -> None:
    questions = [{**PREDICATE, "name": f"n{i % 7}", "instructions": f"Is it {i}?"} for i in range(1000)]
    response = client.post("/v1/decisions", json={**BODY, "questions": questions})
    assert [answer["name"] for answer in response.json()["answers"]] == [question["name"] for question in questions]


@pytest.mark.parametrize(
    "body", [SYSTEM_ONE, {**SYSTEM_ONE, "questions": {}}, {"state": None}, {**SYSTEM_ONE, "model": "x"}]
)
def test_a_system_one_body_is_answered_as_on_its_own_route(client: TestClient, body: Any) -> None:
    here, there = (client.post(path, json=body) for path in ("/v1/decisions", "/v1/systemone"))
    assert here.status_code == there.status_code
    if here.status_code == 200:
        check_same(list(here.json()["answers"].values()), list(there.json()["answers"].values()))
    else:
        assert here.json() == there.json()


def check_envelope(response: Any, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["x-request-id"]
    assert response.headers["content-type"] == "application/json"
    assert "SECRET" not in response.text
    body = response.json()
    assert list(body) == ["error"]
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert isinstance(error["type"], str)
    return error


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_a_400_that_says_where(client: TestClient, name: str) -> None:
    body, param, code = FAULTS[name]
    error = check_envelope(client.post("/v1/decisions", content=json.dumps(body)), 400)
    assert (error["param"], error["code"], error["type"]) == (param, code, "invalid_request_error")


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (b"", "invalid_json"),
        (b'{"input": "SECRET', "invalid_json"),
        (b'{"input": "SECRET\xff"}', "invalid_json"),
        (b'{"input": "\\ud800SECRET"}', "invalid_json"),
        (b'{"input": NaN}', "invalid_json"),
        (b'{"input": 1, "input": 2}', "invalid_json"),
        (b"[" * 10_000, "invalid_json"),
        (json.dumps({**BODY, "x": nested(200)}).encode(), "invalid_json"),
    ],
)
def test_bad_json_is_a_400(client: TestClient, content: bytes, code: str) -> None:
    error = check_envelope(client.post("/v1/decisions", content=content), 400)
    assert (error["param"], error["code"]) == (None, code)


@given(json_values | near_bodies | near_values.map(lambda value: {**BODY, "questions": [PREDICATE, value]}))
@settings(max_examples=150, deadline=None)
def test_nothing_is_a_server_error(client: TestClient, body: Any) -> None:
    response = client.post("/v1/decisions", content=json.dumps(body))
    assert response.status_code in (200, 400) or is_systemone(body)
    assert response.status_code in (200, 400, 422)
    if response.status_code == 400 and not is_systemone(body):
        check_envelope(response, 400)


def test_too_long_an_input_is_a_400_with_both_numbers(engine: Engine, client: TestClient) -> None:
    limit = engine.format.max_prompt_tokens
    assert limit is not None
    error = check_envelope(client.post("/v1/decisions", json={**BODY, "input": "word " * (limit + 10)}), 400)
    assert (error["param"], error["code"]) == ("questions[0]", "context_length_exceeded")
    assert str(limit) in error["message"]


def test_other_faults_keep_their_status(engine: Engine, client: TestClient) -> None:
    error = check_envelope(client.post("/v1/decisions", content=b"SECRET", headers={"content-type": "text/plain"}), 415)
    assert error["code"] == "unsupported_media_type"
    error = check_envelope(client.post("/v1/decisions", content=b"SECRET" * (1 << 19)), 413)
    assert error["code"] == "request_too_large"
    check_envelope(client.get("/v1/decisions"), 405)
    check_envelope(client.post("/v1/decisions", json=BODY, headers={"host": "elsewhere.example"}), 403)

    few = DecisionServer(engine, ServeConfig(keys=KeyRing({"a": "k"}), max_questions=2, max_per_key=1))
    with TestClient(few.app(), base_url="http://localhost") as keyed:
        for headers in ({}, {"authorization": "Bearer SECRET"}):
            response = keyed.post("/v1/decisions", json=BODY, headers=headers)
            assert check_envelope(response, 401)["type"] == "authentication_error"
            assert response.headers["www-authenticate"] == "Bearer"
        headers = {"authorization": "Bearer k"}
        error = check_envelope(keyed.post("/v1/decisions", json=BODY, headers=headers), 400)
        assert (error["param"], error["code"]) == ("questions", "array_above_max_length")
        few.backend.scheduler._per_key["a"] = 1
        small = {**BODY, "questions": [PREDICATE]}
        response = keyed.post("/v1/decisions", json=small, headers=headers)
        assert check_envelope(response, 429)["type"] == "rate_limit_error"
        assert 0 < int(response.headers["retry-after"]) < 30
        del few.backend.scheduler._per_key["a"]
        few.backend.scheduler.waiting = 1 << 30
        assert (
            check_envelope(keyed.post("/v1/decisions", json=small, headers=headers), 529)["type"] == "overloaded_error"
        )
        few.backend.scheduler.waiting, few.backend.scheduler._draining = 0, True
        assert check_envelope(keyed.post("/v1/decisions", json=small, headers=headers), 503)["type"] == "server_error"


# ------------------------------------------------------------------------------------------------------ OpenAI's client


@pytest.fixture(scope="module")
def url(engine: Engine) -> Iterator[str]:
    with running(engine, keys=KeyRing({"tests": "secret"})) as url:
        yield url


def test_the_openai_client_reads_every_answer(url: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0) as client:
        raw = client.decisions.with_raw_response.create(**BODY)
        messages = [USER, {"role": "assistant", "content": [{"type": "output_text", "text": "Hi"}]}]
        client.decisions.create(**{**BODY, "input": messages}, prompt_cache_key="k", safety_identifier="s")
    assert raw.headers["x-request-id"]
    decision = raw.parse()
    OpenAIDecision.model_validate(decision.model_dump(), strict=True)  # the client itself checks nothing
    predicate, choice, score = decision.answers
    assert predicate.type == "predicate"
    assert predicate.name == "late"
    assert 0 < predicate.probability < 1
    assert choice.type == "choice"
    assert choice.name is None
    assert [type(entry.value) for entry in choice.probabilities] == [str, bool, str]
    best = max(choice.probabilities, key=lambda entry: entry.probability)
    assert (type(choice.choice), choice.choice) == (type(best.value), best.value)
    assert score.type == "score"
    assert [(entry.value, entry.label) for entry in score.probabilities] == [
        (0, "calm"),
        (1, "annoyed"),
        (2, "furious"),
    ]
    assert score.score == pytest.approx(sum(entry.value * entry.probability for entry in score.probabilities))
    assert decision.usage.total_tokens == decision.usage.input_tokens + decision.usage.output_tokens


def test_the_openai_client_understands_refusals(url: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError) as bad:
            client.decisions.create(**{**BODY, "questions": [choices(MAX_OPTIONS + 1)]})
        assert (bad.value.param, bad.value.code) == ("questions[0].choices", "array_above_max_length")
        assert bad.value.type == "invalid_request_error"
        assert bad.value.request_id
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="wrong").decisions.create(**BODY)
