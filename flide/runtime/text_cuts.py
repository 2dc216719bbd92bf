"""Where a text can be cut so that encoding the pieces is encoding the whole: see ``cuts_of``."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import BPE

__all__ = ["Cuts", "cuts_of", "ends_a_word", "is_cut_by_blanks", "words"]

# Characters of a piece of a text, where it can be cut, and how many pieces are enough: starting one costs little (a
# hundredth of encoding the shortest), and even a short text should not have to wait for a single core.
_SHORTEST, _LONGEST, _ENOUGH = 512, 4096, 32

# Letters (\p{L}) that NFC leaves alone: Latin, Greek, Cyrillic, kana, Chinese, Hangul; all older than any Unicode table
# in use. What may follow them: ASCII without letters, the comma and the full stops of Chinese and Japanese.
_LETTERS = (
    r"A-Za-z\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u024f\u0391-\u03a1\u03a3-\u03a9\u03b1-\u03c9\u0410-\u044f"
    r"\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3"
)
_BLANK = "\u2581"


@dataclass(frozen=True)
class Cuts:
    """Safe boundaries of a kind of tokenizers.

    Attributes:
        safe: regex that matches, emptily, at each of them.
    """

    safe: str

    @cached_property
    def next(self) -> re.Pattern[str]:
        """Finds the next boundary."""
        return re.compile(self.safe)

    @cached_property
    def last(self) -> re.Pattern[str]:
        """Matches up to the last boundary."""
        return re.compile(rf".*(?:{self.safe})", re.DOTALL)

    def cut(self, text: str) -> list[str]:
        """``text`` in pieces of about equal length, cut at safe boundaries only (longer where there are none)."""
        most = min(_LONGEST, max(_SHORTEST, len(text) // _ENOUGH))
        pieces = []
        start = 0
        while len(text) - start > most:
            # One character more than the piece: a boundary is seen by what follows it.
            found = self.last.match(text, start, start + most + 1)
            if found is None or found.end() == start:
                found = self.next.search(text, start + most)
            if found is None:
                break
            pieces.append(text[start : found.end()])
            start = found.end()
        pieces.append(text[start:])
        return pieces

    def last_cut(self, text: str) -> int:
        """Length of ``text`` up to its last safe boundary, 0 if there is none."""
        found = self.last.match(text)
        return found.end() if found else 0


# Between a letter and an ASCII character that is no letter (or a Chinese comma or full stop), or between a digit and an
# ASCII character that is no digit.
AFTER_WORDS = Cuts(rf"(?<=[{_LETTERS}])(?=[\x00-@\[-`{{-\x7f\u3001\u3002\uff0c])|(?<=[0-9])(?=[\x00-/:-\x7f])")
# Before a blank that follows something else.
BEFORE_BLANKS = Cuts(rf"(?<=[^ {_BLANK}])(?=[ {_BLANK}])")
# What a blank behind it can be cut off from, whatever the kind: no whitespace, and NFC leaves it alone.
_BEFORE_A_BLANK = rf"!-~{_LETTERS}"
_WORD_END = re.compile(f"[{_BEFORE_A_BLANK}]")
_OTHER_BLANK = re.compile(rf"[^{_BEFORE_A_BLANK}](?: |\Z)")
# Pieces that end at every ASCII letter before a blank, which both kinds permit, and at the end of the text.
_WORDS = re.compile(r" *[A-Za-z]+(?= )|.+?[A-Za-z](?= )|.+", re.DOTALL)

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


def cuts_of(tokenizer: Tokenizer) -> Cuts | None:
    """Boundaries at which encoding ``a + b`` is encoding ``a``, then ``b``; None for a tokenizer of no known kind."""
    if _splits_after_words(tokenizer):
        return AFTER_WORDS
    return BEFORE_BLANKS if _merges_no_blanks(tokenizer) else None


def _splits_after_words(tokenizer: Tokenizer) -> bool:
    r"""Whether ``AFTER_WORDS`` is safe. It is if each stage works on both sides alone:

    * Normalizer: none, or NFC. What follows the cut is a starter that never combines with what precedes it, so NFC
      of the whole is NFC of the parts, and the listed letters and digits stay what they are.
    * Pre-tokenizer: one of four regexes (or the GPT-2 one inside ByteLevel), matched from left to right. In each, a
      match that contains a letter ends with its run of letters (and marks), and one that contains a digit ends within
      its run of digits; so a match ends at the cut. The only look-ahead, ``\s+(?!\S)``, is behind whitespace and cannot
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


def _merges_no_blanks(tokenizer: Tokenizer) -> bool:
    """Whether ``BEFORE_BLANKS`` is safe, as in Gemma's tokenizers: a BPE over whole texts in which U+2581 stands for a
    blank. A merge across the boundary would make an entry in which U+2581 follows something else; there is none.

    What is in no vocabulary becomes bytes, or is fused with its like; U+2581 is in the vocabulary.
    """
    model = tokenizer.model
    if not isinstance(model, BPE) or model.dropout or model.continuing_subword_prefix or model.end_of_word_suffix:
        return False
    if model.ignore_merges:  # a whole text that is an entry would be it
        return False
    if _settings(tokenizer.normalizer) != {"type": "Replace", "pattern": {"String": " "}, "content": _BLANK}:
        return False
    no_split = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
    if _settings(tokenizer.pre_tokenizer) not in (None, no_split):  # no blank is left to split at
        return False
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    crossing = re.compile(f"[^{_BLANK}]{_BLANK}")
    return _BLANK in vocabulary and not any(map(crossing.search, vocabulary))


def _settings(part: Any) -> Any:
    """The JSON of a normalizer or pre-tokenizer, None for none."""
    return None if part is None else json.loads(part.__getstate__())


def ends_a_word(text: str) -> bool:
    r"""Whether a blank behind ``text`` is a safe boundary.

    In all regexes above blanks stand at the beginning of a match, or among whitespace alone: none goes from what is no
    whitespace on to a blank. Of the look-ahead ``\s+(?!\S)`` the whitespace would be before the text's last character.
    """
    return _WORD_END.fullmatch(text, len(text) - 1) is not None


def is_cut_by_blanks(text: str) -> bool:
    """Whether all blanks in ``text`` are safe boundaries but one at its beginning, and one behind it would be."""
    return bool(text) and _OTHER_BLANK.search(text) is None


def words(text: str) -> list[str]:
    """``text`` cut at many safe boundaries: mostly words with what is before them."""
    return _WORDS.findall(text)
