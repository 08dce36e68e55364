"""The store in Redis or Valkey: a hash for each session and each turn, a sorted set of each owner's sessions.

What a method changes is one script, which Redis runs as a whole: it looks first and writes then, so that a conflict has
changed nothing. A turn counts what needs it: sessions that stand on it, turns behind it, its being kept by itself. All
JSON is kept as ASCII text; "" stands for none.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from niwaki.runtime.api import ConfigError
from niwaki.runtime.server.store import Conflict, Json, Session, StoreFailed, Turn

SECONDS = 10.0  # to connect, and for each answer
IDLE_SECONDS = 30  # behind which a connection is tried before it is used

# One slot of a cluster, as scripts find keys by what others hold.
SESSION, TURN, OWNED, KEYS = (f"{{niwaki}}:{kind}:" for kind in ("session", "turn", "sessions", "keys"))

_COMMON = (
    f"""
local SESSION, TURN, OWNED, KEYS = '{SESSION}', '{TURN}', '{OWNED}', '{KEYS}'
"""
    + """
local call, FIELDS = redis.call, {'owner', 'parent', 'number', 'messages', 'about', 'created', 'key'}
local SIZE = 1 + #FIELDS

local function is_there(turn)
    return turn == '' or call('EXISTS', TURN .. turn) == 1
end

local function need(turn, count)
    if turn ~= '' then call('HINCRBY', TURN .. turn, 'needed', count) end
end

