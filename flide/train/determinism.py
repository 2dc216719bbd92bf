"""The same bits in every run: the gradient of a gather is a sum, and sums in any order differ."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator

import torch
import torch.utils.deterministic as memory


@contextlib.contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """Have torch take deterministic algorithms, and warn where it has none.

    For that, cuBLAS needs workspaces of a fixed size, which it reads from the environment when it is first used.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    enabled = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    fills = memory.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    memory.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # helps in debugging, and costs time
    try:
        with warnings.catch_warnings():
            # The delta rule's sums over the 64 rows of a chunk; only scans of one long vector differ from run to run.
            warnings.filterwarnings("ignore", message=".*cumsum_cuda_kernel.*")
            yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warns)
        memory.fill_uninitialized_memory = fills  # type: ignore[attr-defined]
