"""What Prometheus is told. No label holds anything a client wrote."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Metrics:
    """Counters of one server.

    Args:
        waiting, waiting_tokens, running_tokens: what to read when asked.
    """

    def __init__(
        self, *, waiting: Callable[[], float], waiting_tokens: Callable[[], float], running_tokens: Callable[[], float]
    ) -> None:
        self._registry = registry = CollectorRegistry()
        self.requests = Counter("flide_requests", "Requests", ["route", "status"], registry=registry)
        self.rejects = Counter("flide_rejects", "Requests refused", ["reason"], registry=registry)
        self.questions = Counter("flide_questions", "Questions answered", ["type"], registry=registry)
        self.tokens = Counter("flide_tokens", "Tokens read, shared states once", registry=registry)
        self.wait = Histogram("flide_wait_seconds", "From arrival to the engine", buckets=SECONDS, registry=registry)
        self.run = Histogram("flide_run_seconds", "In the engine", buckets=SECONDS, registry=registry)
        for name, text, read in (
            ("flide_waiting", "Requests that wait", waiting),
            ("flide_waiting_tokens", "Their tokens", waiting_tokens),
            ("flide_running_tokens", "Tokens that the engine was given", running_tokens),
        ):
            Gauge(name, text, registry=registry).set_function(read)

    def text(self) -> bytes:
        return generate_latest(self._registry)
