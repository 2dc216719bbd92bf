"""Token trees: what one request looks like before it is laid out in a stream."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flide.runtime.compact import Compact

MAX_DEPTH = 3  # trunk, branch, leaf
FEW = 8  # branches


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
        if self.readouts is None and n:
            return () if self.children else (n - 1,)
        rows = self.readouts if self.readouts is not None else (() if self.children else (-1,))
        offsets = tuple(row + n if row < 0 else row for row in rows)
        if any(not 0 <= offset < n for offset in offsets):
            raise ValueError(f"readout rows {rows} lie outside a node of {n} tokens")
        return offsets


@dataclass(frozen=True, slots=True, eq=False)
class TreeLayout(Compact):
    """A tree as arrays, level by level: its stream if it were alone in a round, worked out once.

    Shapes: T tokens, S nodes, N readout rows. Nodes stand level by level, within a level in depth-first order, and
    tokens node by node.

    Attributes:
        rows: ``[3, T]`` int32: token id, how many tokens stand before it on its path, its node.
        nodes: ``[5, S]`` int32: end (rows up to its last one), level, tokens before it on its path, parent (-1 none),
            place among the nodes with children (-1 without).
        level_rows, level_nodes: ``[levels + 1]`` where the rows and nodes of each level begin, and their number.
        reads: ``[2, N]`` int32 readout row and its level, in depth-first order of the tree.
        num_shared_tokens: how many more tokens the tree's isolated prompts have than the tree.
    """

    rows: NDArray[np.int32]
    nodes: NDArray[np.int32]
    level_rows: tuple[int, ...]
    level_nodes: tuple[int, ...]
    reads: NDArray[np.int32]
    num_shared_tokens: int

    @classmethod
    def of(cls, tree: TokenTree) -> TreeLayout:
        """Lay out a tree.

        Raises:
            ValueError: deeper than ``MAX_DEPTH`` levels, or a readout row that its node lacks.
        """
        if tree.readouts is None and tree.children and all(map(_is_plain_leaf, tree.children)):
            return cls._of_leaves(tree.tokens, [leaf.tokens for leaf in tree.children])
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
        level_nodes = (0, *itertools.accumulate(map(len, used)))
        flat = [node for these in used for node, _, _ in these]
        starts = [start for these in used for _, start, _ in these]
        lengths = [len(node.tokens) for node in flat]
        ends = list(itertools.accumulate(lengths))
        begins = [0, *ends[:-1]]
        parents = [-1] + [level_nodes[i] + parent for i, these in enumerate(used[1:]) for _, _, parent in these]
        places = itertools.count()
        nodes = [
            ends,
            [level for level, these in enumerate(used) for _ in these],
            starts,
            parents,
            [next(places) if node.children else -1 for node in flat],
        ]
        rows = np.empty((3, ends[-1]), np.int32)
        np.concatenate([np.asarray(node.tokens, np.int32) for node in flat], out=rows[0])
        ahead = [start - begin for start, begin in zip(starts, begins, strict=True)]
        np.add(numbers(ends[-1]), np.repeat(np.array(ahead, np.int32), lengths), out=rows[1])
        rows[2] = np.repeat(numbers(len(flat)), lengths)
        isolated = sum(
            start + length for node, start, length in zip(flat, starts, lengths, strict=True) if not node.children
        )
        return cls(
            rows=rows,
            nodes=np.array(nodes, np.int32),
            level_rows=(0, *(ends[n - 1] for n in level_nodes[1:])),
            level_nodes=level_nodes,
            reads=np.array(
                [[begins[level_nodes[level] + i] + row for level, i, row in reads], [level for level, _, _ in reads]],
                np.int32,
            ),
            num_shared_tokens=isolated - ends[-1],
        )

    @classmethod
    def _of_leaves(cls, trunk: Sequence[int], branches: Sequence[Sequence[int]]) -> TreeLayout:
        """A tree of two levels whose branches' last rows are read, as most are: the same, with less to do for each."""
        tokens, start, count = [trunk, *branches], len(trunk), len(branches)
        lengths = list(map(len, tokens))
        ends = list(itertools.accumulate(lengths))
        total = ends[-1]
        nodes = [ends, [0] + [1] * count, [0] + [start] * count, [-1] + [0] * count, [0] + [-1] * count]
        rows = np.empty((3, total), np.int32)
        if all(isinstance(x, array) and x.typecode == "i" for x in tokens):
            rows[0] = np.frombuffer(b"".join(tokens), np.int32)  # type: ignore[arg-type]
        else:
            np.concatenate([np.asarray(x, np.int32) for x in tokens], out=rows[0])
        rows[1, :start], rows[2, :start] = numbers(start), 0
        if count <= FEW:  # each by itself: of numpy's functions, every other one that is used has to be fetched
            for index, (begin, end) in enumerate(itertools.pairwise(ends), 1):
                rows[1, begin:end], rows[2, begin:end] = numbers(start + end - begin)[start:], index
        else:
            rows[2] = np.repeat(numbers(count + 1), lengths)
            # What stands before a branch on its path, less what stands before it in the stream.
            ahead = np.array([0] + [start - begin for begin in ends[:-1]], np.int32)
            np.add(numbers(total), ahead[rows[2]], out=rows[1])
        return cls(
            rows=rows,
            nodes=np.array(nodes, np.int32),
            level_rows=(0, start, total),
            level_nodes=(0, 1, count + 1),
            reads=np.array([[end - 1 for end in ends[1:]], [1] * count], np.int32),
            num_shared_tokens=(count - 1) * start,
        )

    @classmethod
    def merged(cls, layouts: Sequence[TreeLayout], length: int) -> TreeLayout:
        """One tree of several whose trunks begin with the same ``length`` tokens and are not read. What a trunk has
        behind them is put in front of its branches; the rows read stay in order, tree by tree."""
        return cls.of(
            TokenTree(layouts[0].rows[0, :length].tolist(), tuple(x for y in layouts for x in y._branches(length)))
        )

    def _branches(self, length: int) -> list[TokenTree]:
        """The branches as they are behind a trunk of ``length`` tokens."""
        rest, (ends, levels, _, parents, _) = self.rows[0, length : self.trunk_length].tolist(), self.nodes.tolist()
        readouts: list[list[int]] = [[] for _ in ends]
        for row in self.reads[0].tolist():
            readouts[self.rows[2, row]].append(row)
        children: list[list[TokenTree]] = [[] for _ in ends]
        for i in range(self.num_nodes - 1, 0, -1):  # children come after their parents
            begin, front = ends[i - 1], rest if levels[i] == 1 else []
            rows = tuple(len(front) + row - begin for row in readouts[i])
            tokens = front + self.rows[0, begin : ends[i]].tolist()
            children[parents[i]].insert(0, TokenTree(tokens, tuple(children[i]), rows))
        assert not readouts[0], "trunks that are read belong to one tree"
        return children[0]

    def resumed(self, length: int) -> TreeLayout:
        """The tree without the first ``length`` tokens of its trunk, which a checkpoint covers and nothing reads."""
        assert length <= self.trunk_length, "a checkpoint covers no more than a trunk"
        rows, nodes, reads = self.rows[:, length:].copy(), self.nodes.copy(), self.reads.copy()
        rows[1] -= length
        nodes[0] -= length
        nodes[2, 1:] -= length
        reads[0] -= length
        assert reads.min(initial=0) >= 0, "a row that is read is computed"
        return replace(
            self,
            rows=rows,
            nodes=nodes,
            level_rows=(0, *(end - length for end in self.level_rows[1:])),
            reads=reads,
        )

    def behind(self, front: array[int]) -> TreeLayout:
        """The tree with more int32 tokens in front of its trunk: ``resumed`` of it gives this one again."""
        length, (tokens, positions, owners) = len(front), self.rows
        ahead = numbers(length)
        # One copy of memory; each of numpy's assignments takes as long.
        parts: list[Any] = [front, tokens, ahead, positions + length, bytes(4 * length), owners]
        rows = np.frombuffer(b"".join(parts), np.int32).reshape(3, -1)
        nodes = self.nodes + np.array([[length], [0], [length], [0], [0]], np.int32)
        nodes[2, 0] = 0
        reads = self.reads + np.array([[length], [0]], np.int32)
        leaves = self.num_nodes - self.num_parents
        return TreeLayout(
            rows=rows,
            nodes=nodes,
            level_rows=(0, *(end + length for end in self.level_rows[1:])),
            level_nodes=self.level_nodes,
            reads=reads,
            num_shared_tokens=self.num_shared_tokens + (leaves - 1) * length,
        )

    @property
    def num_tokens(self) -> int:
        return len(self.rows[0])

    @property
    def num_nodes(self) -> int:
        return len(self.nodes[0])

    @property
    def num_reads(self) -> int:
        return len(self.reads[0])

    @property
    def num_parents(self) -> int:
        return int((self.nodes[4] >= 0).sum()) if self.depth > 2 else self.depth - 1

    @property
    def trunk_length(self) -> int:
        return self.level_rows[1]

    @property
    def depth(self) -> int:
        return len(self.level_nodes) - 1


def _is_plain_leaf(node: TokenTree) -> bool:
    return not node.children and node.readouts is None and len(node.tokens) > 0


def numbers(count: int) -> NDArray[np.int32]:
    """0 to ``count`` - 1, read-only."""
    return _NUMBERS[:count] if count <= len(_NUMBERS) else np.arange(count, dtype=np.int32)


_NUMBERS = np.arange(1 << 16, dtype=np.int32)
_NUMBERS.flags.writeable = False


def prompts_of(tree: TokenTree, prefix: tuple[int, ...] = ()) -> list[list[int]]:
    """The isolated prompts a tree stands for, depth first."""
    path = (*prefix, *tree.tokens)
    if not tree.children:
        return [list(path)]
    return [prompt for child in tree.children for prompt in prompts_of(child, path)]


def longest_common_prefix(sequences: Sequence[Sequence[int]]) -> int:
    """Length of the longest prefix all sequences share."""
    first = sequences[0]
    length = len(first)
    for other in sequences[1:]:
        length = min(length, len(other))
        if first[:length] != other[:length]:  # two lists are compared much faster than their items
            length = next((i for i in range(length) if first[i] != other[i]), length)
    return length
