"""API keys: kept as digests only, each with how much it may ask. Files of keys are read here."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields, replace

from niwaki.runtime.api import ConfigError
from niwaki.runtime.options.config import check_whole

MIN_KEY = 8  # characters
DIGEST = "sha256:"


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """The limits of one key; None: no limit."""

    requests_per_minute: int | None = None  # requests that come in a minute
    tokens_per_minute: int | None = None  # tokens generated, and those of prompts that the cache did not have
    concurrent: int | None = None  # requests at once

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if value is not None:
                check_whole(f.name, value, 1, 10**12)


def digest_of(key: str) -> bytes:
    """SHA-256 of a key, or what stands behind `sha256:` in hex.

    Raises:
        ConfigError: it is too short to be a key, holds what no header brings as it is, or is no digest.
    """
    if key.startswith(DIGEST):
        return _digest_written(key.removeprefix(DIGEST))
    if not (key.isascii() and key.isprintable() and key == key.strip()):  # nobody who has it would be answered
        raise ConfigError("an API key is printable ASCII, without blanks or a line end around it")
    if len(key) < MIN_KEY:
        raise ConfigError(f"an API key needs at least {MIN_KEY} characters, got {len(key)}")
    return hashlib.sha256(key.encode()).digest()


def read_keys(text: str, default: KeyLimits | None = None) -> dict[bytes, KeyLimits]:
    """The keys of a file: one a line, as itself or as `sha256:` and its digest in hex, then its own limits.

    `sha256:9f86d0... requests_per_minute=60 concurrent=4`; empty lines and those that begin with # are skipped.

    Raises:
        ConfigError: naming the line, never what stands in it.
    """
    found: dict[bytes, KeyLimits] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        key, *settings = line.split()
        try:
            found[digest_of(key)] = _limits_written(settings, default or KeyLimits())
        except ConfigError as error:
            raise ConfigError(f"line {number} of the key file: {error}") from None
    return found


def _digest_written(digits: str) -> bytes:
    try:
        digest = bytes.fromhex(digits)
    except ValueError:
        digest = b""
    if len(digest) != 32:
        raise ConfigError(f"behind {DIGEST} there must be 64 hexadecimal digits")
    return digest


def _limits_written(settings: list[str], limits: KeyLimits) -> KeyLimits:
    names = [f.name for f in fields(KeyLimits)]
    for setting in settings:
        name, _, value = setting.partition("=")
        if name not in names or not value.isdecimal():
            raise ConfigError(f"behind a key there may be {', '.join(names)}, each with = and a whole number")
        limits = replace(limits, **{name: int(value)})
    return limits
