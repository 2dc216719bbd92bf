"""Decision heads: from the hidden rows that a model reads out to the logits of each question's options."""

from flide.heads.files import load_head, save_head
from flide.heads.head import Head, OptionReads, register_head
from flide.heads.kinds import LinearHead, OpenJevHead, OptionHead, ScalarHead

__all__ = [
    "Head",
    "LinearHead",
    "OpenJevHead",
    "OptionHead",
    "OptionReads",
    "ScalarHead",
    "load_head",
    "register_head",
    "save_head",
]
