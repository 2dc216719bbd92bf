"""Requests: one shared state and the typed questions asked about it.

    DecisionRequest(
        state="The parcel arrived crushed.",
        questions={
            "damaged": Noul("Is the parcel damaged?"),
            "team": Choice("Who should answer?", ["shipping", "billing"]),
            "anger": Score("How angry is the customer?", ["calm", "annoyed", "furious"]),
        },
    )

Nothing is checked here: ``flide.runtime.wire.parse_request`` checks these objects and plain bodies alike, and copies
what it returns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

# A JSON value. Whether a number, a boolean or null may stand at the top depends on the field; nested, all may.
Value: TypeAlias = "str | int | float | bool | Sequence[Value] | Mapping[str, Value] | None"


@dataclass(frozen=True, slots=True, init=False)
class Choice:
    """Which one of up to 255 named options holds.

    Args:
        instructions: the question, as text or as a structured value.
        criteria: option name -> description, or None where the name says it all. A sequence of distinct names is short
            for a mapping without descriptions. The order is the order in which the model sees the options.
    """

    type: ClassVar[str] = "choice"
    instructions: Value
    criteria: Mapping[str, Value]

    def __init__(self, instructions: Value = None, criteria: Mapping[str, Value] | Sequence[str] = ()) -> None:
        names = criteria if isinstance(criteria, list | tuple) else ()
        # Anything but distinct names stays as it is, for the parser to refuse: a dict would hide a repeated name.
        if isinstance(criteria, list | tuple) and all(isinstance(name, str) for name in names):
            options = dict.fromkeys(names)
            criteria = options if len(options) == len(names) else criteria
        object.__setattr__(self, "instructions", instructions)
        object.__setattr__(self, "criteria", criteria)

    def to_dict(self) -> dict[str, Any]:
        """The question as System One's JSON object; nested values are shared, not copied."""
        return _question_dict(self.type, self.instructions, self.criteria)


@dataclass(frozen=True, slots=True)
class Noul:
    """Whether something holds: one probability.

    Args:
        instructions: the question, as text or as a structured value.
        criteria: what "true" and what "false" mean; either side, or both, may be missing or None.
    """

    type: ClassVar[str] = "noul"
    instructions: Value = None
    criteria: Mapping[str, Value] | None = None

    def to_dict(self) -> dict[str, Any]:
        """The question as System One's JSON object; nested values are shared, not copied."""
        return _question_dict(self.type, self.instructions, self.criteria)


@dataclass(frozen=True, slots=True)
class Score:
    """Where on an ordered scale something lies.

    Args:
        instructions: the question, as text or as a structured value.
        criteria: 1 to 10 descriptions of the levels, from low to high; the level at index i scores i.
    """

    type: ClassVar[str] = "score"
    instructions: Value = None
    criteria: Sequence[Value] = ()

    def to_dict(self) -> dict[str, Any]:
        """The question as System One's JSON object; nested values are shared, not copied."""
        return _question_dict(self.type, self.instructions, self.criteria)


Question: TypeAlias = Choice | Noul | Score


@dataclass(frozen=True, slots=True)
class DecisionRequest:
    """Questions about one state.

    Args:
        state: what the questions are about: text, or a structured value (an object or an array).
        questions: id -> question. Ids name the answers and are never shown to the model.
        model: name of the model, as the server lists it.
        cache_salt: requests with different salts share no checkpoint and no work, so that none can tell from its time
            what another one asked; None is a salt of its own. Up to 256 characters. No answer depends on it.
        checkpoint: where the engine, if it keeps checkpoints at all, saves the state for later requests: True at its
            end and, of a list of messages, before the last one; an integer n also after the first n messages, or
            characters of a text; False nowhere. Requests resume whatever they say here.
    """

    state: Value
    questions: Mapping[str, Question]
    model: str = "jev-latest"
    cache_salt: str | None = None
    checkpoint: bool | int = True

    def to_dict(self) -> dict[str, Any]:
        """The System One body; nested values are shared, not copied."""
        questions = {question_id: question.to_dict() for question_id, question in self.questions.items()}
        body = {"model": self.model, "state": self.state, "questions": questions}
        extras: dict[str, Any] = {}
        if self.cache_salt is not None:
            extras["cache_salt"] = self.cache_salt
        if self.checkpoint is not True:
            extras["checkpoint"] = self.checkpoint
        return {**body, "x_flide": extras} if extras else body


def _question_dict(type_name: str, instructions: Value, criteria: Value) -> dict[str, Any]:
    fields: dict[str, Any] = {"type": type_name}
    if instructions is not None:
        fields["instructions"] = instructions
    if criteria is not None:
        fields["criteria"] = list(criteria) if isinstance(criteria, tuple) else criteria
    return fields
