"""How the embedded demo model is made: its data is what it claims to be, training computes what the library does."""

from __future__ import annotations

import functools
import itertools
import json
import os
import random
import re
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flide.evaluation.rows import parse_row, read_rows
from flide.models import Qwen35ForDecision
from flide.runtime import ForkMetadata, TokenTree
from flide.runtime.prompt import ChatFormat
from flide.runtime.tokenizer import MAX_LABELS, PromptTokenizer
from scripts.demo import baseline
from scripts.demo.bags import joined, read_bags
from scripts.demo.batched import CHUNK, BatchShape, PaddedBatch, _Inverse, forward, option_logits
from scripts.demo.config import DemoConfig
from scripts.demo.data import MOST_QUESTIONS, make_rows, rows, with_words_dropped, write_rows
from scripts.demo.grammar import CLOSED, INVENTED, SPLITS, banks, invented, plural, tidied
from scripts.demo.making import CASES, MOST_BYTES, MOST_LABELS, MOST_PARAMETERS, _save
from scripts.demo.parallel import Workers
from scripts.demo.report import model_card
from scripts.demo.samples import Sample, encode_row, line_end_ids, make_samples
from scripts.demo.tasks import TASKS
from scripts.demo.tokenizer import prompt_texts, write_demo_tokenizer
from scripts.demo.training import _batches, _Step, new_model, train
from tests.tolerance import LOGITS_FP32

ROOT = Path(__file__).parent.parent
NAMES = (
    "item",
    "part",
    "first",
    "last",
    "city",
    "event",
    "business",
    "app",
    "feature",
    "service",
    "host",
    "file",
    "company",
)
FRAMES = {"{text}", "steps so far:"}  # what holds texts together is no text


@pytest.fixture(scope="module")
def data() -> dict[str, list[dict[str, Any]]]:
    return {split: list(rows(split, 1000)) for split in SPLITS}


@pytest.fixture(scope="module")
def directory(data, tmp_path_factory) -> Path:
    found = tmp_path_factory.mktemp("demo")
    write_demo_tokenizer(found, prompt_texts("train", 0, 1500))
    return found


@pytest.fixture(scope="module")
def tokenizer(directory) -> PromptTokenizer:
    return PromptTokenizer.from_pretrained(directory)


def strings(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    return [text for part in (value.values() if isinstance(value, dict) else value) for text in strings(part)]


# The generator


def test_same_rows_in_every_process(data):
    program = "import json; from scripts.demo.data import *; print(json.dumps([make_row(s, 7) for s in SPLITS]))"
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
        )
        assert json.loads(done.stdout) == [data[split][7] for split in SPLITS]
    assert list(rows("train", 3, seed=1)) != data["train"][:3]


def test_no_template_is_in_two_splits():
    where = defaultdict(set)
    for name, bank in banks().items():
        if name.startswith("lex."):
            assert not bank["val"] + bank["test"], f"{name}: phrases of training's templates"
            continue
        assert all(bank[split] for split in SPLITS), f"{name} has no templates for a split"
        if name not in CLOSED:
            for split, templates in bank.items():
                for template in templates:
                    where[template.lower()].add(split)
    assert not [template for template, splits in where.items() if len(splits) > 1 and template not in {*FRAMES, ""}]


def test_no_text_is_in_two_splits(data):
    found = {split: _texts(these) for split, these in data.items()}
    for one, other in itertools.combinations(SPLITS, 2):
        for kind in found[one]:
            assert found[one][kind] & found[other][kind] <= FRAMES, f"{kind} of {one} and {other}"


def test_held_out_names_are_not_in_training(data):
    told = json.dumps(data["train"], ensure_ascii=False).replace("\\n", " ").lower()
    for name in NAMES:
        for split in ("val", "test"):
            for word in banks()[name][split]:
                assert not re.search(rf"(?<!\w){re.escape(word.lower())}(?!\w)", told), f"{word} of {name}"


