"""RequestReader: parsed requests to prepared ones, where there need be no model."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace

from flide.errors import ModelOutputError, RequestError
from flide.heads import Head
from flide.runtime.decision import Decision
from flide.runtime.format import DecisionFormat
from flide.runtime.request import DecisionRequest
from flide.runtime.rounds import OptionLogits, PreparedRequest
from flide.runtime.wire import place


@dataclass(frozen=True, slots=True)
class RequestReader:
    """Everything before and after an engine's rounds. It can be sent to another process.

    Attributes:
        format: how requests become prompts.
        head: what will read the options; only what it says of questions matters here.
        depth: levels of the trees, at most.
        least_saved: rows that a third level has to save.
        max_request_tokens: rows that one request may have; None for any number.
        model_name, temperatures, model_hash: of the engine.
        checkpoints: whether the engine keeps any.
    """

    format: DecisionFormat
    head: Head
    depth: int
    least_saved: int
    max_request_tokens: int | None
    model_name: str
    temperatures: Mapping[str, float]
    model_hash: str
    checkpoints: bool = False

    def encode(self, request: DecisionRequest) -> PreparedRequest:
        """Prepare what ``parse_request`` or ``parse_body`` returned: all that can be refused is refused here.

        Raises:
            RequestError: it is too large, or the model's prompt or head has no place for it.
        """
        prepared = PreparedRequest.encode(
            request,
            self.format,
            self.head,
            depth=self.depth,
            least=self.least_saved,
            checkpoints=self.checkpoints,
        )
        if self.max_request_tokens is not None and prepared.needed.tokens > self.max_request_tokens:
            numbers = f"{prepared.needed.tokens} tokens; at most {self.max_request_tokens} are allowed"
            message = f"state and questions together have {numbers}"
            raise RequestError([{"loc": place("questions"), "msg": message, "type": "request_too_long"}])
        return prepared

    def decision(self, prepared: PreparedRequest, logits: OptionLogits) -> Decision | ModelOutputError:
        """See :meth:`PreparedRequest.result`."""
        return prepared.result(logits, self.model_name, self.temperatures)

    def on_cpu(self) -> RequestReader:
        """The reader with a copy of the head that lies on no device."""
        return replace(self, head=copy.deepcopy(self.head).cpu())
