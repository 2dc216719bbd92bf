"""The forked forward pass as padded batches in plain torch, to train a small model from scratch.

The library's ops walk over segments in Python in their references, which is what their gradients run. Here all trunks
of a batch are one padded tensor and all branches another, so that a step is some thousand launches whatever it holds,
and a CUDA graph where shapes repeat. It computes what ``Qwen35ForDecision`` computes, with its modules and weights
(``tests/test_demo.py`` compares). Padding follows a row's tokens and is inert: its keys are invisible, its gates and
writes zero.

Shapes: R rows (trunks), P trunk length, Q questions (branches), L branch length, D hidden size, N heads, C chunks of
64, K key dim, V value dim, H head dim, O options.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from flide.layers import ForkGatedDeltaNet, RotaryEmbedding
from flide.layers.rotary import apply_rotary
from flide.models import Qwen35ForDecision
from flide.models.qwen3_5 import Qwen35Attention
from scripts.demo.samples import Sample

CHUNK = 64
L2_EPS = 1e-6
IGNORED = -100


class BatchShape(NamedTuple):
    """R, P, Q, L and O of a batch."""

    rows: int
    trunk: int
    questions: int
    branch: int
    options: int

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> BatchShape:
        """The smallest one in whole chunks."""
        return cls(
            len(samples),
            _whole_chunks(max(len(sample.trunk) for sample in samples)),
            sum(len(sample.branches) for sample in samples),
            _whole_chunks(max(len(branch) for sample in samples for branch in sample.branches)),
            max(len(target) for sample in samples for target in sample.targets),
        )


@dataclass(frozen=True, slots=True)
class PaddedBatch:
    """Samples side by side.

    Attributes:
        trunks_RP, branches_QL: token ids, in whole chunks; padding is 0.
        trunk_lengths_R, branch_lengths_Q, owner_Q: lengths, and the trunk of each branch.
        is_option_QO, targets_QO: as in ``flide.train.batches.Batch``.
        option_ends_QO: the branch row where each option's line ends; 0 where there is none.
    """

    trunks_RP: Tensor
    trunk_lengths_R: Tensor
    branches_QL: Tensor
    branch_lengths_Q: Tensor
    owner_Q: Tensor
    is_option_QO: Tensor
    targets_QO: Tensor
    option_ends_QO: Tensor

    @classmethod
    def of(cls, samples: Sequence[Sample], shape: BatchShape | None = None) -> PaddedBatch:
        """``shape``: at least that of the samples. Rows and questions that nobody asked have one token and one right
        option, so that they cost no loss."""
        shape = shape or BatchShape.of(samples)
        branches = [branch for sample in samples for branch in sample.branches]
        targets = [target for sample in samples for target in sample.targets]
        ends = [these for sample in samples for these in sample.option_ends]
        owners = [i for i, sample in enumerate(samples) for _ in sample.branches]
        unasked = shape.questions - len(branches)
        targets += [(1.0,)] * unasked
        ends += [[0]] * unasked
        lengths = [len(sample.trunk) for sample in samples] + [1] * (shape.rows - len(samples))
        width = shape.options
        return cls(
            trunks_RP=_padded([sample.trunk for sample in samples], shape.rows, shape.trunk),
            trunk_lengths_R=torch.tensor(lengths),
            branches_QL=_padded(branches, shape.questions, shape.branch),
            branch_lengths_Q=torch.tensor([len(branch) for branch in branches] + [1] * unasked),
            owner_Q=torch.tensor(owners + [0] * unasked),
            is_option_QO=torch.tensor([[o < len(target) for o in range(width)] for target in targets]),
            targets_QO=torch.tensor([[*target, *[0.0] * (width - len(target))] for target in targets]),
            option_ends_QO=torch.tensor([[*these, *[0] * (width - len(these))] for these in ends]),
        )

    def to(self, device: torch.device) -> PaddedBatch:
        fields = {name: getattr(self, name) for name in self.__slots__}
        if device.type == "cuda":
            fields = {name: x.pin_memory() for name, x in fields.items()}
        return PaddedBatch(**{name: x.to(device, non_blocking=True) for name, x in fields.items()})

    def copy_(self, other: PaddedBatch) -> None:
        """Overwrite this batch with another one of its shape."""
        for name in self.__slots__:
            getattr(self, name).copy_(getattr(other, name), non_blocking=True)


class Hidden(NamedTuple):
    """Hidden states of every row.

    Attributes:
        trunks, branches: final and normed, ``[R, P, D]`` and ``[Q, L, D]``.
        early: of the branches before the last layer, which is where the last rows look for the right option.
    """

    trunks: Tensor
    branches: Tensor
    early: Tensor


def forward(model: Qwen35ForDecision, batch: PaddedBatch) -> Hidden:
    """All hidden states of a batch. The model is one without pools and merged projections."""
    parts = _Parts.of(batch)
    trunks, branches = model.model.embed_tokens(batch.trunks_RP), model.model.embed_tokens(batch.branches_QL)
    rotary = model.model.rotary
    early = branches
    for layer in model.model.layers:
        early = branches
        mix = _attention if layer.layer_type == "full_attention" else _delta_net
        mixer = layer.self_attn if layer.layer_type == "full_attention" else layer.linear_attn
        mixed = mix(mixer, layer.input_layernorm(trunks), layer.input_layernorm(branches), parts, rotary)
        trunks, branches = trunks + mixed[0], branches + mixed[1]
        trunks = trunks + layer.mlp(layer.post_attention_layernorm(trunks))
        branches = branches + layer.mlp(layer.post_attention_layernorm(branches))
    return Hidden(model.model.norm(trunks), model.model.norm(branches), early)


def option_logits(model: Qwen35ForDecision, hidden: Hidden, batch: PaddedBatch, label_ids: Tensor) -> Tensor:
    """``[Q, O]`` float32 logits of the options' letters at each branch's last row; unused places are -inf."""
    at = torch.arange(len(batch.owner_Q), device=hidden.branches.device)
    last_QD = hidden.branches[at, batch.branch_lengths_Q - 1]
    with torch.autocast(last_QD.device.type, enabled=False):
        logits_QO = last_QD.float() @ model.lm_head.weight[label_ids[: batch.targets_QO.shape[1]]].float().T
    return logits_QO.masked_fill(~batch.is_option_QO, float("-inf"))


def option_row_logits(probe: nn.Linear, hidden: Hidden, batch: PaddedBatch) -> Tensor:
    """``[Q, O]`` float32 scores of the options, read where each one's line ends: an auxiliary task for training.

    Finding the right option and naming its letter are two steps; this one asks for the first alone.
    """
    at = torch.arange(len(batch.owner_Q), device=hidden.early.device)[:, None]
    rows_QOD = hidden.early[at, batch.option_ends_QO]
    with torch.autocast(rows_QOD.device.type, enabled=False):
        rows_QOD = F.rms_norm(rows_QOD.float(), rows_QOD.shape[-1:])
        scores_QO = probe(rows_QOD)[..., 0]
    return scores_QO.masked_fill(~batch.is_option_QO, float("-inf"))


def next_token_loss(model: Qwen35ForDecision, hidden: Hidden, batch: PaddedBatch) -> Tensor:
    """Mean cross entropy of the next token of the trunks: an auxiliary loss that teaches the words."""
    inside_RP = torch.arange(1, batch.trunks_RP.shape[1], device=hidden.trunks.device) < batch.trunk_lengths_R[:, None]
    # Not by a mask as an index, for whose size the host would wait.
    following_RP = batch.trunks_RP[:, 1:].masked_fill(~inside_RP, IGNORED)
    logits = model.lm_head(hidden.trunks[:, :-1]).float()
    return F.cross_entropy(logits.flatten(0, 1), following_RP.flatten(), ignore_index=IGNORED)


@dataclass(frozen=True, slots=True)
class _Parts:
    """Which places hold tokens ``[R, P]`` and ``[Q, L]``, their positions, what a branch row sees ``[Q, 1, L, P + L]``,
    and the batch."""

    batch: PaddedBatch
    inside_RP: Tensor
    inside_QL: Tensor
    positions_QL: Tensor
    visible_Q1LX: Tensor

    @classmethod
    def of(cls, batch: PaddedBatch) -> _Parts:
        device, (_, p), (_, size) = batch.trunks_RP.device, batch.trunks_RP.shape, batch.branches_QL.shape
        inside_RP = torch.arange(p, device=device) < batch.trunk_lengths_R[:, None]
        inside_QL = torch.arange(size, device=device) < batch.branch_lengths_Q[:, None]
        causal_LL = torch.ones(size, size, dtype=torch.bool, device=device).tril()
        count = len(batch.owner_Q)
        visible = torch.cat(
            [inside_RP[batch.owner_Q][:, None].expand(count, size, p), causal_LL.expand(count, size, size)], -1
        )
        positions_QL = batch.trunk_lengths_R[batch.owner_Q][:, None] + torch.arange(size, device=device)
        return cls(batch, inside_RP, inside_QL, positions_QL, visible[:, None])


def _attention(
    mixer: Qwen35Attention, trunks_RPD: Tensor, branches_QLD: Tensor, parts: _Parts, rotary: RotaryEmbedding
) -> tuple[Tensor, Tensor]:
    positions_RP = torch.arange(trunks_RPD.shape[1], device=trunks_RPD.device).expand(trunks_RPD.shape[:2])
    query, gate, key, value = _project(mixer, trunks_RPD, positions_RP, rotary)
    groups = mixer.num_heads // mixer.num_kv_heads
    key_all, value_all = (x.repeat_interleave(groups, 1) for x in (key, value))
    trunk_o = F.scaled_dot_product_attention(query, key_all, value_all, is_causal=True, scale=mixer.scale)
    trunk_out = _close(mixer, trunk_o, gate)

    query, gate, own_key, own_value = _project(mixer, branches_QLD, parts.positions_QL, rotary)
    owner_Q = parts.batch.owner_Q
    key_all = torch.cat([key[owner_Q], own_key], 2).repeat_interleave(groups, 1)
    value_all = torch.cat([value[owner_Q], own_value], 2).repeat_interleave(groups, 1)
    o = F.scaled_dot_product_attention(query, key_all, value_all, attn_mask=parts.visible_Q1LX, scale=mixer.scale)
    return trunk_out, _close(mixer, o, gate)


def _project(
    mixer: Qwen35Attention, x_BTD: Tensor, positions_BT: Tensor, rotary: RotaryEmbedding
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query and gate ``[B, N, T, H]``, key and value ``[B, M, T, H]``, rotated."""
    batch, length, _ = x_BTD.shape
    tables = rotary(positions_BT.flatten().expand(3, -1))
    query_gate = mixer.q_proj(x_BTD).view(batch * length, mixer.num_heads, 2, mixer.head_dim)
    query, gate = query_gate.unbind(2)
    key = mixer.k_proj(x_BTD).view(batch * length, mixer.num_kv_heads, mixer.head_dim)
    value = mixer.v_proj(x_BTD).view(batch, length, mixer.num_kv_heads, mixer.head_dim)
    query, key = apply_rotary(mixer.q_norm(query), tables), apply_rotary(mixer.k_norm(key), tables)
    query, gate, key = (x.view(batch, length, *x.shape[1:]).transpose(1, 2) for x in (query, gate, key))
    return query, gate, key, value.transpose(1, 2)


