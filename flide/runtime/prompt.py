"""The decision prompts for any chat model: the state, one question, its options, read at the next token.

    {state}

    Question: {instructions}
    A. {option}
    B. {option}
    Answer with the letter of the correct option.

This is one user message in the model's own chat template, with thinking off. It is the style "options". A head that
was trained can have another: "question" ends after the instructions, and "candidates" makes one prompt of each option,
or one of a yes-or-no question (Open-Jev's words):

    Question: {instructions}                                    Question: {instructions}
    Proposed answer: {option}                                   Is the answer to this question yes? Answer Yes or No.
    Is this proposed answer correct? Answer Yes or No.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias, get_args

from flide.runtime.format import DecisionFormat, EncodedRequest, register_format
from flide.runtime.request import Choice, Noul, Question, Score, Value
from flide.runtime.tokenizer import PromptTokenizer

__all__ = ["ChatFormat", "EncodedRequest", "PromptStyle", "candidate_texts", "option_texts", "render_value"]

PromptStyle: TypeAlias = Literal["options", "question", "candidates"]

NEUTRAL_INSTRUCTIONS = "Which option fits best?"
# Labels are A-Z and a-z up to here.
_NUM_LETTERS = 52


def render_value(value: Value, *, sort_keys: bool = False) -> str:
    """Text of a request's value: strings verbatim, everything else as JSON, by default in the sender's key order.

    Raises:
        ValueError: the value is not JSON (NaN, an unknown type, nested too deeply).
    """
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, sort_keys=sort_keys)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"not a JSON value: {error}") from error


def option_texts(question: Question, *, sort_keys: bool = False) -> list[str]:
    """The options as the model sees them, without labels, in the order of the labels.

    A choice shows ``name`` or ``name: description``, a score its levels from low to high. A noul shows Yes, then No,
    under the same neutral letters as every question: yes/no labels were not measured on a trained model, and some
    models ignore the state with them.
    """
    match question:
        case Choice(criteria=criteria):
            return [_described(name, description, sort_keys) for name, description in criteria.items()]
        case Noul(criteria=criteria):
            sides: Mapping[str, Value] = criteria or {}
            return [_described(name, sides.get(side), sort_keys) for name, side in (("Yes", "true"), ("No", "false"))]
        case Score(criteria=levels):
            return [render_value(level, sort_keys=sort_keys) for level in levels]


class ChatFormat(DecisionFormat):
    """Chat prompts in the style of their head: lettered options, the question alone, or a prompt per candidate.

    Args:
        tokenizer, max_prompt_tokens, escape: see :class:`DecisionFormat`. Text of users is always escaped.
        style: how a question is asked; see above.
    """

    def __init__(
        self,
        tokenizer: PromptTokenizer,
        *,
        max_prompt_tokens: int | None = None,
        escape: bool = False,
        style: PromptStyle = "options",
    ) -> None:
        super().__init__(tokenizer, max_prompt_tokens=max_prompt_tokens, escape=escape)
        if style not in get_args(PromptStyle):
            raise ValueError(f"style must be one of {', '.join(get_args(PromptStyle))}, got {style!r}")
        self.style = style
        self.row_per_option = style == "candidates"
        self.single_prompt = not self.row_per_option

    def state_text(self, state: Value) -> str:
        text = render_value(state) if state is not None else ""
        # With the fixed words in it, the shared text can be cut right behind the state whatever the state ends with.
        return f"{text}\n\nQuestion: " if text else "Question: "

    def question_texts(self, question: Question) -> tuple[list[str], int]:
        options = option_texts(question)
        instructions = "" if question.instructions is None else render_value(question.instructions)
        instructions = instructions or NEUTRAL_INSTRUCTIONS
        if self.style == "question":
            return [instructions], len(options)
        if self.style == "candidates":
            return candidate_texts(question, instructions, options), len(options)
        labels = self.tokenizer.labels(len(options))
        lines = [
            instructions,
            *(f"{label.text}. {option}" for label, option in zip(labels, options, strict=True)),
            f"Answer with the {'letter' if len(options) <= _NUM_LETTERS else 'label'} of the correct option.",
        ]
        return ["\n".join(lines)], len(options)


for _style in get_args(PromptStyle):
    register_format(_style)(functools.partial(ChatFormat, style=_style))


def candidate_texts(
    question: Question, instructions: str, options: Sequence[str], *, sort_keys: bool = False
) -> list[str]:
    """A prompt's words for each proposed answer, or the only ones of a yes-or-no question, whose criteria add a line
    each where they are given."""
    if not isinstance(question, Noul):
        ending = "Is this proposed answer correct? Answer Yes or No."
        return [f"{instructions}\nProposed answer: {option}\n{ending}" for option in options]
    sides = question.criteria or {}
    meanings = [
        f"{name} means: {render_value(sides[side], sort_keys=sort_keys)}"
        for side, name in (("true", "Yes"), ("false", "No"))
        if sides.get(side) is not None
    ]
    return ["\n".join([instructions, *meanings, "Is the answer to this question yes? Answer Yes or No."])]


def _described(name: str, description: Value, sort_keys: bool) -> str:
    return name if description is None else f"{name}: {render_value(description, sort_keys=sort_keys)}"
