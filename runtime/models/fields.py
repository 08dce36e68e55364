"""Reads the fields of config.json one by one: each is of its type and in its range, or a ModelError names it.

A field that is absent or null has its default; one without a default is required.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from niwaki.runtime.api import ModelError

Fields = Mapping[str, object]


def whole(raw: Fields, name: str, default: int | None = None) -> int:
    value = raw.get(name, default)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"{name} must be a whole number of at least 1, got {value!r}")
    return value


def number(raw: Fields, name: str, default: float | None = None) -> float:
    value = raw.get(name, default)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise ModelError(f"{name} must be a number above 0, got {value!r}")
    return float(value)


def flag(raw: Fields, name: str, default: bool = False) -> bool:
    value = raw.get(name)
    value = default if value is None else value
    if not isinstance(value, bool):
        raise ModelError(f"{name} must be true or false, got {value!r}")
    return value


def text(raw: Fields, name: str, default: str) -> str:
    value = raw.get(name)
    value = default if value is None else value
    if not isinstance(value, str):
        raise ModelError(f"{name} must be a string, got {value!r}")
    return value


def numbers(raw: Fields, name: str, count: int) -> tuple[float, ...]:
    """A list of `count` numbers above 0."""
    value = raw.get(name)
    if not isinstance(value, list) or len(value) != count:
        shown = f"{len(value)} of them" if isinstance(value, list) else repr(value)
        raise ModelError(f"{name} must be a list of {count} numbers, got {shown}")
    return tuple(number({name: item}, name) for item in value)


def layer_indices(raw: Fields, name: str) -> frozenset[int]:
    """A list of layers by index; absent: none."""
    value = raw.get(name)
    if value is None:
        return frozenset()
    if not isinstance(value, list) or not all(
        isinstance(index, int) and not isinstance(index, bool) for index in value
    ):
        raise ModelError(f"{name} must be a list of layers, got {value!r}")
    return frozenset(value)


def token_ids(raw: Fields, name: str) -> tuple[int, ...]:
    """A field that holds one token id, a list of them, or nothing."""
    value = raw.get(name)
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
            raise ModelError(f"{name} must be a token id or a list of them, got {value!r}")
    return tuple(ids)
