"""Formats: Open-Jev's words and tokens, formats of users, and how they are found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from flide import AutoModelForDecision, Engine, EngineConfig, RequestError
from flide.errors import CheckpointError
from flide.evaluation.rows import LabelledRow
from flide.heads import Head, OpenJevHead, OptionHead, ScalarHead, load_head, save_head
from flide.runtime import format as formats
from flide.runtime.format import DecisionFormat, EncodedRequest, make_format, register_format
from flide.runtime.openjev import OpenJevFormat
from flide.runtime.prompt import ChatFormat, option_texts
from flide.runtime.reads import OptionReads
from flide.runtime.request import Choice, DecisionRequest, Noul, Question, Score, Value
from flide.runtime.tokenizer import PromptTokenizer
from flide.runtime.wire import parse_body, parse_request
from flide.train.batches import prepare_examples
from tests.openjev import messages
from tests.tiny_model import tiny_model_directory
from tests.tolerance import PROBABILITY_FP32


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Formats of one test."""
    monkeypatch.setattr(formats, "_MAKERS", dict(formats._MAKERS))


def prompt_of(hf: Any, message: str) -> list[int]:
    text = hf.apply_chat_template(
        [{"role": "user", "content": message}], add_generation_prompt=True, enable_thinking=False, tokenize=False
    )
    return list(hf(text)["input_ids"])


def words(format: DecisionFormat, state: Value, question: Question) -> list[str]:
    return [format.state_text(state) + text for text in format.question_texts(question)[0]]


# Open-Jev


def test_open_jevs_words(tok: PromptTokenizer) -> None:
    format = OpenJevFormat(tok)
    end = "\nIs this proposed answer correct? Answer Yes or No."
    assert words(format, {"b": 1, "a": "\u00e9"}, Choice("Who?", {"x": None, "y": {"z": [1], "b": None}})) == [
        f'Context:\n{{"a": "\u00e9", "b": 1}}\n\nQuestion: Who?\nProposed answer: x{end}',
        f'Context:\n{{"a": "\u00e9", "b": 1}}\n\nQuestion: Who?\nProposed answer: y: {{"b": null, "z": [1]}}{end}',
    ]
    assert words(format, "s", Score(None, ["low"])) == [
        f"Context:\ns\n\nQuestion: \nProposed answer: low{end}",
    ]


@pytest.mark.parametrize(
    ("criteria", "lines"),
    [
        (None, ""),
        ({}, ""),
        ({"true": None, "false": None}, ""),
        ({"true": "a"}, "Yes means: a\n"),
        ({"false": {"y": 1, "x": 2}, "true": None}, 'No means: {"x": 2, "y": 1}\n'),
        ({"false": "b", "true": ""}, "Yes means: \nNo means: b\n"),
    ],
)
def test_open_jevs_yes_or_no_questions(tok: PromptTokenizer, criteria: Any, lines: str) -> None:
    (text,) = words(OpenJevFormat(tok), "", Noul(None, criteria))
    assert text == f"Context:\n\n\nQuestion: \n{lines}Is the answer to this question yes? Answer Yes or No."


PIECES = st.sampled_from(
    [
        "",
        " ",
        "a b",
        "<|im_",
        "end|>",
        "<|im_end|>",
        "</think>",
        "<think>",
        "\n\n",
        "caf\u00e9",
        "e\u0301",
        "\u4f60",
        "1",
    ]
)
TEXTS = st.lists(PIECES, max_size=3).map("".join)
QUESTIONS = st.one_of(
    st.fixed_dictionaries({"type": st.just("noul"), "instructions": st.none() | TEXTS}),
    st.fixed_dictionaries({"type": st.just("score"), "criteria": st.lists(TEXTS, min_size=1, max_size=3)}),
    st.fixed_dictionaries(
        {
            "type": st.just("choice"),
            "instructions": TEXTS,
            "criteria": st.dictionaries(TEXTS, st.none() | TEXTS, min_size=1, max_size=3),
        }
    ),
)


@settings(max_examples=200, deadline=None)
@given(state=TEXTS | st.lists(TEXTS, max_size=2), questions=st.lists(QUESTIONS, min_size=1, max_size=3))
def test_open_jevs_tokens_are_those_of_the_rendered_string(
    tok: PromptTokenizer, hf: Any, state: Any, questions: list[Any]
) -> None:
    body = {"model": "m", "state": state, "questions": {str(i): question for i, question in enumerate(questions)}}
    encoded = OpenJevFormat(tok).encode(parse_body(body))
    expected = [prompt_of(hf, message) for question in questions for message in messages(state, question)]
    assert encoded.prompts == expected
    assert all(encoded.tails)
    assert encoded.num_prompts == [len(messages(state, question)) for question in questions]


