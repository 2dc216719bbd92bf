"""Layouts of trees: that of leaves alone, which most requests are, is the one that any tree gets."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from flide.runtime.tree import FEW, TokenTree, TreeLayout

LENGTHS = [
    (0, [1]),
    (3, [1]),
    (264, [80]),
    (5, [1, 4, 2]),
    (2, [3] * FEW),
    (2, [3] * (FEW + 1)),
    (7, [1 + i % 5 for i in range(40)]),
    (70_000, [1, 2]),  # more than the numbers that are kept
]


@pytest.mark.parametrize("kind", [list, lambda x: array("i", x)], ids=["lists", "arrays"])
@pytest.mark.parametrize(("trunk", "branches"), LENGTHS)
def test_leaves_are_laid_out_as_any_tree(
    trunk: int, branches: list[int], kind: Callable[[Sequence[int]], Sequence[int]]
) -> None:
    tokens = [kind(range(7 * i, 7 * i + n)) for i, n in enumerate(branches)]
    leaves = TreeLayout.of(TokenTree(kind(range(trunk)), tuple(TokenTree(x) for x in tokens)))
    # Rows by name: not what the shorter way is for.
    tree = TreeLayout.of(TokenTree(kind(range(trunk)), tuple(TokenTree(x, readouts=(-1,)) for x in tokens)))
    for name in ("rows", "nodes", "reads"):
        found, wanted = getattr(leaves, name), getattr(tree, name)
        assert found.dtype == wanted.dtype
        assert found.flags.writeable
        assert np.array_equal(found, wanted), name
    for name in ("level_rows", "level_nodes", "num_shared_tokens", "depth", "num_parents"):
        assert getattr(leaves, name) == getattr(tree, name), name


def test_a_leaf_without_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="outside a node"):
        TreeLayout.of(TokenTree([1], (TokenTree([]), TokenTree([2]))))
