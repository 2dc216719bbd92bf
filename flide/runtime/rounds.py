"""Running rounds: prepared requests in, option probabilities out. No queue, no threads.

Shapes: N readout rows, C columns of the head, Q questions, O most options of a question.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from flide.errors import ModelOutputError
from flide.heads import Head, OptionHead
from flide.models.decision import ForDecision
from flide.runtime.answers import answer_questions
from flide.runtime.capacity import DEEP_SAVES, MAX_REQUESTS, needed_by, own_pages
from flide.runtime.checkpoints.budget import Budgets, trunk_cost
from flide.runtime.checkpoints.positions import Reuse
from flide.runtime.checkpoints.resume import ResumedRound, resume
from flide.runtime.checkpoints.store import CheckpointStore
from flide.runtime.compact import Compact
from flide.runtime.config import EngineConfig
from flide.runtime.decision import Answer, Decision, Usage
from flide.runtime.format import DecisionFormat, EncodedRequest, temperature_of_type
from flide.runtime.metadata import StreamCapacity
from flide.runtime.plan import RoundPlan, trunk_key
from flide.runtime.planner import plan
from flide.runtime.reads import OptionReads, Reads
from flide.runtime.request import DecisionRequest, Question
from flide.runtime.streams import PendingLogits, StreamRun, Streams
from flide.runtime.tree import MAX_DEPTH, TokenTree, TreeLayout

logger = logging.getLogger("flide.engine")

UNLIMITED = 1 << 30
MOST_REHEARSED, MOST_OPTIONS_REHEARSED = 32, 160  # questions, and options of all but one that has more
NO_REUSE = Reuse()


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A validated request and its token tree, laid out: what can be done here need not be done on the engine's thread.

    The tree has one branch per question, in order, or per candidate, where a question's candidates may share a branch;
    of one prompt it may be a trunk without any.
    ``reads`` says where each option's logit will be, ``shared`` how many rows forking saves, ``temperature`` what a
    question's logits are divided by, ``reuse`` what of it is worth keeping for later requests. All rows of a request
    run in one round, so that no softmax is ever split.
    """

    request: DecisionRequest
    tree: TokenTree
    num_options: list[int]
    layout: TreeLayout
    needed: StreamCapacity
    reads: Reads
    shared: int
    temperature: Callable[[Question, Mapping[str, float]], float] = temperature_of_type
    reuse: Reuse = NO_REUSE

    @classmethod
    def encode(
        cls,
        request: DecisionRequest,
        format: DecisionFormat,
        head: Head,
        *,
        depth: int = MAX_DEPTH,
        least: int = 1,
        checkpoints: bool = False,
    ) -> PreparedRequest:
        """Prepare a parsed request for a head.

        Args:
            request: what was asked.
            format: in the style of the head.
            head: what will read the options.
            depth: levels of the tree, at most: with 3, candidates share their question.
            least: rows that a third level has to save.
            checkpoints: find out where later requests may want to resume.

        Raises:
            RequestError: the head has no column for an option, or see :meth:`DecisionFormat.encode`.
        """
        encoded = format.encode(request)
        return cls.from_encoded(
            request,
            encoded,
            format.reads(request, head, encoded),
            depth=depth,
            least=least,
            resumes=checkpoints,
            temperature=format.temperature,
            reuse=Reuse.of(request, encoded, format) if checkpoints else NO_REUSE,
        )

    @classmethod
    def from_encoded(
        cls,
        request: DecisionRequest,
        encoded: EncodedRequest,
        reads: Reads | None = None,
        *,
        depth: int = MAX_DEPTH,
        least: int = 1,
        resumes: bool = False,
        temperature: Callable[[Question, Mapping[str, float]], float] = temperature_of_type,
        reuse: Reuse = NO_REUSE,
    ) -> PreparedRequest:
        tree, layout = plan(encoded, depth=depth, least=least, resumes=resumes)
        return cls.of(request, tree, encoded.num_options, reads, layout=layout, temperature=temperature, reuse=reuse)

    @classmethod
    def of(
        cls,
        request: DecisionRequest,
        tree: TokenTree,
        num_options: list[int],
        reads: Reads | None = None,
        *,
        layout: TreeLayout | None = None,
        temperature: Callable[[Question, Mapping[str, float]], float] = temperature_of_type,
        reuse: Reuse = NO_REUSE,
    ) -> PreparedRequest:
        """``reads``: None where the options of a question have the first columns of its only row. ``layout``: the
        tree's, if it is there already."""
        layout = layout or TreeLayout.of(tree)
        reads = reads or OptionReads.of([range(count) for count in num_options])
        assert reads.num_rows == layout.num_reads, "every row that is read belongs to an option"
        needed, shared = needed_by(layout), layout.num_shared_tokens
        return cls(request, tree, num_options, layout, needed, reads, shared, temperature, reuse)

    def result(
        self, logits: OptionLogits, model_name: str, temperatures: Mapping[str, float]
    ) -> Decision | ModelOutputError:
        """The decision that the logits of the options make."""
        if not logits.are_finite(self.reads):
            return ModelOutputError("the model produced logits that are not finite")
        answers = self._answers(self.request.questions, logits.values_QO, temperatures)
        usage = Usage(self.needed.tokens, len(answers), self.shared, logits.reused_tokens)
        return Decision(model=model_name, answers=answers, usage=usage)

    def rehearse(self, temperatures: Mapping[str, float]) -> None:
        """Answer the first questions as if there were logits, and forget it: code and data that were not used for some
        milliseconds come from memory, better while the device works than when it is done."""
        totals = itertools.accumulate(self.num_options[:MOST_REHEARSED])
        count = max(1, sum(total <= MOST_OPTIONS_REHEARSED for total in totals))
        questions = dict(itertools.islice(self.request.questions.items(), count))
        is_option_QO = self.reads.is_option_QO[:count, : max(self.num_options[:count])]
        falling_O = -np.arange(is_option_QO.shape[1], dtype=np.float64)  # one option is the best, as mostly
        self._answers(questions, np.where(is_option_QO, falling_O, -np.inf), temperatures)

    def _answers(
        self, questions: Mapping[str, Question], logits_QO: NDArray[np.float64], temperatures: Mapping[str, float]
    ) -> dict[str, Answer]:
        """Of the first questions, or all."""
        if temperatures or self.temperature is not temperature_of_type:
            divisors = [self.temperature(question, temperatures) for question in questions.values()]
            if divisors.count(1.0) < len(divisors):
                logits_QO = logits_QO / np.array(divisors)[:, None]
        weights_QO = np.exp(logits_QO - logits_QO.max(1, keepdims=True))
        return answer_questions(questions, weights_QO, self.num_options[: len(questions)])

    def alone(self) -> list[PreparedRequest]:
        """Every question as a request of its own, its prompt unforked. Only for questions of one prompt."""
        if not self.tree.children:
            return [self]
        parts = []
        for i, (item, branch) in enumerate(zip(self.request.questions.items(), self.tree.children, strict=True)):
            tree = TokenTree([*self.tree.tokens, *branch.tokens], readouts=branch.readouts)
            request = replace(self.request, questions=dict([item]))
            reads = self.reads.alone(i)
            parts.append(PreparedRequest.of(request, tree, [self.num_options[i]], reads, temperature=self.temperature))
        return parts


