"""The model and the engine of the server's tests, for those of the link below it."""

from __future__ import annotations

from tests.runtime.server.conftest import (
    engine,
    every_answer_is_as_described,
    long_folder,
    nothing_is_left,
    toy_folder,
    url,
)

__all__ = ["engine", "every_answer_is_as_described", "long_folder", "nothing_is_left", "toy_folder", "url"]
