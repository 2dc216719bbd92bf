"""The clients: what they send, what they make of responses, and that the answers are the engine's."""

from __future__ import annotations

import asyncio
import email.utils
import inspect
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
import zstandard

from flide import (
    AsyncClient,
    Choice,
    Client,
    Decision,
    DecisionRequest,
    Engine,
    Noul,
    RequestError,
    Score,
    ServerError,
    Usage,
)
from flide.runtime.decision import ChoiceAnswer, NoulAnswer, ScoreAnswer
from flide.serve.app import DecisionServer
from flide.serve.config import ServeConfig
from flide.serve.keys import KeyRing
from tests.serve.running import running

REQUEST = DecisionRequest(
    "The box was crushed.",
    {
        "late": Noul("Was it late?"),
        "team": Choice("Who?", {"shipping": "damage", "billing": None}),
        "anger": Score("How angry?", ["calm", {"much": True}, "furious"]),
    },
)
ANSWER: dict[str, Any] = {
    "model": "tiny",
    "answers": {
        "anger": {
            "type": "score",
            "score": 1,
            "legend": {"0": "calm", "1": '{"much": true}', "2": "furious"},
            "probabilities": {"0": 0, "1": 1, "2": 0.0},
            "confidence": 1,
        },
        "team": {
            "type": "choice",
            "choice": "billing",
            "probabilities": {"billing": 0.75, "shipping": 0.25},
            "confidence": 0.5,
            "x": 1,
        },
        "late": {"type": "noul", "noul": 0.5},
    },
    "usage": {"input_tokens": 9, "output_tokens": 3},
    "x_flide": {"model_hash": "abc", "shared_tokens": 5, "reused_tokens": 4},
}
EXPECTED = Decision(
    "tiny",
    {
        "late": NoulAnswer(0.5),
        "team": ChoiceAnswer("billing", {"shipping": 0.25, "billing": 0.75}, 0.5),
        "anger": ScoreAnswer(
            1.0, {"0": "calm", "1": {"much": True}, "2": "furious"}, {"0": 0.0, "1": 1.0, "2": 0.0}, 1.0
        ),
    },
    Usage(9, 3, shared_tokens=5, reused_tokens=4),
)

Handler = Callable[[httpx.Request], httpx.Response]


def decide(
    handler: Handler, requests: Any, *, kind: str = "sync", return_exceptions: bool = False, **options: Any
) -> Any:
    """What a client of either kind makes of a made-up server."""
    if kind == "sync":
        with Client(transport=httpx.MockTransport(handler), **options) as client:
            return client.decide(requests, return_exceptions=return_exceptions)

    async def ask() -> Any:
        async with AsyncClient(transport=httpx.MockTransport(handler), **options) as client:
            return await client.decide(requests, return_exceptions=return_exceptions)

    return asyncio.run(ask())


def answering(*responses: httpx.Response | Exception) -> tuple[Handler, list[httpx.Request]]:
    """A server that gives these responses in turn, and what it was asked."""
    seen: list[httpx.Request] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        response = responses[min(len(seen), len(responses)) - 1]
        if isinstance(response, Exception):
            raise response
        return httpx.Response(response.status_code, headers=response.headers, content=response.content)

    return handler, seen


kinds = pytest.mark.parametrize("kind", ["sync", "async"])
OK = httpx.Response(200, json=ANSWER)
SOON = {"retry-after-ms": "1"}


@kinds
def test_a_request_is_sent_and_its_answer_read(kind: str) -> None:
    handler, seen = answering(OK)
    (decision,) = decide(handler, [REQUEST], kind=kind, base_url="http://server/prefix/", api_key="secret")
    assert decision == EXPECTED
    assert list(decision.answers) == list(REQUEST.questions)
    (request,) = seen
    assert (request.method, str(request.url)) == ("POST", "http://server/prefix/v1/systemone")
    assert request.headers["authorization"] == "Bearer secret"
    assert request.headers["content-type"] == "application/json"
    assert request.headers["user-agent"].startswith("flide/")
    assert json.loads(request.content) == REQUEST.to_dict()


def test_a_body_is_a_request_too_and_no_key_is_none() -> None:
    handler, seen = answering(OK)
    assert decide(handler, [REQUEST.to_dict()]) == [EXPECTED]
    assert "authorization" not in seen[0].headers
    assert decide(handler, []) == []
    assert len(seen) == 1


