"""Which capacities streams are captured for, and which one a round takes."""

from __future__ import annotations

from collections.abc import Sequence

from flide.runtime.metadata import PAGE_SIZE, StreamCapacity

# Each step of the ladder is at most this much larger than the one before (and a multiple of ALIGN rows).
STEP = 1.15
ALIGN = 32
SMALLEST = 64
# Segments, and readout rows, a capacity may hold: few for one question or a few, and T / MANY for many short ones. The
# last layer computes every readout row of its capacity, so that one class alone would save nothing.
ROW_CLASSES = (16, 64)
MANY = 8


def capacity_ladder(max_tokens: int) -> tuple[StreamCapacity, ...]:
    """Capacities up to ``max_tokens`` rows, smallest first: rising sizes, each with two or three row classes.

    Raises:
        ValueError: ``max_tokens`` is not a multiple of 32 of at least 64 rows.
    """
    if max_tokens < SMALLEST or max_tokens % ALIGN:
        raise ValueError(f"the largest capacity must be a multiple of {ALIGN} of at least {SMALLEST}, got {max_tokens}")
    sizes = [SMALLEST]
    while sizes[-1] < max_tokens:
        grown = int(sizes[-1] * STEP) // ALIGN * ALIGN
        sizes.append(min(max_tokens, max(sizes[-1] + ALIGN, grown)))
    return tuple(
        # Every trunk may end inside a page.
        StreamCapacity(tokens, rows, rows, pages=tokens // PAGE_SIZE + rows)
        for tokens in sizes
        for rows in sorted({*ROW_CLASSES, max(ROW_CLASSES[-1], tokens // MANY)})
    )


def smallest_that_holds(capacities: Sequence[StreamCapacity], needed: StreamCapacity) -> StreamCapacity | None:
    """The capacity a round takes: the fewest rows, then the fewest segments; None if it fits none."""
    fitting = [capacity for capacity in capacities if capacity.holds(needed)]
    return min(fitting, key=lambda capacity: (capacity.tokens, capacity.segments), default=None)
