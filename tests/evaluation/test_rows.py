"""Labelled rows: every good line is read, every bad one is told, whatever the file holds."""

from __future__ import annotations

import codecs
import json
import math
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flide.errors import RequestError
from flide.evaluation.rows import LabelledRow, RowError, iter_rows, parse_row, read_rows
from flide.runtime.decision import answer_question, num_options
from flide.runtime.wire import MAX_ERRORS, parse_body
from tests.refusals import check_errors
from tests.runtime.test_wire_properties import bodies

NOUL: dict[str, Any] = {"type": "noul"}
CHOICE: dict[str, Any] = {"type": "choice", "criteria": {"b": None, "a": "first", "c": None}}
SCORE: dict[str, Any] = {"type": "score", "criteria": ["low", "middle", "high"]}
HUGE = 10**400


def row(question: Any = NOUL, target: Any = True, **fields: Any) -> dict[str, Any]:
    return {"model": "m", "state": "s", "questions": {"q": question}, "targets": {"q": target}, **fields}


def read(*values: Any, **options: Any) -> tuple[list[LabelledRow], list[RowError]]:
    return read_rows([v if isinstance(v, bytes | str) else json.dumps(v) for v in values], **options)


GOOD = {
    "true": (NOUL, True, (1, 0)),
    "false": (NOUL, False, (0, 1)),
    "probability": (NOUL, 0.25, (0.25, 0.75)),
    "probability-0": (NOUL, 0, (0, 1)),
    "probability-1": (NOUL, 1, (1, 0)),
    "probability-negative-0": (NOUL, -0.0, (0, 1)),
    "option": (CHOICE, "a", (0, 1, 0)),
    "weights": (CHOICE, {"c": 1, "b": 3}, (0.75, 0, 0.25)),
    "weights-all": (CHOICE, {"a": 2.5, "b": 2.5, "c": 5}, (0.25, 0.25, 0.5)),
    "weights-large": (CHOICE, {"a": 1.7e308, "b": 1.7e308}, (0.5, 0.5, 0)),
    "weights-small": (CHOICE, {"a": 5e-324}, (0, 1, 0)),
    "weights-large-integer": (CHOICE, {"a": 10**300, "c": 10**300}, (0, 0.5, 0.5)),
    "weights-negative-0": (CHOICE, {"a": 1, "b": -0.0}, (0, 1, 0)),
    "one-option": ({"type": "choice", "criteria": {"only": None}}, "only", (1,)),
    "empty-name": ({"type": "choice", "criteria": {"": None, "x": None}}, "", (1, 0)),
    "255-options": (
        {"type": "choice", "criteria": {str(i): None for i in range(255)}},
        "254",
        (*[0] * 254, 1),
    ),
    "level": (SCORE, 2, (0, 0, 1)),
    "level-weights": (SCORE, {"0": 1, "2": 1}, (0.5, 0, 0.5)),
    "level-list": (SCORE, [0, 1, 3], (0, 0.25, 0.75)),
    "one-level": ({"type": "score", "criteria": ["x"]}, 0, (1,)),
}


@pytest.mark.parametrize(("question", "target", "expected"), GOOD.values(), ids=GOOD.keys())
def test_targets_become_probabilities_in_the_order_of_answers(question: Any, target: Any, expected: Any) -> None:
    (result,), errors = read(row(question, target))
    assert errors == []
    assert result.targets == {"q": expected}
    assert all(type(p) is float and math.copysign(1, p) == 1 for p in result.targets["q"])
    assert result.request == parse_body(row(question, target))
    assert result.line == 1
    answer = answer_question(result.request.questions["q"], result.targets["q"])
    if isinstance(target, str):
        assert answer.value == target
    assert tuple(answer.probabilities.values()) == expected


BAD = {
    "noul-null": (NOUL, None, ()),
    "noul-text": (NOUL, "true", ()),
    "noul-above": (NOUL, 1.0001, ()),
    "noul-below": (NOUL, -5e-324, ()),
    "noul-huge": (NOUL, HUGE, ()),
    "noul-weights": (NOUL, {"true": 1}, ()),
    "choice-unknown": (CHOICE, "A", ("A",)),
    "choice-index": (CHOICE, 1, ()),
    "choice-list": (CHOICE, [1, 0, 0], ()),
    "choice-boolean": (CHOICE, True, ()),
    "choice-no-weights": (CHOICE, {}, ()),
    "choice-zeros": (CHOICE, {"a": 0, "b": 0.0}, ()),
    "choice-negative": (CHOICE, {"a": 1, "b": -1e-9}, ("b",)),
    "choice-unknown-weight": (CHOICE, {"a": 1, "d": 0}, ("d",)),
    "choice-huge": (CHOICE, {"a": HUGE}, ("a",)),
    "choice-text-weight": (CHOICE, {"a": "1"}, ("a",)),
    "choice-boolean-weight": (CHOICE, {"a": True}, ("a",)),
    "choice-null-weight": (CHOICE, {"a": None}, ("a",)),
    "score-above": (SCORE, 3, ()),
    "score-below": (SCORE, -1, ()),
    "score-float": (SCORE, 1.0, ()),
    "score-boolean": (SCORE, True, ()),
    "score-text": (SCORE, "1", ()),
    "score-short-list": (SCORE, [1, 1], ()),
    "score-long-list": (SCORE, [1, 1, 1, 1], ()),
    "score-zeros": (SCORE, [0, 0, 0], ()),
    "score-nested": (SCORE, [[1], 0, 0], (0,)),
    "score-padded-index": (SCORE, {"01": 1}, ("01",)),
    "score-other-digits": (SCORE, {"\u0661": 1}, ("\u0661",)),
    "score-huge": (SCORE, HUGE, ()),
}


