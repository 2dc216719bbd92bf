"""Token trees: what one request looks like before it is laid out in a stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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


def longest_common_prefix(sequences: Sequence[Sequence[int]]) -> int:
    """Length of the longest prefix all sequences share."""
    first = sequences[0]
    length = len(first)
    for other in sequences[1:]:
        length = min(length, len(other))
        if first[:length] != other[:length]:  # two lists are compared much faster than their items
            length = next((i for i in range(length) if first[i] != other[i]), length)
    return length
