"""Running rounds: prepared requests in, option probabilities out. No queue, no threads.

Shapes: N readout rows, L labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from flide.errors import ModelOutputError
from flide.models.decision import ForDecision
from flide.runtime.capacity import MAX_REQUESTS, needed_by
from flide.runtime.config import EngineConfig
from flide.runtime.decision import Decision, Usage, answer_question
from flide.runtime.metadata import StreamCapacity
from flide.runtime.prompt import EncodedRequest
from flide.runtime.request import DecisionRequest
from flide.runtime.streams import PendingLogits, Streams
from flide.runtime.tree import TokenTree, TreeLayout

UNLIMITED = 1 << 30


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A validated request and its token tree (one branch per question, in order), laid out: what can be done here need
    not be done on the engine's thread."""

    request: DecisionRequest
    tree: TokenTree
    num_options: list[int]
    layout: TreeLayout
    needed: StreamCapacity

    @classmethod
    def from_encoded(cls, request: DecisionRequest, encoded: EncodedRequest) -> PreparedRequest:
        tree = TokenTree.from_prompts(encoded.tails)  # which may begin alike, too
        tree = replace(tree, tokens=[*encoded.shared, *tree.tokens])
        return cls.of(request, tree, encoded.num_options)

    @classmethod
    def of(cls, request: DecisionRequest, tree: TokenTree, num_options: list[int]) -> PreparedRequest:
        layout = TreeLayout.of(tree)
        return cls(request, tree, num_options, layout, needed_by(layout))

    def alone(self) -> list[PreparedRequest]:
        """Every question as a request of its own, its prompt unforked."""
        parts = []
        for item, branch, count in zip(
            self.request.questions.items(), self.tree.children, self.num_options, strict=True
        ):
            tree = TokenTree([*self.tree.tokens, *branch.tokens])
            parts.append(PreparedRequest.of(replace(self.request, questions=dict([item])), tree, [count]))
        return parts


class PendingRound:
    """A round that has been started."""

    def __init__(
        self,
        requests: Sequence[PreparedRequest],
        logits: PendingLogits,
        *,
        model_name: str,
        temperatures: Mapping[str, float],
    ) -> None:
        self._requests, self._logits = requests, logits
        self._model_name, self._temperatures = model_name, temperatures

    def results(self) -> list[Decision | ModelOutputError]:
        """Wait for the answers of every request, in order. To be called once."""
        logits_NL = self._logits.result()
        results: list[Decision | ModelOutputError] = []
        row = 0
        for request in self._requests:
            count = len(request.num_options)
            results.append(self._decide(request, logits_NL[row : row + count]))
            row += count
        return results

    def _decide(self, prepared: PreparedRequest, logits_NL: NDArray[np.float32]) -> Decision | ModelOutputError:
        questions = prepared.request.questions
        counts = np.array(prepared.num_options)
        logits_NO = logits_NL[:, : counts.max()].astype(np.float64)
        is_option_NO = np.arange(logits_NO.shape[1]) < counts[:, None]
        if not np.isfinite(logits_NO, where=is_option_NO, out=np.ones_like(is_option_NO)).all():
            return ModelOutputError("the model produced logits that are not finite")
        if self._temperatures:
            logits_NO /= np.array([[self._temperatures.get(question.type, 1.0)] for question in questions.values()])
        logits_NO[~is_option_NO] = -np.inf
        weights = np.exp(logits_NO - logits_NO.max(1, keepdims=True)).tolist()
        answers = {
            question_id: answer_question(question, row[:count])
            for (question_id, question), row, count in zip(
                questions.items(), weights, prepared.num_options, strict=True
            )
        }
        usage = Usage(input_tokens=prepared.needed.tokens, output_tokens=len(answers))
        return Decision(model=self._model_name, answers=answers, usage=usage)


class RoundRunner:
    """A model, its label rows and the way to run it.

    Args:
        model: on its device, in eval mode.
        label_ids: ids of all labels in label order.
        config: the engine's options.
        max_prompt_tokens: longest prompt there will be.
        model_name: name in the results.

    Attributes:
        limit: what the requests of one round must keep within, unless there is only one.
        max_requests: how many there may be.
        starts_ahead: whether a round can be started while another one runs (two at most).
    """

    def __init__(
        self,
        model: ForDecision,
        label_ids: Sequence[int],
        *,
        config: EngineConfig,
        max_prompt_tokens: int,
        model_name: str,
    ) -> None:
        self._model_name, self._temperatures = model_name, dict(config.temperatures or {})
        device = model.lm_head.weight.device
        max_tokens, compile = config.round_tokens(device), config.resolve_compile(device)
        if device.type == "cuda":
            from flide.runtime.graphs import CudaStreams

            model.check_kernels()
            model.merge_projections()
            self.streams: Streams | CudaStreams = CudaStreams(
                model,
                model.label_rows(label_ids),
                max_tokens=max_tokens,
                max_prompt_tokens=max_prompt_tokens,
                compile=compile,
                graphs=config.resolve_graphs(device),
                selective_readout=config.selective_readout,
            )
            self.limit = self.streams.limit
        else:
            config.resolve_graphs(device)
            self.streams = Streams(
                model, model.label_rows(label_ids), compile=compile, selective_readout=config.selective_readout
            )
            self.limit = StreamCapacity(max_tokens, UNLIMITED, UNLIMITED, UNLIMITED)
        self.starts_ahead = device.type == "cuda"
        self.max_requests = min(MAX_REQUESTS, config.max_round_requests or MAX_REQUESTS)

    def start(self) -> None:
        """Make ready, on the thread that will run the rounds."""
        self.streams.start()

    def begin(self, requests: Sequence[PreparedRequest]) -> PendingRound:
        """Start one round."""
        needed = requests[0].needed
        for request in requests[1:]:
            needed = needed + request.needed
        logits = self.streams.submit([request.layout for request in requests], needed)
        return PendingRound(requests, logits, model_name=self._model_name, temperatures=self._temperatures)
