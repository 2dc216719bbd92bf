"""Oracles of the ops, one row at a time in float64, and the trees to try the ops on.

Written from the formulas in the ops' docstrings, without the reference code: a row's path is an explicit list of stream
rows, the recurrence runs token by token, and every segment is computed from the root of its own path, from scratch.
All of it is differentiable.

Shapes: Q query rows, T stream rows, L rows of a path, P cached rows, N (value) heads, M key/value heads, H head dim,
C conv channels, W conv width, K key dim, V value dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flide.runtime import ForkMetadata, StreamCapacity, TokenTree, TrunkCache
from flide.runtime.metadata import PAGE_SIZE

Shape = tuple[int, list[Any]]  # (tokens, [child, ...]); a child is a number of tokens or such a pair
Prefixes = dict[int, tuple[Tensor, Tensor]]

TREES: dict[str, list[Shape]] = {
    "one_row": [(0, [1])],
    "no_trunk": [(0, [1, 2, 65])],
    "short_trunks": [(1, [1, 5]), (2, [2, 3]), (3, [4, 1])],
    "around_the_chunk": [(63, [1, 63]), (64, [2, 64]), (65, [3, 65])],
    "long_trunk": [(130, [5, 4, 64])],
    "forty_branches": [(20, [1 + i % 5 for i in range(40)])],
    "many_requests": [(i % 4, [1 + i % 3]) for i in range(36)],
    "mixed_round": [(0, [65]), (130, [1, 2]), (2, [64, 3]), (64, [5])],
    "reversed_round": [(64, [5]), (2, [3, 64]), (130, [2, 1]), (0, [65])],
    "trunks_alone": [(7, []), (5, [2]), (65, [])],
    "empty_branches": [(5, [0, 3, 0]), (0, [0, 2]), (4, [0])],
    "depth_three": [(10, [(5, [1, 2, 64]), (3, [7]), 4]), (66, [(1, [1, 1]), (65, [2])])],
    "empty_middles": [(4, [(0, [2, 3]), (2, [0, 1])]), (0, [(0, [5, 1]), (1, [3])]), (1, [(1, [1, 4])])],
}
SMALL_TREES = {name: TREES[name] for name in ("short_trunks", "forty_branches", "mixed_round", "empty_middles")}
TRUNKS = (0, 1, 2, 3, 63, 64, 65, 130)
BRANCHES = (1, 2, 3, 4, 5, 63, 64, 65)


def token_tree(shape: Shape | int) -> TokenTree:
    length, children = (shape, []) if isinstance(shape, int) else shape
    readouts = None if length or children else ()
    return TokenTree(range(length), tuple(token_tree(child) for child in children), readouts)


def pack(
    shapes: Sequence[Shape],
    *,
    padding: int = 0,
    capacity: StreamCapacity | None = None,
    caches: Sequence[TrunkCache] | None = None,
) -> ForkMetadata:
    """A round of such trees; ``padding`` adds as many rows, segments and page table entries as nobody uses."""
    trees = [token_tree(shape) for shape in shapes]
    meta = ForkMetadata.pack(trees, capacity=capacity, caches=caches)
    if padding:
        c = meta.capacity
        capacity = StreamCapacity(
            c.tokens + padding, c.segments + padding, c.readouts + padding, c.pages + padding, c.depth
        )
        meta = ForkMetadata.pack(trees, capacity=capacity, caches=caches)
    meta.check()
    return meta


def shuffled_pages(totals: Sequence[int], *, pool_pages: int, seed: int = 0) -> list[tuple[int, ...]]:
    """Disjoint page lists, in no order, for trunks of ``totals`` tokens (cached ones included)."""
    free = torch.randperm(pool_pages, generator=torch.Generator().manual_seed(seed)).tolist()
    return [tuple(free.pop() for _ in range(-(-total // PAGE_SIZE))) for total in totals]


def active_rows(meta: ForkMetadata) -> int:
    return int(meta.segment_offsets[-1])


def rows_of_path(meta: ForkMetadata, segment: int) -> list[int]:
    """Stream rows from the root of a segment's path to the segment's end."""
    offsets, parents = meta.segment_offsets.tolist(), meta.segment_parents.tolist()
    rows: list[int] = []
    while segment >= 0:
        rows = [*range(offsets[segment], offsets[segment + 1]), *rows]
        segment = parents[segment]
    return rows


def rows_of_request(meta: ForkMetadata, trunk: int) -> list[int]:
    """Stream rows of everything below a trunk (or any other segment), its own rows included."""
    offsets, parents = meta.segment_offsets.tolist(), meta.segment_parents.tolist()
    rows = []
    for segment in range(len(parents)):
        ancestor = segment
        while ancestor >= 0 and ancestor != trunk:
            ancestor = parents[ancestor]
        if ancestor == trunk:
            rows += range(offsets[segment], offsets[segment + 1])
    return rows


def leaf_segments(meta: ForkMetadata) -> list[int]:
    """Segments that hold rows and have no children."""
    offsets, parents = meta.segment_offsets.tolist(), meta.segment_parents.tolist()
    return [s for s in range(len(parents)) if offsets[s] < offsets[s + 1] and s not in parents]


def naive_attention(
    query_QNH: Tensor,
    key_TMH: Tensor,
    value_TMH: Tensor,
    meta: ForkMetadata,
    *,
    scale: float,
    window: int = 0,
    query_rows: Tensor | None = None,
    prefixes: Prefixes | None = None,
) -> Tensor:
    """``[Q, N, H]``: softmax over the explicit path of each row, behind the cached keys and values of its trunk."""
    offsets, parents = meta.segment_offsets.tolist(), meta.segment_parents.tolist()
    paths = [rows_of_path(meta, s) for s in range(len(parents))]
    rows = list(range(query_QNH.shape[0])) if query_rows is None else query_rows.tolist()
    outs = []
    for i, row in enumerate(rows):
        owners = [s for s in range(len(parents)) if offsets[s] <= row < offsets[s + 1]]
        if not owners:  # padding
            outs.append(torch.zeros_like(query_QNH[i]))
            continue
        (owner,) = owners
        seen = paths[owner][: paths[owner].index(row) + 1]
        key, value = key_TMH[seen], value_TMH[seen]
        root = owner
        while parents[root] >= 0:
            root = parents[root]
        if prefixes is not None and root in prefixes:
            key, value = torch.cat([prefixes[root][0], key]), torch.cat([prefixes[root][1], value])
        outs.append(_attend_one(query_QNH[i], key[-window:], value[-window:], scale))  # [-0:] is everything
    return torch.stack(outs)


def _attend_one(query_NH: Tensor, key_LMH: Tensor, value_LMH: Tensor, scale: float) -> Tensor:
    num_heads, num_kv_heads = query_NH.shape[0], key_LMH.shape[1]
    head_of = [n * num_kv_heads // num_heads for n in range(num_heads)]
    scores_LN = scale * (key_LMH[:, head_of] * query_NH).sum(-1)
    weights_LN = torch.exp(scores_LN - scores_LN.max(0).values)
    return (weights_LN[:, :, None] * value_LMH[:, head_of]).sum(0) / weights_LN.sum(0)[:, None]


class DeltaInputs(NamedTuple):
    """The differentiable inputs of the forked gated delta rule, in the op's order."""

    qkv_TC: Tensor
    a_TN: Tensor
    b_TN: Tensor
    conv_weight_CW: Tensor
    A_log_N: Tensor
    dt_bias_N: Tensor

    def rows(self, rows: Sequence[int] | slice) -> DeltaInputs:
        """The same parameters over some of the rows."""
        return self._replace(qkv_TC=self.qkv_TC[rows], a_TN=self.a_TN[rows], b_TN=self.b_TN[rows])


