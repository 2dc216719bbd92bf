"""A head answers what its isolated prompts answer in transformers, and keeps to what it can know."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from flide import Choice, DecisionRequest, Engine, EngineConfig, Noul, RequestError, Score
from flide.errors import CheckpointError
from flide.heads import Head, LinearHead, OptionHead, OptionReads, ScalarHead, load_head, register_head, save_head
from flide.heads.files import HEAD_FILE, WEIGHTS_FILE
from flide.heads.head import ZERO, head_kind
from flide.heads.kinds import label_names
from flide.models import ForDecision, Qwen35ForDecision
from flide.runtime.decision import num_options
from flide.runtime.prompt import ChatFormat
from flide.runtime.request import Question
from flide.runtime.rounds import PreparedRequest
from flide.runtime.tokenizer import PromptTokenizer
from flide.runtime.tree import prompts_of
from tests.tiny_model import tiny_model_directory
from tests.tolerance import PROBABILITY_FP32

CPU = EngineConfig(device="cpu")
STATE = "The box was crushed and two of the six glasses are broken."
QUESTIONS: dict[str, Question] = {
    "damaged": Noul("Did the goods arrive damaged?", {"true": "something broke", "false": None}),
    "team": Choice("Which team?", {"shipping": "delivery, damage", "billing": None, "sales": None}),
    "anger": Score("How angry?", ["calm", "annoyed", {"level": "furious"}]),
    "late": Noul(None),
}


@pytest.fixture(scope="module")
def tokenizer() -> PromptTokenizer:
    return PromptTokenizer.from_pretrained(tiny_model_directory())


def new_model() -> Qwen35ForDecision:
    return Qwen35ForDecision.from_pretrained(tiny_model_directory())


@pytest.fixture(scope="module")
def oracle() -> Any:
    directory = tiny_model_directory()
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True).eval()
    return model, AutoTokenizer.from_pretrained(directory, local_files_only=True)


@torch.no_grad()
def isolated(oracle: Any, text: str) -> tuple[Tensor, Tensor]:
    """Last hidden state and logits of one whole prompt in transformers."""
    model, tokenizer = oracle
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": f"{STATE}\n\nQuestion: {text}"}],
        add_generation_prompt=True,
        enable_thinking=False,
        return_tensors="pt",
        return_dict=True,
    )["input_ids"]
    out = model(ids, use_cache=False, output_hidden_states=True)
    return out.hidden_states[-1][0, -1], out.logits[0, -1]


def proposed(instructions: str, option: str) -> str:
    return f"{instructions}\nProposed answer: {option}\nIs this proposed answer correct? Answer Yes or No."


PROPOSALS = {
    "damaged": [
        "Did the goods arrive damaged?\nYes means: something broke\nIs the answer to this question yes? "
        "Answer Yes or No."
    ],
    "team": [proposed("Which team?", x) for x in ("shipping: delivery, damage", "billing", "sales")],
    "anger": [proposed("How angry?", x) for x in ("calm", "annoyed", '{"level": "furious"}')],
    "late": ["Which option fits best?\nIs the answer to this question yes? Answer Yes or No."],
}


def probabilities_of(decision: Any, question_id: str) -> list[float]:
    return list(decision[question_id].probabilities.values())


def scalar_engine(tokenizer: PromptTokenizer, config: EngineConfig = CPU) -> Engine:
    model = new_model()
    model.head = ScalarHead.initial(model, tokenizer, []).eval()
    return Engine(model, tokenizer, config)


def test_a_new_scalar_head_is_the_log_odds_of_yes_in_every_candidates_own_prompt(
    oracle: Any, tokenizer: PromptTokenizer
) -> None:
    with scalar_engine(tokenizer) as engine:
        (decision,) = engine.decide([DecisionRequest(STATE, QUESTIONS)])
        prepared = engine.prepare(DecisionRequest(STATE, QUESTIONS))
    assert prepared.layout.depth == 3  # candidates share their question
    yes, no = tokenizer.answer_ids(["Yes", "No"])
    for question_id, texts in PROPOSALS.items():
        logits = torch.stack([isolated(oracle, text)[1] for text in texts])
        scores = logits[:, yes] - logits[:, no]
        scores = torch.cat([scores, torch.zeros(1)]) if len(texts) == 1 else scores
        expected = scores.softmax(0).tolist()
        assert probabilities_of(decision, question_id) == pytest.approx(expected, abs=PROBABILITY_FP32)


def test_candidates_of_a_single_question_fork_from_the_trunk_and_so_do_those_of_too_many(
    tokenizer: PromptTokenizer,
) -> None:
    with scalar_engine(tokenizer) as engine:
        alone = engine.prepare(DecisionRequest(STATE, {"team": QUESTIONS["team"]}))
        many = {f"q{i}": Choice(f"Question {i}?", ["a", "b"]) for i in range(256)}
        flat = engine.prepare(DecisionRequest("s", many))
        deep = engine.prepare(DecisionRequest("s", dict(list(many.items())[:3])))
        assert (alone.layout.depth, flat.layout.depth, deep.layout.depth) == (2, 2, 3)
        assert all(child.tokens for child in (*alone.tree.children, *flat.tree.children, *deep.tree.children))
        assert deep.layout.num_parents == 4
        (first,), (second,) = (engine.decide([DecisionRequest("s", dict(list(many.items())[:n]))]) for n in (3, 256))
    format = ChatFormat(tokenizer, style="candidates")
    shallow = PreparedRequest.encode(deep.request, format, ScalarHead(8), depth=2)  # as for CUDA's graphs
    assert shallow.layout.depth == 2
    assert prompts_of(shallow.tree) == prompts_of(deep.tree)
    for i in range(3):
        expected = pytest.approx(probabilities_of(second, f"q{i}"), abs=PROBABILITY_FP32)
        assert probabilities_of(first, f"q{i}") == expected


def test_a_linear_head_reads_the_labels_of_the_options_whatever_their_order(
    oracle: Any, tokenizer: PromptTokenizer
) -> None:
    model = new_model()
    head = LinearHead.initial(model, tokenizer, [*QUESTIONS.values(), Choice("?", ["other", "billing"])])
    assert head.labels == (
        *("true", "false", "shipping", "billing", "sales", "calm", "annoyed"),
        *('{"level": "furious"}', "other"),
    )
    assert not any(parameter.any() for parameter in head.parameters())  # at first all labels are alike
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(1), std=0.2)
    model.head = head.eval()
    turned = {**QUESTIONS, "team": Choice("Which team?", ["sales", "shipping"])}
    with Engine(model, tokenizer, CPU) as engine:
        one, other = engine.decide([DecisionRequest(STATE, QUESTIONS), DecisionRequest(STATE, turned)])
        with pytest.raises(RequestError) as refused:
            engine.decide([DecisionRequest(STATE, {"damaged": Noul("?"), "team": Choice("?", ["billing", "nobody"])})])
    assert [entry["loc"] for entry in refused.value.errors] == [["body", "questions", "team"]]
    assert "no label for 1 of 2 options" in str(refused.value)
    texts = {"damaged": "Did the goods arrive damaged?", "team": "Which team?", "late": "Which option fits best?"}
    for decision, questions in ((one, QUESTIONS), (other, turned)):
        for question_id, text in texts.items():
            row = isolated(oracle, text)[0] @ head.logits.weight.T + head.logits.bias
            names = label_names(questions[question_id])
            expected = row[[head.labels.index(name) for name in names]].softmax(0).tolist()
            assert probabilities_of(decision, question_id) == pytest.approx(expected, abs=PROBABILITY_FP32)
    with Engine(model, tokenizer, EngineConfig(device="cpu", fork=False)) as engine:
        (unforked,) = engine.decide([DecisionRequest(STATE, QUESTIONS)])
    for question_id in QUESTIONS:
        expected = pytest.approx(probabilities_of(one, question_id), abs=PROBABILITY_FP32)
        assert probabilities_of(unforked, question_id) == expected


def test_candidates_cannot_be_asked_without_a_fork(tokenizer: PromptTokenizer) -> None:
    with pytest.raises(ValueError, match="fork=False"):
        scalar_engine(tokenizer, EngineConfig(device="cpu", fork=False))


def test_the_letters_are_the_engines_own_head(tokenizer: PromptTokenizer, engine: Engine) -> None:
    model = new_model()
    model.head = OptionHead.initial(model, tokenizer, [])
    request = DecisionRequest(STATE, QUESTIONS)
    with Engine(model, tokenizer, CPU) as own:
        (mine,), (theirs,) = own.decide([request]), engine.decide([request])
    assert mine.answers == theirs.answers
    assert list(model.head.parameters()) == []
    assert not any(name.startswith("head") for name in model.checkpoint_tensors())


@pytest.mark.parametrize("head", [ScalarHead(8), LinearHead(["a"], 8)], ids=["scalar", "linear"])
def test_heads_are_float32_whatever_the_model_is(head: Head) -> None:
    outer = nn.ModuleDict({"head": head, "body": nn.Linear(2, 2)}).to(torch.bfloat16)
    assert outer["body"].weight.dtype == torch.bfloat16
    assert {parameter.dtype for parameter in head.parameters()} == {torch.float32}
    assert head(torch.zeros(3, 8, dtype=torch.bfloat16)).dtype == torch.float32
    assert head(torch.zeros(3, 8)).shape == (3, head.num_columns)


def test_reads_find_the_row_and_column_of_every_option() -> None:
    logits_NC = np.arange(12, dtype=np.float32).reshape(4, 3)
    shared = OptionReads.of([[2, 0], [1], [0, 1, 2]])
    inf = np.inf
    assert shared.num_rows == 3
    assert shared.gather(logits_NC).tolist() == [[2, 0, -inf], [4, -inf, -inf], [6, 7, 8]]
    assert shared.alone(2).gather(logits_NC[2:]).tolist() == [[6, 7, 8]]
    assert shared.alone(1).gather(logits_NC[1:]).tolist() == [[4]]
    own = OptionReads.of([[0, ZERO], [0, 0], [0, ZERO]], row_per_option=True)
    assert own.num_rows == 4
    assert own.gather(logits_NC).tolist() == [[0, 0], [3, 6], [9, 0]]


def test_a_tokenizer_tells_answers_apart_or_says_so(tokenizer: PromptTokenizer) -> None:
    yes, no = tokenizer.answer_ids(["Yes", "No"])
    assert "Yes".startswith(tokenizer.decode([yes]))
    assert "No".startswith(tokenizer.decode([no]))
    with pytest.raises(CheckpointError, match="apart"):
        tokenizer.answer_ids(["Yes", "Yes"])


def test_an_unknown_prompt_style_is_refused(tokenizer: PromptTokenizer) -> None:
    with pytest.raises(ValueError, match="style must be"):
        ChatFormat(tokenizer, style="letters")  # type: ignore[arg-type]


# Files


@register_head
class BilinearHead(Head):
    """A user's head: one score per label out of a product with a small matrix."""

    kind = "bilinear"

    def __init__(self, rank: int, hidden_size: int) -> None:
        super().__init__()
        self.rank = rank
        self.down = nn.Linear(hidden_size, rank)
        self.register_buffer("count", torch.zeros(()))

    @property
    def num_columns(self) -> int:
        return self.rank

    def forward(self, hidden_states_ND: Tensor) -> Tensor:
        return self.down(hidden_states_ND.float()).tanh()

    def columns(self, question: Question) -> Sequence[int]:
        return range(num_options(question))

    @classmethod
    def initial(cls, model: ForDecision, tokenizer: PromptTokenizer, questions: Iterable[Question]) -> Self:
        return cls(max(map(num_options, questions)), model.lm_head.in_features)

    def settings(self) -> dict[str, Any]:
        return {"rank": self.rank}

    @classmethod
    def from_settings(cls, settings: dict[str, Any], hidden_size: int) -> Self:
        return cls(settings["rank"], hidden_size)


