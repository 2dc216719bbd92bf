"""The OpenAPI document and its page say what the server does."""

from __future__ import annotations

import copy
import html
import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from openapi_spec_validator import OpenAPIV31SpecValidator
from starlette.testclient import TestClient

from flide import Engine
from flide.runtime.wire import MAX_LEVELS, MAX_OPTIONS
from flide.serve.app import ALIAS, DecisionServer
from flide.serve.config import ServeConfig
from flide.serve.docs_page import docs_page
from flide.serve.keys import KeyRing
from flide.serve.openapi import document
from tests.serve.running import running
from tests.tiny_model import TINY_MODEL

CONFIG = ServeConfig(max_questions=50, max_body_bytes=1 << 20)
DOCUMENT = document(CONFIG, [TINY_MODEL, ALIAS])
EXAMPLES = [
    pytest.param(path, name, id=f"{path}-{name}")
    for path, operations in DOCUMENT["paths"].items()
    if "post" in operations
    for name in operations["post"]["requestBody"]["content"]["application/json"]["examples"]
]


def schema_at(*keys: str) -> Draft202012Validator:
    """The validator of a schema in the document."""
    schema: Any = DOCUMENT
    for key in keys:
        schema = schema[key]
    return Draft202012Validator({**schema, "components": DOCUMENT["components"]})


def request_schema(path: str) -> Draft202012Validator:
    return schema_at("paths", path, "post", "requestBody", "content", "application/json", "schema")


def response_schema(path: str, method: str, status: int, media: str = "application/json") -> Draft202012Validator:
    return schema_at("paths", path, method, "responses", str(status), "content", media, "schema")


@pytest.fixture(scope="module")
def client(engine: Engine) -> Iterator[TestClient]:
    with TestClient(DecisionServer(engine, CONFIG).app(), base_url="http://localhost") as client:
        yield client


@pytest.mark.parametrize(
    "config",
    [CONFIG, ServeConfig(keys=KeyRing({"a": "k"}), root_path="/prefix", host="0.0.0.0")],
    ids=["open", "keyed"],
)
def test_the_document_is_valid(config: ServeConfig) -> None:
    made = document(config, ["name", ALIAS])
    OpenAPIV31SpecValidator(made).validate()
    json.dumps(made, allow_nan=False)
    assert made["servers"] == [{"url": config.root_path or "/"}]


def test_the_document_is_the_one_that_is_served(client: TestClient) -> None:
    assert client.get("/openapi.json").json() == DOCUMENT


def test_every_route_is_in_it(engine: Engine) -> None:
    app: Any = DecisionServer(engine, CONFIG).app()
    routes = {(route.path, method.lower()) for route in app._app.routes for method in route.methods - {"HEAD"}}
    assert routes == {(path, method) for path, operations in DOCUMENT["paths"].items() for method in operations}


def like(value: Any, *, key: str = "") -> Any:
    """A response without what depends on the model."""
    if isinstance(value, dict):
        return {name: like(item, key=name) for name, item in value.items()}
    if isinstance(value, list):
        return [like(item) for item in value]
    if key in ("choice", "model_hash") or key.endswith("_tokens") or isinstance(value, float):
        return type(value)
    return value


@pytest.mark.parametrize(("path", "name"), EXAMPLES)
def test_an_example_is_answered_as_documented(client: TestClient, path: str, name: str) -> None:
    operation = DOCUMENT["paths"][path]["post"]
    example = operation["requestBody"]["content"]["application/json"]["examples"][name]
    expected = {
        int(status): response["content"]["application/json"]["examples"][name]["value"]
        for status, response in operation["responses"].items()
        if name in response["content"]["application/json"].get("examples", {})
    }
    ((status, answer),) = expected.items()
    response = client.post(path, json=example["value"])
    assert response.status_code == status
    assert like(response.json()) == like(answer)
    for given in (response.json(), answer):
        response_schema(path, "post", status).validate(given)
    assert request_schema(path).is_valid(example["value"]) is (status == 200)
    for header in operation["responses"][str(status)]["headers"]:
        assert header in response.headers


@pytest.mark.parametrize("path", [path for path, operations in DOCUMENT["paths"].items() if "get" in operations])
def test_what_can_be_read_is_as_documented(client: TestClient, path: str) -> None:
    response = client.get(path)
    assert response.status_code == 200
    (media,) = DOCUMENT["paths"][path]["get"]["responses"]["200"]["content"]
    assert response.headers["content-type"].partition(";")[0] == media
    value = response.json() if media == "application/json" else response.text
    response_schema(path, "get", 200, media).validate(value)


def changed(path: str, *keys: Any, value: Any) -> dict[str, Any]:
    """An example body with another value in one place."""
    name = "openai" if path == "/v1/decisions" else "three"
    example = DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]["examples"][name]
    body: dict[str, Any] = copy.deepcopy(example["value"])
    inner: Any = body
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    return body


