"""The fixed request shapes that figures are given for: (trunk tokens, tokens of each branch)."""

from __future__ import annotations

from flide.runtime import TokenTree

WORKLOADS: dict[str, tuple[int, list[int]]] = {
    "race": (264, [80]),
    "race_all": (264, [80] * 4),
    "multirc": (284, [45] * 48),
    "quality_all": (4804, [103] * 18),
    "q64": (4804, [103] * 64),
}


def token_tree(name: str, *, token: int = 1) -> TokenTree:
    """One request of a workload; its tokens are all the same, where only the shape matters."""
    trunk, branches = WORKLOADS[name]
    return TokenTree([token] * trunk, tuple(TokenTree([token] * n) for n in branches))
