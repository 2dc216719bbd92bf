"""TrainConfig: every option of training and every default, in one place."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

BETAS = (0.9, 0.999)
EPS = 1e-8
WEIGHT_DECAY = 0.01
CLIP_NORM = 1.0
BRIER_WEIGHT = 0.1
LARGEST = 1e30  # of a number that float32 computes with
_NOT_PART_OF_A_RUN = ("save_every",)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """Options of a training run. The recipe is Open-Jev's, with a cosine in place of its constant rate.

    Attributes:
        head: kind of head: "option", "scalar", "linear" or one that was registered.
        lora_rank: rank of the adapters; 0 trains the head alone.
        lora_alpha: their scale times their rank; None for twice the rank.
        lora_targets: last parts of the names of the layers that are adapted; None for every linear layer.
        epochs: passes over the rows.
        lr, head_lr: highest learning rates of adapters and head.
        warmup: share of the steps in which the rates rise from 0; then they fall to 0 as a cosine.
        batch_tokens: stream rows of one step, at most; requests are packed in a seeded random order.
        seed: of the adapters' initial values and of the order.
        save_every: steps from one checkpoint to the next; there is one after each epoch, too.
        device: "auto", "cpu" or "cuda". With several processes (``accelerate launch``) each has a device of its own.
        dtype: of the base; "auto" is bfloat16 on CUDA and float32 elsewhere. Adapters and heads are float32.
    """

    head: str = "option"
    lora_rank: int = 8
    lora_alpha: float | None = None
    lora_targets: tuple[str, ...] | None = None
    epochs: int = 1
    lr: float = 1e-4
    head_lr: float = 2e-4
    warmup: float = 0.03
    batch_tokens: int = 8192
    seed: int = 0
    save_every: int = 200
    device: str = "auto"
    dtype: str = "auto"

    def __post_init__(self) -> None:
        for name, least in (("lora_rank", 0), ("epochs", 1), ("batch_tokens", 1), ("seed", 0), ("save_every", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
        for name in ("lr", "head_lr", "lora_alpha"):
            value = getattr(self, name)
            if value is None and name == "lora_alpha":
                continue
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < LARGEST:
                raise ValueError(f"{name} must be a finite number above 0, got {str(value)[:40]}")
        if not isinstance(self.warmup, int | float) or not 0 <= self.warmup <= 1:
            raise ValueError(f"warmup must be a share from 0 to 1, got {self.warmup!r}")
        if self.seed >= 1 << 64:
            raise ValueError("seed must be less than 2**64")
        for name, known in (("device", ("auto", "cpu", "cuda")), ("dtype", ("auto", "float32", "bfloat16"))):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be {', '.join(known[:-1])} or {known[-1]}, got {getattr(self, name)!r}")
        if not isinstance(self.head, str):
            raise ValueError(f"head must be the name of a kind, got {self.head!r}")
        targets = self.lora_targets
        if targets is not None and not (
            isinstance(targets, tuple) and targets and all(isinstance(name, str) and name for name in targets)
        ):
            raise ValueError(f"lora_targets must be a tuple of names, or None for all layers, got {targets!r}")
        if self.head == "option" and not self.lora_rank:
            raise ValueError("there is nothing to train: an option head has no parameters, and lora_rank is 0")

    @property
    def lora_scale(self) -> float:
        """Factor of the adapters' update."""
        return 2.0 if self.lora_alpha is None else self.lora_alpha / self.lora_rank

    def lr_factor(self, step: int, steps: int) -> float:
        """What the learning rates are multiplied by in a step, counted from 0."""
        rising = math.ceil(self.warmup * steps)
        if step < rising:
            return (step + 1) / rising
        return 0.5 * (1 + math.cos(math.pi * (step - rising) / max(1, steps - rising)))

    def to_dict(self) -> dict[str, Any]:
        """As a JSON object."""
        return asdict(self)

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> Self:
        """From :meth:`to_dict`.

        Raises:
            ValueError: an unknown name or a bad value.
        """
        known = {field.name for field in fields(cls)}
        unknown = sorted(str(name) for name in set(content) - known)
        if unknown:
            raise ValueError(f"unknown training options: {', '.join(unknown)}")
        targets = content.get("lora_targets")
        return cls(**{**content, "lora_targets": tuple(targets) if isinstance(targets, list) else targets})

    def differences(self, other: TrainConfig) -> list[str]:
        """Names of the options in which two runs differ, so that one cannot go on as the other."""
        return [
            field.name
            for field in fields(self)
            if field.name not in _NOT_PART_OF_A_RUN and getattr(self, field.name) != getattr(other, field.name)
        ]
