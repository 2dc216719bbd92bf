"""A radix tree over token ids: what was kept of a sequence is found by the sequences that begin with it."""

from __future__ import annotations

from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")

TOKEN_BYTES = 4  # of an int32 token id


def key_of(tokens: NDArray[np.int32]) -> bytes:
    """Token ids as a key: whole edges are then compared in one call."""
    return tokens.astype(np.int32, copy=False).tobytes()


class RadixNode(Generic[T]):
    """A place in a tree. It stays the place of its tokens whatever is added or removed around it.

    Attributes:
        edge: tokens between the parent and this node.
        num_tokens: from the root to here.
        value: what is kept here, or None.
    """

    __slots__ = ("children", "edge", "num_tokens", "parent", "value")

    def __init__(self, edge: bytes, parent: RadixNode[T] | None) -> None:
        self.edge, self.parent = edge, parent
        self.num_tokens: int = len(edge) // TOKEN_BYTES + (0 if parent is None else parent.num_tokens)
        self.value: T | None = None
        self.children: dict[bytes, RadixNode[T]] = {}

    def nearest_above(self) -> T | None:
        """The value of the deepest ancestor that has one."""
        node = self.parent
        while node is not None and node.value is None:
            node = node.parent
        return None if node is None else node.value


class RadixTree(Generic[T]):
    """Values under token sequences, every token of which is compared."""

    def __init__(self) -> None:
        self._root: RadixNode[T] = RadixNode(b"", None)

    def __bool__(self) -> bool:
        return bool(self._root.children)

    def values(self) -> list[T]:
        """All of them."""
        nodes, found = [self._root], []
        while nodes:
            node = nodes.pop()
            nodes.extend(node.children.values())
            if node.value is not None:
                found.append(node.value)
        return found

    def path(self, key: bytes) -> list[T]:
        """The values of all beginnings of ``key``, shortest first."""
        found, node, at = [], self._root, 0
        while at < len(key):
            child = node.children.get(key[at : at + TOKEN_BYTES])
            if child is None or not key.startswith(child.edge, at):
                break
            node, at = child, at + len(child.edge)
            if node.value is not None:
                found.append(node.value)
        return found

    def insert(self, key: bytes, value: T) -> RadixNode[T]:
        """Put a value under a sequence of at least one token that has none."""
        node, at = self._root, 0
        while at < len(key):
            child = node.children.get(key[at : at + TOKEN_BYTES])
            if child is None:
                child = node.children[key[at : at + TOKEN_BYTES]] = RadixNode(key[at:], node)
            elif not key.startswith(child.edge, at):
                child = _split(child, TOKEN_BYTES * common_tokens(child.edge, key[at : at + len(child.edge)]))
            node, at = child, at + len(child.edge)
        assert node.value is None, "nothing was kept here"
        assert node is not self._root, "a key has a token"
        node.value = value
        return node

    def remove(self, node: RadixNode[T]) -> None:
        """Take a node's value away, and the nodes that nothing needs any more."""
        node.value = None
        while node.parent is not None and node.value is None and not node.children:
            del node.parent.children[node.edge[:TOKEN_BYTES]]
            node = node.parent
        if node.parent is not None and node.value is None and len(node.children) == 1:
            (child,) = node.children.values()
            child.edge, child.parent = node.edge + child.edge, node.parent
            node.parent.children[child.edge[:TOKEN_BYTES]] = child


def _split(node: RadixNode[T], size: int) -> RadixNode[T]:
    """A new node in a node's edge, ``size`` bytes behind its parent."""
    assert node.parent is not None
    upper: RadixNode[T] = RadixNode(node.edge[:size], node.parent)
    node.parent.children[upper.edge[:TOKEN_BYTES]] = upper
    node.edge, node.parent = node.edge[size:], upper
    upper.children[node.edge[:TOKEN_BYTES]] = node
    return upper


def common_tokens(a: bytes, b: bytes) -> int:
    """How many tokens two keys have in common from their beginning."""
    count = min(len(a), len(b)) // TOKEN_BYTES
    differ = np.frombuffer(a, np.int32, count) != np.frombuffer(b, np.int32, count)
    return int(differ.argmax()) if differ.any() else count


__all__ = ["TOKEN_BYTES", "RadixNode", "RadixTree", "common_tokens", "key_of"]
