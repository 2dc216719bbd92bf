"""flide decide and flide info, as a shell sees them."""

from __future__ import annotations

import codecs
import errno
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from flide.cli import main
from flide.runtime.engine import EMBEDDED_MODEL, embedded_model_directory
from flide.runtime.plan import RoundPlan
from flide.runtime.rounds import RoundRunner

TICKET = Path(__file__).parents[1] / "examples" / "ticket.json"
BODY = {"model": "m", "state": "s", "questions": {"q": {"type": "noul", "instructions": "Is it?"}}}


def stdin(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


def test_the_example_is_answered_and_the_model_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["decide", str(TICKET), "--device", "cpu"]) == 0
    captured = capsys.readouterr()
    assert list(json.loads(captured.out)["answers"]) == ["damaged", "team", "anger", "deadline"]
    assert captured.out.count("\n") == 1
    assert "answering with flide-demo" in captured.err


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


def test_jsonl_may_begin_with_a_byte_order_mark_and_end_without_a_newline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "in.JSONL"
    path.write_bytes(codecs.BOM_UTF8 + b"\r\n".join([json.dumps(BODY).encode()] * 2))
    assert main(["decide", str(path)]) == 0
    assert capsys.readouterr().out.count("\n") == 2
    path = tmp_path / "in.json"
    path.write_bytes(codecs.BOM_UTF8 + json.dumps(BODY).encode())
    assert main(["decide", str(path)]) == 0


PRETTY = json.dumps({**BODY, "questions": {"q": BODY["questions"]["q"], "r": {"type": "noul"}}}, indent=1)
BROKEN = {
    "trailing_comma": (PRETTY[:-2] + ",\n}", (13, 1)),
    "object_on_its_own_line": ('{\n "model": "m",\n "questions":\n {"q": {"type": "noul"}}\n ,\n}', (6, 1)),
    "unfinished": (PRETTY[:-2], (12, 3)),
    "text_behind": (PRETTY + "\n{}x", (14, 1)),
    "not_ascii": ('{"model": "\u00e9\U0001f600" "state"', (1, 16)),
}


