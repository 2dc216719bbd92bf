"""Looking words up gives what encoding the text gives."""

from __future__ import annotations

import itertools
import random
import sys
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flide.errors import RequestError
from flide.runtime import text_cuts, word_ids
from flide.runtime.tokenizer import PromptTokenizer
from flide.runtime.word_ids import LONGEST, LONGEST_TEXT, NEW_AT_LEAST, NEW_SHARE, TextIds, WordIds
from tests.runtime.test_text_cuts import family_pair
from tests.tiny_tokenizer import build_tokenizer, wrap
from tests.tokenizer_families import FAMILIES, QUICK, TEXTS, whole

SPOKEN = [
    "the",
    "order",
    "is",
    "late",
    "It",
    "don't",
    "we'll",
    "e-mail",
    "I",
    "x" * 40,
    "caf\u00e9",
    "\u4f60\u597d",
    "7",
    "a\u0301",
]
BETWEEN = [" ", "  ", ", ", ". ", "\n", " \n ", "'", "\t", "\u3002", " (", ") "]
SENTENCES = st.lists(st.sampled_from(SPOKEN) | st.sampled_from(BETWEEN) | st.just(" "), max_size=40).map("".join)


class Counting:
    """Every character is a token of its own; remembers what it encoded."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def __call__(self, texts: list[str]) -> list[list[int]]:
        self.seen += texts
        return [[ord(character) for character in text] for text in texts]


def characters_of(text: str) -> array[int]:
    """What ``Counting`` encodes a text to."""
    return array("i", map(ord, text))


@pytest.mark.parametrize("family", FAMILIES)
@QUICK
@given(texts=st.lists(SENTENCES | TEXTS, min_size=1, max_size=4))
def test_ids_are_those_of_the_whole_text_however_often_it_comes(family: str, texts: list[str]) -> None:
    tokenizer, reference = family_pair(family)
    expected = [whole(reference, text) for text in texts]
    for _ in range(3):
        assert tokenizer.encode_plain(texts) == expected


@QUICK
@given(text=SENTENCES | TEXTS)
def test_words_are_cut_where_it_is_safe(text: str) -> None:
    pieces = text_cuts.words(text)
    assert "".join(pieces) == text
    assert all(pieces)
    safe = {found.start() for found in text_cuts.AFTER_WORDS.next.finditer(text)}
    ends = [sum(map(len, pieces[: i + 1])) for i in range(len(pieces) - 1)]
    assert safe.issuperset(ends)


@pytest.mark.parametrize("family", FAMILIES)
@QUICK
@given(text=SENTENCES | TEXTS)
def test_blanks_cut_where_it_is_safe(family: str, text: str) -> None:
    _, reference = family_pair(family)
    for end in range(len(text)):
        if text[end] == " " and end and text_cuts.ends_a_word(text[:end]):
            assert whole(reference, text) == whole(reference, text[:end]) + whole(reference, text[end:])


@QUICK
@given(text=SENTENCES | TEXTS)
def test_every_blank_cuts_or_the_text_is_looked_at_more_carefully(text: str) -> None:
    every = bool(text) and all(
        text_cuts.ends_a_word(text[:end]) for end in range(1, len(text) + 1) if text[end : end + 1] in (" ", "")
    )
    assert text_cuts.is_cut_by_blanks(text) == every


def test_a_word_that_is_known_behind_a_blank_only_is_not_known_at_the_beginning() -> None:
    encode = Counting()
    known = WordIds(encode, lambda ids: True)
    known.ids(["the order"])
    assert encode.seen == ["the", " order"]
    texts = ["order the", "order\n the", "order  the"]
    assert known.ids(texts) == list(map(characters_of, texts))
    assert encode.seen[2:] == ["order", " the", "order\n the", "  the"]


def test_a_text_is_looked_up_once_its_words_are_known() -> None:
    encode = Counting()
    known = WordIds(encode, lambda ids: True)
    text = "so the order came and the box is broken"
    assert known.ids([text]) == [characters_of(text)]
    encode.seen.clear()
    again = "so the box came and the order is broken"
    assert known.ids([again]) == [characters_of(again)]
    assert not encode.seen


def test_pieces_of_a_text_are_looked_up_each_by_itself() -> None:
    encode = Counting()
    known = WordIds(encode, lambda ids: True)
    old = "so the order came and the box is broken"
    known.ids([old])
    unknown = " ".join("abcdefghij"[i] * (1 + i) for i in range(10)) * 20
    assert known.ids([old, "the order " + "z" * (LONGEST + 1), old]) == [
        characters_of(old),
        None,
        characters_of(old),
    ]
    assert known.ids([unknown]) == [characters_of(unknown)]


def test_new_words_are_few_of_what_a_text_costs() -> None:
    encode = Counting()
    known = WordIds(encode, lambda ids: True)
    rng = random.Random(0)
    text = " ".join("".join(rng.choices("abcdefghij", k=9)) for _ in range(2000))
    assert known.ids([text]) == [None]
    assert len(encode.seen) <= 2000 // NEW_SHARE + NEW_AT_LEAST
    for _ in range(NEW_SHARE + 1):
        found = known.ids([text])
    assert found == [characters_of(text)], "a text that comes again is learnt in the end"


def test_once_many_are_known_only_words_that_come_again_are_learnt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(word_ids, "BEGINNING", 50)
    monkeypatch.setattr(word_ids, "MOST_SEEN", 3000)
    encode = Counting()
    known = WordIds(encode, lambda ids: True)
    numbers = map(str, range(100_000, 200_000))
    while len(known._parts) + len(known._behind) < 50:
        known.ids([" ".join(itertools.islice(numbers, 100))])
    encode.seen.clear()
    for count in [3, 100, 1000] * 20:
        assert known.ids([" ".join(itertools.islice(numbers, count))]) == [None]
        assert len(known._seen) <= 3000
    assert not encode.seen
    again = " ".join(itertools.islice(numbers, 100))
    for _ in range(NEW_SHARE + 2):
        found = known.ids([again])
    assert found == [characters_of(again)]
    encode.seen.clear()
    assert known.ids([again + " and one"]) == [characters_of(again + " and one")], "what is little is learnt at once"
    assert encode.seen == [" and", " one"]


@pytest.mark.parametrize(("words", "characters"), [(50, 1 << 20), (1 << 15, 900)])
def test_what_is_kept_is_bounded(words: int, characters: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def kept() -> list[str]:
        return [*known._parts, *known._behind]

    monkeypatch.setattr(word_ids, "MOST_WORDS", words)
    monkeypatch.setattr(word_ids, "MOST_CHARACTERS", characters)
    known, largest = WordIds(Counting(), lambda ids: True), 0
    for number in range(500):
        letters = "".join(chr(97 + int(digit)) for digit in str(number))
        text = f"word{letters} of {letters}ing, {letters} end"
        # A text that learns one word too many is encoded itself.
        assert known.ids([text]) == [characters_of(text)] or len(kept()) < len(text.split())
        largest = max(largest, len(kept()))
        assert len(kept()) <= words
        assert sum(map(len, kept())) <= characters
    assert largest > 20


def test_what_is_too_long_is_left_to_others() -> None:
    encode = Counting()
    assert WordIds(encode, lambda ids: True).ids(["a " + "y" * (LONGEST + 1) + " end"]) == [None]
    assert max(map(len, encode.seen)) <= LONGEST


def test_what_may_not_be_kept_is_looked_at_each_time() -> None:
    known = WordIds(Counting(), lambda ids: len(ids) != 1)
    assert known.ids(["a b c"]) == [None]
    assert known.ids(["a b c"]) == [None]


def test_a_lone_surrogate_is_refused_among_known_words() -> None:
    tokenizer = PromptTokenizer(wrap(build_tokenizer()))
    tokenizer.encode_plain(["the order is late"])
    with pytest.raises(RequestError, match="lone surrogate"):
        tokenizer.encode_plain(["the order is late \ud800 the order"])
    assert tokenizer.encode_plain(["the order is late"])


def test_a_question_that_comes_again_is_not_encoded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = PromptTokenizer(wrap(build_tokenizer()))
    questions = ["Is the order late?", "Which is it?", "Is the order late?"]
    expected = tokenizer.encode_prompts("the order is late ", questions)
    encoded: list[str] = []
    pieces = tokenizer._encode_pieces

    def counting(texts: list[list[str]]) -> list[array[int]]:
        encoded.extend(piece for text in texts[1:] for piece in text)  # the first one is the state
        return pieces(texts)

    monkeypatch.setattr(tokenizer, "_encode_pieces", counting)
    assert tokenizer.encode_prompts("the order is late ", questions) == expected
    assert not encoded
    assert tokenizer.encode_prompts("the order is late ", questions, salt="another") == expected
    assert len(encoded) == 2, "what another one asked is not known"


@pytest.mark.parametrize(
    ("salt", "length"), [(None, 10), ("", 0), ("x" * 256, 2), ("\U0001f600" * 256, 2), (None, LONGEST_TEXT)]
)
def test_texts_that_are_kept_are_bounded(salt: str | None, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the memory that they take, to which salts belong, and ids."""
    most = 1 << 18
    monkeypatch.setattr(word_ids, "MOST_TEXT", most)
    texts, largest = TextIds(), 0
    for number in range(3000):
        text = f"{number:0{length}}"[:length] if salt is None else "x" * length
        own = None if salt is None else salt + str(number)
        texts.keep(text, own, characters_of(text))
        assert texts.get(text, own) == characters_of(text)
        assert texts.get(text, "another") is None
        largest = max(largest, len(texts._known))
        if number % 100 == 0:
            held = sum(sum(map(sys.getsizeof, (key, *key, ids))) for key, ids in texts._known.items())
            assert held + sys.getsizeof(texts._known) <= most
    assert largest > 4
    texts.keep("y" * (LONGEST_TEXT + 1), None, array("i"))
    assert texts.get("y" * (LONGEST_TEXT + 1), None) is None
