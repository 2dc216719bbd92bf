"""Attention mixers over a forked stream.

Shapes: T stream rows, Q query rows, D hidden size, N query heads, M key/value heads, H head dim.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn

from flide.layers.merge import MergedLinear, merge
from flide.layers.norm import RMSNorm
from flide.layers.rotary import RotaryTables, apply_rotary
from flide.ops.fork_attention import fork_attention, fork_attention_paged
from flide.ops.norm_rotary import norm_rotary
from flide.runtime.metadata import PAGE_SIZE, ForkMetadata


class KeyValue(NamedTuple):
    """Keys and values of all stream rows as a layer wrote them; layers behind it may read them, too.

    Attributes:
        key_TMH, value_TMH: normed, keys rotated.
        pool: the KV pool that holds those of trunks; None when trunks are read from the stream.
    """

    key_TMH: Tensor
    value_TMH: Tensor
    pool: Tensor | None


class ForkAttention(nn.Module):
    """Grouped-query attention in which every branch sees its own trunk and nothing of its siblings.

    Subclasses change projections (:meth:`project`, :meth:`project_key_value`), norms (``q_norm``, ``k_norm``,
    ``v_norm``) and gates (:meth:`forward`); visibility stays in :func:`fork_attend`.

    Args:
        hidden_size: D.
        num_heads, num_kv_heads: N and M; M divides N.
        head_dim: H.
        scale: factor of the scores; None for ``H ** -0.5``.
        window: keys a query sees, itself included; 0 for all.
        value_proj: False where there is no ``v_proj``: values are the projected keys, before norm and rotation.

    Attributes:
        q_norm, k_norm: applied to ``[T, heads, H]`` before rotation; identity unless a subclass sets them.
        v_norm: the same for values.
        query_parts: vectors of size H that ``q_proj`` emits per head.
        kv_pool: ``[pages, 2, M, PAGE_SIZE, H]`` when pools were allocated, else None and trunks are read from the
            stream.
    """

    query_parts = 1
    kv_pool: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        scale: float | None = None,
        window: int = 0,
        value_proj: bool = True,
    ) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim, self.window = num_heads, num_kv_heads, head_dim, window
        self.scale = head_dim**-0.5 if scale is None else scale
        self.q_proj = nn.Linear(hidden_size, num_heads * head_dim * self.query_parts, bias=False)
        self.k_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, num_kv_heads * head_dim, bias=False) if value_proj else None
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=False)
        self.q_norm: nn.Module = nn.Identity()
        self.k_norm: nn.Module = nn.Identity()
        self.v_norm: nn.Module = nn.Identity()
        self.merged: MergedLinear | None = None
        self.register_buffer("kv_pool", None, persistent=False)

    def forward(
        self,
        hidden_states_TD: Tensor,
        rotary: RotaryTables | None,
        meta: ForkMetadata,
        query_rows: Tensor | None = None,
    ) -> Tensor:
        """Mixed rows ``[Q, D]``: all stream rows, or only those named by ``query_rows`` ([Q] int32)."""
        query, key_TMH, value_TMH = self.project(hidden_states_TD, query_rows)
        query_QNH = rearrange(query, "q (n h) -> q n h", h=self.head_dim)
        return self.o_proj(self.attend(query_QNH, key_TMH, value_TMH, rotary, meta, query_rows).flatten(1))

    def project(self, hidden_states_TD: Tensor, query_rows: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """``q_proj`` of the query rows ``[Q, ...]`` and keys and values ``[T, M, H]``, before norm and rotation."""
        if self.merged is not None and query_rows is None:
            query, *key_value = self.merged(hidden_states_TD)
            key_TMH, *value = (rearrange(x, "t (m h) -> t m h", h=self.head_dim) for x in key_value)
            return query, key_TMH, value[0] if value else key_TMH
        return self.q_proj(select_rows(hidden_states_TD, query_rows)), *self.project_key_value(hidden_states_TD)

    def project_key_value(self, hidden_states_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values ``[T, M, H]``, before norm and rotation."""
        key_TMH = rearrange(self.k_proj(hidden_states_TD), "t (m h) -> t m h", h=self.head_dim)
        if self.v_proj is None:
            return key_TMH, key_TMH
        value_TMH = rearrange(self.v_proj(hidden_states_TD), "t (m h) -> t m h", h=self.head_dim)
        return key_TMH, value_TMH

    def merge_projections(self) -> None:
        """One product for queries, keys and values; see ``flide.layers.merge``. A subclass that computes keys or values
        its own way stays unmerged."""
        if type(self).project_key_value is ForkAttention.project_key_value:
            self.merged = merge(*([x] for x in (self.q_proj, self.k_proj, self.v_proj) if x is not None))

    def attend(
        self,
        query_QNH: Tensor,
        key_TMH: Tensor,
        value_TMH: Tensor,
        rotary: RotaryTables | None,
        meta: ForkMetadata,
        query_rows: Tensor | None,
    ) -> Tensor:
        """Norm, rotation and fork attention: ``[Q, N, H]``."""
        return self.attend_to(query_QNH, self.key_value(key_TMH, value_TMH, rotary), rotary, meta, query_rows)

    def key_value(self, key_TMH: Tensor, value_TMH: Tensor, rotary: RotaryTables | None) -> KeyValue:
        """Norm and rotation of the keys and values that :meth:`project` gives."""
        return KeyValue(_norm_and_rotate(self.k_norm, key_TMH, rotary), self.v_norm(value_TMH), self.kv_pool)

    def attend_to(
        self,
        query_QNH: Tensor,
        key_value: KeyValue,
        rotary: RotaryTables | None,
        meta: ForkMetadata,
        query_rows: Tensor | None,
    ) -> Tensor:
        """Norm and rotation of the queries that :meth:`project` gives, and fork attention: ``[Q, N, H]``."""
        query_QNH = _norm_and_rotate(self.q_norm, query_QNH, None if rotary is None else rotary.select(query_rows))
        return fork_attend(query_QNH, key_value, meta, query_rows, scale=self.scale, window=self.window)

    def allocate_pools(self, *, pages: int, kv_pool: Tensor | None = None) -> None:
        """Give the layer a KV pool of ``pages`` pages, in the dtype and on the device of its weights: ``kv_pool``, or
        one of its own."""
        shape = self.kv_pool_shape(pages)
        self.kv_pool = self.k_proj.weight.new_zeros(shape) if kv_pool is None else kv_pool
        assert self.kv_pool.shape == shape

    def kv_pool_shape(self, pages: int) -> tuple[int, ...]:
        return pages, 2, self.num_kv_heads, PAGE_SIZE, self.head_dim


