"""Open-Jev packages: a LoRA adapter and a scalar head on a base that lies elsewhere.

    package/manifest.json                                     {"files": {name: {"sha256": ..., "bytes": ...}}}
    package/checkpoint/model.json                             base, its revision, longest prompt, rank
    package/checkpoint/head.pt                                state dict of a linear layer [1, D], float32
    package/checkpoint/temperature.json                       one temperature for all questions
    package/checkpoint/adapter/adapter_{config.json,model.safetensors}

The path of a package may be any of the three directories: the one around ``package``, it, or ``checkpoint``. Nothing
in it is executed, and every file that is read must be what the manifest says.
"""

from __future__ import annotations

import hashlib
import logging
import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from flide.errors import CheckpointError
from flide.heads.kinds import OpenJevHead
from flide.models.adapter import CONFIG_FILE as ADAPTER_FILE
from flide.models.adapter import WEIGHTS_FILE as ADAPTER_WEIGHTS
from flide.models.adapter import LowRank, read_adapter, read_adapter_config
from flide.runtime.calibration import TYPES, check_temperatures
from flide.stored_json import read_json_file

MODEL_FILE, HEAD_FILE, TEMPERATURE_FILE, MANIFEST_FILE = "model.json", "head.pt", "temperature.json", "manifest.json"
METHOD = "independent_candidate_lora_nll_brier"
MAX_HEAD_BYTES = 16 << 20
_CHUNK = 1 << 20

logger = logging.getLogger("flide.models")


