"""Encoding a text in pieces is encoding it whole."""

from __future__ import annotations

import logging
import re
import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from flide.errors import RequestError
from flide.runtime import text_cuts
from flide.runtime import tokenizer as module
from flide.runtime.tokenizer import PromptTokenizer
from tests.tiny_tokenizer import build_tokenizer, wrap
from tests.tokenizer_families import (
    FAMILIES,
    GPT2,
    LLAMA3,
    OTHERS,
    QUICK,
    QWEN2,
    TEXTS,
    gemma_like,
    split_on,
    unigram,
    whole,
    without_added_tokens,
)


@pytest.fixture(scope="module")
def plain() -> Tokenizer:
    return without_added_tokens(build_tokenizer())


@pytest.fixture
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_cuts, "_SHORTEST", 7)
    monkeypatch.setattr(text_cuts, "_LONGEST", 7)


class TestExactness:
    @pytest.mark.usefixtures("short_pieces")
    @pytest.mark.parametrize("family", FAMILIES)
    @QUICK
    @given(shared=TEXTS, tails=st.lists(TEXTS, min_size=1, max_size=3))
    def test_shared_and_tail_are_the_whole(self, family: str, shared: str, tails: list[str]) -> None:
        tokenizer, reference = family_pair(family)
        assert tokenizer._cuts is not None
        shared_ids, tail_ids = tokenizer.encode_prompts(shared, tails)
        for tail, ids in zip(tails, tail_ids, strict=True):
            assert [*shared_ids, *ids] == whole(reference, shared + tail)
        assert tokenizer.encode_plain([shared, *tails]) == [whole(reference, text) for text in [shared, *tails]]
        assert tokenizer.encode_prompts(shared, [*tails, "x"])[0] == shared_ids, "the cut depends on a tail"

    @settings(max_examples=15, deadline=None)
    @given(parts=st.lists(TEXTS, min_size=1, max_size=6), tail=TEXTS, repeat=st.integers(50, 400))
    def test_long_texts(self, tok: PromptTokenizer, plain: Tokenizer, parts: list[str], tail: str, repeat: int) -> None:
        shared = "".join(part * repeat for part in parts)
        shared_ids, (tail_ids,) = tok.encode_prompts(shared, [tail])
        assert [*shared_ids, *tail_ids] == whole(plain, shared + tail)

    def test_long_texts_are_cut(self) -> None:
        for text in ("the order is late ", "\u4f60\u597d\uff0c\u4e16\u754c\u3002", '{"a": "b"}\n', "17,23,5\n"):
            pieces = text_cuts.AFTER_WORDS.cut(text * 3000)
            assert "".join(pieces) == text * 3000
            assert all(len(piece) <= text_cuts._LONGEST for piece in pieces)

    def test_text_without_a_boundary_stays_whole(self, tok: PromptTokenizer, plain: Tokenizer) -> None:
        text = "\u0e2a" * 9000
        assert text_cuts.AFTER_WORDS.cut(text) == [text]
        assert tok.encode_plain([text]) == [whole(plain, text)]
        shared_ids, (tail_ids,) = tok.encode_prompts(text, ["x"])
        assert (list(shared_ids), list(tail_ids)) == ([], whole(plain, text + "x"))

    @pytest.mark.parametrize("regex", [GPT2, QWEN2, LLAMA3, "qwen3.5"])
    def test_every_listed_character_ends_a_match(self, regex: str) -> None:
        splitter = build_tokenizer().pre_tokenizer if regex == "qwen3.5" else split_on(regex)
        letters = [c for c in map(chr, range(0x10000)) if re.fullmatch(rf"[{text_cuts._LETTERS}0-9]", c)]
        assert len(letters) > 30000
        assert all(unicodedata.is_normalized("NFC", c) for c in letters)
        for after in (" ", "'s", "\n", "\u3002"):
            text = "".join(c + after for c in letters if after != "\u3002" or not c.isdigit())
            starts = {start for _, (start, _) in splitter.pre_tokenize_str(text)}
            assert starts.issuperset(found.start() for found in text_cuts.AFTER_WORDS.next.finditer(text))
        enders = [c for c in map(chr, range(0x10000)) if text_cuts.ends_a_word("\n" + c)]
        assert {*map(chr, range(0x21, 0x7F)), *letters} == {*enders}
        text = "".join(c + " " for c in enders)
        starts = {start for _, (start, _) in splitter.pre_tokenize_str(text)}
        assert starts.issuperset(range(1, len(text), 2))
        follow = [c for c in map(chr, range(0x10000)) if text_cuts.AFTER_WORDS.next.search("a" + c)]
        assert len(follow) == 128 - 52 + 3
        assert all(not unicodedata.combining(c) and unicodedata.is_normalized("NFC", "a" + c) for c in follow)

    @pytest.mark.parametrize("family", OTHERS)
    @settings(QUICK, max_examples=40)
    @given(shared=TEXTS, tails=st.lists(TEXTS, min_size=1, max_size=3))
    def test_unknown_tokenizers_encode_whole_texts(self, family: str, shared: str, tails: list[str]) -> None:
        tokenizer, reference = bare_pair(family)
        assert tokenizer._cuts is None
        shared_ids, tail_ids = tokenizer.encode_prompts(shared, tails)
        for tail, ids in zip(tails, tail_ids, strict=True):
            assert [*shared_ids, *ids] == whole(reference, shared + tail)

    def test_a_tail_keeps_a_token_where_unknown_characters_are_one(self) -> None:
        tokenizer = PromptTokenizer(wrap(unigram()))
        assert len(tokenizer.encode_plain(["\u6f22"])[0]) == len(tokenizer.encode_plain(["\u6f22\u6f22"])[0]) == 1
        assert all(tokenizer.encode_prompts("\u6f22", ["\u6f22", "\u6f22 the"])[1])

    def test_unknown_tokenizer_is_logged_once(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.INFO, logger="flide.tokenizer"):
            tokenizer = PromptTokenizer(wrap(gemma_like(merges_blanks=True)))
            tokenizer.encode_prompts("a b", ["c", "d"])
            tokenizer.encode_prompts("a b", ["c", "d"])
        assert len(caplog.records) == 1

    @pytest.mark.slow
    def test_runs_of_blanks(self, tok: PromptTokenizer) -> None:
        longest = " " * (module._MAX_UNCUT - 2) + "\u0301"
        assert len(tok.encode_plain([longest])[0]) > 0
        with pytest.raises(RequestError, match="too long to tokenize"):
            tok.encode_plain([" " * 12_000_000 + "\u0301"])


PAIRS: dict[str, tuple[PromptTokenizer, Tokenizer]] = {}


def family_pair(family: str) -> tuple[PromptTokenizer, Tokenizer]:
    if family not in PAIRS:
        bare = FAMILIES[family]()
        PAIRS[family] = PromptTokenizer(wrap(bare)), without_added_tokens(bare)
    return PAIRS[family]


def bare_pair(family: str) -> tuple[PromptTokenizer, Tokenizer]:
    if family not in PAIRS:
        bare = OTHERS[family]()
        reference = without_added_tokens(bare)
        PAIRS[family] = PromptTokenizer(wrap(bare)), reference
    return PAIRS[family]
