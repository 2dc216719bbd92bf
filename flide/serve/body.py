"""Reading a request's body: bounded in size, in time, and in what it may unpack to."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator
from typing import Protocol

import zstandard

from flide.errors import RequestError
from flide.serve.faults import invalid, slow_body, too_large, unsupported_media

PIECE = 1 << 16


class _Unpack(Protocol):
    """What of a body has been unpacked so far."""

    def feed(self, data: bytes) -> bytes: ...

    def finish(self) -> None: ...


async def read_body(
    chunks: AsyncIterator[bytes], *, encoding: str, declared: str | None, max_bytes: int, timeout: float
) -> bytes:
    """The body, unpacked.

    Args:
        chunks: as they come.
        encoding: the request's ``Content-Encoding``; gzip, zstd and none are known.
        declared: its ``Content-Length``.
        max_bytes: of the body as sent, and of what it unpacks to.
        timeout: seconds in which it has to be there.

    Raises:
        Fault: 408, 413, 415; 422 where it does not unpack.
    """
    if declared is not None and declared.isdigit() and int(declared) > max_bytes:
        raise too_large("body", max_bytes)
    unpack = _unpacker(encoding.strip().lower(), max_bytes)
    parts: list[bytes] = []
    received = unpacked = 0
    try:
        async with asyncio.timeout(timeout):
            async for chunk in chunks:
                received += len(chunk)
                if received > max_bytes:
                    raise too_large("body", max_bytes)
                for begin in range(0, len(chunk), PIECE):
                    part = unpack.feed(chunk[begin : begin + PIECE])
                    unpacked += len(part)
                    if unpacked > max_bytes:
                        raise too_large("unpacked body", max_bytes)
                    parts.append(part)
    except TimeoutError:
        raise slow_body(timeout) from None
    unpack.finish()
    return b"".join(parts)


def _unpacker(encoding: str, max_bytes: int) -> _Unpack:
    if encoding in ("", "identity"):
        return _Plain()
    if encoding in ("gzip", "x-gzip"):
        return _Gzip(max_bytes)
    if encoding == "zstd":
        return _Zstd(max_bytes)
    raise unsupported_media("Content-Encoding should be gzip, zstd or absent.")


class _Plain:
    def feed(self, data: bytes) -> bytes:
        return data

    def finish(self) -> None:
        pass


class _Gzip:
    """One gzip member. Never unpacks more than one byte beyond the limit."""

    def __init__(self, max_bytes: int) -> None:
        self._inflate, self._left = zlib.decompressobj(wbits=31), max_bytes + 1

    def feed(self, data: bytes) -> bytes:
        if self._inflate.eof:
            raise _damaged()
        try:
            out = self._inflate.decompress(data, self._left)
        except zlib.error:
            raise _damaged() from None
        self._left -= len(out)
        if self._inflate.unused_data:
            raise _damaged()
        return out

    def finish(self) -> None:
        if not self._inflate.eof:
            raise _damaged()


class _Zstd:
    """One zstd frame, whose window is bounded too."""

    def __init__(self, max_bytes: int) -> None:
        window = max(1 << 10, min(max_bytes, 8 << 20))
        self._frames = zstandard.ZstdDecompressor(max_window_size=window).decompressobj(write_size=PIECE)

    def feed(self, data: bytes) -> bytes:
        if self._frames.eof:
            raise _damaged()
        try:
            out = self._frames.decompress(data)
        except zstandard.ZstdError:
            raise _damaged() from None
        if self._frames.unused_data:
            raise _damaged()
        return out

    def finish(self) -> None:
        if not self._frames.eof:
            raise _damaged()


def _damaged() -> Exception:
    message = "The body does not unpack by its Content-Encoding"
    return invalid(RequestError([{"loc": ["body"], "msg": message, "type": "value_error"}]))
