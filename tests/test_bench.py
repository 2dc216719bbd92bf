"""The benchmark's parity check: it lets right answers through and catches small faults."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from flide.runtime.config import EngineConfig
from flide.runtime.rounds import PreparedRequest, RoundRunner
from flide.runtime.tree import TreeLayout
from scripts.bench_engine import PARITY, Bench
from tests.oracle import tiny_config

WORKLOADS = ("race", "multirc", "decision_index")


@pytest.fixture(scope="module", params=[True, False], ids=["forked", "unforked"])
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    fields = {**tiny_config().to_dict(), "vocab_size": 512}
    bench = Bench(fields, EngineConfig(device="cpu", fork=request.param), device="cpu")
    bench.model.float()
    bench.start(WORKLOADS)
    yield bench
    bench.worker.close()


def test_right_answers_pass(bench: Bench) -> None:
    parity = bench.parity()
    assert set(parity) == set(WORKLOADS)
    assert max(parity.values()) < 1e-3  # float32


def test_a_page_of_other_tokens_in_the_trunk_fails(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = RoundRunner.begin

    def faulty(self: RoundRunner, requests: list[PreparedRequest]) -> Any:
        return begin(self, [replace(r, layout=_with_a_wrong_page(r.layout)) for r in requests])

    monkeypatch.setattr(RoundRunner, "begin", faulty)
    assert max(bench.parity().values()) > PARITY


def test_the_order_of_questions_matters(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = bench.ask
    monkeypatch.setattr(bench, "ask", lambda parts: [_rotated(decision) for decision in ask(parts)])
    assert max(bench.parity().values()) > PARITY


def _with_a_wrong_page(layout: TreeLayout) -> TreeLayout:
    rows, end = layout.rows.copy(), layout.trunk_length
    rows[0, end - 64 : end] = rows[0, end - 64 : end][::-1]
    return replace(layout, rows=rows)


def _rotated(decision: Any) -> Any:
    names, answers = list(decision.answers), list(decision.answers.values())
    return replace(decision, answers=dict(zip(names, answers[1:] + answers[:1], strict=True)))
