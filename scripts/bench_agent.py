"""Time agents that ask five questions about a history that grows, step by step, with checkpoints and without.

    python -m scripts.bench_agent --size 0.8B [--agents 32] [--seconds 5] [--runs off,on,host]
    python -m scripts.bench_agent --model DIR [--device cpu] [--text] [--trajectory FILE ...]
    python -m scripts.bench_agent --url http://127.0.0.1:8000 [--trajectory FILE ...]

Lengths are those of SWE-agent's published trajectories, by the seeded generator or of a file (``--shapes``). A step is
from token ids to probabilities, without a tokenizer; with ``--text`` from a request, and with ``--url`` over HTTP. Each
run has an engine of its own: ``off`` keeps no checkpoints and is what the others are compared with, ``on`` keeps
them on the device, ``host`` has so little room there that they live in the host's memory. Over HTTP ``off`` is the same
server with another salt for each request.

First the answers of steps that resume are compared with those of ``off``: where they differ by more than rounding does
there are no speeds. Then steps are timed one at a time, all agents in turn, and last all agents at once, each of which
asks its next step when it is answered. Last line: one JSON object.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import queue
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import torch

from flide.models import AutoModelForDecision
from flide.models.directory import ModelDirectory
from flide.runtime.blas import compute_without_workspaces
from flide.runtime.checkpoints.budget import GIB
from flide.runtime.config import GRAPH_MODES, EngineConfig
from flide.runtime.metadata import PAGE_SIZE
from flide.runtime.tokenizer import PromptTokenizer
from scripts.agent_steps import Step, TextSteps, TokenSteps, stored_lengths
from scripts.agent_targets import HttpTarget, Reply, Target, TextTarget, TokenTarget
from scripts.bench_engine import LARGEST_ROUND, PARITY
from scripts.random_models import SIZES, config_of, random_model

RUNS = ("off", "on", "host")
TIGHT = 2.5  # times the keys and values of the longest history: as much for recurrent states, and buffers
LEAST_FITTED = 8  # steps
SWITCH_SECONDS = 5e-4
BUCKETS = (4000, 8000, 16000, 32000)  # tokens of history, upper ends
DRAWN = 400  # trajectories that are looked through for steps of every length
TIMED, CHECKED, TOGETHER, WARM_UP = (k << 20 for k in range(4))  # seeds of what the steps are for

Steps = Callable[[int], Iterator[list[Step]]]


class Bench:
    """The same steps for every run.

    Args:
        steps: seed -> trajectories.
        samples: steps of each length that are timed alone, if there are so many.
        checks: that are compared.
        agents: that ask together.
        seconds: for which they do.
        scale: of all lengths.
    """

    def __init__(
        self, steps: Steps, *, samples: int, checks: int, agents: int, seconds: float, scale: float = 1.0
    ) -> None:
        self._steps, self._agents, self._seconds = steps, agents, seconds
        self._ends = [scale * end for end in BUCKETS]
        self.timed, self.checked = self._choose(TIMED, samples), self._choose(CHECKED, checks)

    def _choose(self, seed: int, samples: int) -> list[list[Step]]:
        """Trajectories that have so many steps of every length, if there are any, each up to the last of use."""
        missing = [samples] * len(BUCKETS)
        chosen = []
        for number in range(DRAWN):
            steps = next(self._steps(seed + number))
            kept = 0
            for step in steps[1:]:
                bucket = self._bucket(step.history)
                if bucket is not None and missing[bucket] > 0:
                    missing[bucket] -= 1
                    kept = step.number + 1
            if kept:
                chosen.append(steps[:kept])
            if not any(missing):
                break
        if not chosen:
            raise ValueError(f"no trajectory has a second state of less than {self._ends[-1]:.0f} tokens")
        return chosen

    def _bucket(self, history: float) -> int | None:
        return next((i for i, end in enumerate(self._ends) if history < end), None)

    def compared(self, target: Target) -> list[tuple[Reply, Reply]]:
        """The last step of each trajectory that is checked, asked after the others; and with a small fault in it."""
        found = []
        for *before, last in self.checked:
            for step in before:
                self._ask(target, step)
            found.append((self._ask(target, last), self._ask(target, last.faulty(PAGE_SIZE))))
        return found

    def alone(self, target: Target) -> dict[str, Any]:
        """Milliseconds of a step, one at a time, agents in turn."""
        for step in next(self._steps(WARM_UP))[:3]:
            self._ask(target, step)
            asked = self._ask(target, replace(step, state=step.state[:1])).tokens - 1  # of the questions
        rows: list[tuple[int, float, float, float]] = []  # bucket, history, new tokens, milliseconds
        firsts, later, reused, tokens = [], [], 0, 0
        histories: dict[int, int] = {}
        for turn in itertools.zip_longest(*self.timed):
            for agent, step in enumerate(turn):
                if step is None:
                    continue
                prepared = target.prepare(step)
                began = time.perf_counter()
                result = target.submit(prepared).result()
                milliseconds = 1e3 * (time.perf_counter() - began)
                reply = target.reply(result)
                history = reply.tokens - asked
                new, histories[agent] = history - histories.get(agent, 0), history
                if step.number == 0:
                    firsts.append(milliseconds)
                    continue
                later.append(reply.reused > 0)
                reused, tokens = reused + reply.reused, tokens + reply.tokens
                if (bucket := self._bucket(history)) is not None:
                    rows.append((bucket, history, new, milliseconds))
        found: dict[str, Any] = {"first": _spread(firsts)}
        for i, end in enumerate(self._ends):
            these = [row for row in rows if row[0] == i]
            name = f"<{end / 1e3:g}k"
            if these:
                found[name] = {**_spread([row[3] for row in these]), "new_tokens": statistics.mean(r[2] for r in these)}
        found["fit"] = _fit(np.array([row[1:] for row in rows]))
        found["hit_rate"] = sum(later) / max(1, len(later))
        found["reused_share"] = reused / max(1, tokens)
        return found

    def together(self, target: Target) -> dict[str, Any]:
        """Steps per second of all agents, each asking its next step when it is answered."""
        agents = [self._endless(TOGETHER + number) for number in range(self._agents)]
        rng = random.Random(0)
        for agent in agents:  # they are not all at their first step
            for _ in range(rng.randrange(8)):
                next(agent)
        done: queue.SimpleQueue[tuple[int, float, float, Future[Any]]] = queue.SimpleQueue()
        prepared = [target.prepare(next(agent)) for agent in agents]

        def ask(number: int) -> None:
            sent = time.perf_counter()
            future = target.submit(prepared[number])
            future.add_done_callback(lambda future: done.put((number, sent, time.perf_counter(), future)))
            prepared[number] = target.prepare(next(agents[number]))

        for number in range(self._agents):
            ask(number)
        answered, begin, times, reused, tokens = 0, float("inf"), [], 0, 0
        while True:
            number, sent, now, future = done.get()
            reply = target.reply(future.result())
            answered += 1
            if answered == 2 * self._agents:  # the first steps had nothing to resume from
                begin = now
            elif now >= begin + self._seconds:
                break
            elif sent >= begin:
                times.append(1e3 * (now - sent))
                reused, tokens = reused + reply.reused, tokens + reply.tokens
            ask(number)
        for _ in range(self._agents - 1):
            done.get()
        rate = (answered - 2 * self._agents) / (now - begin)
        return {"steps_per_s": rate, **_spread(times), "reused_share": reused / max(1, tokens)}

    def _endless(self, seed: int) -> Iterator[Step]:
        for steps in self._steps(seed):
            yield from (step for step in steps if step.history < self._ends[-1])

    def _ask(self, target: Target, step: Step) -> Reply:
        return target.reply(target.submit(target.prepare(step)).result())


def _spread(milliseconds: Sequence[float]) -> dict[str, float]:
    if not milliseconds:
        return {"steps": 0}
    p50, p95 = np.quantile(milliseconds, (0.5, 0.95)).tolist()
    return {"steps": len(milliseconds), "p50_ms": p50, "p95_ms": p95}


def _fit(rows: Any) -> dict[str, float]:
    """Milliseconds as a linear function of history and new tokens, ``[steps, 3]`` with the milliseconds last: least
    squares, and again without the twentieth of steps that is farthest off."""
    if len(rows) < LEAST_FITTED:
        return {}
    inputs, milliseconds = np.column_stack([np.ones(len(rows)), rows[:, :2] / 1e3]), rows[:, 2]
    kept = np.ones(len(rows), bool)
    for _ in range(2):
        (constant, history, new), *_ = np.linalg.lstsq(inputs[kept], milliseconds[kept])
        off = np.abs(inputs @ (constant, history, new) - milliseconds)
        kept = off <= np.quantile(off, 0.95)
    return {"ms": float(constant), "ms_per_1k_history": float(history), "ms_per_1k_new": float(new)}


def parity(expected: Sequence[tuple[Reply, Reply]], found: Sequence[tuple[Reply, Reply]]) -> float:
    """How far answers are from the expected ones, at most, relative to what a small fault in the state makes of them on
    average."""
    errors, faults = [], []
    for (right, faulty), (reply, _) in zip(expected, found, strict=True):
        errors.append(_distance(reply, right))
        faults.append(_distance(faulty, right))
    return float(np.concatenate(errors).max() / np.concatenate(faults).mean())


def _distance(reply: Reply, other: Reply) -> Any:
    """Total variation of each question."""
    pairs = zip(reply.answers, other.answers, strict=True)
    return np.array([0.5 * np.abs(np.subtract(p, q)).sum() for p, q in pairs])


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    # As the server does: the engine's thread must not wait for this one.
    sys.setswitchinterval(SWITCH_SECONDS)
    compute_without_workspaces()
    lengths = None if options.shapes is None else stored_lengths(options.shapes)
    steps: Steps
    if options.url is None and not options.text:
        steps = TokenSteps(_vocabulary(options), lengths=lengths, scale=options.scale)
    else:
        steps = TextSteps(files=options.trajectory, lengths=lengths, scale=options.scale, as_messages=options.messages)
    bench = Bench(
        steps,
        samples=options.samples,
        checks=options.checks,
        agents=options.agents,
        seconds=options.seconds,
        scale=options.scale,
    )
    result: dict[str, Any] = {"what": options.url or options.size or str(options.model), "runs": {}}
    expected: list[tuple[Reply, Reply]] = []
    for name in options.runs:
        target = _target(name, options)
        try:
            found: dict[str, Any] = {} if target.report is None else {"ready": asdict(target.report)}
            replies = bench.compared(target)
            expected = expected or replies
            if replies is not expected:
                error, resumed = parity(expected, replies), sum(reply.reused > 0 for reply, _ in replies) / len(replies)
                found |= {"parity": error, "resumed": resumed}
                print(f"{name}: parity {error:.4f} in {len(replies)} steps, {resumed:.0%} of which resumed", flush=True)
                if not (error <= PARITY and resumed):  # NaN fails
                    print(f"nothing resumed, or answers differ (budget {PARITY}): no speeds", file=sys.stderr)
                    return 1
            found |= {"alone": bench.alone(target), "together": bench.together(target), "store": target.stats()}
        finally:
            target.close()
        del target
        gc.collect()
        torch.cuda.empty_cache()
        result["runs"][name] = found
        if (
            len(options.runs) == 1 or replies is not expected
        ):  # the first run's speeds wait for the second one's answers
            shown = result["runs"].items() if len(result["runs"]) == 2 else [(name, found)]
            for run, values in shown:
                _show(run, values)
    print(json.dumps(result))
    return 0


def _vocabulary(options: argparse.Namespace) -> int:
    by_size = options.size is not None
    fields = config_of(options.size) if by_size else ModelDirectory.open(options.model).config()
    return int(fields.get("text_config", fields)["vocab_size"])


def _show(run: str, found: dict[str, Any]) -> None:
    tables = {**found["alone"], f"{run}, together": found["together"], "store": found["store"]}
    for name, values in tables.items():
        values = values if isinstance(values, dict) else {"": values}
        shown = "  ".join(f"{key} {value:.4g}" for key, value in values.items())
        print(f"{run:5} {name:14} {shown}", flush=True)


def _target(run: str, options: argparse.Namespace) -> Target:
    """What a run asks."""
    if options.url is not None:
        return HttpTarget(options.url, fresh=run == "off", clients=options.agents, api_key=options.api_key)
    config = EngineConfig(
        device=options.device,
        graphs=options.graphs,
        max_round_tokens=LARGEST_ROUND.get(options.size) if options.device == "cuda" else None,
    )
    if options.size is not None:
        model = random_model(config_of(options.size), device=options.device)
    else:
        model = AutoModelForDecision.from_pretrained(
            options.model, dtype=config.resolve_dtype(), device=config.resolve_device()
        )
    longest = min(model.config.max_position_embeddings, round(options.scale * (BUCKETS[-1] + 512)) + PAGE_SIZE)
    if run == "on":
        config = replace(config, checkpoint_gb=options.checkpoint_gb)
    elif run == "host":
        tight = options.tight_gb or TIGHT * model.kv_bytes_per_token * longest / GIB
        config = replace(config, checkpoint_gb=tight, checkpoint_host_gb=options.checkpoint_host_gb)
    if options.text:
        return TextTarget(model, PromptTokenizer.from_pretrained(options.model), config)
    return TokenTarget(model, config, longest)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--size", type=str.lower, choices=SIZES, help="random weights of this size (default: 0.8b)")
    what.add_argument("--model", type=Path, metavar="DIR", help="a model directory")
    what.add_argument("--url", type=urlsplit, help="a running server: http://HOST:PORT")
    parser.add_argument("--text", action="store_true", help="ask --model with text, its tokenizer included")
    parser.add_argument("--messages", action="store_true", help="states of text are lists of messages")
    parser.add_argument("--shapes", type=Path, metavar="FILE", help="lengths of states: JSON, [{'states': [n, ...]}]")
    parser.add_argument(
        "--trajectory", type=Path, metavar="FILE", action="append", default=[], help="SWE-agent's, for its text"
    )
    parser.add_argument("--runs", default=",".join(RUNS), help="some of %(default)s, 'off' first")
    parser.add_argument("--samples", type=int, default=16, help="steps of each length that are timed alone")
    parser.add_argument("--checks", type=int, default=2, help="steps of each length whose answers are compared")
    parser.add_argument("--agents", type=int, default=32, help="that ask together")
    parser.add_argument("--seconds", type=float, default=5.0, help="for which they are timed")
    parser.add_argument("--scale", type=float, default=1.0, help="of all lengths, for slow machines")
    parser.add_argument("--checkpoint-gb", type=float, default=32.0, help="of the run 'on'")
    text = "on the device, of the run 'host' (default: what the longest history takes, and little more)"
    parser.add_argument("--tight-gb", type=float, help=text)
    parser.add_argument("--checkpoint-host-gb", type=float, default=16.0, help="of the run 'host'")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--graphs", default="auto", choices=GRAPH_MODES)
    parser.add_argument("--api-key")
    options = parser.parse_args(arguments)
    if options.url is not None and (options.url.scheme != "http" or options.url.hostname is None):
        parser.error("the URL should be http://HOST:PORT")
    options.runs = options.runs.split(",")
    if options.url is not None:
        options.runs = [run for run in options.runs if run != "host"]  # what it has is what it was started with
    if unknown := [run for run in options.runs if run not in RUNS]:
        parser.error(f"unknown run {unknown[0]!r}")
    if "off" in options.runs[1:]:
        parser.error("the run 'off' comes first: others are compared with it")
    if options.text and options.model is None:
        parser.error("--text needs --model: it has the tokenizer")
    if options.trajectory and not (options.text or options.url):
        parser.error("--trajectory needs --text or --url")
    if options.trajectory and options.scale != 1:
        parser.error("--scale is not for --trajectory: what was said is as long as it is")
    if options.model is None and options.url is None:
        options.size = options.size or "0.8b"
    if options.url is None and options.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device: --device cpu")
    return options


if __name__ == "__main__":
    sys.exit(main())