@dataclass(frozen=True, slots=True, eq=False)
class OptionLogits(Compact):
    """What a round says of one request.

    Attributes:
        values_QO: ``[Q, O]`` float64 logits of the options; unused places are -inf.
        reused_tokens: of the request, that were not computed for it.
    """

    values_QO: NDArray[np.float64]
    reused_tokens: int = 0

    def are_finite(self, reads: Reads) -> bool:
        # A sum is quick, and finite if all are: no float32 is so large that float64 overflows. Unused places are not.
        return math.isfinite(self.values_QO.sum()) or bool((np.isfinite(self.values_QO) | ~reads.is_option_QO).all())


@dataclass(frozen=True, slots=True)
class LogitsRequest(Compact):
    """All of a prepared request that the model needs: its result is the logits of its options.

    For a process without the request, which sends them back to one that has it (:meth:`PreparedRequest.result`).
    """

    layout: TreeLayout
    needed: StreamCapacity
    reads: Reads
    shared: int
    reuse: Reuse = NO_REUSE

    @classmethod
    def of(cls, prepared: PreparedRequest) -> LogitsRequest:
        return cls(prepared.layout, prepared.needed, prepared.reads, prepared.shared, prepared.reuse)

    def result(self, logits: OptionLogits, model_name: str, temperatures: Mapping[str, float]) -> OptionLogits:
        return logits

    def rehearse(self, temperatures: Mapping[str, float]) -> None:
        """Decisions are made elsewhere."""