def _close(mixer: Qwen35Attention, o_BNTH: Tensor, gate_BNTH: Tensor) -> Tensor:
    out: Tensor = mixer.o_proj((o_BNTH * torch.sigmoid(gate_BNTH)).transpose(1, 2).flatten(2))
    return out


def _delta_net(
    mixer: ForkGatedDeltaNet, trunks_RPD: Tensor, branches_QLD: Tensor, parts: _Parts, rotary: RotaryEmbedding
) -> tuple[Tensor, Tensor]:
    lengths_R, owner_Q = parts.batch.trunk_lengths_R, parts.batch.owner_Q
    width = mixer.conv1d.weight.shape[-1]
    qkv_RPC = mixer.in_proj_qkv(trunks_RPD)
    # With width - 1 zero rows in front, a trunk's last rows begin at its length.
    history_RXC = F.pad(qkv_RPC, (0, 0, width - 1, 0))
    last = lengths_R[:, None] + torch.arange(width - 1, device=lengths_R.device)
    window_RWC = history_RXC[torch.arange(len(lengths_R), device=last.device)[:, None], last]
    trunk_o, states = _rule(mixer, history_RXC, trunks_RPD, parts.inside_RP, None)

    history_QXC = torch.cat([window_RWC[owner_Q], mixer.in_proj_qkv(branches_QLD)], 1)
    branch_o, _ = _rule(mixer, history_QXC, branches_QLD, parts.inside_QL, states[owner_Q])
    return tuple(
        mixer.out_proj(mixer.norm(o, mixer.in_proj_z(x).unflatten(-1, (mixer.num_value_heads, -1))).flatten(2))
        for o, x in ((trunk_o, trunks_RPD), (branch_o, branches_QLD))
    )


