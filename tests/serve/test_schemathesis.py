"""Requests made from the OpenAPI document, valid ones and others: nothing is a server error, and every answer is as the
document says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from flide import Engine
from flide.serve.keys import KeyRing
from tests.serve.running import running

# A schema cannot say that the values of choices differ, so that one that fits may still be refused. Of what does not
# fit, some is refused for its size first.
CONFIG = """
[checks.negative_data_rejection]
expected-statuses = [400, 401, 403, 405, 413, 415, 422]
[[operations]]
include-path = "/v1/decisions"
[operations.checks]
positive_data_acceptance.enabled = false
"""


def explore(engine: Engine, directory: Path, *arguments: str) -> None:
    (directory / "schemathesis.toml").write_text(CONFIG, encoding="utf-8")
    with running(engine, keys=KeyRing({"name": "key"})) as url:
        command = [str(Path(sys.executable).with_name("schemathesis")), "run", f"{url}/openapi.json", "--no-color"]
        command += ["--header", "Authorization: Bearer key", "--request-timeout", "60", *arguments]
        done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=900, check=False)
    shown = "\n".join(line[:300] for line in done.stdout.splitlines()[-60:])  # bodies can be long
    assert done.returncode == 0, shown + done.stderr[-1000:]
    assert "Tested: " in done.stdout


def test_generated_requests_are_answered_as_documented(engine: Engine, tmp_path: Path) -> None:
    explore(engine, tmp_path, "--max-examples", "2", "--generation-deterministic")


@pytest.mark.slow
def test_many_more_generated_requests(engine: Engine, tmp_path: Path) -> None:
    explore(engine, tmp_path, "--max-examples", "200", "--continue-on-failure")
