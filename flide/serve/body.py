"""Reading a request's body: bounded in size, in time, and in what it may unpack to."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Self

import zstandard

from flide.errors import RequestError
from flide.serve.faults import Fault, invalid, no_room, slow_body, too_large, unsupported_media

PIECE = 1 << 10  # bytes of zstd that are unpacked at a time: at most 32 MB, by the densest of its blocks
UNKNOWN_SIZES = (zstandard.CONTENTSIZE_UNKNOWN, zstandard.CONTENTSIZE_ERROR)
WELCOME = 64 << 10  # bytes of a body for which there is always room
ENCODINGS = ("", "identity", "gzip", "zstd")
# Bytes of a body that is parsed on the event loop, where handing it to a thread and back takes two wake-ups.
SHORT = 16 << 10


@dataclass(frozen=True, slots=True)
class Body:
    """All of a request's body.

    Attributes:
        packed: as it was sent.
        encoding: of ``known_encoding``.
        max_bytes: it may unpack to.
    """

    packed: bytes
    encoding: str
    max_bytes: int

    @property
    def is_short(self) -> bool:
        return len(self.packed) <= SHORT and self.encoding in ("", "identity")

    def unpack(self) -> bytes:
        """See :func:`unpack`."""
        return unpack(self.packed, self.encoding, self.max_bytes)


def known_encoding(header: str) -> str:
    """What a ``Content-Encoding`` header names.

    Raises:
        Fault: 415.
    """
    encoding = header.strip().lower()
    if encoding not in ENCODINGS:
        raise unsupported_media("Content-Encoding should be gzip, zstd or absent.")
    return encoding


class Room:
    """Memory for bodies that are read at the same time. The beginning of each, ``WELCOME`` bytes, does not count: where
    large ones take all the room, small ones are answered.

    Args:
        most: bytes.
    """

    def __init__(self, most: int) -> None:
        self._most, self.held = most, 0

    def hold(self) -> Held:
        """Room for one body, as long as a block lasts."""
        return Held(self)

    def _take(self, bytes: int) -> None:
        if bytes > 0 and self.held + bytes > self._most:
            raise no_room()
        self.held += bytes


class Held:
    """See :meth:`Room.hold`."""

    __slots__ = ("_room", "_taken")

    def __init__(self, room: Room) -> None:
        self._room, self._taken = room, 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.grow(0)

    def grow(self, size: int) -> None:
        """The body has so many bytes now.

        Raises:
            Fault: 529.
        """
        more = max(0, size - WELCOME) - self._taken
        if more:
            self._room._take(more)
            self._taken += more


async def read_body(
    chunks: AsyncIterator[bytes],
    *,
    declared: str | None,
    max_bytes: int,
    timeout: float,
    grow: Callable[[int], None] = lambda size: None,
) -> bytes:
    """The body as it was sent.

    Args:
        chunks: as they come.
        declared: its ``Content-Length``.
        max_bytes: it may have.
        timeout: seconds in which it has to be there.
        grow: of ``Held``.

    Raises:
        Fault: 408, 413, 529.
    """
    if declared is not None and declared.isdigit() and int(declared) > max_bytes:
        raise too_large("body", max_bytes)
    parts: list[bytes] = []
    received = 0
    try:
        async with asyncio.timeout(timeout):
            async for chunk in chunks:
                received += len(chunk)
                if received > max_bytes:
                    raise too_large("body", max_bytes)
                grow(received)
                parts.append(chunk)
    except TimeoutError:
        raise slow_body(timeout) from None
    return b"".join(parts)


def unpack(data: bytes, encoding: str, max_bytes: int) -> bytes:
    """What a body unpacks to; one gzip member, or one zstd frame.

    Args:
        encoding: of ``known_encoding``.
        max_bytes: it may unpack to. Memory is bounded by it.

    Raises:
        Fault: 413; 422 where it does not unpack.
    """
    if encoding == "gzip":
        return _gunzip(data, max_bytes)
    if encoding == "zstd":
        return _unzstd(data, max_bytes)
    return data


def _gunzip(data: bytes, max_bytes: int) -> bytes:
    inflate = zlib.decompressobj(wbits=31)
    try:
        out = inflate.decompress(data, max_bytes + 1)
    except zlib.error:
        raise _damaged() from None
    if len(out) > max_bytes:
        raise too_large("unpacked body", max_bytes)
    if not inflate.eof or inflate.unused_data:
        raise _damaged()
    return out


def _unzstd(data: bytes, max_bytes: int) -> bytes:
    window = 1 << max(23, max_bytes.bit_length())  # what a frame may keep at hand; all decoders allow 8 MB
    parts: list[bytes] = []
    size = 0
    try:
        frame = zstandard.get_frame_parameters(data)
        declared = 0 if frame.content_size in UNKNOWN_SIZES else frame.content_size
        if declared > max_bytes or frame.window_size > window:
            raise too_large("unpacked body", max_bytes)
        unpacking = zstandard.ZstdDecompressor(max_window_size=window).decompressobj()
        for begin in range(0, len(data), PIECE):
            if unpacking.eof:
                raise _damaged()
            parts.append(unpacking.decompress(data[begin : begin + PIECE]))
            size += len(parts[-1])
            if size > max_bytes:
                raise too_large("unpacked body", max_bytes)
    except zstandard.ZstdError:
        raise _damaged() from None
    if not unpacking.eof or unpacking.unused_data:
        raise _damaged()
    return b"".join(parts)


def _damaged() -> Fault:
    message = "The body does not unpack by its Content-Encoding"
    return invalid(RequestError([{"loc": ["body"], "msg": message, "type": "value_error"}]))
