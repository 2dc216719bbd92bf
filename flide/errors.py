"""The errors users meet. Bad input is a ``ValueError``; a model whose output is no number is a ``RuntimeError``, and
so is a server that does not answer."""

from __future__ import annotations

from typing import Any


class FlideError(ValueError):
    """Base class of every error Flide raises for bad input."""


class CheckpointError(FlideError):
    """A model directory that cannot be loaded: bad config, missing, unexpected or wrongly shaped tensors."""


class ModelOutputError(RuntimeError):
    """The model produced logits that are not finite; its weights are damaged or its dtype overflows."""


class ServerError(RuntimeError):
    """A server that gave no answer.

    Attributes:
        status: of its response, or None where there was none.
        kind: its word for what is wrong, like ``overloaded_error``, or None.
        request_id: names the request in the server's logs, or None.
    """

    def __init__(
        self, message: str, *, status: int | None = None, kind: str | None = None, request_id: str | None = None
    ) -> None:
        self.status, self.kind, self.request_id = status, kind, request_id
        super().__init__(message)


class RequestError(FlideError):
    """A request that cannot be answered.

    Attributes:
        errors: the wire's ``detail`` list; each entry is ``{"loc": ["body", ...], "msg": str, "type": str}`` and never
            repeats the offending input.
        index: position of the request in the list given to ``Engine.decide``, or None outside of it.
    """

    def __init__(self, errors: list[dict[str, Any]], *, index: int | None = None) -> None:
        self.errors = errors
        self.index = index
        super().__init__(errors)

    def __str__(self) -> str:
        where = "" if self.index is None else f"request {self.index}: "
        return where + "; ".join(f"{'.'.join(str(part) for part in e['loc'])}: {e['msg']}" for e in self.errors)
