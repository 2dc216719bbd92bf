"""What a model directory holds: a whole model, or what fine-tuning adds to one that lies elsewhere."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flide.errors import CheckpointError
from flide.heads.files import HEAD_FILE, load_head, read_head_file
from flide.heads.head import Head
from flide.models.adapter import CONFIG_FILE as ADAPTER_FILE
from flide.models.adapter import LowRank, read_adapter, read_adapter_config
from flide.models.config import read_config
from flide.models.forkable import check_readout
from flide.models.openjev import OpenJevPackage
from flide.models.pooled import PooledExport
from flide.models.weights import resolve_directory
from flide.runtime.calibration import load_temperatures

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
        package: what it is where others wrote it; None for a directory in transformers', PEFT's and our own files.
    """

    path: Path
    base: Path
    has_adapter: bool
    has_head: bool
    package: OpenJevPackage | PooledExport | None = None

    @classmethod
    def open(
        cls,
        path: str | Path | ModelDirectory,
        *,
        base: str | Path | None = None,
        revision: str | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
    ) -> ModelDirectory:
        """Find a model directory or Hub id, and what it builds upon. One that was found already stays what it is.

        Args:
            path: of the model.
            base: directory of what it builds upon, in place of the name it gives; or that very Hub id.
            revision, cache_dir, local_files_only: passed to the Hub. A base's revision is the one that was pinned.

        Raises:
            CheckpointError: it, or its base, cannot be had; it does not name its base; it is of a newer format, or a
                damaged package.
        """
        if isinstance(path, ModelDirectory):
            return path
        hub: dict[str, Any] = {"cache_dir": cache_dir, "local_files_only": local_files_only}
        directory = resolve_directory(path, revision=revision, **hub)
        if (directory / UNFINISHED_FILE).is_file() and not (directory / "config.json").is_file():
            raise CheckpointError(f"{directory} holds a training run that is not finished; --resume goes on with it")
        package = PooledExport.find(directory) or OpenJevPackage.find(directory)
        if isinstance(package, OpenJevPackage):
            found = _base_of(package.checkpoint, package.base_model, package.revision, base, hub)
            return cls(directory, found, package.has_adapter, True, package)
        head = read_head_file(directory)
        has_adapter = (directory / ADAPTER_FILE).is_file()
        adapter = read_adapter_config(directory) if has_adapter else None
        if package is not None or (directory / "config.json").is_file() or (adapter is None and head is None):
            if head is None and package is None:
                check_readout(directory)
            if base is not None:
                raise CheckpointError(f"{directory} builds upon no other model: base cannot be given")
            return cls(directory, directory, has_adapter, head is not None or package is not None, package)
        named: Any = (adapter or {}).get("base_model_name_or_path") or (head or {}).get("base_model")
        if base is None and (not isinstance(named, str) or not named):
            raise CheckpointError(f"{directory} does not say which model it belongs to ({ADAPTER_FILE}, {HEAD_FILE})")
        pinned = (adapter or {}).get("revision")
        if pinned is not None and not isinstance(pinned, str):
            raise CheckpointError(f"{ADAPTER_FILE}: revision should be a name")
        return cls(directory, _base_of(directory, named, pinned, base, hub), has_adapter, head is not None)

    def config(self) -> dict[str, Any]:
        """The model's config.json.

        Raises:
            CheckpointError: it cannot be read.
        """
        fields = read_config(self.base)
        return self.package.config(fields) if isinstance(self.package, PooledExport) else fields

    def read_adapter(
        self, expected: Mapping[str, Tensor], *, renames: Iterable[tuple[str, str]] = ()
    ) -> dict[str, LowRank]:
        """Updates of the base's weights; see :func:`flide.models.adapter.read_adapter`."""
        if self.package is not None:
            return self.package.read_adapter(expected, renames=renames)
        return read_adapter(self.path, expected, renames=renames) if self.has_adapter else {}

    def load_head(self, hidden_size: int, *, device: torch.device | str = "cpu") -> Head | None:
        """The head, in eval mode; None for the letters of ``lm_head``. See :func:`flide.heads.load_head`."""
        if self.package is not None:
            return self.package.load_head(hidden_size, device=device)
        return load_head(self.path, hidden_size, device=device) if self.has_head else None

    def temperatures(self) -> dict[str, float]:
        """Question type -> temperature: a package's own, and in their place what ``flide calibrate`` stored.

        Raises:
            CheckpointError: its file is damaged.
        """
        own = {} if self.package is None else self.package.temperatures
        return {**own, **load_temperatures(self.path)}

    @property
    def package_name(self) -> str | None:
        """What a package is called, if its directory's name says nothing."""
        return None if self.package is None else self.package.name

    @property
    def is_whole(self) -> bool:
        """Whether nothing beside the directory itself is needed, and its files are transformers' and our own."""
        return self.base == self.path and not self.has_adapter and self.package is None

    @property
    def tokenizer(self) -> Path:
        """Where the tokenizer is."""
        own = any((self.path / name).is_file() for name in TOKENIZER_FILES)
        return self.path if own else self.base


def _base_of(
    directory: Path, named: str, revision: str | None, given: str | Path | None, hub: Mapping[str, Any]
) -> Path:
    """Where the base of a directory is.

    Args:
        directory: for errors.
        named: what it says it builds upon, a path or a Hub id.
        revision: of a Hub id.
        given: what the caller says; None to follow the name.
        hub: arguments of ``resolve_directory``.
    """
    if given is not None and str(given) != named and not Path(given).expanduser().is_dir():
        raise CheckpointError(f"{given} is no directory, and {directory} belongs to {named}")
    try:
        base = resolve_directory(named if given is None else given, revision=revision, **hub)
    except CheckpointError as error:
        hint = "" if given is not None else " (base=, or --base, can name its directory)"
        raise CheckpointError(f"the model that {directory} belongs to cannot be had: {error}{hint}") from error
    if (base / ADAPTER_FILE).is_file():
        raise CheckpointError(f"{directory} belongs to {base}, which has an adapter: merge that first")
    return base


def lasting_name(path: str | Path) -> str:
    """A model's name that other working directories understand, too: an absolute path, or the Hub id."""
    directory = Path(path).expanduser()
    return os.path.abspath(directory) if directory.is_dir() else str(path)


__all__ = ["TOKENIZER_FILES", "ModelDirectory", "lasting_name"]
