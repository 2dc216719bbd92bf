"""Head norm and rotation: the reference against its formula, the kernel against the reference, gradients, opcheck."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flide.layers import RMSNorm, RotaryTables, apply_rotary
from flide.ops.norm_rotary import norm_rotary
from flide.ops.norm_rotary.reference import norm_rotary_reference
from tests.tolerance import FP32_RELATIVE, FP64, KERNEL_BUDGET

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# rows, heads, head dim, rotated pairs
SIZES = [(1, 1, 16, 8), (7, 3, 32, 4), (33, 2, 256, 32), (5, 6, 64, 32), (9, 2, 512, 256)]


def inputs(size: tuple[int, ...], dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> tuple[Tensor, ...]:
    rows, heads, dim, pairs = size
    generator = torch.Generator().manual_seed(seed)
    merged = torch.randn(rows, heads, 2, dim, generator=generator).to(dtype).to(device)
    weight = torch.randn(dim, generator=generator).to(dtype).to(device)
    angle = 10 * torch.randn(rows, pairs, generator=generator).to(device)
    return merged[:, :, 0], weight, angle.cos(), angle.sin()  # a strided view, as of merged projections


def run(x: Tensor, *rest: Tensor) -> Tensor:
    """Through the kernel: on a GPU, or in the interpreter."""
    if x.is_cuda:
        return norm_rotary(x, *rest, eps=1e-6, offset=1.0)
    from flide.ops.norm_rotary.triton import norm_rotary_triton

    return norm_rotary_triton(x, *rest, eps=1e-6, offset=1.0)


@pytest.mark.parametrize("size", SIZES)
def test_kernel_in_float32(size: Any) -> None:
    x, *rest = inputs(size, torch.float32, DEVICE)
    exact = norm_rotary_reference(x.double(), *(y.double() for y in rest), eps=1e-6, offset=1.0)
    out = run(x, *rest)
    assert out.is_contiguous()
    assert (out.double() - exact).abs().max() <= FP32_RELATIVE * exact.abs().max()


def test_kernel_takes_inputs_of_any_strides() -> None:
    x, weight, cos, sin = inputs(SIZES[2], torch.float32, DEVICE)
    expected = run(x, weight, cos, sin)
    strided = [y.T.contiguous().T for y in (cos, sin)]
    assert torch.equal(run(x, weight, *strided), expected)
    assert torch.equal(run(x.mT.contiguous().mT, weight.repeat_interleave(2)[::2], cos, strided[1]), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [(6658, 8, 256, 32), (345, 2, 256, 32), (6658, 8, 512, 256), (345, 1, 512, 256)])
def test_kernel_in_bfloat16(size: Any) -> None:
    x, *rest = inputs(size, torch.bfloat16, "cuda")
    exact = norm_rotary_reference(x.double(), *(y.double() for y in rest), eps=1e-6, offset=1.0)
    best = (exact.bfloat16().double() - exact).norm()
    assert (run(x, *rest).double() - exact).norm() <= KERNEL_BUDGET * best


@pytest.mark.parametrize("size", SIZES)
def test_reference_is_the_norm_and_then_the_rotation(size: Any) -> None:
    x, weight, cos, sin = inputs(size, torch.float32)
    norm = RMSNorm(size[2], 1e-6, offset=1.0)
    with torch.no_grad():
        norm.weight.copy_(weight)
        expected = apply_rotary(norm(x), RotaryTables(cos, sin))
    torch.testing.assert_close(norm_rotary(x, weight, cos, sin, eps=1e-6, offset=1.0), expected)


def test_gradients_are_those_of_the_formula() -> None:
    x, weight, cos, sin = (y.double() for y in inputs((3, 2, 16, 4), torch.float64))
    x, weight = x.contiguous().requires_grad_(), weight.requires_grad_()
    assert torch.autograd.gradcheck(lambda x, w: norm_rotary(x, w, cos, sin, eps=1e-6), (x, weight), atol=1e3 * FP64)


def test_opcheck() -> None:
    x, weight, cos, sin = inputs(SIZES[1], torch.float32)
    arguments = (x.clone().requires_grad_(), weight.requires_grad_(), cos, sin, 1e-6, 1.0)
    torch.library.opcheck(torch.ops.flide.norm_rotary.default, arguments)


def test_no_rows() -> None:
    x, *rest = inputs((0, 2, 16, 4), torch.float32)
    assert norm_rotary(x, *rest, eps=1e-6).shape == (0, 2, 16)
