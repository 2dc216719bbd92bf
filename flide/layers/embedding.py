"""Token embedding. Shapes: T rows, D hidden size."""

from __future__ import annotations

import torch
from torch import Tensor, nn

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class ScaledEmbedding(nn.Embedding):
    """Rows of a table times a number, which is first rounded to the table's dtype.

    Args:
        num_embeddings, embedding_dim: rows of the table, and D.
        scale: the number.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, scale: float) -> None:
        super().__init__(num_embeddings, embedding_dim)
        # Rounded here: a compiler that fuses a cast with the product leaves it out.
        self.scales = {dtype: torch.tensor(scale, dtype=dtype, device="cpu").item() for dtype in _DTYPES}

    def forward(self, input: Tensor) -> Tensor:
        # A compiler computes addresses in the indices' dtype, and a table may have more than 2^31 elements.
        return super().forward(input.long()) * self.scales[self.weight.dtype]
