"""The checkpoint of a run: one file, replaced as a whole, from which the run goes on bit for bit.

It holds what is trained, the optimizer, the generators of random numbers, the step (from which the schedule and the
place in the data follow) and the options and data of the run.
"""

from __future__ import annotations

import io
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from flide.errors import CheckpointError
from flide.models.directory import UNFINISHED_FILE
from flide.stored_json import check_version

STATE_FILE = UNFINISHED_FILE
FORMAT_VERSION = 1


_KINDS: dict[str, type] = {
    "config": dict,
    "model": str,
    "data": str,
    "step": int,
    "trained": dict,
    "optimizer": dict,
    "rng": dict,
    "metrics_bytes": int,
}


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
        buffer = io.BytesIO()  # torch tells of a full disk in words of its own
        torch.save({"format_version": FORMAT_VERSION, **content}, buffer)
        unfinished = directory / f"{STATE_FILE}.tmp"
        try:
            with unfinished.open("wb") as file:
                file.write(buffer.getbuffer())
                file.flush()
                os.fsync(file.fileno())
            os.replace(unfinished, directory / STATE_FILE)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise

    @classmethod
    def load(cls, directory: Path) -> TrainingState:
        """The checkpoint in a directory, its tensors on the CPU.

        Raises:
            CheckpointError: there is none, it is damaged or of a newer format.
        """
        path = directory / STATE_FILE
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            raise CheckpointError(f"there is no run to resume in {directory}: it has no {STATE_FILE}") from None
        except OSError as error:
            raise CheckpointError(f"cannot read {STATE_FILE}: {error.strerror or error}") from error
        try:
            with warnings.catch_warnings(action="ignore"):
                content: Any = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Exception as error:  # of any kind: damaged bytes are a program for the unpickler, which runs no code
            raise CheckpointError(f"{STATE_FILE} is damaged, or not written by Flide") from error
        check_version(STATE_FILE, content, FORMAT_VERSION)
        for name, kind in _KINDS.items():
            if name not in content:
                raise CheckpointError(f"{STATE_FILE} has no {name!r}")
            if type(content[name]) is not kind or (kind is int and content[name] < 0):
                raise CheckpointError(f"{STATE_FILE} is damaged: {name!r} is not what it should be")
        return cls(**{name: content[name] for name in _KINDS})


def hold(file: BinaryIO, taken: str) -> None:
    """Lock a file until it is closed, where the system and the file system have locks.

    Raises:
        CheckpointError: another process holds it; with the message ``taken``.
    """
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise CheckpointError(taken) from None
    except (ImportError, OSError):
        return


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
