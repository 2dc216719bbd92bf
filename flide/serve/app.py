"""The application: routes in front of an engine and a scheduler."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import os
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from flide.errors import RequestError
from flide.runtime.decision import Decision, num_options
from flide.runtime.engine import Engine
from flide.runtime.known_bodies import KnownBodies
from flide.runtime.questionnaire import Questionnaire
from flide.runtime.request import DecisionRequest
from flide.runtime.rounds import PreparedRequest
from flide.runtime.wire import place
from flide.serve import faults
from flide.serve.backend import Backend, LocalBackend
from flide.serve.body import Body, Held, Room, known_encoding, read_body
from flide.serve.call import REQUEST_ID, Call, Patience, ids
from flide.serve.config import ServeConfig
from flide.serve.decisions import refusal
from flide.serve.docs_page import POLICY, docs_page
from flide.serve.extras import extras
from flide.serve.faults import Fault
from flide.serve.openapi import document
from flide.serve.shapes import Decisions, Shape, SystemOne, refusal_of_systemone, to_json
from flide.serve.turns import Turns

logger = logging.getLogger("flide.serve")

ALIAS = "jev-latest"  # always served
_IS_JSON = b"content-type", b"application/json"
MOST_READERS = 8
# Of a short body that is read on the event loop: questions, where others are there, and characters of prompts, counting
# instructions once for each option, as some formats repeat them. A millionth of a second each at worst.
FEW_QUESTIONS, FEW_CHARACTERS = 8, 1 << 16
Handler = Callable[[Call], Awaitable[Response]]


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
        posts = {
            "/v1/systemone": self._route(self.systemone),
            "/v1/decisions": self._route(self.decisions),
        }
        gets = {
            "/v1/models": self._route(self.models),
            "/health": self._route(self.health, open=True),
            "/ready": self._route(self.ready, open=True),
            "/metrics": self._route(self.prometheus),
            "/openapi.json": self._route(self.openapi),
            "/docs": self._route(self.docs),
        }
        routes = [
            Route(path, _endpoint(handler), methods=[method])
            for method, handlers in (("POST", posts), ("GET", gets))
            for path, handler in handlers.items()
        ]
        starlette = Starlette(
            routes=routes,
            lifespan=self._lifespan,
            exception_handlers={404: _no_such_route, 405: _no_such_method},
        )
        starlette.router.redirect_slashes = False  # official clients follow no redirect
        return _Envelope(starlette, posts, self.config)

    async def systemone(self, call: Call) -> Response:
        return await self._decide(call, SystemOne(self._known, call.key))

    async def decisions(self, call: Call) -> Response:
        """OpenAI's shape, and System One's as on its own route."""
        return await self._decide(call, Decisions(call))

    async def _decide(self, call: Call, shape: Shape) -> Response:
        """The decision under the name of the model that is served, in the shape of a route."""
        began = time.perf_counter()
        with self._room.hold() as held:
            body = await self._body(call, held)
            self._deciding += 1
            patience = Patience(call, self.config.request_timeout)
            try:
                prepared = await self._read(call, shape, body, patience)
                del body
                held.grow(0)
                read = time.perf_counter()
                with self.backend.ticket(prepared, call.key) as ticket:
                    decision = await patience.wait(ticket.answer)
                wait, run = ticket.waited, ticket.ran
                timing = f"read;dur={1e3 * (read - began):.2f}, wait;dur={1e3 * wait:.2f}, run;dur={1e3 * run:.2f}"
                answer = shape.answer(Decision(self.names[0], decision.answers, decision.usage))
                content = to_json({**answer, **extras(decision, self.backend.reader.model_hash)})
                response = call.answer(200, [_IS_JSON, (b"server-timing", timing.encode())], content)
            finally:
                self._deciding -= 1
                patience.close()
        self.counts.answered([answer.type for answer in decision.answers.values()], wait, run)
        return response

    async def models(self, call: Call) -> Response:
        names = dict.fromkeys([*self.names, ALIAS])
        return JSONResponse(
            {"models": [{"name": name, "description": "", "release_date": self._started} for name in names]}
        )

    async def health(self, call: Call) -> Response:
        return JSONResponse({"status": "ok"})

    async def ready(self, call: Call) -> Response:
        if self.backend.closed:
            raise faults.unavailable("The engine is closed.")
        if await self.backend.stuck_for() > self.config.stuck_after:
            raise faults.unavailable("The engine has not answered for a while.")
        return JSONResponse({"status": "ready"})

    async def prometheus(self, call: Call) -> Response:
        return Response(await self.backend.metrics(), media_type="text/plain; version=0.0.4")

    async def openapi(self, call: Call) -> Response:
        return JSONResponse(self._document)

    async def docs(self, call: Call) -> Response:
        return HTMLResponse(docs_page(self._document), headers={"Content-Security-Policy": POLICY})

    async def _body(self, call: Call, held: Held) -> Body:
        kind = (call.header(b"content-type") or "application/json").partition(";")[0].strip().lower()
        if kind == "multipart/form-data":  # as official clients send images
            message = "Multipart bodies are not supported: only text can be read"
            raise faults.invalid(RequestError([{"loc": ["body"], "msg": message, "type": "value_error"}]))
        if kind not in ("application/json", "") and not kind.endswith("+json"):
            raise faults.unsupported_media("Content-Type should be application/json: only text can be read.")
        encoding, limit = known_encoding(call.header(b"content-encoding") or ""), self.config.max_body_bytes
        packed = call.body
        if packed is None or len(packed) > limit:
            declared, timeout = call.header(b"content-length"), self.config.body_timeout
            packed = await read_body(call.chunks(), declared=declared, max_bytes=limit, timeout=timeout, grow=held.grow)
        else:
            held.grow(len(packed))
        return Body(packed, encoding, limit)

    async def _read(self, call: Call, shape: Shape, body: Body, patience: Patience) -> PreparedRequest:
        """The request in a body, made ready; off the event loop unless little is asked, or at least nothing else."""

        def admit(parsed: DecisionRequest) -> PreparedRequest:
            try:
                return self._admit(parsed, call.key)
            except RequestError as error:
                raise shape.tell(error) from None

        def on_a_reader(work: Callable[[], PreparedRequest]) -> Awaitable[PreparedRequest]:
            return patience.wait(asyncio.ensure_future(self._on_a_reader(call.key, work)))

        try:
            if not body.is_short:
                return await on_a_reader(lambda: admit(shape.parse(body.unpack())))
            parsed = shape.parse(body.packed)
            is_little = self._deciding == 1 or len(parsed.questions) <= FEW_QUESTIONS
            if is_little and _most_instructions(parsed, len(body.packed)) <= FEW_CHARACTERS:
                return admit(parsed)
            return await on_a_reader(lambda: admit(parsed))
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

    def _route(self, handler: Handler, *, open: bool = False) -> Handler:
        """A handler behind its key, whose faults become responses and are counted."""
        name = handler.__name__

        @functools.wraps(handler)
        async def handle(call: Call) -> Response:
            try:
                if self.config.keys is not None and not open:
                    call.key = self.config.keys.holder(call.header(b"authorization"))
                response = await handler(call)
            except Fault as fault:
                self.counts.reject(fault.reason)
                response = call.refusal(fault)
            except ClientDisconnect:
                self.counts.reject("disconnected")
                response = Response(status_code=499)
            except Exception as error:  # noqa: BLE001 - one request must not take others down
                # The text of an error may quote what was sent.
                logger.error("request %s failed: %s", call.request_id, type(error).__name__)
                failure = faults.unavailable("The engine is closed.") if self.backend.closed else faults.broken()
                self.counts.reject(failure.reason)
                response = call.refusal(failure)
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
        given = host = ""
        for name, value in scope["headers"]:
            if name == REQUEST_ID:
                given = value.decode("latin-1")
            elif name == b"host":
                host = value.decode("latin-1")
        is_good = 0 < len(given) <= 128 and given.isascii() and given.isprintable()
        request_id = given if is_good else f"req_{secrets.token_hex(16)}"
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *ids(request_id)]
            await send(message)

        path = scope["path"]
        if self._bound is not None and not _is_this_machine(host, self._bound):
            fault = Fault.of(403, "permission_error", "The Host header names another machine.")
            await _refusal_at(path)(fault)(scope, receive, send_with_id)
            return
        handler = self._direct.get(path) if scope["method"] == "POST" and not scope.get("root_path") else None
        if handler is None:
            await self._app(scope, receive, send_with_id)
            return
        response = await handler(Call(scope, receive, send, _refusal_at(path)))
        await response(scope, receive, send_with_id)


def _endpoint(handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    """A handler as Starlette calls it."""

    async def endpoint(request: Request) -> Response:
        scope = request.scope
        return await handler(Call(scope, request.receive, request._send, _refusal_at(scope["path"])))

    return endpoint


def _is_this_machine(host: str, bound: str) -> bool:
    name = host.rpartition("]")[0] + "]" if host.startswith("[") else host.partition(":")[0]
    return name.lower() in {"", "localhost", "127.0.0.1", "[::1]", bound.lower(), f"[{bound.lower()}]"}


def _most_instructions(request: DecisionRequest, size: int) -> int:
    """Characters of all instructions, those of each question once for every option; of other values than strings, that
    of the whole body, of so many bytes."""
    questions = request.questions
    if isinstance(questions, Questionnaire) and questions.characters is not None:
        return questions.characters
    characters, is_text = 0, True
    for question in questions.values():
        given = question.instructions
        if given is not None:
            is_text = is_text and isinstance(given, str)
            characters += num_options(question) * (len(given) if isinstance(given, str) else size)
    if isinstance(questions, Questionnaire) and is_text:  # whatever else is in a body
        questions.characters = characters
    return characters


def _refusal_at(path: str) -> Callable[[Fault], Response]:
    """How a route tells what is wrong, until a body says otherwise."""
    return refusal if path.endswith("/v1/decisions") else refusal_of_systemone


async def _no_such_route(request: Request, error: Exception) -> Response:
    return refusal_of_systemone(Fault.of(404, "not_found_error", "There is no such route."))


async def _no_such_method(request: Request, error: Exception) -> Response:
    allowed = getattr(error, "headers", None) or {}
    fault = Fault.of(405, "method_not_allowed", "The route does not know this method.", headers=allowed)
    return _refusal_at(request.scope["path"])(fault)


__all__ = ["ALIAS", "DecisionServer"]
