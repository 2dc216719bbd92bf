"""What a chat template puts around a message is found once and holds for every message."""

from __future__ import annotations

import json
import re
import unicodedata
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from flide.errors import CheckpointError
from flide.runtime.tokenizer import PromptTokenizer
from tests.tiny_tokenizer import CHAT_TEMPLATE, CONTROL_TOKENS, SPECIAL_TOKENS, build_tokenizer, wrap
from tests.tokenizer_families import QUICK, TEXTS, unigram, whole


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
            prompt = [*shared_ids, *ids]
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
            assert [*shared_ids, *tail_ids] == whole(hf.backend_tokenizer, text)

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
