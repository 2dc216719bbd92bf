"""What a chat template puts around a user's message, found by rendering messages and comparing."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Self

from tokenizers import Tokenizer

from flide.errors import CheckpointError

__all__ = ["NEIGHBOURS", "ChatFrame"]

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
NEIGHBOURS = (
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
class ChatFrame:
    """What the chat template puts around the one user message, with an answer about to start and thinking off.

    A prompt is ``head_ids + encode(head_text + content + tail_text) + tail_ids``: plain text next to the content is
    encoded with it, because tokens cross that seam.

    Attributes:
        head_ids: tokens through the last control token before the content.
        head_text: plain text between that and the content.
        tail_text: plain text from the content to the next control token.
        tail_ids: tokens from that control token on.
        label_context: text after the last control token, where the answer is read.
        strips_left: the template drops whitespace (as ``str.lstrip`` does) before the content.
        strips_right: the same for whitespace after the content.
    """

    head_ids: tuple[int, ...]
    head_text: str
    tail_text: str
    tail_ids: tuple[int, ...]
    label_context: str
    strips_left: bool
    strips_right: bool

    @classmethod
    def probe(cls, render: Callable[[str], str], tokenizer: Tokenizer, control_ids: Collection[int]) -> Self:
        """Find the frame by rendering a few messages.

        Args:
            render: the text of a prompt, given the user's message.
            tokenizer: with its added tokens.
            control_ids: ids that plain text never yields.

        Raises:
            CheckpointError: the template is not a frame: it changes the message, repeats it or depends on it.
        """
        head, tail, strips_left, strips_right = _split_template(render)
        before = tokenizer.encode(head, add_special_tokens=False)
        after = tokenizer.encode(tail, add_special_tokens=False)
        controls = [i for i, token in enumerate(before.ids) if token in control_ids]
        head_end = controls[-1] + 1 if controls else 0
        head_text = head[before.offsets[head_end - 1][1] :] if controls else head
        controls = [i for i, token in enumerate(after.ids) if token in control_ids]
        tail_start = controls[0] if controls else len(after.ids)
        tail_text = tail[: after.offsets[tail_start][0]] if controls else tail
        # Without a control token the answer follows the content, which ends a sentence.
        label_context = tail[after.offsets[controls[-1]][1] :] if controls else "." + tail
        return cls(
            head_ids=tuple(before.ids[:head_end]),
            head_text=head_text,
            tail_text=tail_text,
            tail_ids=tuple(after.ids[tail_start:]),
            label_context=label_context,
            strips_left=strips_left,
            strips_right=strips_right,
        )


def _split_template(render: Callable[[str], str]) -> tuple[str, str, bool, bool]:
    """Find ``(head, tail, strips_left, strips_right)`` around the user's message and check that it is only copied."""
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
