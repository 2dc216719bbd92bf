"""Gated MLP. Shapes: T rows, D hidden size, I intermediate size."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from flide.layers.merge import MergedLinear, merge


class GatedMLP(nn.Module):
    """``down(silu(gate(x)) * up(x))``, without biases. Subclasses change the activation (:meth:`activate`)."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)
        self.merged: MergedLinear | None = None

    def forward(self, hidden_states_TD: Tensor) -> Tensor:
        if self.merged is not None:
            gate, up = self.merged(hidden_states_TD)
        else:
            gate, up = self.gate_proj(hidden_states_TD), self.up_proj(hidden_states_TD)
        return self.down_proj(self.activate(gate) * up)

    def activate(self, gate_TI: Tensor) -> Tensor:
        return F.silu(gate_TI)

    def merge_projections(self) -> None:
        """One product for gate and up; see ``flide.layers.merge``."""
        self.merged = merge([self.gate_proj], [self.up_proj])
