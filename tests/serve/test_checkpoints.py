"""Checkpoints over HTTP: options of requests, who resumes from whose states, and what is told of it."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from flide import Engine
from flide.runtime.checkpoints.stats import CheckpointStats
from flide.runtime.wire import parse_body
from flide.serve.app import DecisionServer
from flide.serve.checkpoint_metrics import COUNTS, CheckpointMetrics
from flide.serve.config import ServeConfig
from flide.serve.keys import KeyRing
from tests.serve.conftest import BODY

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
    families = text_string_to_metric_families(generate_latest(registry).decode())
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
