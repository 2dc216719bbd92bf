"""Low-rank adapters of linear layers (Hu et al. 2021, "LoRA"), for training.

Module and parameter names are those of PEFT's files without their prefix: ``q_proj.weight`` stays, and
``q_proj.lora_A.weight`` and ``q_proj.lora_B.weight`` are new. Shapes: R rank, leading dims free.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flide.layers.norm import keeping_dtype


class Float32Linear(nn.Linear):
    """A linear layer without bias that stays float32 under ``.to(dtype)``."""

    def __init__(self, in_features: int, out_features: int, *, device: torch.device | None = None) -> None:
        super().__init__(in_features, out_features, bias=False, device=device, dtype=torch.float32)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        return super()._apply(keeping_dtype(fn), recurse)


class LoRALinear(nn.Linear):
    """``W x + scale * B (A x)``: W frozen, A and B float32 and trained. The sum is float32, cast to the dtype of W.

    Args:
        base: a linear layer without bias; its weight becomes this layer's.
        rank: R.
        scale: factor of the low-rank part; PEFT's ``lora_alpha / R``.
    """

    def __init__(self, base: nn.Linear, rank: int, scale: float) -> None:
        super().__init__(base.in_features, base.out_features, bias=False, device="meta")
        self.scale = scale
        self.weight = base.weight
        self.lora_A = Float32Linear(base.in_features, rank, device=base.weight.device)
        self.lora_B = Float32Linear(rank, base.out_features, device=base.weight.device)

    def forward(self, input: Tensor) -> Tensor:
        base = F.linear(input, self.weight)
        low_rank = self.lora_B(self.lora_A(input.float())) * self.scale
        return (base.float() + low_rank).to(base.dtype)

    def reset_adapter(self, generator: torch.Generator) -> None:
        """A uniform as a linear layer of its size, B zero: at first the layer is its base. The generator is a CPU's."""
        bound = 1 / math.sqrt(self.in_features)
        with torch.no_grad():
            self.lora_A.weight.copy_(torch.empty(self.lora_A.weight.shape).uniform_(-bound, bound, generator=generator))
            self.lora_B.weight.zero_()


def lora_layers(model: nn.Module) -> Iterator[tuple[str, LoRALinear]]:
    """The adapted layers of a model by name."""
    for name, module in model.named_modules():
        if isinstance(module, LoRALinear):
            yield name, module


def add_lora(
    model: nn.Module,
    *,
    rank: int,
    scale: float,
    generator: torch.Generator,
    targets: Collection[str] | None = None,
    but: Collection[str] = ("lm_head", "head"),
) -> None:
    """Put adapters on linear layers, in place.

    Args:
        model: its projections not merged.
        rank, scale: see :class:`LoRALinear`.
        generator: of the initial values.
        targets: last parts of the names of layers, such as "q_proj"; None for every linear layer.
        but: direct children of the model that are left alone.

    Raises:
        ValueError: no layer has one of the names, or no matrix the rank.
    """
    found = [
        (f"{prefix}.{name}" if prefix else name, parent, name, child)
        for prefix, parent in model.named_modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear and child.bias is None
    ]
    found = [entry for entry in found if entry[0].partition(".")[0] not in but]
    names = {name for _, _, name, _ in found}
    unknown = sorted(set(names if targets is None else targets) - names)
    if unknown or not found:
        raise ValueError(f"no linear layer is called {', '.join(unknown)}; there are {', '.join(sorted(names))}")
    largest = max(min(child.weight.shape) for _, _, name, child in found if targets is None or name in targets)
    if rank > largest:
        raise ValueError(f"a rank of {rank} is more than the matrices have that are adapted: {largest}")
    for _, parent, name, child in found:
        if targets is None or name in targets:
            layer = LoRALinear(child, rank, scale)
            layer.reset_adapter(generator)
            setattr(parent, name, layer)
