from __future__ import annotations

import json
import logging
import random
import re
import socket
import threading
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, trainers
from tokenizers.models import BPE, Unigram
from transformers import AutoTokenizer

from flide.errors import CheckpointError, RequestError
from flide.runtime import tokenizer as module
from flide.runtime.tokenizer import PromptTokenizer
from tests.tiny_tokenizer import (
    CHAT_TEMPLATE,
    CONTROL_TOKENS,
    SPECIAL_TOKENS,
    build_tokenizer,
    wrap,
    write_model_directory,
)

FRAGMENTS = [
    *SPECIAL_TOKENS,
    *CONTROL_TOKENS,
    "<|im_",
    "end|>",
    "<th",
    "ink>",
    "the order is late",
    "word",
    " word",
    "a b",
    "don't",
    "I'LL",
    "'\u017f",
    "\r\n",
    "\n\n",
    " \n ",
    "    ",
    "\t",
    " ",
    "12345",
    "3.14, ",
    "1a2",
    '{"key": "value", "n": [1, 2]}',
    "def f(x_y):\n    return x\n",
    "caf\u00e9",
    "cafe\u0301",
    "\u0301",
    "\u0338",
    "\u212b",
    "\u1112\u1161\u11ab",
    "\u11a8",
    "\ud55c\uad6d\uc5b4 ",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002",
    "\u304b\u3099\u30ac\u3001",
    "\u043f\u0440\u0438\u0432\u0435\u0442 ",
    "\u03bb\u03cc\u03b3\u03bf\u03c2, ",
    "\u0928\u092e\u0938\u094d\u0924\u0947 ",
    "\u0645\u0631\u062d\u0628\u0627 ",
    "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467",
    "\U0001f600",
    "\U0001f601",
    "\ufeff",
    "\x00",
    "\x1c",
    "\u2028",
    "\u00a0",
]
# Above the basic plane the Unicode tables of Python and `tokenizers` may disagree about NFC.
CHARACTERS = st.characters(max_codepoint=0xFFFF, exclude_categories=("Cs", "Cn"))
TEXTS = st.lists(st.sampled_from(FRAGMENTS) | st.text(CHARACTERS, max_size=8), max_size=12).map("".join)
QUICK = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")


def split_on(regex: str) -> Any:
    split = pre_tokenizers.Split(Regex(regex), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def tiny(pre_tokenizer: Any = None, *, normalizer: Any = None) -> Tokenizer:
    """Trained on the fragments themselves: every merge that the pre-tokenizer permits between two of them exists."""
    tokenizer = Tokenizer(BPE())
    tokenizer.normalizer = normalizer or normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizer or build_tokenizer().pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    rng = random.Random(0)
    texts = ["".join(rng.choices(FRAGMENTS, k=6)) for _ in range(3000)]
    texts += [str(rng.randrange(10**6)) + rng.choice([" ", ",", "a", ""]) for _ in range(3000)]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=4000, initial_alphabet=alphabet, show_progress=False)
    )
    add_control_tokens(tokenizer)
    return tokenizer


def gemma_like() -> Tokenizer:
    """BPE over whole texts: blanks become U+2581 and no pre-tokenizer splits."""
    tokenizer = Tokenizer(BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    special = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=special, show_progress=False, max_token_length=6)
    tokenizer.train_from_iterator(
        ["the order is late. a b word. user assistant\n\n", *"abcdefghijklmnopqrstuvwxyz"], trainer
    )
    fields = json.loads(tokenizer.to_str())
    fields["added_tokens"] = []
    tokenizer = Tokenizer.from_str(json.dumps(fields))
    add_control_tokens(tokenizer)
    return tokenizer


def unigram() -> Tokenizer:
    vocab = [("<unk>", 0.0), *((c, -5.0) for c in map(chr, range(33, 127))), ("\u2581", -3.0), ("\u2581the", -2.0)]
    tokenizer = Tokenizer(Unigram([*vocab, ("ord", -4.0), ("er", -4.0), ("\n", -4.0), ("\n\n", -4.0)], unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="never")
    add_control_tokens(tokenizer)
    return tokenizer


def add_control_tokens(tokenizer: Tokenizer, **flags: bool) -> None:
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False, **flags) for text in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in CONTROL_TOKENS])


