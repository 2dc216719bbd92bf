"""Messages between the engine's process and its frontends: pickles, each behind its length, over a pair of sockets that
only these two processes hold.

From a frontend: ``("up",)``, ``("ask", number, key, LogitsRequest)``, ``("drop", number)`` (nobody waits for it any
more), ``("count", [(method, arguments), ...])`` of ``Counts``, ``("tell", number, "metrics" or "stuck_for")``.
To it: ``("answer", number, logits_QO, waited, ran)``, ``("told", number, value)``, ``("failed", number, error)``.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import socket
from collections.abc import Callable
from typing import Any, cast

logger = logging.getLogger("flide.serve")

_LENGTH_BYTES = 8


class Link(asyncio.Protocol):
    """One end, on an event loop. A message is handled while its last bytes are read, not by a task that would have to
    be woken: two turns of the loop less on each side of a request.

    Args:
        receive: called with every message. What it raises ends the link.

    Attributes:
        ended: done when the other end is gone, or this one was closed and all was sent.
    """

    def __init__(self, receive: Callable[..., None]) -> None:
        self._receive, self._arrived = receive, bytearray()
        self._transport: asyncio.Transport | None = None
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @classmethod
    async def over(cls, sock: socket.socket, receive: Callable[..., None]) -> Link:
        sock.setblocking(False)
        _, link = await asyncio.get_running_loop().create_connection(lambda: cls(receive), sock=sock)
        return link

    def send(self, *message: Any) -> None:
        """What cannot be sent any more, because the other end is gone, is dropped."""
        assert self._transport is not None, "connected"
        if not self._transport.is_closing():
            data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
            # At once: a length that comes by itself would wake the other end twice.
            self._transport.write(len(data).to_bytes(_LENGTH_BYTES, "little") + data)

    async def close(self) -> None:
        """Send what is left and close."""
        assert self._transport is not None, "connected"
        self._transport.close()
        await asyncio.shield(self.ended)

    # What the event loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is of no such class

    def data_received(self, data: bytes) -> None:
        arrived = self._arrived
        arrived += data
        begin = 0
        try:
            while len(arrived) - begin >= _LENGTH_BYTES:
                content = begin + _LENGTH_BYTES
                end = content + int.from_bytes(arrived[begin:content], "little")
                if len(arrived) < end:
                    break
                begin = end
                self._receive(*pickle.loads(arrived[content:end]))
        except Exception:
            logger.exception("a link between processes broke")
            assert self._transport is not None
            self._transport.abort()
            begin = len(arrived)
        del arrived[:begin]

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)
