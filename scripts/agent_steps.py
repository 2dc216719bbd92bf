"""Steps of agents whose history grows: as token ids, or as requests with text.

A step asks the same five questions about a state that is the one before it and whole messages more. By default the
lengths are seeded ones (``scripts/workloads.py``) or those of a file, and the content is random. Published trajectories
of SWE-agent give real text; each agent has a first line of its own, so that no two share anything.
"""

from __future__ import annotations

import itertools
import json
import random
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from flide.runtime.request import Choice, DecisionRequest, Noul, Score
from flide.runtime.tree import TokenTree
from scripts.workloads import AGENT_QUESTIONS, trajectories

QUESTIONS = {
    "done": Noul("Is the task that the user gave done?"),
    "stuck": Noul("Is the agent stuck in what it does?"),
    "error": Noul("Did the last command end with an error?"),
    "next": Choice(
        "What should the agent do next?",
        ["read a file", "search the repository", "edit a file", "run the tests", "submit the change", "ask the user"],
    ),
    "risk": Score(
        "How much harm can the last command do?",
        ["none", "a little, easily undone", "some", "much", "it cannot be undone"],
    ),
}
# What a template puts behind a state, in front of every question: it is in no later state.
BEHIND_STATE = 4
VOCABULARY = (
    "the file error line test class return value import module path open edit search result function name list data "
    "string number type field object key index call raise assert read write run command output directory version"
)
WORDS = VOCABULARY.split()
CHARACTERS = 5  # of a token, about
MESSAGES_PER_STEP = 2  # what the agent said, and what it saw


@dataclass(frozen=True, slots=True)
class Step:
    """One step of one agent.

    Attributes:
        number: of the step within its trajectory; 0 has nothing to resume from.
        history: tokens of the state; of text, about.
        state: token ids, or text, or messages.
        questions: token ids of each, of a state of token ids.
    """

    number: int
    history: int
    state: Any
    questions: tuple[array[int], ...] = ()

    def tree(self) -> TokenTree:
        """The prompts, of token ids."""
        return TokenTree(self.state, tuple(TokenTree(question) for question in self.questions))

    def request(self) -> DecisionRequest:
        """The request, of text."""
        return DecisionRequest(self.state, QUESTIONS)

    def faulty(self, count: int) -> Step:
        """The step with other tokens at the end of its state, about so many."""
        if isinstance(self.state, str):
            return replace(self, state=_turned(self.state, CHARACTERS * count))
        if isinstance(self.state, array):
            return replace(self, state=_turned(self.state, count))
        *messages, last = self.state
        return replace(self, state=[*messages, {**last, "content": _turned(last["content"], CHARACTERS * count)}])


class TokenSteps:
    """Steps of random token ids.

    Args:
        vocab: ids are below it.
        lengths: tokens of the states of trajectories, used over and over; None for seeded ones.
        scale: of all lengths.
    """

    def __init__(self, vocab: int, *, lengths: Sequence[Sequence[int]] | None = None, scale: float = 1.0) -> None:
        self._vocab, self._lengths, self._scale = vocab, lengths, scale

    def __call__(self, seed: int) -> Iterator[list[Step]]:
        """Endless trajectories; no two seeds share anything."""
        rng = np.random.default_rng(seed)
        for lengths in _lengths(self._lengths, seed):
            ends = [max(BEHIND_STATE + 1, round(self._scale * n)) for n in lengths]
            questions = tuple(self._ids(rng, max(1, round(self._scale * n))) for n in AGENT_QUESTIONS)
            ids, behind = self._ids(rng, ends[-1]), self._ids(rng, BEHIND_STATE)
            yield [Step(k, end, ids[: end - BEHIND_STATE] + behind, questions) for k, end in enumerate(ends)]

    def _ids(self, rng: np.random.Generator, count: int) -> array[int]:
        return array("i", rng.integers(self._vocab, size=count, dtype=np.int32).tobytes())


class TextSteps:
    """Steps of text.

    Args:
        files: published trajectories, used over and over; none for words by chance.
        lengths, scale: see :class:`TokenSteps`; of words, which are about as many tokens.
        as_messages: states are lists of messages, not text.
    """

    def __init__(
        self,
        *,
        files: Sequence[Path] = (),
        lengths: Sequence[Sequence[int]] | None = None,
        scale: float = 1.0,
        as_messages: bool = False,
    ) -> None:
        self._published = [_messages(file) for file in files]
        self._lengths, self._scale, self._as_messages = lengths, scale, as_messages

    def __call__(self, seed: int) -> Iterator[list[Step]]:
        """Endless trajectories; no two seeds share anything."""
        rng = random.Random(seed)
        for number, steps in enumerate(self._published_steps() if self._published else self._made(rng, seed)):
            messages: list[dict[str, str]] = [{"role": "system", "content": f"Agent {seed}, task {number}."}]
            text, made = f"Agent {seed}, task {number}.", []
            for k, new in enumerate(steps):
                messages = [*messages, *new]
                text += "".join(f"\n\n{message['role']}: {message['content']}" for message in new)
                made.append(Step(k, len(text) // CHARACTERS, messages if self._as_messages else text))
            yield made

    def _published_steps(self) -> Iterator[list[list[dict[str, str]]]]:
        """The messages that each step adds: up to the first answer, then what was said and seen."""
        for messages in itertools.cycle(self._published):
            first = next(i for i, message in enumerate(messages) if message["role"] == "assistant")
            cuts = [0, *range(first, len(messages) + 1, MESSAGES_PER_STEP)]
            yield [messages[a:b] for a, b in itertools.pairwise(cuts)]

    def _made(self, rng: random.Random, seed: int) -> Iterator[list[list[dict[str, str]]]]:
        for lengths in _lengths(self._lengths, seed):
            ends = [0, *(max(MESSAGES_PER_STEP, round(self._scale * n)) for n in lengths)]
            yield [
                [
                    {"role": role, "content": " ".join(rng.choices(WORDS, k=max(1, (b - a) // MESSAGES_PER_STEP)))}
                    for role in ("assistant" if k else "system", "user")
                ]
                for k, (a, b) in enumerate(itertools.pairwise(ends))
            ]


def stored_lengths(file: Path) -> list[list[int]]:
    """Tokens of the states of each trajectory in a file like ``[{"states": [1185, 1377, ...], ...}, ...]``."""
    return [entry["states"] for entry in json.loads(file.read_text(encoding="utf-8"))]


def _lengths(stored: Sequence[Sequence[int]] | None, seed: int) -> Iterator[Sequence[int]]:
    if stored is None:
        return ([step.trunk for step in steps] for steps in trajectories(seed=seed))
    start = seed % len(stored)
    return itertools.cycle([*stored[start:], *stored[:start]])


def _messages(file: Path) -> list[dict[str, str]]:
    """Of one trajectory as SWE-agent stores it."""
    history = json.loads(file.read_text(encoding="utf-8"))["history"]
    return [{"role": message["role"], "content": _text(message["content"])} for message in history]


def _turned(sequence: Any, count: int) -> Any:
    """With its end the other way round."""
    return sequence[:-count] + sequence[-count:][::-1]


def _text(content: Any) -> str:
    """Some versions store a list of parts."""
    return content if isinstance(content, str) else "\n".join(part.get("text", "") for part in content)
