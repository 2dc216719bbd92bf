"""DecisionFormat: how a model is asked, which rows are read, and whose logits they are.

    prompt of question i = chat template around (state_text(state) + question_texts(question)[0][j])

A format says four things, each with a default that suits most models: the words (``state_text``, ``question_texts``),
the rows that are read in each prompt (``rows``: the last one), what becomes of what the head says of them (``reads``:
each option takes its column), and how sure that makes the answer (``temperature``). Everything else follows: tokens,
trees, rounds, answers. ``docs/add-a-format.md`` builds one.

Every prompt is one causal sequence that begins with the state. A model that reads several questions in one sequence,
or in both directions, has no such format: see ``flide.models.forkable``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

from flide.errors import FlideError, RequestError
from flide.runtime.questionnaire import Asked, Questionnaire, Tails
from flide.runtime.reads import OptionReads, Reads
from flide.runtime.request import DecisionRequest, Noul, Question, Value
from flide.runtime.tokenizer import PromptTokenizer
from flide.runtime.wire import MAX_ERRORS, MAX_OPTIONS, place

if TYPE_CHECKING:
    from flide.heads.head import Head

__all__ = ["DecisionFormat", "EncodedRequest", "make_format", "register_format", "temperature_of_type"]

LAST_ROW = (-1,)


@dataclass(frozen=True, slots=True)
class EncodedRequest:
    """The isolated prompts of one request, with what they share held once: ``shared + tails[i]`` is the i-th.

    Attributes:
        shared: token ids that all prompts begin with. Tails may begin alike, too: where the tokenizer's cuts are safe,
            this part depends on the state and the format, not on the questions.
        tails: the other token ids of each prompt, question by question in the request's order. Like ``shared`` they
            are int32 arrays where text was encoded.
        num_options: how many options each question has.
        num_prompts: how many prompts each question has: one, or with candidates one for each.
        rows: rows that are read in each prompt, ascending, counted from its end (-1 is the last); None for the last
            row of each.
        text: what every prompt's message begins with.
    """

    shared: Sequence[int]
    tails: Sequence[Sequence[int]]
    num_options: list[int]
    num_prompts: list[int]
    rows: list[tuple[int, ...]] | None = None
    text: str = ""

    @property
    def prompts(self) -> list[list[int]]:
        """Every prompt in full, for reading: a long state is copied for each question."""
        return [[*self.shared, *tail] for tail in self.tails]


def temperature_of_type(question: Question, temperatures: Mapping[str, float]) -> float:
    """What the logits of a question are divided by: the temperature of its type, or 1."""
    return temperatures.get(question.type, 1.0)


class DecisionFormat(ABC):
    """Base of formats. A format can be sent to another process and is used by several threads.

    Args:
        tokenizer: the model's tokenizer and chat template.
        max_prompt_tokens: longest prompt of one question, the state included; None for no limit.
        escape: keep control tokens out of users' text even where the format by itself does not.

    Attributes:
        escapes: whether text of users that looks like a control token stays text.
        row_per_option: whether each option reads a row of its own (of candidates, or of markers in one prompt), in
            order; otherwise all options of a question read its only row. An option whose column is ``ZERO`` has none.
        single_prompt: whether every question has one prompt.
        noul_order: the order in which ``Head.columns`` gives the sides of a yes-or-no question.
        max_options: that a question may have.
    """

    escapes: bool = True
    row_per_option: bool = False
    single_prompt: bool = True
    noul_order: ClassVar[tuple[str, str]] = ("true", "false")
    max_options: ClassVar[int] = MAX_OPTIONS

    def __init__(
        self, tokenizer: PromptTokenizer, *, max_prompt_tokens: int | None = None, escape: bool = False
    ) -> None:
        if max_prompt_tokens is not None and max_prompt_tokens < 1:
            raise FlideError(f"max_prompt_tokens must be at least 1, got {max_prompt_tokens}")
        self.tokenizer = tokenizer
        self.max_prompt_tokens = max_prompt_tokens
        self.escapes = self.escapes or escape

    # What a format says

    @abstractmethod
    def state_text(self, state: Value) -> str:
        """What every prompt's message begins with.

        Raises:
            ValueError: the state cannot be rendered.
        """

    @abstractmethod
    def question_texts(self, question: Question) -> tuple[list[str], int]:
        """What follows the state in each of the question's prompts, and how many options the question has. That depends
        on the question alone: it may be kept for other requests, as may what ``reads`` of this class makes of it.

        Raises:
            ValueError: the question cannot be rendered; RequestError where its entries say more.
        """

    def rows(self, question: Question, tail: Sequence[int]) -> Sequence[int]:
        """The rows that are read in one of the question's prompts, ascending and counted from its end.

        Args:
            question: whose prompt it is.
            tail: the prompt's tokens from the end of the state on, or earlier.
        """
        return LAST_ROW

    def reads(self, request: DecisionRequest, head: Head, encoded: EncodedRequest) -> Reads:
        """Whose logits the rows of all prompts are. By default each option takes its column of the head.

        Raises:
            RequestError: the head cannot answer a question.
        """
        tails, questions = encoded.tails, request.questions
        known = tails.reads if isinstance(tails, Tails) else None
        if known is not None and known[0] is self and known[1] is head and known[2] is questions:
            return cast(Reads, known[3])
        columns, errors = [], []
        for question_id, question in questions.items():
            try:
                found = head.columns(question)
            except ValueError as error:
                errors.append({"loc": place("questions", question_id), "msg": str(error), "type": "value_error"})
                continue
            flipped = isinstance(question, Noul) and self.noul_order == ("false", "true")
            columns.append(found[::-1] if flipped else found)
        if errors:
            raise RequestError(errors[:MAX_ERRORS])
        reads = OptionReads.of(columns, row_per_option=self.row_per_option)
        if isinstance(tails, Tails) and isinstance(questions, Questionnaire):
            tails.reads = self, head, questions, reads
        return reads

    def temperature(self, question: Question, temperatures: Mapping[str, float]) -> float:
        """What the logits of a question are divided by, given the engine's temperatures."""
        return temperature_of_type(question, temperatures)

    # What is made of it

    def encode(self, request: DecisionRequest) -> EncodedRequest:
        """The prompts of all questions of ``request``; the state is tokenized once.

        Raises:
            RequestError: a question has more options than the format has room for or makes too long a prompt, a value
                cannot be rendered, or text cannot be tokenized.
        """
        shared, questions = _rendered(self.state_text, request.state, "state"), request.questions
        known = questions.asked if isinstance(questions, Questionnaire) else None
        asked = known[1] if known is not None and known[0] is self else self._asked(questions)
        kept = asked.tails if isinstance(questions, Questionnaire) else None
        shared_ids, tails = self.tokenizer.encode_chat(
            shared, asked.texts, escape=self.escapes, salt=request.cache_salt, kept=kept
        )
        self._check_lengths(asked.owners, len(shared_ids), tails)
        if isinstance(questions, Questionnaire) and isinstance(tails, Tails):
            questions.keep(self, asked, tails)
        rows = None
        if type(self).rows is not DecisionFormat.rows:
            rows = [tuple(self.rows(questions[owner], tail)) for owner, tail in zip(asked.owners, tails, strict=True)]
        return EncodedRequest(shared_ids, tails, asked.num_options, asked.num_prompts, rows, shared)

    def _asked(self, questions: Mapping[str, Question]) -> Asked:
        prompts, owners, num_options, num_prompts = [], [], [], []
        for question_id, question in questions.items():
            texts, count = _rendered(self.question_texts, question, "questions", question_id)
            if count > self.max_options:
                message = f"{count} options; at most {self.max_options} are allowed"
                raise _refusal(place("questions", question_id), message, "too_many_options")
            prompts += texts
            owners += [question_id] * len(texts)
            num_options.append(count)
            num_prompts.append(len(texts))
        return Asked(prompts, owners, num_options, num_prompts)

    def label_ids(self, count: int) -> list[int]:
        """Token ids of the first ``count`` labels: the output rows that a question of so many options needs.

        Raises:
            RequestError: there are fewer labels (``tokenizer.num_labels()`` says how many).
        """
        return [label.id for label in self.tokenizer.labels(count)]

    def _check_lengths(self, owners: Sequence[str], shared: int, tails: Sequence[Sequence[int]]) -> None:
        limit = self.max_prompt_tokens
        if limit is None or (isinstance(tails, Tails) and shared + tails.longest <= limit):
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


