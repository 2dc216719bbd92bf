"""What launchers of persistent kernels share."""

from __future__ import annotations

import functools

import torch


@functools.cache
def num_programs(device: torch.device) -> int:
    """Programs that fill the device once: its multiprocessors (a few under the interpreter)."""
    if device.type != "cuda":
        return 2
    return torch.cuda.get_device_properties(device).multi_processor_count