def test_cache_options_are_sent_and_what_was_reused_is_read() -> None:
    extras = {"shared_tokens": 5, "reused_tokens": 7}
    handler, seen = answering(httpx.Response(200, json={**ANSWER, "x_flide": extras}))
    (decision,) = decide(handler, [replace(REQUEST, cache_salt="team", checkpoint=3)])
    assert json.loads(seen[0].content)["x_flide"] == {"cache_salt": "team", "checkpoint": 3}
    assert (decision.usage.shared_tokens, decision.usage.reused_tokens) == (5, 7)


@pytest.mark.parametrize(
    ("size", "compress", "is_packed"), [(100, True, False), (5000, True, True), (5000, False, False)]
)
def test_long_bodies_are_packed(size: int, compress: bool, is_packed: bool) -> None:
    handler, seen = answering(OK)
    request = DecisionRequest("é" * size, REQUEST.questions)
    decide(handler, [request], compress=compress)
    assert seen[0].headers.get("content-encoding") == ("zstd" if is_packed else None)
    content = zstandard.decompress(seen[0].content) if is_packed else seen[0].content
    assert json.loads(content) == request.to_dict()
    assert not is_packed or len(seen[0].content) < size


def test_nothing_is_packed_without_zstandard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flide.client.zstandard", None)
    handler, seen = answering(OK)
    decide(handler, [DecisionRequest("x" * 5000, REQUEST.questions)])
    assert "content-encoding" not in seen[0].headers


@kinds
def test_order_is_kept_and_requests_run_side_by_side(kind: str) -> None:
    at_once, most, lock = 0, 0, threading.Lock()

    def entered(by: int) -> None:
        nonlocal at_once, most
        with lock:
            at_once += by
            most = max(most, at_once)

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json={**ANSWER, "model": json.loads(request.content)["state"]})

    def handler(request: httpx.Request) -> httpx.Response:
        entered(1)
        time.sleep(0.02 if json.loads(request.content)["state"] == "0" else 0.005)
        entered(-1)
        return answer(request)

    async def slow(request: httpx.Request) -> httpx.Response:
        entered(1)
        await asyncio.sleep(0.01)
        entered(-1)
        return answer(request)

    requests = [DecisionRequest(str(index), REQUEST.questions) for index in range(12)]
    chosen: Any = handler if kind == "sync" else slow
    decisions = decide(chosen, requests, kind=kind, max_connections=3)
    assert [decision.model for decision in decisions] == [str(index) for index in range(12)]
    assert 2 <= most <= 3


BUSY = [408, 429, 503, 529]


@kinds
@pytest.mark.parametrize("status", BUSY)
def test_a_busy_server_is_asked_again(kind: str, status: int) -> None:
    handler, seen = answering(httpx.Response(status, headers=SOON), httpx.Response(status, headers=SOON), OK)
    assert decide(handler, [REQUEST], kind=kind) == [EXPECTED]
    assert len(seen) == 3
    assert len({request.content for request in seen}) == 1


@kinds
def test_it_is_not_asked_for_ever(kind: str) -> None:
    detail = {"detail": {"error_type": "overloaded_error", "message": "Too much is waiting already."}}
    handler, seen = answering(httpx.Response(529, headers={**SOON, "x-typesafe-request-id": "req_1"}, json=detail))
    with pytest.raises(ServerError, match="529: Too much is waiting already.") as info:
        decide(handler, [REQUEST], kind=kind, max_retries=3)
    assert (info.value.status, info.value.kind, info.value.request_id) == (529, "overloaded_error", "req_1")
    assert len(seen) == 4


@pytest.mark.parametrize(
    ("headers", "least", "most"),
    [
        ({"retry-after": "0.2"}, 0.2, 0.4),
        ({"retry-after-ms": "200", "retry-after": "20"}, 0.2, 0.4),
        ({"retry-after": "0"}, 0.0, 0.1),
        ({}, 0.35, 0.7),
        ({"retry-after": "soon"}, 0.35, 0.7),
        ({"retry-after": "nan"}, 0.35, 0.7),
        ({"retry-after": "-5"}, 0.35, 0.7),
        ({"retry-after": email.utils.formatdate(0, usegmt=True)}, 0.0, 0.1),
    ],
)
def test_it_is_asked_when_it_says(headers: dict[str, str], least: float, most: float) -> None:
    handler, seen = answering(httpx.Response(503, headers=headers), OK)
    began = time.monotonic()
    assert decide(handler, [REQUEST]) == [EXPECTED]
    assert least <= time.monotonic() - began < most + 10  # room for a busy machine
    assert len(seen) == 2