@pytest.mark.parametrize(("text", "place"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_body_is_not_taken_for_lines_and_its_fault_is_located(
    text: str, place: tuple[int, int], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stdin(monkeypatch, text.encode())
    assert main(["decide", "-"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("flide: line {}, column {}: JSON decode error: ".format(*place))


def test_binary_lines_are_bad_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\x00\xff\xfe\n" + json.dumps(BODY).encode() + b"\n\x80" + b"[" * 10_000 + b"\n\x0c\n")
    assert main(["decide", str(path)]) == 2
    first, second, third = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first["line"], third["line"]) == (1, 3)
    assert second["answers"]


def test_good_jsonl_exits_zero(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps(BODY) + "\n\n" + json.dumps(BODY) + "\n")
    assert main(["decide", str(path)]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert json.loads(first)["answers"]["q"]["noul"] == pytest.approx(json.loads(second)["answers"]["q"]["noul"])


def test_lines_the_model_fails_on_are_failures_not_bad_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RoundRunner.begin

    def fragile(self: RoundRunner, plan: RoundPlan) -> Any:
        if any(r.request.state == "large" for r in plan.requests):
            raise MemoryError
        return run(self, plan)

    monkeypatch.setattr(RoundRunner, "begin", fragile)
    bodies = [BODY, {**BODY, "state": "large"}, {}, BODY]
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(map(json.dumps, bodies)))
    assert main(["decide", str(path)]) == 1
    results = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert results[1] == {"error": "MemoryError", "line": 2}
    assert ["error" in result for result in results] == [False, True, True, False]
    path = tmp_path / "in.json"
    path.write_text(json.dumps(bodies[1]))
    assert main(["decide", str(path)]) == 1
    assert capsys.readouterr().err.endswith("\nflide: MemoryError\n")


def test_a_refusal_is_one_printable_line_that_speaks_of_one_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "in.json"
    path.write_text(json.dumps({**BODY, "questions": {"a\nb\x1b[2J\u202e": {"type": "choix"}}}))
    assert main(["decide", str(path)]) == 2
    expected = "flide: body.questions.a b?[2J?: Question's 'type' should be 'noul', 'choice' or 'score'\n"
    assert capsys.readouterr().err == expected
    path.write_text(json.dumps({**BODY, "state": "word " * 40_000}))
    assert main(["decide", str(path)]) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("flide: body.questions.q: the prompt has ")


@pytest.mark.parametrize(
    "arguments",
    [
        ["decide", "no/such/file.json"],
        ["decide", "nul\0.json"],
        ["decide", str(TICKET), "--model", "./no-such-directory"],
        ["decide", str(TICKET), "--model", str(TICKET)],
        ["decide", str(TICKET), "--device", "tpu"],
        ["decide", str(TICKET), "--dtype", "int4"],
        ["decide", str(TICKET.parent)],
        ["decide", str(TICKET), "--model", "no-such-organisation/no-such-model"],
        ["info", "./no-such-directory"],
    ],
)
def test_bad_arguments_exit_2_with_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines()[-1].startswith("flide: ")
    assert "Errno" not in captured.err


class Stream(io.StringIO):
    def __init__(self, *, terminal: bool, encoding: str = "utf-8") -> None:
        super().__init__()
        self.terminal, self.named = terminal, encoding

    def isatty(self) -> bool:
        return self.terminal

    @property
    def encoding(self) -> str:
        return self.named


@pytest.mark.parametrize(("out", "err"), [(False, True), (True, True), (False, False)])
def test_progress_is_shown_where_nothing_else_is(
    out: bool, err: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(json.dumps(BODY) + "\n" + json.dumps(BODY))
    stdout, stderr = Stream(terminal=out), Stream(terminal=err)
    monkeypatch.setattr(sys, "stdout", stdout)
    monkeypatch.setattr(sys, "stderr", stderr)
    assert main(["decide", str(path)]) == 0
    assert [json.loads(line)["model"] for line in stdout.getvalue().splitlines()] == [EMBEDDED_MODEL] * 2
    assert ("2/2" in stderr.getvalue()) == (err and not out)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_any_encoding_can_be_printed(encoding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "mod\u00e8le-\u6a21"
    model.symlink_to(embedded_model_directory())
    path = tmp_path / "in.json"
    question = {"type": "choice", "criteria": {"\u00e9": None, "\u6a21\U0001f600": None}}
    path.write_text(json.dumps({**BODY, "questions": {"q": question}}), encoding="utf-8")
    monkeypatch.setattr(sys, "stdout", stdout := Stream(terminal=False, encoding=encoding))
    assert main(["decide", str(path), "--model", f"{model}/"]) == 0
    stdout.getvalue().encode(encoding)
    answer = json.loads(stdout.getvalue())
    assert answer["model"] == model.name
    assert list(answer["answers"]["q"]["probabilities"]) == list(question["criteria"])
    monkeypatch.setattr(sys, "stdout", stdout := Stream(terminal=False, encoding=encoding))
    assert main(["info", str(model)]) == 0
    stdout.getvalue().encode(encoding)


def test_info_shows_family_sizes_labels_and_memory(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(embedded_model_directory())]) == 0
    text = capsys.readouterr().out
    for word in ("Qwen35ForDecision", "parameters", "labels", "255", "4 linear_attention, 2 full_attention", "weights"):
        assert word in text
    assert main(["info", str(embedded_model_directory()), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["labels"] == 255


class TestImport:
    """What --import names is imported before anything else, by every command that loads a model."""

    MODEL = str(embedded_model_directory())

    @pytest.fixture(autouse=True)
    def modules_as_before(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "modules", dict(sys.modules))

    def test_files_and_names(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.syspath_prepend(tmp_path)
        for name in ("own_family", "own_head"):
            (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / name)!r}, 'x').close()\n", encoding="utf-8")
        file = str(tmp_path / "own_family.py")
        assert main(["info", "--import", file, "--import", file, "--import", "own_head", self.MODEL]) == 0
        assert (tmp_path / "own_family").exists()
        assert (tmp_path / "own_head").exists()

    @pytest.mark.parametrize(
        ("name", "content", "said"),
        [
            ("absent.py", None, "No such file"),
            ("no.such.module", None, "No module named 'no'"),
            (".relative", None, "no name of a module"),
            ("broken.py", "def", "invalid syntax"),
            ("lacking.py", "import no_such_module", "No module named 'no_such_module'"),
            ("json.py", "", "there is another module called json"),
        ],
        ids=lambda value: None if value is None else value[:12],
    )
    def test_what_cannot_be_imported_is_bad_input(
        self,
        name: str,
        content: str | None,
        said: str,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.chdir(tmp_path)
        if content is not None:
            (tmp_path / name).write_text(content, encoding="utf-8")
        assert main(["info", "--import", name, self.MODEL]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert f"--import: cannot import {name!r}: " in captured.err
        assert said in captured.err
        assert captured.err.count("\n") == 1

    @pytest.mark.parametrize("command", ["decide", "eval", "calibrate", "train", "merge", "serve", "info"])
    def test_every_command_has_it(self, command: str, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            main([command, "--help"])
        assert "--import MODULE" in capsys.readouterr().out

    def test_a_model_directory_is_not_where_code_is_looked_for(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        config = {"model_type": "evil", "architectures": ["Evil"], "auto_map": {"AutoModel": "evil.Evil"}}
        (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
        (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'x')", encoding="utf-8")
        assert main(["info", str(tmp_path)]) == 2
        assert "no model family for architecture Evil, evil" in capsys.readouterr().err
        assert not (tmp_path / "ran").exists()


def run(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "flide", *arguments], capture_output=True, text=True, **options)


def test_python_m_flide_and_version() -> None:
    done = run("--version", timeout=120, check=False)
    assert done.returncode == 0
    assert done.stdout.startswith("flide ")


def test_closed_and_full_streams(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Full(Stream):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdin", None)
        assert main(["decide", "-"]) == 2
        assert capsys.readouterr() == ("", "flide: standard input is closed\n")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", None)
        assert main(["decide", str(TICKET)]) == 1
        assert capsys.readouterr().err == "flide: standard output is closed\n"
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", Full(terminal=False))
        assert main(["info", str(embedded_model_directory())]) == 1
        assert capsys.readouterr().err == "flide: cannot write to standard output: No space left on device\n"
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", Full(terminal=False))
        assert main(["decide", "no/such/file"]) == 2
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", None)
        assert main(["decide", str(TICKET)]) == 0
        sys.stderr.close()
    json.loads(capsys.readouterr().out)  # the answer and nothing else


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_process_on_a_full_disk_complains_once() -> None:
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-m", "flide", "info", str(embedded_model_directory())]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)


def test_ctrl_c_ends_the_process_cleanly_however_often_it_is_pressed(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text((json.dumps({**BODY, "state": "word " * 300}) + "\n") * 2000)
    command = [sys.executable, "-m", "flide", "decide", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert json.loads(process.stdout.readline())["answers"]
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            process.send_signal(signal.SIGINT)
            time.sleep(0.003)
        assert process.poll() == 130
        assert "Traceback" not in process.stderr.read()


def test_a_reader_that_leaves_early_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text((json.dumps(BODY) + "\n") * 300)
    command = f"{sys.executable} -m flide decide {path} | head -n 1"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=120, check=False)
    assert json.loads(done.stdout)["model"] == EMBEDDED_MODEL
    assert "Traceback" not in done.stderr
