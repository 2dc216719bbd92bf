"""Trees that lost the beginning of their trunks, and several trees made one."""

from __future__ import annotations

import pytest

from flide.runtime import ForkMetadata, TokenTree, TrunkCache
from flide.runtime.tree import TreeLayout

TRUNK = list(range(100, 170))
DEEP = TokenTree(
    TRUNK,
    (
        TokenTree([1, 2], (TokenTree([3]), TokenTree([4, 5], readouts=(0, -1)))),
        TokenTree([6]),
        TokenTree([7, 8, 9], readouts=(-3, -1)),
    ),
)


def prompts(meta: ForkMetadata, *, behind: list[int]) -> list[list[int]]:
    """The isolated prompt up to each readout row, ``behind`` what a checkpoint covers."""
    tokens, offsets = meta.tokens.tolist(), meta.segment_offsets.tolist()
    parents, segments = meta.segment_parents.tolist(), meta.row_segments.tolist()
    found = []
    for row in meta.readout_rows.tolist():
        segment = segments[row]
        path = tokens[offsets[segment] : row + 1]
        while (segment := parents[segment]) >= 0:
            path = tokens[offsets[segment] : offsets[segment + 1]] + path
        found.append(behind + path)
    return found


@pytest.mark.parametrize("length", [1, 64, 69, 70])
def test_a_resumed_tree_is_the_tree_behind_what_is_covered(length: int) -> None:
    whole = ForkMetadata.pack([DEEP])
    cache = TrunkCache(length, slot=1, pages=[0, 1])
    meta = ForkMetadata.pack([TreeLayout.of(DEEP).resumed(length)], caches=[cache])
    other = TokenTree(TRUNK[length:], DEEP.children)
    expected = ForkMetadata.pack([other], caches=[cache])
    meta.check()
    assert (meta.arena == expected.arena).all()
    assert prompts(meta, behind=TRUNK[:length]) == prompts(whole, behind=[])
    assert meta.positions[0].tolist() == whole.positions[0, length:].tolist()


def test_merged_trees_read_the_same_prompts_tree_by_tree() -> None:
    others = [
        TokenTree(TRUNK[:40] + [50, 51], (TokenTree([1]), TokenTree([2, 3]))),
        TokenTree(TRUNK[:45], DEEP.children),
    ]
    trees = [DEEP, *others]
    layouts = [TreeLayout.of(tree) for tree in trees]
    expected = [prompt for tree in trees for prompt in prompts(ForkMetadata.pack([tree]), behind=[])]
    for length in (40, 7, 0):
        merged = TreeLayout.merged(layouts, length)
        assert merged.trunk_length == length
        meta = ForkMetadata.pack([merged])
        meta.check()
        assert prompts(meta, behind=[]) == expected
    resumed = ForkMetadata.pack(
        [TreeLayout.merged(layouts, 40).resumed(13)], caches=[TrunkCache(13, slot=1, pages=[0])]
    )
    assert prompts(resumed, behind=TRUNK[:13]) == expected
