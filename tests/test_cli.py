"""flide decide and flide info, as a shell sees them."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flide.cli import main
from flide.runtime.engine import EMBEDDED_MODEL, embedded_model_directory

TICKET = Path(__file__).parents[1] / "examples" / "ticket.json"
BODY = {"model": "m", "state": "s", "questions": {"q": {"type": "noul", "instructions": "Is it?"}}}


def stdin(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


def test_the_example_is_answered_and_the_model_is_called_random(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["decide", str(TICKET), "--device", "cpu"]) == 0
    captured = capsys.readouterr()
    assert list(json.loads(captured.out)["answers"]) == ["damaged", "team", "anger", "deadline"]
    assert captured.out.count("\n") == 1
    assert "random" in captured.err


def test_pretty_is_the_same_answer(capsys: pytest.CaptureFixture[str]) -> None:
    main(["decide", str(TICKET)])
    plain = json.loads(capsys.readouterr().out)
    main(["decide", str(TICKET), "--pretty"])
    pretty = capsys.readouterr().out
    assert json.loads(pretty) == plain
    assert pretty.count("\n") > 20


def test_a_body_on_standard_input(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    stdin(monkeypatch, TICKET.read_bytes())
    assert main(["decide", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["usage"]["output_tokens"] == 4


BAD_BODIES = {
    "empty": b"",
    "not_json": b"{",
    "truncated": TICKET.read_bytes()[:-40],
    "array": b"[1, 2]",
    "no_questions": b'{"model": "m", "state": "s", "questions": {}}',
    "duplicate_key": b'{"model": "m", "model": "m", "state": "s", "questions": {"q": {"type": "noul"}}}',
    "nan": b'{"model": "m", "state": {"x": NaN}, "questions": {"q": {"type": "noul"}}}',
    "overflow": b'{"model": "m", "state": {"x": 1e999}, "questions": {"q": {"type": "noul"}}}',
    "surrogate": b'{"model": "m", "state": "\\ud800", "questions": {"q": {"type": "noul"}}}',
    "latin1": b'{"model": "m", "state": "caf\xe9", "questions": {"q": {"type": "noul"}}}',
    "deep": b'{"model": "m", "state": ' + b"[" * 100_000,
}


@pytest.mark.parametrize("body", BAD_BODIES.values(), ids=BAD_BODIES.keys())
def test_a_bad_body_prints_nothing_and_one_line_of_error(
    body: bytes, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stdin(monkeypatch, body)
    assert main(["decide", "-"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("flide: ")
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize("how", ["suffix", "flag", "detected"])
def test_jsonl_answers_each_line_in_order(
    how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [json.dumps({**BODY, "state": f"state {i}"}) for i in range(150)]
    lines[3], lines[70], lines[71] = "{bad", '{"model": 1}', ""
    data = ("\r\n" if how == "flag" else "\n").join(lines).encode()
    path = tmp_path / ("in.jsonl" if how == "suffix" else "in.txt")
    path.write_bytes(data)
    assert main(["decide", str(path), *(["--jsonl"] if how == "flag" else [])]) == 2
    results = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(results) == 149
    assert results[3]["line"] == 4
    assert results[70]["line"] == 71
    assert [i for i, r in enumerate(results) if "error" in r] == [3, 70]
    assert results[3]["error"][0]["type"] == "json_invalid"


def test_good_jsonl_exits_zero(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps(BODY) + "\n\n" + json.dumps(BODY) + "\n")
    assert main(["decide", str(path)]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert json.loads(first)["answers"]["q"]["noul"] == pytest.approx(json.loads(second)["answers"]["q"]["noul"])


@pytest.mark.parametrize(
    "arguments",
    [
        ["decide", "no/such/file.json"],
        ["decide", str(TICKET), "--model", "./no-such-directory"],
        ["decide", str(TICKET), "--model", str(TICKET)],
        ["decide", str(TICKET), "--device", "tpu"],
        ["decide", str(TICKET), "--dtype", "int4"],
        ["decide", str(TICKET.parent)],
        ["info", "./no-such-directory"],
    ],
)
def test_bad_arguments_exit_2_with_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines()[-1].startswith("flide: ")


def test_info_shows_family_sizes_labels_and_memory(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(embedded_model_directory())]) == 0
    text = capsys.readouterr().out
    for word in ("Qwen35ForDecision", "parameters", "labels", "255", "3 linear_attention, 1 full_attention", "weights"):
        assert word in text
    assert main(["info", str(embedded_model_directory()), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["labels"] == 255


def run(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "flide", *arguments], capture_output=True, text=True, **options)


def test_python_m_flide_and_version() -> None:
    done = run("--version", timeout=120, check=False)
    assert done.returncode == 0
    assert done.stdout.startswith("flide ")


def test_a_reader_that_leaves_early_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text((json.dumps(BODY) + "\n") * 300)
    command = f"{sys.executable} -m flide decide {path} | head -n 1"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=120, check=False)
    assert json.loads(done.stdout)["model"] == EMBEDDED_MODEL
    assert "Traceback" not in done.stderr