class GatedForkAttention(ForkAttention):
    """Differences from ForkAttention:

    * ``q_proj`` emits, per head, the query and a gate of the same size;
    * the attention output is multiplied by ``sigmoid(gate)`` before ``o_proj``.
    """

    query_parts = 2

    def forward(
        self,
        hidden_states_TD: Tensor,
        rotary: RotaryTables | None,
        meta: ForkMetadata,
        query_rows: Tensor | None = None,
    ) -> Tensor:
        query_gate, key_TMH, value_TMH = self.project(hidden_states_TD, query_rows)
        query_QNH, gate_QNH = rearrange(query_gate, "q (n c h) -> c q n h", c=self.query_parts, h=self.head_dim)
        o_QNH = self.attend(query_QNH, key_TMH, value_TMH, rotary, meta, query_rows) * torch.sigmoid(gate_QNH)
        return self.o_proj(o_QNH.flatten(1))


class ForkAttentionReader(nn.Module):
    """Attention to the keys and values that another layer wrote.

    Args, as of :class:`ForkAttention`: hidden_size, num_heads, head_dim, scale and window; the last two dims and the
    window are those of the layer that writes.

    Attributes:
        q_norm: applied to ``[Q, N, H]`` before rotation; identity unless a subclass sets it.
    """

    def __init__(
        self, hidden_size: int, num_heads: int, head_dim: int, *, scale: float | None = None, window: int = 0
    ) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.window = num_heads, head_dim, window
        self.scale = head_dim**-0.5 if scale is None else scale
        self.q_proj = nn.Linear(hidden_size, num_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * head_dim, hidden_size, bias=False)
        self.q_norm: nn.Module = nn.Identity()

    def forward(
        self,
        hidden_states_QD: Tensor,
        rotary: RotaryTables | None,
        key_value: KeyValue,
        meta: ForkMetadata,
        query_rows: Tensor | None = None,
    ) -> Tensor:
        """Mixed rows ``[Q, D]``. Hidden states and rotary tables are those of the query rows: of all stream rows, or of
        those named by ``query_rows`` ([Q] int32)."""
        query_QNH = rearrange(self.q_proj(hidden_states_QD), "q (n h) -> q n h", h=self.head_dim)
        query_QNH = _norm_and_rotate(self.q_norm, query_QNH, rotary)
        o_QNH = fork_attend(query_QNH, key_value, meta, query_rows, scale=self.scale, window=self.window, written=True)
        return self.o_proj(o_QNH.flatten(1))


def fork_attend(
    query_QNH: Tensor,
    key_value: KeyValue,
    meta: ForkMetadata,
    query_rows: Tensor | None,
    *,
    scale: float,
    window: int,
    written: bool = False,
) -> Tensor:
    """Fork attention ``[Q, N, H]``, through the pool if there is one; with ``written`` that holds the keys and values
    already."""
    key_TMH, value_TMH, pool = key_value
    if pool is None:
        return fork_attention(
            query_QNH,
            key_TMH,
            value_TMH,
            segment_offsets=meta.segment_offsets,
            segment_parents=meta.segment_parents,
            scale=scale,
            window=window,
            query_rows=query_rows,
        )
    return fork_attention_paged(
        query_QNH,
        key_TMH,
        value_TMH,
        kv_pool=pool,
        segment_offsets=meta.segment_offsets,
        segment_parents=meta.segment_parents,
        segment_starts=meta.segment_starts,
        segment_pages=meta.segment_pages,
        page_table=meta.page_table,
        row_segments=meta.row_segments,
        scale=scale,
        window=window,
        query_rows=query_rows,
        schedule=meta.schedule,
        depth=meta.capacity.depth,
        write=not written,
    )


def _norm_and_rotate(norm: nn.Module, x_TNH: Tensor, tables: RotaryTables | None) -> Tensor:
    """Norm per head, then rotation: one kernel where the norm is a plain RMSNorm that nobody listens to."""
    if tables is None:
        return norm(x_TNH)
    if type(norm) is RMSNorm and norm.weight is not None and not norm._forward_hooks and not norm._forward_pre_hooks:
        return norm_rotary(x_TNH, norm.weight, *tables, eps=norm.eps, offset=norm.offset)
    return apply_rotary(norm(x_TNH), tables)


def select_rows(x_T: Tensor, rows: Tensor | None) -> Tensor:
    """Some rows of ``x`` (``rows``: int32 indices), or all of them for None."""
    return x_T if rows is None else x_T.index_select(0, rows)
