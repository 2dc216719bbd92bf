"""Tokenizers of several families, built in memory, and texts that try their seams."""

from __future__ import annotations

import json
import random
import string
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, trainers
from tokenizers.models import BPE, Unigram

from tests.tiny_tokenizer import CONTROL_TOKENS, SPECIAL_TOKENS, build_tokenizer

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
# Above the basic plane the Unicode tables of Python and ``tokenizers`` may disagree about NFC.
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


def gemma_like(letters: str = string.ascii_lowercase, *, merges_blanks: bool = False) -> Tokenizer:
    """BPE over whole texts: blanks become U+2581 and no pre-tokenizer splits. Where entries have blanks inside
    (``merges_blanks``), which Gemma's do not, texts can be cut nowhere."""
    tokenizer = Tokenizer(BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    if not merges_blanks:
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("\u2581+"), "merged_with_next")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    special = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=special, show_progress=False, max_token_length=6)
    tokenizer.train_from_iterator(["the order is late. a b  word.   user assistant\n\n", *letters], trainer)
    fields = json.loads(tokenizer.to_str())
    fields["added_tokens"], fields["pre_tokenizer"] = [], None
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


FAMILIES = {
    "qwen3.5": tiny,
    "qwen2": lambda: tiny(split_on(QWEN2)),
    "llama3": lambda: tiny(split_on(LLAMA3)),
    "gpt2 split": lambda: tiny(split_on(GPT2)),
    "gpt2": lambda: tiny(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "gemma-like": gemma_like,
}
OTHERS = {
    "merged blanks": lambda: gemma_like(merges_blanks=True),
    "unigram": unigram,
    "prefix space": lambda: tiny(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "digits first": lambda: tiny(pre_tokenizers.Sequence([pre_tokenizers.Digits(), split_on(QWEN2)])),
    "other regex": other_regex,
    "lowercase": lambda: tiny(normalizer=normalizers.Lowercase()),
}