@pytest.mark.parametrize(
    "head", [ScalarHead(8), LinearHead(["ü", "a\nb"], 8), BilinearHead(3, 8)], ids=lambda x: x.kind
)
def test_what_is_stored_is_loaded(tmp_path: Path, head: Head) -> None:
    save_head(head, tmp_path, base_model="some/base")
    loaded = load_head(tmp_path, 8)
    assert type(loaded) is type(head)
    assert not loaded.training
    assert loaded.settings() == head.settings()
    for name, tensor in head.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)
    assert {path.name for path in tmp_path.iterdir()} == {HEAD_FILE, WEIGHTS_FILE}
    assert json.loads((tmp_path / HEAD_FILE).read_text())["format_version"] == 1
    save_head(None, tmp_path)
    assert load_head(tmp_path, 8) is None
    assert {path.name for path in tmp_path.iterdir()} == {HEAD_FILE}


def test_parameters_that_share_memory_are_stored(tmp_path: Path) -> None:
    head = BilinearHead(3, 8)
    head.count = head.down.bias.detach()[0]
    save_head(head, tmp_path)
    loaded = load_head(tmp_path, 8)
    assert isinstance(loaded, BilinearHead)
    assert torch.equal(loaded.count, head.down.bias[0])


BAD_HEADS: dict[str, tuple[str, str]] = {
    "not-json": ("{", "cannot read head.json"),
    "no-version": ('{"kind": "scalar"}', "no format_version"),
    "newer": ('{"format_version": 2, "kind": "scalar"}', "format_version 2; this Flide reads 1"),
    "no-kind": ('{"format_version": 1}', "what kind of head"),
    "unknown-kind": ('{"format_version": 1, "kind": "span"}', "no head of kind 'span'; there are .*scalar"),
    "no-labels": ('{"format_version": 1, "kind": "linear"}', "labels should be a list"),
    "labels-twice": ('{"format_version": 1, "kind": "linear", "settings": {"labels": ["a", "a"]}}', "distinct"),
    "other-shape": ('{"format_version": 1, "kind": "linear", "settings": {"labels": ["a", "b"]}}', "does not hold"),
    "base": ('{"format_version": 1, "kind": "scalar", "base_model": 3}', "base_model"),
    "settings": ('{"format_version": 1, "kind": "bilinear"}', "does not describe a bilinear head: 'rank'"),
}


