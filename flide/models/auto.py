"""Picking a model family by what its config.json says.

Outside packages add theirs with :func:`register`. An installed one is found without being imported first, if it names
its classes as entry points: ``[project.entry-points."flide.models"]``, architecture or model type = ``"module:Class"``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, TypeVar

import torch

from flide.errors import CheckpointError
from flide.models.decision import ForDecision
from flide.models.directory import ModelDirectory
from flide.models.forkable import check_causal, reason_against

ENTRY_POINTS = "flide.models"
_FAMILIES: dict[str, type[ForDecision]] = {}
_Model = TypeVar("_Model", bound=type[ForDecision])


def register(*names: str) -> Callable[[_Model], _Model]:
    """Class decorator: serve checkpoints whose ``architectures`` or ``model_type`` is one of ``names``.

    Raises:
        ValueError: a name already belongs to another class.
    """

    def add(cls: _Model) -> _Model:
        for name in names:
            taken = _FAMILIES.get(name)
            if taken is not None and (taken.__module__, taken.__qualname__) != (cls.__module__, cls.__qualname__):
                raise ValueError(f"{name} is already registered by {taken.__module__}.{taken.__qualname__}")
        _FAMILIES.update(dict.fromkeys(names, cls))
        return cls

    return add


def family_of(config: Mapping[str, Any]) -> type[ForDecision]:
    """The registered class for a config.json, or that of an installed package's entry point. Nothing is ever imported
    from a model's directory.

    Raises:
        CheckpointError: there is none, which names what was asked for and what there is; an entry point fails.
    """
    check_causal(config)
    architectures = config.get("architectures")
    names = [*(architectures if isinstance(architectures, list) else ()), config.get("model_type")]
    for name in names:
        if isinstance(name, str) and name in _FAMILIES:
            return _FAMILIES[name]
    installed = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    for name in names:
        if isinstance(name, str) and name in installed:
            return _load(installed[name])
    asked = ", ".join(str(name)[:80] for name in names if name)[:400] or "none"
    raise CheckpointError(
        f"no model family for architecture {asked}; supported: {', '.join(sorted({*_FAMILIES, *installed}))}"
        + reason_against(names)
    )


def _load(point: EntryPoint) -> type[ForDecision]:
    where = f"entry point {point.name} = {point.value} of {point.dist.name if point.dist else 'a package'}"
    try:
        family = point.load()
    except (ImportError, AttributeError) as error:
        raise CheckpointError(f"{where} cannot be loaded: {error}") from error
    if not (isinstance(family, type) and issubclass(family, ForDecision)):
        raise CheckpointError(f"{where} is no ForDecision")
    return family


class AutoModelForDecision:
    """Loads a checkpoint with the family its config.json names."""

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path | ModelDirectory,
        *,
        base: str | Path | None = None,
        merge_lora: bool = True,
        revision: str | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
    ) -> ForDecision:
        """See :meth:`ForDecision.from_pretrained`."""
        found = ModelDirectory.open(
            path, base=base, revision=revision, cache_dir=cache_dir, local_files_only=local_files_only
        )
        family = family_of(found.config())
        return family.from_pretrained(found, dtype=dtype, device=device, merge_lora=merge_lora)
