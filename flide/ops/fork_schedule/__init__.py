"""Fork schedule: from a stream's segments to the lists of work that the GPU kernels loop over.

Computed on the device once per forward and shared by all layers, so that no launch depends on the round: kernels have
fixed grids and loop up to counts that lie on the device. The references need no schedule.

Example: trunk of 70 rows, branches of 3 and 66; chunks of 64 rows start at each segment's own first row, tiles of 32
query rows at each trunk's, or each set of siblings', first row::

    chunk_rows   [0 64] [64 70] [70 73] [73 137] [137 139]
    tiles        0 32 64 | 70 102 134
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flide.ops.fork_schedule.reference import ForkSchedule, fork_schedule_reference, max_chunks, max_tiles
from flide.ops.launch import launch_table
from flide.runtime.metadata import MAX_SAVES, ForkMetadata

__all__ = ["ForkSchedule", "fork_schedule", "schedule_inputs", "with_schedule"]

_INPUTS = (
    "Tensor segment_offsets, Tensor segment_parents, Tensor segment_levels, Tensor initial_slots, Tensor save_rows,"
    " Tensor save_slots, Tensor row_segments, Tensor readout_rows"
)
_OUTPUTS = ", ".join(["Tensor"] * len(ForkSchedule._fields))
torch.library.define("flide::fork_schedule", f"({_INPUTS}, int conv_width, int group, int head_dim) -> ({_OUTPUTS})")


def fork_schedule(meta: ForkMetadata, *, conv_width: int = 1, group: int, head_dim: int) -> ForkSchedule:
    """The schedule of one stream.

    Args:
        meta: the stream.
        conv_width: taps of the model's short convolution; 1 where it has none.
        group: query heads per key/value head; with the head's size and the device's launch table it says how many rows
            a tile holds.
        head_dim: channels of a head.
    """
    return ForkSchedule(*torch.ops.flide.fork_schedule(*schedule_inputs(meta), conv_width, group, head_dim))


def schedule_inputs(meta: ForkMetadata) -> tuple[Tensor, ...]:
    """The fields that the op reads, in its order."""
    return (
        meta.segment_offsets,
        meta.segment_parents,
        meta.segment_levels,
        meta.initial_slots,
        meta.save_rows,
        meta.save_slots,
        meta.row_segments,
        meta.readout_rows,
    )


def with_schedule(meta: ForkMetadata, *, conv_width: int = 1, group: int, head_dim: int) -> ForkMetadata:
    """The metadata with its schedule on a GPU; unchanged elsewhere, where the references read the segments."""
    if not meta.arena.is_cuda:
        return meta
    return replace(meta, schedule=fork_schedule(meta, conv_width=conv_width, group=group, head_dim=head_dim))


def _empty_schedule(parents: Tensor, rows: Tensor, readouts: Tensor, width: int, block: int) -> ForkSchedule:
    segments = parents.shape[0]
    chunks = max_chunks(rows.shape[0], segments * (MAX_SAVES + 1))
    shapes: dict[str, tuple[Any, ...]] = {
        "history": (segments, width - 1),
        "root_slots": (segments,),
        "levels": (4,),
        "chunk_offsets": (segments + 1,),
        "chunk_segments": (chunks,),
        "chunk_rows": (chunks, 2),
        "chunk_saves": (chunks,),
        "tiles": (max_tiles(rows.shape[0], segments, block),),
        "readout_tiles": (readouts.shape[0],),
        "tile_counts": (2,),
    }
    return ForkSchedule(**{name: parents.new_empty(shape) for name, shape in shapes.items()})


def _query_block(like: Tensor, group: int, head_dim: int) -> int:
    return launch_table(like.device).attention_of(head_dim).query_block(group)


@torch.library.register_fake("flide::fork_schedule")
def _(offsets, parents, levels, initial_slots, save_rows, save_slots, row_segments, readout_rows, width, *heads):
    block = _query_block(parents, *heads)
    return tuple(_empty_schedule(parents, row_segments, readout_rows, width, block))


@torch.library.impl("flide::fork_schedule", "CompositeExplicitAutograd")
def _(*args):
    *tensors, width, group, head_dim = args
    block = _query_block(tensors[0], group, head_dim)
    return tuple(fork_schedule_reference(*tensors, conv_width=width, query_block=block))


@torch.library.impl("flide::fork_schedule", "CUDA")
def _(*args):
    from flide.ops.fork_schedule.triton import fork_schedule_triton

    *tensors, width, group, head_dim = args
    block = _query_block(tensors[0], group, head_dim)
    schedule = _empty_schedule(tensors[1], tensors[6], tensors[7], width, block)
    return tuple(fork_schedule_triton(*tensors, conv_width=width, query_block=block, schedule=schedule))
