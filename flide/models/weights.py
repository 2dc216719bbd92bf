"""Safetensors in and out: weights are streamed into parameters that already exist, never assigned."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub import snapshot_download, split_torch_state_dict_into_shards
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from flide.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
SHARD_NAME = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
MAX_INDEX_BYTES = 256 << 20
# Pages read through a mapping stay resident until it is closed: map anew before they are a second copy of the model.
MAPPED_BYTES = 64 << 20
HUB_FILES = (
    "config.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "adapter_config.json",
    "head.json",
    "calibration.json",
    "decision_config.json",
    "jev_manifest.json",
    "package/manifest.json",
    "package/checkpoint/*",
)
_FLOAT_DTYPES = {"F64", "F32", "F16", "BF16"}


def resolve_directory(
    path: str | Path,
    *,
    revision: str | None = None,
    cache_dir: str | Path | None = None,
    local_files_only: bool = False,
) -> Path:
    """The directory of a model: the given one, or a Hub id's snapshot (config, tokenizer and safetensors only).

    A path that exists as a directory is used as it is and nothing is fetched.

    Raises:
        CheckpointError: neither a directory nor a Hub id that can be had.
    """
    name = str(path)
    if not name:
        raise CheckpointError("the path of a model is empty")
    try:
        directory = Path(path).expanduser()
        if directory.is_dir():
            return directory
        is_file = directory.exists()
    except (OSError, RuntimeError) as error:  # too long a name, no such user's home
        raise CheckpointError(f"{name[:80]} cannot be a directory or a Hub id") from error
    if is_file:
        raise CheckpointError(f"{name} is a file; a model is a directory or a Hub id")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name) or name.startswith("."):
        raise CheckpointError(f"{name} is neither a directory nor a Hub id of the form 'organisation/model'")
    try:
        snapshot = snapshot_download(
            name,
            revision=revision,
            cache_dir=cache_dir,
            local_files_only=local_files_only,
            allow_patterns=list(HUB_FILES),
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        first_line = str(error).strip().partition("\n")[0]
        raise CheckpointError(
            f"there is no directory {name}, and the Hub model {name} cannot be had: {first_line}"
        ) from error
    return Path(snapshot)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a checkpoint, known from its file's header alone.

    Attributes:
        parts: where it is stored in several, one behind the other along the first dimension; ``file`` and ``key`` are
            then those of the first.
    """

    file: Path
    key: str
    shape: tuple[int, ...]
    dtype: str
    parts: tuple[StoredTensor, ...] = ()

    def read(self) -> Tensor:
        """Its value, from its files."""
        if self.parts:
            return torch.cat([part.read() for part in self.parts])
        with safe_open(self.file, framework="pt") as file:
            return cast(Tensor, file.get_tensor(self.key))


def list_tensors(directory: Path) -> dict[str, StoredTensor]:
    """All tensors of a single-file or sharded safetensors checkpoint, by key; reads headers only.

    Raises:
        CheckpointError: no safetensors, a damaged file, or an index that disagrees with its shards or leaves the
            directory.
    """
    index = directory / INDEX_NAME
    weight_map: dict[str, str] | None = None
    if (directory / SINGLE_NAME).is_file():  # before an index, as transformers has it
        files = [SINGLE_NAME]
    elif index.is_file():
        weight_map = _read_index(index)
        files = sorted(set(weight_map.values()))
    else:
        others = sorted(p.name for p in directory.iterdir() if p.suffix in {".bin", ".pt", ".pth", ".ckpt", ".gguf"})
        hint = f" ({others[0]} is not read: only safetensors are)" if others else ""
        raise CheckpointError(f"{directory} has neither {SINGLE_NAME} nor {INDEX_NAME}{hint}")

    tensors: dict[str, StoredTensor] = {}
    for name in files:
        for tensor in _read_header(directory / name):
            if weight_map is not None and weight_map.get(tensor.key) != name:
                raise CheckpointError(f"{INDEX_NAME} and {name} disagree about where {tensor.key} is")
            tensors[tensor.key] = tensor
    missing = sorted(set(weight_map or ()) - set(tensors))
    if missing:
        raise CheckpointError(f"{INDEX_NAME} names tensors its files do not hold: {_some(missing)}")
    return tensors


def _read_index(path: Path) -> dict[str, str]:
    if path.stat().st_size > MAX_INDEX_BYTES:
        raise CheckpointError(f"{path} is larger than {MAX_INDEX_BYTES} bytes")
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a safetensors index: {error!r}") from None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} has no weight_map")
    for name in weight_map.values():
        if not isinstance(name, str) or not re.fullmatch(r"[\w-][\w.-]*\.safetensors", name):
            raise CheckpointError(f"{path} names a file outside the directory or not a safetensors file: {name!r}")
    return weight_map


def _read_header(path: Path) -> Iterable[StoredTensor]:
    if not path.is_file():
        raise CheckpointError(f"{path.name} is named by {INDEX_NAME} but is not there")
    try:
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - not a mapping
                view = file.get_slice(key)
                yield StoredTensor(path, key, tuple(view.get_shape()), view.get_dtype())
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not a readable safetensors file: {error}") from None


