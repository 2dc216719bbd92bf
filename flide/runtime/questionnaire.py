"""Questions that are asked again and again, with what was made of them: agents ask the same ones about every state.

    Questionnaire          the questions of a request, kept by who parses bodies (``known_bodies.py``)
      .asked               their prompts' words, as a format has them
        .tails             their token ids behind a state, for every seam
          .reads, .plan    where their options lie, and their tree

Whoever makes something of questions alone looks here first. Nothing in here depends on a state, and nothing is changed
once it is here: requests on several threads share it. All of it counts where questions are kept, and where it is too
much it is made anew for every request.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from flide.runtime.request import Question

__all__ = ["Asked", "Questionnaire", "Seam", "Tails"]

# Between a state and what follows it: the state's text behind its last safe boundary, blanks in front of the question,
# and the salt of who asks.
Seam: TypeAlias = "tuple[str, str, str | None]"

MOST_SEAMS = 4  # of the same questions: a format's own words mostly make one
LONGEST_SEAM = 64  # characters, which every prompt has once more
# Bytes of what is made of prompts: of each id, the id itself, once more in a tree, and in three rows of its layout; of
# each prompt, objects around it; of each place for an option, its row, its column and two flags.
_OF_AN_ID, _OF_A_PROMPT, _OF_A_PLACE = 20, 600, 18


class Tails(list["array[int]"]):
    """Token ids of prompts behind what they share.

    Attributes:
        seam: that they are behind; None where they are of this request alone.
        longest: of them, in tokens.
        reads: what ``DecisionFormat.reads`` made of them, behind the format, the head and the questions.
        plan: what ``planner.plan`` made of them, behind its settings.
    """

    __slots__ = ("longest", "plan", "reads", "seam")

    def __init__(self, tails: Sequence[array[int]], seam: Seam | None = None) -> None:
        super().__init__(tails)
        self.seam = seam
        self.longest = max(map(len, tails), default=0)
        self.reads: tuple[Any, Any, Any, Any] | None = None
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

    @property
    def size(self) -> int:
        """Bytes of the words."""
        return sum(map(sys.getsizeof, self.texts))

    def size_of(self, tails: Tails) -> int:
        """Bytes of ids behind one more seam, and of what will be made of them, about."""
        assert tails.seam is not None, "they are to be kept"
        places = len(self.num_options) * max(self.num_options, default=0)
        ids, seam = sum(map(len, tails)), sum(map(sys.getsizeof, tails.seam))
        return _OF_AN_ID * ids + _OF_A_PROMPT * len(tails) + _OF_A_PLACE * places + seam


class Questionnaire(dict[str, Question]):
    """Questions by id that other requests may have, too.

    Args:
        questions: by id.
        grow: called with bytes that are to be kept; says whether there is room for them.

    Attributes:
        asked: what a format made of them, behind that format.
        characters: of their instructions, once they were counted.
    """

    __slots__ = ("_grow", "asked", "characters")

    def __init__(self, questions: dict[str, Question], grow: Callable[[int], bool]) -> None:
        super().__init__(questions)
        self._grow = grow
        self.asked: tuple[Any, Asked] | None = None
        self.characters: int | None = None

    def keep(self, format: Any, asked: Asked, tails: Tails) -> None:
        """Keep what a format made of the questions, if there is room."""
        if tails.seam is None or tails.seam in asked.tails or len(asked.tails) >= MOST_SEAMS:
            return
        found = self.asked
        is_new = found is None or found[1] is not asked
        if self._grow(asked.size_of(tails) + (asked.size if is_new else 0)):
            asked.tails[tails.seam] = tails
            self.asked = format, asked
