"""cuBLAS in a process that is an engine's alone."""

from __future__ import annotations

import os

_WORKSPACES = "CUBLAS_WORKSPACE_CONFIG"  # which torch and cuBLAS read


def compute_without_workspaces() -> None:
    """Give matrix products no workspaces, unless the process was started with a choice of its own.

    To be called before the process uses CUDA. Workspaces are cleared before products that split their sums: of
    Qwen3.5-0.8B's graphs 46 nodes of 345, and a graph of kernels alone is launched in a quarter of the time. Products
    themselves take as long.
    """
    os.environ.setdefault(_WORKSPACES, ":0:0")


__all__ = ["compute_without_workspaces"]
