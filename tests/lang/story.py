"""A scripted model that tells one story: for tests of async programs."""

from __future__ import annotations

import re
from collections.abc import Callable

import niwaki as nw

STORY = "Once upon a time there was a tree, and it grew."


def answers(threads: int = 1, delay: float | Callable[[], float] = 0.0) -> nw.ScriptedBackend:
    script: dict[str | re.Pattern[str], str] = {"Moral: ": "grow", "Title: ": "A Tree", "": STORY}
    return nw.ScriptedBackend(script, threads=threads, delay=delay)
