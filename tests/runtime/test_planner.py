"""The planner's trees: how many rows they take, and that every path is its prompt."""

from __future__ import annotations

import itertools
from array import array
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flide.heads import OpenJevHead
from flide.runtime.format import EncodedRequest, make_format
from flide.runtime.planner import one_run, plan, plan_tree
from flide.runtime.questionnaire import Tails
from flide.runtime.rounds import PreparedRequest
from flide.runtime.tokenizer import PromptTokenizer
from flide.runtime.tree import TokenTree, TreeLayout, prompts_of
from flide.runtime.wire import parse_body

OPTIONS = {f"option {i}": None for i in range(255)}
STATE = "The parcel came late and one cup was broken. " * 8
FOUR = dict(itertools.islice(OPTIONS.items(), 4))
REQUESTS: dict[str, dict[str, Any]] = {
    "three yes-or-no questions": {
        "a": {"type": "noul", "instructions": "Was the parcel late?"},
        "b": {"type": "noul", "instructions": "Was a cup broken?"},
        "c": {"type": "noul"},
    },
    "one choice of four": {"a": {"type": "choice", "instructions": "Who should answer?", "criteria": FOUR}},
    "three questions, seven candidates": {
        "a": {"type": "noul", "instructions": "Is a person in front of the drone?"},
        "b": {
            "type": "choice",
            "instructions": "What should the drone do next?",
            "criteria": {"stop": "hold its place", "climb": "go up by a meter", "return": "fly back home"},
        },
        "c": {"type": "score", "instructions": "How good is the light?", "criteria": ["dark", "dim", "bright"]},
    },
    "255 candidates": {"a": {"type": "choice", "instructions": "Which?", "criteria": OPTIONS}},
}
# Rows of three levels, of two, and of all prompts.
ROWS = {
    "three yes-or-no questions": (290, 290, 682),
    "one choice of four": (322, 322, 952),
    "three questions, seven candidates": (478, 544, 1720),
    "255 candidates": (7748, 7748, 60_580),
}


def rows(encoded: EncodedRequest) -> tuple[int, int, int]:
    deep, flat = plan_tree(encoded), plan_tree(encoded, depth=2)
    assert prompts_of(deep) == prompts_of(flat) == encoded.prompts
    return deep.num_tokens, flat.num_tokens, sum(map(len, encoded.prompts))


@pytest.mark.parametrize("name", REQUESTS)
def test_rows_of_requests(tok: PromptTokenizer, name: str) -> None:
    request = parse_body({"model": "m", "state": STATE, "questions": REQUESTS[name]})
    format = make_format("open-jev", tok)
    assert rows(format.encode(request)) == ROWS[name]
    prepared = PreparedRequest.encode(request, format, OpenJevHead(8))
    assert (prepared.needed.tokens, prepared.shared) == (ROWS[name][0], ROWS[name][2] - ROWS[name][0])
    assert prepared.layout.depth == (3 if ROWS[name][0] < ROWS[name][1] else 2)


def test_rows_of_21_questions_with_97_candidates() -> None:
    """The sizes that Open-Jev's own cache was measured with: 187 thousand tokens of prompts."""
    numbers = itertools.count(1)
    state = [next(numbers) for _ in range(1862)]
    counts = [5] * 13 + [4] * 8
    tails: list[list[int]] = []
    leaves = [34] * 94 + [33] * 3
    for i, count in enumerate(counts):
        question = [next(numbers) for _ in range(31 + (i < 5))]
        tails += [question + [next(numbers) for _ in range(leaves.pop())] for _ in range(count)]
    deep, flat, alone = rows(EncodedRequest(state, tails, counts, counts))
    assert sum(counts) == 97
    assert (deep, flat, alone) == (5813, 8189, 186_941)


def test_rows_that_are_read_are_never_shared() -> None:
    encoded = EncodedRequest([1], [[2, 3, 4, 5], [2, 3, 4, 6]], [1, 1], [1, 1], [(-3, -1), (-1,)])
    tree = plan_tree(encoded)
    assert tree == TokenTree(array("i", [1, 2]), (TokenTree([3, 4, 5], readouts=(-3, -1)), TokenTree([3, 4, 6])))
    layout = TreeLayout.of(tree)
    assert layout.rows[0][layout.reads[0]].tolist() == [3, 5, 6]
    with pytest.raises(ValueError, match="a row to read behind the state"):
        plan_tree(EncodedRequest([1, 2], [[3]], [1], [1], [(-2,)]))
    with pytest.raises(ValueError, match="a row to read"):
        plan_tree(EncodedRequest([1], [], [], []))


def test_a_question_gets_no_branch_that_would_share_nothing() -> None:
    same = plan_tree(EncodedRequest([], [[1, 2], [1, 3], [2, 4]], [2, 1], [2, 1]))
    assert same == TokenTree(array("i"), (TokenTree([1], (TokenTree([2]), TokenTree([3]))), TokenTree([2, 4])))
    apart = plan_tree(EncodedRequest([], [[1, 2], [3, 2], [2, 4]], [2, 1], [2, 1]))
    assert apart == TokenTree(array("i"), (TokenTree([1, 2]), TokenTree([3, 2]), TokenTree([2, 4])))


