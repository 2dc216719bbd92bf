"""A body whose questions came before means what it means to who never saw them."""

from __future__ import annotations

import contextlib
import gc
import json
import random
import threading
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flide.errors import RequestError
from flide.heads import Head, OpenJevHead, OptionHead
from flide.runtime import known_bodies
from flide.runtime.format import DecisionFormat
from flide.runtime.known_bodies import KnownBodies
from flide.runtime.openjev import OpenJevFormat
from flide.runtime.prompt import ChatFormat
from flide.runtime.questionnaire import Questionnaire
from flide.runtime.request import DecisionRequest
from flide.runtime.rounds import PreparedRequest
from flide.runtime.strict_json import parse_json
from flide.runtime.tokenizer import PromptTokenizer
from flide.runtime.wire import parse_body
from tests.runtime.test_wire_properties import bodies, structured, texts

import torch  # isort: skip

QUESTIONS = {
    "late": {"type": "noul", "instructions": "Is it late?"},
    "who": {"type": "choice", "instructions": "Who?", "criteria": {"a": None, "b": "the other", "c": {"x": 1}}},
    "how": {"type": "score", "criteria": ["low", "high"]},
}


def body(state: Any, **fields: Any) -> bytes:
    return json.dumps({"model": "jev-latest", "state": state, "questions": QUESTIONS, **fields}).encode()


def plainly(data: bytes) -> DecisionRequest | list[dict[str, Any]]:
    """The request in a body, or what is wrong with it."""
    try:
        return parse_body(parse_json(data))
    except RequestError as error:
        return error.errors


def known_to(known: KnownBodies, data: bytes, owner: str = "") -> DecisionRequest | list[dict[str, Any]]:
    try:
        return known.parse(data, owner)
    except RequestError as error:
        return error.errors


def knows(known: KnownBodies, data: bytes, owner: str = "") -> bool:
    found = known_to(known, data, owner)
    return isinstance(found, DecisionRequest) and isinstance(found.questions, Questionnaire)


def test_questions_are_kept_when_they_come_again() -> None:
    known = KnownBodies()
    assert not knows(known, body("first"))
    assert not knows(known, body("second"))
    for state in ("third", {"a": ["structured"]}, "caf\u00e9", ""):
        assert knows(known, body(state))
        assert known_to(known, body(state)) == plainly(body(state))
    one, two = known.parse(body("x"), ""), known.parse(body("y"), "")
    assert one.questions is two.questions


def test_what_is_behind_the_questions_belongs_to_them() -> None:
    known = KnownBodies()
    for salt in ("a", "a", "b", "b", "a", "b"):
        request = known.parse(body("s", x_flide={"cache_salt": salt}), "")
        assert request.cache_salt == salt
    assert knows(known, body("s", x_flide={"cache_salt": "a"}))
    assert not knows(known, body("s", x_flide={"cache_salt": "c"}))
    for _ in range(4):
        assert known_to(known, body("s", assets=["x"])) == plainly(body("s", assets=["x"]))


def test_where_a_salt_stands_in_front_nothing_is_known() -> None:
    known = KnownBodies()
    for name in ("x_flide", "\\u0078_flide"):
        begin = '{"model": "jev-latest", "%s": {"cache_salt": "mine"}, "state": "s", "questions": ' % name  # noqa: UP031
        data = begin.encode() + json.dumps(QUESTIONS).encode() + b"}"
        for _ in range(2):
            known.parse(body("s"), "")
        for _ in range(4):
            assert not knows(known, data)
            assert known.parse(data, "").cache_salt == "mine"


def test_others_know_nothing() -> None:
    known = KnownBodies()
    for _ in range(3):
        known.parse(body("s"), "one")
    assert knows(known, body("s"), "one")
    assert not knows(known, body("s"), "two")


