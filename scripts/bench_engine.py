"""Time the engine in process, at the true shape of a model, against the matrix products it cannot do without.

    python -m scripts.bench_engine --size 0.8B --workload race,quality_all [--graphs off] [--no-fork] ...

Weights are random, made on the device, and such that every part of the model matters. A workload with a fixed shape
(``scripts/workloads.py``) is timed at that shape and at seeded realistic ones. "In process" is from token ids to
probabilities, through the engine's own thread: no tokenizer, no HTTP. No speed is printed unless the same run's
answers, of requests alone and of all together, are those of isolated prompts through the references. Workloads with
candidates (jev_race, jev_97) are read by a scalar head, as Open-Jev's. Last line: one JSON object.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from flide.heads import OpenJevHead
from flide.layers import ForkAttentionReader
from flide.models.decision import ForDecision
from flide.runtime import ForkMetadata, StreamCapacity, TokenTree
from flide.runtime.blas import compute_without_workspaces
from flide.runtime.capacity import DEEP_SAVES, smallest_that_holds
from flide.runtime.config import GRAPH_MODES, EngineConfig
from flide.runtime.decision import Decision, joined
from flide.runtime.format import EncodedRequest
from flide.runtime.graphs import CudaStreams
from flide.runtime.metadata import PAGE_SIZE
from flide.runtime.planner import one_run
from flide.runtime.reads import OptionReads
from flide.runtime.request import Choice, DecisionRequest
from flide.runtime.rounds import PreparedRequest, RoundRunner
from flide.runtime.tree import prompts_of
from flide.runtime.worker import Job, Worker
from scripts.random_models import SIZES, config_of, random_model
from scripts.workloads import FIXED, FIXED_CANDIDATES, SEEDED, CandidateShape, Shape, realistic

LARGEST_ROUND = dict.fromkeys(("9b", "27b", "12b", "31b"), 8192)  # rows; 16,384 for smaller models
LONGEST_PROMPT = 65536  # tokens; there are KV pages for so many
OPTIONS, LABELS = 26, 255  # of a question of the parity check; label rows
# Largest distance (total variation) of an answer from that of its isolated prompt, relative to what a small fault would
# make: the last page of the trunk (64 tokens) replaced by other tokens. Rounding in bfloat16 makes about a quarter.
PARITY = 0.5
SECONDS = 3.0  # of each timing


class Bench:
    """One engine, measured.

    Args:
        fields: of the model's config.
        config: of the engine.
        candidates: read by a scalar head, every candidate from a prompt of its own.
        device, seed: of the model.
    """

    def __init__(
        self,
        fields: Mapping[str, Any],
        config: EngineConfig,
        *,
        candidates: bool = False,
        device: str = "cuda",
        seed: int = 0,
    ) -> None:
        self.rng = random.Random(seed)
        self.model = random_model(fields, device=device, seed=seed)
        if candidates:
            self.model.head = random_scalar_head(self.model)
        self.vocab, self.config = self.model.config.vocab_size, config
        self.label_ids = list(range(100, 100 + LABELS))

    def start(self, workloads: Sequence[str]) -> None:
        """Answer one request of each workload by isolated prompts first, while the model is plain; then make the
        engine."""
        shapes = {name: _fixed(name) or _with_a_trunk(realistic(name)) for name in workloads}
        self.checks = {name: self.prepare(shape, options=OPTIONS) for name, shape in shapes.items()}
        self.expected = {name: self._isolated(request) for name, request in self.checks.items()}
        self.faulty = {
            name: self._isolated(self._with_another_page(request, shapes[name].trunk))
            for name, request in self.checks.items()
        }
        longest = min(self.model.config.max_position_embeddings, self.config.max_prompt_tokens or LONGEST_PROMPT)
        runner = RoundRunner(
            self.model, self.label_ids, config=self.config, max_prompt_tokens=longest, model_name="bench"
        )
        self.worker = Worker(runner)
        self.streams = runner.streams

    def split(self, requests: Iterable[PreparedRequest]) -> list[list[PreparedRequest]]:
        """Each request as what is run for it: itself, or without fork its questions."""
        return [[request] if self.config.fork else request.alone() for request in requests]

    def ask(self, parts: Sequence[Sequence[PreparedRequest]]) -> list[Decision]:
        jobs = [[Job(part) for part in request] for request in parts]
        self.worker.submit([job for request in jobs for job in request])
        return [joined([job.future.result() for job in request]) for request in jobs]

    def parity(self) -> dict[str, float]:
        """How far answers are from those of isolated prompts, per workload: the request alone, and all in one call."""
        parts = self.split(self.checks.values())
        alone = [self.ask([part])[0] for part in parts]
        found = {}
        for name, *decisions in zip(self.checks, alone, self.ask(parts), strict=True):
            expected, faulty = self.expected[name], self.faulty[name]
            error = max(_distances(_answers(decision), expected).max().item() for decision in decisions)
            found[name] = error / _distances(faulty, expected).mean().item()
        return found

    def latency(self, requests: Sequence[PreparedRequest]) -> dict[str, float]:
        """Milliseconds from prepared request to answer, one at a time."""
        times: list[float] = []
        began = time.perf_counter()
        for parts in itertools.cycle(self.split(requests)):
            start = time.perf_counter()
            self.ask([parts])
            times.append((time.perf_counter() - start) * 1e3)
            if len(times) >= 20 and time.perf_counter() - began > SECONDS:
                break
        times = sorted(times[5:])
        return {"p50_ms": statistics.median(times), "p95_ms": times[int(0.95 * len(times))], "calls": len(times)}

    def saturated(self, requests: Sequence[PreparedRequest], p50_ms: float) -> dict[str, float]:
        """Requests and tokens per second when there is always more to do."""
        count = max(64, int(SECONDS * 1.5e3 / p50_ms))
        queue = list(itertools.islice(itertools.cycle(self.split(requests)), count))
        self.ask(queue[: count // 4])
        start = time.perf_counter()
        self.ask(queue)
        seconds = time.perf_counter() - start
        tokens = sum(part.needed.tokens for parts in queue for part in parts)
        return {"requests_per_s": count / seconds, "tokens_per_s": tokens / seconds}

    def gpu_ms(self, request: PreparedRequest) -> float | None:
        """One replay, from replays back to back; None where the request is not one replay of a graph of ours."""
        if not self.config.fork or not isinstance(self.streams, CudaStreams):
            return None
        capacity = smallest_that_holds(self.streams.capacities, request.needed)
        graph = self.streams.graph(capacity) if capacity is not None else None
        if graph is None:
            return None
        self.ask([[request]])  # all graphs read the same arena
        return _back_to_back(graph.replay)

    def prepare(self, shape: Shape | CandidateShape, *, options: int = 4) -> PreparedRequest:
        """A request of some shape with random tokens. ``options``: of each question that has one prompt."""
        if isinstance(shape, CandidateShape):
            return self._prepare_candidates(shape)
        criteria = {f"o{k:02}": None for k in range(options)}
        questions = {f"q{i}": Choice("?", criteria) for i in range(len(shape.branches))}
        tree = TokenTree(self._tokens(shape.trunk), tuple(TokenTree(self._tokens(n)) for n in shape.branches))
        return PreparedRequest.of(DecisionRequest("", questions), one_run(tree), [options] * len(questions))

    def _prepare_candidates(self, shape: CandidateShape) -> PreparedRequest:
        counts = [len(own) for _, own in shape.questions]
        tails: list[list[int]] = []
        for shared, own in shape.questions:
            question = self._tokens(shared)
            tails += [question + self._tokens(count) for count in own]
        encoded = EncodedRequest(self._tokens(shape.trunk), tails, counts, counts)
        questions = {f"q{i}": Choice("?", {f"o{k}": None for k in range(n)}) for i, n in enumerate(counts)}
        reads = OptionReads.of([[0] * count for count in counts], row_per_option=True)
        depth = self.config.depth or 2
        return PreparedRequest.from_encoded(
            DecisionRequest("", questions), encoded, reads, depth=depth, least=DEEP_SAVES
        )

    def _tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(self.vocab) for _ in range(count)]

    def _with_another_page(self, request: PreparedRequest, trunk: int) -> PreparedRequest:
        """The request with the last page of what its questions share, ``trunk`` tokens, replaced by other tokens."""
        tokens = list(request.tree.tokens)
        tokens[trunk - PAGE_SIZE : trunk] = self._tokens(PAGE_SIZE)
        tree = replace(request.tree, tokens=tokens)
        return PreparedRequest.of(request.request, tree, request.num_options, request.reads)

    @torch.inference_mode()
    def _isolated(self, request: PreparedRequest) -> list[Tensor]:
        """Probabilities of the first, the middle and the last question, each prompt alone through the references."""
        rows_LD = self.model.label_rows(self.label_ids[:OPTIONS])
        prompts = [TokenTree(prompt) for prompt in prompts_of(request.tree)]
        counts = [1] * len(request.num_options) if self.model.head is None else request.num_options
        found = []
        for i in _checked_questions(len(counts)):
            logits = []
            for prompt in prompts[sum(counts[:i]) : sum(counts[: i + 1])]:
                meta = ForkMetadata.pack([prompt]).to(self.model.lm_head.weight.device)
                hidden_ND = self.model(meta.tokens, meta)
                head = self.model.head
                logits.append(self.model.label_logits(hidden_ND, rows_LD)[0] if head is None else head(hidden_ND)[0])
            found.append(torch.cat(logits).double().softmax(-1).cpu())
        return found


def random_scalar_head(model: ForDecision) -> OpenJevHead:
    """A scalar head whose scores have a deviation of about 1: final hidden states have a norm of sqrt(D)."""
    head = OpenJevHead(model.lm_head.in_features).to(model.lm_head.weight.device)
    nn.init.normal_(head.score.weight, std=model.lm_head.in_features**-0.5)
    nn.init.zeros_(head.score.bias)
    return head.eval()


def _fixed(name: str) -> Shape | CandidateShape | None:
    return FIXED.get(name) or FIXED_CANDIDATES.get(name)


def _with_a_trunk(shapes: Iterator[Shape]) -> Shape:
    return next(shape for shape in shapes if shape.trunk >= PAGE_SIZE)


def _checked_questions(count: int) -> list[int]:
    return sorted({0, count // 2, count - 1})


def _answers(decision: Decision) -> list[Tensor]:
    """The probabilities that ``_isolated`` computes, of a decision."""
    answers = [list(answer.probabilities.values()) for answer in decision.answers.values()]
    return [torch.tensor(answers[i], dtype=torch.float64) for i in _checked_questions(len(answers))]


def _distances(p: Sequence[Tensor], q: Sequence[Tensor]) -> Tensor:
    """Total variation of each question."""
    return torch.stack([0.5 * (a - b).abs().sum() for a, b in zip(p, q, strict=True)])


def _back_to_back(run: Callable[[], object], *, seconds: float = 0.5) -> float:
    """GPU milliseconds of one call, median of five groups of calls between two events."""
    run()
    torch.cuda.synchronize()
    groups: list[float] = []
    calls = 3
    while len(groups) < 6:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(calls):
            run()
        end.record()
        torch.cuda.synchronize()
        groups.append(begin.elapsed_time(end) / calls)
        calls = max(3, int(seconds / 6 * 1e3 / groups[-1]))
    return statistics.median(groups[1:])


@dataclass(frozen=True, slots=True)
class Product:
    """One matrix product of a forward pass: rows times the first ``columns`` rows of a weight."""

    weight: str
    columns: int
    rows: int


class _Products(TorchFunctionMode):
    """Records every ``F.linear``."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.found: list[Product] = []
        # By where they lie: parts of a merged weight have names of their own, a part of another one has that one's.
        tensors = [(name, x) for name, x in itertools.chain(model.named_buffers(), model.named_parameters()) if x.ndim]
        self._names = {_place(x): name for name, x in tensors}
        self._whole = {x.untyped_storage()._cdata: name for name, x in sorted(tensors, key=lambda pair: len(pair[1]))}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            x, weight = args[:2]
            name = self._names.get(_place(weight)) or self._whole[weight.untyped_storage()._cdata]
            self.found.append(Product(name, len(weight), len(x)))
        return func(*args, **(kwargs or {}))


