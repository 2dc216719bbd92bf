"""Messages between the engine's process and its frontends: pickles, each behind its length, over a pair of sockets that
only these two processes hold.

From a frontend: ``("up",)``, ``("ask", number, key, LogitsRequest)``, ``("drop", number)`` (nobody waits for it any
more), ``("count", [(method, arguments), ...])`` of ``Counts``, ``("tell", number, "metrics" or "stuck_for")``.
To it: ``("answer", number, logits_QO, waited, ran)``, ``("told", number, value)``, ``("failed", number, error)``.
"""

from __future__ import annotations

import asyncio
import pickle
import socket
from collections.abc import AsyncIterator
from typing import Any

_LENGTH_BYTES = 8


class Link:
    """One end. To be made and used on an event loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def over(cls, sock: socket.socket) -> Link:
        sock.setblocking(False)
        return cls(*await asyncio.open_connection(sock=sock))

    def send(self, *message: Any) -> None:
        """What cannot be sent any more, because the other end is gone, is dropped."""
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        # At once: a length that comes by itself would wake the other end twice.
        self._writer.write(len(data).to_bytes(_LENGTH_BYTES, "little") + data)

    async def messages(self) -> AsyncIterator[tuple[Any, ...]]:
        """Until the other end is gone."""
        while True:
            try:
                size = int.from_bytes(await self._reader.readexactly(_LENGTH_BYTES), "little")
                data = await self._reader.readexactly(size)
            except (asyncio.IncompleteReadError, ConnectionError):
                return
            yield pickle.loads(data)

    async def close(self) -> None:
        """Send what is left and close."""
        try:
            self._writer.close()
            await self._writer.wait_closed()
        except ConnectionError:
            return
