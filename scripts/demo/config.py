"""What decides how the demo model comes out."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoConfig:
    """Everything that decides what comes out.

    Attributes:
        tokenizer_rows, baseline_rows: the first training rows, which the tokenizer and the baseline see.
        val_rows, test_rows: of the other splits.
        steps, batch_questions: of the optimiser, and questions of one, at most; every step has new rows.
        lr: the highest rate; it rises for ``warmup`` steps and falls to a tenth as a cosine.
        next_token_weight, option_row_weight: of the auxiliary losses (``next_token_loss``, ``option_row_logits``).
        dropped_words: share of the words that half of the training rows lack.
        hidden_size, intermediate_size, layers: of the model; an L is a Gated DeltaNet layer, an F full attention.
        seed: of the weights and the order.
    """

    tokenizer_rows: int = 12_000
    baseline_rows: int = 60_000
    val_rows: int = 2_000
    test_rows: int = 3_000
    steps: int = 4_400
    batch_questions: int = 576
    lr: float = 1.5e-3
    warmup: int = 300
    weight_decay: float = 0.05
    next_token_weight: float = 0.1
    option_row_weight: float = 0.3
    dropped_words: float = 0.12
    hidden_size: int = 256
    intermediate_size: int = 512
    layers: str = "LLFLLF"
    seed: int = 1
