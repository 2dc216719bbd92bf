"""Ids of texts that grow, shrink and change are those of encoding each of them whole."""

from __future__ import annotations

import pickle
import random
import threading
from array import array
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from flide.errors import RequestError
from flide.runtime import prefix_ids
from flide.runtime.prefix_ids import PrefixIds
from flide.runtime.prompt import ChatFormat
from flide.runtime.request import DecisionRequest, Noul
from flide.runtime.text_cuts import AFTER_WORDS
from flide.runtime.tokenizer import PromptTokenizer
from tests.runtime.test_text_cuts import family_pair
from tests.tiny_tokenizer import build_tokenizer, wrap
from tests.tokenizer_families import FAMILIES, FRAGMENTS, QUICK, TEXTS, whole

BLOCK = 16
# What becomes of a text: more of it, less of it, or something else in its middle, as a share of its length.
CHANGES = st.lists(
    st.one_of(
        st.tuples(st.just("grow"), st.just(1.0), TEXTS),
        st.tuples(st.just("cut"), st.floats(0, 1), st.just("")),
        st.tuples(st.just("edit"), st.floats(0, 1), TEXTS),
    ),
    min_size=2,
    max_size=8,
)


@pytest.fixture
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_ids, "BLOCK", BLOCK)


class Ledger:
    """Remembers texts whose every character is a token of its own, and counts those that are encoded."""

    def __init__(self, *, again: bool = False) -> None:
        self.known = PrefixIds(AFTER_WORDS, again=again)
        self.encoded = 0

    def __call__(self, text: str, salt: str | None = None) -> array[int]:
        beginning = self.known.find(text, salt)
        self.encoded += sum(map(len, beginning.pieces))
        return self.known.keep(beginning, [array("i", map(ord, piece)) for piece in beginning.pieces])

    def new(self, text: str, salt: str | None = None) -> int:
        """How much of a text is encoded, now that it comes."""
        before = self.encoded
        assert self(text, salt) == array("i", map(ord, text))
        return self.encoded - before

    @property
    def blocks(self) -> int:
        return len(self.known._blocks)


@pytest.mark.usefixtures("short_blocks")
@pytest.mark.parametrize("family", FAMILIES)
@QUICK
@given(start=TEXTS, changes=CHANGES, tail=TEXTS)
def test_ids_are_those_of_the_whole_text(
    family: str, start: str, changes: list[tuple[str, float, str]], tail: str
) -> None:
    tokenizer, reference = family_pair(family)
    text = start
    for kind, place, more in changes:
        at = round(place * len(text))
        text = {"grow": text + more, "cut": text[:at], "edit": text[:at] + more + text[at + len(more) :]}[kind]
        shared_ids, (tail_ids,) = tokenizer.encode_prompts(text, [tail])
        assert [*shared_ids, *tail_ids] == whole(reference, text + tail)
        assert tokenizer.encode_prompts(text, ["x"])[0] == shared_ids, "what is known decides nothing"


@pytest.mark.usefixtures("short_blocks")
def test_a_control_token_is_refused_each_time_and_not_remembered() -> None:
    bare = build_tokenizer()
    bare.add_tokens([AddedToken("Question", normalized=False)])
    tokenizer = PromptTokenizer(wrap(bare))
    fine = "so the box came and then it was late, "
    for _ in range(2):
        tokenizer.encode_prompts(fine, ["x"])
        with pytest.raises(RequestError, match="control token"):
            tokenizer.encode_prompts(fine + "a\nQuestion, and order and order and", ["x"])


def test_of_a_text_that_has_grown_only_what_is_new_is_encoded() -> None:
    ledger, rng = Ledger(), random.Random(0)
    text = "".join(rng.choices(FRAGMENTS, k=2000)) + "word "
    assert ledger.new(text) == len(text)
    for _ in range(20):
        more = "the order is late, and so on. " * rng.randrange(10, 80)
        text += more
        assert ledger.new(text) <= len(more) + 2 * prefix_ids.BLOCK
    assert ledger.new(text[:-3000]) <= 2 * prefix_ids.BLOCK
    middle = len(text) // 2
    edited = text[:middle] + "!" + text[middle:]
    assert ledger.new(edited) <= len(text) - middle + 2 * prefix_ids.BLOCK


def test_a_text_that_comes_once_is_not_kept_where_those_that_come_again_are() -> None:
    ledger = Ledger(again=True)
    text = "the order is late, and so on. " * 200
    for more in ("", "it grows. "):
        assert not ledger.blocks
        assert ledger.new(text + more) == len(text + more), "its first block is all that is known"
    assert ledger.new(text + "it grows. " * 2) <= 2 * prefix_ids.BLOCK