def test_a_control_token_across_a_seam(tok: PromptTokenizer, hf: Any) -> None:
    for shared, tails in (("x <|im_", ["end|> y", "start|>"]), ("<th", ["ink>"]), ("", ["<|im_end|>"])):
        ids, rest = tok.encode_chat(shared, tails, escape=False)
        assert [[*ids, *tail] for tail in rest] == [prompt_of(hf, shared + tail) for tail in tails]
        kept, rest = tok.encode_chat(shared, tails)
        assert all([*kept, *tail].count(tok.frame.tail_ids[0]) == 1 for tail in rest)


def test_escaping_can_be_asked_for_and_is_what_other_formats_do(tok: PromptTokenizer) -> None:
    assert not OpenJevFormat(tok).escapes
    assert OpenJevFormat(tok, escape=True).escapes
    assert ChatFormat(tok, escape=False).escapes
    request = DecisionRequest("<|im_end|>", {"a": Noul("?")})
    assert OpenJevFormat(tok, escape=True).encode(request) != OpenJevFormat(tok).encode(request)


def test_text_that_cannot_be_tokenized_is_refused_either_way(tok: PromptTokenizer) -> None:
    for state in ("\udc00", "\udc00 <|im_end|>"):
        with pytest.raises(RequestError, match="lone surrogate"):
            OpenJevFormat(tok).encode(DecisionRequest(state, {"a": Noul("?")}))


def test_the_head_keeps_its_longest_prompt(tmp_path: Any) -> None:
    save_head(OpenJevHead(8, max_prompt_tokens=77), tmp_path)
    head = load_head(tmp_path, 8)
    assert type(head) is OpenJevHead
    assert head.max_prompt_tokens == 77
    assert OpenJevHead(8).settings() == {}
    for wrong in (0, "4", True):
        with pytest.raises(ValueError, match="max_prompt_tokens should be"):
            OpenJevHead.from_settings({"max_prompt_tokens": wrong}, 8)


# Formats by name


def test_formats_are_found_by_the_name_that_a_head_gives(tok: PromptTokenizer, registry: None) -> None:
    assert isinstance(make_format("open-jev", tok), OpenJevFormat)
    for style in ("options", "question", "candidates"):
        found = make_format(style, tok, max_prompt_tokens=9)
        assert isinstance(found, ChatFormat)
        assert (found.style, found.max_prompt_tokens) == (style, 9)
    assert {make_format(x, tok).single_prompt for x in ("candidates", "open-jev")} == {False}
    with pytest.raises(ValueError, match="no format 'x'; there are candidates, open-jev, options, question"):
        make_format("x", tok)
    assert register_format("open-jev")(OpenJevFormat) is OpenJevFormat
    with pytest.raises(ValueError, match="already registered by flide.runtime.openjev.OpenJevFormat"):
        register_format("open-jev")(ChatFormat)
    with pytest.raises(ValueError, match="at least 1"):
        make_format("open-jev", tok, max_prompt_tokens=0)


def test_control_ids(tok: PromptTokenizer) -> None:
    assert tok.decode(tok.control_ids(["<think>", "<|im_end|>"])) == "<think><|im_end|>"
    with pytest.raises(CheckpointError, match="no control token 'a'"):
        tok.control_ids(["a"])


# Formats of users


class FalseFirst(ChatFormat):
    """A yes-or-no question's head gives No first, few options are allowed, and more of them are less sure."""

    noul_order = ("false", "true")
    max_options = 3

    def temperature(self, question: Question, temperatures: Mapping[str, float]) -> float:
        return temperatures.get(question.type, 1.0) * len(option_texts(question))


def test_the_order_the_limit_and_the_calibration_are_the_formats(tok: PromptTokenizer) -> None:
    request = parse_request(DecisionRequest("s", {"a": Noul("?"), "b": Choice("?", ["x", "y", "z"])}))
    head = OptionHead(torch.zeros(5, 8))
    format = FalseFirst(tok)
    reads = format.reads(request, head, format.encode(request))
    assert isinstance(reads, OptionReads)
    assert reads.columns_QO.tolist() == [[1, 0, 0], [0, 1, 2]]
    assert [format.temperature(x, {"noul": 1.5}) for x in request.questions.values()] == [3.0, 3.0]
    with pytest.raises(RequestError, match=r"questions\.b: 4 options; at most 3") as refused:
        format.encode(DecisionRequest("s", {"b": Choice("?", ["x", "y", "z", "w"])}))
    assert refused.value.errors[0]["type"] == "too_many_options"


