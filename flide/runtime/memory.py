"""How many rows there is memory for: requests beyond that are refused, so that none ends the process."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn

from flide.models.decision import ForDecision

KV_SHARE = 0.2  # of the device memory that the weights leave free, for the KV pages of the longest prompt
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


def affordable_prompt_tokens(model: ForDecision) -> int:
    """Tokens whose keys and values the device has pages for; to be called before there are any. On CUDA only."""
    free = torch.cuda.mem_get_info(model.lm_head.weight.device)[0]
    return int(KV_SHARE * free / model.kv_bytes_per_token)


def affordable_request_tokens(model: ForDecision) -> int:
    """Rows that one request may have, when all else is in place."""
    device = model.lm_head.weight.device
    memory = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else host_memory()
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
