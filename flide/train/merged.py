"""From a fine-tuned directory to a plain checkpoint that needs nothing else."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import torch

from flide.errors import CheckpointError
from flide.models.auto import AutoModelForDecision
from flide.models.directory import TOKENIZER_FILES, ModelDirectory
from flide.models.weights import list_tensors
from flide.runtime.calibration import save_temperatures

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def merge(
    model: str | Path, out: str | Path, *, base: str | Path | None = None, dtype: torch.dtype | None = None
) -> Path:
    """Fold adapters into the weights, and write the model with its head, tokenizer and temperatures.

    Args:
        model: the fine-tuned directory, an Open-Jev package or what vllm-jev exported of one, or a Hub id.
        base: see ``ForDecision.from_pretrained``.
        out: the directory to write, which must not exist yet, and then appears as a whole, or be empty.
        dtype: of the weights; None for that of the base.

    Returns:
        ``out``.

    Raises:
        ValueError: the model cannot be loaded or is whole already, or ``out`` cannot be written to.
        OSError: a file cannot be written.
    """
    asked, out = out, Path(os.path.realpath(out))
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ValueError(f"{str(asked)!r} exists and is not an empty directory")
    found = ModelDirectory.open(model, base=base)
    if found.is_whole:
        raise CheckpointError(f"{found.path} is whole already: there is nothing to merge")
    if dtype is None:
        dtypes = (x.dtype for name, x in list_tensors(found.base).items() if name.endswith("embed_tokens.weight"))
        dtype = _DTYPES.get(next(dtypes, ""))  # None: loading says what is wrong
    loaded = AutoModelForDecision.from_pretrained(found, dtype=dtype)
    out.parent.mkdir(parents=True, exist_ok=True)
    # A directory that is there may be a mount, or where a shell is: it stays, and is filled.
    is_there = out.exists()
    unfinished = Path(tempfile.mkdtemp(prefix=f".{out.name[:50]}.", dir=out if is_there else out.parent))
    try:
        loaded.save_pretrained(unfinished)
        copy_tokenizer(found, unfinished)
        if temperatures := found.temperatures():
            save_temperatures(unfinished, temperatures)
        if is_there:
            _move_files(unfinished, out)
        else:
            unfinished.chmod(0o777 & ~_umask())
            os.replace(unfinished, out)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return Path(asked)


def _move_files(source: Path, out: Path) -> None:
    """Move all files, config.json last: without it a directory is no model. If one cannot be moved, none is."""
    moved: list[Path] = []
    try:
        for path in sorted(source.iterdir(), key=lambda path: path.name == "config.json"):
            moved.append(out / path.name)
            os.replace(path, out / path.name)
    except BaseException:
        for path in moved:
            path.unlink(missing_ok=True)
        raise
    source.rmdir()


def copy_tokenizer(found: ModelDirectory, out: Path) -> None:
    """Copy a model's tokenizer files as they are."""
    for name in TOKENIZER_FILES:
        if (found.tokenizer / name).is_file():
            shutil.copyfile(found.tokenizer / name, out / name)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
