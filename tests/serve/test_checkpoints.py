"""Checkpoints over HTTP: options of requests, who resumes from whose states, and what is told of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from flide import Client, DecisionRequest, Engine, EngineConfig, Noul
from flide.runtime.checkpoints.stats import CheckpointStats
from flide.runtime.wire import parse_body
from flide.serve.app import DecisionServer
from flide.serve.checkpoint_metrics import COUNTS, CheckpointMetrics
from flide.serve.config import ServeConfig
from flide.serve.keys import KeyRing
from tests.serve.conftest import BODY
from tests.serve.running import running
from tests.serve.test_frontends import Linked
from tests.tiny_model import tiny_engine

KEYS = KeyRing({"ana": "key-a", "bob": "key-b"})


@pytest.mark.parametrize("route", ["/v1/systemone", "/v1/decisions"])
@pytest.mark.parametrize(
    ("extras", "place"),
    [
        ("fast", ["body", "x_flide"]),
        ({"cache_salt": 7}, ["body", "x_flide", "cache_salt"]),
        ({"cache_salt": ""}, ["body", "x_flide", "cache_salt"]),
        ({"checkpoint": -1}, ["body", "x_flide", "checkpoint"]),
        ({"checkpoint": "end"}, ["body", "x_flide", "checkpoint"]),
    ],
)
def test_bad_options_are_422_and_say_where(client: httpx.Client, route: str, extras: Any, place: list[str]) -> None:
    response = client.post(route, json={**BODY, "x_flide": extras})
    assert response.status_code == 422
    (entry,) = response.json()["detail"]
    assert entry["loc"] == place


def test_options_change_no_answer(client: httpx.Client) -> None:
    plain = client.post("/v1/systemone", json=BODY).json()
    for extras in ({"cache_salt": "a"}, {"checkpoint": False}, {"checkpoint": 3, "cache_salt": None}, {}, None):
        assert client.post("/v1/systemone", json={**BODY, "x_flide": extras}).json()["answers"] == plain["answers"]


def salts(engine: Engine, config: ServeConfig) -> list[str | None]:
    """What two keys, or two clients without one, ask with: without a salt and with a few."""
    server = DecisionServer(engine, config)
    found = []
    for key in ("ana", "bob"):
        for salt in (None, "x", 'ana"', '"]'):
            body = {**BODY, "x_flide": {"cache_salt": salt}}
            found.append(server._admit(parse_body(body), key).request.cache_salt)
    return found


def test_each_key_has_states_of_its_own_and_a_salt_divides_them_further(engine: Engine) -> None:
    found = salts(engine, ServeConfig(keys=KEYS))
    assert len(set(found)) == len(found)
    assert None not in found


@pytest.mark.parametrize("config", [ServeConfig(), ServeConfig(keys=KEYS, share_checkpoints=True)])
def test_without_keys_or_where_they_share_only_the_salt_counts(engine: Engine, config: ServeConfig) -> None:
    assert salts(engine, config) == [None, "x", 'ana"', '"]'] * 2


def told(stats: CheckpointStats | None) -> dict[str, float]:
    registry = CollectorRegistry()
    registry.register(CheckpointMetrics(lambda: stats))
    return read(generate_latest(registry).decode())


def read(text: str) -> dict[str, float]:
    """Name, and whatever its labels say -> value."""
    families = text_string_to_metric_families(text)
    return {":".join([x.name, *x.labels.values()]): x.value for family in families for x in family.samples}


def test_prometheus_is_told_what_the_store_says() -> None:
    names = CheckpointStats.__dataclass_fields__
    stats = CheckpointStats(**{name: 10 + index for index, name in enumerate(names)})
    found = told(stats)
    for name, _ in COUNTS:
        assert found.pop(f"flide_checkpoint_{name}_total") == getattr(stats, name)
    assert found == {
        "flide_checkpoints:device": stats.checkpoints,
        "flide_checkpoints:host": stats.host_checkpoints,
        "flide_checkpoint_bytes:device": stats.bytes,
        "flide_checkpoint_bytes:host": stats.host_bytes,
        "flide_checkpoint_capacity_bytes:device": stats.capacity_bytes,
        "flide_checkpoint_capacity_bytes:host": stats.host_capacity_bytes,
    }
    assert told(None) == {}


@pytest.fixture(scope="module")
def keeping() -> Iterator[Engine]:
    with tiny_engine(EngineConfig(device="cpu", checkpoint_gb=0.1)) as engine:
        yield engine


def about(subject: str, *, steps: int, **extras: Any) -> dict[str, Any]:
    """A body about a state that grows with the steps."""
    state = f"A history of {subject}. " + " ".join(
        f"Step {k}: the box was opened and the order was read." for k in range(steps)
    )
    return {**BODY, "state": state, **({"x_flide": extras} if extras else {})}


def reused(client: httpx.Client, body: dict[str, Any], key: str | None = None, route: str = "/v1/systemone") -> int:
    response = client.post(route, json=body, headers={"Authorization": f"Bearer {key}"} if key else {})
    assert response.status_code == 200
    return int(response.json()["x_flide"]["reused_tokens"])


def test_a_state_that_has_grown_resumes_and_the_answer_stays(keeping: Engine, client: httpx.Client) -> None:
    with running(keeping) as url, httpx.Client(base_url=url, timeout=60) as asked:
        assert reused(asked, about("growth", steps=5)) == 0
        longer = about("growth", steps=8)
        found = asked.post("/v1/systemone", json=longer).json()
        assert 0 < found["x_flide"]["reused_tokens"] < found["usage"]["input_tokens"]
        plain = client.post("/v1/systemone", json=longer).json()  # of an engine that keeps nothing
        assert found["usage"] == plain["usage"]
        for name, answer in plain["answers"].items():
            kept = [found["answers"][name].get(field) for field in ("noul", "score")]
            assert kept == pytest.approx([answer.get(field) for field in ("noul", "score")], abs=1e-5)
            assert found["answers"][name].get("probabilities") == pytest.approx(answer.get("probabilities"), abs=1e-5)
        assert reused(asked, about("growth", steps=8, cache_salt="another")) == 0
        assert reused(asked, about("growth", steps=8, cache_salt="another")) > 0


def test_a_state_that_is_not_to_be_kept_is_not(keeping: Engine) -> None:
    with running(keeping) as url, httpx.Client(base_url=url, timeout=60) as asked:
        for _ in range(3):
            assert reused(asked, about("secrets", steps=5, checkpoint=False)) == 0


@pytest.mark.parametrize("share", [False, True])
def test_keys_resume_from_each_other_s_states_only_where_they_are_told_to(keeping: Engine, share: bool) -> None:
    with (
        running(keeping, keys=KEYS, share_checkpoints=share) as url,
        httpx.Client(base_url=url, timeout=60) as asked,
    ):
        body = about(f"keys that share: {share}", steps=5)
        assert reused(asked, body, "key-a") == 0
        assert reused(asked, body, "key-a") > 0
        assert (reused(asked, body, "key-b") > 0) == share
        assert reused(asked, body, "key-b") > 0


def test_openai_s_usage_counts_cached_tokens(keeping: Engine) -> None:
    body = {
        "model": "jev-latest",
        "input": about("cached tokens", steps=5)["state"],
        "questions": [{"type": "predicate", "instructions": "Was it late?"}],
    }
    with running(keeping) as url, httpx.Client(base_url=url, timeout=60) as asked:
        first, second = (asked.post("/v1/decisions", json=body).json() for _ in range(2))
        salted = asked.post("/v1/decisions", json={**body, "x_flide": {"cache_salt": "s"}}).json()
    cached = [answer["usage"]["input_tokens_details"]["cached_tokens"] for answer in (first, second, salted)]
    assert cached == [0, second["x_flide"]["reused_tokens"], 0]
    assert cached[1] > 0


def test_metrics_are_the_store_s_and_name_no_salt(keeping: Engine) -> None:
    with running(keeping, keys=KEYS) as url, httpx.Client(base_url=url, timeout=60) as asked:
        for steps in (3, 4, 5):
            reused(asked, about("metrics", steps=steps, cache_salt="hidden"), "key-a")
        text = asked.get("/metrics", headers={"Authorization": "Bearer key-a"}).text
    stats = keeping.checkpoint_stats()
    assert stats is not None
    found = read(text)
    for name in ("hits", "saved_tokens"):
        assert found[f"flide_checkpoint_{name}_total"] == getattr(stats, name) > 0
    assert found["flide_checkpoint_bytes:device"] == stats.bytes > 0
    assert "hidden" not in text
    assert "ana" not in text


def test_what_a_frontend_prepares_brings_its_salt_and_its_answer_what_was_reused(keeping: Engine) -> None:
    async def ask() -> list[int]:
        async with Linked(keeping) as linked:
            bodies = [about("links", steps=5), about("links", steps=6), about("links", steps=6, cache_salt="s")]
            decisions = [await linked.ask(body) for body in bodies]
            assert b"flide_checkpoint_hits_total" in await linked.remote.metrics()
            return [decision.usage.reused_tokens for decision in decisions]

    first, second, salted = asyncio.run(asyncio.wait_for(ask(), 60))
    assert first == salted == 0
    assert second > 0


def test_the_client_says_where_to_keep_and_reads_what_was_reused(keeping: Engine) -> None:
    request = DecisionRequest([{"role": "user", "content": "open the box " * 20}] * 4, {"q": Noul("Is it late?")})
    other = replace(request, state=[*request.state[:2], {"role": "user", "content": "no, the other one"}])  # type: ignore[index]
    with running(keeping) as url, Client(url) as client:
        client.decide([replace(request, checkpoint=2, cache_salt="hint")])
        (hinted,) = client.decide([replace(other, cache_salt="hint")])
        client.decide([replace(request, cache_salt="none")])
        (plain,) = client.decide([replace(other, cache_salt="none")])
    assert hinted.usage.reused_tokens > plain.usage.reused_tokens == 0
