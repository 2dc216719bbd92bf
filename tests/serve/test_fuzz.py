"""No input is a server error: mutated bodies, raw bytes and headers."""

from __future__ import annotations

import copy
import json
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.serve.conftest import BODY

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
VALUES = st.recursive(SCALARS, lambda x: st.lists(x, max_size=4) | st.dictionaries(st.text(max_size=8), x, max_size=4))
CRITERIA = VALUES | st.dictionaries(st.text(max_size=12), SCALARS, min_size=1, max_size=6)
QUESTIONS = st.fixed_dictionaries(
    {"type": st.sampled_from(["noul", "choice", "score", "box", "", None, 3])},
    optional={"instructions": VALUES, "criteria": CRITERIA, "extra": VALUES},
)
PATHS = [(), ("model",), ("state",), ("questions",), ("questions", "team"), ("questions", "team", "criteria")]
FINE = {200, 400, 413, 415, 422}


def put(path: tuple[str, ...], value: Any) -> Any:
    if not path:
        return value
    body = copy.deepcopy(BODY)
    parent: Any = body
    for name in path[:-1]:
        parent = parent[name]
    parent[path[-1]] = value
    return body


def check(client: httpx.Client, data: bytes, headers: dict[str, str]) -> None:
    response = client.post("/v1/systemone", content=data, headers=headers)
    assert response.status_code in FINE
    assert isinstance(response.json(), dict)
    assert "x-typesafe-request-id" in response.headers


MUTATIONS = st.tuples(st.sampled_from(PATHS), VALUES) | st.tuples(
    st.just(("questions",)), st.dictionaries(st.text(max_size=8), QUESTIONS, min_size=1, max_size=4)
)
BYTES = st.binary(max_size=200) | st.builds(
    lambda text, cut: text.encode("utf-8", "surrogatepass")[:cut], st.text(max_size=60), st.integers(0, 200)
)
HEADERS = st.fixed_dictionaries(
    {},
    optional={
        "Content-Type": st.sampled_from(["application/json", "text/html", "application/x+json", ""]),
        "Content-Encoding": st.sampled_from(["gzip", "zstd", "br", "identity", ""]),
        "Authorization": st.sampled_from(["Bearer x", "Basic y", ""]),
    },
)
COMMON: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture]}


@settings(max_examples=60, **COMMON)
@given(mutation=MUTATIONS)
def test_mutated_bodies(client: httpx.Client, mutation: tuple[tuple[str, ...], Any]) -> None:
    check(client, json.dumps(put(*mutation)).encode(), {"Content-Type": "application/json"})


@settings(max_examples=60, **COMMON)
@given(data=BYTES, headers=HEADERS)
def test_raw_bytes_and_headers(client: httpx.Client, data: bytes, headers: dict[str, str]) -> None:
    check(client, data, headers)


@pytest.mark.slow
@settings(max_examples=3000, **COMMON)
@given(mutation=MUTATIONS, data=BYTES, headers=HEADERS)
def test_many_more(
    client: httpx.Client, mutation: tuple[tuple[str, ...], Any], data: bytes, headers: dict[str, str]
) -> None:
    check(client, json.dumps(put(*mutation)).encode(), headers)
    check(client, data, headers)
