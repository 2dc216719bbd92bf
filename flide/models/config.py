"""Reading config.json: plain JSON in, checked numbers out, before anything is allocated."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

from flide.errors import CheckpointError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

MAX_CONFIG_BYTES = 16 << 20
# Far above any published model; a config beyond these is damaged or hostile.
LIMITS = {
    "vocab_size": 1 << 22,
    "hidden_size": 1 << 17,
    "intermediate_size": 1 << 19,
    "num_hidden_layers": 1024,
    "full_attention_interval": 1024,
    "num_attention_heads": 1024,
    "num_key_value_heads": 1024,
    "head_dim": 4096,
    "linear_num_key_heads": 1024,
    "linear_num_value_heads": 1024,
    "linear_key_head_dim": 4096,
    "linear_value_head_dim": 4096,
    "linear_conv_kernel_dim": 64,
    "max_position_embeddings": 1 << 31,
}
MAX_SIZE = 1 << 20  # of what has no limit of its own


def read_config(directory: Path) -> dict[str, Any]:
    """The config.json of a model directory.

    Raises:
        CheckpointError: it is missing, too large, not JSON or not an object.
    """
    path = directory / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{directory} has no config.json: it is not a model directory")
    if path.stat().st_size > MAX_CONFIG_BYTES:
        raise CheckpointError(f"{path} is larger than {MAX_CONFIG_BYTES} bytes")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} does not hold an object")
    return config


_Config = TypeVar("_Config", bound="DataclassInstance")


class ConfigReader:
    """Typed, bounded access to the fields of a config object.

    Args:
        fields: the (text part of the) config.
        name: how errors call it.
    """

    def __init__(self, fields: Mapping[str, Any], name: str) -> None:
        self.fields, self.name = fields, name

    def fill(self, config_class: type[_Config], **given: Any) -> _Config:
        """A dataclass from what is given and, for its other fields, from the config: an int is read as :meth:`size`, a
        float as :meth:`number` and a bool as :meth:`flag`, with the field's default where it has one."""
        kinds = get_type_hints(config_class)
        for field in fields(config_class):
            default = None if field.default is MISSING else field.default
            if field.name not in given:
                read: Any = {int: self.size, float: self.number, bool: self.flag}[kinds[field.name]]
                given[field.name] = read(field.name, default)
        return config_class(**given)

    def size(self, key: str, default: int | None = None) -> int:
        """A positive integer no larger than its entry in ``LIMITS``; the default, if there is one, for null too."""
        value, limit = self.fields.get(key), LIMITS.get(key, MAX_SIZE)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= limit:
            raise CheckpointError(f"{self.name}: {key} must be an integer from 1 to {limit}, got {_show(value)}")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """As :meth:`size`, or 0."""
        value = self.fields.get(key)
        value = default if value is None else value
        return 0 if value == 0 and isinstance(value, int) and not isinstance(value, bool) else self.size(key, default)

    def number(self, key: str, default: float | None = None, *, fields: Mapping[str, Any] | None = None) -> float:
        """A positive finite number."""
        value = (self.fields if fields is None else fields).get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e30:
            raise CheckpointError(f"{self.name}: {key} must be a positive number, got {_show(value)}")
        return float(value)

    def flag(self, key: str, default: bool | None) -> bool:
        value = self.fields.get(key, default)
        if not isinstance(value, bool):
            raise CheckpointError(f"{self.name}: {key} must be true or false, got {_show(value)}")
        return value

    def layer_types(self, kinds: Collection[str], default: Sequence[str] | None = None) -> tuple[str, ...]:
        """``layer_types``: one of ``kinds`` for each of ``num_hidden_layers`` layers; the default for null, too."""
        found, count = self.fields.get("layer_types"), self.size("num_hidden_layers")
        found = default if found is None else found
        if not isinstance(found, list | tuple) or len(found) != count or not all(kind in kinds for kind in found):
            raise CheckpointError(f"{self.name}: layer_types must be {count} of {' and '.join(kinds)}")
        return tuple(found)

    def section(self, key: str) -> Mapping[str, Any]:
        value = self.fields.get(key)
        if not isinstance(value, Mapping):
            raise CheckpointError(f"{self.name}: {key} must be an object, got {_show(value)}")
        return value

    def only(self, key: str, supported: Any) -> None:
        """Refuse by name a feature whose value is neither absent nor the supported one."""
        value = self.fields.get(key, supported)
        if value != supported:
            raise CheckpointError(f"{self.name}: {key}={_show(value)} is not supported (only {supported!r})")

    def divides(self, small: str, large: str, default: int | None = None) -> None:
        """Refuse two sizes of which one is not a multiple of the other; ``default`` is that of either."""
        if self.size(large, default) % self.size(small, default):
            raise CheckpointError(f"{self.name}: {small} must divide {large}")


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
