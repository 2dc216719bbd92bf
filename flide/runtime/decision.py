"""Decisions: one typed answer per question, read from the probabilities of its options.

Formulas, for probabilities p_0 .. p_{n-1} that sum to 1 (confidence is 1 if n = 1):

    choice   the most probable name;  confidence = (max p - 1/n) / (1 - 1/n)
    noul     p(true)
    score    sum_i i p_i;             confidence = max(0, 1 - sum_i p_i |i - mode| / D)

where mode is the first most probable level and D = (1/n) sum_i |i - (n-1)/2|.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from flide.runtime.request import Choice, Noul, Question, Value


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request.

    Attributes:
        input_tokens: rows the model read: the shared state once, and each question.
        output_tokens: answers given, one to a question.
        shared_tokens: rows it did not have to read, because prompts share them: what all isolated prompts of the
            request have together, less ``input_tokens``. Not on System One's wire; a server says it in ``x_flide``.
        reused_tokens: those of ``input_tokens`` that were not computed for this request: its state, or the beginning
            of it, came from a checkpoint, or from a request of the same round with the same state. 0 on a miss. As
            ``shared_tokens`` on the wire.
    """

    input_tokens: int
    output_tokens: int
    shared_tokens: int = 0
    reused_tokens: int = 0

    def to_dict(self) -> dict[str, int]:
        return {"input_tokens": self.input_tokens, "output_tokens": self.output_tokens}


@dataclass(frozen=True, slots=True)
class ChoiceAnswer:
    """The most probable option, with the probability of every option in the order of the question."""

    type: ClassVar[str] = "choice"
    choice: str
    probabilities: dict[str, float]
    confidence: float

    @property
    def value(self) -> str:
        return self.choice

    def to_dict(self) -> dict[str, Any]:
        return {
            "type": self.type,
            "choice": self.choice,
            "probabilities": dict(self.probabilities),
            "confidence": self.confidence,
        }


@dataclass(frozen=True, slots=True)
class NoulAnswer:
    """The probability that the answer is yes."""

    type: ClassVar[str] = "noul"
    noul: float

    @property
    def value(self) -> float:
        return self.noul

    @property
    def probabilities(self) -> dict[str, float]:
        return {"true": self.noul, "false": 1.0 - self.noul}

    def to_dict(self) -> dict[str, Any]:
        return {"type": self.type, "noul": self.noul}


@dataclass(frozen=True, slots=True)
class ScoreAnswer:
    """The expected level, in [0, n - 1]. Levels are keyed "0" .. "n-1"; ``legend`` holds their descriptions."""

    type: ClassVar[str] = "score"
    score: float
    legend: dict[str, Value]
    probabilities: dict[str, float]
    confidence: float

    @property
    def value(self) -> float:
        return self.score

    def to_dict(self) -> dict[str, Any]:
        return {
            "type": self.type,
            "score": self.score,
            "legend": dict(self.legend),
            "probabilities": dict(self.probabilities),
            "confidence": self.confidence,
        }


Answer: TypeAlias = ChoiceAnswer | NoulAnswer | ScoreAnswer


@dataclass(frozen=True, slots=True)
class Decision:
    """The answers to one request: ``decision["id"]`` is the answer to the question of that id."""

    model: str
    answers: dict[str, Answer]
    usage: Usage

    def __getitem__(self, question_id: str) -> Answer:
        return self.answers[question_id]

    @property
    def reused_tokens(self) -> int:
        """See :class:`Usage`."""
        return self.usage.reused_tokens

    def __iter__(self) -> Iterator[str]:
        return iter(self.answers)

    def __len__(self) -> int:
        return len(self.answers)

    def to_dict(self) -> dict[str, Any]:
        """The System One response."""
        answers = {question_id: answer.to_dict() for question_id, answer in self.answers.items()}
        return {"model": self.model, "answers": answers, "usage": self.usage.to_dict()}


def num_options(question: Question) -> int:
    """How many probabilities answer the question: its options, its levels, or 2 for a noul."""
    return 2 if isinstance(question, Noul) else len(question.criteria)


def answer_question(question: Question, probabilities: Sequence[float]) -> Answer:
    """The answer that the probabilities give.

    Args:
        question: a question that the parser let through.
        probabilities: one per option, finite and not negative; they are scaled to sum to 1. In the order of the
            criteria, of the levels, or [true, false].
    """
    assert len(probabilities) == num_options(question), "one probability per option"
    # fsum is exact, so that the order of the options cannot change a bit of the result.
    total = math.fsum(probabilities)
    assert 0 < total < math.inf, "some option has a positive probability, and all are finite"
    assert min(probabilities) >= 0, "probabilities are not negative"
    p = [w / total for w in probabilities]

    if isinstance(question, Choice):
        names, best = list(question.criteria), max(p)
        choice = names[p.index(best)]
        if p.count(best) > 1:  # the name that sorts first wins: the order on the wire must not matter
            choice = min(name for name, p_i in zip(names, p, strict=True) if p_i == best)
        return ChoiceAnswer(choice, dict(zip(names, p, strict=True)), _choice_confidence(best, len(p)))
    if isinstance(question, Noul):
        return NoulAnswer(noul=p[0])
    levels = [str(i) for i in range(len(p))]
    return ScoreAnswer(
        score=min(math.fsum(i * p_i for i, p_i in enumerate(p)), float(len(p) - 1)),
        legend=dict(zip(levels, question.criteria, strict=True)),
        probabilities=dict(zip(levels, p, strict=True)),
        confidence=_score_confidence(p),
    )


def _choice_confidence(best: float, n: int) -> float:
    if n == 1:
        return 1.0
    return min(1.0, max(0.0, (best - 1 / n) / (1 - 1 / n)))


def _score_confidence(p: list[float]) -> float:
    n = len(p)
    if n == 1:
        return 1.0
    mode = p.index(max(p))
    spread = math.fsum(abs(i - (n - 1) / 2) for i in range(n)) / n
    return max(0.0, 1.0 - math.fsum(p_i * abs(i - mode) for i, p_i in enumerate(p)) / spread)


def joined(parts: Sequence[Decision]) -> Decision:
    """One decision from those of a request's questions."""
    if len(parts) == 1:
        return parts[0]
    usage = Usage(
        input_tokens=sum(part.usage.input_tokens for part in parts),
        output_tokens=sum(part.usage.output_tokens for part in parts),
        shared_tokens=sum(part.usage.shared_tokens for part in parts),
        reused_tokens=sum(part.usage.reused_tokens for part in parts),
    )
    return Decision(
        model=parts[0].model, answers={k: v for part in parts for k, v in part.answers.items()}, usage=usage
    )