@pytest.mark.parametrize(
    "given", ["3600", "inf", email.utils.formatdate(time.time() + 3600, usegmt=True)], ids=["seconds", "inf", "date"]
)
def test_a_long_wait_is_left_to_the_caller(given: str) -> None:
    handler, seen = answering(httpx.Response(429, headers={"retry-after": given}), OK)
    with pytest.raises(ServerError, match="429"):
        decide(handler, [REQUEST])
    assert len(seen) == 1


@kinds
@pytest.mark.parametrize(
    ("error", "is_retried"),
    [
        (httpx.ConnectError("refused"), True),
        (httpx.ConnectTimeout("slow"), True),
        (httpx.ReadError("reset"), True),
        (httpx.RemoteProtocolError("closed"), True),
        (httpx.ReadTimeout("slow"), False),
        (httpx.UnsupportedProtocol("gopher"), False),
    ],
)
def test_a_failed_connection_is_tried_again_and_a_timeout_is_not(
    monkeypatch: pytest.MonkeyPatch, kind: str, error: Exception, is_retried: bool
) -> None:
    monkeypatch.setattr("flide.client.BACKOFF", 0.001)
    handler, seen = answering(error, OK)
    if is_retried:
        assert decide(handler, [REQUEST], kind=kind) == [EXPECTED]
    else:
        with pytest.raises(ServerError, match=type(error).__name__) as info:
            decide(handler, [REQUEST], kind=kind)
        assert info.value.status is None
        assert info.value.__cause__ is error
    assert len(seen) == 1 + is_retried


@kinds
def test_nobody_listens(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr("flide.client.BACKOFF", 0.001)
    url = "http://127.0.0.1:9"

    def ask() -> Any:
        return Client(url).decide([REQUEST]) if kind == "sync" else asyncio.run(AsyncClient(url).decide([REQUEST]))

    with pytest.raises(ServerError, match="no answer from the server"):
        ask()


ENTRY = {
    "loc": ["body", "questions", "late"],
    "msg": "the prompt has 9 tokens; at most 8 are allowed",
    "type": "too_long",
}


@kinds
def test_what_the_server_finds_wrong_is_a_request_error(kind: str) -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        if json.loads(request.content)["state"] == "bad":
            return httpx.Response(422, json={"detail": [{**ENTRY, "input": "SECRET"}]})
        return httpx.Response(200, json=ANSWER)

    requests = [REQUEST, DecisionRequest("bad", REQUEST.questions), REQUEST]
    with pytest.raises(RequestError, match="request 1: body.questions.late: the prompt has 9") as info:
        decide(handler, requests, kind=kind)
    assert (info.value.errors, info.value.index) == ([ENTRY], 1)
    first, error, last = decide(handler, requests, kind=kind, return_exceptions=True)
    assert (first, last) == (EXPECTED, EXPECTED)
    assert isinstance(error, RequestError)
    assert (error.errors, error.index) == ([ENTRY], 1)


@kinds
def test_what_the_client_finds_wrong_is_never_sent(kind: str) -> None:
    handler, seen = answering(OK)
    bad: Any = {"model": "jev-latest", "state": "x", "questions": {}}
    with pytest.raises(RequestError, match="at least 1 question") as info:
        decide(handler, [REQUEST, bad], kind=kind)
    assert info.value.index == 1
    assert not seen
    first, error = decide(handler, [REQUEST, bad], kind=kind, return_exceptions=True)
    assert first == EXPECTED
    assert isinstance(error, RequestError)
    assert error.index == 1
    assert len(seen) == 1
    for wrong in (REQUEST, bad, "text"):
        with pytest.raises(TypeError, match="list"):
            decide(handler, wrong, kind=kind)


def changed(**answers: Any) -> dict[str, Any]:
    return {**ANSWER, "answers": {**ANSWER["answers"], **answers}}


CHOICE = ANSWER["answers"]["team"]
NOT_ANSWERS: dict[str, Any] = {
    "html": "<html>",
    "empty": "",
    "deep": "[" * 100_000,
    "null": None,
    "list": [],
    "nothing": {},
    "no answers": {**ANSWER, "answers": {}},
    "answers list": {**ANSWER, "answers": []},
    "answer null": changed(late=None),
    "answer text": changed(late="x"),
    "other type": changed(late=CHOICE),
    "no number": changed(late={"type": "noul", "noul": "0.5"}),
    "boolean": changed(late={"type": "noul", "noul": True}),
    "nan": changed(late={"type": "noul", "noul": float("nan")}),
    "missing option": changed(team={**CHOICE, "probabilities": {"billing": 1.0}}),
    "unknown choice": changed(team={**CHOICE, "choice": "other"}),
    "unhashable choice": changed(team={**CHOICE, "choice": []}),
    "no confidence": changed(team={**CHOICE, "confidence": None}),
    "no usage": {**ANSWER, "usage": None},
    "float usage": {**ANSWER, "usage": {"input_tokens": 9.0, "output_tokens": 3}},
    "no model": {**ANSWER, "model": None},
}


@pytest.mark.parametrize("name", NOT_ANSWERS)
def test_what_is_no_answer_is_never_taken_for_one(name: str) -> None:
    body = NOT_ANSWERS[name]
    content = body if isinstance(body, str) else json.dumps(body)
    handler, _ = answering(httpx.Response(200, content=content, headers={"x-typesafe-request-id": "req_7"}))
    with pytest.raises(ServerError, match="not one to this request") as info:
        decide(handler, [REQUEST])
    assert (info.value.status, info.value.request_id) == (200, "req_7")


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (400, {"detail": {"error_type": "api_usage_error", "message": "Unknown model."}}, "api_usage_error"),
        (
            401,
            {"detail": {"error_type": "authentication_error", "message": "The key is not known."}},
            "authentication_error",
        ),
        (404, {"detail": "Not Found"}, None),
        (413, {"detail": {"error_type": 7}}, None),
        (422, {"detail": []}, None),
        (422, {"detail": [{"loc": "body"}]}, None),
        (422, {"detail": ["x"]}, None),
        (500, [], None),
        (502, "<html>", None),
        (302, "", None),
        (204, "", None),
    ],
)
def test_other_refusals_say_what_they_are(status: int, body: Any, kind: str | None) -> None:
    content = body if isinstance(body, str) else json.dumps(body)
    handler, seen = answering(httpx.Response(status, content=content, headers={"location": "http://elsewhere"}))
    with pytest.raises(ServerError, match=f"^the server answered {status}") as info:
        decide(handler, [REQUEST], api_key="secret")
    assert (info.value.status, info.value.kind) == (status, kind)
    assert "secret" not in str(info.value)
    assert len(seen) == 1


