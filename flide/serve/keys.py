"""API keys: who may ask, by name. Keys themselves are not kept, only their digests."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from pathlib import Path

from flide.errors import FlideError
from flide.serve.faults import unauthenticated

ANYONE = "anyone"  # the name of a client where no key is asked for


class KeyRing:
    """Keys by the name of who holds them.

    Args:
        keys: name -> key.

    Raises:
        FlideError: a name or key that cannot be used.
    """

    def __init__(self, keys: Mapping[str, str]) -> None:
        for name, key in keys.items():
            if not name or not name.isprintable() or len(name) > 64:
                raise FlideError("a key's name should be 1 to 64 printable characters")
            if not key or not key.isascii() or not key.isprintable() or " " in key:
                raise FlideError(f"the key of {name!r} should be printable ASCII without spaces")
        if len(set(keys.values())) < len(keys):
            raise FlideError("two names have the same key")
        self._digests = {name: _digest(key) for name, key in keys.items()}

    @classmethod
    def from_file(cls, path: str | Path) -> KeyRing:
        """Keys from lines ``name:key``; empty lines and lines that begin with # are skipped.

        Raises:
            FlideError: it cannot be read, or a line is something else.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise FlideError(f"cannot read the key file: {getattr(error, 'strerror', None) or 'not UTF-8'}") from error
        keys: dict[str, str] = {}
        for number, line in enumerate(text.splitlines(), 1):
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            name, colon, key = (part.strip() for part in line.partition(":"))
            if not colon or name in keys:
                raise FlideError(f"line {number} of the key file should be name:key, with a name of its own")
            keys[name] = key
        if not keys:
            raise FlideError("the key file has no keys")
        return cls(keys)

    def holder(self, authorization: str | None) -> str:
        """The name of whose key an ``Authorization`` header brings.

        Raises:
            Fault: 401.
        """
        scheme, _, key = (authorization or "").strip().partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise unauthenticated("A key is needed: send it as 'Authorization: Bearer KEY'.")
        digest, found = _digest(key.strip()), None
        for name, expected in self._digests.items():  # all of them, so that time does not tell
            if hmac.compare_digest(digest, expected):
                found = name
        if found is None:
            raise unauthenticated("The key is not known.")
        return found


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
