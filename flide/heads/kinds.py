"""The heads there are: rows of ``lm_head``, a score per candidate in two wordings, a fixed set of labels.

Shapes: N readout rows, D hidden size, L labels.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor, nn

from flide.errors import FlideError
from flide.heads.head import ZERO, Head, register_head
from flide.runtime.decision import num_options
from flide.runtime.openjev import OPEN_JEV
from flide.runtime.prompt import render_value
from flide.runtime.request import Choice, Noul, Question

if TYPE_CHECKING:
    from flide.models.decision import ForDecision
    from flide.runtime.tokenizer import PromptTokenizer


@register_head
class OptionHead(Head):
    """The logits of the letters: the rows of ``lm_head`` that are option labels. It has no parameters of its own.

    Args:
        label_rows_LD: ``[L, D]`` float32, in label order (``ForDecision.label_rows``).
        softcap: cap c of ``c * tanh(logit / c)``; None for none.
    """

    kind = "option"
    label_rows_LD: Tensor

    def __init__(self, label_rows_LD: Tensor, *, softcap: float | None = None) -> None:
        super().__init__()
        self.softcap = softcap
        self.register_buffer("label_rows_LD", label_rows_LD, persistent=False)

    @property
    def num_columns(self) -> int:
        return self.label_rows_LD.shape[0]

    def forward(self, hidden_states_ND: Tensor) -> Tensor:
        return softcapped(hidden_states_ND.float() @ self.label_rows_LD.T, self.softcap)

    def columns(self, question: Question) -> Sequence[int]:
        return range(num_options(question))

    @classmethod
    def initial(cls, model: ForDecision, tokenizer: PromptTokenizer, questions: Iterable[Question]) -> Self:
        labels = tokenizer.labels(tokenizer.num_labels())
        return cls(model.label_rows([label.id for label in labels]), softcap=model.final_logit_softcapping)


@register_head
class ScalarHead(Head):
    """One score per candidate, ``w . h + b``: the log-odds that a proposed answer is right.

    A choice or a score is the softmax over its candidates' scores; a yes-or-no question has one, against 0. It starts
    as ``lm_head[Yes] - lm_head[No]`` with bias 0, which reads the log-odds of Yes against No out of the model as it is.
    """

    kind = "scalar"
    prompt_style: ClassVar[str] = "candidates"

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.score = nn.Linear(hidden_size, 1, dtype=torch.float32)

    @property
    def num_columns(self) -> int:
        return 1

    def forward(self, hidden_states_ND: Tensor) -> Tensor:
        logits_N1: Tensor = self.score(hidden_states_ND.float())
        return logits_N1

    def columns(self, question: Question) -> Sequence[int]:
        return (0, ZERO) if isinstance(question, Noul) else [0] * num_options(question)

    @classmethod
    def initial(cls, model: ForDecision, tokenizer: PromptTokenizer, questions: Iterable[Question]) -> Self:
        yes, no = model.label_rows(tokenizer.answer_ids(["Yes", "No"]))
        head = cls(len(yes)).to(yes.device)
        with torch.no_grad():
            head.score.weight.copy_(yes - no)
            head.score.bias.zero_()
        return head

    @classmethod
    def from_settings(cls, settings: dict[str, Any], hidden_size: int) -> Self:
        return cls(hidden_size)


@register_head
class OpenJevHead(ScalarHead):
    """A :class:`ScalarHead` that is asked in Open-Jev's words.

    Args:
        hidden_size: D.
        max_prompt_tokens: longest prompt that it was trained for; None for what the model was made for.
    """

    kind = OPEN_JEV
    prompt_style: ClassVar[str] = OPEN_JEV

    def __init__(self, hidden_size: int, *, max_prompt_tokens: int | None = None) -> None:
        super().__init__(hidden_size)
        self.max_prompt_tokens = max_prompt_tokens

    def settings(self) -> dict[str, Any]:
        return {} if self.max_prompt_tokens is None else {"max_prompt_tokens": self.max_prompt_tokens}

    @classmethod
    def from_settings(cls, settings: dict[str, Any], hidden_size: int) -> Self:
        longest = settings.get("max_prompt_tokens")
        if longest is not None and (not isinstance(longest, int) or isinstance(longest, bool) or longest < 1):
            raise FlideError("max_prompt_tokens should be a number of tokens")
        return cls(hidden_size, max_prompt_tokens=longest)


@register_head
class LinearHead(Head):
    """One logit per label of a fixed set, ``W h + b``, of which a question takes those of its options.

    Options are not in the prompt: labels are known by name alone. It starts at zero, all labels alike.

    Args:
        labels: distinct names: a choice's options, "true" and "false", the text of a score's levels.
        hidden_size: D.
    """

    kind = "linear"
    prompt_style: ClassVar[str] = "question"

    def __init__(self, labels: Sequence[str], hidden_size: int) -> None:
        super().__init__()
        self.labels = tuple(labels)
        self._columns = {label: column for column, label in enumerate(self.labels)}
        self.logits = nn.Linear(hidden_size, len(self.labels), dtype=torch.float32)

    @property
    def num_columns(self) -> int:
        return len(self.labels)

    def forward(self, hidden_states_ND: Tensor) -> Tensor:
        logits_NL: Tensor = self.logits(hidden_states_ND.float())
        return logits_NL

    def columns(self, question: Question) -> Sequence[int]:
        names = label_names(question)
        unknown = [name for name in names if name not in self._columns]
        if unknown:
            raise FlideError(f"the head has no label for {len(unknown)} of {len(names)} options")
        return [self._columns[name] for name in names]

    @classmethod
    def initial(cls, model: ForDecision, tokenizer: PromptTokenizer, questions: Iterable[Question]) -> Self:
        labels = dict.fromkeys(name for question in questions for name in label_names(question))
        head = cls(list(labels), model.lm_head.in_features).to(model.lm_head.weight.device)
        nn.init.zeros_(head.logits.weight)
        nn.init.zeros_(head.logits.bias)
        return head

    def settings(self) -> dict[str, Any]:
        return {"labels": list(self.labels)}

    @classmethod
    def from_settings(cls, settings: dict[str, Any], hidden_size: int) -> Self:
        labels = settings.get("labels")
        if not isinstance(labels, list) or not labels or not all(isinstance(label, str) for label in labels):
            raise FlideError("labels should be a list of names")
        if len(set(labels)) < len(labels):
            raise FlideError("labels should be distinct")
        return cls(labels, hidden_size)


def label_names(question: Question) -> list[str]:
    """The names of a question's options, in the order of its answer."""
    if isinstance(question, Noul):
        return ["true", "false"]
    if isinstance(question, Choice):
        return list(question.criteria)
    return [render_value(level) for level in question.criteria]


def softcapped(logits: Tensor, cap: float | None) -> Tensor:
    """``cap * tanh(logits / cap)``, or the logits."""
    return logits if cap is None else cap * torch.tanh(logits / cap)


__all__ = ["LinearHead", "OpenJevHead", "OptionHead", "ScalarHead", "label_names", "softcapped"]
