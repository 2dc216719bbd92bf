"""What Prometheus is told of checkpoints. Its only label is where they lie."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from flide.runtime.checkpoints.stats import CheckpointStats

COUNTS = (
    ("hits", "States that resumed from a checkpoint"),
    ("misses", "States that found none"),
    ("saved_tokens", "Tokens of states that did not have to be computed again"),
    ("saves", "Checkpoints that were kept"),
    ("evictions", "Checkpoints that made room for others and are gone"),
    ("offloads", "Checkpoints moved to the host"),
    ("restores", "Checkpoints moved back to the device"),
)
TIERS = {"device": "", "host": "host_"}


class CheckpointMetrics:
    """A collector that reads the counts of a store when it is asked, all at one moment.

    Args:
        read: the counts; None where nothing keeps checkpoints.
    """

    def __init__(self, read: Callable[[], CheckpointStats | None]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        stats = self._read()
        if stats is None:
            return
        for name, text in COUNTS:
            yield CounterMetricFamily(f"flide_checkpoint_{name}", text, value=getattr(stats, name))
        for name, field, text in (
            ("flide_checkpoints", "checkpoints", "Checkpoints that are kept"),
            ("flide_checkpoint_bytes", "bytes", "Bytes that they take"),
            ("flide_checkpoint_capacity_bytes", "capacity_bytes", "Bytes that there are for them"),
        ):
            family = GaugeMetricFamily(name, text, labels=["tier"])
            for tier, prefix in TIERS.items():
                family.add_metric([tier], getattr(stats, prefix + field))
            yield family


__all__ = ["CheckpointMetrics"]