def test_invented_names_are_nobody_s():
    rng, found = random.Random(0), []
    for name, (_, form) in INVENTED.items():
        words = [invented(rng, form) for _ in range(300)]
        assert len({*words}) > 250, name
        found += words
    assert not {word.lower() for word in found} & {
        word.lower() for name in INVENTED for bank in banks()[name].values() for word in bank
    }


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("a oven , a user", "an oven, a user"),
        ("an lamp and an hour", "a lamp and an hour"),
        ("A item  costs a euro", "An item costs a euro"),
        ("Option A is a one-way trip", "Option A is a one-way trip"),
    ],
)
def test_tidied(text, wanted):
    assert tidied(text) == wanted


def test_plurals():
    wanted = {"lamp": "lamps", "mattress": "mattresses", "watch": "watches", "bookshelf": "bookshelves"}
    wanted |= {"set of glasses": "sets of glasses", "pair of boots": "pairs of boots", "jeans": "jeans"}
    assert {noun: plural(noun) for noun in wanted} == wanted


def _texts(these: list[dict[str, Any]]) -> dict[str, set[str]]:
    found = defaultdict(set)
    for row in these:
        for text in strings(row["state"]):
            sentences = (re.sub(r"\d+", "0", part).strip().lower() for part in re.split(r"[.!?\n]", text))
            found["sentences"] |= {sentence for sentence in sentences if len(sentence.split()) > 2}
        for question in row["questions"].values():
            found["wordings"].add(question["instructions"].lower())
            criteria = question.get("criteria") or {}
            found["options"] |= {option.lower() for option in criteria if question["type"] != "noul"}
            if isinstance(criteria, dict):
                found["descriptions"] |= {text.lower() for text in criteria.values() if text}
    return found


def test_states_are_of_many_lengths(data, tokenizer):
    lengths = [len(tokenizer.encode_plain([json.dumps(row["state"])])[0]) for row in data["train"]]
    assert np.percentile(lengths, 5) < 30
    assert np.percentile(lengths, 95) > 120
    assert max(lengths) < 400


def test_no_answer_is_always_the_same(data):
    counts, tops = defaultdict(Counter), Counter()
    for split in SPLITS:
        for row in data[split]:
            assert 2 <= len(row["questions"]) <= MOST_QUESTIONS
            for kind, target in parse_row(json.dumps(row), 1).targets.items():
                counts[kind][int(np.argmax(target))] += 1
    assert {kind.split(".")[0] for kind in counts} == {*TASKS}
    for kind, found in counts.items():
        share = max(found.values()) / sum(found.values())
        assert share < 0.9, f"{kind}: one answer in {share:.0%} of {sum(found.values())}"
    # A choice's right option is as often first as any other.
    for row in itertools.chain(*data.values()):
        for kind, question in row["questions"].items():
            names = list(question["criteria"]) if question["type"] == "choice" else []
            if len(names) == 4:
                tops[names.index(row["targets"][kind])] += 1
    assert max(tops.values()) < 1.5 * min(tops.values())


def test_rows_are_what_train_and_eval_read(data, tokenizer, tmp_path):
    for split in SPLITS:
        write_rows(tmp_path / "rows.jsonl", data[split][:200])
        found, errors = read_rows(tmp_path / "rows.jsonl")
        assert not errors
        assert len(found) == 200
        format = ChatFormat(tokenizer, max_prompt_tokens=512)
        for row in found:
            assert max(format.encode(row.request).num_options) <= MOST_LABELS
            assert all(max(target) == 1.0 for target in row.targets.values())


def test_rows_without_some_words_are_rows(data):
    changed = 0
    for index, row in enumerate(data["train"]):
        thinner = with_words_dropped(row, random.Random(index), share=0.2)
        before, after = (parse_row(json.dumps(x), 1) for x in (row, thinner))
        assert after.targets == before.targets
        assert len(json.dumps(thinner["state"])) <= len(json.dumps(row["state"]))
        changed += thinner != row
        for word in ("not", "no", "never"):
            counts = [" ".join(strings(x["state"])).lower().split().count(word) for x in (row, thinner)]
            assert counts[0] == counts[1]
    assert changed > 900


