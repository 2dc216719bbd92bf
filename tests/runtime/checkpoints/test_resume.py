"""What resumes from checkpoints gets the answers of what is computed afresh."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from flide.models import Gemma4ForDecision, Qwen35ForDecision, gemma4, qwen3_5
from flide.runtime.rounds import LogitsRequest
from flide.runtime.tree import TreeLayout
from tests.models.gemma4 import tiny_gemma4
from tests.models.test_interpreter import needs_interpreter, run_kernels
from tests.runtime.checkpoints.asker import LABELS, POSITIONS, Asker, check_chain, check_continuations, request, tokens
from tests.tiny_model import tiny_model_directory
from tests.tolerance import LOGITS_FP32, PROBABILITY_FP32, PROBABILITY_SWEEP_FP32


def qwen() -> Qwen35ForDecision:
    return Qwen35ForDecision.from_pretrained(tiny_model_directory(), dtype=torch.float32)


def gemma(variant: str = "e2b") -> Gemma4ForDecision:
    hf = tiny_gemma4(variant)
    model = Gemma4ForDecision.from_config(hf.config)
    model.load_state_dict(hf.state_dict())
    return model.eval().requires_grad_(False)


MODELS = {"qwen": qwen, "gemma": gemma}


def same(got: np.ndarray, want: np.ndarray, probability: float = PROBABILITY_FP32) -> None:
    assert want.std() > 0.1
    assert np.abs(got - want).max() <= LOGITS_FP32 * want.std()
    both = [np.exp(x - x.max(1, keepdims=True)) for x in (got, want)]
    got, want = (x / x.sum(1, keepdims=True) for x in both)
    assert np.abs(got - want).max() <= probability


@pytest.fixture(scope="module", params=MODELS)
def askers(request: pytest.FixtureRequest) -> tuple[Asker, Asker]:
    """One with a store and one without."""
    make = MODELS[request.param]
    return Asker(make(), pages=200, slots=200), Asker(make())


@pytest.mark.parametrize("position", POSITIONS)
def test_every_position_resumes_to_the_answers_of_a_fresh_run(askers: tuple[Asker, Asker], position: int) -> None:
    kept, fresh = askers
    rng = random.Random(position)
    state, questions = tokens(rng, 230, kept.vocab), [tokens(rng, n, kept.vocab) for n in (1, 5, 70)]
    first = request(state[: position + rng.choice([0, 1, 30])], questions, saves=[position])
    assert kept.ask(first)[0][1] == 0
    for total in {position, position + 1, 230}:
        asked = request(state[:total], questions)
        (got, reused), (want, _) = *kept.ask(asked), *fresh.ask(asked)
        assert reused == position
        same(got, want)


def test_a_chain_of_twenty_resumes(askers: tuple[Asker, Asker]) -> None:
    kept, fresh = askers
    check_chain(kept, fresh, same, kept.ask)


def test_two_continuations_of_one_broken_page(askers: tuple[Asker, Asker]) -> None:
    kept, fresh = askers
    check_continuations(kept, fresh, same, kept.ask)


def test_another_salt_misses_and_saves_for_itself(askers: tuple[Asker, Asker]) -> None:
    kept, _ = askers
    rng = random.Random(1003)
    state, question = tokens(rng, 50, kept.vocab), [tokens(rng, 3, kept.vocab)]
    for expected in (0, 50):
        for salt in (None, "a", "b"):
            assert kept.ask(request(state, question, saves=[50], salt=salt))[0][1] == expected


def test_the_same_state_is_computed_once_in_a_round(askers: tuple[Asker, Asker]) -> None:
    kept, fresh = askers
    rng = random.Random(1004)
    state = tokens(rng, 100, kept.vocab)
    front = tokens(rng, 2, kept.vocab)  # that the second request's questions share
    asked = [
        request(state, [tokens(rng, n, kept.vocab) for n in (4, 6)], saves=[90]),
        request(state, [front + tokens(rng, n, kept.vocab) for n in (2, 3, 5)], saves=[95]),
        request(state, [tokens(rng, 3, kept.vocab)], saves=[90], salt="other"),
        request(tokens(rng, 30, kept.vocab), [tokens(rng, 3, kept.vocab)]),
        request(state, [tokens(rng, 70, kept.vocab)], saves=[90]),
    ]
    reports: list[Any] = []
    kept.runner.observers.append(reports.append)
    results = kept.ask(*asked)
    kept.runner.observers.clear()
    assert [reused for _, reused in results] == [0, 100, 0, 0, 100]
    assert reports[0].trunk_tokens == 100 + 100 + 30
    assert kept.ask(asked[1])[0][1] == 95
    for (got, _), one in zip(results, asked, strict=True):
        same(got, fresh.ask(one)[0][0])


def test_only_whole_states_are_the_same(askers: tuple[Asker, Asker]) -> None:
    """Those that are as long and end alike stay apart, whatever they begin with."""
    kept, fresh = askers
    rng = random.Random(1008)
    state = tokens(rng, 120, kept.vocab)
    states = [state, [*state[:40], state[40] ^ 1, *state[41:]], [state[0] ^ 1, *state[1:]], state]
    asked = [request(x, [tokens(rng, 3, kept.vocab)]) for x in states]
    asked.append(request(state, [tokens(rng, 3, kept.vocab)], salt="other"))
    results = kept.ask(*asked)
    assert [reused for _, reused in results] == [0, 0, 0, 120, 0]
    for (got, _), one in zip(results, asked, strict=True):
        same(got, fresh.ask(one)[0][0])


def histories(rng: random.Random, vocab: int) -> Iterator[list[LogitsRequest]]:
    """Rounds of agents whose states grow, are cut short and branch off, some of them at the same time."""
    states: list[list[int]] = [tokens(rng, rng.randrange(1, 150), vocab) for _ in range(6)]
    while True:
        asked = []
        for _ in range(rng.choice([1, 1, 2, 4])):
            index = rng.randrange(len(states))
            kind = rng.random()
            if kind < 0.1:
                states[index] = tokens(rng, rng.randrange(1, 200), vocab)
            elif kind < 0.25:
                states[index] = states[index][: rng.randrange(1, len(states[index]) + 1)]
            elif kind < 0.35:
                states[index] = [*rng.choice(states)]
            if kind < 0.9 and len(states[index]) < 500:
                states[index] = states[index] + tokens(rng, rng.choice([1, 2, 30, 64, 100]), vocab)
            state = states[index]
            saves = sorted({rng.randrange(1, len(state) + 1) for _ in range(rng.choice([0, 1, 2, 4]))})
            questions = [tokens(rng, rng.choice([1, 2, 9, 65]), vocab) for _ in range(rng.choice([1, 2, 3]))]
            asked.append(request(state, questions, saves=saves, salt=rng.choice([None, None, "s"])))
        yield asked


@pytest.mark.parametrize(
    ("model", "rounds"),
    [("qwen", 12), ("gemma", 15), *(pytest.param(name, 600, marks=pytest.mark.slow) for name in MODELS)],
)
@pytest.mark.parametrize("host", [0.0, 0.7])
def test_random_histories_with_room_for_little(model: str, rounds: int, host: float) -> None:
    """Checkpoints come and go all the time; answers stay, and everything is accounted for."""
    kept, fresh = Asker(MODELS[model](), pages=14, slots=5, host=host), Asker(MODELS[model]())
    rng = random.Random(7)
    asked = histories(rng, kept.vocab)
    for _ in range(rounds):
        requests = next(asked)
        for (got, reused), one in zip(kept.ask(*requests), requests, strict=True):
            assert reused <= one.reuse.state_tokens
            same(got, fresh.ask(one)[0][0], PROBABILITY_SWEEP_FP32)
        stats = kept.store.stats()
        assert stats.bytes <= stats.capacity_bytes
        assert stats.host_bytes <= stats.host_capacity_bytes
    print(stats)
    assert min(stats.hits, stats.misses, stats.saves, stats.evictions, stats.saved_tokens) > 0
    assert (stats.offloads > 0) == (stats.restores > 0) == (host > 0)


class Failing:
    """Logits that never come."""

    def result(self) -> Any:
        raise MemoryError("no memory")


def nan_asker() -> tuple[Asker, int]:
    """One with a token that makes everything behind it NaN."""
    model, nan = qwen(), 2 * LABELS
    model.model.embed_tokens.weight.data[nan] = float("nan")
    return Asker(model, pages=50, slots=50), nan


def test_a_round_that_cannot_be_laid_out_leaves_no_pins(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Asker(qwen(), pages=20, slots=5)
    kept.ask(request([7] * 70, [[1]], saves=[70]))

    def fail(*_: Any) -> Any:
        raise MemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(TreeLayout, "resumed", fail)
        for asked in ([request([7] * 90, [[1]])], [request([7] * 90, [[k]]) for k in (1, 2)]):
            with pytest.raises(MemoryError):
                kept.ask(*asked)
    assert [checkpoint.pins for tree in kept.store._trees.values() for checkpoint in tree.values()] == [0]
    assert kept.ask(request([7] * 90, [[1]]))[0][1] == 70


def test_what_is_not_finite_leaves_nothing_behind_and_takes_nobody_along() -> None:
    kept, nan = nan_asker()
    good, bad = request([9] * 70, [[1]], saves=[70]), request([8] * 70, [[1], [nan]], saves=[70])
    (got, _), (wrong, _) = kept.ask(good, bad)
    assert np.isfinite(got).all()
    assert not np.isfinite(wrong).all()
    assert kept.store.stats().checkpoints == 1
    assert kept.ask(good)[0][1] == 70
    assert kept.ask(bad)[0][1] == 0


def test_rounds_that_fail_leave_nothing_behind_and_those_ahead_run_again() -> None:
    """As on CUDA: a round is planned, resumes from what the one before it saved, and then that one fails."""
    kept = Asker(qwen(), pages=50, slots=50)
    rng = random.Random(1005)
    state = tokens(rng, 70, kept.vocab)
    ahead = [request(state, [[1]], saves=[70]), request(state + [3] * 30, [[1]], saves=[100])]
    other = request(tokens(rng, 40, kept.vocab), [[1]], saves=[40])
    expected = [kept.ask(one)[0][0] for one in ahead]
    kept = Asker(qwen(), pages=50, slots=50)
    plans = [kept.runner.plan() for _ in range(2)]
    plans[0].add(ahead[0])
    first = kept.runner.begin(plans[0])
    assert plans[1].add(other)
    assert plans[1].add(ahead[1])
    second = kept.runner.begin(plans[1])
    first._logits = Failing()
    with pytest.raises(MemoryError):
        first.results()
    kept.store.check()
    results = second.results()
    kept.store.check()
    assert [result.reused_tokens for result in results] == [0, 0]
    same(results[1].values_QO, expected[1])
    assert kept.store.stats().checkpoints == 2
    assert [kept.ask(one)[0][1] for one in (ahead[0], other, ahead[1])] == [0, 40, 100]


def test_a_round_that_cannot_be_submitted_gives_everything_back(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Asker(qwen(), pages=50, slots=50)
    asked = request([7] * 70, [[1]], saves=[70])

    def fail(*_: Any) -> Any:
        raise MemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(kept.runner.streams, "submit", fail)
        with pytest.raises(MemoryError):
            kept.ask(asked)
    kept.store.check()
    assert kept.store.stats().checkpoints == 0
    assert [kept.ask(asked)[0][1] for _ in range(2)] == [0, 70]


def test_what_was_planned_and_left_out_is_not_pinned() -> None:
    kept = Asker(qwen(), pages=6, slots=2)
    one = request([7] * 70, [[1]], saves=[70])
    kept.ask(one)
    plan = kept.runner.plan()
    assert plan.add(request([1], [[1]]))
    assert plan.add(one)
    plan.undo()
    assert not plan.add(request([7] * 70 + [2] * 3000, [[1]]))
    for token in range(10, 18):
        kept.ask(request([token] * 90, [[1]], saves=[90]))
    assert kept.ask(one)[0][1] == 0  # evicted


@needs_interpreter
@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("position", [1, 2, 3, 63, 64, 65, 128])
def test_kernels_resume_as_references_do(monkeypatch: pytest.MonkeyPatch, model: str, position: int) -> None:
    rng = random.Random(position)
    kept, fresh = Asker(MODELS[model](), pages=20, slots=20), Asker(MODELS[model]())
    state = tokens(rng, position + 70, kept.vocab)
    asked = [request(state[:total], [[1], [2, 3]], saves=[total]) for total in (position, position + 70)]
    asked.append(asked[0])  # nothing of the trunk is computed
    expected = [fresh.ask(one)[0][0] for one in asked]
    run_kernels(monkeypatch, qwen3_5 if model == "qwen" else gemma4)
    for one, want, before in zip(asked, expected, (0, position, position), strict=True):
        ((got, reused),) = kept.ask(one)
        assert reused == before
        same(got, want)


class Spoilt:
    """Logits of which none is a number."""

    def __init__(self, logits: Any) -> None:
        self.logits_NC, self.run = logits.result()

    def result(self) -> Any:
        return np.full_like(self.logits_NC, np.nan), self.run


def test_requests_that_shared_a_trunk_are_judged_alone() -> None:
    """As on CUDA, where not-a-number in one question may spoil others of the same tree."""
    kept = Asker(qwen(), pages=50, slots=50)
    asked = [request([7] * 70, [[n]], saves=[70]) for n in (1, 2)]
    expected = [Asker(qwen()).ask(one)[0][0] for one in asked]
    plan = kept.runner.plan()
    assert all(map(plan.add, asked))
    round = kept.runner.begin(plan)
    round._logits = Spoilt(round._logits)
    results = round.results()
    kept.store.check()
    assert [result.reused_tokens for result in results] == [0, 70]  # what the first one, again, has saved
    for result, want in zip(results, expected, strict=True):
        same(result.values_QO, want)


def test_what_waits_is_brought_to_the_device() -> None:
    kept = Asker(qwen(), pages=40, slots=8, host=2.0)
    rng = random.Random(1006)
    asked = [request(tokens(rng, 200, kept.vocab), [[1]], saves=[200]) for _ in range(12)]
    for one in asked:
        kept.ask(one)
    stats = kept.store.stats()
    assert (stats.evictions, stats.restores) == (0, 0)
    assert stats.host_checkpoints > 2
    kept.runner.expect(asked)
    kept.store.check()
    restores = kept.store.stats().restores
    assert 1 <= restores < 6
    for one in asked[:restores]:
        assert kept.ask(one)[0][1] == 200
    assert kept.store.stats().restores == restores
    assert not kept.store._expected


def test_a_checkpoint_that_cannot_be_moved_stays_or_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Asker(qwen(), pages=20, slots=4, host=2.0)
    rng = random.Random(1007)
    asked = [request(tokens(rng, 200, kept.vocab), [[1]], saves=[200]) for _ in range(12)]
    for one in asked:
        kept.ask(one)

    def fail(*_: Any) -> Any:
        raise MemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(kept.runner.streams.pools, "offload", fail)
        patch.setattr(kept.runner.streams.pools, "restore", fail)
        assert kept.ask(asked[0])[0][1] == 0  # it stays on the host
    assert kept.store.stats().evictions > 0
    assert kept.ask(asked[0])[0][1] == 200
