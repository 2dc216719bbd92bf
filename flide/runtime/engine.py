"""The engine: one thread owns the model; any number of threads and event loops ask it."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeAlias, overload

from flide.errors import CheckpointError, RequestError
from flide.models.auto import family_of
from flide.models.decision import ForDecision
from flide.models.directory import ModelDirectory
from flide.runtime.checkpoints.budget import GIB
from flide.runtime.checkpoints.stats import CheckpointStats
from flide.runtime.config import EngineConfig
from flide.runtime.decision import Decision, joined
from flide.runtime.format import DecisionFormat, make_format
from flide.runtime.loop_worker import LoopWorker
from flide.runtime.memory import affordable_prompt_tokens, affordable_request_tokens, check_reserved
from flide.runtime.model_hash import model_hash
from flide.runtime.reader import RequestReader
from flide.runtime.request import DecisionRequest
from flide.runtime.rounds import LogitsRequest, OptionLogits, PreparedRequest, RoundObserver, RoundRunner, Runnable
from flide.runtime.tokenizer import PromptTokenizer
from flide.runtime.tree import MAX_DEPTH
from flide.runtime.wire import as_list, parse_request
from flide.runtime.worker import Job, JobQueue, Worker

logger = logging.getLogger("flide.engine")

EMBEDDED_MODEL = "flide-demo"
Request = DecisionRequest | Mapping[str, Any]
_Outcome: TypeAlias = "list[Job] | RequestError"  # one job, unless the questions of a request run alone


class Engine:
    """Answers typed questions about shared states.

    Requests that wait together share a round: their states run once and fork into every question in one forward pass.
    Safe to use from several threads; close it, or use it as a context manager, to stop its thread and free the model.

    Args:
        model: a tree-aware model, on its device, in eval mode. On CUDA it is made ready for inference in place: its
            projections are merged, which ends their training, and it is given pools; it belongs to one engine there.
        tokenizer: the model's tokenizer.
        config: engine options (device and dtype are the model's own here).

    Attributes:
        model_hash: a short name for what decides an answer: weights, configuration, head, tokenizer, temperatures.
        max_request_tokens: rows that one request may have, its state counted once.
        reader: what prepares requests, and can do so in another process.
        report: what making ready took: compilation, graphs, memory.

    Raises:
        CheckpointError: the tokenizer does not belong to the model, or has no labels.
    """

    def __init__(self, model: ForDecision, tokenizer: PromptTokenizer, config: EngineConfig | None = None) -> None:
        if not isinstance(tokenizer, PromptTokenizer):
            raise TypeError(f"tokenizer must be a PromptTokenizer, not a {type(tokenizer).__name__}: wrap it in one")
        self.config = config or EngineConfig()
        self.model_name = self.config.model_name or type(model).__name__
        reserved, on_host = (int(x * GIB) for x in (self.config.checkpoint_gb, self.config.checkpoint_host_gb))
        check_reserved(model, device_bytes=reserved, host_bytes=on_host)
        limit = self.config.max_prompt_tokens or _max_prompt_tokens(model, reserved)
        style = "options" if model.head is None else model.head.prompt_style
        self.format: DecisionFormat = make_format(
            style, tokenizer, max_prompt_tokens=limit, escape=self.config.escape_control_tokens
        )
        if not self.config.fork and not self.format.single_prompt:
            raise ValueError(f"fork=False is not for a {style} format: its questions fork into several prompts")
        tokenizer.check_vocabulary(model.config.vocab_size)
        if style == "options" and not tokenizer.num_labels():
            raise CheckpointError("the tokenizer has no token that can be an option's label")
        escape = self.config.escape_control_tokens and not type(self.format).escapes
        self.model_hash = model_hash(model, tokenizer, self.config.temperatures or {}, escape=escape)
        runner = RoundRunner(
            model,
            self.format.label_ids(tokenizer.num_labels()),
            # Questions of one prompt are branches: a third level would never be used.
            config=replace(self.config, depth=2 if self.format.single_prompt else self.config.depth or MAX_DEPTH),
            max_prompt_tokens=limit,
            model_name=self.model_name,
            namespace=f"{self.model_hash}/{style}",
        )
        self._round_tokens = runner.limit.tokens
        self._observers = runner.observers
        self._runner = runner
        self._worker: JobQueue = Worker(runner)
        self.report = runner.streams.report
        affordable = max(self._round_tokens, affordable_request_tokens(model, reserved=reserved + on_host))
        self.max_request_tokens = self.config.max_request_tokens or affordable
        self.reader = RequestReader(
            self.format,
            runner.head,
            depth=runner.limit.depth,
            least_saved=runner.least_saved,
            # Without forks a request runs in parts.
            max_request_tokens=self.max_request_tokens if self.config.fork else None,
            model_name=self.model_name,
            temperatures=self.config.temperatures or {},
            model_hash=self.model_hash,
            checkpoints=runner.store is not None,
        )
        self._store = runner.store

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        config: EngineConfig | None = None,
        *,
        base: str | Path | None = None,
        merge_lora: bool = True,
        revision: str | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
    ) -> Self:
        """An engine for a model directory or Hub id, fine-tuned ones and Open-Jev packages included.

        Args:
            path: of the model.
            config: engine options.
            base, merge_lora, revision, cache_dir, local_files_only: see ``ForDecision.from_pretrained``.

        Raises:
            CheckpointError: the model or its tokenizer cannot be loaded, or has sizes the CUDA kernels lack.
            ValueError: a device or dtype that cannot be had.
        """
        config = config or EngineConfig()
        device = config.resolve_device()
        found = ModelDirectory.open(
            path, base=base, revision=revision, cache_dir=cache_dir, local_files_only=local_files_only
        )
        family = family_of(found.config())
        tokenizer = PromptTokenizer.from_pretrained(found.tokenizer)
        model = family.from_pretrained(found, dtype=config.resolve_dtype(), device=device, merge_lora=merge_lora)
        temperatures = {**found.temperatures(), **(config.temperatures or {})}
        name = config.model_name or found.package_name or _name_of(path, found.path)
        return cls(model, tokenizer, replace(config, model_name=name, temperatures=temperatures))

    @classmethod
    def default(cls, config: EngineConfig | None = None) -> Self:
        """An engine for the demo model inside the package. It reads short English tickets, logs, reviews and claims:
        see its MODEL_CARD.md."""
        config = config or EngineConfig()
        if config.model_name is None:
            config = replace(config, model_name=EMBEDDED_MODEL)
        return cls.from_pretrained(embedded_model_directory(), config)

    @overload
    def decide(self, requests: Iterable[Request], *, return_exceptions: Literal[False] = False) -> list[Decision]: ...

    @overload
    def decide(self, requests: Iterable[Request], *, return_exceptions: bool) -> list[Decision | Exception]: ...

    def decide(self, requests: Iterable[Request], *, return_exceptions: bool = False) -> Any:
        """Answer requests, in order.

        Args:
            requests: ``DecisionRequest`` objects or plain System One bodies. All are checked before any runs.
            return_exceptions: put a request's error in its place instead of raising it.

        Raises:
            RequestError: a request is invalid; nothing ran. ``.index`` and ``.errors`` say where and why.
            ModelOutputError: the model's logits are not finite.
            RuntimeError: the engine is closed or was made before a fork, or running the model failed.
        """
        outcomes = self._prepare(as_list(requests), return_exceptions)
        jobs = _jobs(outcomes)
        try:
            self._worker.submit(jobs, waits=True)
            return [_wait(outcome, return_exceptions) for outcome in outcomes]
        finally:  # after Ctrl-C or a failure, what has not begun need not run
            for job in jobs:
                job.future.cancel()

    @overload
    async def adecide(
        self, requests: Iterable[Request], *, return_exceptions: Literal[False] = False
    ) -> list[Decision]: ...

    @overload
    async def adecide(self, requests: Iterable[Request], *, return_exceptions: bool) -> list[Decision | Exception]: ...

    async def adecide(self, requests: Iterable[Request], *, return_exceptions: bool = False) -> Any:
        """:meth:`decide` without blocking the event loop; cancelling the task drops requests that wait.

        The requests are read by another thread: they must not be changed before this returns.
        """
        items, left = as_list(requests), threading.Event()
        try:
            outcomes = await asyncio.to_thread(self._prepare, items, return_exceptions, left)
        finally:
            left.set()
        jobs = _jobs(outcomes)
        try:
            self._worker.submit(jobs)
            pending = [asyncio.wrap_future(job.future) for job in jobs]
            await asyncio.gather(*pending, return_exceptions=return_exceptions)
            return [_wait(outcome, return_exceptions) for outcome in outcomes]
        finally:
            for job in jobs:
                job.future.cancel()

    def prepare(self, request: Request) -> PreparedRequest:
        """What is done with a request before it runs: everything that can be refused is refused here.

        Raises:
            RequestError: the request is invalid, too large, or the model's prompt or head has no place for it.
        """
        return self.encode(parse_request(request))

    def encode(self, request: DecisionRequest) -> PreparedRequest:
        """:meth:`prepare` of what ``parse_request`` or ``parse_body`` returned.

        Raises:
            RequestError: it is too large, or the model's prompt or head has no place for it.
        """
        return self.reader.encode(request)

    @overload
    def submit(self, prepared: PreparedRequest) -> Future[Decision]: ...

    @overload
    def submit(self, prepared: LogitsRequest) -> Future[OptionLogits]: ...

    def submit(self, prepared: Runnable) -> Future[Any]:
        """Queue a prepared request and return; cancelling the future drops it unless its round has begun.

        Raises:
            RuntimeError: the engine is closed or was made before a fork.
            ValueError: of an engine without forks, which runs a request in parts.
        """
        if not self.config.fork:
            raise ValueError("an engine with fork=False has no single future for a request")
        job = Job(prepared)
        self._worker.submit([job])
        return job.future

    @property
    def round_tokens(self) -> int:
        """Rows of the largest round that requests share."""
        return self._round_tokens

    def checkpoint_stats(self) -> CheckpointStats | None:
        """Counts of the checkpoint store; None without one. From any thread."""
        return None if self._store is None else self._store.stats()

    def observe(self, observer: RoundObserver) -> Callable[[], None]:
        """Have every round reported, on the engine's thread: an observer should be quick. What it raises is logged.

        Returns:
            What ends it.
        """
        self._observers.append(observer)
        return functools.partial(self._observers.remove, observer)

    @property
    def can_run_on_a_loop(self) -> bool:
        """Whether :meth:`run_on` may be called: the device works by itself, whichever thread asks it to."""
        return self._runner.can_change_threads

    def run_on(self, loop: asyncio.AbstractEventLoop) -> None:
        """Run rounds on the thread of an event loop, which calls this, instead of one of their own. Nobody is then
        woken for a round, but what takes long on the loop keeps rounds waiting. ``decide`` cannot be called on it.

        Raises:
            RuntimeError: the engine is closed.
            ValueError: of an engine that cannot: see :attr:`can_run_on_a_loop`.
        """
        if not self.can_run_on_a_loop:
            raise ValueError("rounds of this engine would hold the loop, or need their own thread")
        self._worker.check()
        before, self._worker = self._worker, LoopWorker(self._runner, loop)
        before.close()  # what others submit meanwhile comes to the loop, which is held here

    def close(self) -> None:
        """Finish what was submitted, then stop the engine's thread. Safe to call twice and from any thread."""
        self._worker.close()

    @property
    def closed(self) -> bool:
        return self._worker.closed

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _prepare(
        self, requests: list[Request], return_exceptions: bool, left: threading.Event | None = None
    ) -> list[_Outcome]:
        self._worker.check()
        outcomes: list[_Outcome] = []
        for index, item in enumerate(requests):
            if left is not None and left.is_set():
                break  # nobody waits for the result
            try:
                prepared = self.prepare(item)
                outcomes.append([Job(part) for part in ([prepared] if self.config.fork else prepared.alone())])
            except RequestError as error:
                error.index = index
                if not return_exceptions:
                    raise
                outcomes.append(error)
        return outcomes


def embedded_model_directory() -> Path:
    """Directory of the model inside the package."""
    return Path(str(files("flide") / "assets" / EMBEDDED_MODEL))


def _max_prompt_tokens(model: ForDecision, reserved: int) -> int:
    """What the model and its head were made for, and on CUDA what KV pages there is memory for beside ``reserved``
    bytes."""
    longest = model.config.max_position_embeddings
    if model.head is not None and model.head.max_prompt_tokens is not None:
        longest = min(longest, model.head.max_prompt_tokens)
    if model.lm_head.weight.device.type != "cuda":
        return longest
    affordable = affordable_prompt_tokens(model, reserved=reserved)
    if affordable < longest:
        logger.warning("prompts are limited to %d tokens, for which there is memory", affordable)
    return min(longest, affordable)


def _name_of(path: str | Path, directory: Path) -> str:
    """The last part of a model directory's path, links not followed, or the Hub id."""
    if directory != Path(path).expanduser():
        return str(path)
    absolute = os.path.abspath(directory)
    # A path is bytes; Python's text of it depends on the locale and need not be valid Unicode.
    return os.fsencode(os.path.basename(absolute) or absolute).decode(errors="replace")


def _jobs(outcomes: list[_Outcome]) -> list[Job]:
    return [job for outcome in outcomes if isinstance(outcome, list) for job in outcome]


def _wait(outcome: _Outcome, return_exceptions: bool) -> Decision | Exception:
    if isinstance(outcome, RequestError):
        return outcome
    try:
        return joined([job.future.result() for job in outcome])
    except Exception as error:
        if not return_exceptions:
            raise
        return error


__all__ = ["EMBEDDED_MODEL", "Engine", "embedded_model_directory"]