-- Store the turn whose id and fields stand in ARGV from `at` on.
local function put(at, session, kept)
    local id, row = ARGV[at], {'session', session, 'kept', kept, 'needed', kept}
    for i, field in ipairs(FIELDS) do
        row[#row + 1] = field
        row[#row + 1] = ARGV[at + i]
    end
    call('HSET', TURN .. id, unpack(row))
    need(ARGV[at + 2], 1)
    if ARGV[at + 7] ~= '' then call('HSET', KEYS .. session, ARGV[at + 7], id) end
end

-- Delete a turn that nothing needs, then the one before it, and so on.
local function sweep(turn)
    while turn ~= '' and call('HGET', TURN .. turn, 'needed') == '0' do
        local parent, session, key = unpack(call('HMGET', TURN .. turn, 'parent', 'session', 'key'))
        call('DEL', TURN .. turn)
        if key ~= '' then call('HDEL', KEYS .. session, key) end
        need(parent, -1)
        turn = parent
    end
end
"""
)

# ARGV: session, owner, head, about, created, updated, turns...
_ADD_SESSION = """
local id, owner, head, about, created, updated = unpack(ARGV, 1, 6)
local is_given = head == '' or #ARGV > 6 and ARGV[#ARGV - SIZE + 1] == head
if not (is_given or is_there(head)) or #ARGV > 6 and not is_there(ARGV[9]) then return 0 end
for at = 7, #ARGV, SIZE do put(at, id, 0) end
need(head, 1)
call('HSET', SESSION .. id, 'owner', owner, 'head', head, 'about', about, 'created', created, 'updated', updated)
call('ZADD', OWNED .. owner, created, id)
return 1
"""

# ARGV: session, head before, updated, turn...: 1, 0 where it stands elsewhere, or the turn that has the key.
_APPEND = """
local id, head, updated = unpack(ARGV, 1, 3)
if call('HGET', SESSION .. id, 'head') ~= head then return 0 end
local earlier = ARGV[11] ~= '' and call('HGET', KEYS .. id, ARGV[11])
if earlier then return earlier end
put(4, id, 0)
need(ARGV[4], 1)
need(head, -1)
call('HSET', SESSION .. id, 'head', ARGV[4], 'updated', updated)
return 1
"""

# ARGV: session, head before, updated, head
_MOVE = """
local id, before, updated, head = unpack(ARGV)
if call('HGET', SESSION .. id, 'head') ~= before or not is_there(head) then return 0 end
call('HSET', SESSION .. id, 'head', head, 'updated', updated)
need(head, 1)
need(before, -1)
sweep(before)
return 1
"""

# ARGV: session, about before, updated, about
_DESCRIBE = """
local id, before, updated, about = unpack(ARGV)
if call('HGET', SESSION .. id, 'about') ~= before then return 0 end
call('HSET', SESSION .. id, 'about', about, 'updated', updated)
return 1
"""

# ARGV: session
_DROP_SESSION = """
local owner, head = unpack(call('HMGET', SESSION .. ARGV[1], 'owner', 'head'))
if not owner then return 0 end
call('DEL', SESSION .. ARGV[1], KEYS .. ARGV[1])
call('ZREM', OWNED .. owner, ARGV[1])
need(head, -1)
sweep(head)
return 1
"""

# ARGV: turn...
_ADD_TURN = """
if not is_there(ARGV[3]) then return 0 end
put(1, '', 1)
return 1
"""

# ARGV: turn
_DROP_TURN = """
if call('HGET', TURN .. ARGV[1], 'kept') ~= '1' then return 0 end
call('HSET', TURN .. ARGV[1], 'kept', 0, 'about', '{}')
need(ARGV[1], -1)
sweep(ARGV[1])
return 1
"""

# ARGV: owner, turn. The last turn first, each as its id and fields.
_PATH = """
local found, turn = {}, ARGV[2]
if call('HGET', TURN .. turn, 'owner') ~= ARGV[1] then return found end
while turn ~= '' do
    local row = call('HMGET', TURN .. turn, unpack(FIELDS))
    table.insert(row, 1, turn)
    found[#found + 1] = row
    turn = row[3]
end
return found
"""


class RedisStore:
    """The `Store` protocol over redis-py."""

    def __init__(self, url: str) -> None:
        """Raises ConfigError: there is no Redis at the URL, or no redis-py."""
        try:
            import redis  # an extra
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ModuleNotFoundError as error:
            raise ConfigError(f"this session store needs {error.name}; install niwaki[redis]") from error
        self._failures = redis.RedisError
        try:
            # Nothing is tried again: a turn whose answer was lost would be told as somebody else's.
            self._redis: Any = redis.Redis.from_url(
                url,
                decode_responses=True,
                retry=Retry(NoBackoff(), 0),
                socket_timeout=SECONDS,
                socket_connect_timeout=SECONDS,
                health_check_interval=IDLE_SECONDS,
            )
            self._redis.ping()
        except (redis.RedisError, ValueError) as error:
            raise ConfigError(f"the session store cannot be opened: {error}".splitlines()[0]) from error
        script = self._redis.register_script
        self._add_session = script(_COMMON + _ADD_SESSION)
        self._append = script(_COMMON + _APPEND)
        self._move = script(_COMMON + _MOVE)
        self._describe = script(_COMMON + _DESCRIBE)
        self._drop_session = script(_COMMON + _DROP_SESSION)
        self._add_turn = script(_COMMON + _ADD_TURN)
        self._drop_turn = script(_COMMON + _DROP_TURN)
        self._path = script(_COMMON + _PATH)

    def close(self) -> None:
        self._redis.close()

    # -- sessions ---------------------------------------------------------------------------------------------------

    def add_session(self, session: Session, turns: Sequence[Turn] = ()) -> None:
        values = (session.owner, session.head or "", _dump(session.about), session.created, session.updated)
        with self._told():
            done = self._add_session(args=[session.id, *values, *(value for turn in turns for value in _row(turn))])
        if not done:
            raise Conflict("the turn before was deleted meanwhile")

    def session(self, owner: str, session_id: str) -> Session | None:
        with self._told():
            row = self._redis.hgetall(SESSION + session_id)
        return _session(session_id, row) if row and row["owner"] == owner else None

    def sessions(self, owner: str, limit: int, after: str | None) -> list[Session]:
        with self._told():
            first = 0
            if after is not None:
                place = self._redis.zrevrank(OWNED + owner, after)
                if place is None:
                    return []
                first = place + 1
            ids = self._redis.zrevrange(OWNED + owner, first, first + limit - 1)
            asking = self._redis.pipeline(transaction=False)
            for session_id in ids:
                asking.hgetall(SESSION + session_id)
            rows = asking.execute()
        return [_session(session_id, row) for session_id, row in zip(ids, rows, strict=True) if row]

    def num_sessions(self, owner: str) -> int:
        with self._told():
            return int(self._redis.zcard(OWNED + owner))

    def append(self, session: Session, turn: Turn) -> Session:
        updated = _now_after(session)
        with self._told():
            done = self._append(args=[session.id, session.head or "", updated, *_row(turn)])
        if isinstance(done, str):
            raise Conflict("a turn with this key was stored before", done)
        return _moved(session, done, turn.id, updated)

    def turn_of_request(self, session_id: str, request_key: str) -> str | None:
        with self._told():
            found: str | None = self._redis.hget(KEYS + session_id, request_key)
        return found

    def describe(self, session: Session, about: Mapping[str, object]) -> Session:
        updated = _now_after(session)
        with self._told():
            done = self._describe(args=[session.id, _dump(session.about), updated, _dump(about)])
        if not done:
            raise Conflict("the session was changed or deleted by somebody else")
        return replace(session, about=about, updated=updated)

    def move(self, session: Session, head: str | None) -> Session:
        updated = _now_after(session)
        with self._told():
            done = self._move(args=[session.id, session.head or "", updated, head or ""])
        return _moved(session, done, head, updated)

    def drop_session(self, session: Session) -> None:
        with self._told():
            self._drop_session(args=[session.id])

    # -- turns ------------------------------------------------------------------------------------------------------

    def turn(self, owner: str, turn_id: str) -> Turn | None:
        with self._told():
            row = self._redis.hgetall(TURN + turn_id)
        fields = ("owner", "parent", "number", "messages", "about", "created", "key")
        return _turn([turn_id, *(row[field] for field in fields)]) if row and row["owner"] == owner else None

    def path(self, owner: str, turn_id: str) -> list[Turn]:
        with self._told():
            rows = self._path(args=[owner, turn_id])
        return [_turn(row) for row in reversed(rows)]

    def add_turn(self, turn: Turn) -> None:
        with self._told():
            done = self._add_turn(args=_row(turn))
        if not done:
            raise Conflict("the turn before was deleted meanwhile")

    def drop_turn(self, turn: Turn) -> None:
        with self._told():
            self._drop_turn(args=[turn.id])

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Raises StoreFailed: Redis is away, full, or cannot be written. What it says quotes no values."""
        try:
            yield
        except self._failures as failure:
            raise StoreFailed(" ".join(str(failure).split())) from failure


def _moved(session: Session, done: int, head: str | None, updated: int) -> Session:
    if not done:
        raise Conflict("the session was moved or deleted by somebody else")
    return replace(session, head=head, updated=updated)


def _now_after(session: Session) -> int:
    return max(session.updated + 1, time.time_ns() // 1000)


def _row(turn: Turn) -> list[str | int]:
    """Its id, and its fields in the scripts' order."""
    return [
        turn.id,
        turn.owner,
        turn.parent or "",
        turn.number,
        _dump(turn.messages),
        _dump(turn.about),
        turn.created,
        turn.request_key or "",
    ]


def _turn(row: Sequence[str]) -> Turn:
    id, owner, parent, number, messages, about, created, key = row
    said: list[Json] = json.loads(messages)
    return Turn(id, owner, parent or None, int(number), tuple(said), json.loads(about), key or None, int(created))


def _session(session_id: str, row: Mapping[str, str]) -> Session:
    about: Json = json.loads(row["about"])
    return Session(session_id, row["owner"], row["head"] or None, about, int(row["created"]), int(row["updated"]))


def _dump(value: object) -> str:
    return json.dumps(value, ensure_ascii=True, separators=(",", ":"))
