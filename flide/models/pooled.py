"""What vllm-jev exports of an Open-Jev package: a whole model, and the head beside it.

config.json, model*.safetensors          the merged text model, without lm_head
score.safetensors                        score.weight [1, D] and score.bias [1], float32
jev_manifest.json                        format, prompts, temperature, SHA-256 of all files
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from flide.errors import CheckpointError
from flide.heads.kinds import OpenJevHead
from flide.models.adapter import LowRank
from flide.models.openjev import check_hash, scalar_head
from flide.runtime.calibration import TYPES, check_temperatures
from flide.stored_json import read_json_file

MANIFEST_FILE, SCORE_FILE = "jev_manifest.json", "score.safetensors"
FORMAT, PROTOCOL = "vllm-jev-pooling-v1", "open_jev_choice"
ARCHITECTURE = "VllmJevQwen35ForSequenceClassification"


@dataclass(frozen=True, slots=True)
class PooledExport:
    """An export.

    Attributes:
        checkpoint: its directory.
        temperature: what all logits are divided by.
    """

    checkpoint: Path
    temperature: float

    name = None  # that of the directory
    has_adapter = False

    @classmethod
    def find(cls, directory: Path) -> Self | None:
        """The export in a directory; None where there is none.

        Raises:
            CheckpointError: it is damaged, or made of another model than Open-Jev.
        """
        try:
            manifest = read_json_file(directory / MANIFEST_FILE)
        except FileNotFoundError:
            return None
        fields = manifest if isinstance(manifest, dict) else {}
        for key, only in (("format", FORMAT), ("prompt_protocol", PROTOCOL)):
            if fields.get(key) != only:
                raise CheckpointError(f"{MANIFEST_FILE}: {key} {str(fields.get(key))[:40]!r} is not supported")
        temperature = fields.get("calibration_temperature", 1.0)
        try:
            check_temperatures({"choice": temperature})
        except ValueError as error:
            raise CheckpointError(f"{MANIFEST_FILE}: calibration_temperature: {error}") from error
        listed = fields.get("files")
        if not isinstance(listed, dict) or SCORE_FILE not in listed:
            raise CheckpointError(f"{MANIFEST_FILE} has no hash of {SCORE_FILE}")
        for name in listed:
            if not isinstance(name, str) or Path(name).name != name:
                raise CheckpointError(f"{MANIFEST_FILE} names a file outside the directory: {str(name)[:80]!r}")
            if not (directory / name).is_file():
                raise CheckpointError(f"the export {directory} lacks {name}")
            check_hash(directory / name, name, listed)
        return cls(directory, float(temperature))

    @property
    def temperatures(self) -> dict[str, float]:
        """Of every question type."""
        return dict.fromkeys(TYPES, self.temperature)

    def config(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """The config.json as that of a plain text model. The export has no ``lm_head``, which nothing reads: the
        embedding takes its place."""
        architectures = fields.get("architectures")
        if architectures != [ARCHITECTURE]:
            raise CheckpointError(f"an export of {str(architectures)[:80]} is not supported (only {ARCHITECTURE})")
        return {**fields, "architectures": ["Qwen3_5ForCausalLM"], "tie_word_embeddings": True}

    def load_head(self, hidden_size: int, *, device: torch.device | str = "cpu") -> OpenJevHead:
        """The head, in eval mode.

        Raises:
            CheckpointError: it cannot be read, or does not fit the model.
        """
        try:
            tensors = load_file(self.checkpoint / SCORE_FILE)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"cannot read {SCORE_FILE}: {error}") from error
        state = {key.removeprefix("score."): tensor for key, tensor in tensors.items()}
        return scalar_head(SCORE_FILE, state, hidden_size, max_prompt_tokens=None).to(device).eval()

    def read_adapter(
        self, expected: Mapping[str, Tensor], *, renames: Iterable[tuple[str, str]] = ()
    ) -> dict[str, LowRank]:
        """Nothing: the adapter was merged."""
        return {}


__all__ = ["PooledExport"]
