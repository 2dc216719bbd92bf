"""Time a running server with clients that ask again as soon as they are answered.

    python -m scripts.bench_server http://127.0.0.1:8000 --workload race,quality_all [--clients 1,8,64,256]

Bodies have the questions and the tokens of the workload: they are made longer or shorter until the server counts the
right number, which is printed. Questions have four options. jev_race and jev_97 are for servers of Open-Jev: texts of
the length that give these shapes. Clients are spread over processes and speak HTTP/1.1 over kept connections with
prepared bytes. No state is sent twice: its first words count, so that nothing kept of others helps. After a second of
ramp, latencies are those of requests sent within the measured time and the rate is of answers within it;
server_*_ms are medians of what the server says of its own steps. The clients' own ceiling is measured against /health
first: a rate near it says nothing about the server. Last line: one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from http.client import HTTPConnection
from typing import Any, cast
from urllib.parse import urlsplit

from scripts.workloads import FIXED, FIXED_CANDIDATES, Shape

# Each of these, behind a blank, is one token of every large vocabulary.
VOCABULARY = (
    "the customer order parcel invoice refund account please today broken late again update payment address courier "
    "support team answer number button error screen battery delivery return exchange price discount week morning"
)
WORDS = VOCABULARY.split()
DIGITS = [word for word in WORDS if len(word) == 6][:10]
NUMBER_DIGITS = 6  # words that every state begins with; different states are different numbers
OPTIONS = ("first", "second", "third", "fourth")
TRIES = 8  # of making a body as long as it should be
RAMP = 1.0  # seconds before counting begins


@dataclass(frozen=True, slots=True)
class Words:
    """How many words the state, each question and each option of a body have."""

    state: int
    question: int
    option: int = 1


CANDIDATE_WORDS = {"jev_race": Words(257, 11, 5), "jev_97": Words(1837, 26, 13)}  # about the tokens of the shapes


def body(words: Words, questions: int, seed: int, *, options: Sequence[int] = ()) -> bytes:
    """A System One body of its own words. Its first two questions begin differently, so that they share the state and
    no more. ``options``: how many each question has; four by default."""
    rng = random.Random(seed)
    asked = {}
    for i, count in enumerate(options or [len(OPTIONS)] * questions):
        names = [text(rng, words.option, first=OPTIONS[k % len(OPTIONS)]) for k in range(count)]
        instructions = text(rng, words.question, first=WORDS[i % 2])
        asked[f"q{i}"] = {"type": "choice", "instructions": instructions, "criteria": dict.fromkeys(names)}
    state = f"{number(0)} {text(rng, words.state - NUMBER_DIGITS)}"
    return json.dumps({"model": "jev-latest", "state": state, "questions": asked}).encode()


def number(value: int) -> str:
    """A number as words, all numbers of the same length."""
    return " ".join(DIGITS[int(digit)] for digit in f"{value % 10**NUMBER_DIGITS:0{NUMBER_DIGITS}}")


def around_number(data: bytes) -> tuple[bytes, bytes]:
    """What of a request's bytes comes before and behind its state's number; all of it and nothing where it has none."""
    before, number_zero, behind = data.partition(number(0).encode())
    return (before, behind) if number_zero else (data, b"")


def text(rng: random.Random, words: int, *, first: str = "The") -> str:
    return " ".join([first, *rng.choices(WORDS, k=words - 1)]) if words > 1 else first


def fitted(shape: Shape, ask: Callable[[bytes], int], *, bodies: int) -> tuple[list[bytes], list[int]]:
    """Bodies whose trunk and branches have the shape's tokens, and how many tokens each has.

    Args:
        shape: with branches of one length.
        ask: the server's own count of a body's tokens.
        bodies: how many.
    """
    branch, count = shape.branches[0], len(shape.branches)

    def branch_tokens(words: int) -> int:  # what a third question costs
        return ask(body(Words(1, words), 3, 0)) - ask(body(Words(1, words), 2, 0))

    question, _ = solve(branch_tokens, branch, start=max(1, branch - 40))
    state = max(1, shape.trunk - 10)
    made: list[bytes] = []
    tokens: list[int] = []
    for seed in range(bodies):

        def total(words: int, seed: int = seed) -> int:
            return ask(body(Words(words, question), count, seed))

        state, found = solve(total, shape.rows, start=state)
        made.append(body(Words(state, question), count, seed))
        tokens.append(found)
    return made, tokens


def with_candidates(name: str, ask: Callable[[bytes], int], *, bodies: int) -> tuple[list[bytes], list[int]]:
    """Bodies of a workload of candidates, and how many tokens each has."""
    counts = [len(own) for _, own in FIXED_CANDIDATES[name].questions]
    made = [body(CANDIDATE_WORDS[name], len(counts), seed, options=counts) for seed in range(bodies)]
    return made, [ask(data) for data in made]


def solve(measure: Callable[[int], int], target: int, *, start: int) -> tuple[int, int]:
    """The number of words, at least 1, whose measure is nearest to a target, and that measure. By secants."""
    seen = {start: measure(start)}
    last, slope = start, 1.0
    for _ in range(TRIES):
        off = target - seen[last]
        words = max(1, last + (round(off / slope) or (off > 0) - (off < 0)))
        if words in seen:
            break
        seen[words] = measure(words)
        slope = max(1.0, (seen[words] - seen[last]) / (words - last))
        last = words
    best = min(seen, key=lambda words: abs(target - seen[words]))
    return best, seen[best]


def request(path: str, host: str, data: bytes | None, key: str | None) -> bytes:
    lines = [f"{'GET' if data is None else 'POST'} {path} HTTP/1.1", f"Host: {host}"]
    if key is not None:
        lines.append(f"Authorization: Bearer {key}")
    if data is not None:
        lines += ["Content-Type: application/json", f"Content-Length: {len(data)}"]
    return "\r\n".join([*lines, "", ""]).encode() + (data or b"")


@dataclass(slots=True)
class Counts:
    """What one client, or several, saw: milliseconds of each request that was sent while counting and the Server-Timing
    of its answer, how many were answered meanwhile, and how many were no 200."""

    times: list[float] = field(default_factory=list)
    timings: list[bytes] = field(default_factory=list)
    answered: int = 0
    failed: int = 0


class Client(asyncio.Protocol):
    """A connection that asks again as soon as it is answered. What it adds to a latency is a system call, and few steps
    of Python.

    Args:
        requests: prepared bytes, of which states are numbered.
        first: number of the first one.
        begin, end: what is counted, in seconds of the monotonic clock, which processes share.
        ended: is told when all is done, or what went wrong.
    """

    def __init__(
        self, requests: Sequence[bytes], first: int, begin: float, end: float, *, ended: asyncio.Future[None]
    ) -> None:
        self.counts = Counts()
        self._parts = [around_number(data) for data in requests]
        self._first, self._begin, self._end, self._ended = first, begin, end, ended
        self._index = 0
        self._answer, self._sent = b"", 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._ask()

    def data_received(self, data: bytes) -> None:
        self._answer += data
        head, end_of_head, body = self._answer.partition(b"\r\n\r\n")
        if not end_of_head:
            return
        status, headers = parse_head(head)
        if len(body) < int(headers[b"content-length"]):
            return
        done, counts = time.monotonic(), self.counts
        if self._sent >= self._begin:
            counts.times.append((done - self._sent) * 1e3)
            counts.timings.append(headers.get(b"server-timing", b""))
        counts.answered += self._begin <= done < self._end
        counts.failed += status != 200
        self._answer = b""
        if done < self._end:
            self._ask()
        else:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if time.monotonic() >= self._end and not self._answer:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(exc or ConnectionError("the server closed the connection"))

    def _ask(self) -> None:
        before, behind = self._parts[self._index % len(self._parts)]
        data = before + number(self._first + self._index).encode() + behind if behind else before
        self._index += 1
        self._sent = time.monotonic()
        self._transport.write(data)


def parse_head(head: bytes) -> tuple[int, dict[bytes, bytes]]:
    """The status of an answer, and its headers."""
    first, *lines = head.split(b"\r\n")
    return int(first.split()[1]), {name.lower(): value for name, _, value in (x.partition(b": ") for x in lines)}


async def client(host: str, port: int, requests: Sequence[bytes], first: int, begin: float, end: float) -> Counts:
    """Ask again and again from now on: see :class:`Client`."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    _, made = await loop.create_connection(lambda: Client(requests, first, begin, end, ended=ended), host, port)
    await ended
    return made.counts


