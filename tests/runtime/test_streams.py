"""The engine's ways of running a model give the same answers."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch

from flide import Choice, DecisionRequest, Engine, EngineConfig, Noul, Score
from flide.runtime import StreamCapacity, TokenTree
from flide.runtime.capacity import needed_by, padded
from flide.runtime.metadata import ForkMetadata, fresh_caches
from flide.runtime.rounds import RoundReport
from tests.tiny_model import tiny_engine
from tests.tolerance import PROBABILITY_FP32

REQUESTS = [
    DecisionRequest(
        f"The box of order {i} was crushed. " * (3 * i + 1),
        {
            "damaged": Noul("Is it damaged?"),
            "team": Choice("Which team?", ["shipping", "billing"]),
            "anger": Score("How angry?", ["calm", "annoyed", "furious"]),
            **{f"more {k}": Noul(f"Is {k} more than {i}?") for k in range(3 * i)},
        },
    )
    for i in range(4)
]


def assert_same_answers(config: EngineConfig, expected: list[Any]) -> list[Any]:
    with tiny_engine(config) as engine:
        decisions = engine.decide(REQUESTS)
    for got, want in zip(decisions, expected, strict=True):
        assert list(got) == list(want)
        for name in want:
            assert got[name].value == pytest.approx(want[name].value, abs=PROBABILITY_FP32)
    return decisions


@pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None, reason="Inductor needs a C++ compiler on the CPU"
)
@pytest.mark.slow  # .ci/run has it beside the fast tests
def test_a_compiled_engine_compiles_once(engine: Engine) -> None:
    expected = engine.decide(REQUESTS)
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters["stats"]
    before = counters["unique_graphs"]
    assert_same_answers(EngineConfig(device="cpu", compile=True, max_round_tokens=400), expected)  # several rounds
    assert counters["unique_graphs"] - before == 1


@pytest.mark.parametrize("option", [{"fork": False}, {"selective_readout": False}, {"max_round_requests": 1}])
def test_ablations_change_no_answer(engine: Engine, option: dict[str, Any]) -> None:
    expected = engine.decide(REQUESTS)
    decisions = assert_same_answers(EngineConfig(device="cpu", **option), expected)
    for got, want in zip(decisions, expected, strict=True):
        assert got.usage.output_tokens == want.usage.output_tokens
        assert got.usage.input_tokens + got.usage.shared_tokens == want.usage.input_tokens + want.usage.shared_tokens
        more = got.usage.input_tokens > want.usage.input_tokens
        assert more == (option == {"fork": False} and len(want) > 1)


@pytest.mark.parametrize("graphs", ["explicit", "reduce-overhead"])
def test_graphs_need_cuda(graphs: Any) -> None:
    with pytest.raises(ValueError, match="needs a CUDA device"):
        tiny_engine(EngineConfig(device="cpu", graphs=graphs))


TREES = {
    "one": TokenTree([1] * 70, (TokenTree([1] * 3), TokenTree([1] * 64))),
    "no_trunk": TokenTree([], (TokenTree([1]),)),
    "no_branches": TokenTree([1] * 5),
    "deep": TokenTree([1] * 64, (TokenTree([1], (TokenTree([1]), TokenTree([1, 2]))), TokenTree([3]))),
    "marker_rows": TokenTree([1, 2], (TokenTree([1, 2, 3], readouts=(0, -1)),)),
}


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES.keys())
def test_needs_are_those_of_the_packed_stream(tree: TokenTree) -> None:
    assert needed_by(tree) == ForkMetadata.pack([tree], caches=fresh_caches([tree])).capacity


def test_needs_add_up() -> None:
    trees = list(TREES.values())
    total = needed_by(trees[0])
    for tree in trees[1:]:
        total = total + needed_by(tree)
    assert total == ForkMetadata.pack(trees, caches=fresh_caches(trees)).capacity


@pytest.mark.parametrize("tokens", [1, 64, 65, 20_000])
def test_padding_holds_the_stream_and_has_no_unit_size(tokens: int) -> None:
    needed = StreamCapacity(tokens, 1, 1)
    capacity = padded(needed)
    assert capacity.holds(needed)
    assert min(capacity.tokens, capacity.segments, capacity.readouts, capacity.pages) >= 2
    assert capacity.tokens - tokens < 64


def test_rounds_are_reported_until_nobody_asks(caplog: pytest.LogCaptureFixture) -> None:
    reports: list[RoundReport] = []

    def failing(report: RoundReport) -> None:
        raise KeyError("an observer's own fault")

    with tiny_engine(EngineConfig(device="cpu")) as engine:
        engine.observe(failing)
        stop = engine.observe(reports.append)
        decisions = engine.decide(REQUESTS)
        stop()
        engine.decide(REQUESTS[:1])
    usages = [decision.usage for decision in decisions]
    assert sum(report.requests for report in reports) == len(REQUESTS)
    assert sum(r.trunk_tokens + r.branch_tokens for r in reports) == sum(usage.input_tokens for usage in usages)
    assert sum(r.shared_tokens for r in reports) == sum(usage.shared_tokens for usage in usages)
    for report in reports:
        assert (report.run.rows, report.run.captured) == (report.trunk_tokens + report.branch_tokens, False)
        assert report.run.seconds > 0
    assert caplog.text.count("an observer of rounds failed") == len(reports) + 1
