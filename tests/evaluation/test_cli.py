"""flide eval, as a shell sees it, and the report it prints."""

from __future__ import annotations

import io
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flide.cli import main
from flide.evaluation import report as reports
from flide.evaluation.metrics import LabelledAnswer, evaluate
from flide.evaluation.report import Report, answer_rows, check_drawing, check_rows
from flide.evaluation.rows import LabelledRow, read_rows
from flide.runtime.engine import Engine
from flide.runtime.rounds import RoundRunner
from tests.test_cli import Stream, stdin
from tests.tiny_model import TINY_MODEL, tiny_model_directory

QUESTIONS = {
    "damaged": {"type": "noul", "instructions": "Damaged?"},
    "team": {"type": "choice", "criteria": {"shipping": None, "billing": "money", "a\u0308 \u6a21": None}},
    "anger": {"type": "score", "criteria": ["calm", "annoyed", "furious"]},
}


def row(number: int, **fields: Any) -> dict[str, Any]:
    targets = {"damaged": number % 2 == 0, "team": ["shipping", "billing"][number % 2], "anger": number % 3}
    return {"model": "m", "state": f"state {number}", "questions": QUESTIONS, "targets": targets, **fields}


LINES = [json.dumps(row(i)) for i in range(9)]
MANY_LINES = [json.dumps(row(i)) for i in range(66)]  # more than are answered at once


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(LINES), encoding="utf-8")
    return path


@pytest.fixture
def much_data(tmp_path: Path) -> Path:
    path = tmp_path / "many.jsonl"
    path.write_text("\n".join(MANY_LINES), encoding="utf-8")
    return path


def run(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, str, str]:
    model = [] if "--model" in arguments else ["--model", str(tiny_model_directory())]
    code = main(["eval", *map(str, arguments), *model, "--device", "cpu"])
    return code, *capsys.readouterr()


def test_a_table_per_type_with_intervals(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--data", data, "--bootstrap", 50)
    assert code == 0
    head, *tables = out.split("\n\n")
    assert head.startswith(f"{TINY_MODEL} on {data}: 9 rows, 27 questions\n")
    assert "95 % intervals from 50 resamples" in head
    assert [table.split(":")[0] for table in tables] == ["noul", "choice", "score", "overall"]
    for table in tables:
        lines = table.strip().split("\n")[1:]
        assert len(lines) == 10 + table.startswith("score")
        assert all(line.count("[") == 1 and len(line) < 80 for line in lines)
    code, out, _ = run(capsys, "--data", data, "--bootstrap", 0, "--temperature-score", 2)
    assert code == 0
    assert "[" not in out
    assert "temperature: noul 1, choice 1, score 2" in out


def test_json_is_one_object_of_the_engine_s_own_answers(
    much_data: Path, engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(capsys, "--data", much_data, "--json", "--bootstrap", 20)
    assert code == 0
    assert out.count("\n") == 1
    result = json.loads(out)
    assert result["model"] == TINY_MODEL
    assert result["temperature"] == {"noul": 1, "choice": 1, "score": 1}
    assert result["bootstrap"] == {"resamples": 20, "seed": 0, "level": 0.95}
    assert result["overall"]["rows"] == 66
    assert set(result["types"]) == {"noul", "choice", "score"}
    assert sum(map(sum, result["types"]["score"]["confusion"]["anger"]["counts"])) == 66
    right = total = 0.0
    for line in MANY_LINES:
        body = json.loads(line)
        (decision,) = engine.decide([body])
        answer = decision["team"]
        total -= math.log(answer.probabilities[body["targets"]["team"]])
        right += answer.value == body["targets"]["team"]
    metrics = result["types"]["choice"]["metrics"]
    assert metrics["nll"]["value"] == pytest.approx(total / 66, abs=1e-6)
    assert metrics["accuracy"]["value"] == pytest.approx(right / 66)


def test_temperatures_act_on_their_type(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--data", data, "--json", "--bootstrap", 0]
    plain, one, two = (
        json.loads(run(capsys, *options, *more)[1])
        for more in ([], ["--temperature-choice", 3], ["--temperature", 3, "--temperature-noul", 1])
    )
    assert one["temperature"] == {"noul": 1, "choice": 3, "score": 1}
    assert two["temperature"] == {"noul": 1, "choice": 3, "score": 3}
    for result, changed in ((one, {"choice"}), (two, {"choice", "score"})):
        for name, metrics in result["types"].items():
            same = metrics["metrics"]["nll"]["value"] == plain["types"][name]["metrics"]["nll"]["value"]
            assert same == (name not in changed)
            assert metrics["metrics"]["accuracy"] == plain["types"][name]["metrics"]["accuracy"]
    mass = json.loads(run(capsys, *options, "--equal-mass")[1])
    assert mass["ece"] == {"bins": 15, "binning": "mass"}
    assert len(mass["types"]["choice"]["reliability"]) == 9


@pytest.mark.parametrize("source", ["file", "stdin"])
def test_bad_rows_are_all_listed_and_nothing_runs_or_is_written(
    source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reports, "check_drawing", lambda: None)
    monkeypatch.setattr(RoundRunner, "begin", None)  # would fail
    lines = [*LINES[:3], "{bad", "", json.dumps(row(1, state="")), json.dumps(row(1, targets={"damaged": 2}))]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(lines))
    stdin(monkeypatch, path.read_bytes())
    name = path if source == "file" else "-"
    code, out, err = run(capsys, "--data", name, "--out", tmp_path / "out")
    assert (code, out) == (2, "")
    assert [line.split(":")[1] for line in err.splitlines()] == [" line 4", " line 6", " line 7", " 3 bad rows"]
    assert not (tmp_path / "out").exists()


def test_rows_the_engine_refuses_are_bad_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reports, "check_drawing", lambda: None)
    monkeypatch.setattr(RoundRunner, "begin", None)
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join([LINES[0], json.dumps(row(1, state="word " * 40_000)), LINES[2]]))
    code, out, err = run(capsys, "--data", path, "--out", tmp_path / "out")
    assert (code, out) == (2, "")
    assert "flide: line 2: body.questions.damaged: the prompt has " in err
    assert err.endswith("flide: 1 bad row: nothing was run\n")
    assert not (tmp_path / "out").exists()


