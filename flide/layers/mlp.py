"""Gated MLP. Shapes: T rows, D hidden size."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


class GatedMLP(nn.Module):
    """``down(silu(gate(x)) * up(x))``, without biases."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, hidden_states_TD: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(hidden_states_TD)) * self.up_proj(hidden_states_TD))
