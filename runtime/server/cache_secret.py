"""The secret that keeps the caches of API keys apart, for as long as a folder of cached pages lives."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path

from niwaki.runtime.api import ConfigError

NAME = "secret"
NUM_BYTES = 32


def kept_secret(folder: Path) -> bytes:
    """The folder's secret, made where there is none; a file that its owner alone can read.

    Without it the names that a restarted server gives to its callers' caches would be others, and nobody would find
    again what the folder has. Servers that start at once on one folder get the same.

    Raises:
        OSError: it cannot be read or made.
        ConfigError: the file holds something else.
    """
    path = folder / NAME
    if not path.exists():
        _make(path)
    try:
        found = bytes.fromhex(path.read_text("ascii"))
    except ValueError:
        found = b""
    if len(found) != NUM_BYTES:
        raise ConfigError(f"{path} holds no secret of {NUM_BYTES} bytes in hex; delete it, and a new one is made")
    return found


def _make(path: Path) -> None:
    """Written beside and linked, so that nobody reads half of one; who was first has made it for all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{NAME}.{os.getpid()}.{secrets.token_hex(8)}.new")
    try:
        with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(NUM_BYTES))
        with suppress(FileExistsError):
            os.link(beside, path)
    finally:
        beside.unlink(missing_ok=True)
