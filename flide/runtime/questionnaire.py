"""Questions that are asked again and again, with what was made of them: agents ask the same ones about every state.

    Questionnaire          the questions of a request, kept by who parses bodies (``known_bodies.py``)
      .asked               their prompts' words, kept by the format
        .tails             their token ids behind a state, kept by the tokenizer for every seam
          .reads, .plan    where their options lie, and their tree, kept by who works them out

Whoever makes something of questions alone looks here first. Nothing in here depends on a state, and nothing is changed
once it is here: requests on several threads share it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from flide.runtime.request import Question

__all__ = ["Asked", "Questionnaire", "Seam", "Tails"]

# Between a state and what follows it: the state's text behind its last safe boundary, blanks in front of the question,
# and the salt of who asks.
Seam: TypeAlias = "tuple[str, str, str | None]"


class Tails(list["array[int]"]):
    """Token ids of prompts behind what they share.

    Attributes:
        longest: of them, in tokens.
        reads: what ``DecisionFormat.reads`` made of them, with the format and the head that it was for.
        plan: what ``planner.plan`` made of them, with its settings.
    """

    __slots__ = ("longest", "plan", "reads")

    def __init__(self, tails: Sequence[array[int]]) -> None:
        super().__init__(tails)
        self.longest = max(map(len, tails), default=0)
        self.reads: tuple[Any, Any, Any] | None = None
        self.plan: tuple[Any, Any, Any] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """The questions of a request in a format's words.

    Attributes:
        texts: what follows the state in every prompt.
        owners: the id of each prompt's question.
        num_options, num_prompts: of each question.
        tails: by what they are behind, where they are kept.
    """

    texts: list[str]
    owners: list[str]
    num_options: list[int]
    num_prompts: list[int]
    tails: dict[Seam, Tails] = field(default_factory=dict)


class Questionnaire(dict[str, Question]):
    """Questions by id that other requests may have, too.

    Attributes:
        asked: what a format made of them, behind that format.
    """

    __slots__ = ("asked",)

    def __init__(self, questions: dict[str, Question]) -> None:
        super().__init__(questions)
        self.asked: tuple[Any, Asked] | None = None
