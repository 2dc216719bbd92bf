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

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from flide.errors import RequestError
from flide.runtime.request import Choice, DecisionRequest, Noul, Question, Score, Value
from flide.runtime.tokenizer import Label, PromptTokenizer
from flide.runtime.wire import MAX_ERRORS, place

__all__ = ["ChatFormat", "EncodedRequest", "PromptStyle", "option_texts", "render_value"]

PromptStyle: TypeAlias = Literal["options", "question", "candidates"]

NEUTRAL_INSTRUCTIONS = "Which option fits best?"
# Labels are A-Z and a-z up to here.
_NUM_LETTERS = 52


@dataclass(frozen=True, slots=True)
class EncodedRequest:
    """The isolated prompts of one request, with what they share held once: ``shared + tails[i]`` is the i-th.

    Attributes:
        shared: token ids that all prompts begin with. Tails may begin alike, too: where the tokenizer's cuts are safe,
            this part depends on the state and the format, not on the questions.
        tails: the other token ids, one list per prompt, question by question in the request's order.
        num_options: how many options each question has.
        num_prompts: how many prompts each question has: one, or with candidates one for each.
    """

    shared: list[int]
    tails: list[list[int]]
    num_options: list[int]
    num_prompts: list[int]

    @property
    def prompts(self) -> list[list[int]]:
        """Every prompt in full, for reading: a long state is copied for each question."""
        return [self.shared + tail for tail in self.tails]


def render_value(value: Value) -> str:
    """Text of a request's value: strings verbatim, everything else as JSON in the sender's key order.

    Raises:
        ValueError: the value is not JSON (NaN, an unknown type, nested too deeply).
    """
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"not a JSON value: {error}") from error


def option_texts(question: Question) -> list[str]:
    """The options as the model sees them, without labels, in the order of the labels.

    A choice shows ``name`` or ``name: description``, a score its levels from low to high. A noul shows Yes, then No,
    under the same neutral letters as every question: yes/no labels were not measured on a trained model, and some
    models ignore the state with them.
    """
    match question:
        case Choice(criteria=criteria):
            return [_described(name, description) for name, description in criteria.items()]
        case Noul(criteria=criteria):
            sides: Mapping[str, Value] = criteria or {}
            return [_described("Yes", sides.get("true")), _described("No", sides.get("false"))]
        case Score(criteria=levels):
            return [render_value(level) for level in levels]


class ChatFormat:
    """Turns requests into chat prompts with lettered options.

    Args:
        tokenizer: the model's tokenizer and chat template.
        max_prompt_tokens: longest prompt of one question, the state included; None for no limit.
        style: how a question is asked; see above.
    """

    def __init__(
        self, tokenizer: PromptTokenizer, *, max_prompt_tokens: int | None = None, style: PromptStyle = "options"
    ) -> None:
        if max_prompt_tokens is not None and max_prompt_tokens < 1:
            raise ValueError(f"max_prompt_tokens must be at least 1, got {max_prompt_tokens}")
        if style not in get_args(PromptStyle):
            raise ValueError(f"style must be one of {', '.join(get_args(PromptStyle))}, got {style!r}")
        self.tokenizer = tokenizer
        self.style = style
        self.max_prompt_tokens = max_prompt_tokens

    def encode(self, request: DecisionRequest) -> EncodedRequest:
        """The prompts of all questions of ``request``; the state is tokenized once.

        Raises:
            RequestError: a question has more options than there are labels or makes too long a prompt, a value cannot
                be rendered, or text cannot be tokenized.
        """
        state = _render(request.state, place("state")) if request.state is not None else ""
        # With the fixed words in it, the shared text can be cut right behind the state whatever the state ends with.
        shared = f"{state}\n\nQuestion: " if state else "Question: "
        tails, owners, num_options, num_prompts = [], [], [], []
        for question_id, question in request.questions.items():
            texts, count = self._question_texts(question, place("questions", question_id))
            tails += texts
            owners += [question_id] * len(texts)
            num_options.append(count)
            num_prompts.append(len(texts))
        shared_ids, tail_ids = self.tokenizer.encode_chat(shared, tails)
        self._check_lengths(owners, len(shared_ids), tail_ids)
        return EncodedRequest(shared_ids, tail_ids, num_options, num_prompts)

    def label_ids(self, count: int) -> list[int]:
        """Token ids of the first ``count`` labels: the output rows that a question of so many options needs.

        Raises:
            RequestError: there are fewer labels (``tokenizer.num_labels()`` says how many).
        """
        return [label.id for label in self.tokenizer.labels(count)]

    def _question_texts(self, question: Question, loc: list[str | int]) -> tuple[list[str], int]:
        """What follows the shared text in each of the question's prompts, and how many options it has."""
        try:
            options = option_texts(question)
            instructions = "" if question.instructions is None else render_value(question.instructions)
        except ValueError as error:
            raise _refusal(loc, str(error), "value_error") from error
        instructions = instructions or NEUTRAL_INSTRUCTIONS
        if self.style == "question":
            return [instructions], len(options)
        if self.style == "candidates":
            return _candidate_texts(question, instructions, options), len(options)
        labels = self._labels(len(options), loc)
        lines = [
            instructions,
            *(f"{label.text}. {option}" for label, option in zip(labels, options, strict=True)),
            f"Answer with the {'letter' if len(options) <= _NUM_LETTERS else 'label'} of the correct option.",
        ]
        return ["\n".join(lines)], len(options)

    def _labels(self, count: int, loc: list[str | int]) -> list[Label]:
        try:
            return self.tokenizer.labels(count)
        except RequestError as error:
            raise RequestError([{**entry, "loc": loc} for entry in error.errors]) from error

    def _check_lengths(self, owners: Sequence[str], shared: int, tails: Sequence[Sequence[int]]) -> None:
        limit = self.max_prompt_tokens
        if limit is None:
            return
        longest: dict[str, int] = {}
        for question_id, ids in zip(owners, tails, strict=True):
            longest[question_id] = max(longest.get(question_id, 0), shared + len(ids))
        errors = [
            {
                "loc": place("questions", question_id),
                "msg": f"the prompt has {length} tokens; at most {limit} are allowed",
                "type": "prompt_too_long",
            }
            for question_id, length in longest.items()
            if length > limit
        ]
        if errors:
            raise RequestError(errors[:MAX_ERRORS])


def _candidate_texts(question: Question, instructions: str, options: Sequence[str]) -> list[str]:
    if not isinstance(question, Noul):
        ending = "Is this proposed answer correct? Answer Yes or No."
        return [f"{instructions}\nProposed answer: {option}\n{ending}" for option in options]
    sides = question.criteria or {}
    meanings = [
        f"{name} means: {render_value(sides[side])}"
        for side, name in (("true", "Yes"), ("false", "No"))
        if sides.get(side) is not None
    ]
    return ["\n".join([instructions, *meanings, "Is the answer to this question yes? Answer Yes or No."])]


def _described(name: str, description: Value) -> str:
    return name if description is None else f"{name}: {render_value(description)}"


def _render(value: Value, loc: list[str | int]) -> str:
    try:
        return render_value(value)
    except ValueError as error:
        raise _refusal(loc, str(error), "value_error") from error


def _refusal(loc: list[str | int], message: str, kind: str) -> RequestError:
    return RequestError([{"loc": loc, "msg": message, "type": kind}])
