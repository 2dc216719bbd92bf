"""Rows of a split, worked on by several processes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import TypeVar

import numpy as np

MOST_PROCESSES = 16
FEW_ROWS = 2000  # that are not worth starting processes for

T = TypeVar("T")


def over_rows(work: Callable[[str, int, int], T], split: str, count: int, *, processes: int | None = None) -> list[T]:
    """``work(split, first, last)`` for stretches that together are the first ``count`` rows, in order."""
    processes = min(processes or multiprocessing.cpu_count(), MOST_PROCESSES)
    if processes == 1 or count <= FEW_ROWS:
        return [work(split, 0, count)]
    cuts = np.linspace(0, count, processes * 4 + 1).astype(int).tolist()
    stretches = [(split, first, last) for first, last in zip(cuts, cuts[1:], strict=False) if first < last]
    # Not forked: the parent may have threads and a CUDA context.
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        return pool.starmap(work, stretches, chunksize=1)
