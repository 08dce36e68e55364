"""A program as data: what its branches say, call and fork, in order, with references to texts that calls will give.

Plain data: programs write it down, a backend that takes it runs all of it by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from niwaki.runtime.api import SamplingParams

Part: TypeAlias = str | int  # a text, or the number of the call whose text stands here


@dataclass(frozen=True, slots=True)
class Say:
    """Append a text."""

    parts: tuple[Part, ...]
    control: bool = False


@dataclass(frozen=True, slots=True)
class Generate:
    """Generate; the text of the first output is the call's."""

    call: int
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class Choose:
    """Score the choices and decide by the method of that name, or draw as `params` say; what was chosen is the call's
    text, and is not yet appended."""

    call: int
    choices: tuple[str, ...]
    method: str
    heal: bool
    params: SamplingParams | None = None


@dataclass(frozen=True, slots=True)
class Split:
    """The branch of that number starts from here."""

    branch: int


Op: TypeAlias = Say | Generate | Choose | Split
Lane: TypeAlias = tuple[Op, ...]  # what one branch does


@dataclass(frozen=True, slots=True)
class Script:
    """What each branch does, the first one from an empty text. `is_over`: nothing will follow on any of them."""

    branches: tuple[Lane, ...]
    is_over: bool