@pytest.mark.parametrize(("question", "target", "loc"), BAD.values(), ids=BAD.keys())
def test_bad_targets_are_located(question: Any, target: Any, loc: tuple[Any, ...]) -> None:
    with pytest.raises(RequestError) as info:
        parse_row(json.dumps(row(question, target)), 1)
    (entry,) = check_errors(info.value)
    assert entry["loc"] == ["body", "targets", "q", *loc]
    rows, errors = read(row(), row(question, target), row())
    assert [r.line for r in rows] == [1, 3]
    assert errors == [RowError(2, str(info.value))]
    assert str(errors[0]).startswith("line 2: body.targets.q")


def test_every_question_has_a_target_and_every_target_a_question() -> None:
    questions = {"x": NOUL, "y": CHOICE, "z": SCORE}
    lines = [
        row(questions=questions, targets={"z": 0, "y": "a", "x": True}),
        row(questions=questions, targets={"x": True}),
        row(questions=questions, targets={"x": True, "y": "a", "z": 0, "w": 1}),
        row(questions=questions, targets={}),
        row(questions=questions, targets=[True]),
        {key: value for key, value in row().items() if key != "targets"},
    ]
    rows, errors = read(*lines)
    assert [list(r.targets) for r in rows] == [["x", "y", "z"]]
    assert [(e.line, e.message.split(":")[0], e.message.count(";") + 1) for e in errors] == [
        (2, "body.targets.y", 2),
        (3, "body.targets.w", 1),
        (4, "body.targets.x", 3),
        (5, "body.targets", 1),
        (6, "body.targets", 1),
    ]
    rows, errors = read(*lines, partial=True)
    assert [list(r.targets) for r in rows] == [["x", "y", "z"], ["x"], []]
    assert [e.line for e in errors] == [3, 5, 6]


def test_all_that_is_wrong_with_a_row_is_told_at_once_up_to_a_limit() -> None:
    questions = {f"q{i}": NOUL for i in range(50)}
    _, (error, many) = read(row(state=" \n", target=2), row(questions=questions, targets=dict.fromkeys(questions, 2)))
    assert "body.state" in error.message
    assert "body.targets.q:" in error.message
    assert many.message.count("Target of a noul") == MAX_ERRORS


@pytest.mark.parametrize("state", ["", " \t\r\n\u00a0", {}, []])
def test_a_state_is_not_empty(state: Any) -> None:
    rows, errors = read(row(state=state))
    assert rows == []
    assert errors[0].message == "body.state: A labelled row's state should not be empty"


def hostile() -> dict[str, tuple[bytes, str]]:
    good = json.dumps(row()).encode()
    return {
        "not-json": (b"{", "body.1: JSON decode error"),
        "text-behind": (good + b"x", "JSON decode error: Extra data"),
        "two-rows": (good + good, "JSON decode error: Extra data"),
        "array": (b"[" + good + b"]", "body: Input should be an object"),
        "null": (b"null", "body: Input should be an object"),
        "nan": (b'{"targets": {"q": NaN}}', "NaN and Infinity are not JSON"),
        "infinite": (b'{"targets": {"q": -Infinity}}', "NaN and Infinity are not JSON"),
        "large": (b'{"targets": {"q": 1e999}}', "Number is too large"),
        "many-digits": (b'{"targets": {"q": ' + b"9" * 5000 + b"}}", "too many digits"),
        "repeated-target": (good.replace(b'{"q": true}', b'{"q": true, "q": false}'), "the same key twice"),
        "repeated-targets": (good[:-1] + b', "targets": {}}', "the same key twice"),
        "latin1": (b'{"state": "caf\xe9"}', "body.14: JSON decode error: Body is not valid UTF-8"),
        "utf16": (json.dumps(row()).encode("utf-16"), "not valid UTF-8"),
        "surrogate": (good.replace(b'"s"', b'"\\ud800"'), "lone surrogates"),
        "deep": (b"[" * 100_000, "levels deep"),
        "mark-later": (codecs.BOM_UTF8 + good, "byte order mark"),
        "binary": (b"\x00\x01\x02", "JSON decode error"),
        "no-questions": (
            json.dumps(row(questions={})).encode(),
            "body.questions: Input should have at least 1 question",
        ),
        "256-options": (
            json.dumps(row({"type": "choice", "criteria": {str(i): None for i in range(256)}}, "1")).encode(),
            "body.questions.q.criteria: Input should have at most 255 options, not 256",
        ),
        "long-names": (json.dumps(row(CHOICE, "x" * 1_000_000)).encode(), "body.targets.q.xxx"),
    }


