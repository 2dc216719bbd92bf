"""One compilation and one CUDA graph per capacity, whatever the rounds look like."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flide import DecisionRequest, Engine, EngineConfig, Noul
from flide.heads import OptionHead
from flide.models import Qwen35ForDecision
from flide.models.qwen3_5 import Qwen35Config
from flide.ops.launch import launch_table
from flide.runtime import ForkMetadata, StreamCapacity, TokenTree
from flide.runtime.capacity import needed_by, smallest_that_holds
from flide.runtime.graphs import CudaStreams, GraphMode
from flide.runtime.metadata import fresh_caches
from flide.runtime.streams import PendingLogits
from flide.runtime.tree import TreeLayout
from tests.tiny_model import tiny_engine
from tests.tolerance import BF16_TWO_TREES, PROBABILITY_FP32

pytestmark = pytest.mark.gpu

VOCAB, NAN_TOKEN, MAX_TOKENS, LABELS = 512, 511, 1024, 26
Trees = list[TokenTree]


def small_model() -> Qwen35ForDecision:
    """One period of layers, heads of the real sizes."""
    config = Qwen35Config(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=512,
        layer_types=("linear_attention", "full_attention", "linear_attention", "full_attention"),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=256,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        linear_conv_kernel_dim=4,
        rope_theta=1e7,
        partial_rotary_factor=0.25,
        mrope_section=(11, 11, 10),
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        max_position_embeddings=4096,
    )
    torch.manual_seed(0)
    model = Qwen35ForDecision.from_config(config, dtype=torch.bfloat16, device="cuda").eval()
    with torch.no_grad():
        model.model.embed_tokens.weight[NAN_TOKEN] = float("nan")
    model.merge_projections()
    return model


class Captured:
    """Streams of the small model on a stream of their own, and what they count."""

    def __init__(self, graphs: GraphMode, *, compile: bool) -> None:
        self.model = small_model()
        self.streams = CudaStreams(
            self.model,
            OptionHead(self.model.label_rows(list(range(LABELS)))),
            max_tokens=MAX_TOKENS,
            max_prompt_tokens=4096,
            compile=compile,
            graphs=graphs,
        )
        self.compiled = int(compile)
        before = compilations()
        self.streams.start()
        self.compilations = compilations() - before

    def submit(self, trees: Trees) -> PendingLogits:
        return self.streams.submit([TreeLayout.of(tree) for tree in trees], needed(trees))

    def logits(self, trees: Trees) -> Tensor:
        return torch.from_numpy(self.submit(trees).result()[0])

    @torch.inference_mode()
    def uncaptured(self, trees: Trees) -> Tensor:
        """The same callable at the same capacity, launched kernel by kernel."""
        capacity = smallest_that_holds(self.streams.capacities, needed(trees))
        meta = ForkMetadata.pack(trees, capacity=capacity, caches=fresh_caches(trees)).to("cuda")
        return self.streams._uncaptured(meta.tokens, meta)[: needed(trees).readouts].cpu()

    def addresses(self) -> list[int]:
        model = [x.data_ptr() for x in (*self.model.parameters(), *self.model.buffers())]
        inputs = [g.meta.tokens.data_ptr() for g in self.streams._graphs.values()]
        return model + inputs + [self.streams._arena.data_ptr()]


def compilations() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def needed(trees: Trees) -> StreamCapacity:
    total = needed_by(trees[0])
    for tree in trees[1:]:
        total = total + needed_by(tree)
    return total


def random_round(rng: random.Random, max_tokens: int = MAX_TOKENS) -> Trees:
    """Any number of requests, long and short, some of them without questions, without a trunk, or with empty parts."""

    def tokens(count: int) -> list[int]:
        return [rng.randrange(NAN_TOKEN) for _ in range(count)]

    def branch() -> TokenTree:
        return TokenTree(tokens(rng.choice([0, 1, 2, 3, 17, 63, 64, 65, 90])))

    trees: Trees = []
    for _ in range(rng.choice([1, 1, 2, 3, 8])):
        trunk = tokens(rng.choice([0, 1, 2, 63, 64, 65, 129, 300, 700]))
        children = tuple(c for c in (branch() for _ in range(rng.choice([0, 1, 2, 5, 20]))) if c.tokens)
        tree = TokenTree(trunk, children)
        if tree.num_tokens and (not trees or needed([*trees, tree]).tokens <= max_tokens):
            trees.append(tree)
    if not trees or needed(trees).tokens > max_tokens:
        return random_round(rng, max_tokens)
    return trees


@pytest.fixture(
    scope="module",
    params=[("explicit", True), ("explicit", False), ("reduce-overhead", True)],
    ids=["explicit", "explicit_eager", "reduce_overhead"],
)
def captured(request: pytest.FixtureRequest) -> Iterator[Captured]:
    torch._dynamo.reset()
    graphs, compile = request.param
    before = torch.cuda.current_stream()
    yield Captured(graphs, compile=compile)
    torch.cuda.set_stream(before)


def test_any_round_replays_to_the_bits_of_the_callable_uncaptured(captured: Captured) -> None:
    rng = random.Random(0)
    addresses, first = captured.addresses(), random_round(rng)
    expected_first = captured.uncaptured(first)
    count, graphs = compilations(), len(captured.streams._graphs)
    sizes = set()
    for k in range(200):
        trees = random_round(rng, rng.choice([64, 200, MAX_TOKENS]))
        sizes.add(smallest_that_holds(captured.streams.capacities, needed(trees)))
        got = captured.logits(trees)
        assert got.isfinite().all()
        assert torch.equal(got, captured.uncaptured(trees)), f"round {k}"
    assert len(sizes) > 8
    assert torch.equal(captured.logits(first), expected_first)
    assert compilations() == count
    assert len(captured.streams._graphs) == graphs
    assert captured.addresses() == addresses


def test_one_compilation_and_a_graph_per_capacity(captured: Captured) -> None:
    assert captured.compilations == captured.compiled
    assert captured.streams.report.graphs == len(captured.streams.capacities) == len(captured.streams._graphs)
    assert captured.streams.report.graph_bytes < 3e9
    print(captured.streams.report)


def test_what_a_round_leaves_behind_is_inert(captured: Captured) -> None:
    """A round of NaN fills every workspace, page and scratch state of its capacity and of smaller ones."""
    rng = random.Random(1)
    poison = [TokenTree([NAN_TOKEN] * 500, (TokenTree([NAN_TOKEN] * 65),) * 8)]
    for _ in range(10):
        trees = random_round(rng)
        clean = captured.logits(trees)
        assert captured.logits(poison).isnan().all()
        for layer in captured.model.modules():
            for name in ("kv_pool", "scratch"):
                pool = getattr(layer, name, None)
                if pool is not None:
                    pool.fill_(float("nan"))
        assert torch.equal(captured.logits(trees), clean)


def test_two_rounds_in_flight_keep_their_answers(captured: Captured) -> None:
    rng = random.Random(2)
    for _ in range(20):
        a, b = random_round(rng), random_round(rng)
        expected = captured.logits(a), captured.logits(b)
        first = captured.submit(a)
        second = captured.submit(b)
        assert torch.equal(torch.from_numpy(first.result()[0]), expected[0])
        logits, run = second.result()
        assert torch.equal(torch.from_numpy(logits), expected[1])
        assert (run.rows, run.captured) == (smallest_that_holds(captured.streams.capacities, needed(b)).tokens, True)
        assert 1e-5 < run.seconds < 1  # its own time, not that of the round before


def test_a_round_no_capacity_holds_runs_uncaptured(captured: Captured) -> None:
    rng = random.Random(3)
    big = [TokenTree([rng.randrange(NAN_TOKEN) for _ in range(1500)], (TokenTree([1, 2]), TokenTree([3])))]
    small = [TokenTree([4] * 100, (TokenTree([5, 6]),))]
    before, graphs = captured.logits(small), len(captured.streams._graphs)
    logits, run = captured.submit(big).result()
    assert np.isfinite(logits).all()
    assert (run.rows, run.captured) == (1504, False)
    assert 1e-5 < run.seconds < 60
    assert len(captured.streams._graphs) == graphs
    assert torch.equal(captured.logits(small), before)


def test_the_first_stream_longer_than_any_graph_compiles_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it is prepared in another way than any captured one."""
    import triton  # not on every machine that collects these tests

    from flide.ops.fork_gated_delta import triton as delta

    table = replace(launch_table(torch.device("cuda")), large_rows=MAX_TOKENS)
    monkeypatch.setattr(delta, "launch_table", lambda device: table)
    delta._prepare_kernel.device_caches.clear()  # of what other tests have compiled
    before, compiled = torch.cuda.current_stream(), []
    try:
        captured = Captured("explicit", compile=False)
        monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda *, repr, **_: compiled.append(repr))
        trees = [TokenTree([1] * (MAX_TOKENS + 300), (TokenTree([2] * 20), TokenTree([3])))]
        logits, run = captured.submit(trees).result()
    finally:
        torch.cuda.set_stream(before)
    assert np.isfinite(logits).all()
    assert not run.captured
    assert not compiled


