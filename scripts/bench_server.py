"""Time a running server with clients that ask again as soon as they are answered.

    python -m scripts.bench_server http://127.0.0.1:8000 --workload race,quality_all [--clients 1,8,64,256]

Bodies have as many questions as the workload, and about as many tokens: the server's own count is printed. Clients are
spread over processes and speak HTTP/1.1 over kept connections with prepared bytes. Their own ceiling is measured
against /health first: a rate near it says nothing about the server. Last line: one JSON object.
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
from concurrent.futures import ProcessPoolExecutor
from typing import Any
from urllib.parse import urlsplit

from scripts.workloads import FIXED, Shape

CHARACTERS_PER_TOKEN = 6.4  # of the words below in a large vocabulary
WORDS = [
    "the",
    "customer",
    "order",
    "parcel",
    "invoice",
    "refund",
    "account",
    "please",
    "today",
    "broken",
    "late",
    "again",
    "update",
    "payment",
    "address",
    "courier",
    "support",
    "team",
    "answer",
    "number",
    "button",
    "error",
    "screen",
    "battery",
    "delivery",
    "return",
    "exchange",
    "price",
    "discount",
    "week",
    "morning",
]
QUESTION_TOKENS = 60  # of a question's frame: type, option labels, chat template


def body(shape: Shape, seed: int) -> bytes:
    """A System One body of about the shape's tokens, of its own words."""
    rng = random.Random(seed)
    questions = {
        f"q{i}": {
            "type": "choice",
            "instructions": text(rng, max(1, tokens - QUESTION_TOKENS)),
            "criteria": {"yes": None, "no": None, "unclear": None},
        }
        for i, tokens in enumerate(shape.branches)
    }
    state = text(rng, max(1, shape.trunk - QUESTION_TOKENS))
    return json.dumps({"model": "jev-latest", "state": state, "questions": questions}).encode()


def text(rng: random.Random, tokens: int) -> str:
    words: list[str] = []
    while sum(map(len, words)) + len(words) < tokens * CHARACTERS_PER_TOKEN:
        words.append(rng.choice(WORDS))
    return " ".join(words)


def request(path: str, host: str, data: bytes | None, key: str | None) -> bytes:
    lines = [f"{'GET' if data is None else 'POST'} {path} HTTP/1.1", f"Host: {host}"]
    if key is not None:
        lines.append(f"Authorization: Bearer {key}")
    if data is not None:
        lines += ["Content-Type: application/json", f"Content-Length: {len(data)}"]
    return "\r\n".join([*lines, "", ""]).encode() + (data or b"")


async def exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, data: bytes) -> tuple[int, bytes]:
    writer.write(data)
    head = await reader.readuntil(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    length = next(int(line[15:]) for line in lines if line.lower().startswith(b"content-length:"))
    return int(lines[0].split()[1]), await reader.readexactly(length)


async def client(host: str, port: int, requests: list[bytes], seconds: float) -> tuple[list[float], int]:
    """Milliseconds of each answer, and how many were no 200."""
    reader, writer = await asyncio.open_connection(host, port)
    times: list[float] = []
    failed = index = 0
    end = time.perf_counter() + seconds
    while (began := time.perf_counter()) < end:
        status, _ = await exchange(reader, writer, requests[index % len(requests)])
        times.append((time.perf_counter() - began) * 1e3)
        failed += status != 200
        index += 1
    writer.close()
    return times, failed


def process(host: str, port: int, per_client: list[list[bytes]], seconds: float) -> tuple[list[float], int]:
    async def run() -> list[tuple[list[float], int]]:
        return await asyncio.gather(*(client(host, port, requests, seconds) for requests in per_client))

    results = asyncio.run(run())
    return [t for times, _ in results for t in times], sum(failed for _, failed in results)


def measure(host: str, port: int, requests: list[bytes], clients: int, seconds: float) -> dict[str, Any]:
    processes = min(clients, os.cpu_count() or 1, 8)
    shares = [[requests[c:] + requests[:c] for c in range(p, clients, processes)] for p in range(processes)]
    with ProcessPoolExecutor(processes) as pool:
        work = [pool.submit(process, host, port, share, seconds) for share in shares]
        parts = [job.result() for job in work]
    times = sorted(t for part, _ in parts for t in part)
    cuts = statistics.quantiles(times, n=100) if len(times) > 1 else [times[0]] * 99
    return {
        "clients": clients,
        "requests": len(times),
        "failed": sum(failed for _, failed in parts),
        "requests_per_s": len(times) / seconds,
        "p50_ms": cuts[49],
        "p95_ms": cuts[94],
        "p99_ms": cuts[98],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("url")
    parser.add_argument("--workload", default="race,quality_all", help=f"some of {', '.join(FIXED)}")
    parser.add_argument("--clients", default="1,8,64,256")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--bodies", type=int, default=64, help="different bodies of a workload")
    parser.add_argument("--api-key")
    arguments = parser.parse_args()
    url = urlsplit(arguments.url)
    if url.scheme != "http" or url.hostname is None:
        parser.error("the URL should be http://HOST:PORT")
    names = arguments.workload.split(",")
    unknown = [name for name in names if name not in FIXED]
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
    for name in names:
        bodies = [body(FIXED[name], seed) for seed in range(arguments.bodies)]
        requests = [request(f"{prefix}/v1/systemone", url.netloc, data, arguments.api_key) for data in bodies]

        async def ask_once(data: bytes = requests[0]) -> tuple[int, bytes]:
            return await exchange(*await asyncio.open_connection(host, port), data)

        status, answer = asyncio.run(ask_once())
        if status != 200:
            print(f"{name}: the server answers {status}", file=sys.stderr)
            return 1
        tokens = json.loads(answer)["usage"]["input_tokens"]
        rows = []
        for clients in counts:
            rows.append(measure(host, port, requests, clients, arguments.seconds))
            failed += rows[-1]["failed"]
            show(name, {"tokens": tokens, **rows[-1]})
        result["workloads"][name] = {"tokens": tokens, "body_bytes": len(bodies[0]), "rows": rows}
    print(json.dumps(result))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
