"""Routes over a real socket: answers, refusals, headers."""

from __future__ import annotations

import asyncio
import copy
import gzip
import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
import zstandard

from flide import Engine, EngineConfig, ModelOutputError
from flide.runtime.reader import RequestReader
from flide.serve.config import ServeConfig
from flide.serve.keys import KeyRing
from flide.serve.metrics import MOST_UNCOUNTED, Metrics
from flide.serve.protocol import EXCHANGE, Exchange
from flide.serve.shapes import to_json
from tests.serve.conftest import BODY, Served
from tests.serve.running import running, wait_until
from tests.tiny_model import tiny_engine

JSON = {"Content-Type": "application/json"}


def body(**changes: Any) -> dict[str, Any]:
    return {**copy.deepcopy(BODY), **changes}


def post(client: httpx.Client, content: Any, headers: dict[str, str] | None = None) -> httpx.Response:
    data = content if isinstance(content, bytes) else json.dumps(content).encode()
    return client.post("/v1/systemone", content=data, headers={**JSON, **(headers or {})})


def test_an_answer_is_the_engines(client: httpx.Client, engine: Engine) -> None:
    response = post(client, BODY)
    assert response.status_code == 200
    (decision,) = engine.decide([BODY])
    shared = decision.usage.shared_tokens
    extras = {"model_hash": engine.model_hash, "shared_tokens": shared, "reused_tokens": 0}
    assert response.json() == {**decision.to_dict(), "model": engine.model_name, "x_flide": extras}
    alone = [engine.decide([body(questions={name: q})])[0].usage for name, q in BODY["questions"].items()]
    assert shared == sum(u.input_tokens for u in alone) - decision.usage.input_tokens > 0
    assert all(usage.shared_tokens == 0 for usage in alone)
    assert set(response.headers["server-timing"].replace(",", "").split()) > set()
    assert [part.split(";")[0].strip() for part in response.headers["server-timing"].split(",")] == [
        "read",
        "wait",
        "run",
    ]


def test_the_same_questions_about_one_state_after_another(client: httpx.Client, engine: Engine) -> None:
    for number in range(5):
        request = body(state=f"The parcel of order {number} arrived crushed.")
        answer = post(client, request).json()
        (decision,) = engine.decide([request])
        assert answer["answers"] == decision.to_dict()["answers"]
        assert answer["usage"] == decision.usage.to_dict()


def test_levels_come_back_as_they_were_sent(client: httpx.Client) -> None:
    levels = [{"n": 10**40, "x": [1.5, None, True, "caf\u00e9 \u2028"]}, [-(2**64)], "plain"]
    answer = post(client, body(questions={"s": {"type": "score", "criteria": levels}})).json()["answers"]["s"]
    assert list(answer["legend"].values()) == levels


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_what_is_no_number_is_never_written(number: float) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        to_json({"answers": {"q": {"noul": number}}})
    assert json.loads(to_json({"a": None, "b": 0.1})) == {"a": None, "b": 0.1}


def test_packed_and_chunked_bodies_have_the_same_answer(client: httpx.Client) -> None:
    plain = post(client, BODY).json()
    data = json.dumps(BODY).encode()
    assert post(client, gzip.compress(data), {"Content-Encoding": "gzip"}).json() == plain
    assert post(client, zstandard.ZstdCompressor().compress(data), {"Content-Encoding": "zstd"}).json() == plain

    def chunks() -> Any:
        yield from (data[i : i + 7] for i in range(0, len(data), 7))

    assert client.post("/v1/systemone", content=chunks(), headers=JSON).json() == plain


def test_the_name_of_the_model(client: httpx.Client, engine: Engine) -> None:
    assert post(client, body(model=engine.model_name)).status_code == 200
    response = post(client, body(model="gpt-unknown"))
    assert response.status_code == 400
    assert response.json()["detail"]["error_type"] == "api_usage_error"
    assert "gpt-unknown" not in response.text


