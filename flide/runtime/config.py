"""EngineConfig: every option of the engine and every default, in one place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from flide.runtime.calibration import check_temperatures
from flide.runtime.capacity import ALIGN, SMALLEST
from flide.runtime.tree import MAX_DEPTH

ROUND_TOKENS_CPU = 4096
ROUND_TOKENS_CUDA = 16384
MOST_GB = 1e9  # more is no memory, and may be no number of bytes either
GRAPH_MODES = ("auto", "explicit", "reduce-overhead", "off")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Options of an :class:`~flide.Engine`.

    Attributes:
        device: "auto" (CUDA if there is one, else the CPU) or a torch device.
        dtype: of weights and matrix products; "auto" is bfloat16 on CUDA and float32 elsewhere. Recurrent states,
            gates, softmax, norms and option logits never have less than float32.
        max_round_tokens: stream rows that requests may share in one round; a longer request runs alone. On CUDA the
            largest graph has so many, rounded up to a multiple of 32. None for 16,384 on CUDA and 4,096 elsewhere.
        max_round_requests: requests that may share a round; None for 256. 1 is an ablation: no flat rounds.
        max_prompt_tokens: longest prompt of one question, its state included; None for what the model was made for, and
            on CUDA no more than a fifth of the free memory holds keys and values of.
        max_request_tokens: rows of one request, its state counted once; None for what there is memory for (but never
            less than a round has).
        model_name: name in responses; None for the last part of the model's path.
        compile: run the model through ``torch.compile``; None to do so on CUDA only. It takes up to a minute, once.
        graphs: CUDA graphs, one per capacity. "explicit" captures the compiled model, or the eager one;
            "reduce-overhead" leaves it to ``torch.compile``; "off" launches every kernel of every round; "auto" is the
            fastest, "explicit".
        temperatures: question type ("noul", "choice", "score") -> temperature that its logits are divided by. It
            replaces what is stored beside the model (``flide calibrate``); types that are missing keep that.
        depth: levels of a request's tree; None for 3. With 3 the candidates of a question share its tokens where that
            saves rows; on CUDA this takes one more compilation and more graphs, which 2 does without. Only formats with
            several prompts per question have a third level.
        escape_control_tokens: keep users' text that looks like a control token text even where the model's own format
            does not (Open-Jev's, whose parity with its reference ends there). Other formats always do.
        checkpoint_gb: memory (2**30 bytes, on the model's device) for checkpoints of states, from which later requests
            whose states begin alike resume; taken at once. 0 keeps none.
        checkpoint_host_gb: the same in page-locked host memory, for those that have no place on the device.
        checkpoint_dtype: of the recurrent states of checkpoints, "float32" or "bfloat16". The latter halves their
            memory and rounds a state once whenever it is resumed; within a round states are float32 in any case.
        fork: share a request's state between its questions. False is an ablation: every question runs alone.
        selective_readout: compute only the rows that are read in the last layer. False is an ablation.
    """

    device: str | torch.device = "auto"
    dtype: str | torch.dtype = "auto"
    max_round_tokens: int | None = None
    max_prompt_tokens: int | None = None
    max_request_tokens: int | None = None
    max_round_requests: int | None = None
    model_name: str | None = None
    compile: bool | None = None
    graphs: Literal["auto", "explicit", "reduce-overhead", "off"] = "auto"
    temperatures: Mapping[str, float] | None = None
    depth: int | None = None
    escape_control_tokens: bool = False
    checkpoint_gb: float = 0.0
    checkpoint_host_gb: float = 0.0
    checkpoint_dtype: Literal["float32", "bfloat16"] = "float32"
    fork: bool = True
    selective_readout: bool = True

    def __post_init__(self) -> None:
        for name in ("max_round_tokens", "max_prompt_tokens", "max_request_tokens", "max_round_requests"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ValueError(f"{name} must be a positive integer or None, got {value!r}")
        if self.model_name is not None and (not isinstance(self.model_name, str) or not self.model_name):
            raise ValueError(f"model_name must be a string that is not empty, or None, got {self.model_name!r}")
        for name in ("compile", "fork", "selective_readout", "escape_control_tokens"):
            if not isinstance(getattr(self, name), bool) and (name != "compile" or self.compile is not None):
                raise ValueError(f"{name} must be true or false, got {getattr(self, name)!r}")
        if self.depth not in (None, 2, MAX_DEPTH):
            raise ValueError(f"depth must be 2 or {MAX_DEPTH} levels or None, got {self.depth!r}")
        for name in ("checkpoint_gb", "checkpoint_host_gb"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MOST_GB:
                raise ValueError(f"{name} must be a number from 0 to {MOST_GB:g}, got {value!r}")
        if self.checkpoint_dtype not in ("float32", "bfloat16"):
            raise ValueError(f"checkpoint_dtype must be float32 or bfloat16, got {self.checkpoint_dtype!r}")
        if self.checkpoint_host_gb and not self.checkpoint_gb:
            raise ValueError("checkpoint_host_gb needs checkpoint_gb: states resume from the device's memory")
        if self.checkpoint_gb and not self.fork:
            raise ValueError("checkpoints are kept of states that questions share: checkpoint_gb needs fork=True")
        if self.graphs not in GRAPH_MODES:
            raise ValueError(f"graphs must be one of {', '.join(GRAPH_MODES)}, got {self.graphs!r}")
        if self.graphs == "reduce-overhead" and self.compile is False:
            raise ValueError("graphs='reduce-overhead' is a mode of torch.compile: it needs compile=True")
        if self.temperatures is not None:
            check_temperatures(self.temperatures)
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

    def resolve_compile(self, device: torch.device) -> bool:
        return device.type == "cuda" if self.compile is None else self.compile

    def resolve_graphs(self, device: torch.device) -> Literal["explicit", "reduce-overhead", "off"]:
        """How CUDA graphs are made.

        Raises:
            ValueError: graphs were asked for by name, and the device has none.
        """
        if device.type == "cuda":
            return "explicit" if self.graphs == "auto" else self.graphs
        if self.graphs not in ("auto", "off"):
            raise ValueError(f"graphs='{self.graphs}' needs a CUDA device, and the model is on '{device}'")
        return "off"

    def round_tokens(self, device: torch.device) -> int:
        if device.type != "cuda":
            return self.max_round_tokens or ROUND_TOKENS_CPU
        return max(SMALLEST, -(-(self.max_round_tokens or ROUND_TOKENS_CUDA) // ALIGN) * ALIGN)
