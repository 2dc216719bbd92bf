"""Reference of the forked gated delta rule: the oracle of the kernels, the CPU path and the training path.

Shapes: T stream rows, C conv channels, W conv width, E key heads, N value heads, K key dim, V value dim, B segments of
one batch, L rows of one chunk.

Per value head, with key head h // (N / E), state S [K, V] and L2-normalised q, k::

    x_t = silu(sum_w conv_weight[w] * qkv_{t - (W - 1) + w})       history along the path, never along the stream
    g_t = -exp(A_log) * softplus(a_t + dt_bias)        beta_t = beta_scale * sigmoid(b_t)
    S <- exp(g_t) S;   S <- S + k_t (beta_t (v_t - S^T k_t))^T;   o_t = S^T q_t / sqrt(K)

computed in chunks of CHUNK rows that start at each segment's own first row (the UT transform of Yang et al. 2024,
"Gated Delta Networks"): with G the running sum of g and A_ij = beta_i exp(G_i - G_j) k_i.k_j below the diagonal,
``(I + A) D = beta (V - exp(G) K S)``, ``O = exp(G) Q S + tril(exp(G_i - G_j) Q K^T) D`` and
``S' = exp(G_L) S + sum_j exp(G_L - G_j) k_j d_j^T``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from flide.ops.segments import Segment, read_segments, rows_before

CHUNK = 64
BATCH = 32  # segments that advance together; bounds memory
L2_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class DeltaCache:
    """Checkpoint pools of one layer and what this round reads and writes there.

    Attributes:
        state_pool: ``[slots, N, K, V]`` float32 or bfloat16; slot 0 is the zero state.
        conv_pool: ``[slots, W - 1, C]`` the last pre-convolution rows before the checkpoint, oldest first.
        initial_slots: ``[S]`` slot each trunk starts from.
        save_rows, save_slots: ``[S, saves]`` stream row after which a state is kept, and where; -1 none.
    """

    state_pool: Tensor
    conv_pool: Tensor
    initial_slots: Tensor
    save_rows: Tensor
    save_slots: Tensor


def fork_gated_delta_reference(
    qkv_TC: Tensor,
    a_TN: Tensor,
    b_TN: Tensor,
    conv_weight_CW: Tensor,
    A_log_N: Tensor,
    dt_bias_N: Tensor,
    segment_offsets: Tensor,
    segment_parents: Tensor,
    *,
    num_key_heads: int,
    key_dim: int,
    beta_scale: float = 1.0,
    cache: DeltaCache | None = None,
) -> Tensor:
    """Outputs ``[T, N, V]`` of every row, in the dtype of ``qkv_TC``; padding rows are zero.

    Computes in float32 (float64 for float64 inputs). See the ops in ``fork_gated_delta/__init__.py`` for the arguments.
    """
    segments = read_segments(segment_offsets, segment_parents)
    initial_slots = [0] * len(segments) if cache is None else cache.initial_slots.tolist()
    history = _ConvHistory(segments, initial_slots, qkv_TC, conv_weight_CW.shape[1], cache)

    num_heads = A_log_N.shape[0]
    mixed_TC = F.silu(history.convolve(_upcast(conv_weight_CW)))
    key_size = num_key_heads * key_dim
    query, key, value = mixed_TC.split([key_size, key_size, mixed_TC.shape[1] - 2 * key_size], -1)
    group = num_heads // num_key_heads
    query_TNK, key_TNK = (
        _l2_normalise(x.unflatten(-1, (num_key_heads, key_dim))).repeat_interleave(group, 1) for x in (query, key)
    )
    rows = _Rows(
        query=query_TNK * key_dim**-0.5,
        key=key_TNK,
        value=value.unflatten(-1, (num_heads, -1)),
        log_decay=-_upcast(A_log_N).exp() * F.softplus(_upcast(a_TN) + _upcast(dt_bias_N)),
        beta=beta_scale * torch.sigmoid(_upcast(b_TN)),
    )
    out_TNV = rows.value.new_zeros(rows.value.shape)
    zero_NKV = rows.key.new_zeros(num_heads, key_dim, rows.value.shape[-1])
    parents_of_someone = {s.path[-2] for s in segments if s.level}
    final_NKV: dict[int, Tensor] = {}
    out_rows, outs = [], []
    for level in range(1 + max((s.level for s in segments), default=0)):
        active = [i for i, s in enumerate(segments) if s.level == level and (len(s) or i in parents_of_someone)]
        for batch in _batches(active, segments):
            states = []
            for i in batch:
                if level:
                    states.append(final_NKV[segments[i].path[-2]])
                elif cache is None or initial_slots[i] == 0:
                    states.append(zero_NKV)
                else:
                    states.append(cache.state_pool[initial_slots[i]].to(zero_NKV.dtype))
            state_BNKV = torch.stack(states)
            for begin in range(0, max(len(segments[i]) for i in batch), CHUNK):
                going = [k for k, i in enumerate(batch) if len(segments[i]) > begin]
                spans = [(segments[batch[k]].begin + begin, segments[batch[k]].end) for k in going]
                chunk = rows.chunk(spans)
                delta_BNLV, o_BNLV = chunk.advance(state_BNKV[going])
                if cache is not None and level == 0:
                    _save(cache, chunk, delta_BNLV, state_BNKV, batch, going, history)
                state_BNKV = state_BNKV.index_copy(
                    0,
                    torch.tensor(going, device=state_BNKV.device),
                    chunk.state_after(state_BNKV[going], delta_BNLV, chunk.lengths),
                )
                for k, (first, _) in enumerate(spans):
                    n = chunk.lengths[k]
                    out_rows.append(torch.arange(first, first + n))
                    outs.append(o_BNLV[k, :, :n].transpose(0, 1))
            final_NKV |= {i: state_BNKV[k] for k, i in enumerate(batch) if i in parents_of_someone}
    if outs:
        out_TNV = out_TNV.index_copy(0, torch.cat(out_rows).to(out_TNV.device), torch.cat(outs))
    return out_TNV.to(qkv_TC.dtype)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Per-row inputs of the delta rule: query, key [T, N, K], value [T, N, V], log_decay, beta [T, N]."""

    query: Tensor
    key: Tensor
    value: Tensor
    log_decay: Tensor
    beta: Tensor

    def chunk(self, spans: list[tuple[int, int]]) -> _Chunk:
        """Up to CHUNK rows of each span, padded to the longest with inert rows (zero key, beta and log decay)."""
        lengths = [min(CHUNK, end - begin) for begin, end in spans]

        def gather(x_T: Tensor) -> Tensor:
            parts = [x_T[begin : begin + n] for (begin, _), n in zip(spans, lengths, strict=True)]
            return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True).transpose(1, 2)

        return _Chunk(
            gather(self.query),
            gather(self.key),
            gather(self.value),
            gather(self.log_decay).cumsum(-1),
            gather(self.beta),
            [begin for begin, _ in spans],
            lengths,
        )


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A chunk of several segments: query, key [B, N, L, K], value [B, N, L, V], decay (running sum), beta [B, N, L]."""

    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor
    beta: Tensor
    begins: list[int]
    lengths: list[int]

    def advance(self, state_BNKV: Tensor) -> tuple[Tensor, Tensor]:
        """(delta_BNLV, o_BNLV): the corrected values each row writes and the outputs."""
        size = self.decay.shape[-1]
        lower = torch.ones(size, size, dtype=torch.bool, device=self.decay.device).tril()
        log_ratio_BNLL = (self.decay[..., :, None] - self.decay[..., None, :]).masked_fill(~lower, float("-inf"))
        ratio_BNLL = log_ratio_BNLL.exp()
        key_T = self.key.transpose(-1, -2)
        strictly_lower = (self.beta[..., None] * ratio_BNLL * (self.key @ key_T)).tril(-1)
        from_state = self.decay.exp()[..., None] * (self.key @ state_BNKV)
        delta = torch.linalg.solve_triangular(
            strictly_lower, self.beta[..., None] * (self.value - from_state), upper=False, unitriangular=True
        )
        out = self.decay.exp()[..., None] * (self.query @ state_BNKV) + (ratio_BNLL * (self.query @ key_T)) @ delta
        return delta, out

    def state_after(self, state_BNKV: Tensor, delta_BNLV: Tensor, lengths: list[int]) -> Tensor:
        """The state after the first ``lengths[b]`` rows of each segment's chunk."""
        last_BN11 = torch.stack([self.decay[b, :, n - 1] for b, n in enumerate(lengths)])[..., None, None]
        weight_BNL1 = (last_BN11[..., 0] - self.decay).exp()[..., None]
        inside = torch.arange(self.decay.shape[-1]) < torch.tensor(lengths)[:, None]
        weight_BNL1 = weight_BNL1.where(inside[:, None, :, None].to(weight_BNL1.device), 0)
        return last_BN11.exp() * state_BNKV + (self.key * weight_BNL1).transpose(-1, -2) @ delta_BNLV


