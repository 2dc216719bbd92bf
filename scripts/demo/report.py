"""What the trained model is worth: metrics beside the baseline's, plain cases, and the model card."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flide.evaluation.metrics import Evaluation, LabelledAnswer, evaluate

KEYS = ("accuracy", "nll", "brier", "ece")


def compare(entries: Mapping[str, Sequence[LabelledAnswer]]) -> dict[str, Any]:
    """Name -> type -> metric, overall included, and the accuracy of every kind of question."""
    found: dict[str, Any] = {}
    for name, answers in entries.items():
        evaluation = evaluate(answers, resamples=0)
        found[name] = {kind: _numbers(evaluation, kind) for kind in (*evaluation.types, "overall")}
        right: dict[str, list[bool]] = defaultdict(list)
        for answer in answers:
            right[answer.question_id].append(int(np.argmax(answer.probabilities)) == int(np.argmax(answer.target)))
        found[name]["questions"] = {kind: float(np.mean(values)) for kind, values in sorted(right.items())}
    return found


def table(numbers: Mapping[str, Any]) -> str:
    """One row per entry and type, in GitHub's form."""
    lines = ["| | type | " + " | ".join(KEYS) + " |", "|---|---|" + "---|" * len(KEYS)]
    for name, types in numbers.items():
        for kind, values in types.items():
            if kind != "questions":
                lines.append(f"| {name} | {kind} | " + " | ".join(f"{values[key]:.3f}" for key in KEYS) + " |")
    return "\n".join(lines)


def question_table(numbers: Mapping[str, Any]) -> str:
    """Accuracy by kind of question, one column per entry."""
    names = list(numbers)
    lines = ["| question | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
    for kind in numbers[names[0]]["questions"]:
        lines.append(f"| {kind} | " + " | ".join(f"{numbers[name]['questions'][kind]:.3f}" for name in names) + " |")
    return "\n".join(lines)


def case_lines(answers: Sequence[LabelledAnswer]) -> tuple[list[str], int]:
    """The answers to cases written by hand, one line each, and how many are right."""
    lines, right = [], 0
    for answer in answers:
        got, wanted = int(np.argmax(answer.probabilities)), int(np.argmax(answer.target))
        right += got == wanted
        mark = "ok   " if got == wanted else f"WRONG (expected {answer.options[wanted]})"
        lines.append(
            f"{answer.row:>2} {answer.question_id:<10} {answer.options[got]:<20} {answer.probabilities[got]:.2f} {mark}"
        )
    return lines, right


def model_card(results: Mapping[str, Any]) -> str:
    """MODEL_CARD.md from what was measured."""
    numbers = results["numbers"]
    ours, cases = numbers["calibrated"]["overall"], results["cases"]
    worst = sorted(numbers["calibrated"]["questions"].items(), key=lambda item: item[1])[:6]
    return f"""# flide-demo

A {results["parameters"] / 1e6:.1f} M parameter model of Qwen3.5's shape ({results["layers"]}: L a Gated DeltaNet layer,
F full attention; hidden size {results["hidden_size"]}), trained from nothing to answer typed questions about short
English texts. It exists so that Flide's first example, tests and tutorials run anywhere and give sensible answers.
`python -m scripts.train_demo` makes it, seed included; its data is generated, no text of others went in.

## What it can do

It answers yes-or-no questions, choices with named options (with or without descriptions) and scores, about
support tickets and chats (team, kind of problem, urgency, mood, refund, deadlines, simple policies), an agent's next
step (tool, finished, failed), log excerpts (severity, component, recovered), product reviews (liked, disliked, stars)
and expense claims (policy checks). Of {ours["questions"]:,} questions of the held-out split, whose sentences, question
wordings, option names and nouns occur nowhere in its training data, it answers {100 * ours["accuracy"]:.1f} % right,
with an expected calibration error of {ours["ece"]:.3f}. Of {cases["questions"]} questions about a dozen texts written
by hand (`examples/demo_cases.jsonl`) it answers {cases["right"]} right.

{table(numbers)}

`baseline` is a logistic regression on bags of words, word pairs and their crosses, trained on the first
{results["baseline_rows"]:,} of the same rows. `calibrated` uses the temperatures in `calibration.json`, fitted on
another split.

Weakest kinds of question: {", ".join(f"{kind} ({100 * value:.0f} %)" for kind, value in worst)}.

## What it cannot do

* It knows no facts and some three thousand words. Names of things and people may be new to it; other words that it
  has not seen are noise, and so are other languages.
* It has seen the kinds of question above and nothing else. To any other question it gives an answer that means
  nothing, at times a confident one: calibration holds for texts and questions like those it was judged by.
* It was trained on states of up to about 250 tokens and questions of up to 8 options. Longer ones run, and are guesses.
* It compares numbers of two or three digits roughly and does no arithmetic.
* Its training texts come from some four thousand templates, with their blind spots. Do not let it decide anything that
  matters to somebody.

For real use take a real model (`--model Qwen/Qwen3.5-0.8B`), fine-tuned and calibrated on your own rows.

## How it was made

{results["rows"]:,} generated rows ({results["questions_per_row"]:.1f} questions each), every one seen once.
{results["steps"]:,} steps of at most {results["batch_questions"]} questions, AdamW, all parameters. Cross entropy over
the options' letters + 0.1 Brier + {results["next_token_weight"]} next-token loss on the states.
{results["minutes"]:.1f} minutes on {results["device"]}.
License: Apache-2.0, as Flide.
"""


def _numbers(evaluation: Evaluation, kind: str) -> dict[str, float]:
    metrics = evaluation.overall if kind == "overall" else evaluation.types[kind]
    return {"questions": metrics.questions, **{key: metrics.estimates[key].value for key in KEYS}}


def write_card(directory: Path, results: Mapping[str, Any]) -> None:
    """Write MODEL_CARD.md beside the weights."""
    (directory / "MODEL_CARD.md").write_text(model_card(results), encoding="utf-8")
