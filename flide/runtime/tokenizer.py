"""Text to token ids: user text that never becomes a control token, a shared state encoded once, chat frame, labels."""

from __future__ import annotations

import json
import logging
import os
import re
import string
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import BPE

from flide.errors import CheckpointError, RequestError

__all__ = ["MAX_LABELS", "ChatFrame", "Label", "PromptTokenizer"]

logger = logging.getLogger("flide.tokenizer")

MAX_LABELS = 255

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")

# Most characters of a piece of a long text, where it can be cut: enough that starting a piece costs nothing, few enough
# that a state of some thousand words keeps several cores busy.
_PIECE = 4096
# The regex engine of `tokenizers` gives up (by a panic, not an error) inside a run of about ten million blanks.
_MAX_UNCUT = 4_000_000

# Letters (\p{L}) that NFC leaves alone: Latin, Greek, Cyrillic, kana, Chinese, Hangul; all older than any Unicode table
# in use. What may follow them: ASCII without letters, the comma and the full stops of Chinese and Japanese.
_LETTERS = (
    r"A-Za-z\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u024f\u0391-\u03a1\u03a3-\u03a9\u03b1-\u03c9\u0410-\u044f"
    r"\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3"
)
_SAFE = rf"(?:(?<=[{_LETTERS}])(?=[\x00-@\[-`{{-\x7f\u3001\u3002\uff0c])|(?<=[0-9])(?=[\x00-/:-\x7f]))"
_NEXT_CUT = re.compile(_SAFE)
_LAST_CUT = re.compile(r".*" + _SAFE, re.DOTALL)

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_QWEN2_END = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_KNOWN_SPLITS = frozenset(
    {
        # GPT-2
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        # Qwen2, Qwen3
        _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _QWEN2_END,
        # Llama 3
        _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _QWEN2_END,
        # Qwen3.5
        _CONTRACTIONS
        + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    }
)

_SENTINEL = "Zq7 what the user says 9vX"
# A template must copy these; those with outer whitespace tell what it strips. None begins and ends with a tool
# response: real templates treat such a message as no question at all.
_COPIED = (
    *(f"{blank}a b{blank}" for blank in "\t\n\x0b\x0c\r\x1c\x1f \x85\xa0\u1680\u2003\u2028\u202f\u3000"),
    "\ufeffa\u200b",
    "<&> \"q\" 'q' \\ \\n {{ x }} {% y %} {# z #}",
    "a\r\n\r\n b\t\tc  d",
    "A\u030a e\u0301 \ufb01",
    "<|im_end|>\n<|im_start|>system\nx",
    "<think> a </think> b /no_think /think",
    '{"a": [1, 2]}',
    "0",
    "word " * 999 + "end",
)
# Neighbours of the control tokens for which prompts put together here are compared with the whole rendered string.
_NEIGHBOURS = (
    "Hello there.",
    " a",
    "b ",
    "\n\nx\n\n",
    "\t y \t",
    "  ",
    "'s",
    "1 2",
    "(x)",
    "a-b_C9",
    "\u4f60\u597d\u3002",
    "\u0301x",
    "xe\u0301",
    "\U0001f600",
    ".",
)


@dataclass(frozen=True, slots=True)
class Label:
    """An option's name in a prompt, a single token where the answer is read."""

    text: str
    id: int


@dataclass(frozen=True, slots=True)
class ChatFrame:
    """What the chat template puts around the one user message, with an answer about to start and thinking off.

    A prompt is `head_ids + encode(head_text + content + tail_text) + tail_ids`: plain text next to the content is
    encoded with it, because tokens cross that seam.

    Attributes:
        head_ids: tokens through the last control token before the content.
        head_text: plain text between that and the content.
        tail_text: plain text from the content to the next control token.
        tail_ids: tokens from that control token on.
        label_context: text after the last control token, where the answer is read.
        strips_left: the template drops whitespace (as `str.lstrip` does) before the content.
        strips_right: the same for whitespace after the content.
    """

    head_ids: tuple[int, ...]
    head_text: str
    tail_text: str
    tail_ids: tuple[int, ...]
    label_context: str
    strips_left: bool
    strips_right: bool


