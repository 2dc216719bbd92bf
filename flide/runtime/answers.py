"""The answers of a request, made together where its questions are many: ``decision.py`` without numpy is what clients
have, who know no weights.

Shapes: Q questions, O most options of a question.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from flide.runtime.decision import Answer, ChoiceAnswer, answer_question
from flide.runtime.request import Choice, Question

MANY = 8  # questions, for which numpy takes less than one after another


def answer_questions(
    questions: Mapping[str, Question], weights_QO: NDArray[np.float64], counts: Sequence[int]
) -> dict[str, Answer]:
    """:func:`answer_question` of each question, bit by bit; of many choices in a quarter of the time.

    Args:
        questions: by id.
        weights_QO: ``[Q, O]`` their probabilities, as there; unused places are 0.
        counts: options of each.
    """
    rows = weights_QO.tolist()
    asked = zip(questions.items(), rows, counts, strict=True)
    if len(rows) < MANY:
        return {question_id: answer_question(question, row[:count]) for (question_id, question), row, count in asked}
    p_QO = weights_QO / np.array([math.fsum(row) for row in rows])[:, None]
    best_Q, counts_Q = p_QO.max(1), np.array(counts)
    is_choice_Q = ((p_QO == best_Q[:, None]).sum(1) == 1) & (counts_Q > 1)  # one is the best, of several
    even_Q = 1 / counts_Q
    with np.errstate(invalid="ignore"):
        confidence_Q = ((best_Q - even_Q) / (1 - even_Q)).clip(0.0, 1.0)
    found = zip(p_QO.tolist(), p_QO.argmax(1).tolist(), confidence_Q.tolist(), is_choice_Q.tolist(), strict=True)
    answers: dict[str, Answer] = {}
    for ((question_id, question), row, count), (p, best, confidence, is_choice) in zip(asked, found, strict=True):
        if is_choice and isinstance(question, Choice):
            probabilities = dict(zip(question.criteria, p))  # noqa: B905 - what is unused is left out
            answers[question_id] = ChoiceAnswer(list(probabilities)[best], probabilities, confidence)
        else:
            answers[question_id] = answer_question(question, row[:count])
    return answers
