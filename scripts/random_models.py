"""Random models of any shape, whose every part matters to what they answer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from flide.models import Qwen35ForDecision

RESTING_STD = 0.1  # of the noise on norm weights, which would otherwise all be one
DECAY_STEPS = (1e-3, 1e-1)  # of softplus(dt_bias)


def random_model(config: Mapping[str, Any], *, device: torch.device | str, seed: int = 0) -> Qwen35ForDecision:
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

    It favours neither side: all computations get the same values. Those of float32 parameters are bfloat16 values,
    because transformers loads every parameter as bfloat16 and would otherwise start from other weights than Flide.
    """
    torch.manual_seed(seed)
    model = Qwen35ForDecision.from_config(dict(config), dtype=torch.bfloat16, device=device).eval()
    keys = model.config.linear_num_key_heads * model.config.linear_key_head_dim
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("conv1d.weight"):
                parameter.normal_(std=parameter[0].numel() ** -0.5)
            elif "norm" in name:
                parameter.add_(torch.randn_like(parameter), alpha=RESTING_STD)
            elif name.endswith("dt_bias"):
                low, high = (math.log(step) for step in DECAY_STEPS)
                step = torch.empty_like(parameter, dtype=torch.float32).uniform_(low, high).exp()
                parameter.copy_(step + torch.log(-torch.expm1(-step)))  # the inverse of softplus
            if name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
                parameter[:keys] = parameter[keys : 2 * keys] + 0.5 * parameter[:keys]
            parameter.copy_(parameter.bfloat16())
    return model
