"""Rounds of token trees, asked of a runner with checkpoints or without."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from flide import DecisionRequest, EngineConfig
from flide.heads import OptionHead
from flide.models.decision import ForDecision
from flide.runtime.checkpoints.budget import GIB, ItemBytes
from flide.runtime.checkpoints.positions import Reuse
from flide.runtime.reads import OptionReads
from flide.runtime.rounds import LogitsRequest, PreparedRequest, RoundRunner
from flide.runtime.tree import TokenTree

LABELS = 8
POSITIONS = (1, 2, 3, 63, 64, 65, 127, 128, 129, 200)


class Asker:
    """A runner that is asked token trees."""

    def __init__(
        self, model: ForDecision, *, pages: int = 0, slots: int = 0, host: float = 0.0, **options: Any
    ) -> None:
        item = ItemBytes.of(model)
        gb = 2 * max(pages * item.page, slots * item.slot) / GIB
        options = {"max_round_tokens": 2048, **options}
        config = EngineConfig(checkpoint_gb=gb, checkpoint_host_gb=host * gb, **options)
        self.vocab = model.config.vocab_size
        self.runner = RoundRunner(
            model, list(range(LABELS)), config=config, max_prompt_tokens=4096, model_name="m", namespace="n"
        )
        self.runner.start()
        assert isinstance(self.runner.head, OptionHead)

    @property
    def store(self) -> Any:
        return self.runner.store

    def ask(self, *requests: LogitsRequest) -> list[tuple[np.ndarray, int]]:
        """Logits and reused tokens of requests in one round."""
        plan = self.runner.plan()
        assert all(map(plan.add, requests))
        results = self.runner.begin(plan).results()
        if self.store is not None:
            self.store.check()
        return [(result.values_QO, result.reused_tokens) for result in results]


def request(
    state: Sequence[int],
    questions: Sequence[Sequence[int]],
    *,
    saves: Sequence[int] = (),
    salt: str | None = None,
) -> LogitsRequest:
    tree = TokenTree(list(state), tuple(TokenTree(list(question)) for question in questions))
    reads = OptionReads.of([range(LABELS)] * len(questions))
    prepared = PreparedRequest.of(DecisionRequest("", {}), tree, [LABELS] * len(questions), reads)
    return LogitsRequest(
        prepared.layout, prepared.needed, prepared.reads, prepared.shared, Reuse(len(state), tuple(saves), salt)
    )


def tokens(rng: random.Random, count: int, vocab: int) -> list[int]:
    return [rng.randrange(vocab) for _ in range(count)]