ONE, TWO = "/v1/systemone", "/v1/decisions"
BORDERS = [
    (ONE, changed(ONE, "questions", "team", "criteria", value={str(i): None for i in range(MAX_OPTIONS)}), 200),
    (ONE, changed(ONE, "questions", "team", "criteria", value={str(i): None for i in range(MAX_OPTIONS + 1)}), 422),
    (ONE, changed(ONE, "questions", "team", "criteria", value={}), 422),
    (ONE, changed(ONE, "questions", "anger", "criteria", value=["x"] * MAX_LEVELS), 200),
    (ONE, changed(ONE, "questions", "anger", "criteria", value=["x"] * (MAX_LEVELS + 1)), 422),
    (ONE, changed(ONE, "questions", "anger", "criteria", value=["x", None]), 422),
    (ONE, changed(ONE, "questions", "anger", "criteria", value={"0": "x"}), 422),
    (ONE, changed(ONE, "questions", value={str(i): {"type": "noul"} for i in range(CONFIG.max_questions)}), 200),
    (ONE, changed(ONE, "questions", value={str(i): {"type": "noul"} for i in range(CONFIG.max_questions + 1)}), 422),
    (ONE, changed(ONE, "questions", "damaged", value={"type": "box"}), 422),
    (ONE, changed(ONE, "questions", "damaged", "criteria", value={"true": None, "other": "x"}), 422),
    (ONE, changed(ONE, "questions", "damaged", "criteria", value={"true": ["x"]}), 200),
    (ONE, changed(ONE, "state", value=None), 422),
    (ONE, changed(ONE, "state", value=7), 422),
    (ONE, changed(ONE, "state", value={}), 200),
    (ONE, changed(ONE, "assets", value={}), 200),
    (ONE, changed(ONE, "assets", value={"a": {}}), 422),
    (ONE, changed(ONE, "seed", value=1), 200),
    (ONE, changed(ONE, "model", value="other"), 400),
    (TWO, changed(TWO, "questions", 1, "choices", value=[{"value": str(i)} for i in range(MAX_OPTIONS)]), 200),
    (TWO, changed(TWO, "questions", 1, "choices", value=[{"value": str(i)} for i in range(MAX_OPTIONS + 1)]), 400),
    (TWO, changed(TWO, "questions", 1, "choices", value=[{"value": 1}]), 400),
    (TWO, changed(TWO, "questions", 2, "levels", value=[{"label": "x", "description": None}] * MAX_LEVELS), 200),
    (TWO, changed(TWO, "questions", 2, "levels", value=[{"label": "x"}] * (MAX_LEVELS + 1)), 400),
    (TWO, changed(TWO, "questions", 0, "name", value=None), 200),
    (TWO, changed(TWO, "questions", 0, "name", value=1), 400),
    (TWO, changed(TWO, "questions", 0, "instructions", value=[{"type": "input_json", "data": {}}]), 200),
    (TWO, changed(TWO, "questions", 0, "instructions", value=[{"type": "input_image"}]), 400),
    (TWO, changed(TWO, "questions", 0, "instructions", value=None), 400),
    (TWO, changed(TWO, "input", value=[]), 400),
    (TWO, changed(TWO, "input", value=[{"role": "user", "content": "x"}]), 200),
    (TWO, changed(TWO, "input", value=[{"role": "tool", "content": "x"}]), 400),
    (TWO, changed(TWO, "model", value="other"), 400),
]


@pytest.mark.parametrize("index", range(len(BORDERS)))
def test_schemas_draw_the_line_where_the_server_does(client: TestClient, index: int) -> None:
    path, body, status = BORDERS[index]
    response = client.post(path, json=body)
    assert response.status_code == status, response.text
    assert request_schema(path).is_valid(body) is (status == 200)
    response_schema(path, "post", status).validate(response.json())


def test_the_documents_are_behind_the_key(engine: Engine) -> None:
    server = DecisionServer(engine, ServeConfig(keys=KeyRing({"a": "k"})))
    with TestClient(server.app(), base_url="http://localhost") as client:
        for path in ("/openapi.json", "/docs", "/metrics", "/v1/models"):
            assert client.get(path).status_code == 401
            assert client.get(path, headers={"authorization": "Bearer k"}).status_code == 200
        for path in ("/health", "/ready"):
            assert client.get(path).status_code == 200
        served = client.get("/openapi.json", headers={"authorization": "Bearer k"}).json()
        response = client.post("/v1/systemone")
        assert str(response.status_code) in served["paths"]["/v1/systemone"]["post"]["responses"]
    assert served["security"] == [{"key": []}]


class Page(HTMLParser):
    """What a page loads, and whether its tags close."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.links: list[str] = []
        self.ids: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.links += [value or "" for name, value in attrs if name in ("href", "src")]
        self.ids |= {value or "" for name, value in attrs if name == "id"}
        if tag not in ("meta", "td", "tr"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_needs_nothing_else(client: TestClient) -> None:
    response = client.get("/docs")
    assert "default-src 'none'" in response.headers["content-security-policy"]
    page = Page()
    page.feed(response.text)
    assert page.open == []
    assert not page.tags & {"script", "link", "img", "iframe"}
    assert {link for link in page.links if not link.startswith("#")} == {"/openapi.json"}
    assert (
        {link[1:] for link in page.links if link.startswith("#")} <= page.ids == set(DOCUMENT["components"]["schemas"])
    )
    for path in DOCUMENT["paths"]:
        assert path in response.text


def test_names_are_text_on_the_page() -> None:
    page = docs_page(document(CONFIG, ["<script>alert(1)</script>"]))
    assert "<script" not in page


def test_commands_on_the_page_work(engine: Engine) -> None:
    if subprocess.run(["which", "curl"], capture_output=True, check=False).returncode:
        pytest.skip("needs curl")
    with running(engine, keys=KeyRing({"a": "KEY"}), root_path="") as url:
        config = ServeConfig(keys=KeyRing({"a": "KEY"}))
        page = docs_page(document(config, [engine.model_name]))
        commands = [html.unescape(text) for text in re.findall(r"<pre>(curl .*?)</pre>", page, re.DOTALL)]
        assert len(commands) == len(EXAMPLES) + 6
        for command in commands:
            quiet = f"URL={shlex.quote(url)}; {command} -sS -o /dev/null -w '%{{http_code}}'"
            done = subprocess.run(["bash", "-c", quiet], capture_output=True, text=True, timeout=60, check=True)
            assert done.stdout in ("200", "400", "422"), command