def test_more_trunks_than_scratch_are_refused_and_nothing_is_lost(captured: Captured) -> None:
    trees = [TokenTree([1], (TokenTree([2]),))] * 300
    with pytest.raises(ValueError, match="at most 256"):
        captured.submit(trees)
    assert captured.logits([TokenTree([1], (TokenTree([2]),))]).isfinite().all()


def test_three_levels_have_graphs_of_their_own_and_answer_what_two_do() -> None:
    torch._dynamo.reset()
    before, model = torch.cuda.current_stream(), small_model()
    head = OptionHead(model.label_rows(list(range(LABELS))))
    streams = CudaStreams(
        model, head, max_tokens=MAX_TOKENS, max_prompt_tokens=4096, compile=True, graphs="explicit", depth=3
    )
    try:
        count = compilations()
        streams.start()
        assert compilations() - count == 2  # one for each number of levels
        count = compilations()
        rng = random.Random(4)

        def tokens(length: int) -> list[int]:
            return [rng.randrange(NAN_TOKEN) for _ in range(length)]

        for lengths in ((40, 30, 20), (300, 60, 55), (129, 1, 1), (700, 17, 9)):
            trunk, questions = tokens(lengths[0]), [tokens(lengths[1]) for _ in range(2)]
            leaves = [[tokens(lengths[2]) for _ in range(3)] for _ in questions]
            pairs = list(zip(questions, leaves, strict=True))
            deep = TokenTree(trunk, tuple(TokenTree(q, tuple(map(TokenTree, group))) for q, group in pairs))
            flat = TokenTree(trunk, tuple(TokenTree(q + leaf) for q, group in pairs for leaf in group))
            found = []
            for tree in (deep, flat):
                logits, run = streams.submit([TreeLayout.of(tree)], needed_by(tree)).result()
                assert run.captured
                found.append(torch.from_numpy(logits))
            assert (found[0] - found[1]).abs().max() <= BF16_TWO_TREES * found[1].std()
        assert compilations() == count
    finally:
        torch.cuda.set_stream(before)


