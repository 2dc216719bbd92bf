"""Random models of any shape, whose every part matters to what they answer."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from flide.models import Gemma4ForDecision
from flide.models.auto import family_of
from flide.models.decision import ForDecision

CONFIGS = Path(__file__).parent / "configs"
SIZES = {
    size: CONFIGS / f"{family}-{size}.json"
    for family, sizes in {
        "qwen3.5": ("0.8b", "2b", "4b", "9b", "27b"),
        "gemma-4": ("e2b", "e4b", "12b", "31b"),
    }.items()
    for size in sizes
}
RESTING_STD = 0.1  # of the noise on norm weights, which would otherwise all be one
DECAY_STEPS = (1e-3, 1e-1)  # of softplus(dt_bias)
SCORE_STD = 2.0  # of attention scores that are not scaled
LAYER_SCALARS = (0.8, 1.2)


def config_of(size: str) -> dict[str, Any]:
    """The published config of a size, in any case."""
    fields: dict[str, Any] = json.loads(SIZES[size.lower()].read_text(encoding="utf-8"))
    return fields


def random_model(config: Mapping[str, Any], *, device: torch.device | str, seed: int = 0) -> ForDecision:
    """A random bfloat16 model whose every part matters to its output.

    ``from_config`` alone leaves norm weights at one, all but silences the short convolution (deviation 0.02 over four
    taps) and with it the delta rule, whose output then drowns in the epsilon of the norm behind it; and its decays
    forget a trunk within a token or two. So norm weights get noise, convolutions their fan-in, and steps
    ``softplus(dt_bias)`` are log-uniform in 0.001 to 0.1, as Gated DeltaNet models are initialised for training.

    A token's query and key are made alike, as in ``tests/oracle.py``: where their product is near 0, the delta rule's
    output is tiny and the norm behind it blows rounding up. That matters at true shapes, too, less than in tiny models
    (0.8b, two prompts, float32 and bfloat16 on a CPU; errors relative to the logits' deviation): independent q and k
    make transformers' bfloat16 error 0.095 instead of 0.038 and two float32 computations 7e-6 instead of 3e-6 apart. A
    fault would hide in amplified noise, and the ratio of two noises would depend on chance.

    Gemma 4 does not scale its scores: head norms near 1 would make them as large as 16 or 23, and all but one key
    invisible. So theirs are such that scores have a deviation of 2. The scales of its layers are spread around 1.

    It favours neither side: all computations get the same values. Those of float32 parameters are bfloat16 values,
    because transformers loads every parameter as bfloat16 and would otherwise start from other weights than Flide.
    """
    torch.manual_seed(seed)
    model = family_of(config).from_config(dict(config), dtype=torch.bfloat16, device=device).eval()
    is_gemma = isinstance(model, Gemma4ForDecision)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("conv1d.weight"):
                parameter.normal_(std=parameter[0].numel() ** -0.5)
            elif "norm" in name:
                parameter.add_(torch.randn_like(parameter), alpha=RESTING_STD)
                if is_gemma and name.endswith(("q_norm.weight", "k_norm.weight")):
                    parameter.mul_((SCORE_STD / len(parameter) ** 0.5) ** 0.5)
            elif name.endswith("layer_scalar"):
                parameter.uniform_(*LAYER_SCALARS)
            elif name.endswith("dt_bias"):
                low, high = (math.log(step) for step in DECAY_STEPS)
                step = torch.empty_like(parameter, dtype=torch.float32).uniform_(low, high).exp()
                parameter.copy_(step + torch.log(-torch.expm1(-step)))  # the inverse of softplus
            if name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
                keys = model.config.linear_num_key_heads * model.config.linear_key_head_dim
                parameter[:keys] = parameter[keys : 2 * keys] + 0.5 * parameter[:keys]
            parameter.copy_(parameter.bfloat16())
    return model
