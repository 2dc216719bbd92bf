"""Pickles of small objects that many messages carry: fields in order, arrays as their bytes.

Dataclasses with slots, and numpy's arrays, pickle themselves through a good deal of Python: a request of one question
took 50 us and 4.8 KB, and as long again to read.
"""

from __future__ import annotations

import functools
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Compact:
    """Base of slotted dataclasses that are pickled by their fields, in order. Arrays come back read-only."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        kind: Any = type(self)
        return _restore, (kind, *[_packed(getattr(self, name)) for name in _field_names(kind)])


class _Array(tuple[Any, ...]):
    """Bytes, type and shape of an array."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return _array, tuple(self)


@functools.cache
def _field_names(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind) if field.init)


def _packed(value: Any) -> Any:
    return _Array((value.tobytes(), value.dtype.char, value.shape)) if isinstance(value, np.ndarray) else value


def _array(data: bytes, kind: str, shape: tuple[int, ...]) -> NDArray[Any]:
    return np.frombuffer(data, kind).reshape(shape)


def _restore(cls: type[Any], *fields: Any) -> Any:
    return cls(*fields)


__all__ = ["Compact"]
