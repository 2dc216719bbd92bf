"""What a model directory holds: a whole model, or what fine-tuning adds to one that lies elsewhere."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from flide.errors import CheckpointError
from flide.heads.files import HEAD_FILE, read_head_file
from flide.models.adapter import CONFIG_FILE as ADAPTER_FILE
from flide.models.adapter import read_adapter_config
from flide.models.weights import resolve_directory

UNFINISHED_FILE = "training_state.pt"  # the checkpoint of a training run, which ends by removing it
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


@dataclass(frozen=True, slots=True)
class ModelDirectory:
    """A model directory, and the one that its weights are in.

    Attributes:
        path: what was asked for.
        base: where config.json and the weights are: ``path``, or the model that an adapter or a head belongs to.
        has_adapter, has_head: whether ``path`` holds them.
    """

    path: Path
    base: Path
    has_adapter: bool
    has_head: bool

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        revision: str | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
    ) -> Self:
        """Find a model directory or Hub id, and what it builds upon.

        Raises:
            CheckpointError: it, or its base, cannot be had; it does not name its base; it is of a newer format.
        """
        directory = resolve_directory(path, revision=revision, cache_dir=cache_dir, local_files_only=local_files_only)
        if (directory / UNFINISHED_FILE).is_file() and not (directory / "config.json").is_file():
            raise CheckpointError(f"{directory} holds a training run that is not finished; --resume goes on with it")
        head = read_head_file(directory)
        has_adapter = (directory / ADAPTER_FILE).is_file()
        adapter = read_adapter_config(directory) if has_adapter else None
        if (directory / "config.json").is_file() or (adapter is None and head is None):
            return cls(directory, directory, has_adapter, head is not None)
        base: Any = (adapter or {}).get("base_model_name_or_path") or (head or {}).get("base_model")
        if not isinstance(base, str) or not base:
            raise CheckpointError(f"{directory} does not say which model it belongs to ({ADAPTER_FILE}, {HEAD_FILE})")
        pinned = (adapter or {}).get("revision")
        if pinned is not None and not isinstance(pinned, str):
            raise CheckpointError(f"{ADAPTER_FILE}: revision should be a name")
        try:
            base_directory = resolve_directory(
                base, revision=pinned, cache_dir=cache_dir, local_files_only=local_files_only
            )
        except CheckpointError as error:
            raise CheckpointError(f"the model that {directory} belongs to cannot be had: {error}") from error
        if (base_directory / ADAPTER_FILE).is_file():
            raise CheckpointError(f"{directory} belongs to {base_directory}, which has an adapter: merge that first")
        return cls(directory, base_directory, has_adapter, head is not None)

    @property
    def is_whole(self) -> bool:
        """Whether nothing beside the directory itself is needed, and nothing is folded into its weights."""
        return self.base == self.path and not self.has_adapter

    @property
    def tokenizer(self) -> Path:
        """Where the tokenizer is."""
        own = any((self.path / name).is_file() for name in TOKENIZER_FILES)
        return self.path if own else self.base


def lasting_name(path: str | Path) -> str:
    """A model's name that other working directories understand, too: an absolute path, or the Hub id."""
    directory = Path(path).expanduser()
    return os.path.abspath(directory) if directory.is_dir() else str(path)


__all__ = ["TOKENIZER_FILES", "ModelDirectory", "lasting_name"]