def test_lookups_are_right_and_in_training_alone(data):
    """A word that is asked for is there as it is, with words dropped too; the others are not."""
    answers = Counter()
    for split in SPLITS:
        for index, row in enumerate(data[split]):
            for this in (row, with_words_dropped(row, random.Random(index), share=0.2)):
                told = {*re.findall(r"[^\W\d_]+", " ".join(strings(this["state"])).lower())}
                for kind, question in this["questions"].items():
                    target = this["targets"][kind]
                    if kind.endswith(".word"):
                        assert split == "train"
                        assert [word for word in question["criteria"] if word.lower() in told] == [target]
                    elif kind.endswith(".has_word"):
                        assert split == "train"
                        answers[target] += 1
                        here = {*re.findall(r"[^\W\d_]+", question["instructions"].lower())} & told
                        assert here or not target
    assert min(answers.values()) > 100


def test_scales_of_unknown_words_keep_their_order(data):
    """Some levels are invented words, the others are where they were."""
    changed = total = 0
    for index, row in enumerate(data["train"]):
        thinner = with_words_dropped(row, random.Random(index), share=0.0)
        for kind, question in row["questions"].items():
            if question["type"] == "score":
                levels = thinner["questions"][kind]["criteria"]
                assert len({*levels}) == len(question["criteria"])
                total += 1
                changed += levels != question["criteria"]
    assert 0.4 < changed / total < 0.6


def test_cases_by_hand_are_no_templates():
    cases, errors = read_rows(CASES)
    assert not errors
    assert len(cases) == 12
    told = _texts([json.loads(line) for line in CASES.read_text(encoding="utf-8").splitlines()])
    written = set.union(*(_texts(list(rows(split, 1000)))["sentences"] for split in SPLITS))
    assert told["sentences"] & written <= FRAMES


# The tokenizer


def test_tokenizer_round_trip(data, tokenizer):
    texts = [text for row in data["test"][:200] for text in strings(row["state"])]
    for text in [*texts, "caf\u00e9 \u4f60\u597d \U0001f600\n\n\t x"]:
        assert tokenizer.decode(tokenizer.encode_plain([text])[0]) == text


def test_tokenizer_has_all_labels(tokenizer):
    assert tokenizer.num_labels() == MAX_LABELS
    labels = tokenizer.labels(MAX_LABELS)
    assert "".join(label.text for label in labels[:26]) == "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    assert len({label.id for label in labels}) == MAX_LABELS


def test_tokenizer_is_made_the_same_again(directory, tmp_path):
    write_demo_tokenizer(tmp_path, prompt_texts("train", 0, 1500))
    for path in tmp_path.iterdir():
        assert path.read_bytes() == (directory / path.name).read_bytes()


# The model


def small(**fields: Any) -> DemoConfig:
    return DemoConfig(**{"hidden_size": 32, "intermediate_size": 32, "layers": "LF", "batch_questions": 16, **fields})


def test_model_is_within_its_budget(tokenizer):
    model = new_model(DemoConfig(), tokenizer.vocab_size)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert parameters <= MOST_PARAMETERS
    assert 2 * parameters < MOST_BYTES
    model.bfloat16().check_kernels()