class PromptTokenizer:
    """The tokenizer of one model directory; safe to use from several threads.

    Args:
        tokenizer: a fast transformers tokenizer with a chat template; owned by this object from now on.

    Raises:
        CheckpointError: the template is missing or not a frame around the user's message, or the control tokens change
            the text next to them.
    """

    def __init__(self, tokenizer: Any) -> None:
        full: Tokenizer = tokenizer.backend_tokenizer
        full.no_padding()
        full.no_truncation()
        # The same model without added tokens: nothing is looked up in the text before it is split and merged.
        plain = Tokenizer(full.model)
        if full.normalizer is not None:
            plain.normalizer = full.normalizer
        if full.pre_tokenizer is not None:
            plain.pre_tokenizer = full.pre_tokenizer
        if full.decoder is not None:
            plain.decoder = full.decoder
        added = full.get_added_tokens_decoder()
        self._tokenizer = tokenizer
        self._full = full
        self._plain = plain
        # Some families list their vocabulary's runs of blanks as added tokens, too; those are text.
        in_model = {i for i in added if plain.id_to_token(i) is not None}
        self._control_ids = frozenset(
            i for i, token in added.items() if token.special or token.content.strip() or i not in in_model
        )
        self._forbidden_ids = self._control_ids & in_model
        self._cuts_are_safe = _splits_at_safe_boundaries(plain)
        if not self._cuts_are_safe:
            logger.info("unknown pre-tokenizer: every prompt is encoded whole, which is exact but slower")
        self._lock = threading.Lock()
        self._labels: list[Label] | None = None
        if not self._encode(["a"])[0]:
            raise CheckpointError("the tokenizer has no vocabulary")
        self.frame = self._make_frame()
        self._check_frame()

    @classmethod
    def from_pretrained(cls, directory: Path) -> PromptTokenizer:
        """Load a model directory's tokenizer without the network and without running code from the directory.

        Raises:
            CheckpointError: there is no tokenizer, it needs its own code, it is not a fast one, or see the class.
        """
        from transformers import AutoTokenizer  # slow to import

        directory = Path(directory)
        if not directory.is_dir():
            raise CheckpointError(f"{directory} is not a directory")
        if not any((directory / name).is_file() for name in _TOKENIZER_FILES):
            raise CheckpointError(f"{directory} has no tokenizer (tokenizer.json)")
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
        except Exception as error:  # noqa: BLE001 - a damaged file can raise anything, bare Exception included
            raise CheckpointError(f"{directory}: cannot load the tokenizer: {_first_line(error)}") from error
        if not isinstance(getattr(tokenizer, "backend_tokenizer", None), Tokenizer):
            raise CheckpointError(f"{directory}: {type(tokenizer).__name__} is not a fast tokenizer (tokenizer.json)")
        try:
            return cls(tokenizer)
        except CheckpointError as error:
            raise CheckpointError(f"{directory}: {error}") from error

    def save(self, directory: Path) -> None:
        """Write the tokenizer's files, the chat template included."""
        self._tokenizer.save_pretrained(str(directory))

    @property
    def vocab_size(self) -> int:
        """Number of entries, added tokens included (the model's embedding may have more rows)."""
        return int(self._full.get_vocab_size(with_added_tokens=True))

    @property
    def chat_template(self) -> str:
        """Source of the chat template."""
        return str(self._tokenizer.get_chat_template())

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, control tokens shown."""
        return str(self._full.decode(list(ids), skip_special_tokens=False))

    def encode_plain(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, all of it plain: control-token strings in it stay text. No token is put around it.

        Raises:
            RequestError: a text is not valid Unicode, is longer than can be tokenized, or yields a control token.
        """
        pieces, owners = [], []
        for index, text in enumerate(texts):
            for piece in _cut(text) if self._cuts_are_safe else [text]:
                pieces.append(piece)
                owners.append(index)
        ids: list[list[int]] = [[] for _ in texts]
        for owner, piece_ids in zip(owners, self._encode(pieces), strict=True):
            if self._forbidden_ids and not self._forbidden_ids.isdisjoint(piece_ids):
                raise _refusal("the text contains a control token of the model", "control_token")
            ids[owner] += piece_ids
        return ids

    def encode_prompts(self, shared: str, tails: Sequence[str]) -> tuple[list[int], list[list[int]]]:
        """Encode `shared + tail` for every tail and `shared` only once.

        Where this tokenizer's cuts are safe, the split between the two results depends on `shared` alone.

        Returns:
            `(shared_ids, tail_ids)` with `shared_ids + tail_ids[i] == encode_plain([shared + tails[i]])[0]`.

        Raises:
            RequestError: as `encode_plain`.
        """
        if self._cuts_are_safe:
            found = _LAST_CUT.match(shared)
            cut = found.end() if found else 0
            first, *rest = self.encode_plain([shared[:cut], *(shared[cut:] + tail for tail in tails)])
            return first, rest
        first, *rest = self.encode_plain([shared, *(shared + tail for tail in tails)])
        length = len(os.path.commonprefix([first, *rest]))
        return first[:length], [ids[length:] for ids in rest]

    def encode_chat(self, shared: str, tails: Sequence[str]) -> tuple[list[int], list[list[int]]]:
        """Like `encode_prompts`, for whole chat prompts whose user messages are `shared + tail`.

        Returns:
            `(shared_ids, tail_ids)`; `shared_ids + tail_ids[i]` is the prompt that the chat template gives.
        """
        frame = self.frame
        if frame.strips_right:
            # What is whitespace at the end of `shared` is at the end of the message where the tail is blank.
            kept = shared.rstrip()
            tails = [(shared[len(kept) :] + tail).rstrip() for tail in tails]
            shared = kept
        if frame.strips_left:
            shared = shared.lstrip()
            if not shared:
                tails = [tail.lstrip() for tail in tails]
        shared_ids, tail_ids = self.encode_prompts(frame.head_text + shared, [tail + frame.tail_text for tail in tails])
        return [*frame.head_ids, *shared_ids], [[*ids, *frame.tail_ids] for ids in tail_ids]

    def labels(self, count: int) -> list[Label]:
        """The first `count` labels: A-Z, a-z, 0-9, then printable tokens in id order; each a single, distinct token.

        Raises:
            RequestError: `count` is more than there are (at most 255).
        """
        assert count >= 0
        labels = self._all_labels()
        if count > len(labels):
            raise _refusal(f"{count} options, but there are only {len(labels)} labels", "too_many_options")
        return labels[:count]

    def num_labels(self) -> int:
        """How many labels this tokenizer has, at most 255."""
        return len(self._all_labels())

    def _all_labels(self) -> list[Label]:
        with self._lock:
            if self._labels is None:
                self._labels = self._find_labels()
            return self._labels

    def _find_labels(self) -> list[Label]:
        context = self.frame.label_context
        base = self._encode([context])[0]
        labels: dict[int, Label] = {}
        for texts in self._label_candidates():
            for text, ids in zip(texts, self._encode([context + text for text in texts]), strict=True):
                if len(ids) == len(base) + 1 and ids[:-1] == base and ids[-1] not in self._control_ids:
                    labels.setdefault(ids[-1], Label(text, ids[-1]))
            if len(labels) >= MAX_LABELS:
                break
        return list(labels.values())[:MAX_LABELS]

    def _label_candidates(self) -> Iterator[list[str]]:
        yield [*string.ascii_uppercase, *string.ascii_lowercase, *string.digits]
        size = self._plain.get_vocab_size(with_added_tokens=False)
        for start in range(0, size, 512):
            ids = [i for i in range(start, min(start + 512, size)) if self._plain.id_to_token(i) is not None]
            texts = [str(self._plain.decode([i], skip_special_tokens=False)) for i in ids]
            # isprintable() lets the blank pass, as the only kind of whitespace.
            yield [text for text in texts if text and text.isprintable() and not {" ", "\ufffd"} & set(text)]

    def _encode(self, texts: list[str]) -> list[list[int]]:
        longest = max(map(len, texts), default=0)
        if longest > _MAX_UNCUT:
            message = f"a run of {longest} characters is too long to tokenize (at most {_MAX_UNCUT})"
            raise _refusal(message, "text_too_long")
        try:
            return [e.ids for e in self._plain.encode_batch_fast(texts, add_special_tokens=False)]
        except TypeError:
            # The only strings that `tokenizers` cannot take.
            raise _refusal("the text is not valid Unicode: it contains a lone surrogate", "string_unicode") from None

    def _make_frame(self) -> ChatFrame:
        head, tail, strips_left, strips_right = _split_template(self._render)
        before = self._full.encode(head, add_special_tokens=False)
        after = self._full.encode(tail, add_special_tokens=False)
        controls = [i for i, token in enumerate(before.ids) if token in self._control_ids]
        head_end = controls[-1] + 1 if controls else 0
        head_text = head[before.offsets[head_end - 1][1] :] if controls else head
        controls = [i for i, token in enumerate(after.ids) if token in self._control_ids]
        tail_start = controls[0] if controls else len(after.ids)
        tail_text = tail[: after.offsets[tail_start][0]] if controls else tail
        # Without a control token the answer follows the content, which ends a sentence.
        label_context = tail[after.offsets[controls[-1]][1] :] if controls else "." + tail
        return ChatFrame(
            head_ids=tuple(before.ids[:head_end]),
            head_text=head_text,
            tail_text=tail_text,
            tail_ids=tuple(after.ids[tail_start:]),
            label_context=label_context,
            strips_left=strips_left,
            strips_right=strips_right,
        )

    def _check_frame(self) -> None:
        for content in _NEIGHBOURS:
            shared, (rest,) = self.encode_chat("", [content])
            if shared + rest != self._full.encode(self._render(content), add_special_tokens=False).ids:
                raise CheckpointError("the tokenizer's control tokens change the text next to them")

    def _render(self, content: str) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                [{"role": "user", "content": content}],
                add_generation_prompt=True,
                enable_thinking=False,
                tokenize=False,
            )
        except Exception as error:  # noqa: BLE001 - a template is a program and can raise anything
            raise CheckpointError(f"no usable chat template: {_first_line(error)}") from error
        return str(text)


