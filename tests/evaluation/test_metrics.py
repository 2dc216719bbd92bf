"""Metrics against plain implementations, cases worked by hand, and what must hold for all data."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flide.evaluation.metrics import Confusion, LabelledAnswer, evaluate, temper
from flide.runtime.decision import answer_question
from flide.runtime.request import Choice, Noul, Score
from tests.evaluation import plain_metrics


def answer(
    probabilities: Any, target: Any = 0, *, row: int = 0, kind: str = "choice", id: str = "q", options: Any = None
) -> LabelledAnswer:
    n = len(probabilities)
    names = ("true", "false") if kind == "noul" else "abcdefghij" if kind == "choice" else "0123456789"
    if isinstance(target, int):
        target = [float(i == target) for i in range(n)]
    return LabelledAnswer(row, id, kind, tuple(options or names[:n]), tuple(probabilities), tuple(target))


def simulated(rows: int, *, seed: int = 0, sharpness: float = 1.5) -> list[LabelledAnswer]:
    """Overconfident answers; the questions of a row share part of what they are about."""
    random = np.random.default_rng(seed)
    answers = []
    for row in range(rows):
        shift = random.normal()
        for kind, n in (("noul", 2), ("choice", 4), ("choice", 2), ("score", 5)):
            logits = random.normal(size=n) * 1.5 + shift * np.arange(n) / n
            p, q = np.exp(sharpness * logits), np.exp(logits)
            target = int(random.choice(n, p=q / q.sum()))
            answers.append(answer((p / p.sum()).tolist(), target, row=row, kind=kind, id=f"{kind}{n}"))
    return answers


def points(answers: list[LabelledAnswer], **options: Any) -> dict[str, float]:
    result = evaluate(answers, resamples=0, **options)
    (metrics,) = result.types.values()
    return {name: estimate.value for name, estimate in metrics.estimates.items()}


def test_four_answers_by_hand() -> None:
    result = points(
        [
            answer([0.9, 0.1], 0),
            answer([0.2, 0.8], 0),
            answer([0.7, 0.3], 0),
            answer([0.6, 0.4], 1),
        ],
        bins=2,
    )
    assert result["accuracy"] == 0.5
    assert result["nll"] == pytest.approx(-math.log(0.9 * 0.2 * 0.7 * 0.4) / 4)
    assert result["brier"] == pytest.approx(2 * (0.1**2 + 0.8**2 + 0.3**2 + 0.6**2) / 4)
    # All in the bin (0.5, 1]: two right, confidence 3.0.
    assert result["ece"] == pytest.approx(1 / 4)
    assert result["accuracy_at_50"] == 0.5  # right, wrong
    assert result["accuracy_at_80"] == 0.5  # ceil(3.2) = 4 of them
    # Error rates of the first 1 .. 4: 0, 1/2, 1/3, 2/4.
    assert result["aurc"] == pytest.approx((0 + 1 / 2 + 1 / 3 + 2 / 4) / 4)


def test_bins_hold_their_upper_edge_and_equal_mass_holds_as_many() -> None:
    answers = [answer([c, 1 - c], int(i % 2)) for i, c in enumerate([0.75, 0.8, 0.9, 1.0])]
    by_width = evaluate(answers, bins=4, resamples=0).overall.reliability
    assert [(b.lower, b.upper, b.questions) for b in by_width] == [(0.5, 0.75, 1), (0.75, 1.0, 3)]
    assert points(answers, bins=4)["ece"] == pytest.approx((abs(1 - 0.75) + abs(1 - 2.7)) / 4)
    by_mass = evaluate(answers, bins=2, binning="mass", resamples=0).overall.reliability
    assert [(b.lower, b.upper, b.questions, b.accuracy) for b in by_mass] == [(0.75, 0.8, 2, 0.5), (0.9, 1.0, 2, 0.5)]
    assert points(answers, bins=2, binning="mass")["ece"] == pytest.approx((abs(1 - 1.55) + abs(1 - 1.9)) / 4)
    tied = [answer([0.75, 0.25], i % 2) for i in range(6)]
    assert [b.questions for b in evaluate(tied, bins=3, binning="mass", resamples=0).overall.reliability] == [6]


def test_soft_targets_and_levels_by_hand() -> None:
    result = points([answer([0.5, 0.25, 0.25], [0.2, 0.3, 0.5], kind="score")])
    assert result["nll"] == pytest.approx(-0.2 * math.log(0.5) - 0.8 * math.log(0.25))
    assert result["brier"] == pytest.approx(0.3**2 + 0.05**2 + 0.25**2)
    assert result["level_mae"] == pytest.approx(abs(0.75 - 1.3))
    assert result["accuracy"] == 0


@pytest.mark.parametrize(
    ("given", "target", "right"),
    [
        (answer([0.5, 0.5], kind="noul"), (1, 0), True),  # true comes first
        (answer([0.5, 0.5], kind="noul"), (0, 1), False),
        (answer([0.4, 0.4, 0.2], kind="score"), (0, 1, 0), False),  # the lower level comes first
        (answer([0.4, 0.4, 0.2], options="bac"), (0, 1, 0), True),  # the name that sorts first
        (answer([0.4, 0.4, 0.2], options="bac"), (1, 0, 0), False),
        (answer([0.1, 0.7, 0.2]), (0.5, 0.5, 0), True),  # either is right
        (answer([0.7, 0.1, 0.2]), (0.5, 0.5, 0), True),
        (answer([0.2, 0.1, 0.7]), (0.5, 0.5, 0), False),
    ],
)
def test_ties(given: LabelledAnswer, target: tuple[float, ...], right: bool) -> None:
    assert points([replace(given, target=target)])["accuracy"] == right


def test_the_answer_of_tied_options_is_the_one_that_flide_gives() -> None:
    p = [0.25, 0.375, 0.375]
    choice = answer_question(Choice("?", ["x", "z", "b"]), p)
    assert points([answer(p, [float(name == choice.value) for name in "xzb"], options="xzb")])["accuracy"] == 1
    score = answer_question(Score("?", ["l", "m", "h"]), [0.5, 0.5, 0])
    assert list(score.probabilities) == ["0", "1", "2"]
    assert list(answer_question(Noul("?"), [0.5, 0.5]).probabilities) == ["true", "false"]


def test_a_confident_mistake_costs_much_and_not_everything() -> None:
    assert points([answer([1.0, 0.0], 1)])["nll"] == pytest.approx(52 * math.log(2))
    assert points([answer([1.0, 0.0], 0)])["nll"] == 0


def test_confusion_matrices_count_target_by_answer() -> None:
    answers = [
        answer([0.9, 0.1, 0.0], 0, id="x"),
        answer([0.9, 0.1, 0.0], 1, id="x"),
        answer([0.1, 0.9, 0.0], [0.5, 0.5, 0.0], id="x"),  # tied: the answer is right
        answer([0.9, 0.1], 1, id="y", options=["new", "old"]),
        answer([0.9, 0.1], 1, id="x", kind="score"),
        answer([0.1, 0.8, 0.1], 0, id="x", kind="score"),
        answer([0.9, 0.1], 1, id="x", kind="noul"),
    ]
    result = evaluate(answers, resamples=0)
    assert result.types["choice"].confusion == {
        "x": Confusion(["a", "b"], [[1, 0], [1, 1]]),
        "y": Confusion(["new", "old"], [[0, 0], [1, 0]]),
    }
    assert result.types["score"].confusion == {"x": Confusion(["0", "1", "2"], [[0, 1, 0], [1, 0, 0], [0, 0, 0]])}
    assert result.types["noul"].confusion == result.overall.confusion == {}


# Few values, so that many are tied.
weights = st.sampled_from([0, 0, 1, 1, 2, 3, 7])


@st.composite
def labelled_answers(draw: st.DrawFn, kinds: Any = ("noul", "choice", "score")) -> LabelledAnswer:
    kind = draw(st.sampled_from(kinds))
    n = 2 if kind == "noul" else draw(st.integers(1, 4))
    p, t = (draw(st.lists(weights, min_size=n, max_size=n).filter(any)) for _ in range(2))
    options = draw(st.permutations("abcd"))[:n] if kind == "choice" else None
    return answer(
        [w / sum(p) for w in p],
        [w / sum(t) for w in t],
        row=draw(st.integers(0, 5)),
        kind=kind,
        id=draw(st.sampled_from("xy")),
        options=options,
    )


some_answers = st.lists(labelled_answers(), min_size=1, max_size=25)


@settings(max_examples=60, deadline=None)
@given(some_answers, st.integers(1, 20), st.sampled_from(["width", "mass"]))
def test_points_are_those_of_the_plain_implementation(answers: Any, bins: int, binning: Any) -> None:
    result = evaluate(answers, bins=bins, binning=binning, resamples=0)
    groups = {"overall": (result.overall, answers)}
    groups |= {name: (metrics, [a for a in answers if a.type == name]) for name, metrics in result.types.items()}
    for name, (metrics, of_group) in groups.items():
        expected = plain_metrics.all_metrics(of_group, bins, binning)
        if name == "overall":
            expected.pop("level_mae", None)
        assert {key: e.value for key, e in metrics.estimates.items()} == pytest.approx(expected, abs=1e-9)
        assert metrics.questions == len(of_group) == sum(b.questions for b in metrics.reliability)
        assert metrics.rows == len({a.row for a in of_group})
        gaps = sum(b.questions * abs(b.accuracy - b.confidence) for b in metrics.reliability)
        assert gaps / metrics.questions == pytest.approx(expected["ece"], abs=1e-9)
        if metrics.confusion:
            diagonal = sum(m.counts[i][i] for m in metrics.confusion.values() for i in range(len(m.labels)))
            assert diagonal == round(metrics.questions * expected["accuracy"])
    json.dumps(result.to_dict(), allow_nan=False)


@settings(max_examples=40, deadline=None)
@given(some_answers, st.integers(2, 8), st.sampled_from(["width", "mass"]), st.integers(1, 5))
def test_intervals_are_those_of_resamples_written_out(answers: Any, bins: int, binning: Any, seed: int) -> None:
    rows = sorted({a.row for a in answers})
    result = evaluate(answers, bins=bins, binning=binning, resamples=20, seed=seed, level=0.8)
    if len(rows) < 2:
        assert all(e.low is None and e.high is None for e in result.overall.estimates.values())
        return
    random = np.random.default_rng(seed)
    drawn = [[rows[i] for i in random.integers(len(rows), size=len(rows))] for _ in range(20)]
    for name, metrics in [("overall", result.overall), *result.types.items()]:
        resampled = []
        for numbers in drawn:
            sample = [a for number in numbers for a in answers if a.row == number and name in ("overall", a.type)]
            if sample:
                resampled.append(plain_metrics.all_metrics(sample, bins, binning))
        for key, estimate in metrics.estimates.items():
            if resampled:
                ends = np.quantile([values[key] for values in resampled], [0.1, 0.9])
                assert (estimate.low, estimate.high) == pytest.approx(tuple(ends), abs=1e-9)
            else:
                assert estimate.low is None


@settings(max_examples=30, deadline=None)
@given(st.lists(labelled_answers(), min_size=1, max_size=25), st.randoms(use_true_random=False))
def test_the_order_of_answers_and_options_changes_nothing(answers: list[LabelledAnswer], random: Any) -> None:
    turned = []
    for a in answers:
        order = list(range(len(a.options)))
        if a.type == "choice":
            random.shuffle(order)
        parts = ([values[i] for i in order] for values in (a.options, a.probabilities, a.target))
        options, probabilities, target = map(tuple, parts)
        turned.append(replace(a, options=options, probabilities=probabilities, target=target))
    random.shuffle(turned)
    for binning in ("width", "mass"):
        before, after = (evaluate(given, binning=binning, resamples=0) for given in (answers, turned))  # type: ignore[arg-type]
        for name, metrics in {"overall": before.overall, **before.types}.items():
            other = {"overall": after.overall, **after.types}[name]
            values, others = ({k: e.value for k, e in m.estimates.items()} for m in (metrics, other))
            assert values == pytest.approx(others, abs=1e-12)
            assert metrics.confusion == other.confusion


def test_the_order_of_answers_within_rows_changes_no_interval() -> None:
    answers = simulated(40)
    before, after = evaluate(answers), evaluate(sorted(answers, key=lambda a: a.question_id, reverse=True))
    for key, estimate in before.overall.estimates.items():
        assert after.overall.estimates[key].to_dict() == pytest.approx(estimate.to_dict(), abs=1e-12)


@settings(max_examples=30, deadline=None)
@given(st.lists(labelled_answers(), min_size=1, max_size=20))
def test_perfect_answers_are_perfect(answers: list[LabelledAnswer]) -> None:
    perfect = []
    for a in answers:
        hard = tuple(float(i == a.target.index(max(a.target))) for i in range(len(a.options)))
        perfect.append(replace(a, probabilities=hard, target=hard))
    for binning in ("width", "mass"):
        result = evaluate(perfect, binning=binning, resamples=25)  # type: ignore[arg-type]
        for metrics in (result.overall, *result.types.values()):
            for key, estimate in metrics.estimates.items():
                perfection = 1.0 if key.startswith("accuracy") else 0.0
                assert estimate.value == perfection, key
                assert estimate.low in (None, perfection), key
                assert estimate.high in (None, perfection), key
                assert math.copysign(1, estimate.value) == 1


@settings(max_examples=40, deadline=None)
@given(some_answers)
def test_ranges(answers: list[LabelledAnswer]) -> None:
    result = evaluate(answers, resamples=10)
    for metrics in (result.overall, *result.types.values()):
        for key, estimate in metrics.estimates.items():
            most = {"nll": 37, "brier": 2 + 1e-9, "level_mae": 9}.get(key, 1 + 1e-9)
            for value in (estimate.value, estimate.low, estimate.high):
                assert value is None or 0 <= value <= most, key
        assert metrics.estimates["accuracy_at_100"].value == pytest.approx(metrics.estimates["accuracy"].value)


def test_true_probabilities_have_the_least_expected_nll_and_brier() -> None:
    soft = [answer([0.3, 0.7], [0.3, 0.7]), answer([0.8, 0.2], [0.8, 0.2])]
    best = points(soft)
    assert best["brier"] == 0
    entropy = -sum(t * math.log(t) for a in soft for t in a.target) / 2
    assert best["nll"] == pytest.approx(entropy)
    for temperature in (0.5, 0.9, 1.1, 3):
        worse = points([replace(a, probabilities=temper(a.probabilities, temperature)) for a in soft])
        assert worse["nll"] > best["nll"]
        assert worse["brier"] > 0


def test_intervals_hold_the_point_shrink_with_rows_and_repeat() -> None:
    small, large = evaluate(simulated(50)), evaluate(simulated(500))
    for result in (small, large):
        for metrics in (result.overall, *result.types.values()):
            for key, estimate in metrics.estimates.items():
                assert estimate.low is not None
                assert estimate.high is not None
                assert estimate.low < estimate.high
                if key != "ece" or result is large:  # the bootstrap adds to a small calibration error
                    assert estimate.low <= estimate.value <= estimate.high, key
    for key, estimate in large.overall.estimates.items():
        other = small.overall.estimates[key]
        assert estimate.high - estimate.low < other.high - other.low  # type: ignore[operator]
    assert evaluate(simulated(50)) == small
    assert evaluate(simulated(50), seed=1) != small


def test_an_interval_is_as_wide_as_theory_says_and_counts_rows_not_questions() -> None:
    random = np.random.default_rng(3)
    right = random.random(400) < 0.8
    once = [answer([0.9, 0.1], int(not r), row=i) for i, r in enumerate(right)]
    often = [replace(a, question_id=str(k)) for a in once for k in range(9)]
    error = math.sqrt(right.mean() * (1 - right.mean()) / len(right))
    for answers in (once, often):
        accuracy = evaluate(answers).overall.estimates["accuracy"]
        assert accuracy.value == pytest.approx(right.mean())
        assert accuracy.high - accuracy.low == pytest.approx(2 * 1.96 * error, rel=0.1)  # type: ignore[operator]


def test_nine_of_ten_intervals_hold_the_truth() -> None:
    truth, held = 0.7, 0
    random = np.random.default_rng(0)
    for _ in range(200):
        answers = [answer([0.7, 0.3], int(random.random() > truth), row=i) for i in range(100)]
        accuracy = evaluate(answers, resamples=200, level=0.9).overall.estimates["accuracy"]
        held += accuracy.low <= truth <= accuracy.high  # type: ignore[operator]
    assert 165 <= held <= 195


def test_a_type_that_few_rows_have_gets_its_interval_from_the_resamples_that_have_it() -> None:
    answers = [answer([0.9, 0.1], row=i) for i in range(30)] + [answer([0.2, 0.8], kind="noul", row=30)]
    noul = evaluate(answers).types["noul"].estimates
    assert (noul["accuracy"].low, noul["accuracy"].high) == (0, 0)
    assert all(e.low == pytest.approx(e.value) for e in noul.values())


@pytest.mark.parametrize(
    "options",
    [{"bins": 0}, {"binning": "other"}, {"resamples": -1}, {"level": 1}, {"level": 0}, {"level": math.nan}],
)
def test_bad_options_are_refused(options: Any) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        evaluate([answer([1.0])], **options)


@pytest.mark.parametrize(
    "bad",
    [
        answer([0.5, 0.4]),
        answer([math.nan, 0.5]),
        answer([math.inf, 0.5]),
        answer([1.5, -0.5]),
        answer([0.5, 0.5], [0.0, 0.0]),
        answer([0.5, 0.5], [1.0]),
        answer([0.5, 0.5], options="abc"),
        answer([], []),
        answer([1.0], kind="box", options="a"),
    ],
)
def test_bad_answers_are_refused_and_located(bad: LabelledAnswer) -> None:
    with pytest.raises(ValueError, match="answer 1: "):
        evaluate([answer([1.0]), bad])
    with pytest.raises(ValueError, match="no answers"):
        evaluate([])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(-30, 30), min_size=1, max_size=6), st.floats(0.05, 50))
def test_a_temperature_divides_logits(logits: list[float], temperature: float) -> None:
    def softmax(values: Any) -> Any:
        powers = np.exp(np.asarray(values) - np.max(values))
        return powers / powers.sum()

    expected = softmax(np.array(logits) / temperature)
    np.testing.assert_allclose(temper(softmax(logits), temperature), expected, atol=1e-9)


def test_temperatures_at_their_limits() -> None:
    assert temper((0.3, 0.7), 1) == (0.3, 0.7)
    assert temper((0.3, 0.7), 5e-324) == (0, 1)
    assert temper((0.3, 0.7), 1e308) == pytest.approx((0.5, 0.5))
    assert temper((0.0, 1.0), 1e308) == (0, 1)
    assert temper((1.0,), 7) == (1,)
    assert temper((5e-324, 1.0), 0.5) == (0, 1)
    for bad in (0, -1, math.nan, math.inf):
        with pytest.raises(ValueError, match="temperature"):
            temper((1.0,), bad)


def test_the_bootstrap_of_many_questions_takes_seconds() -> None:
    answers = simulated(1000)
    start = time.perf_counter()
    evaluate(answers)
    assert time.perf_counter() - start < 15


def test_255_options() -> None:
    p = np.random.default_rng(0).dirichlet(np.ones(255), size=3)
    names = [f"option {i}" for i in range(255)]
    result = evaluate([answer(q.tolist(), i, row=i, options=names) for i, q in enumerate(p)], resamples=10)
    assert len(result.types["choice"].confusion["q"].labels) <= 6


def test_metrics_need_numpy_alone() -> None:
    code = (
        "import importlib.util as u, sys\n"
        "spec = u.spec_from_file_location('metrics', sys.argv[1]); module = u.module_from_spec(spec)\n"
        "sys.modules['metrics'] = module; spec.loader.exec_module(module)\n"
        "assert 'torch' not in sys.modules and 'flide' not in sys.modules"
    )
    import flide.evaluation.metrics as module

    done = subprocess.run([sys.executable, "-c", code, module.__file__], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