def test_models_have_the_official_shape(client: httpx.Client, engine: Engine) -> None:
    models = client.get("/v1/models").json()["models"]
    assert [model["name"] for model in models] == [engine.model_name, "jev-latest"]
    assert all(set(model) == {"name", "description", "release_date"} for model in models)
    assert all(isinstance(value, str) for model in models for value in model.values())


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b"\xff\xfe",
        b'{"a": 1, "a": 2}',
        b"[" * 10_000,
        b'{"x": NaN}',
        b'{"x": "\\ud800"}',
        {},
        {"model": "jev-latest", "questions": BODY["questions"]},
        body(state=None),
        body(state=5),
        body(questions={}),
        body(questions=[]),
        body(questions={"q": {"type": "box"}}),
        body(questions={"q": {"type": "choice", "criteria": {}}}),
        body(questions={"q": {"type": "choice", "criteria": {f"o{i}": None for i in range(256)}}}),
        body(questions={"q": {"type": "score", "criteria": [str(i) for i in range(11)]}}),
        body(questions={"q": {"type": "score", "criteria": ["a", None]}}),
        body(questions={"q": {"type": "score", "criteria": {"0": "a"}}}),
        body(assets={"a": {"type": "image", "format": "png", "data_base64": ""}}),
        body(state="word " * 60_000),
    ],
)
def test_bad_bodies_are_422_with_a_list(client: httpx.Client, content: Any) -> None:
    response = post(client, content)
    assert response.status_code == 422
    detail = response.json()["detail"]
    assert detail
    assert all(entry["loc"][0] == "body" and set(entry) == {"loc", "msg", "type"} for entry in detail)
    assert response.headers["content-type"] == "application/json"
    assert post(client, BODY).status_code == 200


def test_one_option_is_certain_and_255_are_not_too_many(client: httpx.Client) -> None:
    questions = {
        "one": {"type": "choice", "criteria": {"only": None}},
        "level": {"type": "score", "criteria": ["only"]},
        "many": {"type": "choice", "criteria": {f"option {i}": None for i in range(255)}},
    }
    answers = post(client, body(questions=questions)).json()["answers"]
    assert answers["one"]["probabilities"] == {"only": 1.0}
    assert answers["level"]["score"] == 0.0
    assert len(answers["many"]["probabilities"]) == 255


def test_a_thousand_questions(client: httpx.Client) -> None:
    questions = {f"q{i}": {"type": "noul", "instructions": f"Is {i} mentioned?"} for i in range(1000)}
    response = post(client, body(questions=questions))
    assert response.status_code == 200
    assert len(response.json()["answers"]) == 1000


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "multipart/form-data; boundary=x"}, 422),
        ({"Content-Encoding": "br"}, 415),
        ({"Content-Type": "application/json; charset=utf-8"}, 200),
        ({"Content-Type": "application/vnd.api+json"}, 200),
    ],
)
def test_media_types(client: httpx.Client, headers: dict[str, str], status: int) -> None:
    assert post(client, BODY, headers).status_code == status


