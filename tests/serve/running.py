"""A server for one test or module."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from flide import Engine
from flide.serve.config import ServeConfig
from tests.serve.conftest import Served


@contextlib.contextmanager
def running(engine: Engine, **options: Any) -> Iterator[str]:
    """The URL of a server that answers with an engine."""
    served = Served(engine, ServeConfig(**options))
    try:
        yield served.url
    finally:
        served.stop()
