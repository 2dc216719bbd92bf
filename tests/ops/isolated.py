"""Every isolated path on its own, many at a time: exact in float64, or rounded as plain low-precision code rounds.

Independent of the references and the kernels: nothing forks here. Attention is one masked softmax over all rows of a
request; the delta rule runs every path from its root, in the chunked form and with the rounding points of fla and
transformers. In low precision the operands of every product are rounded, products accumulate in float32, and softmax,
gates and recurrent state are float32.

Shapes: Q query rows, T stream rows, S segments, L rows of a path, B paths of one batch, N query or value heads,
E key heads, M key/value heads, R = N / M, H head dim, C conv channels, K key dim, V value dim.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from flide.runtime import ForkMetadata
from flide.runtime.tree import MAX_DEPTH
from tests.ops.naive import DeltaInputs

CHUNK = 64
BATCH = 128  # paths that advance together; bounds memory


def isolated_attention(
    query_QNH: Tensor,
    key_TMH: Tensor,
    value_TMH: Tensor,
    meta: ForkMetadata,
    *,
    scale: float,
    dtype: torch.dtype,
    window: int = 0,
    query_rows: Tensor | None = None,
) -> Tensor:
    """``[Q, N, H]`` in ``dtype``, without cached trunks; rows of padding are zero."""
    segments = meta.row_segments.long()
    time_T = _times(meta)
    rows_Q = torch.arange(query_QNH.shape[0], device=segments.device) if query_rows is None else query_rows.long()
    seen_SS, root_S = _ancestors(meta.segment_parents)
    owner_T = torch.where(segments >= 0, root_S[segments], -1)
    out_QNH = query_QNH.new_zeros(query_QNH.shape, dtype=dtype)
    for request in owner_T.unique().tolist():
        where = (owner_T[rows_Q] == request).nonzero()[:, 0]
        if request < 0 or not len(where):
            continue
        rows, keys = rows_Q[where], (owner_T == request).nonzero()[:, 0]
        visible_QL = seen_SS[segments[rows]][:, segments[keys]] & (keys[None] <= rows[:, None])
        if window:
            visible_QL &= time_T[rows][:, None] - time_T[keys][None] < window
        query = _operand(query_QNH[where], dtype).unflatten(1, (key_TMH.shape[1], -1))
        scores_MRQL = torch.einsum("qmrh,lmh->mrql", query, _operand(key_TMH[keys], dtype)) * scale
        weights_MRQL = scores_MRQL.masked_fill(~visible_QL, float("-inf")).softmax(-1)
        out = torch.einsum("mrql,lmh->qmrh", _operand(weights_MRQL, dtype), _operand(value_TMH[keys], dtype))
        out_QNH[where] = out.flatten(1, 2).to(dtype)
    return out_QNH


def isolated_delta(
    inputs: DeltaInputs, meta: ForkMetadata, *, num_key_heads: int, key_dim: int, dtype: torch.dtype
) -> Tensor:
    """``[T, N, V]`` in ``dtype``, without cached trunks; rows of padding are zero."""
    num_heads = inputs.A_log_N.shape[0]
    value_dim = (inputs.qkv_TC.shape[1] - 2 * num_key_heads * key_dim) // num_heads
    out_TNV = inputs.qkv_TC.new_zeros(inputs.qkv_TC.shape[0], num_heads, value_dim, dtype=dtype)
    offsets = meta.segment_offsets.tolist()
    paths = [(rows, offsets[s + 1] - offsets[s]) for s, rows in enumerate(_paths(meta)) if offsets[s] < offsets[s + 1]]
    by_chunks: dict[int, list[tuple[list[int], int]]] = {}
    for rows, own in paths:
        by_chunks.setdefault(-(-len(rows) // CHUNK), []).append((rows, own))
    for chunks, alike in by_chunks.items():
        for begin in range(0, len(alike), BATCH):
            batch = alike[begin : begin + BATCH]
            # Behind its end a path is padded with row 0: nothing before it looks there.
            index = [rows + [0] * (chunks * CHUNK - len(rows)) for rows, _ in batch]
            index_BL = torch.tensor(index, device=out_TNV.device)
            out_BLNV = _delta_paths(inputs, index_BL, num_key_heads, key_dim, dtype)
            for b, (rows, own) in enumerate(batch):
                out_TNV[rows[-own] : rows[-1] + 1] = out_BLNV[b, len(rows) - own : len(rows)]
    return out_TNV


def _delta_paths(inputs: DeltaInputs, index_BL: Tensor, num_key_heads: int, key_dim: int, dtype: torch.dtype) -> Tensor:
    """``[B, L, N, V]`` of the paths of stream rows ``index_BL``, from the zero state."""
    accumulator = torch.float64 if dtype == torch.float64 else torch.float32
    weight_CW, dt_bias_N, A_log_N = (
        x.to(accumulator) for x in (inputs.conv_weight_CW, inputs.dt_bias_N, inputs.A_log_N)
    )
    num_heads, width, length = A_log_N.shape[0], weight_CW.shape[1], index_BL.shape[1]
    qkv_BLC = F.pad(_operand(inputs.qkv_TC[index_BL], dtype), (0, 0, width - 1, 0))
    taps = (qkv_BLC[:, w : w + length] * weight_CW[:, w] for w in range(width))
    mixed_BLC = F.silu(sum(taps, start=qkv_BLC.new_zeros(())))
    key_size = num_key_heads * key_dim
    query, key, value = _operand(mixed_BLC, dtype).split(
        [key_size, key_size, mixed_BLC.shape[2] - 2 * key_size], dim=-1
    )
    query, key = (
        _operand(_unit(x.unflatten(-1, (num_key_heads, -1))), dtype).repeat_interleave(num_heads // num_key_heads, 2)
        for x in (query, key)
    )
    a, b = (x[index_BL].to(accumulator) for x in (inputs.a_TN, inputs.b_TN))
    log_decay, beta = -A_log_N.exp() * F.softplus(a + dt_bias_N), b.sigmoid()
    # [B, N, chunks, CHUNK, ...]
    query, key, value, log_decay, beta = (
        x.transpose(1, 2).unflatten(2, (-1, CHUNK))
        for x in (query, key, value.unflatten(-1, (num_heads, -1)), log_decay[..., None], beta[..., None])
    )
    decay = log_decay.cumsum(3)
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=decay.device).tril()
    ratio = (decay - decay.transpose(-1, -2)).masked_fill(~lower, float("-inf")).exp()

    weighted_key = _operand(key * beta, dtype)
    triangle = (weighted_key @ key.transpose(-1, -2) * ratio).tril(-1)
    eye = torch.eye(CHUNK, dtype=accumulator, device=decay.device)
    inverse = torch.linalg.solve_triangular(triangle + eye, eye.expand_as(triangle), upper=False, unitriangular=True)
    inverse = _operand(inverse, dtype)
    w = _operand(inverse @ _operand(key * beta * decay.exp(), dtype), dtype)
    u = _operand(inverse @ _operand(value * beta, dtype), dtype)
    scores = _operand(query @ key.transpose(-1, -2) * ratio, dtype)

    state_BNKV = w.new_zeros(*w.shape[:2], key_dim, value.shape[-1])
    outs = []
    for c in range(length // CHUNK):
        G, total = decay[:, :, c], decay[:, :, c, -1:]
        stored_state = _operand(state_BNKV, dtype)
        delta = u[:, :, c] - w[:, :, c] @ stored_state
        out = query[:, :, c] @ stored_state * G.exp() + scores[:, :, c] @ _operand(delta, dtype)
        outs.append(out * key_dim**-0.5)
        write = key[:, :, c].transpose(-1, -2) @ _operand(delta * (total - G).exp(), dtype)
        state_BNKV = state_BNKV * total.exp() + write
    return torch.cat(outs, 2).transpose(1, 2).to(dtype)


def _operand(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounded to ``dtype``, in the dtype products accumulate in."""
    return x.to(dtype) if dtype == torch.float64 else x.to(dtype).float()