@dataclass(frozen=True)
class TurnedReads:
    """Log-probabilities averaged over two prompts of each question, the second with its options turned round."""

    is_option_QO: NDArray[np.bool_]

    @property
    def num_rows(self) -> int:
        return 2 * len(self.is_option_QO)

    def gather(self, logits_NC: NDArray[np.float32]) -> NDArray[np.float64]:
        logits_QO = np.full(self.is_option_QO.shape, -np.inf)
        for q, is_option_O in enumerate(self.is_option_QO):
            one, other = logits_NC[2 * q : 2 * q + 2, : is_option_O.sum()].astype(np.float64)
            both = np.stack([one, other[::-1]])
            both -= np.log(np.exp(both - both.max(1, keepdims=True)).sum(1, keepdims=True)) + both.max(1, keepdims=True)
            logits_QO[q, is_option_O] = both.mean(0)
        return logits_QO

    def alone(self, question: int) -> Self:
        raise NotImplementedError


class TurnedFormat(ChatFormat):
    """Asks every choice twice."""

    def __init__(self, tokenizer: PromptTokenizer, **options: Any) -> None:
        super().__init__(tokenizer, **options)
        self.single_prompt = False

    def question_texts(self, question: Question) -> tuple[list[str], int]:
        assert isinstance(question, Choice)
        turned = Choice(question.instructions, dict(reversed(question.criteria.items())))
        ((one,), count), ((other,), _) = (super(TurnedFormat, self).question_texts(x) for x in (question, turned))
        return [one, other], count

    def reads(self, request: DecisionRequest, head: Head, encoded: EncodedRequest) -> TurnedReads:
        counts_Q1 = np.array(encoded.num_options)[:, None]
        return TurnedReads(np.arange(counts_Q1.max()) < counts_Q1)


class TurnedHead(OptionHead):
    kind = "turned"
    prompt_style = "turned"


def probabilities(engine: Engine, questions: Mapping[str, Question]) -> dict[str, Sequence[float]]:
    (decision,) = engine.decide([DecisionRequest("The cup was broken.", questions)])
    return {name: list(answer.probabilities.values()) for name, answer in decision.answers.items()}


def test_a_format_may_ask_several_times_and_average(registry: None) -> None:
    register_format("turned")(TurnedFormat)
    directory = tiny_model_directory()
    tokenizer = PromptTokenizer.from_pretrained(directory)
    model = AutoModelForDecision.from_pretrained(directory)
    questions = {"a": Choice("Who?", ["x", "y", "z"]), "b": Choice("What?", ["one", "two"])}
    turned = {name: Choice(q.instructions, list(reversed(q.criteria))) for name, q in questions.items()}
    with Engine(model, tokenizer, EngineConfig(device="cpu")) as plain:
        one, other = probabilities(plain, questions), probabilities(plain, turned)
    model.head = TurnedHead.initial(model, tokenizer, [])
    with Engine(model, tokenizer, EngineConfig(device="cpu")) as engine:
        found = probabilities(engine, questions)
        assert engine.prepare(DecisionRequest("s", questions)).layout.depth == 3  # its two prompts share the question
    for name in questions:
        means = np.exp((np.log(one[name]) + np.log(other[name][::-1])) / 2)
        assert found[name] == pytest.approx((means / means.sum()).tolist(), abs=PROBABILITY_FP32)
    with pytest.raises(ValueError, match="fork=False is not for a turned format"):
        Engine(model, tokenizer, EngineConfig(device="cpu", fork=False))


def test_a_format_with_sums_of_its_own_is_not_trained(registry: None, tok: PromptTokenizer) -> None:
    request = parse_request(DecisionRequest("s", {"a": Choice("?", ["x", "y"])}))
    row = LabelledRow(request, {"a": (0.0, 1.0)}, 1)
    with pytest.raises(ValueError, match="TurnedFormat cannot be trained"):
        prepare_examples([row], TurnedFormat(tok), ScalarHead(8), batch_tokens=999)


def test_reads_of_one_of_several_questions_with_rows_of_their_own() -> None:
    logits_NC = np.arange(5, dtype=np.float32)[:, None]
    reads = OptionReads.of([[0, 0], [0, 0, 0]], row_per_option=True)
    alone = reads.alone(1)
    assert alone.num_rows == 3
    assert alone.gather(logits_NC[2:]).tolist() == [[2, 3, 4]]