def test_a_model_that_fails_is_a_failure_of_a_line(
    much_data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = RoundRunner.begin

    def fragile(self: RoundRunner, plan: Any) -> Any:
        if any(r.request.state == "state 65" for r in plan.requests):
            raise MemoryError
        return begin(self, plan)

    monkeypatch.setattr(RoundRunner, "begin", fragile)
    code, out, err = run(capsys, "--data", much_data)
    assert (code, out) == (1, "")
    assert err.endswith("flide: line 66: MemoryError\n")


@pytest.mark.parametrize(
    "options",
    [
        ["--data", "no/such/file"],
        ["--data", "nul\0"],
        ["--data", "."],
        ["--temperature", "0"],
        ["--temperature-noul", "nan"],
        ["--temperature-choice", "-1"],
        ["--temperature-score", "inf"],
        ["--bootstrap", "-1"],
        ["--model", "./no-such-directory"],
        ["--dtype", "int4"],
        ["--out", __file__],
        ["--out", f"{__file__}/out"],
    ],
)
def test_bad_arguments_exit_2_with_one_line(
    options: list[str], data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reports, "check_drawing", lambda: None)
    assert main(["eval", "--data", str(data), *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines()[-1].startswith("flide: ")
    assert "Errno" not in captured.err


def test_no_rows_is_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.jsonl").write_text("\n\n")
    code, _, err = run(capsys, "--data", tmp_path / "rows.jsonl")
    assert code == 2
    assert err.startswith("flide: there are no rows in ")


@pytest.mark.parametrize(("out", "err"), [(False, True), (True, True), (False, False)])
def test_progress_is_shown_as_in_decide(
    out: bool, err: bool, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stdout, stderr = Stream(terminal=out), Stream(terminal=err)
    monkeypatch.setattr(sys, "stdout", stdout)
    monkeypatch.setattr(sys, "stderr", stderr)
    assert main(["eval", "--data", str(data), "--bootstrap", "0"]) == 0
    assert stdout.getvalue()
    assert ("9/9" in stderr.getvalue()) == (err and not out)


def test_a_missing_matplotlib_is_told_before_anything_runs(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, err = run(capsys, "--data", data, "--out", tmp_path / "out")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert "pip install 'flide-torch[eval]'" in err
    assert not (tmp_path / "out").exists()


def test_files_are_written(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    for options in ([], ["--equal-mass"]):
        code, out, _ = run(capsys, "--data", data, "--out", tmp_path / "a" / "b", "--json", *options)
        assert code == 0
        assert {file.name for file in (tmp_path / "a" / "b").iterdir()} == {"metrics.json", "reliability.png"}
        assert json.loads((tmp_path / "a" / "b" / "metrics.json").read_bytes()) == json.loads(out)
        assert "\u6a21" in (tmp_path / "a" / "b" / "metrics.json").read_text(encoding="utf-8")
        picture = (tmp_path / "a" / "b" / "reliability.png").read_bytes()
        assert picture.startswith(b"\x89PNG")
        assert len(picture) > 10_000


def test_what_cannot_be_written_is_shown_all_the_same(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reports, "check_drawing", lambda: None)
    (tmp_path / "out" / "metrics.json").mkdir(parents=True)
    code, out, err = run(capsys, "--data", data, "--out", tmp_path / "out", "--bootstrap", 0)
    assert code == 1
    assert out.count("AURC") == 4
    assert "flide: cannot write to " in err
    assert "Errno" not in err


def test_names_cannot_move_the_cursor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows\x1b[2J.jsonl"
    path.write_text(LINES[0])
    code, out, _ = run(capsys, "--data", path)
    assert code == 0
    assert "\x1b" not in out
    assert "1 row, 3 questions" in out
    assert "1 question in 1 row" in out


def test_help_is_as_light_as_it_was() -> None:
    code = (
        "import sys; from flide.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "loaded = {'transformers', 'matplotlib', 'flide.evaluation.report'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "eval" in done.stdout


def rows_of(lines: list[str], **options: Any) -> list[LabelledRow]:
    rows, errors = read_rows(lines, **options)
    assert errors == []
    return rows


def test_answers_are_in_the_order_of_their_targets(engine: Engine) -> None:
    lines = [json.dumps(row(3)), json.dumps(row(4, targets={"anger": [0, 1, 1]}))]
    rows = rows_of(lines, partial=True)
    progress: list[int] = []
    answers = answer_rows(engine, rows, on_progress=progress.append)
    assert progress == [2]
    assert [(a.row, a.question_id, a.type) for a in answers] == [
        (1, "damaged", "noul"),
        (1, "team", "choice"),
        (1, "anger", "score"),
        (2, "anger", "score"),
    ]
    (decision, _) = engine.decide([r.request for r in rows])
    noul, choice, score, last = answers
    assert noul.options == ("true", "false")
    assert choice.options == tuple(QUESTIONS["team"]["criteria"])
    assert score.options == ("0", "1", "2")
    assert noul.target == (0, 1)
    assert last.target == (0, 0.5, 0.5)
    assert choice.probabilities == pytest.approx(tuple(decision["team"].probabilities.values()), abs=1e-6)
    assert noul.probabilities[0] == pytest.approx(decision["damaged"].value, abs=1e-6)
    assert check_rows(engine, rows) == []


@pytest.mark.parametrize("options", [1, 255])
def test_questions_of_one_and_of_255_options(options: int, engine: Engine) -> None:
    names = {f"option {i}": None for i in range(options)}
    body = row(0, questions={"q": {"type": "choice", "criteria": names}}, targets={"q": f"option {options - 1}"})
    answers = answer_rows(engine, rows_of([json.dumps(body)] * 2))
    metrics = evaluate(answers, resamples=10).types["choice"].estimates
    assert (metrics["nll"].value == 0) == (options == 1)


def test_one_type_is_one_table() -> None:
    answers = [LabelledAnswer(0, "q", "noul", ("true", "false"), (0.5, 0.5), (0.0, 1.0))]
    text = Report("m", "d", {}, evaluate(answers, bins=1)).to_text()
    assert text.count("AURC") == 1
    assert "overall" not in text
    assert "ECE (1 bin of equal width)  0.5000" in " ".join(text.split("\n")).replace("   ", "  ")


def test_saving_without_matplotlib_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    answers = [LabelledAnswer(0, "q", "noul", ("true", "false"), (0.5, 0.5), (0.0, 1.0))]
    with pytest.raises(ValueError, match="flide-torch"):
        Report("m", "d", {}, evaluate(answers)).save(tmp_path)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="matplotlib"):
        check_drawing()


def test_a_closed_standard_input_is_told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["eval", "--data", "-"]) == 2
    assert capsys.readouterr().err == "flide: standard input is closed\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    assert main(["eval", "--data", "-"]) == 2