def other_regex() -> Tokenizer:
    # Trained with the usual regex: with this one, merges would lead to control tokens.
    tokenizer = tiny()
    tokenizer.pre_tokenizer = split_on(r"\p{L}+ \p{L}+|\s+|\S+")
    return tokenizer


def without_added_tokens(tokenizer: Tokenizer) -> Tokenizer:
    fields = json.loads(tokenizer.to_str())
    fields["added_tokens"] = []
    return Tokenizer.from_str(json.dumps(fields))


def whole(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_directory(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tok(directory: Path) -> PromptTokenizer:
    return PromptTokenizer.from_pretrained(directory)


@pytest.fixture(scope="module")
def hf(directory: Path) -> Any:
    return AutoTokenizer.from_pretrained(directory, local_files_only=True)


@pytest.fixture(scope="module")
def plain() -> Tokenizer:
    return without_added_tokens(build_tokenizer())


@pytest.fixture
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PIECE", 7)


FAMILIES = {
    "qwen3.5": tiny,
    "qwen2": lambda: tiny(split_on(QWEN2)),
    "llama3": lambda: tiny(split_on(LLAMA3)),
    "gpt2 split": lambda: tiny(split_on(GPT2)),
    "gpt2": lambda: tiny(pre_tokenizers.ByteLevel(add_prefix_space=False)),
}
OTHERS = {
    "gemma-like": gemma_like,
    "unigram": unigram,
    "prefix space": lambda: tiny(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "digits first": lambda: tiny(pre_tokenizers.Sequence([pre_tokenizers.Digits(), split_on(QWEN2)])),
    "other regex": other_regex,
    "lowercase": lambda: tiny(normalizer=normalizers.Lowercase()),
}


class TestExactness:
    @pytest.mark.usefixtures("short_pieces")
    @pytest.mark.parametrize("family", FAMILIES)
    @QUICK
    @given(shared=TEXTS, tails=st.lists(TEXTS, min_size=1, max_size=3))
    def test_shared_and_tail_are_the_whole(self, family: str, shared: str, tails: list[str]) -> None:
        tokenizer, reference = family_pair(family)
        assert tokenizer._cuts_are_safe
        shared_ids, tail_ids = tokenizer.encode_prompts(shared, tails)
        for tail, ids in zip(tails, tail_ids, strict=True):
            assert shared_ids + ids == whole(reference, shared + tail)
        assert tokenizer.encode_plain([shared, *tails]) == [whole(reference, text) for text in [shared, *tails]]
        assert tokenizer.encode_prompts(shared, [*tails, "x"])[0] == shared_ids, "the cut depends on a tail"

    @settings(max_examples=15, deadline=None)
    @given(parts=st.lists(TEXTS, min_size=1, max_size=6), tail=TEXTS, repeat=st.integers(50, 400))
    def test_long_texts(self, tok: PromptTokenizer, plain: Tokenizer, parts: list[str], tail: str, repeat: int) -> None:
        shared = "".join(part * repeat for part in parts)
        shared_ids, (tail_ids,) = tok.encode_prompts(shared, [tail])
        assert shared_ids + tail_ids == whole(plain, shared + tail)

    def test_long_texts_are_cut(self) -> None:
        for text in ("the order is late ", "\u4f60\u597d\uff0c\u4e16\u754c\u3002", '{"a": "b"}\n', "17,23,5\n"):
            pieces = module._cut(text * 3000)
            assert "".join(pieces) == text * 3000
            assert all(len(piece) <= module._PIECE for piece in pieces)

    def test_text_without_a_boundary_stays_whole(self, tok: PromptTokenizer, plain: Tokenizer) -> None:
        text = "\u0e2a" * 9000
        assert module._cut(text) == [text]
        assert tok.encode_plain([text]) == [whole(plain, text)]
        shared_ids, (tail_ids,) = tok.encode_prompts(text, ["x"])
        assert (shared_ids, tail_ids) == ([], whole(plain, text + "x"))

    @pytest.mark.parametrize("regex", [GPT2, QWEN2, LLAMA3, "qwen3.5"])
    def test_every_listed_character_ends_a_match(self, regex: str) -> None:
        splitter = build_tokenizer().pre_tokenizer if regex == "qwen3.5" else split_on(regex)
        letters = [c for c in map(chr, range(0x10000)) if re.fullmatch(rf"[{module._LETTERS}0-9]", c)]
        assert len(letters) > 30000
        assert all(unicodedata.is_normalized("NFC", c) for c in letters)
        for after in (" ", "'s", "\n", "\u3002"):
            text = "".join(c + after for c in letters if after != "\u3002" or not c.isdigit())
            starts = {start for _, (start, _) in splitter.pre_tokenize_str(text)}
            assert starts.issuperset(found.start() for found in module._NEXT_CUT.finditer(text))
        follow = [c for c in map(chr, range(0x10000)) if module._NEXT_CUT.search("a" + c)]
        assert len(follow) == 128 - 52 + 3
        assert all(not unicodedata.combining(c) and unicodedata.is_normalized("NFC", "a" + c) for c in follow)

    @pytest.mark.parametrize("family", OTHERS)
    @settings(QUICK, max_examples=40)
    @given(shared=TEXTS, tails=st.lists(TEXTS, min_size=1, max_size=3))
    def test_unknown_tokenizers_encode_whole_texts(self, family: str, shared: str, tails: list[str]) -> None:
        tokenizer, reference = bare_pair(family)
        assert not tokenizer._cuts_are_safe
        shared_ids, tail_ids = tokenizer.encode_prompts(shared, tails)
        for tail, ids in zip(tails, tail_ids, strict=True):
            assert shared_ids + ids == whole(reference, shared + tail)

    def test_unknown_tokenizer_is_logged_once(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.INFO, logger="flide.tokenizer"):
            tokenizer = PromptTokenizer(wrap(gemma_like()))
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


class TestUserText:
    @QUICK
    @given(text=TEXTS)
    def test_control_strings_stay_text(self, tok: PromptTokenizer, text: str) -> None:
        (ids,) = tok.encode_plain([text])
        assert tok._control_ids.isdisjoint(ids)
        assert tok.decode(ids) == unicodedata.normalize("NFC", text)

    @pytest.mark.parametrize("text", [*SPECIAL_TOKENS, *CONTROL_TOKENS])
    def test_every_added_token(self, tok: PromptTokenizer, text: str) -> None:
        assert len(tok._control_ids) == len(SPECIAL_TOKENS) + len(CONTROL_TOKENS)
        (ids,) = tok.encode_plain([text])
        assert len(ids) > 1
        assert tok._control_ids.isdisjoint(ids)

    def test_control_token_in_the_models_own_vocabulary(self) -> None:
        bare = build_tokenizer()
        bare.add_tokens([AddedToken("Question", normalized=False)])  # merges reach it without any added token
        tokenizer = PromptTokenizer(wrap(bare))
        assert tokenizer.encode_plain(["Quest"])
        with pytest.raises(RequestError, match="control token"):
            tokenizer.encode_plain(["ok", "a\nQuestion"])
        assert "Question" not in {label.text for label in tokenizer.labels(255)}

    def test_lone_surrogates_are_refused(self, tok: PromptTokenizer) -> None:
        with pytest.raises(RequestError, match="lone surrogate"):
            tok.encode_plain(["fine", "a\ud800b"])

    def test_empty(self, tok: PromptTokenizer) -> None:
        assert tok.encode_plain([]) == []
        assert tok.encode_plain(["", ""]) == [[], []]
        assert tok.encode_prompts("", ["", ""]) == ([], [[], []])


class TestFrame:
    def test_qwen(self, tok: PromptTokenizer, hf: Any) -> None:
        frame = tok.frame
        assert hf.convert_ids_to_tokens(list(frame.head_ids)) == ["<|im_start|>"]
        assert (frame.head_text, frame.tail_text, frame.label_context) == ("user\n", "", "\n\n")
        assert hf.decode(list(frame.tail_ids)) == "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
        assert frame.strips_left
        assert frame.strips_right

    @pytest.mark.parametrize("template", [CHAT_TEMPLATE, CHAT_TEMPLATE.replace("|trim", "")])
    @QUICK
    @given(shared=TEXTS, tails=st.lists(TEXTS, min_size=1, max_size=3))
    def test_prompts_are_the_encoded_template(self, template: str, shared: str, tails: list[str]) -> None:
        tokenizer, hf = template_pair(template)
        shared_ids, tail_ids = tokenizer.encode_chat(shared, tails)
        for tail, ids in zip(tails, tail_ids, strict=True):
            messages = [{"role": "user", "content": shared + tail}]
            text = hf.apply_chat_template(messages, add_generation_prompt=True, enable_thinking=False, tokenize=False)
            prompt = shared_ids + ids
            assert tokenizer.decode(prompt) == unicodedata.normalize("NFC", text)
            controls = [i for i in prompt if i in tokenizer._control_ids]
            assert controls == [i for i in (*tokenizer.frame.head_ids, *tokenizer.frame.tail_ids) if i in controls]
            if not any(token in shared + tail for token in (*SPECIAL_TOKENS, *CONTROL_TOKENS)):
                assert prompt == whole(hf.backend_tokenizer, text)

    @pytest.mark.parametrize(
        ("template", "content"),
        [
            ("User: {{ messages[0].content }}\nAssistant:", " 's x "),
            ("<|im_start|>[ {{ messages[0].content | trim }} ]x<|im_end|>", "\n (a b) "),
            ("{{ messages[0].content.lstrip() }}<|im_end|>", " \n a b \n"),
            ("<|im_start|>{{ messages[0].content.rstrip() }}!", " \n a b \n"),
        ],
    )
    def test_plain_text_next_to_the_content(self, template: str, content: str) -> None:
        hf = wrap(build_tokenizer(), template=template)
        tokenizer = PromptTokenizer(hf)
        text = hf.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
        for cut in range(len(content)):
            shared_ids, (tail_ids,) = tokenizer.encode_chat(content[:cut], [content[cut:]])
            assert shared_ids + tail_ids == whole(hf.backend_tokenizer, text)

    @pytest.mark.parametrize(
        ("template", "message"),
        [
            (None, "no usable chat template"),
            ("{{ raise_exception('nothing to say') }}", "nothing to say"),
            ("{{ messages[0].content.nope() }}", "no usable chat template"),
            ("{% for", "no usable chat template"),
            ("hello", "0 times"),
            ("{{ messages[0].content }} {{ messages[0].content }}", "2 times"),
            ("{{ messages[0].content | upper }}", "0 times"),
            ("{{ messages[0].content | replace('  ', ' ') }}", "changes"),
            ("{{ messages[0].content | e }}", "changes"),
            ("{{ messages[0].content.strip('\\n') }}", "changes"),
            ("{{ messages[0].content.split('</think>')[-1] }}", "changes"),
            ("{% if '/no_think' in messages[0].content %}x{% endif %}{{ messages[0].content }}", "depends"),
            ("{{ messages[0].content[:400] }}", "changes"),
        ],
    )
    def test_templates_that_are_no_frame(self, template: str | None, message: str) -> None:
        with pytest.raises(CheckpointError, match=re.escape(message)):
            PromptTokenizer(wrap(build_tokenizer(), template=template))

    @pytest.mark.parametrize(
        ("flag", "template"),
        [
            ("lstrip", CHAT_TEMPLATE.replace("|trim", "")),
            ("rstrip", "<|im_start|>{{ messages[0].content }}<|im_end|>"),
            ("single_word", CHAT_TEMPLATE),
        ],
    )
    def test_control_tokens_that_swallow_text(self, flag: str, template: str) -> None:
        fields = json.loads(build_tokenizer().to_str())
        for token in fields["added_tokens"]:
            token[flag] = True
        with pytest.raises(CheckpointError, match="change the text next to them"):
            PromptTokenizer(wrap(Tokenizer.from_str(json.dumps(fields)), template=template))

    def test_blanks_as_added_tokens_are_text(self) -> None:
        bare = unigram()
        bare.add_tokens([AddedToken("\n\n", normalized=False)])
        tokenizer = PromptTokenizer(wrap(bare))
        assert tokenizer.frame.label_context == "\n\n"
        assert tokenizer.encode_plain(["\n\n"]) == [[bare.token_to_id("\n\n")]] == [whole(bare, "\n\n")]


def template_pair(template: str) -> tuple[PromptTokenizer, Any]:
    if template not in TEMPLATES:
        TEMPLATES[template] = (
            PromptTokenizer(wrap(build_tokenizer(), template=template)),
            wrap(build_tokenizer(), template=template),
        )
    return TEMPLATES[template]


TEMPLATES: dict[str, tuple[PromptTokenizer, Any]] = {}


class TestLabels:
    def test_single_and_distinct(self, tok: PromptTokenizer, hf: Any) -> None:
        labels = tok.labels(255)
        assert "".join(label.text for label in labels[:62]) == (
            "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
        )
        assert len({label.id for label in labels}) == len({label.text for label in labels}) == 255
        assert [label.id for label in labels[62:]] == sorted(label.id for label in labels[62:])
        messages = [{"role": "user", "content": "x"}]
        prompt = hf.apply_chat_template(messages, add_generation_prompt=True, enable_thinking=False, tokenize=False)
        before = whole(hf.backend_tokenizer, prompt)
        for label in labels:
            assert label.text.isprintable()
            assert " " not in label.text
            assert whole(hf.backend_tokenizer, prompt + label.text) == [*before, label.id]

    def test_smallest_vocabulary(self, tmp_path: Path) -> None:
        tokenizer = PromptTokenizer.from_pretrained(write_model_directory(tmp_path, vocab_size=1024))
        assert tokenizer.num_labels() == 255
        assert tokenizer.vocab_size == 1024

    def test_labels_that_merge_with_the_context_are_skipped(self) -> None:
        bare = build_tokenizer()
        tokenizer = PromptTokenizer(wrap(bare, template="<|im_start|>{{ messages[0].content }}<|im_end|>Ques"))
        texts = {label.text for label in tokenizer.labels(tokenizer.num_labels())}
        assert whole(bare, "Question") == [bare.token_to_id("Question")]
        assert "tion" not in texts
        assert "A" in texts

    def test_too_few(self) -> None:
        bare = Tokenizer(BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
        bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        bare.decoder = decoders.ByteLevel()
        add_control_tokens(bare)
        tokenizer = PromptTokenizer(wrap(bare))
        assert tokenizer.num_labels() == 94
        assert len(tokenizer.labels(94)) == 94
        with pytest.raises(RequestError, match="100 options.*94 labels") as caught:
            tokenizer.labels(100)
        assert caught.value.errors[0]["type"] == "too_many_options"

    def test_at_most_255(self, tok: PromptTokenizer) -> None:
        with pytest.raises(RequestError, match="256 options.*255 labels"):
            tok.labels(256)

    def test_threads_see_one_list(self, directory: Path) -> None:
        tokenizer = PromptTokenizer.from_pretrained(directory)
        seen: list[Any] = []
        threads = [threading.Thread(target=lambda: seen.append(tokenizer.labels(255))) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(seen) == 8
        assert all(labels == seen[0] for labels in seen)


class TestLoading:
    @pytest.fixture
    def attempts(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        made: list[str] = []

        def refuse(*args: Any, **kwargs: Any) -> None:
            made.append(repr(args))
            raise OSError("no network in this test")

        monkeypatch.setattr(socket.socket, "connect", refuse)
        monkeypatch.setattr(socket, "getaddrinfo", refuse)
        monkeypatch.setattr(socket, "create_connection", refuse)
        return made

    @pytest.mark.parametrize("config", [None, {"model_type": "qwen3_5_text"}, {"model_type": "mistral"}])
    def test_no_network(
        self, directory: Path, tmp_path: Path, attempts: list[str], config: dict[str, Any] | None
    ) -> None:
        for name in ("tokenizer_config.json", "chat_template.jinja"):
            (tmp_path / name).write_bytes((directory / name).read_bytes())
        if config is not None:
            (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
        # From 100,000 entries on transformers looks whether the tokenizer is a certain faulty one.
        fields = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
        vocab = fields["model"]["vocab"]
        for token in fields["added_tokens"]:
            token["id"] += 100_000
        vocab.update({f"unused{i}": i for i in range(len(vocab), len(vocab) + 100_000)})
        (tmp_path / "tokenizer.json").write_text(json.dumps(fields), encoding="utf-8")
        tokenizer = PromptTokenizer.from_pretrained(tmp_path)
        assert tokenizer.vocab_size == 101_280
        assert tokenizer.num_labels() == 255
        assert attempts == []

    def test_save(self, tok: PromptTokenizer, tmp_path: Path) -> None:
        tok.save(tmp_path)
        again = PromptTokenizer.from_pretrained(tmp_path)
        assert again.frame == tok.frame
        assert again.labels(255) == tok.labels(255)
        assert again.chat_template == tok.chat_template

    @pytest.mark.parametrize(
        ("files", "message"),
        [
            ({}, "has no tokenizer"),
            ({"config.json": '{"model_type": "qwen3_5_text"}'}, "has no tokenizer"),
            ({"tokenizer_config.json": '{"tokenizer_class": "Qwen3_5Tokenizer"}'}, "no vocabulary"),
            ({"tokenizer.json": "{oops"}, "cannot load the tokenizer"),
            ({"tokenizer.json": "{}"}, "cannot load the tokenizer"),
            (
                {
                    "config.json": '{"model_type": "ctrl"}',
                    "tokenizer_config.json": '{"tokenizer_class": "CTRLTokenizer"}',
                    "vocab.json": '{"a</w>": 0, "<unk>": 1}',
                    "merges.txt": "#version\na b\n",
                },
                "not a fast tokenizer",
            ),
            (
                {
                    "config.json": '{"model_type": "own"}',
                    "tokenizer_config.json": (
                        '{"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["own.OwnTokenizer", null]}}'
                    ),
                    "own.py": "raise SystemExit('code of the directory was run')",
                },
                "custom code",
            ),
        ],
    )
    def test_unusable_directories(
        self, tmp_path: Path, attempts: list[str], files: dict[str, str], message: str
    ) -> None:
        for name, text in files.items():
            (tmp_path / name).write_text(text, encoding="utf-8")
        with pytest.raises(CheckpointError, match=message) as caught:
            PromptTokenizer.from_pretrained(tmp_path)
        assert "\n" not in str(caught.value)
        assert attempts == []

    def test_missing_directory_is_no_hub_name(self, attempts: list[str]) -> None:
        with pytest.raises(CheckpointError, match="not a directory"):
            PromptTokenizer.from_pretrained(Path("owner/name"))
        assert attempts == []

    def test_missing_template(self, tmp_path: Path) -> None:
        write_model_directory(tmp_path, template=None)
        with pytest.raises(CheckpointError, match="no usable chat template"):
            PromptTokenizer.from_pretrained(tmp_path)

    def test_builder_is_deterministic(self) -> None:
        assert build_tokenizer(1024).to_str() == build_tokenizer(1024).to_str()
        with pytest.raises(ValueError, match="at least 1024"):
            build_tokenizer(512)