Runnable: TypeAlias = PreparedRequest | LogitsRequest


@dataclass(frozen=True, slots=True)
class RoundReport:
    """What one round did.

    Attributes:
        requests: that shared it.
        trunk_tokens, branch_tokens: rows it computed (candidates are branches here).
        shared_tokens: rows that forking saved.
        reused_tokens: rows that checkpoints, and states that several of its requests have, saved.
        run: how it ran.
    """

    requests: int
    trunk_tokens: int
    branch_tokens: int
    shared_tokens: int
    reused_tokens: int
    run: StreamRun


RoundObserver = Callable[[RoundReport], None]


class PendingRound:
    """A round that has been started.

    Args:
        requests: its requests.
        logits: of their rows, tree by tree.
        resumed: how they became trees, where there are checkpoints; otherwise each is one.
        runner: that started it.
    """

    def __init__(
        self,
        requests: Sequence[Runnable],
        logits: PendingLogits,
        *,
        runner: RoundRunner,
        resumed: ResumedRound | None = None,
    ) -> None:
        self._requests, self._logits = requests, logits
        self._runner, self._resumed = runner, resumed

    def is_done(self) -> bool:
        """Whether :meth:`results` would not wait, but for requests that have to run again."""
        return self._logits.is_done()

    def results(self) -> list[Any]:
        """Wait for what becomes of every request (:class:`Runnable`), in order. To be called once."""
        resumed = self._resumed
        if resumed is None:
            logits_NC, run = self._logits.result()
            self._report(run, [request.layout for request in self._requests], 0)
            return [self._runner.result(request, logits) for request, logits in self._by_request(logits_NC)]
        good, again = [False] * len(resumed.groups), set()
        try:
            logits_NC, run = self._logits.result()
            order = [index for group in resumed.groups for index in group]
            found = dict(zip(order, self._by_request(logits_NC, order, resumed.reused), strict=True))
            for number, group in enumerate(resumed.groups):
                wrong = [index for index in group if not found[index][1].are_finite(self._requests[index].reads)]
                if resumed.stored.is_stale(number):
                    again.update(group)
                elif len(group) > 1:  # one of them may have spoilt the others
                    again.update(wrong)
                good[number] = not wrong and again.isdisjoint(group)
        finally:
            resumed.stored.finish(good)
        self._report(run, resumed.layouts, sum(resumed.reused))
        return [
            self._runner.again(request) if index in again else self._runner.result(*found[index])
            for index, request in enumerate(self._requests)
        ]

    def _by_request(
        self, logits_NC: NDArray[np.float32], order: Sequence[int] | None = None, reused: Sequence[int] | None = None
    ) -> Iterator[tuple[Runnable, OptionLogits]]:
        """The requests in the order of their rows, and their logits."""
        row = 0
        for index in range(len(self._requests)) if order is None else order:
            request = self._requests[index]
            count = request.reads.num_rows
            values_QO = request.reads.gather(logits_NC[row : row + count])
            yield request, OptionLogits(values_QO, 0 if reused is None else reused[index])
            row += count

    def _report(self, run: StreamRun, layouts: Sequence[TreeLayout], reused: int) -> None:
        observers = self._runner.observers
        if not observers:
            return
        trunks = sum(layout.trunk_length for layout in layouts)
        tokens = sum(layout.num_tokens for layout in layouts)
        shared = sum(request.shared for request in self._requests)
        report = RoundReport(len(self._requests), trunks, tokens - trunks, shared, reused, run)
        for observer in tuple(observers):
            try:
                observer(report)
            except Exception:
                logger.exception("an observer of rounds failed")