def _place(x: Tensor) -> tuple[int, int, int]:
    return x.untyped_storage()._cdata, int(x.storage_offset()), len(x)


def products(model: ForDecision, rows: int, readouts: int) -> list[Product]:
    """The matrix products of one forward pass, in order.

    Where the last layers read what others wrote, rows are those that somebody reads: behind the last layer that writes
    keys and values, the readout rows. Else the last layer is counted whole. The readout is not counted at all.
    """
    cut = any(isinstance(module, ForkAttentionReader) for module in model.modules())
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        fake = type(model).from_config(model.config)
        fake.merge_projections()
        meta = ForkMetadata.allocate(StreamCapacity(rows, 2, readouts))
        with _Products(fake) as recorded:
            fake(meta.tokens, meta, selective_readout=cut)
    return recorded.found


@torch.inference_mode()
def products_ms(model: ForDecision, rows: int, readouts: int) -> float:
    """The model's matrix products alone, captured: what no engine gets under at this precision."""
    tensors = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    weights = [(tensors[x.weight][: x.columns], x.rows) for x in products(model, rows, readouts)]
    like = model.lm_head.weight
    shapes = {(count, weight.shape[1]) for weight, count in weights}
    inputs = {shape: torch.randn(shape, device="cuda", dtype=like.dtype) for shape in shapes}

    def run() -> None:
        for weight, count in weights:
            F.linear(inputs[count, weight.shape[1]], weight)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    return _back_to_back(graph.replay)


