"""What an executor is given to run: a program's nodes, and what forks, joins and readers add to them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from niwaki.lang.history import History
from niwaki.lang.nodes import Node
from niwaki.runtime.api import Pending, Segment

if TYPE_CHECKING:
    from niwaki.lang.executor import Executor


@dataclass(frozen=True, slots=True)
class Fork:
    """Let the children start from here."""

    children: tuple[Executor, ...]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a state has made since it was forked."""

    variables: Mapping[str, object]
    segments: tuple[Segment, ...]
    has_turns: bool


@dataclass(frozen=True, slots=True)
class Mark:
    """Hand over a snapshot when everything before has run."""

    reached: Pending[Snapshot]


@dataclass(frozen=True, slots=True)
class Join:
    """Wait for the marks of the children; gather their variables, or append their texts. With `keeps_errors` one that
    failed has its error in the place of its values, of the variables that it was to set (`names`), and no text."""

    marks: tuple[Pending[Snapshot], ...]
    appends: bool
    histories: tuple[History, ...] = ()
    keeps_errors: bool = False
    names: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Tell:
    """Hand over the value that the variable has here, or the item at `index` of a list."""

    name: str
    told: Pending[object]
    index: int | None = None


@dataclass(frozen=True, slots=True)
class Borrow:
    """Append the text that another step tells; wait for it where it is another state's."""

    told: Pending[object]


@dataclass(frozen=True, slots=True)
class Flush:
    """Hand all text to the branch now."""


Step: TypeAlias = Node | Fork | Mark | Join | Tell | Borrow | Flush
