"""How many rows there is memory for: requests beyond that are refused, so that none ends the process."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn

from flide.models.decision import ForDecision
from flide.runtime.checkpoints.budget import GIB

KV_SHARE = 0.2  # of the device memory that the weights leave free, for the KV pages of the longest prompt
MOST_RESERVED = 0.9  # of what is free on the device, or of what the host has, for checkpoints
REQUEST_SHARE = {"cuda": 0.8, "cpu": 0.5}  # of what is free then, or of what the machine has, for one request
# Bytes that a row takes while the model runs, per byte of what its widest linear layer reads and writes. Measured on a
# CPU: 5.5 to 6.2 (a tiny model and four layers of 0.8B, one long prompt and many short questions).
ROW_FACTOR = 8

UNKNOWN_MEMORY = 8 << 30  # where the system does not say

_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def row_bytes(model: ForDecision) -> int:
    """Memory that one row of a stream takes, at most, while it is computed."""
    layers = [m for m in model.modules() if isinstance(m, nn.Linear) and m is not model.lm_head]
    widest = max(layer.in_features + layer.out_features for layer in layers)
    return ROW_FACTOR * widest * model.lm_head.weight.element_size()


def check_reserved(model: ForDecision, *, device_bytes: int, host_bytes: int) -> None:
    """See that there is memory for checkpoints, to be called before it is taken.

    Raises:
        ValueError: there is not.
    """
    device = model.lm_head.weight.device
    on_gpu = device.type == "cuda"
    places = {"host": host_memory()}
    wanted = {"host": host_bytes if on_gpu else device_bytes + host_bytes}
    if on_gpu:
        places["device"], wanted["device"] = torch.cuda.mem_get_info(device)[0], device_bytes
    for place, available in places.items():
        if wanted[place] > MOST_RESERVED * available:
            numbers = f"{wanted[place] / GIB:.3g} GB, and the {place} has {available / GIB:.3g}"
            raise ValueError(f"checkpoints are to take {numbers}; at most {MOST_RESERVED:.0%} can be theirs")


def affordable_prompt_tokens(model: ForDecision, *, reserved: int = 0) -> int:
    """Tokens whose keys and values the device has pages for; to be called before there are any. On CUDA only.

    Args:
        model: on its device.
        reserved: bytes that something else will take.
    """
    free = torch.cuda.mem_get_info(model.lm_head.weight.device)[0] - reserved
    return int(KV_SHARE * free / model.kv_bytes_per_token)


def affordable_request_tokens(model: ForDecision, *, reserved: int = 0) -> int:
    """Rows that one request may have, when all else is in place; on a CPU but for ``reserved`` bytes."""
    device = model.lm_head.weight.device
    memory = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else host_memory() - reserved
    return int(REQUEST_SHARE[device.type] * memory / row_bytes(model))


def host_memory() -> int:
    """Bytes that this machine has, or that its container may use."""
    if not hasattr(os, "sysconf"):
        return UNKNOWN_MEMORY
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(memory, int(_CGROUP_LIMIT.read_text(encoding="ascii")))
    except (OSError, ValueError):  # no such limit
        return memory
