"""The application: routes in front of an engine and a scheduler."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import os
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from flide.errors import RequestError
from flide.runtime.decision import Decision, num_options
from flide.runtime.engine import Engine
from flide.runtime.known_bodies import KnownBodies
from flide.runtime.request import DecisionRequest
from flide.runtime.rounds import PreparedRequest
from flide.runtime.strict_json import parse_json
from flide.runtime.wire import parse_body, place
from flide.serve import faults
from flide.serve.backend import Backend, LocalBackend
from flide.serve.body import Body, Room, known_encoding, read_body
from flide.serve.config import ServeConfig
from flide.serve.decisions import Translated, in_this_shape, is_systemone, refusal, translate
from flide.serve.docs_page import POLICY, docs_page
from flide.serve.extras import extras
from flide.serve.faults import Fault
from flide.serve.keys import ANYONE
from flide.serve.openapi import document
from flide.serve.protocol import ON_LEAVING, OnLeaving
from flide.serve.turns import Turns

logger = logging.getLogger("flide.serve")

ALIAS = "jev-latest"  # always served
REQUEST_ID = "x-typesafe-request-id"
OPENAI_REQUEST_ID = "x-request-id"  # the same id
MOST_READERS = 8
# Of a short body that is read on the event loop: questions, where others are there, and characters of prompts, counting
# instructions once for each option, as some formats repeat them. A millionth of a second each at worst.
FEW_QUESTIONS, FEW_CHARACTERS = 8, 1 << 16
Handler = Callable[[Request], Awaitable[Response]]
Parse = Callable[[bytes], DecisionRequest]


class DecisionServer:
    """What the routes share.

    Args:
        backend: what answers; an engine that is ready stands for itself, and stays the caller's to close.
        config: limits.
    """

    def __init__(self, backend: Backend | Engine, config: ServeConfig) -> None:
        self.backend: Backend = LocalBackend(backend, config) if isinstance(backend, Engine) else backend
        self.config, self.counts = config, self.backend.counts
        self.names = config.names or (self.backend.reader.model_name,)
        # Reading requests must leave a core to the engine, and to the event loop. Many readers would only wait for the
        # interpreter: what takes long, encoding a long text, is spread over all cores anyway.
        readers = min(MOST_READERS, max(1, (os.cpu_count() or 2) - 1))
        self._readers = ThreadPoolExecutor(readers, thread_name_prefix="flide-read")
        self._known = KnownBodies()
        self._turns, self._room = Turns(readers, config.max_waiting), Room(config.max_bodies_bytes)
        self._deciding = 0  # requests whose body is here
        self._document = document(config, [*dict.fromkeys([*self.names, ALIAS])])
        self._started = datetime.now(UTC).date().isoformat()

    @property
    def is_deciding(self) -> bool:
        """Whether a request is read or answered."""
        return self._deciding > 0

    def app(self) -> ASGIApp:
        """The ASGI application."""
        routes = [
            Route("/v1/systemone", self._route(self.systemone), methods=["POST"]),
            Route("/v1/decisions", self._route(self.decisions), methods=["POST"]),
            Route("/v1/models", self._route(self.models), methods=["GET"]),
            Route("/health", self._route(self.health, open=True), methods=["GET"]),
            Route("/ready", self._route(self.ready, open=True), methods=["GET"]),
            Route("/metrics", self._route(self.prometheus), methods=["GET"]),
            Route("/openapi.json", self._route(self.openapi), methods=["GET"]),
            Route("/docs", self._route(self.docs), methods=["GET"]),
        ]
        starlette = Starlette(
            routes=routes,
            lifespan=self._lifespan,
            exception_handlers={404: _no_such_route, 405: _no_such_method},
        )
        starlette.router.redirect_slashes = False  # official clients follow no redirect
        direct = {route.path: route.endpoint for route in routes if route.methods == {"POST"}}
        return _Envelope(starlette, direct, self.config)

    async def systemone(self, request: Request) -> Response:
        key: str = request.state.key
        decision, headers = await self._decide(request, lambda body: self._known.parse(body, key))
        return _Json({**decision.to_dict(), **extras(decision, self.backend.reader.model_hash)}, headers=headers)

    async def decisions(self, request: Request) -> Response:
        """OpenAI's shape, and System One's as on its own route."""
        translated: Translated | None = None

        def parse(body: bytes) -> DecisionRequest:
            nonlocal translated
            parsed = parse_json(body)
            if is_systemone(parsed):
                request.state.refusal = _refusal
                return parse_body(parsed)
            translated = translate(parsed)
            return translated.request

        def tell(error: RequestError) -> RequestError:
            return error if translated is None else in_this_shape(error)

        decision, headers = await self._decide(request, parse, tell)
        answer = decision.to_dict() if translated is None else translated.response(decision)
        return _Json({**answer, **extras(decision, self.backend.reader.model_hash)}, headers=headers)

    async def _decide(
        self, request: Request, parse: Parse, tell: Callable[[RequestError], RequestError] = lambda error: error
    ) -> tuple[Decision, dict[str, str]]:
        """The decision under the name of the model that is served, and headers for its response.

        Args:
            request: whose body it is about.
            parse: the body.
            tell: in the route's words what is wrong with a request that was parsed.
        """
        began = time.perf_counter()
        with self._room.hold() as grow:
            body = await self._body(request, grow)
            async with self._patience(request):
                prepared = await self._read(request, parse, tell, body)
                del body
                grow(0)
                read = time.perf_counter()
                with self.backend.ticket(prepared, request.state.key) as ticket:
                    await ticket.answer
        decision = ticket.answer.result()
        wait, run = ticket.waited, ticket.ran
        self.counts.answered([answer.type for answer in decision.answers.values()], wait, run)
        timing = f"read;dur={1e3 * (read - began):.2f}, wait;dur={1e3 * wait:.2f}, run;dur={1e3 * run:.2f}"
        return Decision(self.names[0], decision.answers, decision.usage), {"Server-Timing": timing}

    async def models(self, request: Request) -> Response:
        names = dict.fromkeys([*self.names, ALIAS])
        return JSONResponse(
            {"models": [{"name": name, "description": "", "release_date": self._started} for name in names]}
        )

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        if self.backend.closed:
            raise faults.unavailable("The engine is closed.")
        if await self.backend.stuck_for() > self.config.stuck_after:
            raise faults.unavailable("The engine has not answered for a while.")
        return JSONResponse({"status": "ready"})

    async def prometheus(self, request: Request) -> Response:
        return Response(await self.backend.metrics(), media_type="text/plain; version=0.0.4")

    async def openapi(self, request: Request) -> Response:
        return JSONResponse(self._document)

    async def docs(self, request: Request) -> Response:
        return HTMLResponse(docs_page(self._document), headers={"Content-Security-Policy": POLICY})

    async def _body(self, request: Request, grow: Callable[[int], None]) -> Body:
        kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
        if kind == "multipart/form-data":  # as official clients send images
            message = "Multipart bodies are not supported: only text can be read"
            raise faults.invalid(RequestError([{"loc": ["body"], "msg": message, "type": "value_error"}]))
        if kind not in ("application/json", "") and not kind.endswith("+json"):
            raise faults.unsupported_media("Content-Type should be application/json: only text can be read.")
        encoding, limit = known_encoding(request.headers.get("content-encoding", "")), self.config.max_body_bytes
        declared = request.headers.get("content-length")
        timeout = self.config.body_timeout
        packed = await read_body(request.stream(), declared=declared, max_bytes=limit, timeout=timeout, grow=grow)
        return Body(packed, encoding, limit)

    async def _read(
        self, request: Request, parse: Parse, tell: Callable[[RequestError], RequestError], body: Body
    ) -> PreparedRequest:
        """The request in a body, made ready; off the event loop unless little is asked, or at least nothing else."""
        key: str = request.state.key

        def admit(parsed: DecisionRequest) -> PreparedRequest:
            try:
                return self._admit(parsed, key)
            except RequestError as error:
                raise tell(error) from None

        try:
            if not body.is_short:
                return await self._on_a_reader(key, lambda: admit(parse(body.unpack())))
            parsed = parse(body.unpack())
            is_little = self._deciding == 1 or len(parsed.questions) <= FEW_QUESTIONS
            if is_little and _most_instructions(parsed, len(body.packed)) <= FEW_CHARACTERS:
                return admit(parsed)
            return await self._on_a_reader(key, lambda: admit(parsed))
        except RequestError as error:
            raise faults.invalid(error) from None

    async def _on_a_reader(self, key: str, work: Callable[[], PreparedRequest]) -> PreparedRequest:
        async with self._turns.turn(key):
            return await asyncio.get_running_loop().run_in_executor(self._readers, work)

    def _admit(self, request: DecisionRequest, key: str) -> PreparedRequest:
        self._check_model(request.model)
        if len(request.questions) > self.config.max_questions:
            message = f"Input should have at most {self.config.max_questions} questions, not {len(request.questions)}"
            raise RequestError([{"loc": place("questions"), "msg": message, "type": "too_long"}])
        if self.config.keys is not None and not self.config.share_checkpoints:
            request = replace(request, cache_salt=json.dumps([key, request.cache_salt]))
        return self.backend.reader.encode(request)

    def _check_model(self, name: str) -> None:
        if name != ALIAS and name not in self.names:
            raise faults.no_such_model()

    @contextlib.asynccontextmanager
    async def _patience(self, request: Request) -> AsyncIterator[None]:
        """The block is cancelled where the client leaves, or where it takes too long."""
        has_left, watching = False, None
        leaving: OnLeaving | None = request.scope.get(ON_LEAVING)
        self._deciding += 1
        try:
            async with asyncio.timeout(self.config.request_timeout) as limit:

                def leave() -> None:
                    nonlocal has_left
                    has_left = True
                    _end_now(limit)

                if leaving is not None:
                    leaving.call = leave
                else:  # another server's connection, which can only be waited for
                    watching = asyncio.ensure_future(_gone(request))
                    watching.add_done_callback(lambda task: None if task.cancelled() else leave())
                yield
        except TimeoutError:
            if has_left:
                raise ClientDisconnect from None
            raise faults.unavailable("The request took too long.") from None
        finally:
            self._deciding -= 1
            if leaving is not None:
                leaving.call = None
            if watching is not None:
                watching.cancel()

    def _route(self, handler: Handler, *, open: bool = False) -> Handler:
        """A handler behind its key, whose faults become responses and are counted."""
        name = handler.__name__

        @functools.wraps(handler)
        async def handle(request: Request) -> Response:
            try:
                request.state.key, request.state.refusal = ANYONE, _refusal_at(request.scope["path"])
                if self.config.keys is not None and not open:
                    request.state.key = self.config.keys.holder(request.headers.get("authorization"))
                response = await handler(request)
            except Fault as fault:
                self.counts.reject(fault.reason)
                response = request.state.refusal(fault)
            except ClientDisconnect:
                self.counts.reject("disconnected")
                response = Response(status_code=499)
            except Exception as error:  # noqa: BLE001 - one request must not take others down
                # The text of an error may quote what was sent.
                logger.error("request %s failed: %s", request.state.request_id, type(error).__name__)
                failure = faults.unavailable("The engine is closed.") if self.backend.closed else faults.broken()
                self.counts.reject(failure.reason)
                response = request.state.refusal(failure)
            self.counts.request(name, response.status_code)
            return response

        return handle

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        await self.backend.start()
        try:
            yield
        finally:
            await self.backend.drain()
        self.end()

    def end(self) -> None:
        """Stop the threads that read; once nothing is read any more."""
        self._readers.shutdown(cancel_futures=True)


class _Json(JSONResponse):
    """Starlette's, written by orjson: numbers are most of an answer, and it writes these ten times as fast."""

    def render(self, content: Any) -> bytes:
        try:
            written = orjson.dumps(content)
        except orjson.JSONEncodeError:  # of integers with more than 64 bits, which levels of a score may hold
            return super().render(content)
        # NaN would be null, too: where there is one, Starlette's writes it, which refuses NaN.
        return super().render(content) if b"null" in written else written


