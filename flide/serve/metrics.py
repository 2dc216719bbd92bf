"""What Prometheus is told. No label holds anything a client wrote."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from flide.runtime.checkpoints.stats import CheckpointStats
from flide.runtime.rounds import RoundReport
from flide.serve.checkpoint_metrics import CheckpointMetrics

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
REQUESTS = tuple(2.0**n for n in range(9))  # of a round
TOKENS = tuple(2.0**n for n in range(6, 16))
MOST_UNCOUNTED = 4096  # where nobody catches up, as without an application's lifespan
FILL = (0.25, 0.5, 0.75, 0.8, 0.85, 0.9, 0.95, 0.975, 1.0)


class Counts(Protocol):
    """What a server counts."""

    def request(self, route: str, status: int) -> None: ...

    def reject(self, reason: str) -> None: ...

    def answered(self, types: Sequence[str], waited: float, ran: float) -> None:
        """A request with questions of some types, the seconds it waited and those it was in the engine."""


class Metrics:
    """Counters of one server. Prometheus's own take about as long as parsing a short request, and whoever counts has an
    answer to give: so what is to be counted is kept until :meth:`catch_up`. From any thread.

    Args:
        waiting, waiting_tokens, running_tokens, checkpoints: what to read when asked.
    """

    def __init__(
        self,
        *,
        waiting: Callable[[], float],
        waiting_tokens: Callable[[], float],
        running_tokens: Callable[[], float],
        checkpoints: Callable[[], CheckpointStats | None] = lambda: None,
    ) -> None:
        self._uncounted: deque[Callable[[], None]] = deque()
        self._registry = registry = CollectorRegistry()

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, buckets=buckets, registry=registry)

        self._answers = Counter("flide_requests", "Requests", ["route", "status"], registry=registry)
        self._rejects = Counter("flide_rejects", "Requests refused", ["reason"], registry=registry)
        self._questions = Counter("flide_questions", "Questions answered", ["type"], registry=registry)
        self._wait = histogram("flide_wait_seconds", "From arrival to the engine", SECONDS)
        self._run = histogram("flide_run_seconds", "In the engine", SECONDS)
        rounds = Counter("flide_rounds", "Rounds run, by replaying a graph or not", ["graph"], registry=registry)
        self._rounds = {True: rounds.labels("replayed"), False: rounds.labels("none")}
        self._seconds = histogram("flide_round_seconds", "On the device (GPU time), of a round", SECONDS)
        self._requests = histogram("flide_round_requests", "Requests that share a round", REQUESTS)
        self._tokens = histogram("flide_round_tokens", "Tokens of a round, without padding", TOKENS)
        self._fill = histogram("flide_round_fill", "Share of a round that is no padding", FILL)
        tokens = Counter("flide_tokens", "Tokens computed: states once, then questions", ["part"], registry=registry)
        self._trunk, self._branch = tokens.labels("trunk"), tokens.labels("branch")
        self._shared = Counter("flide_shared_tokens", "Tokens that sharing a state saved", registry=registry)
        self._reused = Counter("flide_reused_tokens", "Tokens of states computed before", registry=registry)
        for name, text, read in (
            ("flide_waiting", "Requests that wait", waiting),
            ("flide_waiting_tokens", "Their tokens", waiting_tokens),
            ("flide_running_tokens", "Tokens that the engine was given", running_tokens),
        ):
            Gauge(name, text, registry=registry).set_function(read)
        registry.register(CheckpointMetrics(checkpoints))

    def request(self, route: str, status: int) -> None:
        self._later(self._request, route, status)

    def reject(self, reason: str) -> None:
        self._later(self._reject, reason)

    def answered(self, types: Sequence[str], waited: float, ran: float) -> None:
        self._later(self._answered, types, waited, ran)

    def round(self, report: RoundReport) -> None:
        self._later(self._round, report)

    def catch_up(self) -> None:
        """Count what is to be counted."""
        while True:
            try:
                count = self._uncounted.popleft()
            except IndexError:
                return
            count()

    def text(self) -> bytes:
        self.catch_up()
        return generate_latest(self._registry)

    def _later(self, count: Callable[..., None], *arguments: Any) -> None:
        self._uncounted.append(functools.partial(count, *arguments))
        if len(self._uncounted) > MOST_UNCOUNTED:
            self.catch_up()

    def _request(self, route: str, status: int) -> None:
        self._answers.labels(route, str(status)).inc()

    def _reject(self, reason: str) -> None:
        self._rejects.labels(reason).inc()

    def _answered(self, types: Sequence[str], waited: float, ran: float) -> None:
        for name in types:
            self._questions.labels(name).inc()
        self._wait.observe(waited)
        self._run.observe(ran)

    def _round(self, report: RoundReport) -> None:
        tokens = report.trunk_tokens + report.branch_tokens
        self._rounds[report.run.captured].inc()
        self._seconds.observe(report.run.seconds)
        self._requests.observe(report.requests)
        self._tokens.observe(tokens)
        self._fill.observe(tokens / report.run.rows)
        self._trunk.inc(report.trunk_tokens)
        self._branch.inc(report.branch_tokens)
        self._shared.inc(report.shared_tokens)
        self._reused.inc(report.reused_tokens)
