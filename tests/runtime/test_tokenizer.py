"""User text stays text, labels are single tokens, and directories load without network or code."""

from __future__ import annotations

import json
import socket
import threading
import unicodedata
from array import array
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from flide.errors import CheckpointError, RequestError
from flide.runtime.tokenizer import PromptTokenizer
from tests.tiny_tokenizer import CONTROL_TOKENS, SPECIAL_TOKENS, build_tokenizer, wrap, write_model_directory
from tests.tokenizer_families import QUICK, TEXTS, add_control_tokens, whole


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
        assert tok.encode_prompts("", ["", ""]) == (array("i"), [array("i"), array("i")])


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
