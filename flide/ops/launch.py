"""What launchers of kernels share: how many programs fill a GPU, and the launch constants of each kind of GPU."""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass, replace

import torch

logger = logging.getLogger("flide.ops")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionTable:
    """Launch constants of attention.

    Attributes:
        tile_rows: query rows times heads of a group in one tile.
        key_block: keys that are read at a time; divides the page.
        warps: warps of one program.
        stages: pipeline stages of the loop over whole blocks of keys.
        value_splits: programs that share the columns of a tile's values; each computes all scores.
    """

    tile_rows: int
    key_block: int
    warps: int
    stages: int
    value_splits: int = 1

    def query_block(self, group: int) -> int:
        """Query rows of one tile, for ``group`` query heads to a key/value head."""
        padded = 1 << (group - 1).bit_length()
        return max(1, self.tile_rows // padded)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchTable:
    """Launch constants of the kernels on one kind of GPU.

    Attributes:
        attention: of heads of up to 256 channels.
        wide_attention: of larger heads.
        conv_rows: stream rows of one convolution program.
        conv_channels: and its channels, in whole heads.
        conv_warps: warps of one convolution program.
        prepare_programs: prepare programs of a multiprocessor.
        prepare_warps: warps of one prepare program.
        large_rows: streams of more rows prepare their short chunks by a launch of their own.
        short_programs: programs of a multiprocessor that prepare short chunks.
        short_warps: warps of one of them.
        scan_columns: value columns of one scan program, at most.
        scan_warps: warps of one scan program.
        scan_stages: pipeline stages of the scan's loop over chunks.
    """

    attention: AttentionTable
    wide_attention: AttentionTable
    conv_rows: int
    conv_channels: int
    conv_warps: int
    prepare_programs: int
    prepare_warps: int
    large_rows: int
    short_programs: int
    short_warps: int
    scan_columns: int
    scan_warps: int
    scan_stages: int

    def attention_of(self, head_dim: int) -> AttentionTable:
        """Attention's constants for heads of ``head_dim`` channels."""
        return self.attention if head_dim <= 256 else self.wide_attention


# 227 KB of shared memory a program. Measured on an H200.
SM_90 = LaunchTable(
    attention=AttentionTable(tile_rows=128, key_block=64, warps=8, stages=2),
    wide_attention=AttentionTable(tile_rows=128, key_block=32, warps=8, stages=2, value_splits=2),
    conv_rows=16,
    conv_channels=512,
    conv_warps=4,
    prepare_programs=2,
    prepare_warps=4,
    large_rows=16_384,
    short_programs=16,
    short_warps=1,
    scan_columns=64,
    scan_warps=4,
    scan_stages=3,
)
# 99 KB. Unmeasured: chosen to fit and to spill little. Without the matrix instructions of sm_90 every warp holds all
# queries of a tile in registers, so tiles are small.
SM_86 = replace(
    SM_90,
    attention=replace(SM_90.attention, tile_rows=32),
    wide_attention=AttentionTable(tile_rows=16, key_block=32, warps=4, stages=1),
    scan_columns=32,
    scan_stages=2,
)
SM_89 = SM_86  # 99 KB. Unmeasured, as above.
SM_80 = SM_86  # 163 KB. Unmeasured: registers, not shared memory, are what larger tiles lack.
TABLES = {(8, 0): SM_80, (8, 6): SM_86, (8, 9): SM_89, (9, 0): SM_90}


@functools.cache
def launch_table(device: torch.device) -> LaunchTable:
    """The table of a GPU; of the CPU, where the interpreter has no limits, that of sm_90."""
    if device.type != "cuda":
        return SM_90
    return table_of(torch.cuda.get_device_capability(device), torch.cuda.get_device_name(device))


@functools.cache
def table_of(capability: tuple[int, int], name: str) -> LaunchTable:
    """The table of a compute capability. One that has none takes that of sm_86, which the log says once."""
    if capability not in TABLES:
        sm = "sm_{}{}".format(*capability)
        logger.warning("no launch table for %s (%s): taking that of sm_86, which fits 99 KB of shared memory", name, sm)
    return TABLES.get(capability, SM_86)


@functools.cache
def num_programs(device: torch.device) -> int:
    """Programs that fill the device once: its multiprocessors (a few under the interpreter)."""
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count
