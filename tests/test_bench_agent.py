"""The benchmark of agents: histories grow as published ones do, wrong answers have no speeds, and it runs anywhere."""

from __future__ import annotations

import itertools
import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from flide import EngineConfig
from flide.runtime.checkpoints.store import CheckpointStore
from scripts import bench_agent
from scripts.agent_steps import BEHIND_STATE, TextSteps, TokenSteps, stored_lengths
from scripts.agent_targets import Reply
from scripts.bench_agent import main, parity
from scripts.workloads import trajectories
from tests.serve.running import running
from tests.tiny_model import tiny_engine, tiny_model_directory

SMALL = [*"--device cpu --scale 0.01 --samples 1 --checks 1 --agents 2 --seconds 0.1 --checkpoint-gb 0.1".split()]  # noqa: SIM905
HISTORY = [
    {"role": "system", "content": "You are an agent."},
    {"role": "user", "content": [{"type": "text", "text": "Mend the test."}], "agent": "primary"},
    {"role": "assistant", "content": "I look.", "thought": "?"},
    {"role": "user", "content": "two files"},
    {"role": "assistant", "content": "I mend."},
    {"role": "user", "content": "done"},
    {"role": "assistant", "content": "submit"},
]


@pytest.fixture
def published(tmp_path: Path) -> Path:
    path = tmp_path / "one.traj"
    path.write_text(json.dumps({"history": HISTORY, "trajectory": []}), encoding="utf-8")
    return path


@pytest.fixture
def lengths(tmp_path: Path) -> Path:
    path = tmp_path / "steps.json"
    path.write_text(
        json.dumps([{"states": [2000, 3500, 7000, 9000]}, {"states": [3000, 6000, 20000]}]), encoding="utf-8"
    )
    return path


def test_trajectories_are_as_long_as_published_ones() -> None:
    agents = list(itertools.islice(trajectories(), 2000))
    assert agents[:3] == list(itertools.islice(trajectories(), 3))
    states = [step.trunk for steps in agents for step in steps]
    growth = [b.trunk - a.trunk for steps in agents for a, b in itertools.pairwise(steps)]
    assert min(growth) > 0
    assert statistics.mean(map(len, agents)) == pytest.approx(10.6, abs=0.5)
    assert statistics.median(growth) == pytest.approx(268, rel=0.05)
    assert statistics.mean(growth) == pytest.approx(595, rel=0.05)
    assert sum(n < 4000 for n in states) / len(states) == pytest.approx(0.42, abs=0.04)
    assert sum(n >= 8000 for n in states) / len(states) == pytest.approx(0.26, abs=0.04)
    assert {step.branches for steps in agents for step in steps} == {(24, 26, 25, 58, 47)}


def test_token_ids_of_a_state_begin_with_those_before_and_nothing_is_shared(lengths: Path) -> None:
    make = TokenSteps(1000, lengths=stored_lengths(lengths), scale=0.01)
    steps, others = next(make(0)), next(make(2))
    assert [step.history for step in steps] == [len(step.state) for step in steps] == [20, 35, 70, 90]
    for before, after in itertools.pairwise(steps):
        kept = len(before.state) - BEHIND_STATE
        assert after.state[:kept] == before.state[:kept]
        assert after.questions == before.questions
    assert steps[0].state != others[0].state
    assert next(make(0)) == steps
    faulty = steps[1].faulty(8).state
    assert faulty[:-8] == steps[1].state[:-8]
    assert faulty != steps[1].state


@pytest.mark.parametrize("as_messages", [False, True])
def test_text_of_a_state_begins_with_the_one_before(published: Path, lengths: Path, as_messages: bool) -> None:
    for options in ({}, {"files": [published]}, {"lengths": stored_lengths(lengths)}):
        make = TextSteps(**options, as_messages=as_messages)  # type: ignore[arg-type]
        steps = next(make(7))
        assert len(steps) > 2
        for before, after in itertools.pairwise(steps):
            assert after.state[: len(before.state)] == before.state
            assert len(after.state) > len(before.state)
            assert after.history >= before.history
        assert steps[-1].faulty(3).state != steps[-1].state
        assert steps[0].request().to_dict()["state"] == steps[0].state
        assert next(make(8))[0].state[:1] != steps[0].state[:1] or not as_messages


