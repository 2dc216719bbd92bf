"""Checkpoints in an engine: states of text and of messages that grow."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from flide import Choice, DecisionRequest, Engine, EngineConfig, Noul, RequestError, Score
from flide.models import Qwen35ForDecision
from flide.runtime.tokenizer import PromptTokenizer
from tests.tiny_model import tiny_engine, tiny_model_directory
from tests.tolerance import PROBABILITY_BF16_STATES, PROBABILITY_FP32

QUESTIONS = {
    "done": Noul("Is the task done?"),
    "next": Choice("What is next?", ["edit", "run", "stop"]),
    "risk": Score("How risky is it?", ["low", "some", "high"]),
}
MORE = {"stuck": Noul("Is the agent stuck?"), "tests": Noul("Do the tests pass?")}
WORDS = [
    "the",
    "agent",
    "opened",
    "file",
    "line",
    "error",
    "test",
    "12",
    "main.py",
    "(x)",
    "-",
    "value,",
    "None.",
    "\n",
]


@pytest.fixture(scope="module")
def keeping() -> Iterator[Engine]:
    with tiny_engine(EngineConfig(device="cpu", checkpoint_gb=0.02)) as engine:
        yield engine


def words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(count))


def answers_agree(got: Any, want: Any) -> None:
    assert list(got) == list(want)
    for name in want:
        assert got[name].value == pytest.approx(want[name].value, abs=PROBABILITY_FP32)
    got, want = got.usage, want.usage
    assert (got.input_tokens, got.output_tokens, got.shared_tokens) == (
        want.input_tokens,
        want.output_tokens,
        want.shared_tokens,
    )
    assert want.reused_tokens == 0


def test_without_a_budget_there_is_no_store(engine: Engine) -> None:
    assert engine.checkpoint_stats() is None
    assert not engine.reader.checkpoints


@pytest.mark.parametrize("gb", [1e-6, 1e-12])
def test_a_budget_that_holds_nothing_is_refused(gb: float) -> None:
    for options in ({"checkpoint_gb": gb}, {"checkpoint_gb": 0.01, "checkpoint_host_gb": gb}):
        with pytest.raises(ValueError, match="holds no checkpoint of this model"):
            tiny_engine(EngineConfig(device="cpu", **options))


@pytest.mark.parametrize("ending", ["", ".", "word", " 12", "\n\n", '"}', "\u4f60\u597d"])
def test_a_text_that_grows_resumes_near_its_old_end(keeping: Engine, engine: Engine, ending: str) -> None:
    rng = random.Random(ending)
    state, before = "", 0
    for step in range(4):
        state += words(rng, rng.choice([40, 120])) + ending
        request = DecisionRequest(state, QUESTIONS)
        (got,), (want,) = keeping.decide([request]), engine.decide([request])
        answers_agree(got, want)
        tokens = len(keeping.format.encode(request).shared)
        assert got.usage.reused_tokens > before - 24 if step else got.usage.reused_tokens < 40
        before = tokens
    (again,), (want,) = (x.decide([DecisionRequest(state, MORE)]) for x in (keeping, engine))
    answers_agree(again, want)
    assert before - 32 <= again.usage.reused_tokens <= before


@pytest.mark.parametrize("wrapped", [False, True])
def test_messages_that_are_added_and_a_last_one_that_is_another(keeping: Engine, engine: Engine, wrapped: bool) -> None:
    rng = random.Random(wrapped)
    messages: list[Any] = [{"role": "user", "content": words(rng, 60)}]

    def ask(messages: list[Any], **options: Any) -> Any:
        request = DecisionRequest({"task": "t", "messages": messages} if wrapped else messages, QUESTIONS, **options)
        (got,), (want,) = keeping.decide([request]), engine.decide([request])
        answers_agree(got, want)
        return len(keeping.format.encode(request).shared), got.usage.reused_tokens

    before, _ = ask(messages)
    for _ in range(3):
        messages = [*messages, {"role": "assistant", "content": words(rng, 50)}]
        tokens, reused = ask(messages)
        assert before - 32 < reused < tokens
        before = tokens
    head = messages[:-1]
    short, _ = ask(head)
    for _ in range(3):  # candidates for the last message
        tokens, reused = ask([*head, {"role": "assistant", "content": words(rng, 50)}])
        assert short - 40 < reused < tokens


def test_the_hint_and_the_salt(keeping: Engine) -> None:
    rng = random.Random(5)
    text = words(rng, 200)

    def reused(state: str, **options: Any) -> int:
        return keeping.decide([DecisionRequest(state, QUESTIONS, **options)])[0].usage.reused_tokens

    assert reused(text, cache_salt="a", checkpoint=500) == 0
    here = reused(text[:510] + words(rng, 50), cache_salt="a")
    assert 0 < here < reused(text, cache_salt="a")
    assert reused(text, cache_salt="b", checkpoint=False) == 0
    assert reused(text, cache_salt="b") == 0
    assert reused(text, cache_salt="b", checkpoint=False) > 0
    messages = [{"role": "user", "content": words(rng, 30)} for _ in range(6)]
    options = {"cache_salt": "c"}
    keeping.decide([DecisionRequest(messages, QUESTIONS, checkpoint=2, **options)])
    (other,) = keeping.decide([DecisionRequest([*messages[:2], *messages[3:]], QUESTIONS, **options)])
    assert 100 < other.usage.reused_tokens < 240


@pytest.mark.parametrize(
    "options",
    [{"cache_salt": ""}, {"cache_salt": 7}, {"cache_salt": "x" * 257}, {"checkpoint": -1}, {"checkpoint": "x"}],
)
def test_bad_options_of_a_request_are_refused(keeping: Engine, options: Any) -> None:
    with pytest.raises(RequestError, match=next(iter(options))):
        keeping.decide([DecisionRequest("s", QUESTIONS, **options)])


@pytest.mark.parametrize("count", [32, pytest.param(500, marks=pytest.mark.slow)])
def test_one_by_one_and_many_at_once_give_the_same_answers(engine: Engine, count: int) -> None:
    rng = random.Random(6)
    states = [words(rng, 30)]
    requests = []
    for _ in range(count):
        state = rng.choice(states)
        if rng.random() < 0.8 and len(state) < 4000:
            state += words(rng, rng.choice([1, 10, 60]))
            states = [*states[-20:], state]
        questions = rng.choice([QUESTIONS, MORE, {**MORE, **QUESTIONS}])
        requests.append(DecisionRequest(state, questions, cache_salt=rng.choice([None, "a"])))
    expected = engine.decide(requests)
    config = EngineConfig(device="cpu", checkpoint_gb=0.004, checkpoint_host_gb=0.004, max_round_tokens=1024)
    with tiny_engine(config) as one, tiny_engine(config) as many:
        for got, want in zip([one.decide([request])[0] for request in requests], expected, strict=True):
            answers_agree(got, want)
        for begin in range(0, count, 64):
            some = slice(begin, begin + 64)
            for got, want in zip(many.decide(requests[some]), expected[some], strict=True):
                answers_agree(got, want)
        for found in (one, many):
            found._store.check()
            stats = found.checkpoint_stats()
            assert stats.hits > 5
            assert stats.bytes <= stats.capacity_bytes <= 0.004 * 2**30


def test_another_salt_costs_what_a_cold_one_costs(keeping: Engine) -> None:
    """Rows of rounds, and characters that are encoded but for single words."""
    rng = random.Random(9)
    state, other = words(rng, 300), words(rng, 300)
    blocks, reports = keeping.format.tokenizer._beginnings, []
    assert blocks is not None
    end = keeping.observe(reports.append)

    def cost(state: str, salt: str | None) -> tuple[int, int, int]:
        reports.clear()
        before = len(blocks._blocks)
        (decision,) = keeping.decide([DecisionRequest(state, QUESTIONS, cache_salt=salt)])
        (report,) = reports
        return decision.usage.reused_tokens, report.trunk_tokens, len(blocks._blocks) - before

    cold = cost(state, None)
    assert cold[0] == 0
    assert cost(state, "someone") == cost(state, "someone else") == cold
    assert cost(state, "someone")[1] < cold[1] / 10
    end()
    together = [DecisionRequest(other, QUESTIONS, cache_salt=salt) for salt in (None, "a", "b", "a")]
    reused = [decision.usage.reused_tokens for decision in keeping.decide(together)]
    assert reused[:3] == [0, 0, 0]
    assert reused[3] > 0


def resident() -> int:
    """Bytes of this process that are in memory."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="memory is read as Linux tells it")