BEGINS = [
    b"{",
    b'{ "model": "m"',
    b'{"state": "s"',
    b'{"model": "m", "state": "s",',
    b'{"model": "m", "state": "s"}',
    b'{"model": "m", "state": {"a": 1',
    b'{"model": "m", "state": ["a"',
    b'[{"model": "m", "state": "s"',
    b'{"model": "m", "state": "s", "state": "t"',
    b'{"model": "m", "state": "s", "questions": {}',
    b'{"model": "m", "state": "s", "\\u0071uestions": {}',
    b'{"model": "m", "state": "s", "assets": ["x"]',
    b'{"model": "m", "state": "\\ud800"',
    b'{"model": "m", "state": "\xff"',
    b'\xef\xbb\xbf{"model": "m", "state": "s"',
    b'{"model": "m", "state": NaN',
    b'{"model": "m", "state": 1e999',
    b'{"model": "m", "state": ' + b"1" * 5000,
    b'{"model": "m", "state": "s"  ',
    b'{"model": "m", "state": "\\"questions\\" \\\\", "more": {"questions": 1}',
    b'{"model": "m", "state": {"questions": {"late": 1}}',
    b'{"model": "m", "": 0, "state": "s"',
    b'{"model": "m", "state": ' + b"[" * 127 + b"]" * 127,
    b'{"model": "m", "state": ' + b"[" * 128 + b"]" * 128,
    b'{"model": 3, "state": "s"',
    b'{"model": "m", "state": null',
    b'{"model": "m", "state": "s", "x": "//"',
    b'{"model": "m", "state": "s" "t"',
    b'{"model": "m", "state": "s", "x_flide": {"checkpoint": false}',
]
QUESTIONS_JSON = json.dumps(QUESTIONS).encode()
ENDS = [
    b', "questions": ' + QUESTIONS_JSON + b"}",
    b',"questions":' + QUESTIONS_JSON + b', "assets": []}\n ',
    b' , \n "questions" : ' + QUESTIONS_JSON + b', "x_flide": {"cache_salt": "z"}}',
    b', "questions": ' + QUESTIONS_JSON + b', "": 1}',
    b', "questions": ' + QUESTIONS_JSON + b', "state": "t"}',
    b', "questions": ' + QUESTIONS_JSON + b', "model": "n"}',
    b', "questions": ' + QUESTIONS_JSON + b"}}",
    b', "questions": ' + QUESTIONS_JSON + b"} x",
    b', "questions": ' + QUESTIONS_JSON,
    b', "questions": ' + QUESTIONS_JSON + b', "questions": {}}',
    b', "questions" ' + QUESTIONS_JSON + b"}",
    b', "questions": {}}',
    b', "questions": {"a": {"type": "box"}}}',
]


def test_no_begin_and_no_end_mean_anything_else_together() -> None:
    """Every end is known already, where it can be."""
    known = KnownBodies()
    for end in ENDS:
        for begin in (b'{"model": "m", "state": "s"', b'{"model": "m"', b'{"state": "s"'):
            for _ in range(2):
                known_to(known, begin + end)
    assert len(known._known) == 5
    for begin in BEGINS:
        for end in ENDS:
            assert known_to(known, begin + end) == plainly(begin + end), (begin, end)


@settings(max_examples=300, deadline=None)
@given(body=bodies, state=structured, cut=st.integers(0, 400), insert=texts, data=st.data())
def test_whatever_comes_behind_what_is_known(
    body: dict[str, Any], state: Any, cut: int, insert: str, data: st.DataObject
) -> None:
    known = KnownBodies()
    ascii_only = data.draw(st.booleans())
    sent = [json.dumps({**body, "state": x}, ensure_ascii=ascii_only).encode() for x in (body["state"], "s", state)]
    for one in sent:
        assert known_to(known, one) == plainly(one)
    broken = sent[2][:cut] + insert.encode() + sent[2][cut + data.draw(st.integers(0, 3)) :]
    assert known_to(known, broken) == plainly(broken)


def test_what_is_kept_is_bounded_and_what_was_used_last_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_bodies, "MOST_BYTES", 50_000)
    monkeypatch.setattr(known_bodies, "MOST_SEEN", 32)
    known = KnownBodies()
    for _ in range(2):
        known.parse(body("often"), "")
    for number in range(100):
        other = {"q": {"type": "noul", "instructions": f"is it {number}?"}}
        for _ in range(2):
            known.parse(body("s", questions=other), "")
        assert knows(known, body("often"))
        assert known._size == sum(end.size for end in known._known.values()) <= 50_000
        assert len(known._seen) <= 32
    large = {"q": {"type": "noul", "instructions": "x" * known_bodies.LARGEST}}
    for _ in range(3):
        assert not knows(known, body("s", questions=large))


def formats(tok: PromptTokenizer) -> list[DecisionFormat]:
    styles: list[Any] = ["options", "question", "candidates"]
    return [*(ChatFormat(tok, style=style) for style in styles), OpenJevFormat(tok), OpenJevFormat(tok, escape=True)]


def head_of(format: DecisionFormat) -> Head:
    return OpenJevHead(4) if format.row_per_option else OptionHead(torch.zeros(8, 4))


STATES: list[Any] = [
    "The order is late.",
    "",
    "  ",
    "ends with a blank ",
    "Question: ",
    {"a": [1, 2]},
    "word " * 3000,
    "<|im_start|>",
    "caf\u00e9\u3002",
    "\n\n",
]


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("salt", [None, "mine"])
def test_known_questions_are_prepared_as_any(tok: PromptTokenizer, depth: int, salt: str | None) -> None:
    for format in formats(tok):
        known, head = KnownBodies(), head_of(format)
        for state in [*STATES, *STATES]:
            data = body(state, **({} if salt is None else {"x_flide": {"cache_salt": salt}}))
            request = known.parse(data, "")
            found = PreparedRequest.encode(request, format, head, depth=depth)
            expected = PreparedRequest.encode(parse_body(parse_json(data)), format, head, depth=depth)
            assert found.tree == expected.tree
            assert found.num_options == expected.num_options
            assert (found.needed, found.shared) == (expected.needed, expected.shared)
            for name in ("rows", "nodes", "reads"):
                mine, theirs = getattr(found.layout, name), getattr(expected.layout, name)
                assert mine.dtype == theirs.dtype
                np.testing.assert_array_equal(mine, theirs)
            for name in ("level_rows", "level_nodes", "num_shared_tokens"):
                assert getattr(found.layout, name) == getattr(expected.layout, name)
            for name in ("rows_QO", "columns_QO", "is_option_QO", "is_zero_QO"):
                np.testing.assert_array_equal(getattr(found.reads, name), getattr(expected.reads, name))
        assert isinstance(request.questions, Questionnaire)
        assert request.questions.asked is not None, "something was kept"
        assert request.questions.asked[0] is format


