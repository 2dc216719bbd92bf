"""A head beside a model: ``head.json`` says what it is, ``head.safetensors`` holds its parameters.

    {"format_version": 1, "kind": "linear", "settings": {"labels": ["refund", "exchange"]}, "base_model": "/models/a"}

``base_model`` stands where the directory holds no model of its own: a path or a Hub id.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from flide.errors import CheckpointError
from flide.heads.head import Head, head_kind
from flide.heads.kinds import OptionHead
from flide.stored_json import check_version, read_json_file, write_json_file

HEAD_FILE = "head.json"
WEIGHTS_FILE = "head.safetensors"
FORMAT_VERSION = 1


def read_head_file(directory: Path) -> dict[str, Any] | None:
    """What ``head.json`` says, checked as far as the file goes; None where there is none.

    Raises:
        CheckpointError: it cannot be read or is of a newer format.
    """
    try:
        content = read_json_file(directory / HEAD_FILE)
    except FileNotFoundError:
        return None
    check_version(HEAD_FILE, content, FORMAT_VERSION)
    assert isinstance(content, dict)
    settings, base = content.get("settings", {}), content.get("base_model")
    if not isinstance(content.get("kind"), str) or not isinstance(settings, dict):
        raise CheckpointError(f"{HEAD_FILE} does not say what kind of head it is")
    if base is not None and (not isinstance(base, str) or not base):
        raise CheckpointError(f"{HEAD_FILE}: base_model should be a path or a Hub id")
    return content


def load_head(directory: Path, hidden_size: int, *, device: torch.device | str = "cpu") -> Head | None:
    """The head stored beside a model, in eval mode; None for the letters of ``lm_head``, which need no storing.

    Raises:
        CheckpointError: the files cannot be read, are of a newer format or do not fit the model.
    """
    content = read_head_file(directory)
    if content is None or (cls := head_kind(content["kind"])) is OptionHead:
        return None
    try:
        head = cls.from_settings(content.get("settings", {}), hidden_size)
    except (ValueError, TypeError, KeyError) as error:  # a user's head may rely on its settings
        raise CheckpointError(f"{HEAD_FILE} does not describe a {cls.kind} head: {error}") from error
    try:
        tensors = load_file(directory / WEIGHTS_FILE)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read {WEIGHTS_FILE}: {error}") from error
    expected = head.state_dict()
    if {k: v.shape for k, v in tensors.items()} != {k: v.shape for k, v in expected.items()}:
        raise CheckpointError(f"{WEIGHTS_FILE} does not hold the parameters of a {cls.kind} head of this model")
    if not all(x.is_floating_point() for x in tensors.values()):
        raise CheckpointError(f"{WEIGHTS_FILE} holds numbers that are not of a float type")
    head.load_state_dict(tensors)
    return head.to(device).eval()


def save_head(head: Head | None, directory: Path, *, base_model: str | None = None) -> None:
    """Store a head beside a model; its JSON file comes last.

    Args:
        head: None for the letters of ``lm_head``.
        directory: an existing one.
        base_model: path or Hub id, where the directory will hold no model of its own.

    Raises:
        OSError: a file cannot be written.
    """
    kind = OptionHead.kind if head is None else head.kind
    settings = {} if head is None else head.settings()
    content = {"format_version": FORMAT_VERSION, "kind": kind, "settings": settings}
    if base_model is not None:
        content["base_model"] = base_model
    tensors = {} if head is None else {k: v.detach().cpu().contiguous().clone() for k, v in head.state_dict().items()}
    weights = directory / WEIGHTS_FILE
    if tensors:
        try:
            save_file(tensors, weights, metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(f"cannot write {weights}: {error}") from error
    else:
        weights.unlink(missing_ok=True)
    write_json_file(directory / HEAD_FILE, content)


__all__ = ["HEAD_FILE", "WEIGHTS_FILE", "load_head", "read_head_file", "save_head"]
