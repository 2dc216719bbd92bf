"""Clients that others wrote: the conformance suite and the official SDK."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typesafe_sdk import RetryPolicy, TypeSafeClient

from flide import Engine, EngineConfig
from flide.serve.keys import KeyRing
from tests.openjev import write_base, write_package
from tests.serve.conftest import BODY, Served
from tests.serve.running import running


def conformance(url: str, *arguments: str) -> str:
    command = [str(Path(sys.executable).with_name("jevcompat")), "test", url, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    return done.stdout


def test_the_conformance_suite_passes(served: Served) -> None:
    assert "MUST 32/32, SHOULD 13/13" in conformance(served.url)


def test_the_conformance_suite_passes_with_a_key(engine: Engine) -> None:
    with running(engine, keys=KeyRing({"name": "s3cret"})) as url:
        assert "MUST 32/32, SHOULD 15/15" in conformance(url, "--key", "s3cret")


def test_the_conformance_suite_passes_with_an_open_jev_package(tmp_path: Path) -> None:
    package = write_package(tmp_path, write_base(tmp_path / "base"))
    with Engine.from_pretrained(package, EngineConfig(device="cpu")) as engine, running(engine) as url:
        assert "MUST 32/32, SHOULD 13/13" in conformance(url)


@pytest.mark.parametrize("compression", ["zstd", False])
def test_the_official_sdk_reads_every_answer(served: Served, compression: Any) -> None:
    client = TypeSafeClient(api_key="x", base_url=served.url, compression=compression, retry=RetryPolicy(max_retries=0))
    long = {**BODY, "state": BODY["state"] * 40}  # packed from 1,024 bytes on
    response = client.system_one(**long)
    assert set(response.answers) == set(BODY["questions"])
