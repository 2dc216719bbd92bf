"""Where checkpoints are worth having: before all that a longer state would change."""

from __future__ import annotations

import functools
import random
import time
from typing import Any

import pytest

from flide import DecisionRequest, Noul, RequestError
from flide.runtime.checkpoints import positions
from flide.runtime.checkpoints.positions import NEAR, Reuse, _places
from flide.runtime.format import DecisionFormat
from flide.runtime.openjev import OpenJevFormat
from flide.runtime.prefix_ids import PrefixIds
from flide.runtime.prompt import ChatFormat
from flide.runtime.tokenizer import PromptTokenizer
from tests.tiny_tokenizer import wrap
from tests.tokenizer_families import FAMILIES, FRAGMENTS, OTHERS

PROSE = "the order is late, a b word (12) don't. "
MORE = ["", ".", "s", " and more", "\n\nQuestion: ", "12", '"', "\u0301", "  ", "\u4f60"]
FORMATS = {"chat": ChatFormat, "open-jev": OpenJevFormat}


@functools.cache
def tokenizer(family: str) -> PromptTokenizer:
    return PromptTokenizer(wrap({**FAMILIES, **OTHERS}[family]()))


def reuse(format: DecisionFormat, state: Any, **options: Any) -> tuple[Reuse, list[int]]:
    request = DecisionRequest(state, {"q": Noul("Is it done?"), "r": Noul("Is it stuck?")}, **options)
    encoded = format.encode(request)
    found = Reuse.of(request, encoded, format)
    assert len(found.saves) <= 4
    assert list(found.saves) == sorted(set(found.saves))
    return found, encoded.shared


@pytest.mark.parametrize("family", ["qwen3.5", "gemma-like"])
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("more", MORE)
def test_a_text_that_grows_keeps_the_tokens_before_its_place(family: str, kind: str, more: str) -> None:
    format = FORMATS[kind](tokenizer(family))
    for repeats in (10, 11):
        state = PROSE * repeats + more
        found, shared = reuse(format, state)
        place = found.saves[0]
        assert len(shared) - place < 60
        for longer in MORE:
            assert reuse(format, state + longer)[1][:place] == shared[:place]


@pytest.mark.parametrize("family", ["qwen3.5", "gemma-like"])
@pytest.mark.parametrize("wrapped", [False, True])
def test_messages_keep_the_tokens_before_the_last_one_and_before_their_end(family: str, wrapped: bool) -> None:
    format = ChatFormat(tokenizer(family))

    def ask(count: int, last: str, **options: Any) -> tuple[Reuse, list[int]]:
        messages = [{"role": "user", "content": f"{n} {PROSE * 4}"} for n in range(count)] + [{"content": last}]
        return reuse(format, {"a": 1, "messages": messages} if wrapped else messages, **options)

    found, shared = ask(3, PROSE * 3)
    before, end = found.saves
    assert ask(3, "another one")[1][:before] == shared[:before]
    longer = [{"role": "user", "content": f"{n} {PROSE * 4}"} for n in range(3)] + [{"content": PROSE * 3}, {"x": "y"}]
    assert reuse(format, {"a": 1, "messages": longer} if wrapped else longer)[1][:end] == shared[:end]
    hinted = ask(3, PROSE * 3, checkpoint=1)[0].saves
    assert set(found.saves) < set(hinted)
    assert ask(1, "another one")[1][: hinted[0]] == shared[: hinted[0]]


@pytest.mark.parametrize("kind", FORMATS)
def test_messages_may_be_strings_and_objects_whose_keys_are_in_any_order(kind: str) -> None:
    format = FORMATS[kind](tokenizer("qwen3.5"))
    for messages in (
        [f'{n} "{PROSE * 4}"' for n in range(4)],
        [{"role": "user", "content": f"{n} {PROSE * 4}", "also": {"b": n, "a": [n]}} for n in range(4)],
    ):
        for state in (messages, {"a": 1, "messages": messages}):
            other = [*messages[:-1], "another one"]
            found, shared = reuse(format, state, checkpoint=2)
            hinted, before, end = found.saves
            assert 0 < hinted < before < end
            assert (
                reuse(format, other if state is messages else {"a": 1, "messages": other})[1][:before]
                == shared[:before]
            )
            fewer = messages[:3]
            assert (
                reuse(format, fewer if state is messages else {"a": 1, "messages": fewer})[1][:hinted]
                == shared[:hinted]
            )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", FORMATS)