def test_another_format_and_head_make_their_own_of_the_same_questions(tok: PromptTokenizer) -> None:
    known = KnownBodies()
    for state in ("one", "two"):
        known.parse(body(state), "")
    request = known.parse(body("three"), "")
    for _ in range(2):
        for format in (formats(tok)[0], *formats(tok)):
            for head in (head_of(format), head_of(format)):
                found = PreparedRequest.encode(request, format, head)
                expected = PreparedRequest.encode(parse_body(parse_json(body("three"))), format, head)
                assert found.tree == expected.tree
                np.testing.assert_array_equal(found.reads.is_option_QO, expected.reads.is_option_QO)


def test_too_long_a_prompt_is_refused_each_time(tok: PromptTokenizer) -> None:
    known, format = KnownBodies(), ChatFormat(tok, max_prompt_tokens=80)
    for state in ("a", "b", "c", "word " * 100, "d", "word " * 100):
        request = known.parse(body(state), "")
        if len(str(state)) > 1:
            with pytest.raises(RequestError, match="at most 80 are allowed"):
                format.encode(request)
        else:
            assert format.encode(request) == format.encode(parse_body(parse_json(body(state))))


def test_threads_share_it(tok: PromptTokenizer) -> None:
    known, format, wrong = KnownBodies(), ChatFormat(tok), list[str]()

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(40):
            state, number = f"state {rng.random()}", rng.randrange(3)
            asked = {f"q{k}": {"type": "noul", "instructions": f"is it {number} or {k}?"} for k in range(number + 1)}
            data = body(state, questions=asked)
            if format.encode(known.parse(data, "")) != format.encode(parse_body(parse_json(data))):
                wrong.append(state)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


class StateLast(ChatFormat):
    """Its words end with the state, so that a state may have no safe boundary before the questions."""

    def state_text(self, state: Any) -> str:
        return f"State: {state}"


MANY = dict.fromkeys(map(str, range(255)))
HEAVY: dict[str, tuple[dict[str, Any], list[str]]] = {
    "tiny": ({f"q{i}": {"type": "noul"} for i in range(300)}, ["s"]),
    "options": (
        {f"q{i}": {"type": "choice", "criteria": MANY} for i in range(4)},
        ["s"],
    ),
    "repeated instructions": (
        {"q": {"type": "choice", "instructions": "so " * 600, "criteria": MANY}},
        ["s"],
    ),
    "wide characters": (
        {f"q{i}": {"type": "noul", "instructions": "x" * 2000 + "\U0001f600"} for i in range(9)},
        ["s"],
    ),
    "wide ids": ({f"{i} \U0001f600" * 20: {"type": "noul"} for i in range(200)}, ["s"]),
    "structured": (
        {"q": {"type": "score", "criteria": [{"a": [[], {}, 0]}] * 9, "instructions": [[{}]] * 900}},
        ["s"],
    ),
    "no boundary": ({f"q{i}": {"type": "noul"} for i in range(32)}, ["\u0e01" * (9000 + i) for i in range(4)]),
}


@pytest.mark.parametrize("kind", HEAVY)
def test_what_is_counted_is_what_it_takes(tok: PromptTokenizer, kind: str) -> None:
    questions, states = HEAVY[kind]
    for format in [*formats(tok), StateLast(tok), StateLast(tok, max_prompt_tokens=20)]:
        known, head = KnownBodies(), head_of(format)

        def ask(*states: str, known: KnownBodies = known, format: DecisionFormat = format, head: Head = head) -> None:
            for state in states:
                with contextlib.suppress(RequestError):
                    PreparedRequest.encode(known.parse(body(state, questions=questions), ""), format, head)

        ask("a", *states)  # the words are learnt
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            ask("b", "c", *states, *states)
            gc.collect()
            taken = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
        assert known._known
        assert taken <= 1.5 * known._size + 300_000, type(format)  # of which some is the tokenizer's


def test_what_is_too_large_is_made_for_every_request(tok: PromptTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_bodies, "MOST_BYTES", 80_000)
    known, format = KnownBodies(), ChatFormat(tok)
    asked = {f"q{i}": {"type": "noul", "instructions": f"Is it {i}?"} for i in range(10)}
    for state in "abcde":
        request = known.parse(body(state, questions=asked), "")
        assert format.encode(request) == format.encode(parse_body(parse_json(body(state, questions=asked))))
    assert isinstance(request.questions, Questionnaire)
    assert request.questions.asked is None
    assert known._size <= 10_000