def _unit(x: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def _ancestors(parents_S: Tensor) -> tuple[Tensor, Tensor]:
    """``[S, S]`` whether the second segment is the first or an ancestor of it, and the root of each segment."""
    root = torch.arange(len(parents_S), device=parents_S.device)
    seen_SS = torch.eye(len(parents_S), dtype=torch.bool, device=parents_S.device)
    for _ in range(MAX_DEPTH - 1):
        root = torch.where(parents_S[root] >= 0, parents_S[root].long(), root)
        seen_SS[torch.arange(len(root), device=root.device), root] = True
    return seen_SS, root


def _times(meta: ForkMetadata) -> Tensor:
    """``[T]`` rows before each row on its path, counted from the paths themselves."""
    time_T = torch.zeros_like(meta.row_segments)
    for rows in _paths(meta):
        time_T[rows] = torch.arange(len(rows), dtype=time_T.dtype, device=time_T.device)
    return time_T


def _paths(meta: ForkMetadata) -> list[list[int]]:
    """Stream rows from the root of each segment's path to the segment's end."""
    offsets = meta.segment_offsets.tolist()
    paths: list[list[int]] = []
    for segment, parent in enumerate(meta.segment_parents.tolist()):
        before = paths[parent] if parent >= 0 else []
        paths.append([*before, *range(offsets[segment], offsets[segment + 1])])
    return paths
