"""The server's options: one frozen object, checked once at the door."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from niwaki.runtime.api import ConfigError

LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """How the server listens, whom it answers, and how much it takes on.

    Keys are kept as SHA-256 digests only. Without any key everybody who reaches the port is answered; with keys, the
    administrative routes exist only for the holder of `admin_key`.
    """

    host: str = "127.0.0.1"
    port: int = 30000  # 0: a free one
    key_digests: tuple[bytes, ...] = ()
    admin_digest: bytes | None = None
    allowed_hosts: tuple[str, ...] = ()  # names that a Host header may hold; empty: any, or loopback's on loopback
    max_queued: int = 1024  # sequences that may wait beside those that run
    max_body_bytes: int = 4 * 2**20
    body_seconds: float = 60.0  # for a client to send its body
    drain_seconds: float = 30.0  # after SIGTERM, for running requests to end

    def __post_init__(self) -> None:
        _whole("port", self.port, 0, 65535)
        _whole("max_queued", self.max_queued, 0, 1_000_000)
        _whole("max_body_bytes", self.max_body_bytes, 1024, 2**30)
        for name in ("body_seconds", "drain_seconds"):
            value = getattr(self, name)
            if not 0.0 <= value <= 86400.0:
                raise ConfigError(f"{name} must be from 0 to 86400 seconds, got {value!r}")

    @property
    def host_names(self) -> tuple[str, ...]:
        """The Host headers that are answered; empty for any. On loopback a foreign name is a DNS-rebinding page."""
        return self.allowed_hosts or (LOOPBACK if self.host in LOOPBACK else ())


def digests(keys: Sequence[str]) -> tuple[bytes, ...]:
    """SHA-256 of each key.

    Raises:
        ConfigError: a key is too short to be one.
    """
    for key in keys:
        if len(key) < 8:
            raise ConfigError(f"an API key needs at least 8 characters, got {len(key)}")
    return tuple(hashlib.sha256(key.encode()).digest() for key in keys)


def _whole(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{name} must be a whole number from {low} to {high}, got {value!r}")