@pytest.mark.parametrize(
    "options",
    [
        {"base_url": "127.0.0.1:8000"},
        {"base_url": "http://"},
        {"base_url": "http://host/?x=1"},
        {"base_url": ""},
        {"api_key": ""},
        {"api_key": "sécret"},
        {"api_key": "a\nb"},
        {"timeout": 0},
        {"timeout": float("inf")},
        {"max_retries": -1},
        {"max_connections": 0},
    ],
)
def test_options_that_cannot_be_used(options: dict[str, Any]) -> None:
    for kind in (Client, AsyncClient):
        with pytest.raises(ValueError, match=next(iter(options))):
            kind(**options)


def test_after_close_nothing_is_asked() -> None:
    client = Client()
    client.close()
    client.close()
    with pytest.raises(RuntimeError, match="closed"):
        client.decide([REQUEST])


def test_a_failure_does_not_wait_for_the_others() -> None:
    """One request fails while another is told to come back in 20 seconds."""

    def handler(request: httpx.Request) -> httpx.Response:
        if json.loads(request.content)["state"] == "bad":
            time.sleep(0.05)
            return httpx.Response(400)
        return httpx.Response(503, headers={"retry-after": "20"})

    requests = [DecisionRequest("bad", REQUEST.questions), REQUEST]
    for kind in ("sync", "async"):
        began = time.monotonic()
        with pytest.raises(ServerError, match="400"):
            decide(handler, requests, kind=kind)
        assert time.monotonic() - began < 10


def test_the_methods_are_those_of_the_engine() -> None:
    for method in (Client.decide, AsyncClient.decide):
        assert inspect.signature(method).parameters.keys() == inspect.signature(Engine.decide).parameters.keys()


def test_the_client_needs_no_torch_and_flide_no_httpx() -> None:
    light = "import sys, flide; flide.Client().close(); assert not {'torch', 'numpy', 'transformers'} & {*sys.modules}"
    without = """
import sys
sys.modules["httpx"] = None
from flide import *
try:
    Client()
except ImportError as error:
    assert "flide-torch[serve]" in str(error)
else:
    raise AssertionError
"""
    for code in (light, without):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr


