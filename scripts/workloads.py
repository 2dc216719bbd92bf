"""Request shapes: the fixed ones that figures are given for, and seeded ones with the spread of real data.

The tables are token counts measured on RACE-M, QuALITY, MultiRC, Decision Index and SWE-agent's published trajectories
with the Qwen3.5 tokenizer, template included. ``python -m scripts.workloads`` prints the means.
"""

from __future__ import annotations

import bisect
import itertools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from flide.runtime import TokenTree


@dataclass(frozen=True, slots=True)
class Shape:
    """Tokens of a request's trunk and of each of its branches."""

    trunk: int
    branches: tuple[int, ...]

    @property
    def rows(self) -> int:
        return self.trunk + sum(self.branches)

    def tree(self, *, token: int = 1) -> TokenTree:
        """One request of this shape; its tokens are all the same, where only the shape matters."""
        return TokenTree([token] * self.trunk, tuple(TokenTree([token] * n) for n in self.branches))


@dataclass(frozen=True, slots=True)
class CandidateShape:
    """Tokens of a request whose every candidate has a prompt of its own, as Open-Jev's have.

    Attributes:
        trunk: tokens that all prompts share.
        questions: of each question, tokens that its candidates share behind the trunk, and each candidate's own.
    """

    trunk: int
    questions: tuple[tuple[int, tuple[int, ...]], ...]

    @property
    def rows(self) -> int:
        """In a tree of three levels."""
        return self.trunk + sum(shared + sum(own) for shared, own in self.questions)


FIXED = {
    "race": Shape(264, (80,)),
    "race_all": Shape(264, (80,) * 4),
    "multirc": Shape(284, (45,) * 48),
    "quality_all": Shape(4804, (103,) * 18),
    "q64": Shape(4804, (103,) * 64),
}
# RACE's text as Open-Jev's prompts, and the 21 questions with 97 candidates that its own cache was measured with.
FIXED_CANDIDATES = {
    "jev_race": CandidateShape(282, ((0, (26,) * 4),)),
    "jev_97": CandidateShape(
        1862,
        (*(((32, (34,) * 5),) * 5), *(((31, (34,) * 5),) * 7), (31, (34, 34, 33, 33, 33)), *(((31, (34,) * 4),) * 8)),
    ),
}

QUANTILES = (0, 0.05, 0.10, 0.25, 0.50, 0.75, 0.90, 0.95, 0.99, 1)
LENGTHS = {
    "race": ((27, 122, 146, 188, 254, 313, 376, 412, 480, 527), (43, 47, 50, 55, 63, 74, 84, 90, 102, 128)),
    "quality": (
        (2300, 2900, 3300, 4700, 6300, 7000, 7500, 8400, 9800, 10800),
        (44, 58, 64, 80, 95, 117, 136, 154, 171, 194),
    ),
    "multirc": ((133, 163, 186, 236, 328, 405, 489, 508, 530, 569), (32, 36, 38, 40, 44, 50, 56, 61, 74, 106)),
}
QUALITY_QUESTIONS = (9, 12, 14, 16, 18, 20, 22, 23, 25, 27)
RACE_QUESTIONS = {1: 4, 2: 30, 3: 76, 4: 117, 5: 134, 6: 1}  # questions of a passage -> passages
MULTIRC_QUESTIONS = (12, 15, 20, 24, 29, 33, 38, 41, 45, 49, 54, 59, 64, 69, 74, 79, 90, 101, 107, 132)
# family: requests, tokens of a trunk, of a question, questions of a request
DECISION_INDEX = {
    "MMLU": (14042, 8, 110, 1),
    "MMLU-Pro": (12032, 8, 230, 1),
    "HellaSwag": (10042, 8, 165, 1),
    "RouterBench": (10000, 300, 120, 2),
    "BBH": (5507, 8, 171, 1),
    "CLINC150": (5500, 8, 1309, 1),
    "ESCI": (5000, 250, 70, 1),
    "iSarcasm": (4600, 50, 45, 2.52),
    "BANKING77": (3080, 8, 797, 1),
    "RAGTruth": (2700, 900, 50, 1),
    "PhishNChips": (2000, 300, 50, 9),
    "SATA": (1650, 150, 50, 9.4),
    "ACOS": (1565, 24, 46, 58.2),
    "ToolRet": (1000, 80, 180, 31.7),
    "BRIGHT": (550, 200, 420, 32),
    "HomeAppliance": (160, 120, 70, 18.1),
    "ContractNLI": (123, 2200, 70, 17),
}
AGENT_QUESTIONS = (24, 26, 25, 58, 47)  # at each step: done? stuck? an error? the next action of 6, the risk of 5
FIRST_STATE = (math.log(1900), 0.22, 1000, 3000)  # mean and deviation of the logarithm, least, most
GROWTH = (math.log(268), 1.263, 60, 6400)  # of a state by a step: what the agent said and what it saw
DEMONSTRATION, WITH_DEMONSTRATION = (5600, 9400), 2 / 22  # in front of the first state of some trajectories
STEPS = (11, 4.4, 4, 40)  # of a trajectory: mean, deviation, least, most
SEEDED = ("race", "race_all", "quality", "quality_all", "multirc", "decision_index")


