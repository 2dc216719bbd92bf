"""Open-Jev's prompts, word for word: one per candidate, or one of a yes-or-no question.

    Context:                                                    Context:
    {state}                                                     {state}

    Question: {instructions}                                    Question: {instructions}
    Proposed answer: {option}                                   Is the answer to this question yes? Answer Yes or No.
    Is this proposed answer correct? Answer Yes or No.

Values that are no text are JSON with sorted keys. Instructions that are missing leave the question empty, and criteria
of a yes-or-no question add a line each where they are given.

Text of users is not escaped: what looks like a control token becomes one, as in training and in the reference. That is
what parity means. ``escape=True`` keeps it text, and changes answers to such requests alone.
"""

from __future__ import annotations

from flide.runtime.format import DecisionFormat, register_format
from flide.runtime.prompt import candidate_texts, option_texts, render_value
from flide.runtime.request import Question, Value

__all__ = ["OPEN_JEV", "OpenJevFormat"]

OPEN_JEV = "open-jev"


@register_format(OPEN_JEV)
class OpenJevFormat(DecisionFormat):
    """Every candidate is a branch whose last row is read; see :class:`DecisionFormat` for the arguments."""

    escapes = False
    row_per_option = True
    single_prompt = False

    def state_text(self, state: Value) -> str:
        return f"Context:\n{render_value(state, sort_keys=True)}\n\nQuestion: "

    def question_texts(self, question: Question) -> tuple[list[str], int]:
        given = question.instructions
        instructions = "" if given is None else render_value(given, sort_keys=True)
        options = option_texts(question, sort_keys=True)
        return candidate_texts(question, instructions, options, sort_keys=True), len(options)
