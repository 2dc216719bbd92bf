"""Shared fixtures. Tests never download: the Hub is switched off."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
# Waiting threads must not spin: on a shared machine they take the time of the ones that work. Read when torch loads.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest  # noqa: E402
import torch  # noqa: E402

if not torch.cuda.is_available():
    # Kernels are tested by Triton's interpreter. Read where a kernel is defined.
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def engine() -> Iterator[Any]:
    """An engine of the tiny model, on the CPU."""
    from flide import EngineConfig
    from tests.tiny_model import tiny_engine

    with tiny_engine(EngineConfig(device="cpu")) as shared:
        yield shared


def pytest_configure() -> None:
    """Ctrl-C ends what tests start where it does not end the tests, too: in the background of a shell's script."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