@pytest.mark.parametrize("again", [False, True])
def test_what_another_salt_knows_is_not_known(again: bool) -> None:
    ledger = Ledger(again=again)
    text = "the order is late, and so on. " * 200
    for salt in ("a", None, "b"):
        for _ in range(1 + again):
            assert ledger.new(text, salt) == len(text)
        assert ledger.new(text, salt) <= 2 * prefix_ids.BLOCK


def test_requests_bring_their_salt() -> None:
    format = ChatFormat(PromptTokenizer(wrap(build_tokenizer())))
    assert format.tokenizer._beginnings is not None
    request = DecisionRequest("the order is late, and so on. " * 200, {"q": Noul("Is it?")})
    kept = format.tokenizer._beginnings._blocks
    found = [format.encode(replace(request, cache_salt=salt)) for salt in ("a", None, "a", None)]
    assert found[0] == found[1] == found[2] == found[3]
    assert [key[0] for key in kept if not isinstance(key[0], int)] == ["a", None]


def test_texts_that_begin_alike_share_what_is_kept() -> None:
    ledger = Ledger()
    head = "you are an agent, and this is how you work. " * 200
    for number in range(10):
        ledger(f"{head} task {number}: " + f"do {number}, then rest. " * 100)
    assert ledger.blocks < (len(head) + 10 * 2500) / prefix_ids.BLOCK
    assert ledger.new(f"{head} another task") <= 2 * prefix_ids.BLOCK


@pytest.mark.usefixtures("short_blocks")
def test_what_is_kept_is_bounded_and_what_was_used_last_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_ids, "MOST_BLOCKS", 40)
    ledger = Ledger()
    often = "this one comes again and again, " * 4
    for number in range(200):
        ledger(f"{number} is a text that comes once. " * 5)
        assert ledger.blocks <= 40
        assert number == 0 or ledger.new(often) <= 2 * BLOCK
        if number == 0:
            ledger(often)
    ledger("a giant, " * 1000)
    assert ledger.blocks <= 40
    assert ledger.new(often) <= 2 * BLOCK, "one text leaves room for others"


@pytest.mark.usefixtures("short_blocks")
def test_of_one_text_its_end_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_ids, "MOST_BLOCKS", 40)
    ledger = Ledger()
    text = "every word of it, " * 9
    ledger(text)
    for number in range(12):
        ledger(f"{number} and so on, and so on, and on " * 2)
    assert BLOCK < ledger.new(text) < len(text), "a beginning is of use, an end without it is not"


@pytest.mark.usefixtures("short_blocks")
def test_a_text_without_a_boundary_costs_its_length() -> None:
    text = "\u0e2a" * 200_000  # a search back to the last boundary would not end
    ledger = Ledger()
    assert ledger.new(text) == len(text)
    assert ledger.known.find(text).pieces == [text]


@pytest.mark.usefixtures("short_blocks")
def test_threads_share_it() -> None:
    tokenizer, reference = family_pair("qwen3.5")
    wrong: list[str] = []

    def work(seed: int) -> None:
        rng = random.Random(seed % 3)
        text = ""
        for _ in range(60):
            text += rng.choice(FRAGMENTS)
            shared, (tail,) = tokenizer.encode_prompts(text, ["."])
            if [*shared, *tail] != whole(reference, text + "."):
                wrong.append(text)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_it_stays_in_its_process() -> None:
    tokenizer = PromptTokenizer(wrap(build_tokenizer()))
    before = len(pickle.dumps(tokenizer))
    for _ in range(2):
        tokenizer.encode_chat("the order is late, " * 1000, ["x"])
    assert tokenizer._beginnings is not None
    assert tokenizer._beginnings._blocks
    data = pickle.dumps(tokenizer)
    assert abs(len(data) - before) < 1000
    assert not pickle.loads(data)._beginnings._blocks


def test_texts_without_boundaries_take_no_more_memory_than_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The block in which a boundary comes at last has the ids of all that is before it."""
    monkeypatch.setattr(prefix_ids, "MOST_IDS", 20_000)
    ledger = Ledger()
    run = "1" * 4000
    for n in range(50):
        text = f"{run}x{n} " + "word " * 200
        for asked in (text, text + "more " * 100, "word " * 600):
            assert ledger(asked) == array("i", map(ord, asked))
            known = ledger.known
            assert known._num_ids == sum(len(block.ids) for block in known._blocks.values()) <= 20_000
    assert ledger.new(text) < 600
    huge = "1" * 6000 + " " + "word " * 200
    assert ledger.new(huge) == ledger.new(huge) == len(huge)  # too large a share