def _splits_at_safe_boundaries(tokenizer: Tokenizer) -> bool:
    r"""Whether encoding `a + b` is encoding `a`, then `b`, for every cut that `_SAFE` finds.

    A cut is between a letter and an ASCII character that is no letter (or a Chinese comma or full stop), or between a
    digit and an ASCII character that is no digit. It holds if each stage works on both sides alone:

    * Normalizer: none, or NFC. What follows the cut is a starter that never combines with what precedes it, so NFC
      of the whole is NFC of the parts, and the listed letters and digits stay what they are.
    * Pre-tokenizer: one of four regexes (or the GPT-2 one inside ByteLevel), matched from left to right. In each, a
      match that contains a letter ends with its run of letters (and marks), and one that contains a digit ends within
      its run of digits; so a match ends at the cut. The only look-ahead, `\s+(?!\S)`, is behind whitespace and cannot
      see past the letter; there is no look-behind, so the next match starts as at the start of a text.
    * Byte-level BPE without dropout: it works on one match at a time. A blank put before each text would differ.
    """
    model = tokenizer.model
    if not isinstance(model, BPE) or model.dropout or model.continuing_subword_prefix or model.end_of_word_suffix:
        return False
    if _settings(tokenizer.normalizer) not in (None, {"type": "NFC"}):
        return False
    steps = _settings(tokenizer.pre_tokenizer) or {}
    *splits, last = steps.get("pretokenizers") or [steps]
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space") is not False:
        return False
    if not splits:
        return last.get("use_regex", True) is True
    first, *more = splits
    known = (
        first.get("type") == "Split"
        and first.get("behavior") == "Isolated"
        and first.get("invert") is False
        and first.get("pattern", {}).get("Regex") in _KNOWN_SPLITS
    )
    return known and not more


