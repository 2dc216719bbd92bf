"""Running rounds: prepared requests in, option probabilities out. No queue, no threads.

Shapes: T stream rows, N readout rows, L labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from flide.errors import ModelOutputError
from flide.models.decision import ForDecision
from flide.runtime.decision import Decision, Usage, answer_question
from flide.runtime.metadata import ForkMetadata, fresh_caches
from flide.runtime.prompt import EncodedRequest
from flide.runtime.request import DecisionRequest
from flide.runtime.tree import TokenTree


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A validated request and its token tree (one branch per question, in order)."""

    request: DecisionRequest
    tree: TokenTree
    num_options: list[int]

    @classmethod
    def from_encoded(cls, request: DecisionRequest, encoded: EncodedRequest) -> PreparedRequest:
        tree = TokenTree.from_prompts(encoded.tails)  # which may begin alike, too
        return cls(request, replace(tree, tokens=[*encoded.shared, *tree.tokens]), encoded.num_options)

    @property
    def num_tokens(self) -> int:
        """Stream rows: P + sum |q_i|."""
        return self.tree.num_tokens


class RoundRunner:
    """A model with its label rows gathered.

    Args:
        model: on its device, in eval mode.
        label_ids: ids of all labels in label order.
        model_name: name in the results.
    """

    def __init__(self, model: ForDecision, label_ids: Sequence[int], *, model_name: str) -> None:
        self.model, self.model_name = model, model_name
        self.label_rows_LD = model.label_rows(label_ids)
        # The kernels read trunks from pages and branches' initial states from scratch; the references need neither.
        self._has_kernels = self.label_rows_LD.is_cuda
        self._pages, self._parents = 0, 0
        if self._has_kernels:
            model.check_kernels()
            model.merge_projections()

    @torch.inference_mode()
    def run(self, requests: Sequence[PreparedRequest]) -> list[Decision | ModelOutputError]:
        """Answer every request of one round, in order."""
        meta = self._pack([r.tree for r in requests])
        hidden_states_ND = self.model(meta.tokens, meta)
        logits_NL = self.model.label_logits(hidden_states_ND, self.label_rows_LD).cpu().numpy()
        results: list[Decision | ModelOutputError] = []
        row = 0
        for request in requests:
            count = len(request.num_options)
            results.append(self._decide(request, logits_NL[row : row + count]))
            row += count
        return results

    def _pack(self, trees: Sequence[TokenTree]) -> ForkMetadata:
        device = self.label_rows_LD.device
        if not self._has_kernels:
            return ForkMetadata.pack(trees).to(device)
        caches = fresh_caches(trees)
        meta = ForkMetadata.pack(trees, caches=caches, pin_memory=True)
        pages, parents = meta.capacity.pages, int(meta.final_slots.max()) + 1
        if pages > self._pages or parents > self._parents:
            self._pages, self._parents = max(pages, self._pages), max(parents, self._parents)
            self.model.allocate_pools(pages=self._pages, parents=self._parents)
        return meta.to(device, non_blocking=True)

    def _decide(self, prepared: PreparedRequest, logits_NL: NDArray[np.float32]) -> Decision | ModelOutputError:
        answers = {}
        questions = prepared.request.questions.items()
        for (question_id, question), num_options, logits_L in zip(
            questions, prepared.num_options, logits_NL, strict=True
        ):
            logits = logits_L[:num_options].astype(np.float64)
            if not np.isfinite(logits).all():
                return ModelOutputError("the model produced logits that are not finite")
            answers[question_id] = answer_question(question, np.exp(logits - logits.max()).tolist())
        usage = Usage(input_tokens=prepared.num_tokens, output_tokens=len(answers))
        return Decision(model=self.model_name, answers=answers, usage=usage)
