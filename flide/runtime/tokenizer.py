"""Text to token ids: user text that never becomes a control token, a shared state encoded once, labels."""

from __future__ import annotations

import logging
import os
import re
import string
import threading
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from flide.errors import CheckpointError, RequestError
from flide.runtime.chat_frame import NEIGHBOURS, ChatFrame
from flide.runtime.prefix_ids import PrefixIds
from flide.runtime.questionnaire import LONGEST_SEAM, Seam, Tails
from flide.runtime.text_cuts import cuts_of
from flide.runtime.word_ids import TextIds, WordIds

__all__ = ["MAX_LABELS", "Label", "PromptTokenizer"]

logger = logging.getLogger("flide.tokenizer")

MAX_LABELS = 255

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")

# The regex engine of ``tokenizers`` gives up (by a panic, not an error) inside a run of about ten million blanks.
_MAX_UNCUT = 4_000_000


@dataclass(frozen=True, slots=True)
class Label:
    """An option's name in a prompt, a single token where the answer is read."""

    text: str
    id: int


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
        contents = sorted((token.content for token in added.values() if token.content), key=len, reverse=True)
        self._added = re.compile("|".join(map(re.escape, contents))) if contents else None
        self._longest_added = max(map(len, contents), default=0)
        self._cuts = cuts_of(plain)
        if self._cuts is None:
            logger.info("unknown pre-tokenizer: every prompt is encoded whole, which is exact but slower")
        self._words = WordIds(self._encode, self._may_be_text)
        self._texts = TextIds()
        self._beginnings = PrefixIds(self._cuts, again=True) if self._cuts else None
        self._lock = threading.Lock()
        self._labels: list[Label] | None = None
        if not self._encode(["a"])[0]:
            raise CheckpointError("the tokenizer has no vocabulary")
        self.frame = ChatFrame.probe(self._render, full, self._control_ids)
        self._check_frame()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._tokenizer,)

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

    def max_prompt_id(self) -> int:
        """Largest token id that a prompt can hold: the model needs more embeddings than that."""
        ids = {*self._plain.get_vocab(with_added_tokens=False).values()} - self._control_ids
        return max(*ids, *self.frame.head_ids, *self.frame.tail_ids)

    def check_vocabulary(self, size: int) -> None:
        """Raise CheckpointError unless a model with so many embeddings has one for every token of a prompt."""
        if (largest := self.max_prompt_id()) >= size:
            raise CheckpointError(
                f"the tokenizer does not belong to the model: it yields token {largest}, "
                f"and the model's vocabulary has {size}"
            )

    @property
    def chat_template(self) -> str:
        """Source of the chat template."""
        return str(self._tokenizer.get_chat_template())

    @property
    def definition(self) -> str:
        """All that decides how a prompt is tokenized, as text."""
        return self._full.to_str() + self.chat_template

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``, control tokens shown."""
        return str(self._full.decode(list(ids), skip_special_tokens=False))

    def encode_plain(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, all of it plain: control-token strings in it stay text. No token is put around it.

        Raises:
            RequestError: a text is not valid Unicode, is longer than can be tokenized, or yields a control token.
        """
        return [ids.tolist() for ids in self._encode_pieces([[text] for text in texts])]

    def _encode_pieces(self, texts: Sequence[Sequence[str]]) -> list[array[int]]:
        """``encode_plain`` of each piece of texts that are given in pieces, one after the other; int32."""
        ids: list[array[int]] = []
        unknown, owners = [], []
        for pieces in texts:
            found = self._words.ids(pieces) if self._cuts else [None] * len(pieces)
            for piece, known in zip(pieces, found, strict=True):
                for part in () if known is not None else self._cuts.cut(piece) if self._cuts else (piece,):
                    unknown.append(part)
                    owners.append(len(ids))
                ids.append(array("i") if known is None else known)
        for owner, part_ids in zip(owners, self._encode(unknown) if unknown else (), strict=True):
            if not self._may_be_text(part_ids):
                raise _refusal("the text contains a control token of the model", "control_token")
            ids[owner].extend(part_ids)
        return ids

    def _may_be_text(self, ids: Sequence[int]) -> bool:
        return not self._forbidden_ids or self._forbidden_ids.isdisjoint(ids)

    def encode_prompts(
        self, shared: str, tails: Sequence[str], *, salt: str | None = None
    ) -> tuple[array[int], list[array[int]]]:
        """Encode ``shared + tail`` for every tail, and ``shared`` only once.

        Where this tokenizer's cuts are safe, the split between the two results depends on ``shared`` alone, and what
        ``shared`` has in common with two earlier ones is not encoded again.

        Args:
            shared, tails: texts, all of them plain.
            salt: what was encoded with another one is encoded again, so that no time tells of it.

        Returns:
            ``(shared_ids, tail_ids)``: int32 ids that the prompts share, and those of each behind them, which must stay
            as they are, such that ``[*shared_ids, *tail_ids[i]] == encode_plain([shared + tails[i]])[0]``.

        Raises:
            RequestError: as ``encode_plain``.
        """
        if self._cuts and self._beginnings:
            cut = self._cuts.last_cut(shared)
            beginning = self._beginnings.find(shared[:cut], salt)
            tails = [shared[cut:] + tail for tail in tails]
            known = {tail: found for tail in tails if (found := self._texts.get(tail, salt)) is not None}
            new = [tail for tail in dict.fromkeys(tails) if tail not in known]
            count = len(beginning.pieces)
            ids = self._encode_pieces([beginning.pieces, *([tail] for tail in new)])
            for tail, encoded in zip(new, ids[count:], strict=True):
                known[tail] = encoded
                self._texts.keep(tail, salt, encoded)
            return self._beginnings.keep(beginning, ids[:count]), [known[tail] for tail in tails]
        first, *rest = self.encode_plain([shared, *(shared + tail for tail in tails)])
        # An unknown character can swallow what follows it; even so every tail keeps a token, if it can.
        length = min(len(os.path.commonprefix([first, *rest])), max(0, min(map(len, rest), default=0) - 1))
        return array("i", first[:length]), [array("i", ids[length:]) for ids in rest]

    def encode_chat(
        self,
        shared: str,
        tails: Sequence[str],
        *,
        escape: bool = True,
        salt: str | None = None,
        kept: dict[Seam, Tails] | None = None,
    ) -> tuple[array[int], list[array[int]]]:
        """Like ``encode_prompts``, for whole chat prompts whose user messages are ``shared + tail``.

        Args:
            shared, tails, salt: as ``encode_prompts``.
            escape: keep what looks like a control token text. False tokenizes the rendered prompts as strings, so that
                users' text can hold control tokens.
            kept: ids of these very tails, by what they are behind.

        Returns:
            ``(shared_ids, tail_ids)``; ``[*shared_ids, *tail_ids[i]]`` is the prompt that the chat template gives.
        """
        if not escape and tails and self._holds_added_tokens(shared, tails):
            return self._encode_rendered(shared, tails)
        frame, front = self.frame, ""
        if frame.strips_right:
            # What is whitespace at the end of ``shared`` is at the end of the message where the tail is blank.
            stripped = shared.rstrip()
            front, shared = shared[len(stripped) :], stripped
        if frame.strips_left:
            shared = shared.lstrip()
        is_first = frame.strips_left and not shared  # what a tail begins with is what the message does
        shared = frame.head_text + shared
        head = array("i", frame.head_ids)
        seam: Seam | None = None
        if kept is not None and self._cuts and self._beginnings and not is_first:
            cut = self._cuts.last_cut(shared)
            if len(front) + len(shared) - cut <= LONGEST_SEAM:
                seam = front, shared[cut:], salt
            if seam in kept:
                beginning = self._beginnings.find(shared[:cut], salt)
                return head + self._beginnings.keep(beginning, self._encode_pieces([beginning.pieces])), kept[seam]
        if frame.strips_right:
            tails = [(front + tail).rstrip() for tail in tails]
        if is_first:
            tails = [tail.lstrip() for tail in tails]
        shared_ids, tail_ids = self.encode_prompts(shared, [tail + frame.tail_text for tail in tails], salt=salt)
        behind = array("i", frame.tail_ids)
        return head + shared_ids, Tails([ids + behind for ids in tail_ids], seam)

    def _holds_added_tokens(self, shared: str, tails: Sequence[str]) -> bool:
        """Whether a message, with the plain text that the template puts next to it, holds the text of an added token.
        Without one the rendered prompt is tokenized as the plain text that it is."""
        if self._added is None:
            return False
        normalizer = self._plain.normalizer
        # A token may begin in one text and end in the next.
        seam = shared[-self._longest_added :]
        texts = [self.frame.head_text + shared, *(seam + tail + self.frame.tail_text for tail in tails)]
        if normalizer is not None:
            texts += [normalizer.normalize_str(text) for text in texts if not text.isascii() and _is_unicode(text)]
        return any(self._added.search(text) for text in texts)

    def _encode_rendered(self, shared: str, tails: Sequence[str]) -> tuple[array[int], list[array[int]]]:
        """Whole prompts as the tokenizer reads their strings, split where the shared text ends or tokens differ."""
        try:
            rendered = [self._render(shared + tail) for tail in (*tails, "")]
        except CheckpointError as error:
            raise _refusal("the chat template refuses the text", "value_error") from error
        *prompts, ends = _encode_batch(self._full, rendered)
        length = len(os.path.commonprefix([*prompts, ends]))
        length = min(length, min(map(len, prompts)) - 1)
        return array("i", prompts[0][:length]), [array("i", prompt[length:]) for prompt in prompts]

    def labels(self, count: int) -> list[Label]:
        """The first ``count`` labels: A-Z, a-z, 0-9, then printable tokens in id order; each a single, distinct token.

        Raises:
            RequestError: ``count`` is more than there are (at most 255).
        """
        assert count >= 0
        labels = self._all_labels()
        if count > len(labels):
            raise _refusal(f"{count} options, but there are only {len(labels)} labels", "too_many_options")
        return labels[:count]

    def answer_ids(self, texts: Sequence[str]) -> list[int]:
        """The first token of each text where an answer is read.

        Raises:
            CheckpointError: two texts begin with the same token, or one does not begin with a token of its own.
        """
        context = self.frame.label_context
        base = self._encode([context])[0]
        encoded = self._encode([context + text for text in texts])
        ids = [tokens[len(base)] for tokens in encoded if len(tokens) > len(base) and tokens[: len(base)] == base]
        if len(set(ids)) < len(texts):
            raise CheckpointError(f"the tokenizer does not tell {' and '.join(texts)} apart by their first token")
        return ids

    def control_ids(self, texts: Sequence[str]) -> list[int]:
        """The ids of control tokens, each given by its text.

        Raises:
            CheckpointError: the tokenizer has no such token.
        """
        ids = {token.content: i for i, token in self._full.get_added_tokens_decoder().items()}
        missing = [text for text in texts if text not in ids]
        if missing:
            raise CheckpointError(f"the tokenizer has no control token {missing[0]!r}")
        return [ids[text] for text in texts]

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
        return _encode_batch(self._plain, texts)

    def _check_frame(self) -> None:
        for content in NEIGHBOURS:
            shared, (rest,) = self.encode_chat("", [content])
            if [*shared, *rest] != self._full.encode(self._render(content), add_special_tokens=False).ids:
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


def _encode_batch(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    longest = max(map(len, texts), default=0)
    if longest > _MAX_UNCUT:
        message = f"a run of {longest} characters is too long to tokenize (at most {_MAX_UNCUT})"
        raise _refusal(message, "text_too_long")
    try:
        return [e.ids for e in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
    except TypeError:
        # The only strings that ``tokenizers`` cannot take.
        raise _refusal("the text is not valid Unicode: it contains a lone surrogate", "string_unicode") from None


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


def _refusal(message: str, kind: str) -> RequestError:
    return RequestError([{"loc": ["body"], "msg": message, "type": kind}])
