"""From isolated prompts to a tree: which tokens run once.

Any tree over exact common prefixes gives the same answers; a planner only decides how many rows they take. The trunk is
what all prompts share. A question whose prompts share more than that may get a branch of its own, whose leaves they
are: three levels, where two would run the question once for every candidate. A prompt alone is one run.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

from flide.runtime.capacity import MAX_REQUESTS
from flide.runtime.format import LAST_ROW, EncodedRequest
from flide.runtime.questionnaire import Tails
from flide.runtime.tree import MAX_DEPTH, TokenTree, TreeLayout, longest_common_prefix


class _Prompt(NamedTuple):
    """What is left of a prompt, and its rows that are read, counted from the end."""

    tokens: Sequence[int]
    rows: tuple[int, ...]

    @property
    def most_shared(self) -> int:
        """How many tokens it may share: every row that is read stays its own."""
        return len(self.tokens) + min(self.rows)

    def behind(self, cut: int) -> _Prompt:
        return _Prompt(self.tokens[cut:], self.rows)

    def as_leaf(self) -> TokenTree:
        return TokenTree(self.tokens, readouts=None if self.rows == LAST_ROW else self.rows)


def one_run(tree: TokenTree) -> TokenTree:
    """The tree; a prompt that shares with no other one is one run instead of a trunk with a branch, whose recurrent
    layers take one pass less. What resumes from the end of its state needs the branch."""
    if len(tree.children) != 1 or tree.readouts or tree.children[0].children:
        return tree
    (branch,) = tree.children
    ahead, readouts = len(tree.tokens), branch.readouts
    if readouts is not None:
        readouts = tuple(row if row < 0 else ahead + row for row in readouts)
    return TokenTree(array("i", tree.tokens) + array("i", branch.tokens), readouts=readouts)


def plan(
    encoded: EncodedRequest, *, depth: int = MAX_DEPTH, least: int = 1, resumes: bool = False
) -> tuple[TokenTree, TreeLayout]:
    """``plan_tree``, and its layout: of tails that another request had, too, both are only put behind the state.

    Args:
        encoded, depth, least: as ``plan_tree``.
        resumes: later requests may want to resume from the end of the state; otherwise see :func:`one_run`.
    """

    def planned(request: EncodedRequest) -> TokenTree:
        tree = plan_tree(request, depth=depth, least=least)
        return tree if resumes else one_run(tree)

    tails, settings = encoded.tails, (depth, least, resumes)
    if not isinstance(tails, Tails) or encoded.rows is not None or not tails:
        tree = planned(encoded)
        return tree, TreeLayout.of(tree)
    known = tails.plan
    if known is None or known[0] != settings:
        alone = planned(replace(encoded, shared=array("i")))
        tails.plan = known = settings, alone, TreeLayout.of(alone)
    _, alone, layout = known
    shared = encoded.shared if isinstance(encoded.shared, array) else array("i", encoded.shared)
    layout = layout.behind(shared)
    return TokenTree(shared + array("i", alone.tokens), alone.children, alone.readouts), layout


def plan_tree(encoded: EncodedRequest, *, depth: int = MAX_DEPTH, least: int = 1) -> TokenTree:
    """The tree of one request, its branches in the order of the questions.

    Questions whose prompts share no more than the trunk have these as branches, and so have all where there are more
    questions than a round has room for.

    Args:
        encoded: at least one prompt.
        depth: levels, at most.
        least: rows that a third level has to save.

    Raises:
        ValueError: a prompt has no row to read behind what the prompts share by themselves.
    """
    sizes = encoded.num_prompts
    if encoded.rows is None and encoded.tails and (depth == 2 or max(sizes) == 1):
        return _last_rows_of(encoded)
    rows = encoded.rows or [LAST_ROW] * len(encoded.tails)
    prompts = [_Prompt(tail, row) for tail, row in zip(encoded.tails, rows, strict=True)]  # tails may begin alike, too
    if not prompts or min(prompt.most_shared for prompt in prompts) < 0:
        raise _nothing_to_read()
    cut = _shared(prompts)
    trunk = array("i", encoded.shared)
    trunk.extend(prompts[0].tokens[:cut])
    rest = [prompt.behind(cut) for prompt in prompts]
    if depth > 2 and max(sizes) > 1 and len(sizes) < MAX_REQUESTS:
        left = iter(rest)
        groups = [list(islice(left, size)) for size in sizes]
        cuts = [_shared(group) if len(group) > 1 else 0 for group in groups]
        if sum(cut * (size - 1) for cut, size in zip(cuts, sizes, strict=True)) >= least:
            return TokenTree(trunk, tuple(node for x in zip(groups, cuts, strict=True) for node in _question(*x)))
    return TokenTree(trunk, tuple(prompt.as_leaf() for prompt in rest))


def _last_rows_of(encoded: EncodedRequest) -> TokenTree:
    """Two levels of prompts whose last rows are read, as most are: the same, with less to do for each."""
    shortest = min(map(len, encoded.tails))
    if not shortest:
        raise _nothing_to_read()
    cut = min(longest_common_prefix(encoded.tails), shortest - 1)
    trunk = array("i", encoded.shared)
    trunk.extend(encoded.tails[0][:cut])
    return TokenTree(trunk, tuple([TokenTree(tail[cut:] if cut else tail) for tail in encoded.tails]))


def _nothing_to_read() -> ValueError:
    return ValueError("every prompt needs a row to read behind the state")


def _question(prompts: Sequence[_Prompt], cut: int) -> list[TokenTree]:
    """The branches of one question whose prompts share ``cut`` tokens behind the trunk: one with leaves, or all."""
    leaves = [prompt.behind(cut).as_leaf() for prompt in prompts]
    return [TokenTree(prompts[0].tokens[:cut], tuple(leaves))] if cut else leaves


def _shared(prompts: Sequence[_Prompt]) -> int:
    """How many tokens prompts share before the first row that is read."""
    cut = longest_common_prefix([prompt.tokens for prompt in prompts])
    return min(cut, min(prompt.most_shared for prompt in prompts))


__all__ = ["one_run", "plan", "plan_tree"]
