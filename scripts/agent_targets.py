"""What answers the steps of agents: an engine asked with token ids, one asked with text, or a server."""

from __future__ import annotations

import json
import threading
import uuid
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from http.client import HTTPConnection
from typing import Any, Protocol
from urllib.parse import SplitResult

from flide.models.decision import ForDecision
from flide.runtime.checkpoints.positions import Reuse
from flide.runtime.config import EngineConfig
from flide.runtime.decision import Decision
from flide.runtime.engine import Engine
from flide.runtime.request import Choice, DecisionRequest
from flide.runtime.rounds import PreparedRequest, RoundRunner
from flide.runtime.tokenizer import PromptTokenizer
from flide.runtime.worker import Job, Worker
from scripts.agent_steps import BEHIND_STATE, Step

FIRST_LABEL, LABELS = 100, 255  # label rows of an engine without a tokenizer
OPTIONS = 6  # of each of its questions


@dataclass(frozen=True, slots=True)
class Reply:
    """An answered step.

    Attributes:
        answers: probabilities of each question's options.
        tokens: of the input.
        reused: those of them that were not computed.
    """

    answers: list[list[float]]
    tokens: int
    reused: int

    @classmethod
    def of(cls, decision: Decision) -> Reply:
        answers = [list(answer.probabilities.values()) for answer in decision.answers.values()]
        return cls(answers, decision.usage.input_tokens, decision.usage.reused_tokens)


class Target(Protocol):
    """What answers steps. What is prepared is not timed."""

    def prepare(self, step: Step) -> Any: ...

    def submit(self, prepared: Any) -> Future[Any]:
        """The future is for ``reply``."""

    def reply(self, result: Any) -> Reply: ...

    def stats(self) -> dict[str, float]:
        """Of the store of checkpoints; nothing where there is none, or it does not say."""

    def close(self) -> None: ...


class TokenTarget:
    """An engine without its tokenizer."""

    def __init__(self, model: ForDecision, config: EngineConfig, max_prompt_tokens: int) -> None:
        labels = range(FIRST_LABEL, FIRST_LABEL + LABELS)
        self._runner = RoundRunner(
            model, labels, config=config, max_prompt_tokens=max_prompt_tokens, model_name="bench"
        )
        self._worker = Worker(self._runner)
        self.report = self._runner.streams.report

    def prepare(self, step: Step) -> PreparedRequest:
        criteria = {f"o{k}": None for k in range(OPTIONS)}
        questions = {f"q{i}": Choice("?", criteria) for i in range(len(step.questions))}
        prepared = PreparedRequest.of(DecisionRequest("", questions), step.tree(), [OPTIONS] * len(questions))
        kept = len(step.state) - BEHIND_STATE  # what later states begin with
        return replace(prepared, reuse=Reuse(len(step.state), (kept,) if kept > 0 else ()))

    def submit(self, prepared: PreparedRequest) -> Future[Decision]:
        job = Job(prepared)
        self._worker.submit([job])
        return job.future

    def reply(self, result: Decision) -> Reply:
        return Reply.of(result)

    def stats(self) -> dict[str, float]:
        return {} if self._runner.store is None else asdict(self._runner.store.stats())

    def close(self) -> None:
        self._worker.close()


class TextTarget:
    """An engine that is asked with text."""

    def __init__(self, model: ForDecision, tokenizer: PromptTokenizer, config: EngineConfig) -> None:
        self._engine = Engine(model, tokenizer, config)
        self.report = self._engine.report

    def prepare(self, step: Step) -> DecisionRequest:
        return step.request()

    def submit(self, prepared: DecisionRequest) -> Future[Decision]:
        return self._engine.submit(self._engine.prepare(prepared))

    def reply(self, result: Decision) -> Reply:
        return Reply.of(result)

    def stats(self) -> dict[str, float]:
        stats = self._engine.checkpoint_stats()
        return {} if stats is None else asdict(stats)

    def close(self) -> None:
        self._engine.close()


class HttpTarget:
    """A server.

    Args:
        url: of the server.
        fresh: whether every request is to resume from nothing and to keep nothing.
        clients: requests at the same time.
        api_key: if the server asks for one.
    """

    report = None

    def __init__(self, url: SplitResult, *, fresh: bool, clients: int, api_key: str | None = None) -> None:
        assert url.hostname is not None, "checked when it was read"
        self._host, self._port, self._path = url.hostname, url.port or 80, f"{url.path.rstrip('/')}/v1/systemone"
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._fresh = fresh
        self._pool, self._local = ThreadPoolExecutor(clients), threading.local()

    def prepare(self, step: Step) -> bytes:
        body = step.request().to_dict()
        if self._fresh:
            body["x_flide"] = {"cache_salt": uuid.uuid4().hex, "checkpoint": False}
        return json.dumps(body).encode()

    def submit(self, prepared: bytes) -> Future[bytes]:
        return self._pool.submit(self._ask, prepared)

    def _ask(self, body: bytes) -> bytes:
        """Over a connection of the thread's own."""
        if not hasattr(self._local, "connection"):
            self._local.connection = HTTPConnection(self._host, self._port, timeout=120)
        self._local.connection.request("POST", self._path, body, self._headers)
        response = self._local.connection.getresponse()
        data: bytes = response.read()
        if response.status != 200:
            raise RuntimeError(f"the server answers {response.status}")
        return data

    def reply(self, result: bytes) -> Reply:
        body = json.loads(result)
        answers = [
            list(answer["probabilities"].values())
            if "probabilities" in answer
            else [answer["noul"], 1 - answer["noul"]]
            for answer in body["answers"].values()
        ]
        return Reply(answers, body["usage"]["input_tokens"], body.get("x_flide", {}).get("reused_tokens", 0))

    def stats(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        self._pool.shutdown()
