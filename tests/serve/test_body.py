"""Bodies: packed and not, too large, too slow, damaged."""

from __future__ import annotations

import asyncio
import gzip
import zlib
from collections.abc import AsyncIterator

import pytest
import zstandard

from flide.serve.body import known_encoding, read_body, unpack
from flide.serve.faults import Fault

TEXT = b'{"state": "' + b"a parcel " * 2000 + b'"}'
LIMIT = len(TEXT)


def read(data: bytes, encoding: str = "", *, step: int = 1000, limit: int = LIMIT, pause: float = 0.0) -> bytes:
    async def chunks() -> AsyncIterator[bytes]:
        for begin in range(0, len(data), step):
            await asyncio.sleep(pause)
            yield data[begin : begin + step]

    timeout = 0.2 if pause else 60.0
    body = asyncio.run(read_body(chunks(), declared=None, max_bytes=limit, timeout=timeout))
    return unpack(body, known_encoding(encoding), limit)


def refused(data: bytes, encoding: str = "", **options: float) -> int:
    with pytest.raises(Fault) as caught:
        read(data, encoding, **options)  # type: ignore[arg-type]
    return caught.value.status


def zstd(data: bytes, **options: int) -> bytes:
    return zstandard.ZstdCompressor(**options).compress(data)


@pytest.mark.parametrize("step", [100, 1 << 20])
@pytest.mark.parametrize(
    ("encoding", "data"),
    [
        ("", TEXT),
        ("identity", TEXT),
        ("gzip", gzip.compress(TEXT, mtime=0)),
        (" GZIP ", gzip.compress(TEXT, mtime=0)),
        ("zstd", zstd(TEXT)),
        ("zstd", zstandard.ZstdCompressor(write_content_size=False).compress(TEXT)),
    ],
)
def test_a_body_of_exactly_the_limit_is_read(encoding: str, data: bytes, step: int) -> None:
    assert read(data, encoding, step=step) == TEXT


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstd])
def test_one_byte_more_is_refused(pack: object) -> None:
    encoding = {gzip.compress: "gzip", zstd: "zstd"}.get(pack, "")  # type: ignore[call-overload]
    assert refused(pack(TEXT), encoding, limit=LIMIT - 1) == 413  # type: ignore[operator]


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
def test_a_bomb_is_not_unpacked_beyond_the_limit(encoding: str) -> None:
    bomb = gzip.compress(bytes(300 << 20)) if encoding == "gzip" else zstd(bytes(300 << 20), level=19)
    assert len(bomb) < 1 << 20
    assert refused(bomb, encoding, limit=1 << 20) == 413


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
def test_damaged_bodies_are_refused(encoding: str) -> None:
    good = gzip.compress(TEXT) if encoding == "gzip" else zstd(TEXT)
    for bad in (
        good[:-1],
        good[: len(good) // 2],
        b"",
        good + b"x",
        good + good,
        b"x" + good,
        TEXT,
        good[:20] + b"\0" * 40,
    ):
        assert refused(bad, encoding) == 422


def test_a_huge_window_is_refused() -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=27, write_content_size=False)
    packing = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    data = packing.compress(bytes(1 << 20)) + packing.flush()
    assert refused(data, "zstd", limit=2 << 20) == 413


@pytest.mark.parametrize("encoding", ["br", "deflate", "gzip, gzip", "zstd,gzip", "\x00"])
def test_other_encodings_are_refused(encoding: str) -> None:
    assert refused(zlib.compress(TEXT), encoding) == 415


def test_a_slow_body_is_given_up() -> None:
    assert refused(TEXT, step=100, pause=0.05) == 408


def test_a_body_that_says_it_is_too_large_is_not_read() -> None:
    async def never() -> AsyncIterator[bytes]:
        raise AssertionError("the body was read")
        yield b""

    with pytest.raises(Fault) as caught:
        asyncio.run(read_body(never(), declared=str(LIMIT + 1), max_bytes=LIMIT, timeout=1))
    assert caught.value.status == 413
