"""LoRA adapters as PEFT stores them: ``adapter_config.json`` and ``adapter_model.safetensors``.

Keys are ``base_model.model.{transformers' name of the layer}.lora_A.weight`` (``[R, in]``) and ``lora_B.weight``
(``[out, R]``), so that ``PeftModel.from_pretrained(base, directory)`` reads what is written here. PEFT is not needed.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from flide.errors import CheckpointError
from flide.layers.lora import LoRALinear, lora_layers
from flide.models.weights import write_tensors
from flide.stored_json import read_json_file

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."
# Options of a LoRA adapter that make it compute something else than W + scale * B A.
_UNSUPPORTED = (
    "alora_invocation_tokens",
    "arrow_config",
    "fan_in_fan_out",
    "kasa_config",
    "layer_replication",
    "lora_bias",
    "modules_to_save",
    "monteclora_config",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "use_dora",
    "use_qalora",
)
# First values of A and B that leave the base's weights alone; with others an adapter belongs to changed ones.
_INITS = (None, True, False, "eva", "gaussian", "mica", "orthogonal")
_LARGEST = 1e30


@dataclass(frozen=True, slots=True)
class LowRank:
    """One weight's update ``scale * B A``."""

    lora_A_RI: Tensor
    lora_B_OR: Tensor
    scale: float

    def delta(self) -> Tensor:
        """``[out, in]`` float32."""
        return (self.lora_B_OR.float() @ self.lora_A_RI.float()) * self.scale


def read_adapter_config(directory: Path) -> dict[str, Any]:
    """The checked adapter_config.json of a directory.

    Raises:
        CheckpointError: it cannot be read, or is of a kind that is not supported, named.
    """
    try:
        config = read_json_file(directory / CONFIG_FILE)
    except FileNotFoundError as error:
        raise CheckpointError(f"cannot read {CONFIG_FILE}: {error}") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else None
        raise CheckpointError(f"{CONFIG_FILE}: peft_type {str(kind)[:40]!r} is not supported (only 'LORA')")
    for name in _UNSUPPORTED:
        if config.get(name):
            raise CheckpointError(f"{CONFIG_FILE}: {name} is not supported")
    if config.get("bias", "none") != "none":
        raise CheckpointError(f"{CONFIG_FILE}: bias is not supported (only 'none')")
    init = config.get("init_lora_weights")
    if init not in _INITS:
        raise CheckpointError(
            f"{CONFIG_FILE}: init_lora_weights {str(init)[:40]!r} is not supported: it changes the base"
        )
    alphas = config.get("alpha_pattern") or {}
    numbers = [config.get("lora_alpha"), *(alphas.values() if isinstance(alphas, dict) else [None])]
    if not all(isinstance(x, int | float) and not isinstance(x, bool) and abs(x) < _LARGEST for x in numbers):
        raise CheckpointError(f"{CONFIG_FILE}: lora_alpha should be a number")
    try:
        for pattern in alphas:
            re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise CheckpointError(f"{CONFIG_FILE}: alpha_pattern has a bad pattern: {error}") from error
    return config


def read_adapter(
    directory: Path, expected: Mapping[str, Tensor], *, renames: Iterable[tuple[str, str]] = ()
) -> dict[str, LowRank]:
    """Read an adapter and pair it with a model's weights.

    Args:
        directory: with the two files.
        expected: the model's tensors by name (meta tensors do).
        renames: (pattern, replacement) from stored names to the model's.

    Returns:
        Name of a weight -> its update.

    Raises:
        CheckpointError: as :func:`read_adapter_config`; tensors that are no pairs of factors of the model's weights.
    """
    config = read_adapter_config(directory)
    try:
        tensors = load_file(directory / WEIGHTS_FILE)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read {WEIGHTS_FILE}: {error}") from error
    factors: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        found = re.fullmatch(re.escape(PREFIX) + r"(.+)\.lora_(A|B)\.weight", key)
        if found is None or tensor.ndim != 2 or not tensor.is_floating_point():
            raise CheckpointError(f"{WEIGHTS_FILE}: {key[:200]} is not a factor of a linear layer's update")
        factors.setdefault(found[1], {})[found[2]] = tensor
    updates: dict[str, LowRank] = {}
    for stored, pair in factors.items():
        name = f"{stored}.weight"
        for pattern, replacement in renames:
            name = re.sub(pattern, replacement, name)
        # An adapter of the inner model, without its head, lacks the first part of the names.
        name = name if name in expected else f"model.{name}"
        a, b = pair.get("A"), pair.get("B")
        shape = tuple(expected[name].shape) if name in expected else None
        fits = a is not None and b is not None and shape == (b.shape[0], a.shape[1]) and 0 < a.shape[0] == b.shape[1]
        if a is None or b is None or not fits or name in updates:
            raise CheckpointError(f"{WEIGHTS_FILE} does not fit the model: {stored[:200]}")
        updates[name] = LowRank(a, b, _scale(config, stored, rank=a.shape[0]))
    if not updates:
        raise CheckpointError(f"{WEIGHTS_FILE} is empty")
    return updates


