"""Package exports that are imported when they are asked for: torch takes two seconds, which not all need wait for."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy_exports(package: str, names_of: Mapping[str, tuple[str, ...]]) -> Callable[[str], Any]:
    """A package's ``__getattr__``.

    Args:
        package: its ``__name__``.
        names_of: module -> the names that the package exports from it.
    """
    module_of = {name: module for module, names in names_of.items() for name in names}

    def get(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(module_of[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return get
