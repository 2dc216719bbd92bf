"""What is sent between processes comes back as it was."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import pytest

from flide.runtime.capacity import needed_by
from flide.runtime.checkpoints.positions import Reuse
from flide.runtime.reads import OptionReads
from flide.runtime.rounds import LogitsRequest, OptionLogits
from flide.runtime.tree import TokenTree, TreeLayout

TREE = TokenTree([1, 2, 3], (TokenTree([4], (TokenTree([5]), TokenTree([6, 7]))), TokenTree([8])))
LAYOUT = TreeLayout.of(TREE)
REQUEST = LogitsRequest(
    LAYOUT, needed_by(LAYOUT), OptionReads.of([[0, 1], [2], [-1, 3, 1]]), 12, Reuse(3, (1, 2), "whose")
)


def assert_same(found: Any, wanted: Any) -> None:
    assert type(found) is type(wanted)
    if isinstance(wanted, np.ndarray):
        assert found.dtype == wanted.dtype
        assert np.array_equal(found, wanted)
    elif hasattr(wanted, "__dataclass_fields__"):
        for field in fields(wanted):
            assert_same(getattr(found, field.name), getattr(wanted, field.name))
    else:
        assert found == wanted


def test_a_request_comes_back() -> None:
    data = pickle.dumps(REQUEST, protocol=pickle.HIGHEST_PROTOCOL)
    assert_same(pickle.loads(data), REQUEST)
    assert len(data) < 1200


@dataclass(frozen=True, slots=True, eq=False)
class OwnReads(OptionReads):
    """A user's."""

    what: str = ""


def test_subclasses_come_back_whole() -> None:
    base = OptionReads.of([[0, 1]])
    own = OwnReads(*[getattr(base, field.name) for field in fields(base) if field.init], what="mine")
    assert_same(pickle.loads(pickle.dumps(own)), own)


def test_logits_come_back_whatever_their_shape() -> None:
    for shape in ((3, 4), (0, 5), (1, 1)):
        logits = OptionLogits(np.arange(np.prod(shape), dtype=np.float64).reshape(shape) - np.inf, 7)
        assert_same(pickle.loads(pickle.dumps(logits)), logits)
    sliced = OptionLogits(np.arange(12, dtype=np.float64).reshape(3, 4)[:, ::2])
    assert_same(pickle.loads(pickle.dumps(sliced)), sliced)


@pytest.mark.parametrize("per_option", [False, True])
def test_reads_are_sent_as_what_they_were_made_of(per_option: bool) -> None:
    columns = [[0, 1, -1]] * 3 if per_option else [[0, 1], [2], [3, -1, 1]]
    small = OptionReads.of(columns, row_per_option=per_option)
    large = OptionReads.of(columns * 1000, row_per_option=per_option)
    changed = replace(small, columns_QO=small.columns_QO + 7)
    for reads in (small, large, small.alone(0), changed):
        data = pickle.dumps(reads, protocol=pickle.HIGHEST_PROTOCOL)
        assert_same(pickle.loads(data), reads)
    assert pickle.loads(pickle.dumps(small)) is small is OptionReads.of(columns, row_per_option=per_option)
    assert large.made_of is None, "only what is small is kept"
    assert OptionReads.of([[]] * 1000).made_of is None
    with pytest.raises(ValueError, match="read-only"):
        small.columns_QO[0, 0] = 7
