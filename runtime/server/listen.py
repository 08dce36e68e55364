"""The address that the server listens on. Loads nothing heavy: who cannot have the port should learn so at once."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from niwaki.runtime.server.config import ServerConfig


@contextmanager
def bound(config: ServerConfig) -> Iterator[tuple[ServerConfig, list[socket.socket]]]:
    """The addresses, taken: the server's, then that of its metrics, if it has one. With them the configuration as it
    is with these ports.

    Raises:
        OSError: one cannot be had.
    """
    with ExitStack() as stack:
        listeners = [stack.enter_context(bind(config))]
        config = replace(config, port=listeners[0].getsockname()[1])
        if config.metrics_port is not None:
            listeners.append(stack.enter_context(bind(replace(config, port=config.metrics_port, metrics_port=None))))
            config = replace(config, metrics_port=listeners[1].getsockname()[1])
        yield config, listeners


def bind(config: ServerConfig) -> socket.socket:
    """The address, taken; clients are let in when a server listens on it.

    Raises:
        OSError: it cannot be had.
    """
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    # The protocol is named: only then does asyncio set TCP_NODELAY. Without it an answer's body, which is written
    # behind its head, waits for the client to acknowledge that: 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((config.host, config.port))
    except OSError as error:
        listener.close()
        raise OSError(f"cannot listen on {config.host}:{config.port}: {error.strerror or error}") from None
    return listener


def url_of(config: ServerConfig, port: int) -> str:
    host = f"[{config.host}]" if ":" in config.host else config.host
    scheme = "http" if config.tls_cert is None else "https"
    return f"{scheme}://{host}:{port}"