# ----------------------------------------------------------------------------------------------------------- a server


@pytest.fixture(scope="module")
def url(engine: Engine) -> Iterator[str]:
    with running(engine, keys=KeyRing({"tests": "secret"})) as url:
        yield url


def check_same(decisions: list[Decision], expected: list[Decision]) -> None:
    assert len(decisions) == len(expected)
    for decision, wanted in zip(decisions, expected, strict=True):
        assert (decision.model, decision.usage, list(decision)) == (wanted.model, wanted.usage, list(wanted))
        for question_id in wanted:
            answer, other = decision[question_id], wanted[question_id]
            assert type(answer) is type(other)
            assert answer.probabilities == pytest.approx(other.probabilities, abs=1e-6)
            assert list(answer.probabilities) == list(other.probabilities)
            assert answer.value == (
                other.value if isinstance(other.value, str) else pytest.approx(other.value, abs=1e-5)
            )
            assert getattr(answer, "legend", None) == getattr(other, "legend", None)


def requests() -> list[Any]:
    long = DecisionRequest({"text": "ein Päckchen " * 300, "n": [1, None, 2.5]}, REQUEST.questions)
    many = DecisionRequest("x", {f"q {i}": Choice(None, [f"{j}" for j in range(2 + i)]) for i in range(40)})
    return [REQUEST, REQUEST.to_dict(), long, many]


@kinds
def test_answers_are_the_engines(engine: Engine, url: str, kind: str) -> None:
    expected = engine.decide(requests())
    if kind == "sync":
        with Client(url, api_key="secret") as client:
            check_same(client.decide(requests()), expected)
    else:

        async def ask() -> list[Decision]:
            async with AsyncClient(url, api_key="secret") as client:
                return await client.decide(requests())

        check_same(asyncio.run(ask()), expected)


def test_answers_in_process_are_the_engines(engine: Engine) -> None:
    async def ask() -> list[Decision]:
        app: Any = DecisionServer(engine, ServeConfig()).app()
        async with AsyncClient(transport=httpx.ASGITransport(app)) as client:
            return await client.decide(requests())

    check_same(asyncio.run(ask()), engine.decide(requests()))


def test_refusals_of_a_server(engine: Engine, url: str) -> None:
    limit = engine.format.max_prompt_tokens
    assert limit is not None
    with Client(url, api_key="secret") as client:
        with pytest.raises(RequestError, match=f"at most {limit}") as info:
            client.decide([REQUEST, DecisionRequest("word " * (limit + 1), REQUEST.questions)])
        with pytest.raises(RequestError) as ours:
            engine.decide([REQUEST, DecisionRequest("word " * (limit + 1), REQUEST.questions)])
        assert (info.value.errors, info.value.index) == (ours.value.errors, 1)
        with pytest.raises(ServerError, match="Unknown model") as unknown:
            client.decide([DecisionRequest("x", REQUEST.questions, model="other")])
        assert (unknown.value.status, unknown.value.kind) == (400, "api_usage_error")
        assert unknown.value.request_id is not None
        assert unknown.value.request_id.startswith("req_")
    with Client(url, api_key="wrong") as stranger, pytest.raises(ServerError, match="The key is not known") as refused:
        stranger.decide([REQUEST])
    assert (refused.value.status, refused.value.kind) == (401, "authentication_error")


def test_a_client_is_shared_by_threads(engine: Engine, url: str) -> None:
    expected = engine.decide([REQUEST])
    with Client(url, api_key="secret", max_connections=4) as client:
        results: list[list[Decision]] = []
        threads = [threading.Thread(target=lambda: results.append(client.decide([REQUEST] * 3))) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert len(results) == 8
    for decisions in results:
        check_same(decisions, expected * 3)


def test_cancelling_drops_what_is_under_way(url: str) -> None:
    async def ask(delay: float) -> None:
        async with AsyncClient(url, api_key="secret") as client:
            task = asyncio.ensure_future(client.decide(requests() * 20))
            await asyncio.sleep(delay)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            (decision,) = await asyncio.wait_for(client.decide([REQUEST]), 60)
            assert len(decision) == 3

    for step in range(10):  # before, while and after connections are made
        asyncio.run(ask(0.01 * step))
