"""Token trees: what one request looks like before it is laid out in a stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MAX_DEPTH = 3  # trunk, branch, leaf


@dataclass(frozen=True, slots=True)
class TokenTree:
    """A run of tokens and the runs that fork from its end.

    The root is a request's trunk, its children are branches, their children leaves. Every path from the root to a
    childless node, read as one token list, is an isolated prompt.

    Attributes:
        tokens: token ids of this node alone. A trunk may be empty.
        children: nodes that continue from the end of this one.
        readouts: rows of this node whose final hidden state is read, counted inside the node (negative from its end).
            None reads the last row of a childless node and nothing of any other.
    """

    tokens: Sequence[int]
    children: tuple[TokenTree, ...] = ()
    readouts: tuple[int, ...] | None = None

    @classmethod
    def from_prompts(cls, prompts: Sequence[Sequence[int]]) -> TokenTree:
        """Fork isolated prompts at their longest common token prefix; every branch keeps at least one token.

        Args:
            prompts: at least one prompt, none of them empty.

        Returns:
            A tree of depth two with one branch per prompt, in order, so that ``trunk + branch == prompt``.
        """
        if not prompts:
            raise ValueError("a token tree needs at least one prompt")
        if not all(len(prompt) for prompt in prompts):
            raise ValueError("a prompt needs at least one token")
        cut = longest_common_prefix(prompts)
        cut = min(cut, min(len(prompt) for prompt in prompts) - 1)
        return cls(prompts[0][:cut], tuple(cls(prompt[cut:]) for prompt in prompts))

    @property
    def num_tokens(self) -> int:
        """Stream rows of this node and everything below it."""
        return len(self.tokens) + sum(child.num_tokens for child in self.children)

    @property
    def readout_offsets(self) -> tuple[int, ...]:
        """Rows to read, counted from the node's first row (0-based, never negative)."""
        n = len(self.tokens)
        rows = self.readouts if self.readouts is not None else (() if self.children else (-1,))
        offsets = tuple(row + n if row < 0 else row for row in rows)
        if any(not 0 <= offset < n for offset in offsets):
            raise ValueError(f"readout rows {rows} lie outside a node of {n} tokens")
        return offsets


@dataclass(frozen=True, slots=True, eq=False)
class TreeLayout:
    """A tree as arrays, level by level: all that laying out a round needs to know of a request, worked out once.

    Shapes: n_l nodes of level l, N readout rows. Within a level nodes stand in depth-first order.

    Attributes:
        tokens: token ids of each level, int32.
        positions: how many tokens stand before each one on its path, int32.
        owners: the node each token belongs to, counted in its level, int32.
        lengths: ``[n_l]`` tokens of each node.
        starts: ``[n_l]`` tokens before each node on its own path.
        parents: ``[n_l]`` each node's parent, counted in the level above.
        is_parent: ``[n_l]`` whether a node has children.
        read_levels, read_nodes, read_rows: ``[N]`` each readout row: its node's level, the node counted in that level,
            and the row in the node. In depth-first order of the tree.
    """

    tokens: tuple[NDArray[np.int32], ...]
    positions: tuple[NDArray[np.int32], ...]
    owners: tuple[NDArray[np.int32], ...]
    lengths: tuple[NDArray[np.int64], ...]
    starts: tuple[NDArray[np.int64], ...]
    parents: tuple[NDArray[np.int64], ...]
    is_parent: tuple[NDArray[np.bool_], ...]
    read_levels: NDArray[np.int64]
    read_nodes: NDArray[np.int64]
    read_rows: NDArray[np.int64]

    @classmethod
    def of(cls, tree: TokenTree) -> TreeLayout:
        """Lay out a tree.

        Raises:
            ValueError: deeper than ``MAX_DEPTH`` levels, or a readout row that its node lacks.
        """
        levels: list[list[tuple[TokenTree, int, int]]] = [[] for _ in range(MAX_DEPTH)]  # node, start, parent
        reads: list[tuple[int, int, int]] = []

        def visit(node: TokenTree, level: int, start: int, parent: int) -> None:
            if level == MAX_DEPTH:
                raise ValueError(f"a token tree has at most {MAX_DEPTH} levels")
            index = len(levels[level])
            levels[level].append((node, start, parent))
            reads.extend((level, index, row) for row in node.readout_offsets)
            end = start + len(node.tokens)
            for child in node.children:
                visit(child, level + 1, end, index)

        visit(tree, 0, 0, -1)
        used = [level for level in levels if level]
        read = np.array(reads, dtype=np.int64).reshape(-1, 3)
        lengths = tuple(np.array([len(x.tokens) for x, _, _ in level]) for level in used)
        starts = tuple(np.array([start for _, start, _ in level]) for level in used)
        ahead = [
            s - (n.cumsum() - n) for s, n in zip(starts, lengths, strict=True)
        ]  # of each node's place in its level
        return cls(
            tokens=tuple(np.concatenate([np.asarray(x.tokens, np.int32) for x, _, _ in level]) for level in used),
            positions=tuple(
                np.arange(n.sum(), dtype=np.int32) + np.repeat(x.astype(np.int32), n)
                for x, n in zip(ahead, lengths, strict=True)
            ),
            owners=tuple(np.repeat(np.arange(len(n), dtype=np.int32), n) for n in lengths),
            lengths=lengths,
            starts=starts,
            parents=tuple(np.array([parent for _, _, parent in level]) for level in used),
            is_parent=tuple(np.array([bool(x.children) for x, _, _ in level]) for level in used),
            read_levels=read[:, 0],
            read_nodes=read[:, 1],
            read_rows=read[:, 2],
        )

    @property
    def num_tokens(self) -> int:
        return sum(len(tokens) for tokens in self.tokens)

    @property
    def num_nodes(self) -> int:
        return sum(len(lengths) for lengths in self.lengths)

    @property
    def num_parents(self) -> int:
        return sum(int(is_parent.sum()) for is_parent in self.is_parent)

    @property
    def depth(self) -> int:
        return len(self.lengths)


def longest_common_prefix(sequences: Sequence[Sequence[int]]) -> int:
    """Length of the longest prefix all sequences share."""
    first = sequences[0]
    length = len(first)
    for other in sequences[1:]:
        length = min(length, len(other))
        if first[:length] != other[:length]:  # two lists are compared much faster than their items
            length = next((i for i in range(length) if first[i] != other[i]), length)
    return length
