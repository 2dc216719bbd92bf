"""Gated DeltaNet mixer over a forked stream.

Shapes: T stream rows, Q query rows, D hidden size, C conv channels, W conv width, N value heads, V value dim.
"""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor, nn

from flide.layers.attention import select_rows
from flide.layers.merge import MergedLinear, merge
from flide.layers.norm import GatedRMSNorm, KeepFloat32
from flide.layers.rotary import RotaryTables
from flide.ops.fork_gated_delta import fork_gated_delta, fork_gated_delta_cached
from flide.runtime.metadata import ForkMetadata


class ForkGatedDeltaNet(KeepFloat32):
    """Gated DeltaNet (Yang et al. 2024) in which every branch starts from its trunk's final state.

    Args:
        hidden_size: D.
        num_key_heads, num_value_heads: heads of q, k and of v; the first divides the second.
        key_dim, value_dim: K and V.
        conv_width: W, taps of the short causal convolution.
        eps: of the output norm.
        beta_scale: factor of the write strength ``sigmoid(b)``.

    Attributes:
        A_log: ``[N]`` log decay rate, float32 in every dtype of the model.
        state_pool: ``[slots, N, K, V]`` float32, conv_pool: ``[slots, W - 1, C]`` when pools were allocated, else None.
        scratch: ``[parents, N, K, V]`` float32 states that children of one round start from; layers may share it.
    """

    float32_names = ("A_log", "state_pool", "scratch")
    state_pool: Tensor | None
    conv_pool: Tensor | None
    scratch: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        num_key_heads: int,
        num_value_heads: int,
        key_dim: int,
        value_dim: int,
        *,
        conv_width: int = 4,
        eps: float = 1e-6,
        beta_scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.num_key_heads, self.num_value_heads = num_key_heads, num_value_heads
        self.key_dim, self.value_dim = key_dim, value_dim
        self.beta_scale = beta_scale
        value_size = num_value_heads * value_dim
        channels = 2 * num_key_heads * key_dim + value_size
        self.in_proj_qkv = nn.Linear(hidden_size, channels, bias=False)
        self.in_proj_z = nn.Linear(hidden_size, value_size, bias=False)
        self.in_proj_b = nn.Linear(hidden_size, num_value_heads, bias=False)
        self.in_proj_a = nn.Linear(hidden_size, num_value_heads, bias=False)
        self.conv1d = nn.Conv1d(channels, channels, conv_width, groups=channels, bias=False)
        self.dt_bias = nn.Parameter(torch.empty(num_value_heads))
        self.A_log = nn.Parameter(torch.empty(num_value_heads))
        self.norm = GatedRMSNorm(value_dim, eps)
        self.out_proj = nn.Linear(value_size, hidden_size, bias=False)
        self.merged: MergedLinear | None = None
        self.register_buffer("state_pool", None, persistent=False)
        self.register_buffer("conv_pool", None, persistent=False)
        self.register_buffer("scratch", None, persistent=False)

    def forward(
        self,
        hidden_states_TD: Tensor,
        rotary: RotaryTables | None,
        meta: ForkMetadata,
        query_rows: Tensor | None = None,
    ) -> Tensor:
        """Mixed rows ``[Q, D]``: all stream rows, or only those named by ``query_rows`` ([Q] int32). No rotation."""
        if self.merged is not None and query_rows is None:
            qkv_TC, z, b_TN, a_TN = self.merged(hidden_states_TD)
        else:
            qkv_TC = self.in_proj_qkv(hidden_states_TD)
            a_TN, b_TN = self.in_proj_a(hidden_states_TD), self.in_proj_b(hidden_states_TD)
            z = self.in_proj_z(select_rows(hidden_states_TD, query_rows))
        o_QNV = select_rows(self.delta_rule(qkv_TC, a_TN, b_TN, meta), query_rows)
        z_QNV = rearrange(z, "q (n v) -> q n v", v=self.value_dim)
        return self.out_proj(self.norm(o_QNV, z_QNV).flatten(1))

    def delta_rule(self, qkv_TC: Tensor, a_TN: Tensor, b_TN: Tensor, meta: ForkMetadata) -> Tensor:
        """Convolution, gates and recurrence: ``[T, N, V]``. "A branch starts from its parent's state" lives here."""
        if self.state_pool is None or self.conv_pool is None or self.scratch is None:
            return fork_gated_delta(
                qkv_TC,
                a_TN,
                b_TN,
                conv_weight_CW=self.conv1d.weight.squeeze(1),
                A_log_N=self.A_log,
                dt_bias_N=self.dt_bias,
                segment_offsets=meta.segment_offsets,
                segment_parents=meta.segment_parents,
                num_key_heads=self.num_key_heads,
                key_dim=self.key_dim,
                beta_scale=self.beta_scale,
            )
        return fork_gated_delta_cached(
            qkv_TC,
            a_TN,
            b_TN,
            conv_weight_CW=self.conv1d.weight.squeeze(1),
            A_log_N=self.A_log,
            dt_bias_N=self.dt_bias,
            state_pool=self.state_pool,
            conv_pool=self.conv_pool,
            scratch=self.scratch,
            segment_offsets=meta.segment_offsets,
            segment_parents=meta.segment_parents,
            initial_slots=meta.initial_slots,
            final_slots=meta.final_slots,
            row_segments=meta.row_segments,
            save_rows=meta.save_rows,
            save_slots=meta.save_slots,
            num_key_heads=self.num_key_heads,
            key_dim=self.key_dim,
            beta_scale=self.beta_scale,
            schedule=meta.schedule,
            depth=meta.capacity.depth,
        )

    def merge_projections(self) -> None:
        """One product for qkv, z, b and a; see ``flide.layers.merge``."""
        self.merged = merge(self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a)

    def allocate_pools(self, *, slots: int, parents: int, scratch: Tensor | None = None) -> None:
        """Give the layer pools of ``slots`` checkpoints and scratch for ``parents`` segments with children, on the
        device of its weights. ``scratch`` of that shape from another layer is shared."""
        channels, _, width = self.conv1d.weight.shape
        shape = (self.num_value_heads, self.key_dim, self.value_dim)
        self.state_pool = self.A_log.new_zeros((slots, *shape), dtype=torch.float32)
        self.conv_pool = self.conv1d.weight.new_zeros(slots, width - 1, channels)
        if scratch is None or scratch.shape != (parents, *shape):
            scratch = self.A_log.new_zeros((parents, *shape), dtype=torch.float32)
        self.scratch = scratch

    def reset_parameters(self) -> None:
        """Decay rates uniform in (0, 16), as the published models were initialised."""
        with torch.no_grad():
            self.A_log.uniform_(1e-3, 16.0).log_()
            self.dt_bias.fill_(1.0)
