"""What a request can be refused with, as the wire says it.

A refusal by validation is ``{"detail": [{"loc": ["body", ...], "msg", "type"}]}``, every other one
``{"detail": {"error_type", "message"}}``. Nothing that was sent is repeated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flide.errors import RequestError

RETRY_SOON = 1  # seconds; official clients give up at 30


class Fault(Exception):
    """A request that gets no answer.

    Attributes:
        status: of the response.
        detail: of its body.
        reason: a short name, for metrics.
        headers: of the response.
    """

    def __init__(self, status: int, detail: Any, reason: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(status, reason)
        self.status, self.detail, self.reason = status, detail, reason
        self.headers = dict(headers or {})

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.status, self.detail, self.reason, self.headers)

    @classmethod
    def of(cls, status: int, kind: str, message: str, *, retry: bool = False, headers: Any = None) -> Fault:
        retry_after = {"Retry-After": str(RETRY_SOON)} if retry else {}
        return cls(status, {"error_type": kind, "message": message}, kind, {**retry_after, **(headers or {})})


def invalid(error: RequestError) -> Fault:
    """422, with every problem that was found."""
    return Fault(422, error.errors, "invalid_request")


def no_such_model() -> Fault:
    return Fault.of(400, "api_usage_error", "Unknown model. GET /v1/models lists the ones that are served.")


def unauthenticated(message: str) -> Fault:
    return Fault.of(401, "authentication_error", message, headers={"WWW-Authenticate": "Bearer"})


def too_large(what: str, limit: int) -> Fault:
    return Fault.of(413, "request_too_large", f"The {what} is larger than {limit} bytes.", headers=CLOSE)


def unsupported_media(message: str) -> Fault:
    return Fault.of(415, "unsupported_media_type", message)


def slow_body(seconds: float) -> Fault:
    return Fault.of(408, "request_timeout", f"The body did not arrive within {seconds:g} seconds.", headers=CLOSE)


def key_limit(limit: int) -> Fault:
    return Fault.of(429, "rate_limit_error", f"This key has {limit} requests waiting or running.", retry=True)


def queue_full() -> Fault:
    return Fault.of(529, "overloaded_error", "Too much is waiting already.", retry=True)


def no_room() -> Fault:
    fault = queue_full()
    fault.headers.update(CLOSE)
    return fault


def unavailable(message: str) -> Fault:
    return Fault.of(503, "service_unavailable", message, retry=True)


def broken() -> Fault:
    return Fault.of(500, "internal_error", "This request could not be answered.")


CLOSE = {"Connection": "close"}  # the rest of the body is not read
