"""The server's options: one frozen object, checked once at the door."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from niwaki.runtime.api import ConfigError
from niwaki.runtime.options.config import check_number, check_whole
from niwaki.runtime.replicas.config import ReplicaConfig
from niwaki.runtime.server.keys import KeyLimits, digest_of

LOOPBACK = ("localhost", "127.0.0.1", "::1")
MIN_SECRET = 16  # bytes


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """How the server listens, whom it answers, and how much it takes on.

    Keys are kept as SHA-256 digests only. Without any key everybody who reaches the port is answered; with keys, the
    administrative routes exist only for the holder of `admin_key`.
    """

    host: str = "127.0.0.1"  # the address to listen on
    port: int = 30000  # 0: a free one
    model_names: tuple[str, ...] = ()  # names of the model for clients; answers have the first. Empty: its folder's
    metrics_port: int | None = None  # another port for /metrics, /health and /ready, without a key; None: none
    key_digests: tuple[bytes, ...] = ()  # SHA-256 of keys (`digests`); empty: everybody is answered
    admin_digest: bytes | None = None  # SHA-256 of the key that may also flush the cache
    limits: KeyLimits = field(default_factory=KeyLimits)  # of keys without their own; without keys: of all
    key_limits: tuple[tuple[bytes, KeyLimits], ...] = ()  # limits of single keys, by digest
    allowed_hosts: tuple[str, ...] = ()  # what a Host header may name; empty: anything, on loopback its names
    max_queued: int = 1024  # sequences that may wait beside those that run
    max_body_bytes: int = 4 * 2**20  # size of a request's body at most
    head_seconds: float = 30.0  # time for a client to send its headers; idle connections end after it, too
    body_seconds: float = 60.0  # time for a client to send its body
    drain_seconds: float = 30.0  # time for running requests to end after SIGTERM
    cors_origins: tuple[str, ...] = ()  # origins whose web pages may ask, `*` for all; empty: none but its own
    tls_cert: Path | None = None  # PEM; with it the server speaks HTTPS
    tls_key: Path | None = None  # PEM; None: `tls_cert` has the key, too
    incremental_streaming_output: bool = False  # each piece of a /generate stream has only what is new, not all so far
    otlp_endpoint: str | None = None  # where OpenTelemetry traces go; None: none are made
    in_process: bool = False  # run the engine in a thread of this process, not in a process of its own
    replicas: ReplicaConfig | None = None  # engines on Ray Serve instead of one process
    max_restarts: int = 5  # how often in ten minutes a dead engine process is started again
    sessions: str = "sqlite://"  # where conversations are stored, a URL for `open_store`; sqlite://: in memory
    session_seconds: float = 600.0  # how long a conversation's KV is kept for its next turn
    cache_secret: bytes | None = field(default=None, repr=False)  # keeps keys' caches apart; None: a random one

    def __post_init__(self) -> None:
        check_whole("port", self.port, 0, 65535)
        if self.metrics_port is not None:
            check_whole("metrics_port", self.metrics_port, 0, 65535)
            if self.metrics_port == self.port != 0:
                raise ConfigError(f"metrics_port and port are both {self.port}; give two")
        if not all(self.model_names):
            raise ConfigError("a model's name must not be empty")
        check_whole("max_queued", self.max_queued, 0, 1_000_000)
        check_whole("max_restarts", self.max_restarts, 0, 1_000_000)
        check_whole("max_body_bytes", self.max_body_bytes, 1024, 2**30)
        check_certificate(self.tls_cert, self.tls_key)
        if self.cache_secret is not None and len(self.cache_secret) < MIN_SECRET:
            raise ConfigError(f"cache_secret needs at least {MIN_SECRET} bytes, got {len(self.cache_secret)}")
        check_collector(self.otlp_endpoint)
        if self.in_process and self.replicas is not None:
            raise ConfigError("in_process and replicas: give one of them")
        for name in ("head_seconds", "body_seconds", "drain_seconds", "session_seconds"):
            check_number(name, getattr(self, name), 0, 86400, "seconds")

    @property
    def host_names(self) -> tuple[str, ...]:
        """The Host headers that are answered; empty for any. On loopback a foreign name is a DNS-rebinding page."""
        return self.allowed_hosts or (LOOPBACK if self.host in LOOPBACK else ())


def check_collector(endpoint: str | None) -> None:
    """Raises ConfigError: nothing could be sent there, which its sender would only log, again and again."""
    if endpoint is None:
        return
    try:
        parts = urlsplit(endpoint)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none
        is_url = False
    if not is_url:
        raise ConfigError(f"--otlp-endpoint takes a URL, as http://collector:4318/v1/traces; got {endpoint!r}")


def check_certificate(cert: Path | None, key: Path | None) -> None:
    """Raises ConfigError, with the option and its file: what OpenSSL says of them names neither."""
    if cert is None:
        if key is not None:
            raise ConfigError("--tls-key without --tls-cert: give the certificate, too")
        return
    for option, path in (("--tls-cert", cert), ("--tls-key", key)):
        if path is not None and not path.is_file():
            raise ConfigError(f"{option}: no file {path}")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_verify_locations(cert)
    except OSError as error:
        raise ConfigError(f"--tls-cert: {cert} holds no certificate in PEM: {_reason(error)}") from None
    keyed = "--tls-key" if key is not None else "--tls-cert, without --tls-key"

    def refuse() -> str:
        raise ConfigError(f"{keyed}: the key in {key or cert} is encrypted; give one that is not")

    try:
        context.load_cert_chain(cert, key, password=refuse)
    except OSError as error:
        raise ConfigError(f"{keyed}: {key or cert} holds no key of the certificate {cert}: {_reason(error)}") from None


def _reason(error: OSError) -> str:
    return str(getattr(error, "reason", None) or error.strerror or error).replace("_", " ").lower()


def digests(keys: Sequence[str]) -> tuple[bytes, ...]:
    """SHA-256 of each key. Raises ConfigError for one that is too short."""
    return tuple(digest_of(key) for key in keys)
