"""The checkpoint of a run: one file, replaced as a whole, from which the run goes on bit for bit.

It holds what is trained, the optimizer, the generators of random numbers, the step (from which the schedule and the
place in the data follow) and the options and data of the run.
"""

from __future__ import annotations

import os
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flide.errors import CheckpointError
from flide.heads.files import check_version

STATE_FILE = "training_state.pt"
FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True)
class TrainingState:
    """A run after some step.

    Attributes:
        config: ``TrainConfig.to_dict()``.
        model: path or Hub id of the base.
        data: fingerprint of the training rows.
        step: steps done.
        trained: name -> value of what is trained.
        optimizer: its state.
        rng: device -> state of its generator of random numbers.
        metrics_bytes: length of the metrics file after this step.
    """

    config: dict[str, Any]
    model: str
    data: str
    step: int
    trained: dict[str, Tensor]
    optimizer: dict[str, Any]
    rng: dict[str, Tensor]
    metrics_bytes: int

    def save(self, directory: Path) -> None:
        """Replace the directory's checkpoint, all or nothing.

        Raises:
            OSError: it cannot be written.
        """
        content = {name: getattr(self, name) for name in self.__slots__}
        unfinished = directory / f"{STATE_FILE}.tmp"
        with unfinished.open("wb") as file:
            torch.save({"format_version": FORMAT_VERSION, **content}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, directory / STATE_FILE)

    @classmethod
    def load(cls, directory: Path) -> TrainingState:
        """The checkpoint in a directory, its tensors on the CPU.

        Raises:
            CheckpointError: there is none, it is damaged or of a newer format.
        """
        path = directory / STATE_FILE
        try:
            content: Any = torch.load(path, map_location="cpu", weights_only=True)
        except FileNotFoundError:
            raise CheckpointError(f"there is no run to resume in {directory}: it has no {STATE_FILE}") from None
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise CheckpointError(f"cannot read {STATE_FILE}: {str(error).partition(chr(10))[0]}") from error
        check_version(STATE_FILE, content, FORMAT_VERSION)
        try:
            return cls(**{name: content[name] for name in cls.__slots__})
        except KeyError as error:
            raise CheckpointError(f"{STATE_FILE} has no {error}") from None


def rng_state() -> dict[str, Tensor]:
    """The state of torch's generators on all devices."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states |= {f"cuda:{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
    return states


def set_rng_state(states: dict[str, Tensor]) -> None:
    """Set torch's generators, as far as the devices are there."""
    for device, state in states.items():
        if device == "cpu":
            torch.set_rng_state(state)
        elif torch.cuda.is_available() and torch.device(device).index < torch.cuda.device_count():
            torch.cuda.set_rng_state(state, device)
