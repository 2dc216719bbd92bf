"""EngineConfig: every option of the engine and every default, in one place."""

from __future__ import annotations

from dataclasses import dataclass

import torch

ROUND_TOKENS_CPU = 4096
ROUND_TOKENS_CUDA = 16384
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Options of an :class:`~flide.Engine`.

    Attributes:
        device: "auto" (CUDA if there is one, else the CPU) or a torch device.
        dtype: of weights and matrix products; "auto" is bfloat16 on CUDA and float32 elsewhere. Recurrent states,
            gates, softmax, norms and option logits never have less than float32.
        max_round_tokens: stream rows that requests may share in one round; a longer request runs alone. None for 16,384
            on CUDA and 4,096 elsewhere.
        max_prompt_tokens: longest prompt of one question, its state included; None for what the model was made for.
        model_name: name in responses; None for the last part of the model's path.
    """

    device: str | torch.device = "auto"
    dtype: str | torch.dtype = "auto"
    max_round_tokens: int | None = None
    max_prompt_tokens: int | None = None
    model_name: str | None = None

    def __post_init__(self) -> None:
        for name in ("max_round_tokens", "max_prompt_tokens"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ValueError(f"{name} must be a positive integer or None, got {value!r}")
        if self.model_name is not None and (not isinstance(self.model_name, str) or not self.model_name):
            raise ValueError(f"model_name must be a string that is not empty, or None, got {self.model_name!r}")
        self.resolve_dtype()

    def resolve_device(self) -> torch.device:
        """The torch device to run on.

        Raises:
            ValueError: unknown, or CUDA without a CUDA device.
        """
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            device = torch.device(self.device)
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"unknown device {self.device!r}: {str(error).splitlines()[0]}") from None
        if device.type == "cuda":
            count = torch.cuda.device_count() if torch.cuda.is_available() else 0
            if (device.index or 0) >= count:
                raise ValueError(f"device '{device}' was asked for, but torch sees {count or 'no'} CUDA devices")
        if device.type not in ("cpu", "cuda"):
            raise ValueError(f"device '{device}' is not supported (cpu and cuda are)")
        return device

    def resolve_dtype(self) -> torch.dtype | None:
        """The torch dtype of the weights; None to let the device decide."""
        if isinstance(self.dtype, torch.dtype) and self.dtype in _DTYPES.values():
            return self.dtype
        if self.dtype == "auto":
            return None
        if isinstance(self.dtype, str) and self.dtype in _DTYPES:
            return _DTYPES[self.dtype]
        raise ValueError(f"unknown dtype {self.dtype!r}; one of auto, {', '.join(_DTYPES)}")

    def round_tokens(self, device: torch.device) -> int:
        if self.max_round_tokens is not None:
            return self.max_round_tokens
        return ROUND_TOKENS_CUDA if device.type == "cuda" else ROUND_TOKENS_CPU