def _settings(part: Any) -> Any:
    """The JSON of a normalizer or pre-tokenizer, None for none."""
    return None if part is None else json.loads(part.__getstate__())


def _cut(text: str) -> list[str]:
    """`text` in pieces of about `_PIECE` characters, cut at safe boundaries only (longer where there are none)."""
    pieces = []
    start = 0
    while len(text) - start > _PIECE:
        # One character more than the piece: a boundary is seen by what follows it.
        found = _LAST_CUT.match(text, start, start + _PIECE + 1)
        if found is None or found.end() == start:
            found = _NEXT_CUT.search(text, start + _PIECE)
        if found is None:
            break
        pieces.append(text[start : found.end()])
        start = found.end()
    pieces.append(text[start:])
    return pieces


def _split_template(render: Callable[[str], str]) -> tuple[str, str, bool, bool]:
    """Find `(head, tail, strips_left, strips_right)` around the user's message and check that it is only copied."""
    parts = render(_SENTINEL).split(_SENTINEL)
    if len(parts) != 2:
        raise CheckpointError(f"the chat template shows the user's message {len(parts) - 1} times, not once")
    head, tail = parts
    strips_left = render(" \n" + _SENTINEL) == head + _SENTINEL + tail
    strips_right = render(_SENTINEL + " \n") == head + _SENTINEL + tail
    for content in _COPIED:
        kept = content.lstrip() if strips_left else content
        kept = kept.rstrip() if strips_right else kept
        if render(content) != head + kept + tail:
            raise CheckpointError("the chat template changes the user's message or depends on it")
    return head, tail, strips_left, strips_right


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


def _refusal(message: str, kind: str) -> RequestError:
    return RequestError([{"loc": ["body"], "msg": message, "type": kind}])