class DeltaRun(NamedTuple):
    """Outputs ``[L, N, V]`` of a path, and after each of its tokens the state [N, K, V] and last rows [W - 1, C]."""

    out_LNV: Tensor
    states: list[Tensor]
    windows: list[Tensor]


def naive_delta_path(
    inputs: DeltaInputs,
    *,
    num_key_heads: int,
    key_dim: int,
    beta_scale: float = 1.0,
    state_NKV: Tensor | None = None,
    window_WC: Tensor | None = None,
) -> DeltaRun:
    """One isolated path, token by token, from the zero state or the one given (with the rows before the path)."""
    qkv_LC, a_LN, b_LN, conv_weight_CW, A_log_N, dt_bias_N = inputs
    num_heads, width = A_log_N.shape[0], conv_weight_CW.shape[1]
    key_size = num_key_heads * key_dim
    value_dim = (qkv_LC.shape[1] - 2 * key_size) // num_heads
    state = qkv_LC.new_zeros(num_heads, key_dim, value_dim) if state_NKV is None else state_NKV
    history = list(qkv_LC.new_zeros(width - 1, qkv_LC.shape[1]) if window_WC is None else window_WC)
    head_of = [h * num_key_heads // num_heads for h in range(num_heads)]
    outs, states, windows = [], [], []
    for t in range(qkv_LC.shape[0]):
        history.append(qkv_LC[t])
        x_C = sum(conv_weight_CW[:, w] * row for w, row in enumerate(history))
        x_C = x_C / (1 + torch.exp(-x_C))
        query = _unit(x_C[:key_size].view(num_key_heads, key_dim))[head_of]
        key = _unit(x_C[key_size : 2 * key_size].view(num_key_heads, key_dim))[head_of]
        value = x_C[2 * key_size :].view(num_heads, value_dim)
        decay_N = torch.exp(-torch.exp(A_log_N) * torch.log1p(torch.exp(a_LN[t] + dt_bias_N)))
        beta_N = beta_scale / (1 + torch.exp(-b_LN[t]))
        state = decay_N[:, None, None] * state
        recalled_NV = (key[:, :, None] * state).sum(1)
        state = state + key[:, :, None] * (beta_N[:, None] * (value - recalled_NV))[:, None, :]
        outs.append((query[:, :, None] * state).sum(1) / key_dim**0.5)
        history = history[1:]
        states.append(state)
        windows.append(torch.stack(history) if history else qkv_LC.new_zeros(0, qkv_LC.shape[1]))
    out = torch.stack(outs) if outs else qkv_LC.new_zeros(0, num_heads, value_dim)
    return DeltaRun(out, states, windows)


def naive_gated_delta(inputs: DeltaInputs, meta: ForkMetadata, **options: Any) -> Tensor:
    """``[T, N, V]``: the path of every segment on its own, from its root; padding rows zero."""
    offsets = meta.segment_offsets.tolist()
    outs = []
    for segment in range(len(offsets) - 1):
        if offsets[segment] < offsets[segment + 1]:
            path = rows_of_path(meta, segment)
            own = offsets[segment + 1] - offsets[segment]
            outs.append(naive_delta_path(inputs.rows(path), **options).out_LNV[-own:])
    out = torch.cat(outs)
    return torch.cat([out, out.new_zeros(inputs.qkv_TC.shape[0] - len(out), *out.shape[1:])])


def _unit(x: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest magnitude (at least 1); NaN where either has one."""
    if not expected.numel():
        return 0.0
    difference = (actual.double() - expected.double()).abs().max()
    return (difference / expected.double().abs().max().clamp(min=1)).item()


def same_bits(x: Tensor, y: Tensor) -> bool:
    """Equality to the last bit, NaNs included."""
    ints = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return x.dtype == y.dtype and torch.equal(x.contiguous().view(ints), y.contiguous().view(ints))