def save_adapter(model: nn.Module, directory: Path, *, base_model: str) -> None:
    """Write the adapters of a model's :class:`LoRALinear` layers.

    Args:
        model: with adapters of one rank and scale.
        directory: an existing one.
        base_model: path or Hub id of the model they belong to.

    Raises:
        OSError: a file cannot be written.
    """
    layers = dict(lora_layers(model))
    ranks = {layer.lora_A.out_features for layer in layers.values()}
    scales = {layer.scale for layer in layers.values()}
    assert len(ranks) == len(scales) == 1, "adapters of one rank and scale"
    (rank,), (scale,) = ranks, scales
    alpha = scale * rank
    config = {
        "base_model_name_or_path": base_model,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_alpha": int(alpha) if alpha.is_integer() else alpha,  # some readers take nothing but integers
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": rank,
        "target_modules": sorted({name.rpartition(".")[2] for name in layers}),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }
    tensors = {
        f"{PREFIX}{name}.{factor}.weight": getattr(layer, factor).weight
        for name, layer in layers.items()
        for factor in ("lora_A", "lora_B")
    }
    write_tensors(tensors, directory / WEIGHTS_FILE)
    (directory / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _scale(config: Mapping[str, Any], name: str, *, rank: int) -> float:
    alphas: Mapping[str, float] = config.get("alpha_pattern") or {}
    # PEFT's rule: the first pattern that matches the name, or its end behind a dot.
    alpha = next((v for k, v in alphas.items() if re.match(rf"(.*\.)?({k})$", name)), config["lora_alpha"])
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)


def put_adapter(model: nn.Module, updates: Mapping[str, LowRank]) -> None:
    """Keep updates beside the weights of their linear layers, as :class:`LoRALinear` computes them, in eval mode.

    Args:
        model: loaded, its projections not merged.
        updates: as :func:`read_adapter` gives them.

    Raises:
        CheckpointError: an update belongs to something else than a linear layer without bias.
    """
    for name, update in updates.items():
        parent_name, _, child = name.removesuffix(".weight").rpartition(".")
        parent = model.get_submodule(parent_name)
        layer = getattr(parent, child)
        if type(layer) is not nn.Linear or layer.bias is not None:
            raise CheckpointError(f"merge_lora=False is not for {name}: it is no weight of a plain linear layer")
        adapted = LoRALinear(layer, update.lora_A_RI.shape[0], update.scale)
        with torch.no_grad():
            adapted.lora_A.weight.copy_(update.lora_A_RI)
            adapted.lora_B.weight.copy_(update.lora_B_OR)
        setattr(parent, child, adapted.requires_grad_(False))


def folded(stored: Tensor, update: LowRank) -> Tensor:
    """A stored weight with its update: the sum in float32 (float64 for a float64 weight), not cast back."""
    stored = stored if stored.dtype == torch.float64 else stored.float()
    return stored + update.delta()


__all__ = [
    "CONFIG_FILE",
    "WEIGHTS_FILE",
    "LowRank",
    "folded",
    "put_adapter",
    "read_adapter",
    "read_adapter_config",
    "save_adapter",
]