def _rule(
    mixer: ForkGatedDeltaNet, history_BXC: Tensor, x_BTD: Tensor, inside_BT: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Convolution, gates and delta rule: outputs ``[B, T, N, V]`` and the states after the last token. Float32."""
    length = x_BTD.shape[1]
    count = _num_chunks(length)
    mixed = _mix(mixer, history_BXC, x_BTD, inside_BT)
    with torch.autocast(x_BTD.device.type, enabled=False):
        # [B, T, N, ...] -> [B, N, C, T / C, ...]
        parts = _prepare(*(x.unflatten(1, (count, length // count)).movedim(3, 1) for x in mixed))
        solved = _Inverse.apply(parts.strictly_lower) @ parts.right
        return _scan(parts, solved, state)


def _mix(
    mixer: ForkGatedDeltaNet, history_BXC: Tensor, x_BTD: Tensor, inside_BT: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Query, key and value ``[B, T, N, ...]`` after the convolution, log decay and beta ``[B, T, N]``: float32."""
    length, weight_CW = x_BTD.shape[1], mixer.conv1d.weight.squeeze(1)
    # Four products: what libraries have for convolutions channel by channel is slow backwards, in bfloat16 most of all.
    mixed_BTC = F.silu(sum(history_BXC[:, w : w + length] * weight_CW[:, w] for w in range(weight_CW.shape[1])))
    a, b = mixer.in_proj_a(x_BTD).float(), mixer.in_proj_b(x_BTD).float()
    with torch.autocast(x_BTD.device.type, enabled=False):
        size = mixer.num_key_heads * mixer.key_dim
        query, key, value = mixed_BTC.float().split([size, size, mixed_BTC.shape[-1] - 2 * size], -1)
        group = mixer.num_value_heads // mixer.num_key_heads

        def heads(x: Tensor) -> Tensor:
            x = x.unflatten(-1, (-1, mixer.key_dim))
            return (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)).repeat_interleave(group, 2)

        inside = inside_BT[..., None].float()
        log_decay = -mixer.A_log.float().exp() * F.softplus(a + mixer.dt_bias.float()) * inside
        beta = mixer.beta_scale * torch.sigmoid(b) * inside
        value = value.unflatten(-1, (mixer.num_value_heads, -1))
        return heads(query) * mixer.key_dim**-0.5, heads(key), value, log_decay, beta