class RoundRunner:
    """A model, its head and the way to run it.

    Args:
        model: on its device, in eval mode.
        label_ids: ids of all labels in label order; used where the model has no head of its own.
        config: the engine's options.
        max_prompt_tokens: longest prompt there will be.
        model_name: name in the results.
        namespace: what decides, besides tokens, what a checkpoint holds.

    Attributes:
        limit: what the requests of one round must keep within, unless there is only one; its depth is that of trees.
        least_saved: rows that a third level has to save.
        max_requests: how many there may be.
        head: what reads the options.
        observers: who is told of every round.
        store: of checkpoints, or None.
        starts_ahead: whether a round can be started while another one runs (two at most).
        can_change_threads: whether the device works by itself, whichever thread asks it to.
    """

    def __init__(
        self,
        model: ForDecision,
        label_ids: Sequence[int],
        *,
        config: EngineConfig,
        max_prompt_tokens: int,
        model_name: str,
        namespace: str = "",
    ) -> None:
        self._model_name, self._temperatures = model_name, dict(config.temperatures or {})
        self.observers: list[RoundObserver] = []
        device = model.lm_head.weight.device
        self.head: Head
        if model.head is None:
            self.head = OptionHead(model.label_rows(label_ids), softcap=model.final_logit_softcapping)
        else:
            self.head = model.head
        max_tokens, compile = config.round_tokens(device), config.resolve_compile(device)
        if device.type == "cuda":
            model.check_kernels()
        budgets = Budgets.of(
            model,
            device_gb=config.checkpoint_gb,
            host_gb=config.checkpoint_host_gb,
            state_dtype=getattr(torch, config.checkpoint_dtype),
        )
        if device.type == "cuda":
            from flide.runtime.graphs import CudaStreams

            model.merge_projections()
            self.streams: Streams | CudaStreams = CudaStreams(
                model,
                self.head,
                max_tokens=max_tokens,
                max_prompt_tokens=max_prompt_tokens,
                compile=compile,
                graphs=config.resolve_graphs(device),
                selective_readout=config.selective_readout,
                depth=config.depth or 2,
                budgets=budgets,
            )
            self.limit = self.streams.limit
        else:
            config.resolve_graphs(device)
            self.streams = Streams(
                model,
                self.head,
                compile=compile,
                selective_readout=config.selective_readout,
                own_pages=own_pages(max_tokens, max_prompt_tokens),
                budgets=budgets,
            )
            self.limit = StreamCapacity(max_tokens, UNLIMITED, UNLIMITED, UNLIMITED, config.depth or MAX_DEPTH)
        self.store: CheckpointStore | None = None
        if budgets is not None and self.streams.pools is not None:
            first_page, cost = self.streams.own_pages, trunk_cost(model)
            self.store = CheckpointStore(
                self.streams.pools, budgets, first_page=first_page, namespace=namespace, cost=cost
            )
        self.least_saved = DEEP_SAVES if device.type == "cuda" else 1
        self.starts_ahead = device.type == "cuda"
        # What torch.compile keeps of graphs belongs to a thread.
        self.can_change_threads = self.starts_ahead and config.resolve_graphs(device) != "reduce-overhead"
        self.max_requests = min(MAX_REQUESTS, config.max_round_requests or MAX_REQUESTS)

    def start(self) -> None:
        """Make ready, on the thread that will run the rounds."""
        self.streams.start()

    def run_on_this_thread(self) -> None:
        """From now on another thread runs the rounds: this one."""
        self.streams.run_on_this_thread()

    def expect(self, requests: Iterable[Runnable]) -> None:
        """Hear of requests that wait; on the thread that runs the rounds."""
        if self.store is not None and self.store.has_host_tier:
            for request in requests:
                self.store.expect(request.reuse.salt, trunk_key(request.layout))

    def plan(self) -> RoundPlan:
        """A round without requests, to be planned and begun on the thread that runs the rounds."""
        return RoundPlan(self.limit, self.max_requests, self.store)

    def begin_alone(self, request: Runnable) -> PendingRound:
        """Start a round of one request."""
        plan = self.plan()
        plan.add(request)
        return self.begin(plan)

    def begin(self, plan: RoundPlan) -> PendingRound:
        """Start one round."""
        if self.store is None:
            layouts = [request.layout for request in plan.requests]
            return PendingRound(plan.requests, self.streams.submit(layouts, plan.needed), runner=self)
        try:
            resumed = resume(self.store, plan)
        except BaseException:
            for index in range(len(plan.sources)):
                plan.release(index)
            raise
        stored = resumed.stored
        try:
            logits = self.streams.submit(resumed.layouts, resumed.needed, stored.caches, stored.copies)
        except BaseException:
            stored.finish([False] * len(resumed.groups))
            raise
        return PendingRound(plan.requests, logits, runner=self, resumed=resumed)

    def again(self, request: Runnable) -> Any:
        """What becomes of a request in a round of its own."""
        (result,) = self.begin_alone(request).results()
        return result

    def result(self, request: Runnable, logits: OptionLogits) -> Any:
        return request.result(logits, self._model_name, self._temperatures)

    def rehearse(self, request: Runnable) -> None:
        """See :meth:`PreparedRequest.rehearse`."""
        request.rehearse(self._temperatures)
