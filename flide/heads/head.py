"""What a decision head is: hidden rows of readouts in, one column of logits per thing it can say out.

Shapes: N readout rows, D hidden size, C columns of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

from torch import Tensor, nn

from flide.errors import CheckpointError
from flide.layers.norm import keeping_dtype
from flide.runtime.reads import ZERO, OptionReads
from flide.runtime.request import Question

if TYPE_CHECKING:
    from flide.models.decision import ForDecision
    from flide.runtime.tokenizer import PromptTokenizer


class Head(nn.Module):
    """Base of heads. Its parameters and buffers are float32 and stay so under ``.to(dtype)``.

    A subclass sets ``kind``, says how its questions are asked (``prompt_style``), and implements :meth:`forward`,
    :meth:`columns` and :meth:`initial`; one with sizes of its own also :meth:`settings` and :meth:`from_settings`.
    Decorated with :func:`register_head` it is trained by its name, ``TrainConfig(head=kind)``, and loaded by it; the
    module that defines it has to be imported before.

    Attributes:
        kind: name in files and on the command line.
        prompt_style: name of the format in which its questions are asked (``flide.runtime.format``): "options" lists
            lettered options, "question" asks without them, "candidates" and "open-jev" make one prompt of every
            candidate (a yes-or-no question has one).
        max_prompt_tokens: longest prompt that it was trained for; None for what the model was made for.
    """

    kind: ClassVar[str]
    prompt_style: ClassVar[str] = "options"
    max_prompt_tokens: int | None = None

    @property
    def num_columns(self) -> int:
        """C."""
        raise NotImplementedError

    def forward(self, hidden_states_ND: Tensor) -> Tensor:
        """``[N, C]`` float32 logits of hidden rows ``[N, D]`` of any dtype; every row on its own."""
        raise NotImplementedError

    def columns(self, question: Question) -> Sequence[int]:
        """The column of each option, in the order of the answer (a yes-or-no question's in the format's
        ``noul_order``); ``ZERO`` for a logit that is always 0.

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


__all__ = ["ZERO", "Head", "OptionReads", "head_kind", "register_head"]
