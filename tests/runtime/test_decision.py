"""From probabilities to answers, confidences and the wire."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flide.runtime.decision import (
    ChoiceAnswer,
    Decision,
    NoulAnswer,
    ScoreAnswer,
    Usage,
    answer_question,
    num_options,
)
from flide.runtime.request import Choice, Noul, Question, Score
from tests.tolerance import PROBABILITY_SUM

weights = st.lists(st.floats(0, 1e6), min_size=1, max_size=10).filter(lambda p: sum(p) > 0)


def choice(n: int) -> Choice:
    return Choice("q", [f"o{i}" for i in range(n)])


def score(n: int) -> Score:
    return Score("q", [f"level {i}" for i in range(n)])


def confidence(question: Question, probabilities: list[float]) -> float:
    answer = answer_question(question, probabilities)
    assert isinstance(answer, ChoiceAnswer | ScoreAnswer)
    return answer.confidence


@pytest.mark.parametrize(
    ("question", "probabilities", "wire"),
    [
        pytest.param(Noul("q"), [0.75, 0.25], {"type": "noul", "noul": 0.75}, id="noul"),
        pytest.param(
            Choice("q", {"b": None, "a": "x"}),
            [0.25, 0.75],
            {"type": "choice", "choice": "a", "probabilities": {"b": 0.25, "a": 0.75}, "confidence": 0.5},
            id="choice",
        ),
        pytest.param(
            Choice("q", ["a"]),
            [0.2],
            {"type": "choice", "choice": "a", "probabilities": {"a": 1.0}, "confidence": 1.0},
            id="one-option",
        ),
        pytest.param(
            Score("q", ["low", {"text": "high"}]),
            [0.25, 0.75],
            {
                "type": "score",
                "score": 0.75,
                "legend": {"0": "low", "1": {"text": "high"}},
                "probabilities": {"0": 0.25, "1": 0.75},
                "confidence": 0.5,
            },
            id="score",
        ),
        pytest.param(
            Score("q", [["only"]]),
            [3.0],
            {
                "type": "score",
                "score": 0.0,
                "legend": {"0": ["only"]},
                "probabilities": {"0": 1.0},
                "confidence": 1.0,
            },
            id="one-level",
        ),
    ],
)
def test_answer_has_the_shape_of_the_wire(question: Question, probabilities: list[float], wire: dict[str, Any]) -> None:
    answer = answer_question(question, probabilities)
    assert answer.to_dict() == wire
    assert json.loads(json.dumps(answer.to_dict())) == wire
    assert list(answer.to_dict()) == list(wire)


def test_decision_has_the_shape_of_the_wire_and_is_indexed_by_id() -> None:
    answers = {"b": NoulAnswer(0.5), "": answer_question(choice(2), [1.0, 3.0])}
    decision = Decision("flide", answers, Usage(12, 3))
    assert decision.to_dict() == {
        "model": "flide",
        "answers": {"b": {"type": "noul", "noul": 0.5}, "": answers[""].to_dict()},
        "usage": {"input_tokens": 12, "output_tokens": 3},
    }
    assert list(decision) == ["b", ""]
    assert len(decision) == 2
    assert "b" in decision
    assert decision["b"] is answers["b"]
    with pytest.raises(KeyError):
        decision["missing"]


def test_changing_a_wire_object_does_not_change_the_answer() -> None:
    answer = answer_question(score(3), [0.2, 0.3, 0.5])
    wire = answer.to_dict()
    wire["probabilities"].clear()
    wire["legend"].clear()
    assert answer == answer_question(score(3), [0.2, 0.3, 0.5])


@pytest.mark.parametrize(
    ("question", "probabilities", "value", "all_probabilities"),
    [
        pytest.param(Noul(), [3, 1], 0.75, {"true": 0.75, "false": 0.25}, id="noul"),
        pytest.param(choice(2), [3, 1], "o0", {"o0": 0.75, "o1": 0.25}, id="choice"),
        pytest.param(score(2), [3, 1], 0.25, {"0": 0.75, "1": 0.25}, id="score"),
    ],
)
def test_every_answer_has_a_value_and_probabilities(
    question: Question, probabilities: list[float], value: Any, all_probabilities: dict[str, float]
) -> None:
    answer = answer_question(question, probabilities)
    assert answer.value == value
    assert answer.probabilities == all_probabilities


def test_answers_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        NoulAnswer(0.5).noul = 0.6


@pytest.mark.parametrize(
    ("question", "n"),
    [
        pytest.param(Noul(), 2, id="noul"),
        pytest.param(choice(255), 255, id="choice"),
        pytest.param(score(10), 10, id="score"),
    ],
)
def test_number_of_options(question: Question, n: int) -> None:
    assert num_options(question) == n
    assert len(answer_question(question, [1.0] * n).probabilities) == n


@pytest.mark.parametrize(
    "probabilities",
    [
        pytest.param([1.0], id="too-few"),
        pytest.param([0.5, 0.25, 0.25], id="too-many"),
        pytest.param([0.0, 0.0], id="all-zero"),
        pytest.param([1.5, -0.5], id="negative"),
        pytest.param([math.nan, 1.0], id="nan"),
        pytest.param([math.inf, 1.0], id="infinity"),
    ],
)
@pytest.mark.parametrize("question", [Noul(), choice(2), score(2)], ids=["noul", "choice", "score"])
def test_probabilities_that_cannot_come_from_a_model_are_a_bug(question: Question, probabilities: list[float]) -> None:
    with pytest.raises(AssertionError):
        answer_question(question, probabilities)


def test_of_equally_probable_options_the_name_that_sorts_first_wins() -> None:
    answer = answer_question(Choice("q", ["c", "b", "a", "d"]), [0.2, 0.3, 0.3, 0.2])
    assert answer.value == "a"


def test_confidence_of_a_score_counts_from_the_first_most_probable_level() -> None:
    # The mode is level 1; D = (1.5 + 0.5 + 0.5 + 1.5) / 4 = 1.
    answer = answer_question(score(4), [0.1, 0.4, 0.4, 0.1])
    assert isinstance(answer, ScoreAnswer)
    assert answer.score == pytest.approx(1.5)
    assert answer.confidence == pytest.approx(1 - (0.1 + 0.4 + 2 * 0.1) / 1.0)


@pytest.mark.parametrize("n", range(2, 11))
def test_uniform_probabilities_give_no_confidence(n: int) -> None:
    assert confidence(choice(n), [1 / n] * n) == pytest.approx(0, abs=PROBABILITY_SUM)
    assert confidence(score(n), [1 / n] * n) == pytest.approx(0, abs=PROBABILITY_SUM)


@pytest.mark.parametrize("n", range(1, 11))
def test_a_certain_option_gives_full_confidence(n: int) -> None:
    for hot in range(n):
        one_hot = [float(i == hot) for i in range(n)]
        assert confidence(choice(n), one_hot) == 1
        assert confidence(score(n), one_hot) == 1
        assert answer_question(choice(n), one_hot).value == f"o{hot}"
        assert answer_question(score(n), one_hot).value == hot


@given(weights)
def test_numbers_stay_in_their_ranges(p: list[float]) -> None:
    n = len(p)
    for question in (choice(n), score(n)):
        answer = answer_question(question, p)
        assert isinstance(answer, ChoiceAnswer | ScoreAnswer)
        assert 0 <= answer.confidence <= 1
        assert all(0 <= value <= 1 for value in answer.probabilities.values())
        assert math.fsum(answer.probabilities.values()) == pytest.approx(1, abs=PROBABILITY_SUM)
    scored = answer_question(score(n), p)
    assert isinstance(scored, ScoreAnswer)
    assert 0 <= scored.score <= n - 1
    expected = sum(int(k) * v for k, v in scored.probabilities.items())
    assert scored.score == pytest.approx(expected, abs=n * PROBABILITY_SUM)


@given(weights, st.randoms(use_true_random=False))
def test_order_of_the_options_does_not_change_a_bit_of_a_choice(p: list[float], random: Any) -> None:
    items = [(f"o{i}", w) for i, w in enumerate(p)]
    shuffled = random.sample(items, len(items))
    assert answer_question(Choice("q", [name for name, _ in items]), [w for _, w in items]) == answer_question(
        Choice("q", [name for name, _ in shuffled]), [w for _, w in shuffled]
    )


@given(weights)
def test_the_chosen_option_is_a_most_probable_one(p: list[float]) -> None:
    answer = answer_question(choice(len(p)), p)
    assert isinstance(answer, ChoiceAnswer)
    assert answer.probabilities[answer.choice] == max(answer.probabilities.values())


@given(st.floats(0, 1))
def test_both_sides_of_a_noul_sum_to_one(p: float) -> None:
    answer = answer_question(Noul(), [p, 1 - p])
    assert math.fsum(answer.probabilities.values()) == pytest.approx(1)
    assert answer.value == pytest.approx(p)