def test_memory_stays_within_what_was_planned_over_ten_thousand_mixed_requests() -> None:
    """States that grow, are cut short and are the same, of several salts; some leave."""
    rng = random.Random(12)
    budget = 0.02
    with tiny_engine(EngineConfig(device="cpu", checkpoint_gb=budget, checkpoint_host_gb=budget)) as engine:
        store, peaks, done = engine._store, [], 0
        assert store is not None
        states: list[Any] = [words(rng, 30), [], {"messages": []}]
        asked = tokens = 0
        while done < 10_000:
            batch = []
            for _ in range(rng.choice([1, 4, 16, 64])):
                state = rng.choice(states)
                if rng.random() < 0.7:
                    if isinstance(state, str):
                        state = state[: rng.randrange(3000)] + words(rng, rng.choice([1, 10, 60]))
                    else:
                        messages = state if isinstance(state, list) else state["messages"]
                        messages = [*messages[-9:], {"role": "user", "content": words(rng, 20)}]
                        state = messages if isinstance(state, list) else {"messages": messages}
                    states = [*states[-20:], state]
                questions = rng.choice([QUESTIONS, MORE, {**MORE, **QUESTIONS}])
                salt, keep = rng.choice([None, "a", "b"]), rng.choice([True, True, False, 2, 500])
                batch.append(DecisionRequest(state, questions, cache_salt=salt, checkpoint=keep))
            futures = [engine.submit(engine.prepare(request)) for request in batch]
            for future in futures:
                if rng.random() < 0.05:
                    future.cancel()
            for future in futures:
                if not future.cancelled():
                    usage = future.result().usage
                    asked, tokens = asked + 1, tokens + usage.reused_tokens
            done += len(batch)
            peaks.append((done, resident()))
            stats = engine.checkpoint_stats()
            assert stats is not None
            assert stats.bytes <= stats.capacity_bytes <= budget * 2**30
            assert stats.host_bytes <= stats.host_capacity_bytes <= budget * 2**30
    store.check()
    assert not any(x.pins for tree in store._trees.values() for x in tree.values())
    stats = store.stats()
    assert min(stats.hits, stats.evictions, stats.offloads, stats.restores) > 100
    warm = max(size for count, size in peaks if count < 2000)
    peak = max(size for _, size in peaks)
    print(asked, tokens, stats, warm >> 20, peak >> 20)
    assert peak - warm < 60 << 20, "memory grows with the requests"