def test_a_third_level_has_to_save_as_many_rows_as_are_asked_for() -> None:
    encoded = EncodedRequest([9], [[1, 2, 3], [1, 2, 4], [1, 2, 5], [2]], [3, 1], [3, 1])
    assert plan_tree(encoded).num_tokens == 1 + 2 + 3 + 1
    for least, levels in ((4, 3), (5, 2)):
        tree = plan_tree(encoded, least=least)
        assert TreeLayout.of(tree).depth == levels
        assert prompts_of(tree) == encoded.prompts


GROUPS = st.lists(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=4), min_size=1, max_size=4
)


@settings(max_examples=200, deadline=None)
@given(shared=st.lists(st.integers(0, 2), max_size=3), groups=GROUPS)
def test_every_path_is_its_prompt_and_a_level_never_costs_rows(
    shared: list[int], groups: list[list[list[int]]]
) -> None:
    counts = [len(group) for group in groups]
    encoded = EncodedRequest(shared, [tail for group in groups for tail in group], counts, counts)
    deep, flat, alone = rows(encoded)
    assert deep <= flat <= alone
    layout = TreeLayout.of(plan_tree(encoded))
    assert layout.num_reads == sum(counts)
    assert all(child.tokens for child in plan_tree(encoded).children)


@settings(max_examples=100, deadline=None)
@given(shared=st.lists(st.integers(0, 2), max_size=3), groups=GROUPS, depth=st.sampled_from([2, 3]))
def test_last_rows_are_rows_like_others(shared: list[int], groups: list[list[list[int]]], depth: int) -> None:
    counts, tails = [len(group) for group in groups], [tail for group in groups for tail in group]
    last = EncodedRequest(shared, tails, counts, counts)
    named = EncodedRequest(shared, tails, counts, counts, rows=[(-1,)] * len(tails))
    plain, other = plan_tree(last, depth=depth), plan_tree(named, depth=depth)
    assert list(plain.tokens) == list(other.tokens)
    assert plain.children == other.children


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("tails", [[], [[]], [[1], []]])
def test_prompts_with_nothing_to_read_are_refused(tails: list[list[int]], depth: int) -> None:
    with pytest.raises(ValueError, match="every prompt needs a row"):
        plan_tree(EncodedRequest([1, 2], tails, [1] * len(tails), [1] * len(tails)), depth=depth)


@settings(max_examples=200, deadline=None)
@given(
    states=st.lists(st.lists(st.integers(0, 2), max_size=9), min_size=2, max_size=3),
    groups=GROUPS,
    depth=st.sampled_from([2, 3]),
    least=st.sampled_from([1, 3]),
    resumes=st.booleans(),
)
def test_of_tails_that_are_kept_only_the_state_is_new(
    states: list[list[int]], groups: list[list[list[int]]], depth: int, least: int, resumes: bool
) -> None:
    counts = [len(group) for group in groups]
    kept = Tails([array("i", tail) for group in groups for tail in group])
    for state in states:
        encoded = EncodedRequest(array("i", state), kept, counts, counts)
        tree, layout = plan(encoded, depth=depth, least=least, resumes=resumes)
        planned = plan_tree(encoded, depth=depth, least=least)
        assert tree == (planned if resumes else one_run(planned))
        expected = TreeLayout.of(tree)
        for name in ("rows", "nodes", "reads"):
            assert np.array_equal(getattr(layout, name), getattr(expected, name)), name
        for name in ("level_rows", "level_nodes", "num_shared_tokens"):
            assert getattr(layout, name) == getattr(expected, name), name
        for name in ("rows", "nodes", "reads"):
            assert np.array_equal(getattr(layout.resumed(len(state)), name), getattr(kept.plan[2], name)), name


@pytest.mark.parametrize("shared", [[], [1, 2]])
@pytest.mark.parametrize(
    ("tail", "rows"), [([7], None), ([7], (-1,)), ([7], (0,)), ([7, 8, 9], None), ([7, 8, 9], (-2, -1)), ([7, 8], (0,))]
)
def test_a_prompt_alone_is_one_run_with_the_same_rows(
    shared: list[int], tail: list[int], rows: tuple[int, ...] | None
) -> None:
    forked = TokenTree(shared, (TokenTree(tail, readouts=rows),))
    whole = one_run(forked)
    assert list(whole.tokens) == [*shared, *tail]
    assert not whole.children
    assert whole.readout_offsets == tuple(len(shared) + row for row in forked.children[0].readout_offsets)
    assert TreeLayout.of(whole).num_shared_tokens == TreeLayout.of(forked).num_shared_tokens == 0


@pytest.mark.parametrize(
    "tree",
    [
        TokenTree([1], (TokenTree([2]), TokenTree([3]))),
        TokenTree([1], (TokenTree([2], (TokenTree([3]), TokenTree([4]))),)),
        TokenTree([1], (TokenTree([2]),), readouts=(0,)),
        TokenTree([1]),
    ],
    ids=["two", "candidates", "a trunk that is read", "one run already"],
)
def test_other_trees_stay(tree: TokenTree) -> None:
    assert one_run(tree) == tree


def test_only_who_resumes_keeps_the_branch_of_a_prompt_alone() -> None:
    encoded = EncodedRequest(array("i", [1, 2]), [array("i", [3])], [2], [1])
    assert plan(encoded)[1].depth == 1
    assert plan(encoded, resumes=True)[1].depth == 2
