"""What outlives a server: turns of conversations, and the sessions that stand on them. Plain data and one protocol.

Turns form trees: each stands on the one before it. A session is a name for the turn that it stands on, so a branch
costs one row and copies nothing, whatever its history; a stored response is a turn that no session stands on.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from niwaki.runtime.api import ConfigError, NiwakiError

Json = dict[str, object]


def new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


@dataclass(frozen=True, slots=True)
class Turn:
    """What one exchange added to a conversation: messages as clients write them, the answer last."""

    id: str
    owner: str  # whose it is: nobody else can find it
    parent: str | None  # the turn that it stands on
    number: int  # how many turns lead to it, itself included
    messages: tuple[Json, ...]
    about: Json  # what else belongs to the answer: model, usage, ...
    request_key: str | None = None  # of its session: a key stores one turn
    created: int = field(default_factory=lambda: int(time.time()))


@dataclass(frozen=True, slots=True)
class Session:
    """A conversation that goes on from the turn `head`; None: it has not begun."""

    id: str
    owner: str
    head: str | None
    about: Mapping[str, object]  # title and metadata
    created: int  # microseconds since 1970
    updated: int


class Conflict(NiwakiError):
    """Somebody else moved the session meanwhile, or stored this request before (`turn` is what it became)."""

    def __init__(self, message: str, turn: str | None = None) -> None:
        super().__init__(message)
        self.turn = turn


class StoreFailed(NiwakiError):
    """The database does not do it now: a full disk, a lost connection, a lock that was held too long. The message is
    the database's own, without what was to be stored."""


class Store(Protocol):
    """Sessions and turns. Every method may be called on any thread, and what it did is stored when it returns.

    None stands for what is not there, or is somebody else's. Every method raises StoreFailed when the database fails;
    then nothing was stored.
    """

    def add_session(self, session: Session, turns: Sequence[Turn] = ()) -> None:
        """Store a session, and the turns that it begins with, each on the one before it: all of them or nothing.

        Raises:
            Conflict: its head is not there.
        """
        ...

    def session(self, owner: str, session_id: str) -> Session | None: ...

    def sessions(self, owner: str, limit: int, after: str | None) -> list[Session]:
        """The newest first, those behind the session `after`."""
        ...

    def num_sessions(self, owner: str) -> int: ...

    def turn(self, owner: str, turn_id: str) -> Turn | None: ...

    def path(self, owner: str, turn_id: str) -> list[Turn]:
        """The turns that lead to this one, itself last; empty when it is not there."""
        ...

    def append(self, session: Session, turn: Turn) -> Session:
        """Store a turn on the session's head, and move it there; both or neither.

        Raises:
            Conflict: the session stands elsewhere by now, or has a turn with this `request_key`.
        """
        ...

    def turn_of_request(self, session_id: str, request_key: str) -> str | None:
        """The turn that a request of this session became."""
        ...

    def describe(self, session: Session, about: Mapping[str, object]) -> Session:
        """Give the session another title or other metadata.

        Raises:
            Conflict: somebody else did so meanwhile, or it is gone.
        """
        ...

    def move(self, session: Session, head: str | None) -> Session:
        """Let the session stand on another turn; turns that nothing leads to any more are gone.

        Raises:
            Conflict: it stands elsewhere by now.
        """
        ...

    def drop_session(self, session: Session) -> None:
        """And the turns that only it led to. Nothing when it is gone already."""
        ...

    def add_turn(self, turn: Turn) -> None:
        """Store a turn that is kept by itself, as responses are. Raises Conflict: its parent is not there."""
        ...

    def drop_turn(self, turn: Turn) -> None:
        """Keep it no longer by itself. What stands on it stays, and keeps what it stands on."""
        ...

    def close(self) -> None: ...


def open_store(url: str) -> Store:
    """The store at a URL: `sqlite:///FILE`, where ~ is the home, `sqlite://` (in memory), `postgresql://...`, or
    `redis://...`, `rediss://...` or `unix://SOCKET` of Redis.

    Raises:
        ConfigError: it cannot be opened, or the URL is none.
    """
    scheme = url.partition("://")[0].partition("+")[0]
    if scheme in ("sqlite", "postgresql"):
        from niwaki.runtime.server.store_sql import SqlStore  # loads SQLAlchemy

        return SqlStore(url)
    if scheme in ("redis", "rediss", "unix"):
        from niwaki.runtime.server.store_redis import RedisStore

        return RedisStore(url)
    known = "sqlite:///FILE, postgresql://... or redis://..."
    raise ConfigError(f"sessions are stored at {known}, got a URL that begins {scheme!r}")
