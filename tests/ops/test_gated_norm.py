"""Gated norm: the reference against its formula, the kernel against the reference, gradients, opcheck."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from flide.ops.gated_norm import gated_norm
from flide.ops.gated_norm.reference import gated_norm_reference
from tests.tolerance import FP32_RELATIVE, FP64, KERNEL_BUDGET

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# rows, heads, value dim; most of them leave the last program a part of a block
SIZES = [(1, 1, 16), (7, 3, 32), (33, 16, 128), (5, 6, 64), (9, 5, 40)]


def inputs(size: tuple[int, ...], dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> tuple[Tensor, ...]:
    """The weight is float32 in every dtype."""
    rows, heads, dim = size
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, heads, dim, generator=generator).to(dtype).to(device)
    sizes = [2 * heads * dim, heads * dim, 2 * heads]
    merged = 3 * torch.randn(rows, sum(sizes), generator=generator).to(dtype).to(device)
    gate = merged.split(sizes, -1)[1].unflatten(-1, (heads, dim))  # a strided view, as of merged projections
    weight = torch.randn(dim, generator=generator).to(device)
    return x, gate, weight


def in_float64(*tensors: Tensor) -> Tensor:
    return gated_norm_reference(*(x.double() for x in tensors), eps=1e-6)


def run(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    """Through the kernel: on a GPU, or in the interpreter."""
    if x.is_cuda:
        return gated_norm(x, gate, weight, eps=1e-6)
    from flide.ops.gated_norm.triton import gated_norm_triton

    return gated_norm_triton(x, gate, weight, eps=1e-6)


@pytest.mark.parametrize("scale", [1e-4, 1.0])  # 1e-4: eps counts
@pytest.mark.parametrize("size", SIZES)
def test_kernel_in_float32(size: Any, scale: float) -> None:
    x, gate, weight = inputs(size, torch.float32, DEVICE)
    x *= scale
    exact = in_float64(x, gate, weight)
    out = run(x, gate, weight)
    assert out.dtype == torch.float32
    assert out.is_contiguous()
    assert (out.double() - exact).abs().max() <= FP32_RELATIVE * exact.abs().max()


def test_kernel_takes_inputs_of_any_strides() -> None:
    x, gate, weight = inputs(SIZES[2], torch.float32, DEVICE)
    expected = run(x, gate, weight)
    x_heads_first, gate_heads_first = (y.transpose(0, 1).contiguous().transpose(0, 1) for y in (x, gate))
    assert torch.equal(run(x_heads_first, gate, weight), expected)
    assert torch.equal(run(x, gate_heads_first, weight), expected)
    columns = [y.mT.contiguous().mT for y in (x, gate)]
    assert torch.equal(run(*columns, weight.repeat_interleave(2)[::2]), expected)
    assert torch.equal(run(torch.stack([x, gate], 1)[:, 0], gate.contiguous(), weight), expected)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("value", [100.0, -100.0, 1e30, -1e30, 0.0])
def test_kernel_with_open_and_shut_gates(value: float) -> None:
    x, gate, weight = inputs(SIZES[1], torch.float32, DEVICE)
    gate[::2] = value
    exact = in_float64(x, gate, weight)
    out = run(x, gate, weight).double()
    assert out.isfinite().all()
    for part in (slice(0, None, 2), slice(1, None, 2)):
        assert (out[part] - exact[part]).abs().max() <= FP32_RELATIVE * exact[part].abs().max().clamp(min=1)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [(7040, 16, 128), (345, 48, 128), (33, 3, 40)])
def test_kernel_in_bfloat16(size: Any) -> None:
    x, gate, weight = inputs(size, torch.bfloat16, "cuda")
    exact = in_float64(x, gate, weight)
    best = (exact.bfloat16().double() - exact).norm()
    out = run(x, gate, weight)
    assert out.dtype == torch.bfloat16
    assert (out.double() - exact).norm() <= KERNEL_BUDGET * best


@pytest.mark.gpu
def test_kernel_beyond_32_bit_offsets() -> None:
    x, gate, weight = inputs((3, 2, 128), torch.bfloat16, "cuda")
    far = x.new_empty(2**31 + 2 * x[0].numel()).as_strided((3, 4, 128), (2**30, 128, 1))
    far[:, :2], far[:, 2:] = x, gate
    assert torch.equal(run(far[:, :2], far[:, 2:], weight), run(x, gate, weight))


@pytest.mark.parametrize("size", SIZES)
def test_reference_is_the_norm_times_the_gate(size: Any) -> None:
    x, gate, weight = (y.double() for y in inputs(size, torch.float32))
    expected = F.rms_norm(x, x.shape[-1:], weight, 1e-6) * (gate * gate.sigmoid())
    torch.testing.assert_close(gated_norm(x, gate, weight, eps=1e-6), expected, rtol=FP64, atol=FP64)


def test_reference_rounds_once_in_bfloat16() -> None:
    x, gate, weight = inputs(SIZES[2], torch.bfloat16)
    exact = gated_norm(x.float(), gate.float(), weight, eps=1e-6)
    out = gated_norm(x, gate, weight, eps=1e-6)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, exact.bfloat16())


def test_gradients_are_those_of_the_formula() -> None:
    leaves = [y.contiguous().requires_grad_() for y in (z.double() for z in inputs((3, 2, 16), torch.float64))]
    assert torch.autograd.gradcheck(lambda *y: gated_norm(*y, eps=1e-6), leaves, atol=1e3 * FP64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(dtype: torch.dtype) -> None:
    x, gate, weight = inputs(SIZES[1], dtype)
    arguments = (x.requires_grad_(), gate.detach().requires_grad_(), weight.requires_grad_(), 1e-6)
    torch.library.opcheck(torch.ops.flide.gated_norm.default, arguments)


def test_no_rows() -> None:
    x, gate, weight = inputs((0, 2, 16), torch.float32, DEVICE)
    assert gated_norm(x, gate, weight, eps=1e-6).shape == (0, 2, 16)
    assert run(x, gate, weight).shape == (0, 2, 16)
