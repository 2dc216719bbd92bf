"""Many answers made together are those made one by one."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from flide.runtime.answers import answer_questions
from flide.runtime.decision import answer_question
from flide.runtime.request import Noul, Question
from tests.runtime.test_decision import choice, score


@given(
    rows=st.lists(
        st.tuples(
            st.sampled_from(["choice", "noul", "score"]),
            st.lists(st.sampled_from([0, 1, 1, 0.3, 7e5, 1e-9]), min_size=1, max_size=6),
        ),
        min_size=1,
        max_size=20,
    )
)
def test_many_questions_are_answered_bit_by_bit_as_one_after_another(rows: list[tuple[str, list[float]]]) -> None:
    questions: dict[str, Question] = {}
    weights = []
    for i, (kind, row) in enumerate(rows):
        row = ([1.0, *row, 2.0] if kind == "score" else [1.0, *row])[: 2 if kind == "noul" else None]
        questions[f"q{i}"] = Noul("q") if kind == "noul" else choice(len(row)) if kind == "choice" else score(len(row))
        weights.append(row)
    counts = list(map(len, weights))
    weights_QO = np.array([row + [0.0] * (max(counts) - len(row)) for row in weights])
    found = answer_questions(questions, weights_QO, counts)
    assert list(found) == list(questions)
    for (question_id, question), row in zip(questions.items(), weights, strict=True):
        assert found[question_id] == answer_question(question, row)


def test_of_many_questions_a_choice_of_one_option_is_sure() -> None:
    questions = {f"q{i}": choice(1) for i in range(20)}
    found = answer_questions(questions, np.full((20, 1), 0.5), [1] * 20)
    assert [found[i] for i in questions] == [answer_question(question, [0.5]) for question in questions.values()]
