"""Which capacities streams are captured for, and which one a round takes."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from flide.runtime.metadata import PAGE_SIZE, StreamCapacity, num_pages
from flide.runtime.tree import TokenTree, TreeLayout

# Each step of the ladder is at most this much larger than the one before, or by ALIGN rows: padding costs its share of
# every product. A graph costs about 5 MB and 30 ms when the engine starts. Rounds of more than HUGE rows are there for
# throughput, of which half a percent is worth that.
STEP, HUGE_STEP, HUGE = 1.025, 1.0125, 16_384
ALIGN = 32
SMALLEST = 64
# Segments, and readout rows, a capacity may hold: few for a question or two, some, and T / MANY for many short ones.
# The last layer computes every readout row of its capacity, so that one class alone would save nothing. Among thousands
# of rows the smallest class would save nothing either, and among few the largest one holds hardly more.
FEW, SOME, MANY = 16, 128, 8
LARGE = 1024

# Requests of one round: each has a trunk, whose last page may be broken and whose final state takes a scratch slot.
MAX_REQUESTS = 256

# Entries of a page table for what the trunks of one round resume from: 262,144 tokens, 16 KB of each round's copy.
MIN_CACHED_PAGES = 4096

# A third level costs one more pass per recurrent layer. On a device with graphs it has to save so many rows, and has
# graphs from so many rows on.
DEEP_SAVES = 64
SMALLEST_DEEP = 256


def capacity_ladder(max_tokens: int, *, depth: int = 2, cached_pages: int = 0) -> tuple[StreamCapacity, ...]:
    """Capacities up to ``max_tokens`` rows, smallest first: rising sizes, each with one or two row classes.

    Args:
        max_tokens: rows of the largest one.
        depth: 3 adds capacities of three levels to those of two.
        cached_pages: entries of the page table for what trunks resume from, beside those of their own rows.

    Raises:
        ValueError: ``max_tokens`` is not a multiple of 32 of at least 64 rows.
    """
    if max_tokens < SMALLEST or max_tokens % ALIGN:
        raise ValueError(f"the largest capacity must be a multiple of {ALIGN} of at least {SMALLEST}, got {max_tokens}")
    sizes = [SMALLEST]
    while sizes[-1] < max_tokens:
        last = sizes[-1]
        align = ALIGN if last < 2 * LARGE else 2 * ALIGN
        step = STEP if last < HUGE else HUGE_STEP
        sizes.append(min(max_tokens, max(last + align, int(last * step) // align * align)))
    return tuple(
        StreamCapacity(
            tokens, rows, rows, pages=tokens // PAGE_SIZE + min(rows, MAX_REQUESTS) + cached_pages, depth=levels
        )
        for tokens in sizes
        for rows in _row_classes(tokens)
        for levels in range(2, depth + 1)
        if levels == 2 or (tokens >= min(SMALLEST_DEEP, max_tokens) and rows > FEW)
    )


def own_pages(max_tokens: int, max_prompt_tokens: int) -> int:
    """KV pages that a round with resumed trunks may need for itself: of each trunk the first and the last one may be
    broken."""
    return max(max_tokens // PAGE_SIZE + 2 * MAX_REQUESTS, num_pages(max_prompt_tokens) + 1)


def _row_classes(tokens: int) -> list[int]:
    if tokens <= LARGE:
        return [FEW, SOME]
    some = SOME if tokens <= HUGE else 2 * SOME  # so many have the requests of a few questions that share a huge round
    return [some] if tokens < 2 * some * MANY else [some, tokens // MANY]


def smallest_that_holds(
    capacities: Sequence[StreamCapacity], needed: StreamCapacity, *, sizes: Sequence[int] | None = None
) -> StreamCapacity | None:
    """The capacity a round takes: the fewest rows, then the fewest segments; None if it fits none.

    Args:
        capacities: smallest first, as :func:`capacity_ladder` makes them.
        needed: by the round.
        sizes: rows of each capacity, where they are at hand.
    """
    start = bisect.bisect_left(sizes or [capacity.tokens for capacity in capacities], needed.tokens)
    return next((capacity for capacity in capacities[start:] if capacity.holds(needed)), None)


def needed_by(tree: TokenTree | TreeLayout, *, cached: int = 0) -> StreamCapacity:
    """What one request needs; the requests of a round add up.

    Args:
        tree: of what is computed.
        cached: tokens before its trunk, which a checkpoint covers.
    """
    layout = tree if isinstance(tree, TreeLayout) else TreeLayout.of(tree)
    return StreamCapacity(
        tokens=max(1, layout.num_tokens),
        segments=layout.num_nodes,
        readouts=max(1, layout.num_reads),
        pages=num_pages(cached + layout.trunk_length),
        depth=max(2, layout.depth),
    )


def padded(needed: StreamCapacity) -> StreamCapacity:
    """The capacity of a stream that no captured one holds: rounded up, so that no size is 1 or 0, which would be
    another compilation."""
    rows = max(needed.segments, needed.readouts)
    rows = -(-rows // FEW) * FEW
    tokens = -(-needed.tokens // ALIGN) * ALIGN
    return StreamCapacity(max(SMALLEST, tokens), rows, rows, max(2, needed.pages), needed.depth)
