"""``flide serve`` as a process."""

from __future__ import annotations

import http.client
import json
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from flide.cli import main
from tests.serve.conftest import BODY
from tests.tiny_model import tiny_model_directory


@contextmanager
def serving(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-m", "flide", "serve", "--port", "0", "--device", "cpu", *arguments]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            found = re.search(r"listening on (http://\S+)", line)
            if found:
                break
        else:
            raise AssertionError("the server ended")
        threading.Thread(target=process.stderr.read, daemon=True).start()
        yield process, found[1]
    finally:
        process.kill()
        process.wait()


def ask(url: str, body: Any, **headers: str) -> http.client.HTTPConnection:
    """A connection on which a request was sent, whether or not the server has noticed."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    connection.request("POST", "/v1/systemone", json.dumps(body), {"Content-Type": "application/json", **headers})
    return connection


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_server_answers_what_it_took_before_it_ends(number: signal.Signals) -> None:
    with serving("--model", str(tiny_model_directory()), "--alias", "nick", "--served-model-name", "tiny") as (
        process,
        url,
    ):
        long = {**BODY, "questions": {f"q{i}": {"type": "noul", "instructions": f"Is {i} said?"} for i in range(100)}}
        nicked = httpx.post(f"{url}/v1/systemone", json={**BODY, "model": "nick"}, timeout=60)
        assert nicked.json()["model"] == "tiny"
        models = httpx.get(f"{url}/v1/models", timeout=60).json()["models"]
        assert [model["name"] for model in models] == ["tiny", "nick", "jev-latest"]
        asked = [ask(url, long) for _ in range(4)]
        process.send_signal(number)
        assert [connection.getresponse().status for connection in asked] == [200] * 4
        assert process.wait(60) == (130 if number == signal.SIGINT else 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--host", "0.0.0.0"), "anyone on the network"),
        (("--api-key", "a b"), "printable ASCII"),
        (("--api-key", "a", "--api-key-file", "b"), "not both"),
        (("--api-key-file", "/nonexistent"), "key file"),
        (("--max-queue", "0"), "max_waiting"),
        (("--max-bodies-bytes", "0"), "max_bodies_bytes"),
        (("--port", "70000"), "port"),
        (("--model", "/nonexistent"), "nonexistent"),
        (("--temperature", "0"), "temperature"),
        (("--checkpoint-gb", "-1"), "checkpoint_gb"),
        (("--checkpoint-gb", "nan"), "checkpoint_gb"),
        (("--checkpoint-host-gb", "1"), "checkpoint_host_gb needs checkpoint_gb"),
    ],
)
def test_bad_options_are_one_line_and_exit_code_2(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *arguments]) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert shown.count("\n") == (2 if "--model" in arguments else 1)  # "making the model ready" is one


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    model = ["--model", str(tiny_model_directory())]
    with serving(*model) as (_, url):
        port = url.rpartition(":")[2]
        command = [sys.executable, "-m", "flide", "serve", *model, "--port", port, "--device", "cpu"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 2
        assert "cannot listen" in done.stderr
