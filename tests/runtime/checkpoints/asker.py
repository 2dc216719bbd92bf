"""Rounds of token trees, asked of a runner with checkpoints or without."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
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


Ask = Callable[..., list[tuple[np.ndarray, int]]]
Same = Callable[[np.ndarray, np.ndarray], None]


def check_chain(kept: Asker, fresh: Asker, same: Same, ask: Ask) -> None:
    """A state that grows twenty times resumes where it ended, every time."""
    rng = random.Random(1001)
    state: list[int] = []
    for step in range(21):
        before = len(state)
        state += tokens(rng, rng.choice([1, 3, 17, 63, 64, 65]), kept.vocab)
        asked = request(state, [tokens(rng, 4, kept.vocab) for _ in range(3)], saves=[len(state)])
        (got, reused), (want, _) = *ask(asked), *fresh.ask(asked)
        assert reused == before, f"step {step}"
        same(got, want)


def check_continuations(kept: Asker, fresh: Asker, same: Same, ask: Ask) -> None:
    """Several continuations of one broken page take copies of it, in one round and one after the other, and a third
    still finds the first ones' keys."""
    rng = random.Random(1002)
    state, question = tokens(rng, 70, kept.vocab), [tokens(rng, 3, kept.vocab)]
    kept.ask(request(state, question, saves=[70]))
    longer = [state + tokens(rng, n, kept.vocab) for n in (20, 40, 90)]
    requests = [request(x, question, saves=[len(x) - 2]) for x in longer]
    for asked, (got, reused) in zip(requests, ask(*requests[:2]) + kept.ask(requests[2]), strict=True):
        assert reused == 70
        same(got, fresh.ask(asked)[0][0])
    for x, asked in zip(longer, requests, strict=True):
        got, reused = kept.ask(asked)[0]
        assert reused == len(x) - 2
        same(got, fresh.ask(asked)[0][0])
