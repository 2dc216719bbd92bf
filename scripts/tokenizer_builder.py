"""Build a small chat tokenizer from nothing: byte-level BPE, Qwen3.5 pre-tokenizer, Qwen control tokens and template.

Everything comes from this file and a fixed seed, so two builds are equal. The result is meant for tests, examples and
the embedded model: text of any script can be encoded, but only its own vocabulary is compressed.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, trainers
from tokenizers.models import BPE

PRE_TOKENIZER_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CONTROL_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
# 256 bytes, the added tokens, and enough merges that 255 single-token labels exist.
MIN_VOCAB_SIZE = 1024

CHAT_TEMPLATE = r"""{%- for message in messages %}
    {%- if message.role == 'system' %}
        {%- if not loop.first %}{{- raise_exception('The system message must come first.') }}{%- endif %}
        {{- '<|im_start|>system\n' + message.content|trim + '<|im_end|>\n' }}
    {%- elif message.role == 'user' or message.role == 'assistant' %}
        {{- '<|im_start|>' + message.role + '\n' + message.content|trim + '<|im_end|>\n' }}
    {%- else %}
        {{- raise_exception('Unexpected message role.') }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- else %}
        {{- '<think>\n' }}
    {%- endif %}
{%- endif %}"""

_WORDS = (
    "the a an of to in is was are were it that this with for on as at by from or and not no yes be has have had will "
    "would can could should which what who when where why how many true false none null state question answer option "
    "letter label correct fits best choose order customer refund policy agent step file test error run code line "
    "function return value name city river king garden winter summer price number first second last next before after "
    "because between under over good bad late early open close high low red blue green white black water house school "
    "street doctor letter music story report market bank ticket issue user message reply urgent normal spam"
)
_SYLLABLES = (
    "ba be bo da de di do ka ke ko la le li lo ma me mi mo na ne no pa pe po ra re ri ro sa se si so ta te to va vi"
)
_FOREIGN = (
    "caf\u00e9 na\u00efve \u00fcber stra\u00dfe ni\u00f1o gar\u00e7on "
    "\u043f\u0440\u0438\u0432\u0435\u0442 \u043c\u0438\u0440 \u0434\u0430 \u043d\u0435\u0442 "
    "\u4f60\u597d \u4e16\u754c \u8001\u5e08 \ud55c\uad6d \u65e5\u672c\u8a9e \u03bb\u03cc\u03b3\u03bf\u03c2"
)


def training_text(seed: int = 0) -> list[str]:
    """Lines of prose, lists, JSON and code, drawn from a seeded generator."""
    rng = random.Random(seed)
    syllables = _SYLLABLES.split()
    stems = ["".join(rng.choice(syllables) for _ in range(rng.randint(2, 3))) for _ in range(150)]
    pool = _WORDS.split() * 4 + stems + _FOREIGN.split()

    def words(count: int) -> list[str]:
        return [rng.choice(pool) for _ in range(count)]

    lines = []
    for number in range(700):
        sentence = " ".join(words(rng.randint(6, 20))).capitalize()
        lines.append(f"{sentence}, {' '.join(words(4))}.\n\nQuestion: {' '.join(words(6)).capitalize()}?\n")
        # Words at the start of a line and camel case give tokens without a leading space: those can be labels.
        lines.append("\n".join(f"{letter}. {word}" for letter, word in zip("ABCD", words(4), strict=True)) + "\n")
        lines.append("\n".join(words(3)) + "\n\n" + "".join(word.capitalize() for word in words(3)))
        lines.append("user\nassistant\n\nsystem\n")
        key, value = words(2)
        lines.append(f'{{"{key}": "{value}", "{words(1)[0]}": {number}, "ok": true}}\nAnswer with the letter.\n')
        lines.append(f"def {key}_{value}(x):\n    return self.{words(1)[0]}[{number % 10}]  # {sentence[:20]}\n")
    return lines


def build_tokenizer(vocab_size: int = 1280, *, seed: int = 0) -> Tokenizer:
    """The bare ``tokenizers.Tokenizer`` of exactly ``vocab_size`` entries, the added tokens last.

    Raises:
        ValueError: ``vocab_size`` is below ``MIN_VOCAB_SIZE``, or above what the training text can fill.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise ValueError(f"vocab_size must be at least {MIN_VOCAB_SIZE}, got {vocab_size}")
    return train_tokenizer(training_text(seed), vocab_size)


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """A tokenizer of exactly ``vocab_size`` entries trained on texts, the added tokens last.

    Raises:
        ValueError: the texts do not fill so many entries.
    """
    tokenizer = Tokenizer(BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRE_TOKENIZER_REGEX), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL_TOKENS) - len(CONTROL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[],
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in CONTROL_TOKENS])
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"the training text fills {tokenizer.get_vocab_size()} entries, not {vocab_size}")
    return tokenizer


def write_tokenizer(directory: Path, *, vocab_size: int = 1280, template: str | None = CHAT_TEMPLATE) -> None:
    """Write the files of a transformers tokenizer into ``directory`` (made if missing); other files there stay.

    Args:
        directory: where tokenizer.json, tokenizer_config.json and the template go.
        vocab_size: entries with the added tokens, ``MIN_VOCAB_SIZE`` or more.
        template: Jinja source of the chat template; None writes a tokenizer without one.
    """
    save_tokenizer(build_tokenizer(vocab_size), directory, template=template)


def save_tokenizer(tokenizer: Tokenizer, directory: Path, *, template: str | None = CHAT_TEMPLATE) -> None:
    """Write a tokenizer as :func:`write_tokenizer` does."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "Qwen3_5Tokenizer",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 262144,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    if template is not None:
        (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