def test_batched_forward_is_the_library_s(data, directory):
    format = ChatFormat(PromptTokenizer.from_pretrained(directory))
    rng = np.random.default_rng(0)
    ends = line_end_ids(format.tokenizer)
    made = [encode_row(row, format, ends) for row in data["val"][:6]]
    for trunk, branches in ((1, [3, 70]), (2, [1]), (64, [64, 65]), (200, [5, 130])):
        ids = [rng.integers(0, 1500, n).astype(np.int16) for n in (trunk, *branches)]
        made.append(Sample(ids[0], ids[1:], [[0, 0]] * len(branches), [(0.0, 1.0)] * len(branches)))
    model = new_model(small(layers="LFL"), format.tokenizer.vocab_size).eval()
    batch = PaddedBatch.of(made)
    labels = torch.tensor(format.label_ids(MOST_LABELS))
    with torch.no_grad():
        hidden = forward(model, batch)
        logits_QO = option_logits(model, hidden, batch, labels)
        for sample, rows_QO in _by_sample(made, logits_QO):
            prompts = [[*sample.trunk.tolist(), *branch.tolist()] for branch in sample.branches]
            wanted_QO = _library_logits(model, prompts, labels)
            for got, wanted, target in zip(rows_QO, wanted_QO, sample.targets, strict=True):
                n = len(target)
                torch.testing.assert_close(got[:n], wanted[:n], rtol=0, atol=LOGITS_FP32)
                assert (got[n:] == float("-inf")).all()


def test_a_padded_batch_s_losses_and_gradients_are_those_of_its_questions(data, directory):
    """Rows and questions that nobody asked move nothing."""
    format = ChatFormat(PromptTokenizer.from_pretrained(directory))
    made = [encode_row(row, format, line_end_ids(format.tokenizer)) for row in data["train"][:5]]
    exact = BatchShape.of(made)
    labels = torch.tensor(format.label_ids(MOST_LABELS))
    padded = BatchShape(exact.rows + 2, exact.trunk + 31, exact.questions + 3, exact.branch + 7, MOST_LABELS)
    found = []
    for shape in (None, BatchShape(*map(_whole, padded[:4], (1, 64, 1, 64)), MOST_LABELS)):
        step = _Step(new_model(small(), format.tokenizer.vocab_size), labels, small())
        step(PaddedBatch.of(made, shape))
        gradients = {name: p.grad for name, p in step.model.named_parameters()}
        found.append((step.means(), gradients))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)
    for name, gradient in found[0][1].items():
        torch.testing.assert_close(found[1][1][name], gradient, rtol=1e-3, atol=1e-6)


