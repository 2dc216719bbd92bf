"""Where in a request's trunk later requests may want to resume."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flide.errors import RequestError
from flide.runtime.compact import Compact
from flide.runtime.format import DecisionFormat, EncodedRequest
from flide.runtime.prompt import render_value
from flide.runtime.request import DecisionRequest, Value
from flide.runtime.tokenizer import PromptTokenizer

WINDOW = 256  # characters before a place that are read to find its token: a safe boundary is among them
LONG = 1024  # characters from there to the end that are rather not encoded again
NEAR = 32  # tokens: of two places that are so close the first is enough, and the beginning of a trunk needs none

_PROBE = "\x00"  # a state of its own, to see what a format puts behind one


@dataclass(frozen=True, slots=True)
class Reuse(Compact):
    """What of a request is worth keeping, and for whom.

    Attributes:
        state_tokens: tokens that depend on the state and the format alone.
        saves: lengths, ascending, after which to keep a checkpoint; at most four, none larger than ``state_tokens``.
        salt: of who asks.
    """

    state_tokens: int = 0
    saves: tuple[int, ...] = ()
    salt: str | None = None

    @classmethod
    def of(cls, request: DecisionRequest, encoded: EncodedRequest, format: DecisionFormat) -> Reuse:
        """By default the end of the state, where one that grows still agrees, and the end of all messages but the last.

        The places are those of safe boundaries: what follows them does not change the tokens before them. With a
        tokenizer that has none they are about there. No answer depends on that, only how often requests can resume.
        """
        end = len(encoded.shared)
        if request.checkpoint is False or not end:
            return cls(end, (), request.cache_salt)
        places = _places(request, encoded.text, format)
        try:
            found = set(_tokens_before(places, encoded, format.tokenizer, request.cache_salt))
        except RequestError:  # of text that this format reads as control tokens, and that is none by itself
            found = set()
        saves = sorted(place for place in found if NEAR < place < end)
        if end - (saves[-1] if saves else 0) > NEAR:
            saves.append(end)
        return cls(end, tuple(saves), request.cache_salt)


def _places(request: DecisionRequest, text: str, format: DecisionFormat) -> list[int]:
    """Characters of the state's text that stay when the state grows, or its last message is another one."""
    try:
        behind = format.state_text(_PROBE).rpartition(_PROBE)[2]
    except Exception:  # noqa: BLE001 - a format of a user's own, whose states are of another kind
        return []
    body = text.removesuffix(behind)
    if len(body) == len(text) and behind:
        return []
    state, hint = request.state, None if request.checkpoint is True else request.checkpoint
    if isinstance(state, str):
        first = len(body) - len(state)
        return [len(body)] if hint is None or hint >= len(state) or first < 0 else [first + hint, len(body)]
    places = [len(body.rstrip('"]}'))]
    for sort_keys in (False, True):  # as formats write JSON
        messages, closing = _messages(state, sort_keys)
        behind = _json(messages[-1], sort_keys) + closing if messages else ""
        # Only ends are compared: to search for a message would take the product of two lengths that users choose.
        if not messages or not body.endswith(behind):
            continue
        if len(messages) > 1:
            places.append(len(body) - len(behind))
        if hint is not None and 0 < hint < len(messages):
            before, whole = (len(_json(x, sort_keys)) for x in (messages[:hint], messages))
            places.append(len(body) - len(closing) + 1 - whole + before)
        break
    return [place for place in places if place > 0]


def _messages(state: Value, sort_keys: bool) -> tuple[list[Value], str]:
    """A list, also the last entry of an object, and what is written behind its last message."""
    if isinstance(state, dict) and state:
        last = state[max(state)] if sort_keys else list(state.values())[-1]
        return (last, "]}") if isinstance(last, list) else ([], "")
    return (state, "]") if isinstance(state, list) else ([], "")


def _json(value: Value, sort_keys: bool) -> str:
    """A value as it is written inside of others."""
    return render_value([value], sort_keys=sort_keys)[1:-1]


def _tokens_before(
    places: Sequence[int], encoded: EncodedRequest, tokenizer: PromptTokenizer, salt: str | None
) -> Iterable[int]:
    """How many of the shared tokens stand before each place of the text, at its last safe boundary."""
    text, shared, frame = encoded.text, encoded.shared, tokenizer.frame
    for place in places:
        begin = max(0, place - WINDOW)
        if len(text) - begin > LONG:
            # Nearly all of it is known by now (``PrefixIds``). Where control tokens are read, ids may be others.
            before = frame.head_text + (text[:place].lstrip() if frame.strips_left else text[:place])
            ids = array("i", frame.head_ids) + tokenizer.encode_prompts(before, [], salt=salt)[0]
            if shared[: len(ids)] == ids:
                yield len(ids)
                continue
        window = text[begin:].rstrip() if frame.strips_right else text[begin:]
        count = _count(text[begin:place], tokenizer, salt)
        if count:
            yield len(shared) - _count(window, tokenizer, salt) + count


def _count(text: str, tokenizer: PromptTokenizer, salt: str | None) -> int:
    """Tokens up to the last safe boundary."""
    return len(tokenizer.encode_prompts(text, [""], salt=salt)[0])


__all__ = ["Reuse"]