def test_published_text_is_all_there(published: Path) -> None:
    steps = next(TextSteps(files=[published])(1))
    assert [step.state.count("\n\nuser: ") for step in steps] == [1, 2, 3]
    assert steps[0].state == "Agent 1, task 0.\n\nsystem: You are an agent.\n\nuser: Mend the test."
    assert steps[-1].state.endswith("assistant: I mend.\n\nuser: done")


def test_wrong_answers_are_far_off_and_rounding_is_not() -> None:
    right, faulty = Reply([[0.5, 0.5], [0.2, 0.8]], 10, 0), Reply([[0.4, 0.6], [0.3, 0.7]], 10, 0)
    near = Reply([[0.51, 0.49], [0.2, 0.8]], 10, 5)
    expected = [(right, faulty)]
    assert parity(expected, expected) == 0
    assert parity(expected, [(near, faulty)]) == pytest.approx(0.1)
    assert parity(expected, [(faulty, right)]) == pytest.approx(1.0)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main([*SMALL, *arguments]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return result


def test_from_token_ids_on_a_cpu(capsys: pytest.CaptureFixture[str], lengths: Path) -> None:
    found = run(capsys, "--model", str(tiny_model_directory()), "--runs", "off,on", "--shapes", str(lengths))["runs"]
    off, on = found["off"], found["on"]
    assert off["alone"]["reused_share"] == off["alone"]["hit_rate"] == 0
    assert on["alone"]["hit_rate"] == on["resumed"] == 1
    assert on["alone"]["reused_share"] > 0.3
    assert on["parity"] < 1e-3  # float32
    assert on["store"]["hits"] > 0
    assert off["store"] == {}
    assert on["together"]["steps_per_s"] > 0
    assert {"first", "<0.04k", "<0.08k", "<0.16k", "<0.32k", "fit"} <= set(on["alone"])


def test_from_text_with_the_host_s_memory(capsys: pytest.CaptureFixture[str], lengths: Path) -> None:
    tight = ("--tight-gb", "0.002", "--checkpoint-host-gb", "0.05", "--shapes", str(lengths))
    found = run(capsys, "--model", str(tiny_model_directory()), "--text", "--runs", "off,host", *tight)["runs"]["host"]
    assert found["resumed"] == 1
    assert found["store"]["host_capacity_bytes"] > found["store"]["capacity_bytes"]


def test_over_http(capsys: pytest.CaptureFixture[str], lengths: Path) -> None:
    with tiny_engine(EngineConfig(device="cpu", checkpoint_gb=0.1)) as engine, running(engine) as url:
        found = run(capsys, "--url", url, "--shapes", str(lengths))["runs"]
    assert found["off"]["alone"]["reused_share"] == 0
    assert found["on"]["alone"]["reused_share"] > 0.1
    assert set(found) == {"off", "on"}


def test_wrong_answers_have_no_speeds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, lengths: Path
) -> None:
    compared = bench_agent.Bench.compared
    monkeypatch.setattr(
        bench_agent.Bench,
        "compared",
        lambda self, target: [pair[::-1] if pair[0].reused else pair for pair in compared(self, target)],
    )
    assert main([*SMALL, "--model", str(tiny_model_directory()), "--runs", "off,on", "--shapes", str(lengths)]) == 1
    shown = capsys.readouterr()
    assert "no speeds" in shown.err
    assert "_ms" not in shown.out


def test_what_never_resumes_has_no_speeds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, lengths: Path
) -> None:
    monkeypatch.setattr(CheckpointStore, "find", lambda self, salt, key: None)
    assert main([*SMALL, "--model", str(tiny_model_directory()), "--runs", "off,on", "--shapes", str(lengths)]) == 1
    assert "nothing resumed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--url", "ftp://x"], "http://HOST:PORT"),
        (["--size", "0.8b", "--text"], "--text needs --model"),
        (["--trajectory", "x"], "--trajectory needs"),
        (["--runs", "on,off"], "comes first"),
        (["--runs", "off,fast"], "unknown run"),
    ],
)
def test_bad_options(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--device", "cpu", *arguments])
    assert message in capsys.readouterr().err
