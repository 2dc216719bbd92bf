"""``flide serve`` as a process, busy on the CPU and under attack all at once: it stays live, and gives memory back."""

from __future__ import annotations

import asyncio
import gzip
import json
import resource
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable

import httpx
import pytest
import zstandard

from tests.serve.conftest import BODY
from tests.serve.test_cli import serving

DATA = json.dumps(BODY).encode()
BUSY = {**BODY, "questions": {f"q{i}": {"type": "noul", "instructions": f"Is {i} said?"} for i in range(200)}}
ZEROS = b'{"state": "' + b"0" * (64 << 20)  # twice what a body may unpack to
MOST_MB = 150  # that may be kept, of what some thousand connections and bodies took

# Asks /health about every 10 ms until its input ends, in a process of its own: the attackers must not slow it down.
PROBE = """
import json, socket, sys, threading, time
ended = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
times = []
with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as server:
    while not ended.is_set():
        began = time.perf_counter()
        server.sendall(b"GET /health HTTP/1.1\\r\\nHost: localhost\\r\\n\\r\\n")
        answer = b""
        while not answer.endswith(b'{"status":"ok"}'):
            answer += server.recv(4096)
        times.append(time.perf_counter() - began)
        time.sleep(0.01)
print(json.dumps(times))
"""


class Attack:
    def __init__(self, url: str) -> None:
        host, port = url.removeprefix("http://").split(":")
        self.host, self.port = host, int(port)

    async def send(self, data: bytes, *, encoding: str = "", length: int | None = None) -> asyncio.StreamWriter:
        """A connection on which a body, or the beginning of one, was sent."""
        _, writer = await asyncio.open_connection(self.host, self.port)
        head = f"POST /v1/systemone HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length or len(data)}\r\n"
        head += f"Content-Encoding: {encoding}\r\n" if encoding else ""
        writer.write(head.encode() + b"Content-Type: application/json\r\n\r\n" + data)
        await writer.drain()
        return writer

    async def stalled_uploads(self) -> None:
        writers = [await self.send(DATA[:10], length=len(DATA)) for _ in range(64)]
        await asyncio.sleep(1)
        for writer in writers:
            writer.close()

    async def two_thousand_connections(self) -> None:
        opened = await asyncio.gather(*(asyncio.open_connection(self.host, self.port) for _ in range(2000)))
        for _, writer in opened:
            writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        for reader, writer in opened:
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            writer.close()

    async def disconnect_storm(self) -> None:
        for _ in range(500):
            (await self.send(DATA)).transport.abort()

    async def bodies_cut_in_the_middle(self) -> None:
        for _ in range(300):
            (await self.send(DATA[: len(DATA) // 2], length=len(DATA))).transport.abort()

    async def deep_json(self) -> None:
        for _ in range(50):
            (await self.send(b'{"state": ' + b"[" * 10_000)).close()

    async def bombs(self) -> None:
        packed = gzip.compress(ZEROS), zstandard.ZstdCompressor().compress(ZEROS)
        for _ in range(10):
            for data, encoding in zip(packed, ("gzip", "zstd"), strict=True):
                writer = await self.send(data, encoding=encoding)
                await asyncio.sleep(0.05)
                writer.close()


async def attack(url: str) -> None:
    ended = False

    async def stay_busy() -> int:
        answered = 0
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            while not ended:
                answered += (await client.post("/v1/systemone", json=BUSY)).status_code == 200
        return answered

    work = [asyncio.ensure_future(stay_busy()) for _ in range(4)]
    by = Attack(url)
    attacks: list[Callable[[], Awaitable[None]]] = [
        by.stalled_uploads,
        by.two_thousand_connections,
        by.disconnect_storm,
        by.bodies_cut_in_the_middle,
        by.deep_json,
        by.bombs,
    ]
    for one in attacks:
        await one()
        await asyncio.sleep(1)
    ended = True
    assert min(await asyncio.gather(*work)) > 0


def megabytes(pid: int) -> float:
    shown = subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, text=True, check=True)
    return int(shown.stdout) / 1024


@pytest.mark.slow
def test_a_busy_server_under_attack_stays_live() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard if hard != resource.RLIM_INFINITY else max(soft, 8192), hard))
    with serving() as (process, url):
        for _ in range(3):
            assert httpx.post(f"{url}/v1/systemone", json=BUSY, timeout=60).status_code == 200
        before = megabytes(process.pid)
        probe = subprocess.Popen(
            [sys.executable, "-c", PROBE, *url.removeprefix("http://").split(":")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            asyncio.run(attack(url))
            shown, _ = probe.communicate("", timeout=60)
        finally:
            probe.kill()
        times = sorted(json.loads(shown))
        assert httpx.post(f"{url}/v1/systemone", json=BODY, timeout=60).status_code == 200
        p99 = times[int(0.99 * len(times))]
        time.sleep(1)
        kept = megabytes(process.pid) - before
        print(f"{len(times)} probes, p50 {times[len(times) // 2]:.4f} s, p99 {p99:.4f} s, kept {kept:.0f} MB")
        assert len(times) > 200
        assert p99 < 0.1
        assert kept < MOST_MB
