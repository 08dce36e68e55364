"""The store in an SQL database: SQLite in WAL mode, or PostgreSQL. All JSON is kept as ASCII text."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.pool import ConnectionPoolEntry, QueuePool

from niwaki.runtime.api import ConfigError
from niwaki.runtime.server.store import Conflict, Json, Session, StoreFailed, Turn

BUSY_SECONDS = 10.0  # how long SQLite waits for another process that writes
# Of PostgreSQL's client, where the URL says nothing else: that a machine is gone without a word is noticed, as Redis's
# is. By itself the client waits 130 s to connect, and the system a quarter of an hour for an answer.
WAITS = {"connect_timeout": 10, "tcp_user_timeout": 10_000, "keepalives_idle": 30, "keepalives_interval": 10}
_TURNS_LOCK = 0x6E697761  # a number of our own among the database's locks
NUL = "\0"  # in no id; PostgreSQL does not take it for a text, and what a client asks for may hold it
PRIVATE = 0o600  # the file's mode: conversations are nobody else's

_tables = sa.MetaData()

_sessions = sa.Table(
    "niwaki_sessions",
    _tables,
    sa.Column("id", sa.String(64), primary_key=True),
    sa.Column("owner", sa.String(64), nullable=False),
    sa.Column("head", sa.String(64), index=True),
    sa.Column("about", sa.Text, nullable=False),
    sa.Column("created", sa.BigInteger, nullable=False),
    sa.Column("updated", sa.BigInteger, nullable=False),
    sa.Index("niwaki_sessions_by_owner", "owner", "created"),
)

_turns = sa.Table(
    "niwaki_turns",
    _tables,
    sa.Column("id", sa.String(64), primary_key=True),
    sa.Column("owner", sa.String(64), nullable=False),
    sa.Column("parent", sa.String(64), index=True),
    sa.Column("number", sa.Integer, nullable=False),
    sa.Column("messages", sa.Text, nullable=False),
    sa.Column("about", sa.Text, nullable=False),
    sa.Column("created", sa.BigInteger, nullable=False),
    sa.Column("session", sa.String(64)),  # the one that it was said in
    sa.Column("request_key", sa.String(256)),
    sa.Column("is_kept", sa.Boolean, nullable=False),  # by itself, with no session on it
    sa.UniqueConstraint("session", "request_key", name="niwaki_turns_once"),
)

# What a turn of a session asks is made once: to write a statement anew takes 0.3 ms, to carry it out 0.08.
_ID: sa.BindParameter[Any] = sa.bindparam("wanted")
_OWNER: sa.BindParameter[Any] = sa.bindparam("whose")
_SESSION = sa.select(_sessions).where(_sessions.c.id == _ID, _sessions.c.owner == _OWNER)
_TURN = sa.select(_turns).where(_turns.c.id == _ID, _turns.c.owner == _OWNER)
_TURN_OF_REQUEST = sa.select(_turns.c.id).where(
    _turns.c.session == _ID, _turns.c.request_key == sa.bindparam("request")
)
_MOVE = (
    _sessions.update()
    .where(_sessions.c.id == _ID, _sessions.c.head.is_not_distinct_from(sa.bindparam("before")))
    .values(head=sa.bindparam("now"), updated=sa.bindparam("at"))
)
_ADD_TURN = _turns.insert()


def _path_to() -> sa.Select[*tuple[Any, ...]]:
    last = sa.select(_turns.c.id, _turns.c.parent).where(_turns.c.id == _ID, _turns.c.owner == _OWNER)
    steps = last.cte("steps", recursive=True)
    steps = steps.union_all(sa.select(_turns.c.id, _turns.c.parent).where(_turns.c.id == steps.c.parent))
    return sa.select(_turns).where(_turns.c.id.in_(sa.select(steps.c.id))).order_by(_turns.c.number)


_PATH = _path_to()


class SqlStore:
    """The `Store` protocol over SQLAlchemy. `sqlite://` lives in memory, and ends with the store."""

    def __init__(self, url: str) -> None:
        """Raises ConfigError: the database cannot be opened."""
        try:
            parsed = sa.make_url(url)
            if parsed.get_backend_name() == "sqlite":
                self._engine = _sqlite(parsed)
            else:
                parsed = parsed.set(drivername="postgresql+psycopg")
                waits = {name: value for name, value in WAITS.items() if name not in parsed.query}
                self._engine = sa.create_engine(parsed, pool_pre_ping=True, connect_args=waits)
            _tables.create_all(self._engine)
        except (sa.exc.SQLAlchemyError, OSError) as error:
            where = error.orig if isinstance(error, sa.exc.DBAPIError) else error
            raise ConfigError(f"the session store cannot be opened: {where}".splitlines()[0]) from error
        except ModuleNotFoundError as error:
            raise ConfigError(f"this session store needs {error.name}; install niwaki[sessions]") from error
        sa.event.listen(self._engine, "handle_error", _tell)

    def close(self) -> None:
        self._engine.dispose()

    # -- sessions ---------------------------------------------------------------------------------------------------

    def add_session(self, session: Session, turns: Sequence[Turn] = ()) -> None:
        values = {"id": session.id, "owner": session.owner, "head": session.head, "about": _dump(session.about)}
        times = {"created": session.created, "updated": session.updated}
        with self._engine.begin() as connection:
            _hold_turns(connection, "pg_advisory_xact_lock_shared")
            connection.execute(_sessions.insert().values(**values, **times))
            rows = [{**_row(turn), "session": session.id, "is_kept": False} for turn in turns]
            if rows:
                connection.execute(_ADD_TURN, rows)
            _demand(connection, session.head)

    def session(self, owner: str, session_id: str) -> Session | None:
        if NUL in session_id:
            return None
        with self._engine.connect() as connection:
            row = connection.execute(_SESSION, {"wanted": session_id, "whose": owner}).one_or_none()
        return None if row is None else _session(row)

    def sessions(self, owner: str, limit: int, after: str | None) -> list[Session]:
        place = sa.tuple_(_sessions.c.created, _sessions.c.id)
        wanted = sa.select(_sessions).where(_sessions.c.owner == owner)
        if after is not None:
            last = self.session(owner, after)
            if last is None:
                return []
            wanted = wanted.where(place < sa.tuple_(sa.literal(last.created), sa.literal(last.id)))
        wanted = wanted.order_by(_sessions.c.created.desc(), _sessions.c.id.desc()).limit(limit)
        with self._engine.connect() as connection:
            return [_session(row) for row in connection.execute(wanted)]

    def num_sessions(self, owner: str) -> int:
        wanted = sa.select(sa.func.count()).select_from(_sessions).where(_sessions.c.owner == owner)
        with self._engine.connect() as connection:
            return int(connection.execute(wanted).scalar_one())

    def append(self, session: Session, turn: Turn) -> Session:
        try:
            with self._engine.begin() as connection:
                moved = _moved(connection, session, turn.id)
                connection.execute(_ADD_TURN, {**_row(turn), "session": session.id, "is_kept": False})
        except sa.exc.IntegrityError:  # the one thing that may be there twice
            assert turn.request_key is not None
            earlier = self.turn_of_request(session.id, turn.request_key)
            raise Conflict("a turn with this key was stored before", earlier) from None
        return moved

    def turn_of_request(self, session_id: str, request_key: str) -> str | None:
        asked = {"wanted": session_id, "request": request_key}
        with self._engine.connect() as connection:
            return connection.execute(_TURN_OF_REQUEST, asked).scalar_one_or_none()

    def describe(self, session: Session, about: Mapping[str, object]) -> Session:
        updated = _now_after(session)
        was = (_sessions.c.id == session.id, _sessions.c.about == _dump(session.about))
        with self._engine.begin() as connection:
            change = _sessions.update().where(*was).values(about=_dump(about), updated=updated)
            if connection.execute(change).rowcount != 1:
                raise Conflict("the session was changed or deleted by somebody else")
        return replace(session, about=about, updated=updated)

    def move(self, session: Session, head: str | None) -> Session:
        with self._engine.begin() as connection:
            _hold_turns(connection)
            moved = _moved(connection, session, head)
            _sweep(connection, session.head)
        return moved

    def drop_session(self, session: Session) -> None:
        with self._engine.begin() as connection:
            _hold_turns(connection)
            gone = _sessions.delete().where(_sessions.c.id == session.id).returning(_sessions.c.head)
            _sweep(connection, connection.execute(gone).scalar_one_or_none())

    # -- turns ------------------------------------------------------------------------------------------------------

    def turn(self, owner: str, turn_id: str) -> Turn | None:
        if NUL in turn_id:
            return None
        with self._engine.connect() as connection:
            row = connection.execute(_TURN, {"wanted": turn_id, "whose": owner}).one_or_none()
        return None if row is None else _turn(row)

    def path(self, owner: str, turn_id: str) -> list[Turn]:
        if NUL in turn_id:
            return []
        with self._engine.connect() as connection:
            return [_turn(row) for row in connection.execute(_PATH, {"wanted": turn_id, "whose": owner})]

    def add_turn(self, turn: Turn) -> None:
        with self._engine.begin() as connection:
            _hold_turns(connection, "pg_advisory_xact_lock_shared")
            connection.execute(_ADD_TURN, {**_row(turn), "session": None, "is_kept": True})
            _demand(connection, turn.parent)

    def drop_turn(self, turn: Turn) -> None:
        with self._engine.begin() as connection:
            _hold_turns(connection)
            connection.execute(_turns.update().where(_turns.c.id == turn.id).values(is_kept=False, about="{}"))
            _sweep(connection, turn.id)


# Of what was asked, not of the database.
_OURS = (sa.exc.IntegrityError, sa.exc.DataError, sa.exc.ProgrammingError, sa.exc.NotSupportedError)


def _tell(context: sa.ExceptionContext) -> None:
    """SQLAlchemy's own errors quote the statement with its values. Damaged files and databases that may only be read (a
    replica that has not taken over) are no operational errors to their drivers."""
    error = context.sqlalchemy_exception
    if isinstance(error, sa.exc.DatabaseError) and not isinstance(error, _OURS) and not context.is_pre_ping:
        raise StoreFailed(" ".join(str(context.original_exception).split()))


def _sqlite(url: sa.URL) -> sa.Engine:
    """SQLite in WAL mode: those who read never wait for who writes, and a committed turn survives a power cut."""
    if url.database in (None, "", ":memory:"):
        return _memory(url)
    assert url.database is not None
    try:
        path = Path(url.database).expanduser()
    except RuntimeError:  # a user without an entry, as in a container
        raise ConfigError(f"{url.database}: there is no home folder; name a file as sqlite:///FILE") from None
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=PRIVATE)
    engine = sa.create_engine(url.set(database=str(path)), connect_args={"timeout": BUSY_SECONDS})

    @sa.event.listens_for(engine, "connect")
    def prepare(connection: DBAPIConnection, entry: ConnectionPoolEntry) -> None:
        for pragma in ("journal_mode=WAL", "synchronous=FULL"):
            connection.cursor().execute(f"PRAGMA {pragma}")

    return engine


def _memory(url: sa.URL) -> sa.Engine:
    """One connection, lent to one thread at a time: the database lives as long as it."""
    connect = {"check_same_thread": False}
    return sa.create_engine(url, poolclass=QueuePool, pool_size=1, max_overflow=0, connect_args=connect)


def _moved(connection: sa.Connection, session: Session, head: str | None) -> Session:
    """Let a session stand elsewhere. Raises Conflict when it is not where it was."""
    updated = _now_after(session)
    done = connection.execute(_MOVE, {"wanted": session.id, "before": session.head, "now": head, "at": updated})
    if done.rowcount != 1:
        raise Conflict("the session was moved or deleted by somebody else")
    return replace(session, head=head, updated=updated)


def _hold_turns(connection: sa.Connection, how: str = "pg_advisory_xact_lock") -> None:
    """Until the end of the transaction nobody else gives up turns, nor, unless shared, begins to need some. SQLite's
    one writer at a time sees to that; PostgreSQL shows nobody what others are about to do: of two sessions that went at
    once each kept the turns for the other, and who branched one found that its turns had gone."""
    if connection.dialect.name == "postgresql":
        connection.execute(sa.select(getattr(sa.func, how)(_TURNS_LOCK)))


def _now_after(session: Session) -> int:
    return max(session.updated + 1, time.time_ns() // 1000)


def _demand(connection: sa.Connection, turn_id: str | None) -> None:
    """Raises Conflict, which undoes the transaction, when a turn to stand on is not there (any more)."""
    if turn_id is not None and connection.execute(sa.select(_turns.c.id).where(_turns.c.id == turn_id)).first() is None:
        raise Conflict("the turn before was deleted meanwhile")


def _sweep(connection: sa.Connection, turn_id: str | None) -> None:
    """Delete a turn, then the one it stood on, and so on, up to the first that something else needs. One statement:
    two for each turn held everybody's writes up for seconds where a session had thousands of them."""
    if turn_id is None:
        return
    child = _turns.alias("child")
    is_unnamed = ~sa.select(_sessions.c.id).where(_sessions.c.head == _turns.c.id).exists()
    is_last = ~sa.select(child.c.id).where(child.c.parent == _turns.c.id).exists()
    last = sa.select(_turns.c.id, _turns.c.parent).where(_turns.c.id == turn_id, ~_turns.c.is_kept, is_unnamed, is_last)
    gone = last.cte("gone", recursive=True)
    others = sa.select(child.c.id).where(child.c.parent == _turns.c.id, child.c.id != gone.c.id)
    before = sa.select(_turns.c.id, _turns.c.parent).where(
        _turns.c.id == gone.c.parent, ~_turns.c.is_kept, is_unnamed, ~others.exists()
    )
    gone = gone.union_all(before)
    connection.execute(_turns.delete().where(_turns.c.id.in_(sa.select(gone.c.id))))


def _row(turn: Turn) -> dict[str, object]:
    return {
        "id": turn.id,
        "owner": turn.owner,
        "parent": turn.parent,
        "number": turn.number,
        "messages": _dump(turn.messages),
        "about": _dump(turn.about),
        "created": turn.created,
        "request_key": turn.request_key,
    }


def _turn(row: sa.Row[*tuple[Any, ...]]) -> Turn:
    messages: list[Json] = json.loads(row.messages)
    return Turn(
        id=row.id,
        owner=row.owner,
        parent=row.parent,
        number=row.number,
        messages=tuple(messages),
        about=json.loads(row.about),
        request_key=row.request_key,
        created=row.created,
    )


def _session(row: sa.Row[*tuple[Any, ...]]) -> Session:
    return Session(row.id, row.owner, row.head, json.loads(row.about), row.created, row.updated)


def _dump(value: object) -> str:
    return json.dumps(value, ensure_ascii=True, separators=(",", ":"))
