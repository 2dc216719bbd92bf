"""The radix tree finds what a dict of all prefixes finds."""

from __future__ import annotations

import random

import numpy as np

from flide.runtime.checkpoints.radix import RadixTree, key_of


def key(*tokens: int) -> bytes:
    return key_of(np.array(tokens, np.int32))


def test_it_finds_all_beginnings_shortest_first_and_compares_whole_tokens() -> None:
    tree: RadixTree[str] = RadixTree()
    nodes = {name: tree.insert(key(*tokens), name) for name, tokens in (("abc", (1, 2, 3)), ("ab", (1, 2)))}
    nodes["axc"] = tree.insert(key(1, 258, 3), "axc")  # shares its first byte with token 2
    assert tree.path(key(1, 2, 3, 4)) == ["ab", "abc"]
    assert tree.path(key(1, 258, 3)) == ["axc"]
    assert tree.path(key(1, 258)) == tree.path(key(2)) == tree.path(b"") == []
    assert [nodes[name].num_tokens for name in ("ab", "abc", "axc")] == [2, 3, 3]
    assert nodes["abc"].nearest_above() == "ab"
    assert nodes["axc"].nearest_above() is None
    for node in nodes.values():
        tree.remove(node)
    assert not tree


def test_random_trees_find_what_a_dict_finds_and_end_empty() -> None:
    rng = random.Random(0)
    tree: RadixTree[int] = RadixTree()
    known: dict[tuple[int, ...], object] = {}

    def sequence() -> tuple[int, ...]:
        return tuple(rng.choice([1, 2, 256, 1 << 16]) for _ in range(rng.randrange(1, 9)))

    for number in range(3000):
        tokens = sequence()
        if tokens not in known and rng.random() < 0.5:
            known[tokens] = (number, tree.insert(key(*tokens), number))
        elif known and rng.random() < 0.6:
            tokens = rng.choice(list(known))
            tree.remove(known.pop(tokens)[1])
        asked = sequence()
        expected = [known[asked[:n]] for n in range(1, len(asked) + 1) if asked[:n] in known]
        assert tree.path(key(*asked)) == [number for number, _ in expected]
        assert [node.num_tokens for _, node in expected] == [
            n for n in range(1, 9) if asked[:n] in known and n <= len(asked)
        ]
    for _, node in known.values():
        tree.remove(node)
    assert not tree