class _ConvHistory:
    """The short causal convolution, whose history follows the path: own segment, ancestors, checkpoint, zeros."""

    def __init__(
        self, segments: list[Segment], slots: list[int], qkv_TC: Tensor, width: int, cache: DeltaCache | None
    ) -> None:
        self.segments, self.slots, self.width, self.cache = segments, slots, width, cache
        self.qkv_TC = _upcast(qkv_TC)
        used = sorted({s for s in slots if s}) if cache is not None else []
        self.window_of_slot = {slot: k for k, slot in enumerate(used)}
        tables = [self.qkv_TC, self.qkv_TC.new_zeros(1, qkv_TC.shape[1])]
        if cache is not None and used:
            tables.append(cache.conv_pool[used].to(self.qkv_TC.dtype).flatten(0, 1))
        self.table_XC = torch.cat(tables)  # stream rows, then the zero row, then the used checkpoints' windows

    def rows_before(self, index: int, count: int) -> list[int]:
        """Table rows of the ``count`` tokens before segment ``index``, nearest first."""
        num_rows = self.qkv_TC.shape[0]
        rows = rows_before(self.segments, index, count)
        slot = self.slots[self.segments[index].root]
        missing = count - len(rows)
        if slot and missing:
            window = num_rows + 1 + self.window_of_slot[slot] * (self.width - 1)
            rows += [window + self.width - 2 - k for k in range(missing)]
        return rows + [num_rows] * (count - len(rows))

    def convolve(self, weight_CW: Tensor) -> Tensor:
        out_TC = self.qkv_TC * weight_CW[:, -1]
        history = [self.rows_before(i, self.width - 1) if len(s) else [] for i, s in enumerate(self.segments)]
        for lag in range(1, self.width):
            source_T = torch.arange(self.qkv_TC.shape[0]) - lag
            for i, s in enumerate(self.segments):
                for k in range(min(lag, len(s))):
                    source_T[s.begin + k] = history[i][lag - 1 - k]
            source_T.clamp_(min=0)  # padding rows
            out_TC = out_TC + self.table_XC[source_T.to(out_TC.device)] * weight_CW[:, self.width - 1 - lag]
        return out_TC

    def window_after(self, index: int, row: int) -> Tensor:
        """``[W - 1, C]`` rows ending with stream row ``row`` of segment ``index``, oldest first."""
        begin = self.segments[index].begin
        inside = list(range(row, max(begin, row - self.width + 2) - 1, -1))
        rows = inside + self.rows_before(index, self.width - 1 - len(inside))
        return self.table_XC[torch.tensor(rows[::-1], device=self.table_XC.device)]


def _save(
    cache: DeltaCache,
    chunk: _Chunk,
    delta_BNLV: Tensor,
    state_BNKV: Tensor,
    batch: list[int],
    going: list[int],
    history: _ConvHistory,
) -> None:
    """Write the checkpoints whose row lies in this chunk."""
    for b, k in enumerate(going):
        segment = batch[k]
        for row, slot in zip(cache.save_rows[segment].tolist(), cache.save_slots[segment].tolist(), strict=True):
            count = row - chunk.begins[b] + 1
            if slot >= 0 and 0 < count <= chunk.lengths[b]:
                lengths = [count if j == b else n for j, n in enumerate(chunk.lengths)]
                after = chunk.state_after(state_BNKV[going], delta_BNLV, lengths)
                cache.state_pool[slot] = after[b].to(cache.state_pool.dtype)
                cache.conv_pool[slot] = history.window_after(segment, row).to(cache.conv_pool.dtype)


def _batches(indices: list[int], segments: list[Segment]) -> list[list[int]]:
    """Groups of segments of similar length, so that padding is small."""
    ordered = sorted(indices, key=lambda i: len(segments[i]))
    return [ordered[k : k + BATCH] for k in range(0, len(ordered), BATCH)]


def _l2_normalise(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def _upcast(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
