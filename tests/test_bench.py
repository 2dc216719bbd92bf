"""The benchmarks: the parity check lets right answers through and catches small faults; bodies have the right size."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from flide.models import Gemma4ForDecision, Qwen35ForDecision
from flide.runtime.config import EngineConfig
from flide.runtime.plan import RoundPlan
from flide.runtime.rounds import RoundRunner
from flide.runtime.tree import TreeLayout
from scripts.bench_engine import PARITY, Bench, products
from scripts.bench_server import around_number, fitted, number, steps, with_candidates
from scripts.random_models import config_of
from scripts.workloads import FIXED, FIXED_CANDIDATES, CandidateShape
from tests.models.gemma4 import published
from tests.oracle import tiny_config

WORKLOADS = ("race", "multirc", "decision_index")


GEMMA = {**published("e2b"), "model_type": "gemma4_text", "vocab_size": 512, "vocab_size_per_layer_input": 512}
FIELDS = {"qwen": {**tiny_config().to_dict(), "vocab_size": 512}, "gemma": {**GEMMA, "sliding_window": 100}}


@pytest.fixture(
    scope="module",
    params=[("qwen", True), ("qwen", False), ("gemma", True), ("gemma", False)],
    ids=["qwen_forked", "qwen_unforked", "gemma_forked", "gemma_unforked"],
)
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    family, fork = request.param
    bench = Bench(FIELDS[family], EngineConfig(device="cpu", fork=fork), device="cpu")
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

    def faulty(self: RoundRunner, plan: RoundPlan) -> Any:
        plan.requests[:] = [replace(r, layout=_with_a_wrong_page(r.layout)) for r in plan.requests]
        return begin(self, plan)

    monkeypatch.setattr(RoundRunner, "begin", faulty)
    assert max(bench.parity().values()) > PARITY


def test_the_order_of_questions_matters(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = bench.ask
    monkeypatch.setattr(bench, "ask", lambda parts: [_rotated(decision) for decision in ask(parts)])
    assert max(bench.parity().values()) > PARITY


def test_candidates_are_read_by_a_scalar_head_and_share_their_question_by_choice() -> None:
    shape = CandidateShape(100, ((30, (5, 6, 7)), (30, (8, 9))))
    bench = Bench(FIELDS["qwen"], EngineConfig(device="cpu", depth=3), candidates=True, device="cpu")
    bench.model.float()
    bench.start(["jev_race"])
    assert 0 < bench.parity()["jev_race"] < 1e-3
    assert bench.prepare(shape).needed.tokens == shape.rows
    bench.config = replace(bench.config, depth=2)
    assert bench.prepare(shape).needed.tokens == shape.rows + 3 * 30
    bench.worker.close()
    assert FIXED_CANDIDATES["jev_97"].rows == 5813


def test_bodies_of_candidates_have_texts_of_their_own() -> None:
    bodies, _ = with_candidates("jev_97", len, bodies=2)
    assert bodies[0] != bodies[1]
    questions = json.loads(bodies[0])["questions"].values()
    assert sum(len(question["criteria"]) for question in questions) == 97


def test_no_state_is_sent_twice() -> None:
    (data, _), _ = with_candidates("jev_race", len, bodies=2)
    before, behind = around_number(data)
    states = {json.loads(before + number(i).encode() + behind)["state"] for i in range(1000, 1100)}
    assert len(states) == 100
    assert len({len(state) for state in states}) == 1
    assert around_number(b"GET /health") == (b"GET /health", b"")


class TestProducts:
    """What an ideal engine multiplies, counted in a forward pass."""

    def test_every_layer_is_whole_where_no_other_can_be_cut(self) -> None:
        model = Qwen35ForDecision.from_config(FIELDS["qwen"])
        found = products(model, 70, 3)
        assert {product.rows for product in found} == {70}
        model.merge_projections()
        tensors = {**dict(model.named_buffers()), **dict(model.named_parameters())}
        assert all(product.columns == len(tensors[product.weight]) for product in found)
        counted = sum(tensors[product.weight].numel() for product in found)
        matrices = [x for name, x in model.model.named_parameters() if name.endswith("proj.weight")]
        matrices += [
            x for name, x in model.model.named_parameters() if "in_proj" in name and not name.endswith("proj.weight")
        ]
        assert counted == sum(x.numel() for x in matrices)

    @pytest.mark.parametrize("size", ["e2b", "e4b"])
    def test_behind_the_last_writer_only_readout_rows_count(self, size: str) -> None:
        model = Gemma4ForDecision.on_meta(config_of(size))
        last, width = model.model.last_writer, model.model.per_layer_size
        found = products(model, 600, 4)
        for product in found:
            parts = product.weight.split(".")
            if parts[1] == "layers":
                layer = int(parts[2])
                is_key_value = product.weight.endswith(("k_proj.weight", "v_proj.weight"))
                whole = layer < last or (layer == last and is_key_value)
                assert product.rows == (600 if whole else 4), product
        per_layer = [(x.columns, x.rows) for x in found if x.weight == "model.per_layer_model_projection.weight"]
        assert per_layer == [(last * width, 600), ((len(model.model.layers) - last) * width, 4)]


def _with_a_wrong_page(layout: TreeLayout) -> TreeLayout:
    rows, end = layout.rows.copy(), layout.trunk_length
    rows[0, end - 64 : end] = rows[0, end - 64 : end][::-1]
    return replace(layout, rows=rows)


def _rotated(decision: Any) -> Any:
    names, answers = list(decision.answers), list(decision.answers.values())
    return replace(decision, answers=dict(zip(names, answers[1:] + answers[:1], strict=True)))


@pytest.mark.parametrize("per_word", [1, 3])
@pytest.mark.parametrize("name", FIXED)
def test_bodies_over_http_have_the_tokens_of_the_workload(name: str, per_word: int) -> None:
    """With a server that counts words, and some for what stands around a state and a question."""

    def ask(data: bytes) -> int:
        request = json.loads(data)
        questions = [per_word * len(q["instructions"].split()) + 33 for q in request["questions"].values()]
        return 11 + per_word * len(request["state"].split()) + sum(questions)

    bodies, tokens = fitted(FIXED[name], ask, bodies=3)
    assert len(set(bodies)) == 3
    assert tokens == [ask(data) for data in bodies]
    for data, count in zip(bodies, tokens, strict=True):
        questions = list(json.loads(data)["questions"].values())
        assert len(questions) == len(FIXED[name].branches)
        assert all(len(question["criteria"]) == 4 for question in questions)
        assert abs(count - FIXED[name].rows) < per_word


def test_the_steps_of_a_server_are_medians() -> None:
    timings = [b"read;dur=0.50, wait;dur=0.01, run;dur=2.00", b"read;dur=0.70, wait;dur=0.03, run;dur=4.00", b""]
    assert steps(timings) == {"server_read_ms": 0.6, "server_wait_ms": 0.02, "server_run_ms": 3.0}
    assert steps([]) == {}
