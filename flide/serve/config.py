"""ServeConfig: every limit of the server and every default, in one place."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from flide.errors import FlideError
from flide.serve.keys import KeyRing


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeConfig:
    """Options of the server.

    Attributes:
        host, port: where to listen.
        keys: who may ask; None for anyone, which is refused beyond the machine itself unless ``insecure``.
        insecure: listen beyond the machine without keys.
        root_path: prefix under which a proxy shows the server.
        names: names of the model that requests may use, beside ``jev-latest``; the first one is in the answers.
        max_waiting: requests that may wait, max_waiting_tokens: their tokens.
        max_per_key: requests of one key that may wait or run; None for any number.
        max_wait: seconds a request may wait before it runs.
        request_timeout: seconds from a request's body to its answer.
        body_timeout: seconds in which a body has to arrive.
        max_body_bytes: of a body as sent, and of what it unpacks to.
        max_bodies_bytes: of all bodies that are read at the same time, by one process.
        max_questions: of one request.
        share_checkpoints: let requests of different keys resume from each other's states. Whoever has a key could then
            tell from the time of an answer, and from its ``reused_tokens``, what others have asked about.
        stuck_after: seconds that the engine may end nothing before ``/ready`` says that it hangs.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    keys: KeyRing | None = None
    insecure: bool = False
    root_path: str = ""
    names: tuple[str, ...] = ()
    max_waiting: int = 4096
    max_waiting_tokens: int = 16_000_000
    max_per_key: int | None = None
    max_wait: float = 20.0
    request_timeout: float = 60.0
    body_timeout: float = 10.0
    max_body_bytes: int = 32 << 20
    max_bodies_bytes: int = 512 << 20
    max_questions: int = 4096
    share_checkpoints: bool = False
    stuck_after: float = 60.0

    def __post_init__(self) -> None:
        for name in ("max_waiting", "max_waiting_tokens", "max_body_bytes", "max_bodies_bytes", "max_questions"):
            if getattr(self, name) < 1:
                raise FlideError(f"{name} should be at least 1")
        for name in ("max_wait", "request_timeout", "body_timeout", "stuck_after"):
            if not 0 < getattr(self, name) < float("inf"):
                raise FlideError(f"{name} should be a positive number of seconds")
        if self.max_per_key is not None and self.max_per_key < 1:
            raise FlideError("max_per_key should be at least 1")
        if not 0 <= self.port < 65536:
            raise FlideError("port should be 0 to 65535")
        if self.root_path and not self.root_path.startswith("/"):
            raise FlideError("root_path should begin with /")
        if not self.is_local and self.keys is None and not self.insecure:
            raise FlideError(
                f"listening on {self.host} without a key lets anyone on the network ask; give one, or insecure"
            )

    @property
    def is_local(self) -> bool:
        """Whether only this machine can connect."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False
