"""The OpenAPI 3.1 document of a server: limits from where they are checked, examples from the code that answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flide.errors import RequestError
from flide.runtime.decision import Decision, Usage, answer_question
from flide.runtime.request import DecisionRequest
from flide.runtime.strict_json import MAX_DEPTH
from flide.runtime.wire import parse_body
from flide.serve.config import ServeConfig
from flide.serve.decisions import envelope, translate
from flide.serve.extras import extras
from flide.serve.faults import invalid
from flide.serve.schemas import reference, schemas
from flide.version import __version__

STATE = "The box was crushed and two of the six glasses are broken. I need them on Saturday."
SYSTEM_ONE = {
    "model": "jev-latest",
    "state": STATE,
    "questions": {
        "damaged": {"type": "noul", "instructions": "Did the goods arrive damaged?"},
        "team": {
            "type": "choice",
            "instructions": "Which team should answer?",
            "criteria": {"shipping": "delivery, damage in transit", "billing": None},
        },
        "anger": {
            "type": "score",
            "instructions": "How angry is the customer?",
            "criteria": ["calm", "annoyed", "furious"],
        },
    },
}
OPENAI = {
    "model": "jev-latest",
    "input": STATE,
    "questions": [
        {"type": "predicate", "name": "damaged", "instructions": "The goods arrived damaged."},
        {
            "type": "choice",
            "name": "team",
            "instructions": "Which team should answer?",
            "choices": [{"value": "shipping", "description": "delivery, damage in transit"}, {"value": "billing"}],
        },
        {
            "type": "score",
            "instructions": "How angry is the customer?",
            "levels": [{"label": "calm"}, {"label": "annoyed"}, {"label": "furious"}],
        },
    ],
}
MODEL_HASH = "5d41402abc4b2a76"
CONVERSATION = {
    "model": "jev-latest",
    "input": [
        {"role": "user", "content": "Two of the glasses are broken."},
        {"role": "assistant", "content": [{"type": "output_text", "text": "Shall I send new ones?"}]},
        {"role": "user", "content": [{"type": "input_text", "text": "Yes, please."}]},
    ],
    "questions": [
        {
            "type": "choice",
            "instructions": "Does the customer want a replacement?",
            "choices": [{"value": True}, {"value": False}],
        }
    ],
}


def document(config: ServeConfig, names: Sequence[str]) -> dict[str, Any]:
    """The document of a server.

    Args:
        config: its limits.
        names: the names of its model that requests may use; the first one is in answers.
    """
    info = {
        "title": "Flide",
        "version": __version__,
        "description": (
            "Typed questions about one shared state, answered with a probability per option. Every question gets the "
            "answer it would get alone.\n\n"
            f"Bodies have at most {config.max_body_bytes} bytes, as sent and unpacked, and may be packed with gzip or "
            f"zstd (`Content-Encoding`). JSON is strict: UTF-8, no repeated keys, at most {MAX_DEPTH} nested levels. "
            "A refusal never repeats what was sent. Where a retry helps there is a `Retry-After`."
        ),
    }
    keyed: list[dict[str, list[str]]] = [{"key": []}] if config.keys is not None else []
    security = {"key": {"type": "http", "scheme": "bearer"}} if keyed else {}
    return {
        "openapi": "3.1.0",
        "info": info,
        "servers": [{"url": config.root_path or "/"}],
        "security": keyed,
        "paths": {
            "/v1/systemone": {"post": _systemone(names, has_keys=bool(keyed))},
            "/v1/decisions": {"post": _decisions(names, has_keys=bool(keyed))},
            **{
                path: {"get": _get(path, has_keys=bool(keyed))}
                for path in ("/v1/models", "/health", "/ready", "/metrics", "/openapi.json", "/docs")
            },
        },
        "components": {
            "schemas": schemas(names, config.max_questions),
            "headers": {
                "RequestId": {
                    "description": "Names the request: what was sent as x-typesafe-request-id, or a new id.",
                    "schema": {"type": "string", "minLength": 1, "maxLength": 128},
                }
            },
            **({"securitySchemes": security} if security else {}),
        },
    }


def _systemone(names: Sequence[str], *, has_keys: bool) -> dict[str, Any]:
    examples = {
        "three": ("A question of each type", SYSTEM_ONE, _answered(SYSTEM_ONE, names[0])),
        "no_questions": ("No questions", {**SYSTEM_ONE, "questions": {}}, None),
    }
    requests = {name: {"summary": summary, "value": body} for name, (summary, body, _) in examples.items()}
    refused = {"no_questions": {"value": {"detail": _refused(parse_body, examples["no_questions"][1]).errors}}}
    return {
        "operationId": "systemone",
        "summary": "Answer questions in System One's shape",
        "requestBody": _body("SystemOneRequest", requests),
        "responses": {
            "200": _ok("SystemOneResponse", {"three": {"value": examples["three"][2]}}),
            "400": _response("The model is not served", "Refusal"),
            "422": _response("What is wrong with the request", "ValidationRefusal", refused),
            **_refusals(reference("Refusal"), has_keys=has_keys),
        },
    }


def _decisions(names: Sequence[str], *, has_keys: bool) -> dict[str, Any]:
    unnamed = {**OPENAI, "questions": []}
    examples = {
        "openai": ("A question of each type", OPENAI),
        "conversation": ("About a conversation, with typed values", CONVERSATION),
        "system_one": ("System One's shape", SYSTEM_ONE),
        "no_questions": ("No questions", unnamed),
    }
    answers = {
        "openai": _translated(OPENAI, names[0]),
        "conversation": _translated(CONVERSATION, names[0]),
        "system_one": _answered(SYSTEM_ONE, names[0]),
    }
    refused = {"no_questions": {"value": envelope(invalid(_refused(translate, unnamed)))}}
    either = {"anyOf": [reference("OpenAIRefusal"), reference("Refusal")]}
    return {
        "operationId": "decisions",
        "summary": "Answer questions in OpenAI's shape, or in System One's",
        "description": (
            "`input` and a list of questions are OpenAI's shape, `state` and a map of questions System One's, which is "
            "answered and refused as on its own route. In OpenAI's shape all that is wrong with a request is a 400, "
            "whose `param` says where. One user message is the state as text; any other list of messages is the state "
            "as an array of roles and texts."
        ),
        "requestBody": _body(
            {"anyOf": [reference("OpenAIRequest"), reference("SystemOneRequest")]},
            {name: {"summary": summary, "value": body} for name, (summary, body) in examples.items()},
        ),
        "responses": {
            "200": _ok(
                {"anyOf": [reference("OpenAIResponse"), reference("SystemOneResponse")]},
                {name: {"value": answer} for name, answer in answers.items()},
            ),
            "400": _response("What is wrong with the request", either, refused),
            "422": _response("What is wrong with a request in System One's shape", "ValidationRefusal"),
            **_refusals(either, has_keys=has_keys),
        },
    }


def _get(path: str, *, has_keys: bool) -> dict[str, Any]:
    text = {"type": "string"}
    name, summary, media, schema = {
        "/v1/models": ("models", "The names that requests may use", "application/json", reference("Models")),
        "/health": ("health", "Whether the process lives", "application/json", reference("Status")),
        "/ready": ("ready", "Whether requests are answered", "application/json", reference("Status")),
        "/metrics": ("metrics", "Counters, for Prometheus", "text/plain", text),
        "/openapi.json": ("openapi", "This document", "application/json", {"type": "object"}),
        "/docs": ("docs", "This document as a page", "text/html", text),
    }[path]
    is_open = path in ("/health", "/ready")
    responses = {"200": {"description": "It is here", "headers": _headers(), "content": {media: {"schema": schema}}}}
    if path == "/ready":
        responses["503"] = _response("Not ready", "Refusal")
    if has_keys and not is_open:
        responses["401"] = _response("No key, or an unknown one", "Refusal")
    responses["403"] = _response("The Host header names another machine", "Refusal")
    return {"operationId": name, "summary": summary, "responses": responses, **({"security": []} if is_open else {})}


def _content(schema: str | Mapping[str, Any], examples: Mapping[str, Any] | None = None) -> dict[str, Any]:
    shape = reference(schema) if isinstance(schema, str) else schema
    return {"application/json": {"schema": shape, **({"examples": examples} if examples else {})}}


def _body(schema: str | Mapping[str, Any], examples: Mapping[str, Any]) -> dict[str, Any]:
    return {"required": True, "content": _content(schema, examples)}


def _headers() -> dict[str, Any]:
    return {name: {"$ref": "#/components/headers/RequestId"} for name in ("x-typesafe-request-id", "x-request-id")}


def _response(
    description: str, schema: str | Mapping[str, Any], examples: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    return {"description": description, "headers": _headers(), "content": _content(schema, examples)}


def _ok(schema: str | Mapping[str, Any], examples: Mapping[str, Any]) -> dict[str, Any]:
    timing = {"description": "Milliseconds: read, wait, run.", "schema": {"type": "string"}}
    response = _response("An answer to every question; the numbers of examples are made up", schema, examples)
    return {**response, "headers": {**_headers(), "Server-Timing": timing}}


def _refusals(schema: Mapping[str, Any], *, has_keys: bool) -> dict[str, Any]:
    """What any request with a body can be refused with."""
    texts = {
        "401": "No key, or an unknown one",
        "403": "The Host header names another machine",
        "408": "The body did not arrive in time",
        "413": "The body is too large, or unpacks to too much",
        "415": "Content-Type or Content-Encoding cannot be read",
        "429": "This key has too many requests waiting",
        "500": "The model failed",
        "503": "Not ready, shutting down, or waited too long",
        "529": "Too much is waiting already",
    }
    if not has_keys:
        del texts["401"]
    responses = {status: _response(text, schema) for status, text in texts.items()}
    seconds = {"description": "Seconds.", "schema": {"type": "integer", "minimum": 0}}
    for status in ("429", "503", "529"):
        responses[status]["headers"] = {**_headers(), "Retry-After": seconds}
    return responses


def _decide(request: DecisionRequest, model: str) -> Decision:
    """Made-up answers: of options, the first is the most probable."""
    answers = {}
    for question_id, question in request.questions.items():
        count = len(question.criteria or ()) if question.type != "noul" else 2
        answers[question_id] = answer_question(question, [2.0**-index for index in range(count)])
    return Decision(model, answers, Usage(96, len(answers), shared_tokens=24 * (len(answers) - 1)))


def _answered(body: Any, model: str) -> dict[str, Any]:
    decision = _decide(parse_body(body), model)
    return {**decision.to_dict(), **extras(decision, MODEL_HASH)}


def _translated(body: Any, model: str) -> dict[str, Any]:
    translated = translate(body)
    decision = _decide(translated.request, model)
    return {**translated.response(decision), **extras(decision, MODEL_HASH)}


def _refused(parse: Callable[[Any], Any], body: Any) -> RequestError:
    try:
        parse(body)
    except RequestError as error:
        return error
    raise AssertionError("the example is refused")