_MAKERS: dict[str, Callable[..., DecisionFormat]] = {}
_Maker = TypeVar("_Maker", bound=Callable[..., DecisionFormat])


def register_format(name: str) -> Callable[[_Maker], _Maker]:
    """Decorator of a format's class: heads with this ``prompt_style`` are asked in it.

    Raises:
        ValueError: the name already belongs to another one.
    """

    def add(maker: _Maker) -> _Maker:
        taken = _MAKERS.get(name)
        if taken is not None and _name_of(taken) != _name_of(maker):
            raise FlideError(f"the format {name} is already registered by {_name_of(taken)}")
        _MAKERS[name] = maker
        return maker

    return add


def make_format(
    name: str, tokenizer: PromptTokenizer, *, max_prompt_tokens: int | None = None, escape: bool = False
) -> DecisionFormat:
    """The format of a registered name.

    Raises:
        ValueError: there is none, or see :class:`DecisionFormat`.
    """
    if name not in _MAKERS:
        raise FlideError(f"no format {name[:80]!r}; there are {', '.join(sorted(_MAKERS))}")
    return _MAKERS[name](tokenizer, max_prompt_tokens=max_prompt_tokens, escape=escape)


def _name_of(maker: Any) -> str:
    maker = getattr(maker, "func", maker)
    return f"{maker.__module__}.{maker.__qualname__}"


_Item = TypeVar("_Item")
_Text = TypeVar("_Text")


def _rendered(render: Callable[[_Item], _Text], item: _Item, *loc: str) -> _Text:
    """What a format says of a value; what is wrong with it is told at its place in the request."""
    try:
        return render(item)
    except RequestError as error:
        raise RequestError([{**entry, "loc": place(*loc)} for entry in error.errors]) from error
    except ValueError as error:
        raise _refusal(place(*loc), str(error), "value_error") from error


def _refusal(loc: list[str | int], message: str, kind: str) -> RequestError:
    return RequestError([{"loc": loc, "msg": message, "type": kind}])