class ChunkParts(NamedTuple):
    """What the delta rule needs of each chunk beside the state before it, float32: ``[B, N, C, T / C, ...]``.

    With S the state before a chunk and ``(written | erased) = (1 + strictly_lower)^-1 @ right``, what the chunk writes
    is ``delta = written - erased @ S``, its outputs are ``from_state @ S + among @ delta``, and the state after it is
    ``left * S + kept.T @ delta``: the chunked form of ``flide/ops/fork_gated_delta/reference.py``.
    """

    strictly_lower: Tensor
    right: Tensor
    from_state: Tensor
    among: Tensor
    kept: Tensor
    left: Tensor


def _prepare(query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor) -> ChunkParts:
    size = query.shape[-2]
    decay = log_decay.cumsum(-1)
    lower = torch.ones(size, size, dtype=torch.bool, device=query.device).tril()
    ratio = (decay[..., :, None] - decay[..., None, :]).masked_fill(~lower, float("-inf")).exp()
    key_T = key.transpose(-1, -2)
    return ChunkParts(
        strictly_lower=(beta[..., None] * ratio * (key @ key_T)).tril(-1),
        right=beta[..., None] * torch.cat([value, decay.exp()[..., None] * key], -1),
        from_state=decay.exp()[..., None] * query,
        among=ratio * (query @ key_T),
        kept=(decay[..., -1:] - decay).exp()[..., None] * key,
        left=decay[..., -1].exp()[..., None, None],
    )


