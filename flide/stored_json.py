"""Small JSON files beside a model: read within bounds, written all or nothing, versioned where they are ours."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from flide.errors import CheckpointError

MAX_BYTES = 16 << 20


def read_json_file(path: Path) -> Any:
    """What a file holds.

    Raises:
        FileNotFoundError: there is none.
        CheckpointError: it cannot be read, is too large or no JSON.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise CheckpointError(f"{path} is larger than {MAX_BYTES} bytes")
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, CheckpointError):
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot read {path.name}: {error}") from error


def check_version(name: str, content: Any, newest: int) -> None:
    """See that a file of ours is of a format that this Flide reads.

    Raises:
        CheckpointError: it is not, or says nothing.
    """
    version = content.get("format_version") if isinstance(content, dict) else None
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise CheckpointError(f"{name} has no format_version")
    if version > newest:
        raise CheckpointError(f"{name} has format_version {version}; this Flide reads {newest}")


def write_json_file(path: Path, content: Any) -> None:
    """Store content, all or nothing.

    Raises:
        OSError: the file cannot be written.
    """
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(unfinished, path)
