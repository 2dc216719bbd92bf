"""Forked gated delta rule: Gated DeltaNet's convolution, gates and recurrence over a tree of segments.

Every segment starts from its parent's final state and its parent's last rows, by index; a trunk starts from the zero
state or from a checkpoint. The formula stands in ``reference.py``. Example: a trunk of 3 rows, branches of 2 and 1,
stream ``[s s s a a b]``; rows 3 and 5 both start from the state after row 2 and both convolve over rows 0, 1, 2.

Two ops, one meaning. ``flide::fork_gated_delta`` is functional and differentiable and starts every trunk from zero.
``flide::fork_gated_delta_cached`` reads initial states from pools and saves checkpoints there. This file is torch-only:
schema, fake and dispatch.

Shapes: T stream rows, S segments, C conv channels, W conv width, N value heads, K key dim, V value dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flide.ops.autograd import recompute_gradients
from flide.ops.fork_gated_delta.reference import DeltaCache, fork_gated_delta_reference
from flide.ops.fork_schedule.reference import ForkSchedule
from flide.runtime.tree import MAX_DEPTH

_INPUTS = "Tensor qkv, Tensor a, Tensor b, Tensor conv_weight, Tensor A_log, Tensor dt_bias"
_TREE = "Tensor segment_offsets, Tensor segment_parents"
_SIZES = "int num_key_heads, int key_dim, float beta_scale"
torch.library.define("flide::fork_gated_delta", f"({_INPUTS}, {_TREE}, {_SIZES}) -> Tensor")
torch.library.define(
    "flide::fork_gated_delta_backward",
    f"(Tensor grad, {_INPUTS}, {_TREE}, {_SIZES}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
torch.library.define(
    "flide::fork_gated_delta_cached",
    f"({_INPUTS}, Tensor(a!) state_pool, Tensor(b!) conv_pool, Tensor(c!) scratch, {_TREE}, Tensor initial_slots,"
    f" Tensor final_slots, Tensor row_segments, Tensor save_rows, Tensor save_slots, Tensor[] schedule, {_SIZES},"
    " int depth) -> Tensor",
)


def fork_gated_delta(
    qkv_TC: Tensor,
    a_TN: Tensor,
    b_TN: Tensor,
    *,
    conv_weight_CW: Tensor,
    A_log_N: Tensor,
    dt_bias_N: Tensor,
    segment_offsets: Tensor,
    segment_parents: Tensor,
    num_key_heads: int,
    key_dim: int,
    beta_scale: float = 1.0,
) -> Tensor:
    """Outputs of a fresh stream.

    Args:
        qkv_TC: ``[T, C]`` rows ``[q | k | v]`` before the convolution; C = 2 * num_key_heads * K + N * V.
        a_TN, b_TN: ``[T, N]`` decay and write-strength projections, before softplus and sigmoid.
        conv_weight_CW: ``[C, W]`` depthwise taps, the last one on the current row.
        A_log_N, dt_bias_N: ``[N]`` natural-log decay rate and its bias.
        segment_offsets: ``[S + 1]`` int32 row boundaries.
        segment_parents: ``[S]`` int32, -1 for trunks.
        num_key_heads: heads of q and k; divides N.
        key_dim: K.
        beta_scale: factor of sigmoid(b); 2 allows negative eigenvalues.

    Returns:
        ``[T, N, V]`` in the dtype of ``qkv_TC``, contiguous; rows of padding are zero.
    """
    return torch.ops.flide.fork_gated_delta(
        qkv_TC,
        a_TN,
        b_TN,
        conv_weight_CW,
        A_log_N,
        dt_bias_N,
        segment_offsets,
        segment_parents,
        num_key_heads,
        key_dim,
        beta_scale,
    )


def fork_gated_delta_cached(
    qkv_TC: Tensor,
    a_TN: Tensor,
    b_TN: Tensor,
    *,
    conv_weight_CW: Tensor,
    A_log_N: Tensor,
    dt_bias_N: Tensor,
    state_pool: Tensor,
    conv_pool: Tensor,
    scratch: Tensor,
    segment_offsets: Tensor,
    segment_parents: Tensor,
    initial_slots: Tensor,
    final_slots: Tensor,
    row_segments: Tensor,
    save_rows: Tensor,
    save_slots: Tensor,
    num_key_heads: int,
    key_dim: int,
    beta_scale: float = 1.0,
    schedule: ForkSchedule | None = None,
    depth: int = MAX_DEPTH,
) -> Tensor:
    """Outputs of a stream whose trunks may resume from, and save, checkpoints; not differentiable.

    Args, beyond those of :func:`fork_gated_delta`:
        state_pool: ``[slots, N, K, V]`` float32, or bfloat16, which rounds what is kept; written in place. Slot 0 is
            the zero state and never written.
        conv_pool: ``[slots, W - 1, C]`` last rows of ``qkv`` before the checkpoint, written in place.
        scratch: ``[parents, N, K, V]`` float32, overwritten: final states that children of this round start from.
            Layers may share it. The reference does not use it.
        initial_slots: ``[S]`` int32 slot a trunk starts from.
        final_slots: ``[S]`` int32 place in ``scratch`` of the final state of a segment with children; -1 none.
        row_segments: ``[T]`` int32 segment of each row, -1 for padding.
        save_rows, save_slots: ``[S, saves]`` int32 stream row after which a trunk's state is kept, and where; -1 none.
        schedule: work lists of the kernels; needed on CUDA.
        depth: levels of the trees, at most. The kernels make one pass per level; the reference needs no bound.
    """
    inputs = (qkv_TC, a_TN, b_TN, conv_weight_CW, A_log_N, dt_bias_N)
    if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
        raise RuntimeError("a delta rule with checkpoint pools has no gradient: train without pools")
    return torch.ops.flide.fork_gated_delta_cached(
        qkv_TC,
        a_TN,
        b_TN,
        conv_weight_CW,
        A_log_N,
        dt_bias_N,
        state_pool,
        conv_pool,
        scratch,
        segment_offsets,
        segment_parents,
        initial_slots,
        final_slots,
        row_segments,
        save_rows,
        save_slots,
        [] if schedule is None else list(schedule),
        num_key_heads,
        key_dim,
        beta_scale,
        depth,
    )


KEY_DIMS, VALUE_DIMS = range(16, 129, 16), range(16, 257, 16)  # of the kernels


def unsupported(key_dim: int, value_dim: int) -> str | None:
    """Why the CUDA kernels cannot serve a layer, or None."""
    if key_dim in KEY_DIMS and value_dim in VALUE_DIMS:
        return None
    return (
        f"the gated delta rule has no CUDA kernel for heads of {key_dim} x {value_dim}; supported: keys of"
        f" {', '.join(map(str, KEY_DIMS))} and values of {', '.join(map(str, VALUE_DIMS))}"
    )


def _fake_output(qkv: Tensor, A_log: Tensor, num_key_heads: int, key_dim: int) -> Tensor:
    heads = A_log.shape[0]
    return qkv.new_empty(qkv.shape[0], heads, (qkv.shape[1] - 2 * num_key_heads * key_dim) // heads)


@torch.library.register_fake("flide::fork_gated_delta")
def _(qkv, a, b, conv_weight, A_log, dt_bias, offsets, parents, num_key_heads, key_dim, beta_scale):
    return _fake_output(qkv, A_log, num_key_heads, key_dim)


@torch.library.register_fake("flide::fork_gated_delta_cached")
def _(qkv, a, b, conv_weight, A_log, *rest):
    return _fake_output(qkv, A_log, *rest[-4:-2])


@torch.library.register_fake("flide::fork_gated_delta_backward")
def _(grad, qkv, a, b, conv_weight, A_log, dt_bias, *_):
    return tuple(x.new_empty(x.shape) for x in (qkv, a, b, conv_weight, A_log, dt_bias))


@torch.library.impl("flide::fork_gated_delta", "CompositeExplicitAutograd")
def _(qkv, a, b, conv_weight, A_log, dt_bias, offsets, parents, num_key_heads, key_dim, beta_scale):
    return fork_gated_delta_reference(
        qkv,
        a,
        b,
        conv_weight,
        A_log,
        dt_bias,
        offsets,
        parents,
        num_key_heads=num_key_heads,
        key_dim=key_dim,
        beta_scale=beta_scale,
    )


@torch.library.impl("flide::fork_gated_delta_cached", "CompositeExplicitAutograd")
def _(
    qkv,
    a,
    b,
    conv_weight,
    A_log,
    dt_bias,
    state_pool,
    conv_pool,
    scratch,
    offsets,
    parents,
    initial_slots,
    final_slots,
    row_segments,
    save_rows,
    save_slots,
    schedule,
    num_key_heads,
    key_dim,
    beta_scale,
    depth,
):
    return fork_gated_delta_reference(
        qkv,
        a,
        b,
        conv_weight,
        A_log,
        dt_bias,
        offsets,
        parents,
        num_key_heads=num_key_heads,
        key_dim=key_dim,
        beta_scale=beta_scale,
        cache=DeltaCache(state_pool, conv_pool, initial_slots, save_rows, save_slots),
    )


@torch.library.impl("flide::fork_gated_delta_cached", "CUDA")
def _(
    qkv,
    a,
    b,
    conv_weight,
    A_log,
    dt_bias,
    state_pool,
    conv_pool,
    scratch,
    offsets,
    parents,
    initial_slots,
    final_slots,
    row_segments,
    save_rows,
    save_slots,
    schedule,
    num_key_heads,
    key_dim,
    beta_scale,
    depth,
):
    from flide.ops.fork_gated_delta.triton import fork_gated_delta_triton

    problem = unsupported(key_dim, state_pool.shape[3])
    if problem:
        raise ValueError(problem)
    return fork_gated_delta_triton(
        qkv,
        a,
        b,
        conv_weight,
        A_log,
        dt_bias,
        state_pool,
        conv_pool,
        scratch,
        offsets,
        parents,
        row_segments,
        initial_slots,
        final_slots,
        ForkSchedule(*schedule),
        num_key_heads=num_key_heads,
        key_dim=key_dim,
        beta_scale=beta_scale,
        depth=depth,
    )


@torch.library.impl("flide::fork_gated_delta_backward", "CompositeExplicitAutograd")
def _(grad, qkv, a, b, conv_weight, A_log, dt_bias, offsets, parents, num_key_heads, key_dim, beta_scale):
    def forward(qkv, a, b, conv_weight, A_log, dt_bias):
        return fork_gated_delta_reference(
            qkv,
            a,
            b,
            conv_weight,
            A_log,
            dt_bias,
            offsets,
            parents,
            num_key_heads=num_key_heads,
            key_dim=key_dim,
            beta_scale=beta_scale,
        )

    return recompute_gradients(forward, (qkv, a, b, conv_weight, A_log, dt_bias), grad)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.num_key_heads, ctx.key_dim, ctx.beta_scale = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    gradients = torch.ops.flide.fork_gated_delta_backward(
        grad, *ctx.saved_tensors, ctx.num_key_heads, ctx.key_dim, ctx.beta_scale
    )
    return *gradients, None, None, None, None, None


torch.library.register_autograd("flide::fork_gated_delta", _backward, setup_context=_setup_context)