def process(host: str, port: int, per_client: list[tuple[int, list[bytes]]], begin: float, end: float) -> Counts:
    async def run() -> list[Counts]:
        return await asyncio.gather(
            *(client(host, port, requests, first, begin, end) for first, requests in per_client)
        )

    return together(asyncio.run(run()))


def together(parts: Sequence[Counts]) -> Counts:
    return Counts(
        [t for part in parts for t in part.times],
        [t for part in parts for t in part.timings],
        sum(part.answered for part in parts),
        sum(part.failed for part in parts),
    )


def measure(host: str, port: int, requests: list[bytes], clients: int, seconds: float) -> dict[str, Any]:
    processes = min(clients, os.cpu_count() or 1, 8)
    # Every client starts elsewhere, and no measurement where another one did.
    offset, apart = random.randrange(10**NUMBER_DIGITS), 10**NUMBER_DIGITS // clients
    rotated = [
        (offset + c * apart, requests[c % len(requests) :] + requests[: c % len(requests)]) for c in range(clients)
    ]
    with ProcessPoolExecutor(processes) as pool:
        begin = time.monotonic() + RAMP
        work = [
            pool.submit(process, host, port, rotated[p::processes], begin, begin + seconds) for p in range(processes)
        ]
        counts = together([job.result() for job in work])
    times = sorted(counts.times)
    cuts = statistics.quantiles(times, n=100) if len(times) > 1 else (times or [float("nan")]) * 99
    return {
        "clients": clients,
        "requests": len(times),
        "failed": counts.failed,
        "requests_per_s": counts.answered / seconds,
        "p50_ms": cuts[49],
        "p95_ms": cuts[94],
        "p99_ms": cuts[98],
        **steps(counts.timings),
    }