@dataclass(frozen=True, slots=True)
class OpenJevPackage:
    """What a package says of itself.

    Attributes:
        checkpoint: directory with the files.
        base_model: Hub id or path of its base.
        revision: of a Hub base; None for the newest.
        max_prompt_tokens: longest prompt, which is refused when it is longer, never cut.
        rank: of the adapter; 0 for none.
        temperature: what all logits are divided by.
    """

    checkpoint: Path
    base_model: str
    revision: str | None
    max_prompt_tokens: int
    rank: int
    temperature: float

    name = "open-jev"

    @classmethod
    def find(cls, directory: Path) -> Self | None:
        """The package at, or directly below, a directory; None where there is none.

        Raises:
            CheckpointError: it is damaged, or of a kind that is not supported.
        """
        places = (directory, directory / "checkpoint", directory / "package" / "checkpoint")
        checkpoint = next((place for place in places if (place / MODEL_FILE).is_file()), None)
        if checkpoint is None or (directory / "config.json").is_file():
            return None
        model, calibration = (_object(checkpoint, name) for name in (MODEL_FILE, TEMPERATURE_FILE))
        base, revision = model.get("model_id"), model.get("revision")
        if not isinstance(base, str) or not base:
            raise CheckpointError(f"{MODEL_FILE} does not say which model the package belongs to (model_id)")
        if revision is not None and not isinstance(revision, str):
            raise CheckpointError(f"{MODEL_FILE}: revision should be a name")
        if (method := model.get("method", METHOD)) != METHOD:
            raise CheckpointError(f"{MODEL_FILE}: method {str(method)[:80]!r} is not supported (only {METHOD!r})")
        longest, rank = _count(model, "max_length", least=1), _count(model, "lora_rank", least=0)
        temperature: Any = calibration.get("temperature")
        try:
            check_temperatures({"choice": temperature})
        except ValueError as error:
            raise CheckpointError(f"{TEMPERATURE_FILE}: {error}") from error
        package = cls(checkpoint, base, revision, longest, rank, float(temperature))
        package._check_files()
        return package

    @property
    def has_adapter(self) -> bool:
        return self.rank > 0

    @property
    def temperatures(self) -> dict[str, float]:
        """Of every question type."""
        return dict.fromkeys(TYPES, self.temperature)

    def load_head(self, hidden_size: int, *, device: torch.device | str = "cpu") -> OpenJevHead:
        """The head, in eval mode. ``head.pt`` is read as tensors, never as a program.

        Raises:
            CheckpointError: it cannot be read, or does not fit the base.
        """
        path = self.checkpoint / HEAD_FILE
        try:
            if path.stat().st_size > MAX_HEAD_BYTES:
                raise CheckpointError(f"{HEAD_FILE} is larger than {MAX_HEAD_BYTES} bytes")
            state = torch.load(path, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise CheckpointError(f"{HEAD_FILE} holds something else than tensors: it is not loaded") from error
        except (OSError, RuntimeError, EOFError, ValueError) as error:
            raise CheckpointError(f"cannot read {HEAD_FILE}: {str(error).partition(chr(10))[0]}") from error
        return scalar_head(HEAD_FILE, state, hidden_size, max_prompt_tokens=self.max_prompt_tokens).to(device).eval()

    def read_adapter(
        self, expected: Mapping[str, Tensor], *, renames: Iterable[tuple[str, str]] = ()
    ) -> dict[str, LowRank]:
        """See :func:`flide.models.adapter.read_adapter`; the adapter must be one of this very model.

        Raises:
            CheckpointError: it does not fit the base, or changes only some of the layers that it names.
        """
        if not self.has_adapter:
            return {}
        directory = self.checkpoint / "adapter"
        config, updates = read_adapter_config(directory), read_adapter(directory, expected, renames=renames)
        ranks = {update.lora_A_RI.shape[0] for update in updates.values()}
        if ranks != {self.rank}:
            raise CheckpointError(f"{MODEL_FILE} has lora_rank {self.rank}, and the adapter {sorted(ranks)}")
        targets = config.get("target_modules")
        named = targets if isinstance(targets, list) else []
        lacking = [name for name in expected if name.split(".")[-2:-1] and name.split(".")[-2] in named]
        lacking = [name for name in lacking if name not in updates]
        if lacking:
            raise CheckpointError(
                f"{ADAPTER_WEIGHTS} does not fit the model: it lacks {lacking[0]} and {len(lacking) - 1} more, "
                "so that the base must be another model"
            )
        return updates

    def _check_files(self) -> None:
        """See that all files are there, and are what the manifest says."""
        names = [MODEL_FILE, HEAD_FILE, TEMPERATURE_FILE]
        names += [f"adapter/{name}" for name in (ADAPTER_FILE, ADAPTER_WEIGHTS)] if self.has_adapter else []
        missing = [name for name in names if not (self.checkpoint / name).is_file()]
        if missing:
            raise CheckpointError(f"the package {self.checkpoint} lacks {', '.join(missing)}")
        package = self.checkpoint.parent
        if not (package / MANIFEST_FILE).is_file():
            logger.warning("%s has no %s: its files are not verified", package, MANIFEST_FILE)
            return
        listed = _object(package, MANIFEST_FILE).get("files")
        for name in names:
            check_hash(
                self.checkpoint / name, f"{self.checkpoint.name}/{name}", listed if isinstance(listed, dict) else {}
            )


def scalar_head(name: str, state: Any, hidden_size: int, *, max_prompt_tokens: int | None) -> OpenJevHead:
    """The head that a linear layer's state dict makes.

    Args:
        name: of its file.
        state: what the file held.
        hidden_size: D of the base.
        max_prompt_tokens: longest prompt.

    Raises:
        CheckpointError: it is no such state dict, does not fit the base, or holds numbers that are not finite.
    """
    shapes = {"weight": (1, hidden_size), "bias": (1,)}
    if not isinstance(state, Mapping) or set(state) != set(shapes):
        raise CheckpointError(f"{name} should hold a linear layer's weight and bias")
    for key, shape in shapes.items():
        tensor = state[key]
        if not isinstance(tensor, Tensor) or tuple(tensor.shape) != shape:
            found = list(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise CheckpointError(f"{name}: {key} is {found}, expected {list(shape)}: it does not fit the base")
        if not tensor.is_floating_point() or not tensor.isfinite().all():
            raise CheckpointError(f"{name}: {key} holds something else than finite numbers of a float type")
    head = OpenJevHead(hidden_size, max_prompt_tokens=max_prompt_tokens)
    head.score.load_state_dict({key: state[key].float() for key in shapes})
    return head


def check_hash(path: Path, name: str, listed: Mapping[str, Any]) -> None:
    """See that a file is the one that a manifest lists.

    Args:
        path: of the file.
        name: in the manifest.
        listed: name -> SHA-256, or an object with "sha256" and "bytes".

    Raises:
        CheckpointError: it is not listed, or differs.
    """
    entry = listed.get(name)
    fields = entry if isinstance(entry, dict) else {"sha256": entry}
    expected = fields.get("sha256")
    if not isinstance(expected, str):
        raise CheckpointError(f"the manifest has no hash of {name}")
    size = path.stat().st_size
    if fields.get("bytes", size) != size:
        raise CheckpointError(f"{name} has {size} bytes, and the manifest says {fields['bytes']}")
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    if digest.hexdigest() != expected.lower():
        raise CheckpointError(f"{name} is not the file that the manifest lists: its SHA-256 differs")


def _object(directory: Path, name: str) -> dict[str, Any]:
    try:
        content = read_json_file(directory / name)
    except FileNotFoundError as error:
        raise CheckpointError(f"the package {directory} lacks {name}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{name} does not hold an object")
    return content


def _count(fields: Mapping[str, Any], key: str, *, least: int) -> int:
    value = fields.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise CheckpointError(f"{MODEL_FILE}: {key} should be an integer of at least {least}")
    return value


__all__ = ["OpenJevPackage", "check_hash", "scalar_head"]
