"""The engine: one thread owns the model; any number of threads and event loops ask it."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, overload

from flide.errors import RequestError
from flide.models.auto import AutoModelForDecision
from flide.models.decision import ForDecision
from flide.models.weights import resolve_directory
from flide.runtime.config import EngineConfig
from flide.runtime.decision import Decision
from flide.runtime.prompt import ChatFormat
from flide.runtime.request import DecisionRequest
from flide.runtime.rounds import ModelOutputError, PreparedRequest, RoundRunner
from flide.runtime.tokenizer import PromptTokenizer
from flide.runtime.wire import parse_request

logger = logging.getLogger("flide.engine")

EMBEDDED_MODEL = "flide-tiny-random"
Request = DecisionRequest | Mapping[str, Any]


class Engine:
    """Answers typed questions about shared states.

    Requests that wait together share a round: their states run once and fork into every question in one forward pass.
    Safe to use from several threads; close it, or use it as a context manager, to stop its thread and free the model.

    Args:
        model: a tree-aware model, on its device, in eval mode.
        tokenizer: the model's tokenizer.
        config: engine options (device and dtype are the model's own here).
    """

    def __init__(self, model: ForDecision, tokenizer: PromptTokenizer, config: EngineConfig | None = None) -> None:
        self.config = config or EngineConfig()
        self.model_name = self.config.model_name or type(model).__name__
        limit = self.config.max_prompt_tokens or model.config.max_position_embeddings
        self.format = ChatFormat(tokenizer, max_prompt_tokens=limit)
        label_ids = self.format.label_ids(tokenizer.num_labels())
        if max(label_ids) >= model.config.vocab_size:
            raise ValueError("the tokenizer does not belong to the model: it has labels outside the vocabulary")
        runner = RoundRunner(model, label_ids, model_name=self.model_name)
        max_tokens = self.config.round_tokens(runner.label_rows_LD.device)
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        # A daemon, so that a forgotten engine cannot keep the process alive; the finalizer (also run at exit) ends it
        # in order. The thread must not hold the engine, or it would never be collected.
        thread = threading.Thread(
            target=_serve, args=(runner, self._jobs, max_tokens), name="flide-engine", daemon=True
        )
        thread.start()
        self._stop = weakref.finalize(self, _stop_thread, self._jobs, thread)

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        config: EngineConfig | None = None,
        *,
        revision: str | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
    ) -> Self:
        """An engine for a model directory or Hub id.

        Raises:
            CheckpointError: the model or its tokenizer cannot be loaded.
            ValueError: a device or dtype that cannot be had.
        """
        config = config or EngineConfig()
        device = config.resolve_device()
        directory = resolve_directory(path, revision=revision, cache_dir=cache_dir, local_files_only=local_files_only)
        tokenizer = PromptTokenizer.from_pretrained(directory)
        model = AutoModelForDecision.from_pretrained(directory, dtype=config.resolve_dtype(), device=device)
        if device.type == "cuda":
            logger.warning("no CUDA kernels yet: the ops run as their reference, which is exact but slow")
        if config.model_name is None:
            config = replace(config, model_name=directory.resolve().name if directory == Path(path) else str(path))
        return cls(model, tokenizer, config)

    @classmethod
    def default(cls, config: EngineConfig | None = None) -> Self:
        """An engine for the model inside the package, which is random: it shows how things work, not what is true."""
        logger.warning("the embedded model is random: its answers mean nothing")
        config = config or EngineConfig()
        if config.model_name is None:
            config = replace(config, model_name=EMBEDDED_MODEL)
        return cls.from_pretrained(embedded_model_directory(), config)

    @overload
    def decide(self, requests: Sequence[Request], *, return_exceptions: Literal[False] = False) -> list[Decision]: ...

    @overload
    def decide(self, requests: Sequence[Request], *, return_exceptions: bool) -> list[Decision | Exception]: ...

    def decide(
        self, requests: Sequence[Request], *, return_exceptions: bool = False
    ) -> list[Decision] | list[Decision | Exception]:
        """Answer requests, in order.

        Args:
            requests: ``DecisionRequest`` objects or plain System One bodies. All are checked before any runs.
            return_exceptions: put a request's error in its place instead of raising it.

        Raises:
            RequestError: a request is invalid; nothing ran. ``.index`` and ``.errors`` say where and why.
            ModelOutputError: the model's logits are not finite.
            RuntimeError: the engine is closed, or running the model failed.
        """
        outcomes = self._submit(self._prepare(requests, return_exceptions))
        try:
            return _collect([o.result() if isinstance(o, _Pending) else o for o in outcomes], return_exceptions)
        except BaseException:  # Ctrl-C included: what has not begun need not run
            for outcome in outcomes:
                if isinstance(outcome, _Pending):
                    outcome.future.cancel()
            raise

    async def adecide(
        self, requests: Sequence[Request], *, return_exceptions: bool = False
    ) -> list[Decision] | list[Decision | Exception]:
        """:meth:`decide` without blocking the event loop; cancelling the task drops requests that wait."""
        outcomes = self._submit(await asyncio.to_thread(self._prepare, requests, return_exceptions))
        pending = [asyncio.wrap_future(o.future) for o in outcomes if isinstance(o, _Pending)]
        done = iter(await asyncio.gather(*pending, return_exceptions=True))
        results: list[Decision | Exception] = []
        for outcome in outcomes:
            result = next(done) if isinstance(outcome, _Pending) else outcome
            if isinstance(result, BaseException) and not isinstance(result, Exception):
                raise result
            results.append(result)
        return _collect(results, return_exceptions)

    def close(self) -> None:
        """Finish what was submitted, then stop the engine's thread. Safe to call twice."""
        with self._lock:
            self._stop()

    @property
    def closed(self) -> bool:
        return not self._stop.alive

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _prepare(self, requests: Sequence[Request], return_exceptions: bool) -> list[PreparedRequest | RequestError]:
        if isinstance(requests, str | bytes | Mapping | DecisionRequest):
            raise TypeError("requests must be a list; wrap a single request in [...]")
        prepared: list[PreparedRequest | RequestError] = []
        for index, item in enumerate(requests):
            try:
                request = parse_request(item)
                prepared.append(PreparedRequest.from_encoded(request, self.format.encode(request)))
            except RequestError as error:
                error.index = index
                if not return_exceptions:
                    raise
                prepared.append(error)
        return prepared

    def _submit(self, prepared: list[PreparedRequest | RequestError]) -> list[_Pending | RequestError]:
        outcomes: list[_Pending | RequestError] = []
        with self._lock:
            if self.closed:
                raise RuntimeError("the engine is closed")
            for item in prepared:
                if isinstance(item, PreparedRequest):
                    job = _Job(item)
                    self._jobs.put(job)
                    outcomes.append(_Pending(job.future))
                else:
                    outcomes.append(item)
        return outcomes


def embedded_model_directory() -> Path:
    """Directory of the model inside the package."""
    return Path(str(files("flide") / "assets" / EMBEDDED_MODEL))


@dataclass(frozen=True, slots=True)
class _Job:
    prepared: PreparedRequest
    future: Future[Decision] = field(default_factory=Future)


@dataclass(frozen=True, slots=True)
class _Pending:
    future: Future[Decision]

    def result(self) -> Decision | Exception:
        try:
            return self.future.result()
        except Exception as error:  # noqa: BLE001 - handed on by _collect
            return error


@overload
def _collect(outcomes: Sequence[Decision | Exception], return_exceptions: Literal[False]) -> list[Decision]: ...


@overload
def _collect(
    outcomes: Sequence[Decision | Exception], return_exceptions: bool
) -> list[Decision] | list[Decision | Exception]: ...


def _collect(
    outcomes: Sequence[Decision | Exception], return_exceptions: bool
) -> list[Decision] | list[Decision | Exception]:
    if return_exceptions:
        return list(outcomes)
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
    return [o for o in outcomes if isinstance(o, Decision)]


def _serve(runner: RoundRunner, jobs: queue.SimpleQueue[_Job | None], max_tokens: int) -> None:
    """The engine thread: take what waits up to ``max_tokens``, run it, never wait for more."""
    held: _Job | None = None
    stopping = False
    while True:
        job = held if held is not None else (None if stopping else jobs.get())
        held = None
        if job is None:
            return
        batch = [job]
        total = job.prepared.num_tokens
        while not stopping:
            try:
                job = jobs.get_nowait()
            except queue.Empty:
                break
            if job is None:
                stopping = True
            elif total + job.prepared.num_tokens > max_tokens:
                held = job
                break
            else:
                batch.append(job)
                total += job.prepared.num_tokens
        _run_round(runner, [job for job in batch if job.future.set_running_or_notify_cancel()])


def _run_round(runner: RoundRunner, batch: list[_Job]) -> None:
    if not batch:
        return
    results: Sequence[Decision | Exception]
    try:
        results = runner.run([job.prepared for job in batch])
    except Exception as error:  # noqa: BLE001 - the thread must outlive any round
        if len(batch) > 1:  # one request must not take the others down
            logger.warning("a round of %d requests failed and is run again one by one: %r", len(batch), error)
            for job in batch:
                _run_round(runner, [job])
            return
        results = [error]
    for job, result in zip(batch, results, strict=True):
        if isinstance(result, Exception):
            job.future.set_exception(result)
        else:
            job.future.set_result(result)


def _stop_thread(jobs: queue.SimpleQueue[_Job | None], thread: threading.Thread) -> None:
    jobs.put(None)
    if thread is not threading.current_thread():
        thread.join()


__all__ = ["EMBEDDED_MODEL", "Engine", "ModelOutputError", "embedded_model_directory"]
