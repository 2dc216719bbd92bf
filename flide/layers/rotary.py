"""Rotary position embedding. Shapes: T rows, H head dim, R rotary dim, F = R / 2 frequencies, N heads."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flide.layers.norm import KeepFloat32


class RotaryTables(NamedTuple):
    """Cosines and sines of every stream row, ``[T, F]`` float32."""

    cos_TF: Tensor
    sin_TF: Tensor

    def select(self, rows: Tensor | None) -> RotaryTables:
        """Tables of some rows only; None keeps all."""
        if rows is None:
            return self
        return RotaryTables(self.cos_TF.index_select(0, rows), self.sin_TF.index_select(0, rows))


class RotaryEmbedding(KeepFloat32):
    """Angles ``position * theta^(-2i / R)`` with interleaved multi-axis sections (Qwen3.5's mRoPE).

    Frequency i reads the height position if ``i % 3 == 1 and i < 3 * sections[1]``, the width position if
    ``i % 3 == 2 and i < 3 * sections[2]``, else the time position. Text has three equal positions, which makes this
    plain RoPE.

    Args:
        rotary_dim: R, rotated channels of each head (the first R).
        theta: base of the frequencies.
        sections: frequencies per axis (time, height, width); None for plain RoPE on the time axis.
        num_frequencies: only so many pairs turn, the first ones, and the others stand still (proportional RoPE); None
            for all.
    """

    float32_names = ("inv_freq_F",)
    inv_freq_F: Tensor
    axis_F: Tensor

    def __init__(
        self,
        rotary_dim: int,
        theta: float,
        *,
        sections: tuple[int, int, int] | None = None,
        num_frequencies: int | None = None,
    ) -> None:
        super().__init__()
        exponent_F = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device="cpu") / rotary_dim
        axis_F = torch.zeros(rotary_dim // 2, dtype=torch.long, device="cpu")
        if sections is not None:
            axis_F[1 : 3 * sections[1] : 3] = 1
            axis_F[2 : 3 * sections[2] : 3] = 2
        inv_freq_F = 1.0 / theta**exponent_F
        if num_frequencies is not None:
            inv_freq_F[num_frequencies:] = 0
        self.register_buffer("inv_freq_F", inv_freq_F, persistent=False)
        self.register_buffer("axis_F", axis_F, persistent=False)

    def forward(self, positions_3T: Tensor) -> RotaryTables:
        angle_TF = positions_3T.index_select(0, self.axis_F).float().T.contiguous() * self.inv_freq_F
        return RotaryTables(angle_TF.cos(), angle_TF.sin())


def apply_rotary(x_TNH: Tensor, tables: RotaryTables) -> Tensor:
    """Rotate the first 2F channels of each head, halves paired (i, i + F); the rest passes through. Float32 inside."""
    cos_T1F, sin_T1F = tables.cos_TF[:, None], tables.sin_TF[:, None]
    half = cos_T1F.shape[-1]
    x1, x2, rest = x_TNH.float().split([half, half, x_TNH.shape[-1] - 2 * half], -1)
    return torch.cat([x1 * cos_T1F - x2 * sin_T1F, x2 * cos_T1F + x1 * sin_T1F, rest], -1).to(x_TNH.dtype)
