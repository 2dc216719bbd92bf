"""Fixtures of the op tests: memory that Flide allocates without writing is poisoned; kernels of large rounds."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

POISONED = ((torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"), (Tensor, "new_empty"))


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """The tensors are tiny: waking a second thread for them costs more than it saves."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def dynamo_tables() -> None:
    """Compile once before anything is patched: torch.compile lists torch's functions at its first use, for good."""
    torch.compile(lambda x: x + 1, backend="eager")(torch.zeros(1))


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def large_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every round is launched like one of thousands of rows: with tiles of their own for short chunks."""
    from flide.ops.fork_gated_delta import triton as delta

    table_of = delta.launch_table
    monkeypatch.setattr(delta, "launch_table", lambda device: replace(table_of(device), large_rows=0))


@pytest.fixture(autouse=True)
def poison_empty(monkeypatch: pytest.MonkeyPatch, dynamo_tables: None) -> None:
    """Fill ``torch.empty`` and its kin with NaN or huge negative integers when ``flide`` code calls them."""
    for owner, name in POISONED:
        monkeypatch.setattr(owner, name, _poisoned(getattr(owner, name)))


def _poisoned(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(allocate)
    def wrapper(*args: Any, **kwargs: Any) -> Tensor:
        x = allocate(*args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if caller.split(".")[0] == "flide" and not isinstance(x, FakeTensor):
            with torch.no_grad():
                x.fill_(_poison(x.dtype))
        return x

    return wrapper


def _poison(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype == torch.bool else torch.iinfo(dtype).min // 2
