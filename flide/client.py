"""Clients of a server: ``Engine.decide`` over HTTP.

    with Client("http://127.0.0.1:8000", api_key="...") as client:
        (decision,) = client.decide([DecisionRequest("The parcel arrived crushed.", {"late": Noul("Was it late?")})])

Neither torch nor a model is loaded. Requests are checked here, by the server's own parser, before any is sent.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self, TypeAlias, overload

from flide.errors import RequestError, ServerError
from flide.responses import read_response, retry_after
from flide.runtime.decision import Decision
from flide.runtime.request import DecisionRequest
from flide.runtime.wire import as_list, parse_request
from flide.version import __version__

try:
    import httpx
except ImportError:  # the constructors say so
    httpx = None  # type: ignore[assignment]
try:
    import zstandard
except ImportError:  # bodies go as they are
    zstandard = None  # type: ignore[assignment]

Request: TypeAlias = DecisionRequest | Mapping[str, Any]

RETRIED = frozenset({408, 429, 503, 529})
BACKOFF = 0.5  # seconds before the second attempt, doubled for each further one
LONGEST_WAIT = 30.0  # seconds; a server that asks for more is not waited for
COMPRESSED_FROM = 1024  # bytes


@dataclass(frozen=True, slots=True)
class _Outgoing:
    request: DecisionRequest
    content: bytes
    headers: dict[str, str]


class _Base:
    """What both clients know: how to ask, when to ask again, and what the answers mean."""

    def __init__(
        self,
        base_url: str = "http://127.0.0.1:8000",
        *,
        api_key: str | None = None,
        timeout: float = 60.0,
        max_retries: int = 2,
        max_connections: int = 32,
        compress: bool = True,
        transport: Any = None,
    ) -> None:
        if httpx is None:
            raise ImportError("the client needs httpx: pip install 'flide-torch[serve]'")
        try:
            url = httpx.URL(base_url)
            is_url = url.scheme in ("http", "https") and bool(url.host) and not url.query and not url.fragment
        except httpx.InvalidURL:
            is_url = False
        if not is_url:
            raise ValueError("base_url should be a URL that begins with http:// or https://")
        if api_key is not None and not (api_key and api_key.isascii() and api_key.isprintable() and " " not in api_key):
            raise ValueError("api_key should be printable ASCII without spaces")
        if not 0 < timeout < math.inf:
            raise ValueError("timeout should be a positive number of seconds")
        if max_retries < 0 or max_connections < 1:
            raise ValueError("max_retries should be at least 0, and max_connections at least 1")
        self._url = f"{base_url.rstrip('/')}/v1/systemone"
        self._max_retries, self._max_connections, self._compress = max_retries, max_connections, compress
        headers = {"User-Agent": f"flide/{__version__}", "Accept": "application/json"}
        if api_key is not None:
            headers["Authorization"] = f"Bearer {api_key}"
        options: dict[str, Any] = {
            "headers": headers,
            "timeout": httpx.Timeout(timeout, connect=min(timeout, 10.0), pool=None),
            "limits": httpx.Limits(max_connections=max_connections, max_keepalive_connections=max_connections),
            "transport": transport,
        }
        self._open(options)

    def _open(self, options: dict[str, Any]) -> None:
        raise NotImplementedError

    def _prepare(self, items: list[Request], return_exceptions: bool) -> list[_Outgoing | RequestError]:
        prepared: list[_Outgoing | RequestError] = []
        for index, item in enumerate(items):
            try:
                request = parse_request(item)
            except RequestError as error:
                error.index = index
                if not return_exceptions:
                    raise
                prepared.append(error)
                continue
            content = json.dumps(request.to_dict(), ensure_ascii=False, separators=(",", ":")).encode()
            headers = {"Content-Type": "application/json"}
            if self._compress and zstandard is not None and len(content) >= COMPRESSED_FROM:
                content, headers["Content-Encoding"] = zstandard.ZstdCompressor().compress(content), "zstd"
            prepared.append(_Outgoing(request, content, headers))
        return prepared

    def _wait_before_retry(self, outcome: httpx.Response | httpx.RequestError, attempt: int) -> float | None:
        """Seconds; None if what came is final."""
        if attempt >= self._max_retries:
            return None
        jitter = 0.25 * random.random()
        asked = None
        if isinstance(outcome, httpx.Response):
            if outcome.status_code not in RETRIED:
                return None
            asked = retry_after(outcome)
        elif not isinstance(outcome, httpx.NetworkError | httpx.RemoteProtocolError | httpx.ConnectTimeout):
            return None
        if asked is None:
            return min(8.0, BACKOFF * 2.0**attempt) * (1 - jitter)
        return asked * (1 + jitter) if asked <= LONGEST_WAIT else None


class Client(_Base):
    """Asks a server. Safe to share between threads; close it, or use it as a context manager.

    Args:
        base_url: where the server is, a path prefix included.
        api_key: sent as a bearer token.
        timeout: seconds without a byte from the server, of each attempt.
        max_retries: attempts after the first one, where the server is busy or the connection fails. A ``Retry-After``
            is honoured up to 30 seconds.
        max_connections: requests that are under way at once.
        compress: send bodies of 1 kB and more as zstd, where the zstandard package is there.
        transport: in place of httpx's own.
    """

    def _open(self, options: dict[str, Any]) -> None:
        self._http = httpx.Client(**options)

    @overload
    def decide(self, requests: Iterable[Request], *, return_exceptions: Literal[False] = False) -> list[Decision]: ...

    @overload
    def decide(self, requests: Iterable[Request], *, return_exceptions: bool) -> list[Decision | Exception]: ...

    def decide(self, requests: Iterable[Request], *, return_exceptions: bool = False) -> Any:
        """Answer requests, in order; several are under way at once.

        Args:
            requests: ``DecisionRequest`` objects or plain System One bodies. All are checked before any is sent.
            return_exceptions: put a request's error in its place instead of raising it.

        Raises:
            RequestError: a request is invalid, here or by the server's limits. ``.index`` and ``.errors`` say where.
            ServerError: no answer: the server cannot be reached, refuses, or is too busy.
        """
        prepared, left = self._prepare(as_list(requests), return_exceptions), threading.Event()
        if len(prepared) < 2:
            return [self._outcome(item, index, return_exceptions, left) for index, item in enumerate(prepared)]
        pool = ThreadPoolExecutor(min(len(prepared), self._max_connections), thread_name_prefix="flide-client")
        try:
            futures = [
                pool.submit(self._outcome, item, index, return_exceptions, left) for index, item in enumerate(prepared)
            ]
            return [future.result() for future in futures]
        finally:  # after Ctrl-C or a failure, nobody waits for the others
            left.set()
            pool.shutdown(wait=False, cancel_futures=True)

    def _outcome(
        self, item: _Outgoing | RequestError, index: int, return_exceptions: bool, left: threading.Event
    ) -> Decision | Exception:
        try:
            return item if isinstance(item, RequestError) else self._ask(item, left)
        except (RequestError, ServerError) as error:
            return _placed(error, index, return_exceptions)

    def _ask(self, item: _Outgoing, left: threading.Event) -> Decision:
        attempt = 0
        while True:
            outcome: httpx.Response | httpx.RequestError
            try:
                outcome = self._http.post(self._url, content=item.content, headers=item.headers)
            except httpx.RequestError as error:
                outcome = error
            wait = self._wait_before_retry(outcome, attempt)
            if wait is None or left.wait(wait):
                return read_response(outcome, item.request)
            attempt += 1

    def close(self) -> None:
        """Close the connections. Safe to call twice."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class AsyncClient(_Base):
    """:class:`Client` for event loops: ``await client.decide([...])``. Cancelling drops what is under way."""

    def _open(self, options: dict[str, Any]) -> None:
        # Places are ours to give: httpx's pool never takes one back from a request cancelled while it connects.
        self._places = asyncio.Semaphore(self._max_connections)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=self._max_connections)
        self._http = httpx.AsyncClient(**{**options, "limits": limits})

    @overload
    async def decide(
        self, requests: Iterable[Request], *, return_exceptions: Literal[False] = False
    ) -> list[Decision]: ...

    @overload
    async def decide(self, requests: Iterable[Request], *, return_exceptions: bool) -> list[Decision | Exception]: ...

    async def decide(self, requests: Iterable[Request], *, return_exceptions: bool = False) -> Any:
        """:meth:`Client.decide`. The requests are read by another thread: they must not be changed meanwhile."""
        prepared = await asyncio.to_thread(self._prepare, as_list(requests), return_exceptions)
        tasks = [
            asyncio.ensure_future(self._outcome(item, index, return_exceptions)) for index, item in enumerate(prepared)
        ]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _outcome(
        self, item: _Outgoing | RequestError, index: int, return_exceptions: bool
    ) -> Decision | Exception:
        try:
            if isinstance(item, RequestError):
                return item
            async with self._places:
                return await self._ask(item)
        except (RequestError, ServerError) as error:
            return _placed(error, index, return_exceptions)

    async def _ask(self, item: _Outgoing) -> Decision:
        attempt = 0
        while True:
            outcome: httpx.Response | httpx.RequestError
            try:
                outcome = await self._http.post(self._url, content=item.content, headers=item.headers)
            except httpx.RequestError as error:
                outcome = error
            wait = self._wait_before_retry(outcome, attempt)
            if wait is None:
                return read_response(outcome, item.request)
            await asyncio.sleep(wait)
            attempt += 1

    async def aclose(self) -> None:
        """Close the connections. Safe to call twice."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()


def _placed(error: RequestError | ServerError, index: int, return_exceptions: bool) -> Exception:
    if isinstance(error, RequestError):
        error.index = index
    if not return_exceptions:
        raise error
    return error


__all__ = ["AsyncClient", "Client"]