class _Envelope:
    """What every response has, whoever made it: an id; and, on this machine alone, a ``Host`` that is this machine's,
    so that no page in a browser can ask in its user's name.

    Args:
        app: what answers.
        direct: path -> handler of POST requests that need not go through the routing of ``app``, which takes as long
            as reading a short one.
        config: where it listens.
    """

    def __init__(self, app: ASGIApp, direct: Mapping[str, Handler], config: ServeConfig) -> None:
        self._app, self._direct = app, direct
        self._bound = config.host if config.is_local else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = headers.get(REQUEST_ID.encode(), b"").decode("latin-1")
        is_good = 0 < len(given) <= 128 and given.isascii() and given.isprintable()
        request_id = given if is_good else f"req_{uuid.uuid4().hex}"
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                ids = [(name.encode(), request_id.encode()) for name in (REQUEST_ID, OPENAI_REQUEST_ID)]
                message["headers"] = [*message["headers"], *ids]
            await send(message)

        if self._bound is not None and not _is_this_machine(headers.get(b"host", b"").decode("latin-1"), self._bound):
            fault = Fault.of(403, "permission_error", "The Host header names another machine.")
            await _refusal_at(scope["path"])(fault)(scope, receive, send_with_id)
            return
        handler = self._direct.get(scope["path"]) if scope["method"] == "POST" and not scope.get("root_path") else None
        if handler is None:
            await self._app(scope, receive, send_with_id)
            return
        response = await handler(Request(scope, receive, send_with_id))
        await response(scope, receive, send_with_id)


