"""Low-rank adapters: at first nothing, then W + scale * B A, in float32."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flide.layers import GatedMLP
from flide.layers.lora import LoRALinear, add_lora, lora_layers
from tests.tolerance import FP32_ROUNDING


def adapted(rank: int = 3, scale: float = 2.0, seed: int = 0) -> LoRALinear:
    layer = LoRALinear(nn.Linear(12, 7, bias=False), rank, scale)
    layer.reset_adapter(torch.Generator().manual_seed(seed))
    return layer


def test_a_new_adapter_changes_no_bit_and_keeps_the_weight() -> None:
    base = nn.Linear(12, 7, bias=False)
    layer = LoRALinear(base, 3, 2.0)
    layer.reset_adapter(torch.Generator().manual_seed(0))
    x = torch.randn(5, 12)
    assert layer.weight is base.weight
    assert torch.equal(layer(x), base(x))
    assert layer.lora_A.weight.abs().max() <= 12**-0.5
    assert torch.equal(adapted(seed=1).lora_A.weight, adapted(seed=1).lora_A.weight)
    assert not torch.equal(adapted(seed=1).lora_A.weight, adapted(seed=2).lora_A.weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sum_is_float32_whatever_the_base_is(dtype: torch.dtype) -> None:
    layer = adapted().to(dtype)
    nn.init.normal_(layer.lora_B.weight)
    assert (layer.weight.dtype, layer.lora_A.weight.dtype, layer.lora_B.weight.dtype) == (dtype, *[torch.float32] * 2)
    x = torch.randn(5, 12, dtype=dtype)
    y = layer(x)
    a, b = layer.lora_A.weight.double(), layer.lora_B.weight.double()
    expected = (x @ layer.weight.T).double() + 2 * (x.double() @ a.T @ b.T)
    assert y.dtype == dtype
    assert (y.double() - expected).abs().max() <= (FP32_ROUNDING if dtype == torch.float32 else 2**-8) * 30


def test_layers_are_chosen_by_the_last_part_of_their_name() -> None:
    def model() -> nn.ModuleDict:
        return nn.ModuleDict({"mlp": GatedMLP(8, 12), "lm_head": nn.Linear(8, 20, bias=False)})

    every, some = model(), model()
    add_lora(every, rank=2, scale=1.0, generator=torch.Generator())
    assert [name for name, _ in lora_layers(every)] == ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    add_lora(some, rank=2, scale=1.0, generator=torch.Generator(), targets=["up_proj"])
    assert set(some.state_dict()) - set(model().state_dict()) == {
        "mlp.up_proj.lora_A.weight",
        "mlp.up_proj.lora_B.weight",
    }
    with pytest.raises(ValueError, match="no linear layer is called q_proj; there are down_proj, gate_proj, up_proj"):
        add_lora(model(), rank=2, scale=1.0, generator=torch.Generator(), targets=["up_proj", "q_proj"])


def test_adapted_layers_are_not_merged_into_one_product() -> None:
    mlp = nn.ModuleDict({"mlp": GatedMLP(8, 12)})
    add_lora(mlp, rank=2, scale=1.0, generator=torch.Generator(), targets=["up_proj"])
    mlp["mlp"].merge_projections()
    assert mlp["mlp"].merged is None


def test_a_rank_that_no_matrix_has_is_refused() -> None:
    model = nn.ModuleDict({"mlp": GatedMLP(8, 12), "lm_head": nn.Linear(99, 99, bias=False)})
    with pytest.raises(ValueError, match="a rank of 9 is more .*: 8"):
        add_lora(model, rank=9, scale=1.0, generator=torch.Generator())
    add_lora(model, rank=8, scale=1.0, generator=torch.Generator())
