"""What a decision head is: hidden rows of readouts in, one column of logits per thing it can say out.

Shapes: N readout rows, D hidden size, C columns of a head, Q questions, O most options of a question.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from flide.errors import CheckpointError
from flide.layers.norm import keeping_dtype
from flide.runtime.request import Question

if TYPE_CHECKING:
    from flide.models.decision import ForDecision
    from flide.runtime.prompt import PromptStyle
    from flide.runtime.tokenizer import PromptTokenizer

ZERO = -1  # in place of a column: the option's logit is 0


class Head(nn.Module):
    """Base of heads. Its parameters and buffers are float32 and stay so under ``.to(dtype)``.

    A subclass sets ``kind``, says how its questions are asked (``prompt_style``), and implements :meth:`forward`,
    :meth:`columns` and :meth:`initial`; one with sizes of its own also :meth:`settings` and :meth:`from_settings`.
    Decorated with :func:`register_head` it is trained by its name, ``TrainConfig(head=kind)``, and loaded by it; the
    module that defines it has to be imported before.

    Attributes:
        kind: name in files and on the command line.
        prompt_style: "options" lists lettered options, "question" asks without them, "candidates" makes one prompt of
            every candidate (a yes-or-no question has one). See ``flide.runtime.prompt``.
    """

    kind: ClassVar[str]
    prompt_style: ClassVar[PromptStyle] = "options"

    @property
    def num_columns(self) -> int:
        """C."""
        raise NotImplementedError

    def forward(self, hidden_states_ND: Tensor) -> Tensor:
        """``[N, C]`` float32 logits of hidden rows ``[N, D]`` of any dtype; every row on its own."""
        raise NotImplementedError

    def columns(self, question: Question) -> Sequence[int]:
        """The column of each option, in the order of the answer; ``ZERO`` for a logit that is always 0.

        With candidates each option reads its own row, and a ``ZERO`` has none: a yes-or-no question, which has one
        prompt, has one ``ZERO``. Otherwise all options read the question's row.

        Raises:
            ValueError: the head cannot answer this question.
        """
        raise NotImplementedError

    @classmethod
    def initial(cls, model: ForDecision, tokenizer: PromptTokenizer, questions: Iterable[Question]) -> Self:
        """The head that training starts from, on the device of the model.

        Args:
            model: what will be trained.
            tokenizer: its tokenizer.
            questions: of all training rows.

        Raises:
            ValueError: it cannot be had for this model.
        """
        raise NotImplementedError

    def settings(self) -> dict[str, Any]:
        """What :meth:`from_settings` needs beside the parameters, as a JSON object."""
        return {}

    @classmethod
    def from_settings(cls, settings: dict[str, Any], hidden_size: int) -> Self:
        """The head that ``settings`` describe, parameters not filled.

        Raises:
            ValueError: they describe none.
        """
        raise NotImplementedError

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        return super()._apply(keeping_dtype(fn), recurse)  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True, eq=False)
class OptionReads:
    """Where the options of some questions lie in a head's output ``[N, C]``.

    Attributes:
        rows_QO, columns_QO: int64 row (from the request's first) and column of each option; unused places are 0.
        is_option_QO: which places are used.
        is_zero_QO: which options' logits are 0.
        num_rows: readout rows of all questions together.
    """

    rows_QO: NDArray[np.int64]
    columns_QO: NDArray[np.int64]
    is_option_QO: NDArray[np.bool_]
    is_zero_QO: NDArray[np.bool_]
    num_rows: int

    @classmethod
    def of(cls, columns: Sequence[Sequence[int]], *, row_per_option: bool = False) -> Self:
        """Lay out what :meth:`Head.columns` says of each question.

        Args:
            columns: one list per question.
            row_per_option: each option that is not ``ZERO`` has a row of its own, in order; otherwise all options of a
                question read its only row.
        """
        counts_Q = np.array([len(x) for x in columns])
        is_option_QO = np.arange(counts_Q.max()) < counts_Q[:, None]
        columns_QO = np.zeros(is_option_QO.shape, np.int64)
        columns_QO[is_option_QO] = [column for x in columns for column in x]
        is_zero_QO = columns_QO == ZERO
        if row_per_option:
            has_row_QO = is_option_QO & ~is_zero_QO
            rows_QO = np.where(has_row_QO, np.cumsum(has_row_QO).reshape(has_row_QO.shape) - 1, 0)
            num_rows = int(has_row_QO.sum())
        else:
            rows_QO = np.where(is_option_QO, np.arange(len(columns))[:, None], 0)
            num_rows = len(columns)
        columns_QO[is_zero_QO] = 0
        return cls(rows_QO, columns_QO, is_option_QO, is_zero_QO, num_rows)

    def alone(self, question: int) -> OptionReads:
        """One of several questions that read one row each, as if it were the only one."""
        places = slice(question, question + 1), slice(int(self.is_option_QO[question].sum()))
        return OptionReads(
            np.zeros_like(self.rows_QO[places]),
            self.columns_QO[places],
            self.is_option_QO[places],
            self.is_zero_QO[places],
            1,
        )

    def gather(self, logits_NC: NDArray[np.float32]) -> NDArray[np.float64]:
        """``[Q, O]`` logits of the options out of the request's rows; unused places are -inf."""
        logits_QO = logits_NC[self.rows_QO, self.columns_QO].astype(np.float64)
        logits_QO[self.is_zero_QO] = 0.0
        logits_QO[~self.is_option_QO] = -np.inf
        return logits_QO


_KINDS: dict[str, type[Head]] = {}
_Head = TypeVar("_Head", bound=type[Head])


def register_head(cls: _Head) -> _Head:
    """Class decorator: train and load heads of this ``kind``.

    Raises:
        ValueError: the kind already belongs to another class.
    """
    taken = _KINDS.get(cls.kind)
    if taken is not None and (taken.__module__, taken.__qualname__) != (cls.__module__, cls.__qualname__):
        raise ValueError(f"{cls.kind} is already registered by {taken.__module__}.{taken.__qualname__}")
    _KINDS[cls.kind] = cls
    return cls


def head_kind(name: str) -> type[Head]:
    """The registered class of a kind.

    Raises:
        CheckpointError: there is none.
    """
    if name not in _KINDS:
        raise CheckpointError(f"no head of kind {name[:80]!r}; there are {', '.join(sorted(_KINDS))}")
    return _KINDS[name]