def _is_this_machine(host: str, bound: str) -> bool:
    name = host.rpartition("]")[0] + "]" if host.startswith("[") else host.partition(":")[0]
    return name.lower() in {"", "localhost", "127.0.0.1", "[::1]", bound.lower(), f"[{bound.lower()}]"}


def _most_instructions(request: DecisionRequest, size: int) -> int:
    """Characters of all instructions, those of each question once for every option; of other values than strings, that
    of the whole body, of so many bytes."""
    return sum(
        num_options(question) * (len(given) if isinstance(given, str) else size)
        for question in request.questions.values()
        if (given := question.instructions) is not None
    )


def _end_now(limit: asyncio.Timeout) -> None:
    with contextlib.suppress(RuntimeError):  # it ended
        limit.reschedule(0)


async def _gone(request: Request) -> None:
    """Until the client leaves. The body has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _refusal_at(path: str) -> Callable[[Fault], Response]:
    """How a route tells what is wrong, until a body says otherwise."""
    return refusal if path.endswith("/v1/decisions") else _refusal


def _refusal(fault: Fault) -> Response:
    return JSONResponse({"detail": fault.detail}, status_code=fault.status, headers=fault.headers)


async def _no_such_route(request: Request, error: Exception) -> Response:
    return _refusal(Fault.of(404, "not_found_error", "There is no such route."))


async def _no_such_method(request: Request, error: Exception) -> Response:
    allowed = getattr(error, "headers", None) or {}
    fault = Fault.of(405, "method_not_allowed", "The route does not know this method.", headers=allowed)
    return _refusal_at(request.scope["path"])(fault)


__all__ = ["ALIAS", "DecisionServer"]
