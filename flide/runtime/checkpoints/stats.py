"""What a checkpoint store says of itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CheckpointStats:
    """Counts since the engine was made, and what is kept now.

    Attributes:
        hits, misses: trunks that resumed from a checkpoint, and those that found none.
        saved_tokens: trunk tokens that hits did not compute again.
        saves: checkpoints that were kept.
        evictions: those that made room for others and are gone.
        offloads, restores: moves to the host tier and back.
        checkpoints, host_checkpoints: on the device and on the host only.
        bytes, host_bytes: that they take.
        capacity_bytes, host_capacity_bytes: that there are for them.
    """

    hits: int = 0
    misses: int = 0
    saved_tokens: int = 0
    saves: int = 0
    evictions: int = 0
    offloads: int = 0
    restores: int = 0
    checkpoints: int = 0
    host_checkpoints: int = 0
    bytes: int = 0
    host_bytes: int = 0
    capacity_bytes: int = 0
    host_capacity_bytes: int = 0


__all__ = ["CheckpointStats"]
