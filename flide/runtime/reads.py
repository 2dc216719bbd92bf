"""Where the options of a request lie in what a head says of its rows, once the rows of all its prompts are there.

Shapes: N readout rows of a request, C columns of the head, Q questions, O most options of a question.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from flide.runtime.compact import Compact

ZERO = -1  # in place of a column: the option's logit is 0
# Questions often come in the same numbers, with the same numbers of options: where their options lie is kept, for so
# many requests of at most so many places (Q x O). At most 4 MB.
MOST_PLACES, MOST_KEPT = 512, 64

_Columns = tuple[tuple[int, ...], ...]


class Reads(Protocol):
    """What a format makes of the rows of one request. It may be sent to another process.

    Attributes:
        num_rows: readout rows of all questions together, in the order of their prompts.
        is_option_QO: ``[Q, O]`` which places are options.
    """

    @property
    def num_rows(self) -> int: ...

    @property
    def is_option_QO(self) -> NDArray[np.bool_]: ...

    def gather(self, logits_NC: NDArray[np.float32]) -> NDArray[np.float64]:
        """``[Q, O]`` logits of the options, in the order of the answers, out of the request's rows ``[N, C]``; unused
        places are -inf."""

    def alone(self, question: int) -> Self:
        """Those of one question, as if it were the only one. Needed only for questions of one prompt."""


@dataclass(frozen=True, slots=True, eq=False)
class OptionReads(Compact):
    """Where the options of some questions lie in a head's output ``[N, C]``.

    Attributes:
        rows_QO, columns_QO: int64 row (from the request's first) and column of each option; unused places are 0.
        is_option_QO: which places are used.
        is_zero_QO: which options' logits are 0.
        num_rows: readout rows of all questions together.
        made_of: the arguments of ``of`` that give this very object again; None where it is not kept.
        is_whole: every place is used, and has a logit of its own.
    """

    rows_QO: NDArray[np.int64]
    columns_QO: NDArray[np.int64]
    is_option_QO: NDArray[np.bool_]
    is_zero_QO: NDArray[np.bool_]
    num_rows: int
    made_of: tuple[_Columns, bool] | None = field(default=None, init=False, repr=False)
    is_whole: bool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_whole", bool(self.is_option_QO.all() and not self.is_zero_QO.any()))

    @classmethod
    def of(cls, columns: Sequence[Sequence[int]], *, row_per_option: bool = False) -> Self:
        """Lay out what :meth:`Head.columns` says of each question. Arrays are read-only: the same may be given again.

        Args:
            columns: one list per question.
            row_per_option: each option that is not ``ZERO`` has a row of its own, in order; otherwise all options of a
                question read its only row.
        """
        places = len(columns) * max(1, max(map(len, columns), default=0))
        if places <= MOST_PLACES:
            made = _kept_reads(tuple(map(tuple, columns)), row_per_option)
        else:
            made = _new_reads(columns, row_per_option)
        return made if type(made) is cls else cls(*[getattr(made, x.name) for x in fields(made) if x.init])

    def __reduce__(self) -> tuple[Any, ...]:
        return Compact.__reduce__(self) if self.made_of is None else (_kept_reads, self.made_of)

    def alone(self, question: int) -> OptionReads:
        """One of several questions, as if it were the only one."""
        places = slice(question, question + 1), slice(int(self.is_option_QO[question].sum()))
        rows_QO, is_zero_QO = self.rows_QO[places], self.is_zero_QO[places]
        used = np.unique(rows_QO[~is_zero_QO])
        rows_QO = np.where(is_zero_QO, 0, rows_QO - used[0])
        return OptionReads(rows_QO, self.columns_QO[places], self.is_option_QO[places], is_zero_QO, len(used))

    def gather(self, logits_NC: NDArray[np.float32]) -> NDArray[np.float64]:
        """``[Q, O]`` logits of the options out of the request's rows; unused places are -inf."""
        logits_QO = logits_NC[self.rows_QO, self.columns_QO].astype(np.float64)
        if self.is_whole:
            return logits_QO
        logits_QO[self.is_zero_QO] = 0.0
        logits_QO[~self.is_option_QO] = -np.inf
        return logits_QO


@functools.lru_cache(MOST_KEPT)
def _kept_reads(columns: _Columns, row_per_option: bool) -> OptionReads:
    made = _new_reads(columns, row_per_option)
    object.__setattr__(made, "made_of", (columns, row_per_option))
    return made


def _new_reads(columns: Sequence[Sequence[int]], row_per_option: bool) -> OptionReads:
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
    for array in (rows_QO, columns_QO, is_option_QO, is_zero_QO):
        array.flags.writeable = False
    return OptionReads(rows_QO, columns_QO, is_option_QO, is_zero_QO, num_rows)