def match_tensors(
    expected: Mapping[str, Tensor],
    stored: Mapping[str, StoredTensor],
    *,
    renames: Iterable[tuple[str, str]] = (),
    ignored: Iterable[str] = (),
    joined: Iterable[tuple[str, Sequence[str]]] = (),
) -> dict[str, StoredTensor]:
    """Pair every model tensor with its stored one.

    Args:
        expected: the model's tensors by name (meta tensors do).
        stored: the checkpoint's tensors by key.
        renames: (pattern, replacement) applied in order to stored keys to get model names.
        ignored: patterns of stored keys that belong to parts the model leaves out.
        joined: (name, parts): a tensor with the name in its key may be stored as several that have the parts in their
            keys instead, one behind the other along the first dimension. Comes before the renames.

    Raises:
        CheckpointError: one error that names missing, unexpected, wrongly shaped and non-float tensors.
    """
    renames, ignored = list(renames), list(ignored)
    matched: dict[str, StoredTensor] = {}
    problems: list[str] = []
    unexpected: list[str] = []
    wrong: dict[str, str] = {}
    for key, tensor in _join(stored, joined).items():
        if any(re.match(pattern, key) for pattern in ignored):
            continue
        name = key
        for pattern, replacement in renames:
            name = re.sub(pattern, replacement, name)
        if name not in expected:
            unexpected.append(key)
        elif name in matched:
            problems.append(f"{key} and {matched[name].key} are both {name}")
        elif tensor.shape != tuple(expected[name].shape):
            wrong[name] = f"{key} is {list(tensor.shape)}, expected {list(expected[name].shape)}"
        elif tensor.dtype not in _FLOAT_DTYPES:
            wrong[name] = f"{key} is {tensor.dtype}, expected a float type"
        else:
            matched[name] = tensor
    missing = sorted(set(expected) - set(matched) - set(wrong))
    if missing:
        problems.append(f"missing: {_some(missing)}")
    if unexpected:
        problems.append(f"unexpected: {_some(sorted(unexpected))}")
    if wrong:
        problems.append(f"wrong: {_some(sorted(wrong.values()))}")
    if problems:
        raise CheckpointError("the checkpoint does not fit its config; " + "; ".join(problems))
    return matched


def _join(stored: Mapping[str, StoredTensor], joined: Iterable[tuple[str, Sequence[str]]]) -> dict[str, StoredTensor]:
    """The stored tensors, with one in the place of parts that fit together. Others stay, to be named in an error."""
    found = dict(stored)
    for whole, names in joined:
        for key in [key for key in stored if names[0] in key]:
            keys = [key.replace(names[0], name) for name in names]
            parts = tuple(stored[key] for key in keys if key in stored)
            alike = {(part.dtype, len(part.shape) > 0, part.shape[1:]) for part in parts}
            target = key.replace(names[0], whole)
            if len(parts) == len(names) and len(alike) == 1 and parts[0].shape and target not in found:
                first = parts[0]
                shape = (sum(part.shape[0] for part in parts), *first.shape[1:])
                found = {k: v for k, v in found.items() if k not in keys}
                found[target] = StoredTensor(first.file, first.key, shape, first.dtype, parts)
    return found


def stream_weights(
    targets: Mapping[str, Tensor],
    sources: Mapping[str, StoredTensor],
    *,
    change: Callable[[str, Tensor], Tensor] | None = None,
) -> None:
    """Copy every stored tensor into its target in place, one at a time, file by file.

    Args:
        targets, sources: by name.
        change: of the stored value of that name, before it is cast to the target's dtype.
    """
    by_file: dict[Path, list[str]] = {}
    for name, tensor in sources.items():
        by_file.setdefault(tensor.file, []).append(name)
    with torch.no_grad():
        for path, names in by_file.items():
            while names:
                mapped = 0
                with safe_open(path, framework="pt") as file:
                    while names and mapped < MAPPED_BYTES:
                        name = names.pop()
                        source = sources[name]
                        value = source.read() if source.parts else file.get_tensor(source.key)
                        targets[name].copy_(value if change is None else change(name, value))
                        mapped += targets[name].nbytes


def holds(tensor: StoredTensor, value: Tensor) -> bool:
    """Whether a stored tensor, in the dtype of ``value``, equals it."""
    if tensor.shape != tuple(value.shape):
        return False
    return torch.equal(tensor.read().to(value.dtype), value.detach().cpu())


def save_checkpoint(
    tensors: Mapping[str, Tensor], config: Mapping[str, Any], directory: Path, *, max_shard_size: int | str = "5GB"
) -> None:
    """Write config.json and (sharded) safetensors the way transformers reads them; an earlier save is replaced.

    Raises:
        OSError: a file cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    # Planned by sizes alone: parts of a merged projection share memory and are still tensors of their own.
    sizes = {name: tensor.detach().to("meta") for name, tensor in tensors.items()}
    split = split_torch_state_dict_into_shards(sizes, max_shard_size=max_shard_size)
    for path in directory.iterdir():
        if path.name in (SINGLE_NAME, INDEX_NAME) or SHARD_NAME.fullmatch(path.name):
            path.unlink()
    for name, keys in split.filename_to_tensors.items():
        write_tensors({key: tensors[key] for key in keys}, directory / name)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (directory / INDEX_NAME).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def write_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write one safetensors file. Tensors may be views of one.

    Raises:
        OSError: it cannot be written.
    """
    try:
        save_file({name: _unshared(tensor) for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"cannot write {path}: {error}") from error


def _unshared(tensor: Tensor) -> Tensor:
    """The tensor on the CPU, contiguous, in memory that is its own."""
    tensor = tensor.detach().cpu().contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _some(names: list[str], limit: int = 8) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