@pytest.mark.parametrize("as_text", [False, True])
def test_hostile_lines_are_told_and_stop_nothing(as_text: bool, tmp_path: Path) -> None:
    good = json.dumps(row()).encode()
    parts = [good]
    for line, _ in hostile().values():
        parts += [line, good]
    path = tmp_path / "rows.jsonl"
    # A line feed within UTF-16 makes two lines of it; none of these has one.
    path.write_bytes(b"\n".join(parts))
    source: Any = [part.decode("utf-8", "surrogateescape") for part in parts] if as_text else path
    rows, errors = read_rows(source)
    assert [r.line for r in rows] == list(range(1, len(parts) + 1, 2))
    assert [e.line for e in errors] == list(range(2, len(parts) + 1, 2))
    for error, (name, (_, message)) in zip(errors, hostile().items(), strict=True):
        assert message in error.message, name
        assert len(error.message) < 1000


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", [b"", codecs.BOM_UTF8])
@pytest.mark.parametrize("last", [False, True])
def test_line_ends_marks_and_blank_lines(end: str, mark: bytes, last: bool, tmp_path: Path) -> None:
    text = end.join([json.dumps(row()), "", " \t\f\v", "{bad", json.dumps(row(state="caf\u00e9\u2028"))])
    path = tmp_path / "rows.jsonl"
    path.write_bytes(mark + text.encode() + (end.encode() if last else b""))
    rows, errors = read_rows(str(path))
    assert [r.line for r in rows] == [1, 5]
    assert [e.line for e in errors] == [4]
    assert read_rows((mark + text.encode()).split(b"\n")) == (rows, errors)
    assert read_rows((mark.decode() + text).split("\n")) == (rows, errors)


def test_an_empty_file_has_no_rows_and_a_missing_one_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(codecs.BOM_UTF8)
    assert read_rows(tmp_path / "empty") == ([], [])
    assert read_rows([]) == ([], [])
    with pytest.raises(OSError, match="missing"):
        read_rows(tmp_path / "missing")


def test_a_long_state_is_read() -> None:
    (result,), errors = read(row(state="x" * 1_000_000, questions={"q" * 100_000: NOUL}, targets={"q" * 100_000: True}))
    assert errors == []
    assert len(result.request.state) == 1_000_000  # type: ignore[arg-type]


def test_lines_are_read_one_by_one() -> None:
    line = json.dumps(row(state="x" * 100_000)).encode()

    def lines() -> Iterator[bytes]:
        for _ in range(200):
            yield line + b" "  # a copy

    tracemalloc.start()
    try:
        assert sum(isinstance(item, LabelledRow) for item in iter_rows(lines())) == 200
        assert tracemalloc.get_traced_memory()[1] < 10 * len(line)
    finally:
        tracemalloc.stop()


@st.composite
def labelled(draw: st.DrawFn) -> dict[str, Any]:
    body = draw(bodies)
    weight = st.floats(0, 1e308) | st.integers(0, 10**30)
    targets: dict[str, Any] = {}
    for question_id, question in body["questions"].items():
        n = num_options(parse_body(body).questions[question_id])
        weights = draw(st.lists(weight, min_size=n, max_size=n).filter(any))
        if question["type"] == "noul":
            targets[question_id] = draw(st.booleans() | st.floats(0, 1))
        elif question["type"] == "choice":
            names = list(question["criteria"])
            targets[question_id] = draw(st.sampled_from(names) | st.just(dict(zip(names, weights, strict=True))))
        else:
            levels = {str(i): w for i, w in enumerate(weights)}
            targets[question_id] = draw(st.integers(0, n - 1) | st.sampled_from([weights, levels]))
    return {**body, "targets": targets}


@settings(max_examples=40, deadline=None)
@given(labelled())
def test_any_labelled_body_with_a_state_is_a_row(value: dict[str, Any]) -> None:
    rows, errors = read(value)
    if not (value["state"].strip() if isinstance(value["state"], str) else value["state"]):
        assert (rows, len(errors)) == ([], 1)
        return
    assert errors == []
    assert rows[0].request == parse_body(value)
    assert list(rows[0].targets) == list(value["questions"])
    for question_id, target in rows[0].targets.items():
        assert len(target) == num_options(rows[0].request.questions[question_id])
        assert math.fsum(target) == pytest.approx(1, abs=1e-12)
        assert min(target) >= 0


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from("qab012"), inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([NOUL, CHOICE, SCORE]), json_values)
def test_any_target_is_a_distribution_or_refused(question: Any, target: Any) -> None:
    rows, errors = read(row(question, target))
    assert len(rows) + len(errors) == 1
    for result in rows:
        assert math.fsum(result.targets["q"]) == pytest.approx(1, abs=1e-12)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.binary(max_size=40) | st.text(max_size=40), max_size=5))
def test_any_lines_are_rows_or_errors(lines: list[bytes | str]) -> None:
    rows, errors = read_rows(lines)
    assert rows == []
    assert [e.line for e in errors] == sorted({e.line for e in errors})