class _Inverse(torch.autograd.Function):
    """``(1 + strictly_lower)^-1`` of matrices of at most CHUNK rows, by products, since a batch of small triangular
    systems is slow on a GPU. Diagonal blocks of twice the size at a time: where X and Y are the inverses of two
    neighbours and C stands below the first, what stands there in the inverse is ``-Y @ C @ X``."""

    @staticmethod
    def forward(context: Any, strictly_lower: Tensor) -> Tensor:
        rows = torch.arange(strictly_lower.shape[-1], device=strictly_lower.device)
        inverse = (rows[:, None] == rows).to(strictly_lower.dtype).expand_as(strictly_lower)
        for level in range(CHUNK.bit_length() - 1):
            block = rows >> level
            between = (block[:, None] == block + 1) & (block % 2 == 0)
            inverse = inverse - inverse @ (strictly_lower * between) @ inverse
        context.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(context: Any, grad: Tensor) -> Tensor:
        (inverse,) = context.saved_tensors
        transposed = inverse.transpose(-1, -2)
        return -(transposed @ grad @ transposed)


def _scan(parts: ChunkParts, solved: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """Outputs ``[B, T, N, V]`` and the states after the last token, chunk by chunk."""
    key_dim = parts.kept.shape[-1]
    written, erased = solved.split([solved.shape[-1] - key_dim, key_dim], -1)
    if state is None:
        state = solved.new_zeros(*solved.shape[:2], key_dim, written.shape[-1])
    outs = []
    for c in range(solved.shape[2]):
        delta = written[:, :, c] - erased[:, :, c] @ state
        outs.append(parts.from_state[:, :, c] @ state + parts.among[:, :, c] @ delta)
        state = parts.left[:, :, c] * state + parts.kept[:, :, c].transpose(-1, -2) @ delta
    return torch.cat(outs, 2).transpose(1, 2), state


def _num_chunks(length: int) -> int:
    return (length + CHUNK - 1) // CHUNK


def _whole_chunks(length: int) -> int:
    """The length in equal chunks, so that little is padding."""
    count = _num_chunks(length)
    return -(-length // count) * count


def _padded(parts: Sequence[NDArray[np.int16]], count: int, length: int) -> Tensor:
    out = np.zeros((count, length), np.int64)
    for row, part in zip(out, parts, strict=False):
        row[: len(part)] = part
    return torch.from_numpy(out)