def test_more_questions_than_there_is_memory_for(
    client: httpx.Client, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = served.decisions.backend
    monkeypatch.setattr(backend, "reader", replace(backend.reader, max_request_tokens=200))
    questions = {f"q{i}": {"type": "noul", "instructions": f"Is {i} mentioned?"} for i in range(50)}
    for path in ("/v1/systemone", "/v1/decisions"):
        response = client.post(path, json=body(questions=questions))
        assert response.status_code == 422
        assert response.json()["detail"][0]["loc"] == ["body", "questions"]
        assert " 200 " in response.json()["detail"][0]["msg"]
    asked = [{"type": "predicate", "instructions": f"It says {i}."} for i in range(50)]
    error = client.post("/v1/decisions", json={"model": "jev-latest", "input": "x", "questions": asked}).json()["error"]
    assert (error["param"], error["code"]) == ("questions", "context_length_exceeded")


def test_bodies_that_are_too_large(client: httpx.Client) -> None:
    assert post(client, body(state="x" * (1 << 20))).status_code == 413
    packed = gzip.compress(json.dumps(body(state="x" * (1 << 20))).encode())
    assert post(client, packed, {"Content-Encoding": "gzip"}).status_code == 413


def test_routes_and_methods_that_are_not_there(client: httpx.Client) -> None:
    for method, path, status in (("GET", "/v1/systemone", 405), ("POST", "/health", 405), ("GET", "/health/", 404)):
        response = client.request(method, path)
        assert response.status_code == status
        assert set(response.json()["detail"]) == {"error_type", "message"}


def test_request_ids(client: httpx.Client) -> None:
    made = client.get("/health").headers["x-typesafe-request-id"]
    assert made.startswith("req_")
    assert made != client.get("/health").headers["x-typesafe-request-id"]
    for given, kept in (("abc-1", True), ("x" * 128, True), ("x" * 129, False), ("", False)):
        response = client.get("/nothing", headers={"x-typesafe-request-id": given})
        assert (response.headers["x-typesafe-request-id"] == given) == kept


@pytest.mark.parametrize(
    ("host", "status"), [("evil.example", 403), ("localhost:9", 200), ("127.0.0.1", 200), ("[::1]:80", 200)]
)
def test_pages_of_other_hosts_cannot_ask(client: httpx.Client, host: str, status: int) -> None:
    assert client.get("/health", headers={"Host": host}).status_code == status


def test_metrics_count_and_show_nothing_that_was_sent(client: httpx.Client) -> None:
    post(client, body(state="a secret state", questions={"secret id": {"type": "noul", "instructions": "secret?"}}))
    post(client, b"secret")
    text = client.get("/metrics", timeout=60).text
    assert 'flide_requests_total{route="systemone",status="200"}' in text
    assert 'flide_rejects_total{reason="invalid_request"}' in text
    assert "secret" not in text


def metrics(client: httpx.Client) -> dict[str, float]:
    lines = client.get("/metrics", timeout=60).text.splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")}


def test_metrics_of_rounds_are_those_of_their_requests(engine: Engine) -> None:
    with running(engine) as url, httpx.Client(base_url=url, timeout=60) as client:
        before = metrics(client)
        answers = [post(client, BODY).json() for _ in range(3)]
        after = metrics(client)
    changes = {name: after[name] - before.get(name, 0.0) for name in after}
    tokens = sum(answer["usage"]["input_tokens"] for answer in answers)
    trunk, branch = (changes[f'flide_tokens_total{{part="{part}"}}'] for part in ("trunk", "branch"))
    assert trunk + branch == tokens
    assert changes["flide_shared_tokens_total"] == sum(answer["x_flide"]["shared_tokens"] for answer in answers)
    assert changes["flide_reused_tokens_total"] == 0
    assert changes["flide_shared_tokens_total"] == trunk * (len(BODY["questions"]) - 1)  # all fork from the trunk
    assert changes['flide_rounds_total{graph="none"}'] == 3  # on a CPU
    assert changes['flide_rounds_total{graph="replayed"}'] == 0
    assert changes["flide_round_requests_sum"] == 3
    assert changes["flide_round_tokens_sum"] == tokens
    assert changes["flide_round_fill_sum"] == 3.0  # nothing is padded
    assert 0 < changes["flide_round_seconds_sum"] <= changes["flide_run_seconds_sum"]
    assert changes["flide_wait_seconds_count"] == 3
    assert after["flide_waiting"] == after["flide_running_tokens"] == 0
    assert sum(changes[f'flide_questions_total{{type="{kind}"}}'] for kind in ("noul", "choice", "score")) == 9


def test_keys(engine: Engine) -> None:
    served = Served(engine, ServeConfig(keys=KeyRing({"ana": "s3cret"}), max_per_key=4))
    try:
        with httpx.Client(base_url=served.url, timeout=60) as client:
            for path in ("/health", "/ready"):
                assert client.get(path).status_code == 200
            for headers in ({}, {"Authorization": "Bearer nope"}, {"x-api-key": "s3cret"}):
                for response in (post(client, BODY, headers), client.get("/v1/models", headers=headers)):
                    assert response.status_code == 401
                    assert response.headers["www-authenticate"] == "Bearer"
                    assert response.json()["detail"]["error_type"] == "authentication_error"
                assert client.get("/metrics", headers=headers).status_code == 401
            assert post(client, BODY, {"Authorization": "Bearer s3cret"}).status_code == 200
    finally:
        served.stop()


def test_one_request_that_fails_takes_no_other_down(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    real = RequestReader.encode

    def encode(self: RequestReader, request: Any) -> Any:
        if request.state == "fails":
            raise KeyError("a secret state")
        return real(self, request)

    monkeypatch.setattr(RequestReader, "encode", encode)
    responses: list[httpx.Response] = []
    threads = [
        threading.Thread(target=lambda state=state: responses.append(post(client, body(state=state))))
        for state in ("fine", "fails", "fine too")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(response.status_code for response in responses) == [200, 200, 500]
    failed = next(response for response in responses if response.status_code == 500)
    assert "secret" not in failed.text
    assert failed.json()["detail"]["error_type"] == "internal_error"


def test_logits_that_are_not_finite_are_an_error_of_that_request(engine: Engine) -> None:
    real = engine.submit

    def submit(prepared: Any) -> Any:
        future = real(prepared)
        if prepared.request.state == "breaks":
            future = type(future)()
            future.set_exception(ModelOutputError("not finite"))
        return future

    served = Served(engine, ServeConfig())
    served.decisions.backend.scheduler._submit = submit
    try:
        with httpx.Client(base_url=served.url, timeout=60) as own:
            assert post(own, body(state="breaks")).status_code == 500
            assert post(own, BODY).status_code == 200
    finally:
        served.stop()


def test_a_closed_engine_is_unavailable_not_broken() -> None:
    engine = tiny_engine(EngineConfig(device="cpu"))
    served = Served(engine, ServeConfig())
    try:
        with httpx.Client(base_url=served.url, timeout=60) as own:
            engine.close()
            assert own.get("/ready").status_code == 503
            assert own.get("/health").status_code == 200
            response = post(own, BODY)
            assert response.status_code == 503
            assert int(response.headers["retry-after"]) < 30
    finally:
        served.stop()


def test_ready_turns_red_when_the_engine_hangs(engine: Engine) -> None:
    served = Served(engine, ServeConfig(stuck_after=0.05, request_timeout=3))
    served.decisions.backend.scheduler._submit = lambda prepared: type(engine.submit(engine.prepare(BODY)))()
    try:
        with httpx.Client(base_url=served.url, timeout=60) as client:
            assert client.get("/ready").status_code == 200
            responses: list[int] = []
            thread = threading.Thread(target=lambda: responses.append(post(client, BODY).status_code))
            thread.start()
            wait_until(lambda: client.get("/ready").status_code == 503)
            assert client.get("/health").status_code == 200
            thread.join()
            assert responses == [503]
    finally:
        served.stop()


def test_what_is_to_be_counted_does_not_pile_up(client: httpx.Client, served: Served) -> None:
    counts = served.decisions.backend.counts
    for _ in range(3):
        post(client, BODY)
    wait_until(lambda: not counts._uncounted)  # although nobody reads the metrics


def test_nor_where_nobody_ever_catches_up() -> None:
    counts = Metrics(waiting=lambda: 0, waiting_tokens=lambda: 0, running_tokens=lambda: 0)
    for _ in range(2 * MOST_UNCOUNTED + 7):
        counts.reject("some")
    assert len(counts._uncounted) <= MOST_UNCOUNTED
    assert f'flide_rejects_total{{reason="some"}} {2 * MOST_UNCOUNTED + 7:.1f}' in counts.text().decode()


@pytest.fixture
def hanging(engine: Engine) -> Iterator[Served]:
    """A server whose engine never answers."""
    served = Served(engine, ServeConfig(request_timeout=60))
    served.decisions.backend.scheduler._submit = lambda prepared: type(engine.submit(engine.prepare(BODY)))()
    yield served
    served.stop()


def test_nobody_waits_for_the_answer_of_who_has_left(hanging: Served) -> None:
    scheduler, data = hanging.decisions.backend.scheduler, json.dumps(BODY).encode()
    head = f"POST /v1/systemone HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", int(hanging.url.rpartition(":")[2]))) as connection:
        connection.sendall(head.encode() + data)
        wait_until(lambda: len(scheduler._per_key) == 1)
        time.sleep(0.2)
        assert len(scheduler._per_key) == 1
    wait_until(lambda: not scheduler._per_key)
    text = httpx.get(f"{hanging.url}/metrics", timeout=60).text
    assert 'flide_rejects_total{reason="disconnected"} 1.0' in text


@pytest.mark.parametrize("tells", [False, True], ids=["can only be waited for", "tells, through copies of its scope"])
def test_the_same_on_connections_of_other_kinds(hanging: Served, tells: bool) -> None:
    """Another server's, and ours behind a middleware that copies."""
    scheduler, left = hanging.decisions.backend.scheduler, Exchange()
    sent: list[dict[str, Any]] = []

    async def ask() -> None:
        leaving, messages = asyncio.Event(), [{"type": "http.request", "body": json.dumps(BODY).encode()}]

        async def receive() -> dict[str, Any]:
            if messages:
                return messages.pop()
            await leaving.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": "/v1/systemone", "root_path": "", "headers": headers}
        scope |= {EXCHANGE: left} if tells else {}
        asked = asyncio.create_task(hanging.decisions.app()(dict(scope), receive, send))
        while len(scheduler._per_key) != 1:
            await asyncio.sleep(0.01)
        assert not asked.done()
        if tells:
            assert left.on_leaving is not None
            left.on_leaving()
        else:
            leaving.set()
        await asyncio.wait_for(asked, 60)

    asyncio.run(ask())
    assert not scheduler._per_key
    assert sent[0]["status"] == 499
    assert left.on_leaving is None, "nobody is left to be told"


@pytest.mark.parametrize("number", [1, 2, 3])
def test_of_requests_that_came_together_none_is_waited_for_when_the_client_leaves(hanging: Served, number: int) -> None:
    """What is no HTTP behind them ends the connection, and is not taken for the answer of one of them."""
    scheduler, data = hanging.decisions.backend.scheduler, json.dumps(BODY).encode()
    head = f"POST /v1/systemone HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
    chunked = b"POST /v1/systemone HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nno number\r\n"
    for bad in (b"XX YY\r\n\r\n", chunked):
        with socket.create_connection(("127.0.0.1", int(hanging.url.rpartition(":")[2]))) as connection:
            connection.settimeout(60)
            connection.sendall((head.encode() + data) * number + bad)
            assert connection.recv(100) == b""
        wait_until(lambda: not scheduler._per_key)
    text = httpx.get(f"{hanging.url}/metrics", timeout=60).text
    assert 'flide_rejects_total{reason="disconnected"} 2.0' in text
    assert 'status="500"' not in text


def test_what_is_no_http_is_told_where_nothing_waits(served: Served) -> None:
    with socket.create_connection(("127.0.0.1", int(served.url.rpartition(":")[2]))) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = b""
        while not answer.endswith(b"}"):
            answer += connection.recv(1000)
        assert answer.startswith(b"HTTP/1.1 200")
        connection.sendall(b"XX YY\r\n\r\n")
        assert connection.recv(1000).startswith(b"HTTP/1.1 400")


def test_who_left_before_its_handler_began_is_not_waited_for(hanging: Served) -> None:
    """As behind a middleware that takes its time, with the connection's own ends."""
    scheduler, left, sent = hanging.decisions.backend.scheduler, Exchange(), []

    class Gone:
        disconnected, response_started, response_complete = True, False, False

        async def receive(self) -> dict[str, Any]:
            return {"type": "http.disconnect"}

        async def send(self, message: Any) -> None:
            sent.append(message)

    cycle: Any = Gone()
    left.begin(cycle)
    left.body = json.dumps(BODY).encode()
    scope = {"type": "http", "method": "POST", "path": "/v1/systemone", "root_path": "", "headers": [], EXCHANGE: left}
    asyncio.run(asyncio.wait_for(hanging.decisions.app()(scope, cycle.receive, cycle.send), 60))
    assert not scheduler._per_key
    assert sent[0]["status"] == 499


def test_nothing_between_a_connection_and_its_handler_is_passed_by(engine: Engine) -> None:
    """Bodies and responses go through a middleware that changes both."""
    served = Served(engine, ServeConfig(), around=Changing)
    try:
        given = {**BODY, "model": "not served"}
        response = httpx.post(f"{served.url}/v1/systemone", json=given, timeout=60)
        assert response.status_code == 200
        assert response.headers["x-changed"] == "yes"
    finally:
        served.stop()


class Changing:
    """Names another model, and adds a header."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def changed() -> Any:
            message = await receive()
            if message["type"] == "http.request":
                message["body"] = message["body"].replace(b"not served", b"jev-latest")
            return message

        async def marked(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-changed", b"yes")]
            await send(message)

        headers = [(n, v) for n, v in scope.get("headers", ()) if n != b"content-length"]
        await self.app({**scope, "headers": headers}, changed, marked)


def test_routes_under_a_root_path_are_those_of_starlette(engine: Engine) -> None:
    with running(engine, root_path="/v1") as url, httpx.Client(base_url=url, timeout=60) as client:
        assert client.post("/v1/systemone", json=BODY).status_code == 200
        assert client.post("/systemone", json=BODY).status_code == 404
        assert client.get("/v1/systemone").status_code == 405


def test_what_load_does_to_probabilities(client: httpx.Client) -> None:
    """Nothing: under load, with other questions beside it, reordered or renamed, an answer stays within 1e-4."""
    alone = {qid: post(client, body(questions={qid: q})).json()["answers"][qid] for qid, q in BODY["questions"].items()}
    found: list[dict[str, Any]] = []

    def ask(index: int) -> None:
        questions = {f"{qid} {index}": q for qid, q in sorted(BODY["questions"].items(), reverse=bool(index % 2))}
        questions |= {f"other {i}": {"type": "noul", "instructions": f"Does it say {i + index}?"} for i in range(index)}
        answers = post(client, body(questions=questions)).json()["answers"]
        found.append({qid: answers[f"{qid} {index}"] for qid in BODY["questions"]})

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 12
    for answers in found:
        assert answers["late"]["noul"] == pytest.approx(alone["late"]["noul"], abs=1e-4)
        for qid in ("team", "anger"):
            assert answers[qid]["probabilities"] == pytest.approx(alone[qid]["probabilities"], abs=1e-4)
