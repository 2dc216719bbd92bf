from __future__ import annotations

from pathlib import Path

import pytest

from flide.errors import FlideError
from flide.serve.config import ServeConfig
from flide.serve.faults import Fault
from flide.serve.keys import KeyRing


def test_holders_are_known_by_their_keys() -> None:
    ring = KeyRing({"a": "key-a", "b": "key-b"})
    assert ring.holder("Bearer key-b") == "b"
    assert ring.holder("bearer  key-a ") == "a"


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "Basic key-a", "key-a", "Bearer key-c", "Bearer é", "Bearer a b"]
)
def test_others_are_not(header: str | None) -> None:
    with pytest.raises(Fault) as caught:
        KeyRing({"a": "key-a"}).holder(header)
    assert caught.value.status == 401
    assert caught.value.headers["WWW-Authenticate"] == "Bearer"
    assert caught.value.detail["error_type"] == "authentication_error"
    assert "key-a" not in str(caught.value.detail)


def test_a_key_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# people\n\nana: s3cret\nbot:other:with:colons\n", encoding="utf-8")
    ring = KeyRing.from_file(path)
    assert ring.holder("Bearer s3cret") == "ana"
    assert ring.holder("Bearer other:with:colons") == "bot"


@pytest.mark.parametrize(
    "text", ["", "# none\n", "ana\n", "ana:x\nana:y\n", "ana:x\nbob:x\n", ":x\n", "ana:\n", "ana:a b\n", "ana:é\n"]
)
def test_a_bad_key_file_is_refused_without_showing_a_key(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(FlideError) as caught:
        KeyRing.from_file(path)
    assert "é" not in str(caught.value)


def test_a_missing_key_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FlideError, match="key file"):
        KeyRing.from_file(tmp_path / "none")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.7", "example.org"])
def test_the_network_is_let_in_with_keys_only(host: str) -> None:
    with pytest.raises(FlideError, match="anyone on the network"):
        ServeConfig(host=host)
    assert not ServeConfig(host=host, insecure=True).is_local
    assert not ServeConfig(host=host, keys=KeyRing({"a": "b"})).is_local


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.3.2.1", "::1"])
def test_this_machine_needs_none(host: str) -> None:
    assert ServeConfig(host=host).is_local


@pytest.mark.parametrize(
    "options",
    [
        {"max_waiting": 0},
        {"max_wait": 0},
        {"max_wait": float("nan")},
        {"request_timeout": float("inf")},
        {"port": 70000},
        {"root_path": "api"},
        {"max_per_key": 0},
        {"max_questions": 0},
    ],
)
def test_limits_that_make_no_sense_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(FlideError):
        ServeConfig(**options)  # type: ignore[arg-type]
