"""A run in a session: it begins behind what was said there, and what it says is stored when it has ended well."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from niwaki.lang.executor import Executor
from niwaki.runtime.api import Backend, Branch, Message, ProgramError, Segment


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a session stands: on an open branch that holds the text of `segments`, which ends with the last of
    `messages`. `turn` is the last one; None: nothing was said yet."""

    branch: Branch
    segments: tuple[Segment, ...]
    messages: tuple[Message, ...]
    turn: str | None


@runtime_checkable
class Session(Protocol):
    """A conversation that is kept elsewhere, and that one run after the other goes on with."""

    @property
    def endpoint(self) -> Backend:
        """Where its runs run."""
        ...

    def enter(self) -> Standing:
        """The branch is the caller's."""
        ...

    def store(self, after: str | None, messages: Sequence[Message]) -> None:
        """Store one turn behind `after`. Raises RequestError: the session has gone on meanwhile."""
        ...


class Visit:
    """One run's stay in its session; without one, there is nothing to do. Both methods may wait for a server."""

    def __init__(self, session: Session | None, executor: Executor) -> None:
        self._session = session
        self._executor = executor
        self._turn: str | None = None
        self._num_messages = self._num_events = 0

    def begin(self) -> None:
        if self._session is None:
            return
        standing = self._session.enter()
        self._turn, self._num_messages = standing.turn, len(standing.messages)
        self._executor.stand_on(standing.branch, standing.segments, standing.messages)
        self._num_events = len(self._executor.history.events)

    def end(self) -> None:
        """Wait until all that was appended has run, and store the turns that it added; those of forks are not among
        them. Raises the error that the state failed with."""
        if self._session is None:
            return
        added = self._executor.messages()[self._num_messages :]
        if (text := self._executor.history.outside_of_turns(self._num_events)) is not None:
            raise ProgramError(
                f"text outside of chat turns ({text}) has no place in a session: write user(...) and "
                "assistant(gen(...)), or leave it to a fork"
            )
        if added:
            self._session.store(self._turn, added)
