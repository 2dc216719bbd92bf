"""Words looked up together have the ids that each of them has."""

from __future__ import annotations

import random
import threading
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flide.runtime import packed_words, word_ids
from flide.runtime.packed_words import LONGEST, PackedWords
from tests.runtime.test_text_cuts import family_pair
from tests.runtime.test_word_ids import SENTENCES
from tests.tokenizer_families import FAMILIES, QUICK, TEXTS, whole

WORDS = st.text(st.sampled_from("ab\u00e9\u4f60\n,.x\0"), max_size=20)


def ids_of(word: str) -> bytes:
    return array("i", range(1, 2 + len(word) % 4)).tobytes()


def test_a_word_may_have_no_ids() -> None:
    packed = PackedWords()
    packed.add("a", array("i", [5, 6]).tobytes())
    packed.add("b", b"")
    for text, ids in ((" a b", [5, 6]), (" b", []), (" b b a", [5, 6]), (" b long_long_long_long", [7])):
        found = packed.ids(text, {"long_long_long_long": array("i", [7]).tobytes()})
        assert found is not None
        assert array("i", found).tolist() == ids


@QUICK
@given(known=st.lists(WORDS, max_size=60), text=st.lists(WORDS, min_size=1, max_size=80), others=st.booleans())
def test_ids_are_those_of_the_words(known: list[str], text: list[str], others: bool) -> None:
    packed = PackedWords()
    by_word = {word: ids_of(word) for word in known}
    for word, ids in by_word.items():
        packed.add(word, ids)
    found = packed.ids("".join(" " + word for word in text), by_word if others else {})
    expected = [by_word.get(word) for word in text]
    fits = all(len(word.encode()) <= LONGEST for word in text) or others
    if None in expected or not fits or any("\0" in word for word in text):
        assert found is None
    else:
        assert found == b"".join(filter(None, expected))


def test_words_whose_places_are_taken_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """All words are looked for in five slots first, the last ones."""
    packed = PackedWords()
    last = len(packed._slots_P) - 1
    monkeypatch.setattr(packed_words, "_slots", lambda halves_W: last - (halves_W[0] % 5).astype(int))
    words = [f"w{number}" for number in range(300)]
    for number, word in enumerate(words):
        packed.add(word, array("i", [number, number]).tobytes())
        packed.add(word, array("i", [-1]).tobytes())  # it is there
    order = random.Random(0).choices(range(300), k=1000)
    found = packed.ids("".join(f" {words[i]}" for i in order), {})
    assert found is not None
    assert array("i", found).tolist() == [i for i in order for _ in range(2)]
    assert packed.ids(" w0 w300 w1", {}) is None


def test_no_more_is_kept_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_words, "MOST", 50)
    monkeypatch.setattr(packed_words, "_MOST_IDS", 60)
    packed = PackedWords()
    for number in range(49):
        packed.add(f"w{number}", array("i", [number]).tobytes())
    packed.add("long", array("i", range(12)).tobytes())  # its ids have no place
    packed.add("w49", array("i", [49]).tobytes())
    packed.add("w50", array("i", [50]).tobytes())
    for number in range(50):
        assert packed.ids(f" w{number}", {}) == array("i", [number]).tobytes()
    assert packed.ids(" long", {}) is None
    assert packed.ids(" w50", {}) is None


@pytest.mark.parametrize("family", FAMILIES)
@QUICK
@given(text=SENTENCES | TEXTS, more=SENTENCES)
def test_long_texts_have_the_ids_of_the_whole(family: str, text: str, more: str) -> None:
    before, word_ids.PACKED = word_ids.PACKED, 1
    try:
        tokenizer, reference = family_pair(family)
        for one in (text, text + more, more + " " + text, text):
            assert tokenizer.encode_plain([one]) == [whole(reference, one)]
    finally:
        word_ids.PACKED = before


def test_threads_share_it() -> None:
    packed, wrong = PackedWords(), list[str]()
    words = [f"w{number}" for number in range(4000)]
    text = "".join(" " + word for word in words)
    expected = b"".join(ids_of(word) for word in words)

    def add(part: int) -> None:
        for word in words[part::2] + words:
            packed.add(word, ids_of(word))

    def look(_: int) -> None:
        for _ in range(200):
            found = packed.ids(text, {})
            if found is not None and found != expected:
                wrong.append("wrong")

    threads = [threading.Thread(target=work, args=(part,)) for work in (add, look) for part in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert packed.ids(text, {}) == expected
