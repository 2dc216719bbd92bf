"""The page about formats runs from top to bottom."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flide import EngineConfig
from flide.heads import head as heads
from flide.runtime import format as formats
from tests.tolerance import PROBABILITY_FP32

PAGE = (Path(__file__).parents[1] / "docs" / "add-a-format.md").read_text(encoding="utf-8")
CODE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What the page defines; nothing stays registered."""
    monkeypatch.setattr(heads, "_KINDS", dict(heads._KINDS))
    monkeypatch.setattr(formats, "_MAKERS", dict(formats._MAKERS))
    namespace: dict[str, Any] = {"__name__": "markers"}
    exec("\n".join(CODE), namespace)  # noqa: S102 - our own page
    return namespace


def test_the_page_runs_and_its_markers_are_read(page: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    engine_class, request, decision = page["Engine"], page["request"], page["decision"]
    with engine_class(page["model"], page["tokenizer"], EngineConfig(device="cpu")) as engine:
        prepared = engine.prepare(request)
        with pytest.raises(ValueError, match=r"questions\.a: the text holds a control token"):
            engine.prepare({"model": "m", "state": "s", "questions": {"a": {"type": "noul", "instructions": "<|im"}}})
    (marker,) = page["tokenizer"].control_ids([page["MARKER"]])
    rows = prepared.layout.reads[0]
    assert prepared.layout.rows[0][rows].tolist() == [marker] * 4  # two options, and Yes and No
    assert prepared.layout.depth == 2
    with engine_class(page["model"], page["tokenizer"], EngineConfig(device="cpu", fork=False)) as unforked:
        (alone,) = unforked.decide([request])
    for name, answer in decision.answers.items():
        expected = pytest.approx(list(alone[name].probabilities.values()), abs=PROBABILITY_FP32)
        assert list(answer.probabilities.values()) == expected