def realistic(name: str, *, seed: int = 0) -> Iterator[Shape]:
    """Endless requests of one workload; the same seed gives the same ones.

    Raises:
        ValueError: an unknown workload.
    """
    if name not in SEEDED:
        raise ValueError(f"unknown workload {name!r}; one of {', '.join(SEEDED)}")
    rng = random.Random(f"{name}:{seed}")
    while True:
        yield _decision_index(rng) if name == "decision_index" else _reading(name, rng)


def trajectories(*, seed: int = 0) -> Iterator[list[Shape]]:
    """Endless trajectories of an agent, step by step: each state is the one before it and whole messages more. The same
    seed gives the same ones."""
    rng = random.Random(f"agent:{seed}")
    while True:
        state = _clamped(rng.lognormvariate, FIRST_STATE)
        if rng.random() < WITH_DEMONSTRATION:
            state += rng.randint(*DEMONSTRATION)
        steps = [Shape(state, AGENT_QUESTIONS)]
        for _ in range(_clamped(rng.gauss, STEPS) - 1):
            state += _clamped(rng.lognormvariate, GROWTH)
            steps.append(Shape(state, AGENT_QUESTIONS))
        yield steps


def _clamped(draw: Callable[[float, float], float], parameters: tuple[float, float, int, int]) -> int:
    mean, deviation, least, most = parameters
    return round(min(max(draw(mean, deviation), least), most))


def _reading(name: str, rng: random.Random) -> Shape:
    trunks, questions = LENGTHS[name.removesuffix("_all")]
    count = 1
    if name == "race_all":
        count = rng.choices(list(RACE_QUESTIONS), list(RACE_QUESTIONS.values()))[0]
    elif name == "quality_all":
        count = _draw(QUALITY_QUESTIONS, rng)
    elif name == "multirc":
        count = rng.choice(MULTIRC_QUESTIONS)
    return Shape(_draw(trunks, rng), tuple(_draw(questions, rng) for _ in range(count)))


def _decision_index(rng: random.Random) -> Shape:
    families = list(DECISION_INDEX.values())
    _, trunk, question, mean_count = rng.choices(families, [family[0] for family in families])[0]
    count = max(1, math.floor(mean_count) + (rng.random() < mean_count % 1))
    return Shape(_spread(trunk, rng), tuple(_spread(question, rng) for _ in range(count)))


def _draw(table: tuple[int, ...], rng: random.Random) -> int:
    """From a table of quantiles, linear between them."""
    u = rng.random()
    i = min(max(bisect.bisect_right(QUANTILES, u), 1), len(QUANTILES) - 1)
    low, high = QUANTILES[i - 1], QUANTILES[i]
    return max(1, round(table[i - 1] + (table[i] - table[i - 1]) * (u - low) / (high - low)))


def _spread(mean: float, rng: random.Random, sigma: float = 0.3) -> int:
    return max(4, round(mean * math.exp(rng.gauss(-sigma * sigma / 2, sigma))))


if __name__ == "__main__":
    for workload in SEEDED:
        shapes = list(itertools.islice(realistic(workload), 2000))
        branches = [n for shape in shapes for n in shape.branches]
        print(
            f"{workload:15} trunk {sum(s.trunk for s in shapes) / len(shapes):7.0f}"
            f"  question {sum(branches) / len(branches):5.0f}  questions {len(branches) / len(shapes):5.1f}"
            f"  rows {sum(s.rows for s in shapes) / len(shapes):7.0f}"
        )
    agents = list(itertools.islice(trajectories(), 2000))
    states = [step.trunk for steps in agents for step in steps]
    growth = [b.trunk - a.trunk for steps in agents for a, b in itertools.pairwise(steps)]
    print(
        f"{'agent':15} state {sum(states) / len(states):7.0f}  growth {sum(growth) / len(growth):5.0f}"
        f"  steps {len(states) / len(agents):5.1f}  below 4k {sum(n < 4000 for n in states) / len(states):.2f}"
        f"  from 8k {sum(n >= 8000 for n in states) / len(states):.2f}"
    )
