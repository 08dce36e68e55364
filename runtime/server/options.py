"""The options of `niwaki serve`: their names, their defaults, and the configuration that they make.

Loads the standard library only: `niwaki --help` shows them where the server is not installed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from niwaki.runtime.api import ConfigError
from niwaki.runtime.replicas.config import ReplicaConfig
from niwaki.runtime.server.cache_secret import kept_secret
from niwaki.runtime.server.config import ServerConfig, digests
from niwaki.runtime.server.keys import KeyLimits, digest_of, read_keys

LOG_LEVELS = ("debug", "info", "warning", "error")
SESSIONS = "sqlite:///~/.local/state/niwaki/sessions.db"
DEFAULT = ServerConfig()
DEFAULT_REPLICAS = ReplicaConfig()


def add_options(parser: argparse.ArgumentParser) -> None:
    """All options of the server but those that say what it serves."""
    add = parser.add_argument
    add(
        "--model-name",
        action="append",
        default=[],
        metavar="NAME",
        help="a name of the model for clients; may be given again",
    )
    add("--host", default=DEFAULT.host, metavar="ADDRESS", help="the address to listen on (%(default)s)")
    add("--port", type=int, default=DEFAULT.port, metavar="N", help="0 takes a free one and prints it (%(default)s)")
    add("--metrics-port", type=int, metavar="N", help="another port for /metrics, /health, /ready, without a key")
    add("--tls-cert", type=Path, metavar="PEM", help="a certificate; the server then speaks HTTPS")
    add("--tls-key", type=Path, metavar="PEM", help="its key, unless the certificate's file has it")
    add(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help="answer only clients with this key; may be given again",
    )
    add("--api-key-file", type=Path, metavar="PATH", help="keys or their digests, one a line, with limits of their own")
    add("--admin-key", metavar="KEY", help="a key that may also flush the cache; `sha256:DIGEST` works, too")
    add("--requests-per-minute", type=int, metavar="N", help="requests of one key; beyond them 429")
    add("--tokens-per-minute", type=int, metavar="N", help="tokens computed for one key; beyond them 429")
    add("--concurrent", type=int, metavar="N", help="requests of one key at once; beyond them 429")
    add("--allowed-host", action="append", default=[], metavar="NAME", help="a name that a Host header may have")
    add(
        "--cors-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="web pages of this origin may ask; * for all",
    )
    add("--max-queued", type=int, default=DEFAULT.max_queued, metavar="N", help="sequences that may wait (%(default)s)")
    add(
        "--drain-seconds",
        type=float,
        default=DEFAULT.drain_seconds,
        metavar="S",
        help="time for running requests to end after SIGTERM (%(default)s)",
    )
    add("--in-process", action="store_true", help="run the engine in this process; if it ends, the server ends")
    add(
        "--max-restarts",
        type=int,
        default=DEFAULT.max_restarts,
        metavar="N",
        help="how often in ten minutes a dead engine process is started again (%(default)s)",
    )
    add("--replicas", metavar="N or LOW-HIGH", help="engines on Ray Serve (niwaki[ray]) instead of one process")
    add(
        "--replica-requests",
        type=int,
        default=DEFAULT_REPLICAS.target_requests,
        metavar="N",
        help="requests at a replica above which another one starts (%(default)s)",
    )
    add(
        "--replica-cpus", type=float, default=DEFAULT_REPLICAS.cpus, metavar="N", help="CPUs of a replica (%(default)s)"
    )
    add("--replica-gpus", type=float, default=DEFAULT_REPLICAS.gpus, metavar="N", help="its GPUs (%(default)s)")
    add("--ray-address", metavar="ADDRESS", help="a Ray cluster; without it one is started here, and ends with us")
    add(
        "--sessions",
        metavar="URL",
        default=SESSIONS,
        help="store of conversations: sqlite:///FILE, postgresql://..., redis://..., sqlite:// in memory (%(default)s)",
    )
    add(
        "--session-seconds",
        type=float,
        default=DEFAULT.session_seconds,
        metavar="S",
        help="how long the cache keeps a conversation's KV for its next turn (%(default)s)",
    )
    add("--incremental-streaming-output", action="store_true", help="/generate streams only what is new")
    add("--log-level", choices=LOG_LEVELS, default="warning", help="info writes a line for each request (%(default)s)")
    add("--log-format", choices=("text", "json"), default="text", help="form of the lines on stderr (%(default)s)")
    add("--otlp-endpoint", metavar="URL", help="where OpenTelemetry traces go (niwaki[otel])")


def config_of(arguments: argparse.Namespace) -> ServerConfig:
    """Raises ConfigError for a value that cannot be, OSError for a file that cannot be read or made."""
    limits = KeyLimits(arguments.requests_per_minute, arguments.tokens_per_minute, arguments.concurrent)
    keys = dict.fromkeys(digests(arguments.api_key), limits)
    if arguments.api_key_file is not None:
        keys |= read_keys(_text_of(arguments.api_key_file), limits)
        if not keys:
            raise ConfigError(f"{arguments.api_key_file} holds no key: everybody would be answered")
    folder = arguments.disk_cache_dir
    return ServerConfig(
        host=arguments.host,
        port=arguments.port,
        model_names=tuple(arguments.model_name),
        metrics_port=arguments.metrics_port,
        key_digests=tuple(keys),
        key_limits=tuple(keys.items()),
        limits=limits,
        admin_digest=None if arguments.admin_key is None else digest_of(arguments.admin_key),
        allowed_hosts=tuple(arguments.allowed_host),
        cors_origins=tuple(arguments.cors_origin),
        tls_cert=arguments.tls_cert,
        tls_key=arguments.tls_key,
        max_queued=arguments.max_queued,
        drain_seconds=arguments.drain_seconds,
        in_process=arguments.in_process,
        replicas=_replicas_of(arguments),
        max_restarts=arguments.max_restarts,
        sessions=arguments.sessions,
        session_seconds=arguments.session_seconds,
        cache_secret=None if folder is None else kept_secret(Path(folder)),
        incremental_streaming_output=arguments.incremental_streaming_output,
        otlp_endpoint=arguments.otlp_endpoint,
    )


def _text_of(path: Path) -> str:
    """Raises OSError: it cannot be read. ConfigError: it is no UTF-8, which editors on Windows begin with a mark."""
    try:
        return path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text, at byte {error.start}") from None


def _replicas_of(arguments: argparse.Namespace) -> ReplicaConfig | None:
    if arguments.replicas is None:
        return None
    lowest, _, highest = arguments.replicas.partition("-")
    if not (lowest.isdecimal() and (highest or lowest).isdecimal()):
        raise ConfigError(f"--replicas takes N or LOW-HIGH, got {arguments.replicas!r}")
    return ReplicaConfig(
        int(lowest),
        int(highest or lowest),
        arguments.replica_requests,
        cpus=arguments.replica_cpus,
        gpus=arguments.replica_gpus,
        address=arguments.ray_address,
    )