def test_a_model_belongs_to_one_engine_at_a_time() -> None:
    model = small_model()
    head = OptionHead(model.label_rows(list(range(LABELS))))
    sizes: dict[str, Any] = {"max_tokens": 64, "max_prompt_tokens": 64, "compile": False, "graphs": "off"}
    first = CudaStreams(model, head, **sizes)
    with pytest.raises(ValueError, match="another engine"):
        CudaStreams(model, head, **sizes)
    del first
    CudaStreams(model, head, **sizes)


@pytest.mark.parametrize("graphs", ["explicit", "reduce-overhead", "off"])
def test_engines_answer_like_the_cpu_from_three_threads_without_new_captures(engine: Engine, graphs: Any) -> None:
    requests = [DecisionRequest(f"state {i} " * i, {str(k): Noul(f"Is {k}?") for k in range(5)}) for i in range(12)]
    expected = engine.decide(requests)
    config = EngineConfig(device="cuda", dtype="float32", graphs=graphs, max_round_tokens=512)
    with tiny_engine(config) as cuda:
        count, report = compilations(), cuda.report
        assert (report.graphs == 0) == (graphs == "off")
        results: list[Any] = [None] * 3

        def ask(thread: int) -> None:
            results[thread] = [cuda.decide(requests[i : i + 1 + thread]) for i in range(0, 12, 1 + thread)]

        threads = [threading.Thread(target=ask, args=(k,)) for k in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (compilations(), cuda.report) == (count, report)
        for answers in results:
            flat = [decision for decisions in answers for decision in decisions]
            for got, want in zip(flat, expected, strict=True):
                for name in want:
                    assert got[name].value == pytest.approx(want[name].value, abs=PROBABILITY_FP32)