@pytest.mark.parametrize(("text", "message"), BAD_HEADS.values(), ids=BAD_HEADS.keys())
def test_bad_files_are_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    save_head(ScalarHead(8), tmp_path)
    (tmp_path / HEAD_FILE).write_text(text)
    with pytest.raises(CheckpointError, match=message):
        load_head(tmp_path, 8)


def test_a_head_of_another_size_and_one_without_weights_are_refused(tmp_path: Path) -> None:
    save_head(ScalarHead(8), tmp_path)
    with pytest.raises(CheckpointError, match="does not hold the parameters of a scalar head"):
        load_head(tmp_path, 16)
    (tmp_path / WEIGHTS_FILE).unlink()
    with pytest.raises(CheckpointError, match=r"cannot read head\.safetensors"):
        load_head(tmp_path, 8)


def test_kinds_are_registered_once() -> None:
    assert register_head(BilinearHead) is BilinearHead
    assert head_kind("scalar") is ScalarHead

    class Other(ScalarHead):
        pass

    with pytest.raises(ValueError, match="already registered"):
        register_head(Other)


def test_a_model_is_saved_and_loaded_with_its_head(tmp_path: Path, tokenizer: PromptTokenizer) -> None:
    model = new_model()
    model.head = ScalarHead.initial(model, tokenizer, [])
    model.save_pretrained(tmp_path)
    tokenizer.save(tmp_path)
    loaded = Qwen35ForDecision.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert isinstance(loaded.head, ScalarHead)
    assert torch.equal(loaded.head.score.weight, model.head.score.weight)
    request = DecisionRequest(STATE, QUESTIONS)
    with Engine.from_pretrained(tmp_path, CPU) as engine, Engine(model.eval(), tokenizer, CPU) as other:
        assert engine.decide([request])[0].answers == other.decide([request])[0].answers


def test_prepared_requests_name_every_question_that_a_head_cannot_answer(tokenizer: PromptTokenizer) -> None:
    head = LinearHead(["a"], 8)
    request = DecisionRequest("s", {"x": Choice("?", ["a"]), "y": Noul("?"), "z": Choice("?", ["b"])})
    with pytest.raises(RequestError) as refused:
        PreparedRequest.encode(request, ChatFormat(tokenizer, style=head.prompt_style), head)
    assert [entry["loc"][-1] for entry in refused.value.errors] == ["y", "z"]