def test_far_from_the_end_places_are_the_same_ones(monkeypatch: pytest.MonkeyPatch, family: str, kind: str) -> None:
    made = {"chat": functools.partial(ChatFormat, style="question"), "open-jev": OpenJevFormat}[kind]
    format, rng = made(tokenizer(family)), random.Random(family)
    for _ in range(20):
        messages = ["".join(rng.choice(FRAGMENTS) for _ in range(rng.randrange(200))) + PROSE for _ in range(3)]
        state = rng.choice([messages, {"messages": messages}, "".join(messages)])
        found = []
        for long in (1 << 30, 0):
            monkeypatch.setattr(positions, "LONG", long)
            found.append(reuse(format, state, checkpoint=1))
        (near, shared), (far, _) = found
        assert set(near.saves) <= set(far.saves) or kind == "open-jev", "there a boundary may be farther away"
        text = format.state_text(state)
        for place in far.saves:
            assert format.tokenizer.encode_chat(text + "s", [""], escape=format.escapes)[0][:place] == shared[:place]


@pytest.mark.parametrize("kind", FORMATS)
def test_places_in_hostile_messages_are_found_in_time_that_their_length_bounds(kind: str) -> None:
    format = FORMATS[kind](tokenizer("qwen3.5"))
    run = "a" * 500_000
    for messages in ([run * 3, 'a"' + run], [{"a": run * 3}, {"b": run, "a": 1}]):
        request = DecisionRequest(messages, {"q": Noul("Is it done?")})
        text = format.state_text(messages)
        began = time.perf_counter()
        assert _places(request, text, format)
        assert time.perf_counter() - began < 20  # to search for the last message takes minutes


def test_what_is_read_to_find_places_is_kept_by_salt_too(monkeypatch: pytest.MonkeyPatch) -> None:
    format = ChatFormat(tokenizer("qwen3.5"))
    salts, find = set(), PrefixIds.find

    def spy(self: PrefixIds, text: str, salt: str | None = None) -> Any:
        salts.add(salt)
        return find(self, text, salt)

    monkeypatch.setattr(PrefixIds, "find", spy)
    for state in (PROSE * 20, [PROSE * 20, PROSE * 20]):
        reuse(format, state, cache_salt="x", checkpoint=1)
    assert salts == {"x"}


@pytest.mark.parametrize("family", OTHERS)
def test_tokenizers_without_boundaries_have_places_too(family: str) -> None:
    found, shared = reuse(ChatFormat(tokenizer(family), style="question"), PROSE * 20)
    assert found.saves
    assert all(NEAR < place <= len(shared) for place in found.saves)


def test_nothing_is_kept_of_what_is_short_or_not_wanted() -> None:
    format = ChatFormat(tokenizer("qwen3.5"))
    assert reuse(format, "")[0].saves == ()
    found, shared = reuse(format, PROSE * 9, checkpoint=False, cache_salt="x")
    assert found == Reuse(len(shared), (), "x")


def test_a_format_that_takes_other_states_keeps_their_end() -> None:
    class Keys(ChatFormat):
        def state_text(self, state: Any) -> str:
            return ", ".join(state.keys()) + "\n"

    found, shared = reuse(Keys(tokenizer("qwen3.5")), {PROSE * 9: 1})
    assert found.saves == (len(shared),)


def test_no_request_is_refused_for_its_places(monkeypatch: pytest.MonkeyPatch) -> None:
    format = ChatFormat(tokenizer("qwen3.5"))
    request = DecisionRequest(PROSE * 60, {"q": Noul("Is it done?")})
    encoded = format.encode(request)

    def refuse(*_: Any, **__: Any) -> Any:
        raise RequestError("a control token")

    monkeypatch.setattr(format.tokenizer, "encode_prompts", refuse)
    assert Reuse.of(request, encoded, format).saves == (len(encoded.shared),)
    monkeypatch.undo()
