"""Fork attention: causal attention over a tree of shared trunks and private branches.

``o_t = sum_t' softmax(scale * q_t . k_t') v_t'`` over the keys of the query's own path: its segment's rows up to t and
all rows of its ancestors (with a window W > 0, only the last W of them). Example: a trunk of 3 rows, branches of 2 and
1, stream ``[s s s a a b]``; row 4 (second row of branch a) sees rows 0, 1, 2, 3, 4; row 5 sees 0, 1, 2, 5.

Two ops, one meaning. ``flide::fork_attention`` is functional and differentiable and reads trunks from the stream.
``flide::fork_attention_paged`` writes every trunk's new keys and values to a paged pool and reads trunks, cached part
included, from there. This file is torch-only: schema, fake and dispatch.

Shapes: Q query rows, T stream rows, S segments, G pages, N query heads, M key/value heads, H head dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flide.ops.autograd import recompute_gradients
from flide.ops.fork_attention.reference import fork_attention_reference
from flide.ops.fork_schedule.reference import ForkSchedule
from flide.runtime.tree import MAX_DEPTH

_TREE = "Tensor? query_rows, Tensor segment_offsets, Tensor segment_parents"
torch.library.define(
    "flide::fork_attention", f"(Tensor query, Tensor key, Tensor value, {_TREE}, float scale, int window) -> Tensor"
)
torch.library.define(
    "flide::fork_attention_backward",
    f"(Tensor grad, Tensor query, Tensor key, Tensor value, {_TREE}, float scale, int window)"
    " -> (Tensor, Tensor, Tensor)",
)
torch.library.define(
    "flide::fork_attention_paged",
    f"(Tensor query, Tensor key, Tensor value, Tensor(a!) kv_pool, {_TREE}, Tensor segment_starts,"
    " Tensor segment_pages, Tensor page_table, Tensor row_segments, Tensor[] schedule, float scale, int window,"
    " int depth, bool write) -> Tensor",
)


def fork_attention(
    query_QNH: Tensor,
    key_TMH: Tensor,
    value_TMH: Tensor,
    *,
    segment_offsets: Tensor,
    segment_parents: Tensor,
    scale: float,
    window: int = 0,
    query_rows: Tensor | None = None,
) -> Tensor:
    """Attention of a fresh stream (no cached trunks).

    Args:
        query_QNH: ``[Q, N, H]`` queries, rotated and normalised.
        key_TMH, value_TMH: ``[T, M, H]`` of all stream rows; M divides N.
        segment_offsets: ``[S + 1]`` int32 row boundaries.
        segment_parents: ``[S]`` int32, -1 for trunks.
        scale: factor of the scores.
        window: keys a query sees, itself included; 0 for all.
        query_rows: ``[Q]`` int32 stream row of each query; None when queries are all stream rows, in order.

    Returns:
        ``[Q, N, H]`` in the query's dtype, contiguous; rows of padding are zero.
    """
    return torch.ops.flide.fork_attention(
        query_QNH, key_TMH, value_TMH, query_rows, segment_offsets, segment_parents, scale, window
    )


def fork_attention_paged(
    query_QNH: Tensor,
    key_TMH: Tensor,
    value_TMH: Tensor,
    *,
    kv_pool: Tensor,
    segment_offsets: Tensor,
    segment_parents: Tensor,
    segment_starts: Tensor,
    segment_pages: Tensor,
    page_table: Tensor,
    row_segments: Tensor,
    scale: float,
    window: int = 0,
    query_rows: Tensor | None = None,
    schedule: ForkSchedule | None = None,
    depth: int = MAX_DEPTH,
    write: bool = True,
) -> Tensor:
    """Attention whose trunks live in a paged pool; not differentiable.

    Args, beyond those of :func:`fork_attention`:
        kv_pool: ``[pages, 2, M, PAGE_SIZE, H]``, written in place: the new rows of every trunk.
        segment_starts: ``[S]`` int32 tokens before the segment on its path; for a trunk, what its pages already hold.
        segment_pages: ``[S]`` int32 first entry of a trunk in ``page_table``.
        page_table: ``[G]`` int32 page numbers.
        row_segments: ``[T]`` int32 segment of each row, -1 for padding.
        schedule: work lists of the kernels, made for ``group = N / M`` and ``head_dim = H``; needed on CUDA.
        depth: levels of the trees, at most. The kernels make one pass per level; the reference needs no bound.
        write: False where the pool holds the new rows already, because another layer wrote the same keys and values.
    """
    if torch.is_grad_enabled() and any(x.requires_grad for x in (query_QNH, key_TMH, value_TMH)):
        raise RuntimeError("attention through a KV pool has no gradient: train without pools")
    return torch.ops.flide.fork_attention_paged(
        query_QNH,
        key_TMH,
        value_TMH,
        kv_pool,
        query_rows,
        segment_offsets,
        segment_parents,
        segment_starts,
        segment_pages,
        page_table,
        row_segments,
        [] if schedule is None else list(schedule),
        scale,
        window,
        depth,
        write,
    )


HEAD_DIMS = (16, 32, 64, 128, 256, 512)  # of the kernels
FLOAT32_HEAD_DIM = 64  # the largest in float32, whose tiles are twice as large, without matrix instructions


def unsupported(head_dim: int, dtype: torch.dtype) -> str | None:
    """Why the CUDA kernels cannot serve a layer, or None."""
    if head_dim not in HEAD_DIMS:
        return f"fork attention has no CUDA kernel for head_dim {head_dim}; supported: {HEAD_DIMS}"
    if dtype == torch.float32 and head_dim > FLOAT32_HEAD_DIM:
        return (
            f"fork attention has no CUDA kernel for head_dim {head_dim} in float32, only up to {FLOAT32_HEAD_DIM}:"
            ' use dtype="bfloat16", or device="cpu"'
        )
    return None


@torch.library.register_fake("flide::fork_attention")
def _(query: Tensor, *_: Any) -> Tensor:
    return query.new_empty(query.shape)


@torch.library.register_fake("flide::fork_attention_paged")
def _(query: Tensor, *_: Any) -> Tensor:
    return query.new_empty(query.shape)


@torch.library.register_fake("flide::fork_attention_backward")
def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


@torch.library.impl("flide::fork_attention", "CompositeExplicitAutograd")
def _(query, key, value, query_rows, segment_offsets, segment_parents, scale, window):
    return fork_attention_reference(
        query, key, value, query_rows, segment_offsets, segment_parents, scale=scale, window=window
    )


@torch.library.impl("flide::fork_attention_paged", "CompositeExplicitAutograd")
def _(
    query,
    key,
    value,
    kv_pool,
    query_rows,
    segment_offsets,
    segment_parents,
    segment_starts,
    segment_pages,
    page_table,
    row_segments,
    schedule,
    scale,
    window,
    depth,
    write,
):
    return fork_attention_reference(
        query,
        key,
        value,
        query_rows,
        segment_offsets,
        segment_parents,
        scale=scale,
        window=window,
        segment_starts=segment_starts,
        kv_pool=kv_pool,
        segment_pages=segment_pages,
        page_table=page_table,
        write=write,
    )


@torch.library.impl("flide::fork_attention_paged", "CUDA")
def _(
    query,
    key,
    value,
    kv_pool,
    query_rows,
    segment_offsets,
    segment_parents,
    segment_starts,
    segment_pages,
    page_table,
    row_segments,
    schedule,
    scale,
    window,
    depth,
    write,
):
    from flide.ops.fork_attention.triton import fork_attention_triton

    problem = unsupported(query.shape[2], query.dtype)
    if problem:
        raise ValueError(problem)
    return fork_attention_triton(
        query,
        key,
        value,
        kv_pool,
        query_rows,
        row_segments,
        segment_offsets,
        segment_parents,
        segment_starts,
        segment_pages,
        page_table,
        ForkSchedule(*schedule),
        scale=scale,
        depth=depth,
        window=window,
        write=write,
    )


@torch.library.impl("flide::fork_attention_backward", "CompositeExplicitAutograd")
def _(grad, query, key, value, query_rows, segment_offsets, segment_parents, scale, window):
    def forward(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return fork_attention_reference(
            query, key, value, query_rows, segment_offsets, segment_parents, scale=scale, window=window
        )

    return recompute_gradients(forward, (query, key, value), grad)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.scale, ctx.window = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    gradients = torch.ops.flide.fork_attention_backward(grad, *ctx.saved_tensors, ctx.scale, ctx.window)
    return *gradients, None, None, None, None, None


torch.library.register_autograd("flide::fork_attention", _backward, setup_context=_setup_context)