def _whole(length: int, unit: int) -> int:
    return -(-length // unit) * unit


def test_the_inverse_and_its_gradient():
    generator = torch.Generator().manual_seed(0)
    for size in (1, 2, 47, CHUNK):
        lower = torch.rand(2, size, size, generator=generator, dtype=torch.float64).tril(-1)
        product = _Inverse.apply(lower) @ (lower + torch.eye(size))
        torch.testing.assert_close(product, torch.eye(size, dtype=torch.float64).expand_as(product))
    matrix = torch.rand(2, 9, 9, generator=generator, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: _Inverse.apply(x.tril(-1)), (matrix,))


def _by_sample(made, logits_QO):
    parts = logits_QO.split([len(sample.branches) for sample in made])
    return zip(made, parts, strict=True)


def _library_logits(model: Qwen35ForDecision, prompts: list[list[int]], labels: torch.Tensor) -> torch.Tensor:
    meta = ForkMetadata.pack([TokenTree.from_prompts(prompts)])
    return model.label_logits(model(meta.tokens, meta), model.label_rows(labels.tolist()))


def test_option_ends_are_the_ends_of_lines(data, tokenizer):
    format, ends = ChatFormat(tokenizer), line_end_ids(tokenizer)
    for row in data["train"][:300]:
        sample = encode_row(row, format, ends)
        for branch, rows_O, target in zip(sample.branches, sample.option_ends, sample.targets, strict=True):
            assert len(rows_O) == len(target)
            text = tokenizer.decode(branch[: rows_O[-1] + 1].tolist())
            assert text.endswith("\n")
            assert text.count("\n") == len(target) + 1


def test_training_learns_and_repeats(directory, tokenizer):
    samples = make_samples("train", 0, 8, tokenizer=directory)
    label_ids = [label.id for label in tokenizer.labels(MOST_LABELS)]
    config = small(steps=16, warmup=3, lr=5e-3)
    reports = []
    for _ in range(2):
        model = new_model(config, tokenizer.vocab_size)
        endless = itertools.cycle(samples)
        reports.append(train(model, endless, samples[:4], config, label_ids, report_every=8, judge_every=8))
    for report in reports[0] + reports[1]:
        for name in [name for name in report if "second" in name]:
            del report[name]
    for first, second in zip(*reports, strict=True):
        assert first == pytest.approx(second, rel=1e-5)  # products of small matrices depend on how memory is aligned
    assert reports[0][-1]["nll"] < reports[0][0]["nll"]


def test_rows_come_in_order_however_they_are_made(directory):
    config = small()
    work = functools.partial(make_samples, tokenizer=directory, dropped_words=0.1)
    with Workers(0) as alone, Workers(2) as two:
        lists = [list(workers.stretches(make_rows, "val", 70, size=20)) for workers in (alone, two)]
        assert lists[0] == lists[1]
        assert list(itertools.chain(*lists[0])) == list(rows("val", 70))
        found = []
        for workers in (alone, two):
            endless = workers.stretches(work, "train", size=20)
            batches = itertools.islice(_batches(itertools.chain.from_iterable(endless), config), 40)
            found.append([[sample.trunk.tolist() for sample in batch] for batch in batches])
            endless.close()
        assert found[0] == found[1]
        seen = [str(trunk) for batch in found[0] for trunk in batch]
        assert len({*seen}) == len(seen) > 100  # every step has new rows


def test_processes_that_make_rows_load_no_torch():
    names = ["config", "data", "parallel", "samples", "tokenizer", "bags"]
    program = "; ".join(
        [
            "import sys, scripts.train_demo",
            *(f"import scripts.demo.{name}" for name in names),
            "print('torch' in sys.modules)",
        ]
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_model_is_saved_while_it_is_trained(directory, tokenizer, tmp_path):
    kept = []

    def keep(model: Qwen35ForDecision) -> None:
        _save(model, tmp_path, tmp_path / "unfinished")
        kept.append(Qwen35ForDecision.from_pretrained(tmp_path))

    samples = itertools.cycle(make_samples("train", 0, 8, tokenizer=directory))
    config, label_ids = small(steps=4), [label.id for label in tokenizer.labels(MOST_LABELS)]
    model = new_model(config, tokenizer.vocab_size)
    train(model, samples, [next(samples)], config, label_ids, judge_every=2, keep=keep, report_every=2)
    assert len(kept) == 2
    assert model.training
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "model.safetensors"}
    for name, parameter in model.state_dict().items():
        assert torch.equal(kept[1].state_dict()[name].bfloat16(), parameter.bfloat16()), name


# The judges


def test_baseline_learns():
    bags, told = joined([read_bags("train", 0, 60), read_bags("train", 60, 100)])
    model = baseline.fit(bags, bags, device=torch.device("cpu"), epochs=5)
    answers = baseline.answers(model, bags, told)
    assert len(answers) == len(told)
    right = np.mean([np.argmax(answer.probabilities) == np.argmax(answer.target) for answer in answers])
    assert right > 0.75


@pytest.mark.slow
def test_smoke(tmp_path):
    program = [sys.executable, "-m", "scripts.train_demo", str(tmp_path), "--smoke", "--device", "cpu"]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "calibrated" in done.stdout
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["parameters"] <= MOST_PARAMETERS
    assert (tmp_path / "reliability.png").stat().st_size > 1000
    for name in ("model.safetensors", "tokenizer.json", "calibration.json", "MODEL_CARD.md"):
        assert (tmp_path / "model" / name).is_file()
    assert (tmp_path / "model" / "MODEL_CARD.md").read_text() == model_card(results)
