"""Gated DeltaNet mixer over a forked stream.

Shapes: T stream rows, Q query rows, D hidden size, C conv channels, W conv width, N value heads, V value dim.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar, NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn

from flide.layers.attention import select_rows
from flide.layers.merge import MergedLinear, merge, side_by_side
from flide.layers.norm import GatedRMSNorm, KeepFloat32
from flide.layers.rotary import RotaryTables
from flide.ops.fork_gated_delta import fork_gated_delta, fork_gated_delta_cached
from flide.runtime.metadata import ForkMetadata


class DeltaNetNames(NamedTuple):
    """What a checkpoint calls the modules of a Gated DeltaNet. Projection and convolution of q, k and v are one module
    for all three, or three."""

    qkv: tuple[str, ...] = ("in_proj_qkv",)
    z: str = "in_proj_z"
    b: str = "in_proj_b"
    a: str = "in_proj_a"
    conv: tuple[str, ...] = ("conv1d",)
    norm: str = "norm"
    out: str = "out_proj"


class ForkGatedDeltaNet(KeepFloat32):
    """Gated DeltaNet (Yang et al. 2024) in which every branch starts from its trunk's final state.

    A subclass whose checkpoints have other names for the same modules, or separate ones for q, k and v, sets ``names``;
    one with other modules overrides :meth:`build`, and :meth:`projections`, :meth:`conv_weight` or :meth:`output`; one
    that computes its projections in another way overrides :meth:`project`. The recurrence stays in :meth:`delta_rule`.

    Args:
        hidden_size: D.
        num_key_heads, num_value_heads: heads of q, k and of v; the first divides the second.
        key_dim, value_dim: K and V.
        conv_width: W, taps of the short causal convolution.
        eps: of the output norm.
        beta_scale: factor of the write strength ``sigmoid(b)``.

    Attributes:
        names: of the modules.
        key_size, value_size: channels of all heads of q (and k), and of v.
        A_log: ``[N]`` log decay rate, float32 in every dtype of the model.
        state_pool: ``[slots, N, K, V]`` float32, or bfloat16 for checkpoints that are kept so, conv_pool:
            ``[slots, W - 1, C]`` when pools were allocated, else None.
        scratch: ``[parents, N, K, V]`` float32 states that children of one round start from; layers may share it.
    """

    names: ClassVar[DeltaNetNames] = DeltaNetNames()
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
        self.key_size, self.value_size = num_key_heads * key_dim, num_value_heads * value_dim
        self.dt_bias = nn.Parameter(torch.empty(num_value_heads))
        self.A_log = nn.Parameter(torch.empty(num_value_heads))
        self.build(hidden_size, conv_width, eps)
        self.merged: MergedLinear | None = None
        self.register_buffer("state_pool", None, persistent=False)
        self.register_buffer("conv_pool", None, persistent=False)
        self.register_buffer("scratch", None, persistent=False)

    def build(self, hidden_size: int, conv_width: int, eps: float) -> None:
        """Make the modules."""
        names, sizes = self.names, (self.key_size, self.key_size, self.value_size)

        def sizes_of(names: tuple[str, ...]) -> Iterable[tuple[str, int]]:
            return zip(names, sizes if len(names) > 1 else [sum(sizes)], strict=True)

        projected = [*sizes_of(names.qkv), (names.z, self.value_size)]
        projected += [(name, self.num_value_heads) for name in (names.b, names.a)]
        for name, size in projected:
            self.add_module(name, nn.Linear(hidden_size, size, bias=False))
        for name, size in sizes_of(names.conv):
            self.add_module(name, nn.Conv1d(size, size, conv_width, groups=size, bias=False))
        self.add_module(names.norm, GatedRMSNorm(self.value_dim, eps))
        self.add_module(names.out, nn.Linear(self.value_size, hidden_size, bias=False))

    def projections(self) -> tuple[Sequence[nn.Module], ...]:
        """The layers whose outputs, side by side, are ``[q | k | v]``, the output gate z, b, and a."""
        groups = self.names.qkv, (self.names.z,), (self.names.b,), (self.names.a,)
        return tuple([getattr(self, name) for name in group] for group in groups)

    def conv_weight(self) -> Tensor:
        """``[C, W]`` depthwise taps of ``[q | k | v]``, the last one on the current row."""
        weights_CW = [getattr(self, name).weight.squeeze(1) for name in self.names.conv]
        return weights_CW[0] if len(weights_CW) == 1 else torch.cat(weights_CW)

    def output(self, o_QNV: Tensor, z_QNV: Tensor) -> Tensor:
        """``[Q, D]`` of what was read from the states, and the gate."""
        norm, out = getattr(self, self.names.norm), getattr(self, self.names.out)
        return out(norm(o_QNV, z_QNV).flatten(1))

    def forward(
        self,
        hidden_states_TD: Tensor,
        rotary: RotaryTables | None,
        meta: ForkMetadata,
        query_rows: Tensor | None = None,
    ) -> Tensor:
        """Mixed rows ``[Q, D]``: all stream rows, or only those named by ``query_rows`` ([Q] int32). No rotation."""
        qkv_TC, z, b_TN, a_TN = self.project(hidden_states_TD, query_rows)
        o_QNV = select_rows(self.delta_rule(qkv_TC, a_TN, b_TN, meta), query_rows)
        return self.output(o_QNV, rearrange(z, "q (n v) -> q n v", v=self.value_dim))

    def project(self, hidden_states_TD: Tensor, query_rows: Tensor | None) -> tuple[Tensor, ...]:
        """``[q | k | v]`` ``[T, C]`` before the convolution, the gate z ``[Q, N * V]`` of the query rows, and b and a
        ``[T, N]`` before sigmoid and softplus."""
        if self.merged is not None and query_rows is None:
            return self.merged(hidden_states_TD)
        qkv, z, b, a = self.projections()
        qkv_TC = side_by_side(qkv, hidden_states_TD)
        a_TN, b_TN = side_by_side(a, hidden_states_TD), side_by_side(b, hidden_states_TD)
        return qkv_TC, side_by_side(z, select_rows(hidden_states_TD, query_rows)), b_TN, a_TN

    def delta_rule(self, qkv_TC: Tensor, a_TN: Tensor, b_TN: Tensor, meta: ForkMetadata) -> Tensor:
        """Convolution, gates and recurrence: ``[T, N, V]``. "A branch starts from its parent's state" lives here."""
        if self.state_pool is None or self.conv_pool is None or self.scratch is None:
            return fork_gated_delta(
                qkv_TC,
                a_TN,
                b_TN,
                conv_weight_CW=self.conv_weight(),
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
            conv_weight_CW=self.conv_weight(),
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
        self.merged = merge(*self.projections())

    def allocate_pools(
        self,
        *,
        slots: int,
        parents: int,
        scratch: Tensor | None = None,
        state_pool: Tensor | None = None,
        conv_pool: Tensor | None = None,
    ) -> None:
        """Give the layer pools of ``slots`` checkpoints, and scratch for ``parents`` segments with children, on the
        device of its weights: those given, or its own. ``scratch`` of that shape from another layer is shared."""
        states, windows = self.pool_shapes(slots)
        shape = states[1:]
        self.state_pool = self.A_log.new_zeros(states, dtype=torch.float32) if state_pool is None else state_pool
        self.conv_pool = self.conv_weight().new_zeros(windows) if conv_pool is None else conv_pool
        assert (self.state_pool.shape, self.conv_pool.shape) == (states, windows)
        if scratch is None or scratch.shape != (parents, *shape):
            scratch = self.A_log.new_zeros((parents, *shape), dtype=torch.float32)
        self.scratch = scratch

    def pool_shapes(self, slots: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of ``state_pool`` and ``conv_pool``."""
        channels, width = self.conv_weight().shape
        return (slots, self.num_value_heads, self.key_dim, self.value_dim), (slots, width - 1, channels)

    def reset_parameters(self) -> None:
        """Decay rates uniform in (0, 16), as the published models were initialised."""
        with torch.no_grad():
            self.A_log.uniform_(1e-3, 16.0).log_()
            self.dt_bias.fill_(1.0)