@pytest.mark.parametrize("options", [{"checkpoint_gb": 1e6}, {"checkpoint_gb": 0.01, "checkpoint_host_gb": 1e6}])
def test_more_memory_than_there_is_is_refused(options: Any) -> None:
    with pytest.raises(ValueError, match="checkpoints are to take"):
        tiny_engine(EngineConfig(device="cpu", **options))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler on the CPU")
def test_a_compiled_engine_resumes_without_another_compilation(engine: Engine) -> None:
    rng = random.Random(8)
    state, requests = "", []
    for count in (40, 200, 1, 90, 5):
        state += words(rng, count)
        requests.append(DecisionRequest(state, QUESTIONS))
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters["stats"]
    before = counters["unique_graphs"]
    with tiny_engine(EngineConfig(device="cpu", compile=True, checkpoint_gb=0.004, max_round_tokens=400)) as compiled:
        for request in requests:
            (got,), (want,) = compiled.decide([request]), engine.decide([request])
            answers_agree(got, want)
        assert compiled.checkpoint_stats().hits >= 4
    assert counters["unique_graphs"] - before == 1


def test_a_model_belongs_to_one_engine_that_keeps_checkpoints() -> None:
    directory = tiny_model_directory()
    model = Qwen35ForDecision.from_pretrained(directory)
    tokenizer = PromptTokenizer.from_pretrained(directory)
    keeping, plain = EngineConfig(device="cpu", checkpoint_gb=0.01), EngineConfig(device="cpu")
    request = DecisionRequest("some state", QUESTIONS)

    def ask(config: EngineConfig) -> Any:
        with Engine(model, tokenizer, config) as engine:
            for other in (keeping, plain) if config is keeping else ():
                with pytest.raises(ValueError, match="belongs to another engine"):
                    Engine(model, tokenizer, other)
            return engine.decide([request])[0].answers

    expected = ask(plain)
    assert ask(keeping) == ask(plain) == ask(keeping) == expected


def test_states_kept_in_bfloat16_take_half_and_change_little(engine: Engine) -> None:
    rng = random.Random(9)
    config = EngineConfig(device="cpu", checkpoint_gb=0.02)
    with tiny_engine(config) as whole, tiny_engine(replace(config, checkpoint_dtype="bfloat16")) as half:
        state, differ = "", 0.0
        for step in range(8):
            state += words(rng, 40)
            request = DecisionRequest(state, QUESTIONS)
            (got,), (want,) = half.decide([request]), engine.decide([request])
            assert (got.usage.reused_tokens > 0) == (step > 0)
            for name in want:
                assert got[name].value == pytest.approx(want[name].value, abs=PROBABILITY_BF16_STATES)
            differ += abs(got["done"].value - want["done"].value)
        assert differ > 0
        assert half._store._item.slot < 0.7 * whole._store._item.slot  # windows stay
