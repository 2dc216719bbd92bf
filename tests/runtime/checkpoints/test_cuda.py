"""Checkpoints on CUDA: resumed inside captured graphs, copied where pages are broken, moved to the host and back."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from flide import DecisionRequest, Engine, EngineConfig, Noul
from flide.runtime.capacity import smallest_that_holds
from flide.runtime.checkpoints.resume import ResumedRound, resume
from flide.runtime.checkpoints.store import DEVICE, HOST, Checkpoint
from flide.runtime.metadata import ForkMetadata
from flide.runtime.rounds import LogitsRequest
from tests.runtime.checkpoints.asker import POSITIONS, Asker, check_chain, check_continuations, request, tokens
from tests.runtime.test_graphs import NAN_TOKEN, compilations, small_model
from tests.tiny_model import tiny_engine
from tests.tolerance import BF16_TWO_TREES, PROBABILITY_FP32

pytestmark = pytest.mark.gpu


def same(got: np.ndarray, want: np.ndarray) -> None:
    assert np.abs(got - want).max() <= BF16_TWO_TREES * want.std()


@pytest.fixture(
    scope="module",
    params=[("explicit", True), ("explicit", False), ("reduce-overhead", True)],
    ids=["explicit", "explicit_eager", "reduce_overhead"],
)
def askers(request: pytest.FixtureRequest) -> Iterator[tuple[Asker, Asker]]:
    """One with a store and one without."""
    torch._dynamo.reset()
    graphs, compile = request.param
    before, count = torch.cuda.current_stream(), compilations()
    options: dict[str, Any] = {"graphs": graphs, "compile": compile, "max_round_tokens": 1024}
    kept = Asker(small_model(), pages=120, slots=60, host=1.0, **options)
    assert compilations() - count == int(compile)
    fresh = Asker(small_model(), **{**options, "graphs": "off"})
    for asker in (kept, fresh):
        asker.vocab = NAN_TOKEN
    yield kept, fresh
    torch.cuda.set_stream(before)


def ask_captured(kept: Asker, *requests: LogitsRequest) -> list[tuple[np.ndarray, int]]:
    found: list[Any] = []
    kept.runner.observers.append(found.append)
    answers = kept.ask(*requests)
    kept.runner.observers.clear()
    assert all(report.run.captured for report in found)
    return answers


@pytest.mark.parametrize("position", POSITIONS)
def test_every_position_resumes_in_a_graph(askers: tuple[Asker, Asker], position: int) -> None:
    kept, fresh = askers
    rng = random.Random(position)
    state, questions = tokens(rng, 230, kept.vocab), [tokens(rng, n, kept.vocab) for n in (1, 5, 70)]
    count = compilations()
    assert ask_captured(kept, request(state[: position + 3], questions, saves=[position]))[0][1] == 0
    for total in (position, position + 1, 230):
        asked = request(state[:total], questions)
        ((got, reused),) = ask_captured(kept, asked)
        assert reused == position
        same(got, fresh.ask(asked)[0][0])
    if kept.runner.streams._mode == "explicit":
        assert compilations() == count


def test_a_chain_of_twenty_resumes(askers: tuple[Asker, Asker]) -> None:
    kept, fresh = askers
    check_chain(kept, fresh, same, partial(ask_captured, kept))


def test_two_continuations_of_one_broken_page(askers: tuple[Asker, Asker]) -> None:
    kept, fresh = askers
    check_continuations(kept, fresh, same, partial(ask_captured, kept))


def test_a_resumed_replay_has_the_bits_of_the_callable_uncaptured(askers: tuple[Asker, Asker]) -> None:
    kept, _ = askers
    rng = random.Random(1003)
    states = [tokens(rng, n, kept.vocab) for n in (5, 64, 130, 200)]
    for step in range(12):
        for i in rng.sample(range(len(states)), 2):
            states[i] = states[i] + tokens(rng, rng.choice([1, 20, 64, 100]), kept.vocab)
        plan = kept.runner.plan()
        for state in states:
            questions = [tokens(rng, n, kept.vocab) for n in (3, 30)]
            if not plan.add(request(state, questions, saves=[len(state) - 1])):
                break
        round = resume(kept.store, plan)
        streams, caches = kept.runner.streams, round.stored.caches
        logits, run = streams.submit(round.layouts, round.needed, caches, round.stored.copies).result()
        assert run.captured
        assert torch.equal(torch.from_numpy(logits), uncaptured(kept, round)), f"step {step}"
        round.stored.finish([True] * len(round.groups))
        kept.store.check()
    assert kept.store.stats().hits > 12


@torch.inference_mode()
def uncaptured(kept: Asker, round: ResumedRound) -> torch.Tensor:
    """The same round again, kernel by kernel at the same capacity: it saves the same."""
    streams = kept.runner.streams
    capacity = smallest_that_holds(streams.capacities, round.needed)
    meta = ForkMetadata.pack(round.layouts, capacity=capacity, caches=round.stored.caches).to("cuda")
    return streams._uncaptured(meta.tokens, meta)[: round.needed.readouts].cpu()


def contents(kept: Asker, checkpoint: Checkpoint) -> list[torch.Tensor]:
    pools = kept.runner.streams.pools
    pages = [page for run in checkpoint.pages.path() for page in run.numbers[DEVICE]]
    slots = [pool.device_LX[:, checkpoint.slot].clone() for pool in pools._slots]
    return slots + [pool.device_LX[:, pages].clone() for pool in pools._pages]


def test_a_way_to_the_host_and_back_keeps_bits(askers: tuple[Asker, Asker]) -> None:
    kept, _ = askers
    rng = random.Random(1004)
    state, question = tokens(rng, 500, kept.vocab), [tokens(rng, 3, kept.vocab)]
    ((first, _),) = kept.ask(request(state, question, saves=[70, 200, 490]))
    ((resumed, _),) = kept.ask(request(state, question))
    key = kept.runner.plan()
    assert key.add(request(state, question))
    (checkpoint,) = key.sources
    before = contents(kept, checkpoint)
    key.undo()
    assert checkpoint.length == 490
    assert kept.store._move(checkpoint, HOST)
    kept.store._rank(checkpoint)
    kept.store.check()
    poison_what_is_free(kept)
    ((again, reused),) = kept.ask(request(state, question))
    assert (checkpoint.tier, reused) == (DEVICE, 490)
    assert all(map(torch.equal, contents(kept, checkpoint), before))
    assert np.array_equal(again, resumed)
    same(again, first)


def poison_what_is_free(kept: Asker) -> None:
    """NaN in all pages and slots that no checkpoint has: whatever reads one of them shows it."""
    pools, tier = kept.runner.streams.pools, kept.store._tiers[DEVICE]
    for free, group in (
        (tier.pages + list(range(kept.runner.streams.own_pages)), pools._pages),
        (tier.slots, pools._slots),
    ):
        for pool in group:
            pool.device_LX[:, free] = float("nan")
    torch.cuda.synchronize()


def test_random_histories_with_room_for_little_and_nan_in_what_is_free(askers: tuple[Asker, Asker]) -> None:
    kept, fresh = askers
    rng = random.Random(1005)
    states = [tokens(rng, rng.randrange(1, 150), kept.vocab) for _ in range(20)]
    before = torch.cuda.memory_allocated()
    for _ in range(60):
        poison_what_is_free(kept)
        asked = []
        for index in rng.sample(range(len(states)), 3):
            states[index] = (states[index] + tokens(rng, rng.choice([1, 30, 64, 100]), kept.vocab))[-700:]
            state = states[index]
            saves = sorted({rng.randrange(1, len(state) + 1) for _ in range(3)})
            asked.append(request(state, [tokens(rng, 9, kept.vocab)] * 2, saves=saves, salt=rng.choice([None, "s"])))
        plan = kept.runner.plan()
        asked = [one for one in asked if plan.add(one)]
        results = kept.runner.begin(plan).results()
        kept.store.check()
        for result, one in zip(results, asked, strict=True):
            same(result.values_QO, fresh.ask(one)[0][0])
    stats = kept.store.stats()
    print(stats)
    assert min(stats.hits, stats.evictions, stats.offloads, stats.restores) > 0
    assert torch.cuda.memory_allocated() - before < 8 << 20  # what the other one computes with


def test_a_round_resumes_from_one_that_still_runs(askers: tuple[Asker, Asker]) -> None:
    kept, fresh = askers
    rng = random.Random(1006)
    for _ in range(10):
        state, question = tokens(rng, 600, kept.vocab), [tokens(rng, 3, kept.vocab)]
        asked = [request(state, question, saves=[570]), request(state + tokens(rng, 50, kept.vocab), question)]
        rounds = []
        for one in asked:
            plan = kept.runner.plan()
            plan.add(one)
            rounds.append(kept.runner.begin(plan))
        results = [result for round in rounds for result in round.results()]
        assert [result.reused_tokens for result in results] == [0, 570]
        for result, one in zip(results, asked, strict=True):
            same(result.values_QO, fresh.ask(one)[0][0])


@pytest.mark.parametrize("graphs", ["explicit", "off"])
def test_engines_with_checkpoints_answer_like_the_cpu_from_three_threads(engine: Engine, graphs: Any) -> None:
    rng = random.Random(7)
    words = ["the", "agent", "opened", "file", "12", "error.", "(x)", "\n"]
    threads: list[list[DecisionRequest]] = []
    for _ in range(3):
        state, requests = "", []
        for _ in range(12):
            state += " ".join(rng.choice(words) for _ in range(rng.choice([1, 20, 90])))
            requests.append(DecisionRequest(state, {str(k): Noul(f"Is {k}?") for k in range(5)}))
        threads.append(requests)
    config = EngineConfig(
        device="cuda",
        dtype="float32",
        graphs=graphs,
        max_round_tokens=512,
        checkpoint_gb=0.004,
        checkpoint_host_gb=0.01,
    )
    with tiny_engine(config) as cuda:
        count = compilations()
        results: list[Any] = [None] * 3

        def ask(thread: int) -> None:
            results[thread] = [cuda.decide([request])[0] for request in threads[thread]]

        asking = [threading.Thread(target=ask, args=(k,)) for k in range(3)]
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join()
        cuda._store.check()
        print(cuda.checkpoint_stats())
        assert cuda.checkpoint_stats().hits > 20
        assert compilations() == count
    for got, requests in zip(results, threads, strict=True):
        for decision, want in zip(got, engine.decide(requests), strict=True):
            for name in want:
                assert decision[name].value == pytest.approx(want[name].value, abs=PROBABILITY_FP32)


def test_states_kept_in_bfloat16_resume(askers: tuple[Asker, Asker]) -> None:
    _, fresh = askers
    before = torch.cuda.current_stream()
    kept = Asker(small_model(), pages=20, slots=10, compile=False, graphs="off", checkpoint_dtype="bfloat16")
    rng = random.Random(1008)
    state = tokens(rng, 300, NAN_TOKEN)
    for total, expected in ((130, 0), (200, 130), (300, 200)):
        asked = request(state[:total], [tokens(rng, 3, NAN_TOKEN)], saves=[total])
        ((got, reused),) = kept.ask(asked)
        assert reused == expected
        same(got, fresh.ask(asked)[0][0])
    torch.cuda.set_stream(before)