def steps(timings: Sequence[bytes]) -> dict[str, float]:
    """Medians of what Server-Timing headers name: ``b"read;dur=0.5, run;dur=2"`` -> server_read_ms, server_run_ms."""
    found: dict[str, list[float]] = {}
    for timing in timings:
        for step in filter(None, timing.decode().split(", ")):
            name, _, milliseconds = step.partition(";dur=")
            found.setdefault(f"server_{name}_ms", []).append(float(milliseconds))
    return {name: statistics.median(durations) for name, durations in found.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    shapes = {**FIXED, **FIXED_CANDIDATES}
    parser.add_argument("url")
    parser.add_argument("--workload", default="race,quality_all", help=f"some of {', '.join(shapes)}")
    parser.add_argument("--clients", default="1,8,64,256")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--bodies", type=int, default=64, help="different bodies of a workload")
    parser.add_argument("--api-key")
    arguments = parser.parse_args()
    url = urlsplit(arguments.url)
    if url.scheme != "http" or url.hostname is None:
        parser.error("the URL should be http://HOST:PORT")
    names = arguments.workload.split(",")
    unknown = [name for name in names if name not in shapes]
    if unknown:
        parser.error(f"unknown workload {unknown[0]!r}")
    host, port, prefix = url.hostname, url.port or 80, url.path.rstrip("/")
    counts = [int(count) for count in arguments.clients.split(",")]
    result: dict[str, Any] = {"url": arguments.url, "ceiling": [], "workloads": {}}
    failed = 0

    def show(name: str, row: dict[str, Any]) -> None:
        print(f"{name:12} " + "  ".join(f"{key} {value:.4g}" for key, value in row.items()), flush=True)

    for clients in counts:
        row = measure(
            host, port, [request(f"{prefix}/health", url.netloc, None, None)], clients, min(2.0, arguments.seconds)
        )
        result["ceiling"].append(row)
        show("/health", row)
    headers = {"Content-Type": "application/json"}
    if arguments.api_key is not None:
        headers["Authorization"] = f"Bearer {arguments.api_key}"
    connection = HTTPConnection(host, port, timeout=120)

    def ask(data: bytes) -> int:
        connection.request("POST", f"{prefix}/v1/systemone", data, headers)
        response = connection.getresponse()
        answer = response.read()
        if response.status != 200:
            sys.exit(f"the server answers {response.status}")
        return int(json.loads(answer)["usage"]["input_tokens"])

    for name in names:
        if name in FIXED_CANDIDATES:
            bodies, tokens = with_candidates(name, ask, bodies=arguments.bodies)
        else:
            bodies, tokens = fitted(FIXED[name], ask, bodies=arguments.bodies)
        requests = [request(f"{prefix}/v1/systemone", url.netloc, data, arguments.api_key) for data in bodies]
        rows = []
        for clients in counts:
            rows.append(measure(host, port, requests, clients, arguments.seconds))
            failed += rows[-1]["failed"]
            show(name, {"tokens": statistics.mean(tokens), **rows[-1]})
        connection.close()  # the server would, meanwhile; the next request opens it again
        spread = {"tokens": shapes[name].rows, "fewest_tokens": min(tokens), "most_tokens": max(tokens)}
        result["workloads"][name] = {**spread, "body_bytes": len(bodies[0]), "rows": rows}
    print(json.dumps(result))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