def measure(bench: Bench, name: str, shapes: Sequence[Shape | CandidateShape]) -> dict[str, Any]:
    requests = [bench.prepare(shape) for shape in shapes]
    result: dict[str, Any] = {"rows": statistics.mean(r.needed.tokens for r in requests)}
    result |= bench.latency(requests)
    result |= bench.saturated(requests, result["p50_ms"])
    if len(shapes) == 1:
        needed = requests[0].needed
        least = products_ms(bench.model, needed.tokens, needed.readouts)
        result |= {"gpu_ms": bench.gpu_ms(requests[0]), "products_ms": least}
        if result["gpu_ms"] is not None:
            result["ratio"] = result["gpu_ms"] / result["products_ms"]
    shown = "  ".join(f"{key} {value:.4g}" for key, value in result.items() if value is not None)
    print(f"{name:22} {shown}", flush=True)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="0.8b", type=str.lower, choices=SIZES)
    known = list(dict.fromkeys([*FIXED, *SEEDED, *FIXED_CANDIDATES]))
    parser.add_argument("--workload", default="race,quality_all", help=f"some of {', '.join(known)}")
    parser.add_argument("--seeded", type=int, default=64, help="realistic requests per workload; 0 for none")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--graphs", default="auto", choices=GRAPH_MODES)
    parser.add_argument("--no-compile", action="store_true", help="layers and kernels eagerly")
    parser.add_argument("--no-fork", action="store_true", help="every question as a prompt of its own")
    parser.add_argument("--no-flat-rounds", action="store_true", help="one request a replay")
    parser.add_argument("--no-selective-readout", action="store_true", help="the last layer computes every row")
    parser.add_argument("--max-round-tokens", type=int)
    parser.add_argument("--max-prompt-tokens", type=int, help="tokens that there are KV pages for")
    parser.add_argument("--depth", type=int, choices=(2, 3), help="levels of trees (3 for candidates)")
    arguments = parser.parse_args()
    compute_without_workspaces()  # as the server does
    workloads = arguments.workload.split(",")
    for name in workloads:
        if name not in known:
            parser.error(f"unknown workload {name!r}")
    candidates = [name for name in workloads if name in FIXED_CANDIDATES]
    if candidates and candidates != workloads:
        parser.error("workloads with candidates need a head of their own: a run of their own")
    if not torch.cuda.is_available():
        parser.error("the benchmark needs a CUDA device")
    config = EngineConfig(
        graphs=arguments.graphs,
        compile=False if arguments.no_compile else None,
        fork=not arguments.no_fork,
        selective_readout=not arguments.no_selective_readout,
        max_round_requests=1 if arguments.no_flat_rounds else None,
        max_prompt_tokens=arguments.max_prompt_tokens,
        depth=arguments.depth or (3 if candidates else 2),
        max_round_tokens=arguments.max_round_tokens or LARGEST_ROUND.get(arguments.size),
    )
    print(torch.cuda.get_device_name(), "torch", torch.__version__, config, flush=True)
    bench = Bench(config_of(arguments.size), config, candidates=bool(candidates), seed=arguments.seed)
    bench.start(workloads)
    report = asdict(bench.streams.report)
    print("ready", {key: round(value, 2) for key, value in report.items()}, flush=True)
    parity = bench.parity()
    print("parity", {key: round(value, 4) for key, value in parity.items()}, flush=True)
    result: dict[str, Any] = {"size": arguments.size, "device": torch.cuda.get_device_name(), "parity": parity}
    result |= {"ready": report, "config": asdict(replace(config, device=str(config.device)))}
    failed = not all(value <= PARITY for value in parity.values())  # NaN fails
    if failed:
        print(f"answers are not those of isolated prompts (budget {PARITY}): no speeds", file=sys.stderr)
    else:
        timings = result["workloads"] = {}
        for name in workloads:
            fixed = _fixed(name)
            if fixed is not None:
                timings[name] = measure(bench, name, [fixed])
            if name in SEEDED and arguments.seeded:
                shapes = list(itertools.islice(realistic(name, seed=arguments.seed), arguments.seeded))
                timings[f"{name}, seeded"] = measure(bench, f"{name}, seeded", shapes)
    bench.worker.close()
    print(json.dumps(result))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
