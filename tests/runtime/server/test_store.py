"""The store of turns, in every database that it knows: a path is what was appended, and what is needed stays."""

from __future__ import annotations

import os
import pwd
import random
import shutil
import stat
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import httpx2
import pytest
import sqlalchemy as sa

from niwaki.runtime.api import ConfigError
from niwaki.runtime.engine import Engine
from niwaki.runtime.server import store_sql
from niwaki.runtime.server.config import ServerConfig
from niwaki.runtime.server.options import SESSIONS
from niwaki.runtime.server.serve import serving
from niwaki.runtime.server.store import Conflict, Session, Store, StoreFailed, Turn, new_id, open_store
from niwaki.runtime.server.store_redis import RedisStore
from niwaki.runtime.server.store_sql import SqlStore
from tests.lang.waiting import PATIENCE, wait_until

DEBIANS = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))  # not on the path
POSTGRES = Path(os.path.realpath(shutil.which("postgres") or next(reversed(DEBIANS), ""))).parent
NOBODY = 65534  # PostgreSQL refuses to run as root


@pytest.fixture(scope="module")
def postgresql() -> Iterator[str]:
    """The URL of a server of our own, on a Unix socket."""
    pytest.importorskip("psycopg")  # niwaki[sessions]
    if not (POSTGRES / "initdb").exists():
        pytest.skip("no PostgreSQL here")
    user = NOBODY if os.geteuid() == 0 else None
    with tempfile.TemporaryDirectory() as folder:
        if user is not None:
            os.chown(folder, user, user)
        data = Path(folder) / "data"
        initdb = [str(POSTGRES / "initdb"), "-D", str(data), "-U", "niwaki", "-A", "trust", "-N"]
        subprocess.run(initdb, check=True, user=user, group=user, extra_groups=[], cwd=folder, capture_output=True)
        command = [
            str(POSTGRES / "postgres"),
            "-D",
            str(data),
            "-k",
            folder,
            "-c",
            "listen_addresses=",
            "-c",
            "fsync=off",
        ]
        with subprocess.Popen(
            command, user=user, group=user, extra_groups=[], cwd=folder, stderr=subprocess.PIPE, text=True
        ) as server:
            try:
                assert server.stderr is not None
                assert any("ready to accept connections" in line for line in server.stderr)
                yield f"postgresql://niwaki@/postgres?host={folder}"
            finally:
                server.terminate()


@pytest.fixture(scope="module")
def redis() -> Iterator[str]:
    """The URL of a Redis or Valkey of our own, on a Unix socket."""
    pytest.importorskip("redis")  # niwaki[redis]
    command = shutil.which("redis-server") or shutil.which("valkey-server")
    if command is None:
        pytest.skip("no Redis here")
    with tempfile.TemporaryDirectory() as folder:
        options = [
            "--port",
            "0",
            "--unixsocket",
            f"{folder}/socket",
            "--dir",
            folder,
            "--save",
            "",
            "--daemonize",
            "no",
        ]
        with subprocess.Popen([command, *options], stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                assert any("ready to accept connections" in line.lower() for line in server.stdout)
                yield f"unix://{folder}/socket"
            finally:
                server.terminate()


@pytest.fixture(params=["memory", "file", "postgresql", "redis"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    match request.param:
        case "memory":
            url = "sqlite://"
        case "file":
            url = f"sqlite:///{tmp_path / 'kept.db'}"
        case database:
            url = request.getfixturevalue(database)
    made = open_store(url)
    yield made
    made.close()


def begun(store: Store, head: str | None = None) -> Session:
    session = Session(new_id("sess"), "me", head, {"title": "é\0"}, random.getrandbits(40), 1)
    store.add_session(session)
    return session


def following(session: Session, number: int, key: str | None = None) -> Turn:
    messages: tuple[dict[str, object], ...] = (
        {"role": "user", "content": f"\0 {number} é 東"},
        {"role": "assistant", "content": None},
    )
    return Turn(new_id("turn"), "me", session.head, number, messages, {"usage": {"n": number}}, key)


def grown(store: Store, session: Session, count: int) -> tuple[Session, list[Turn]]:
    turns = []
    for number in range(count):
        turns.append(following(session, number + 1))
        session = store.append(session, turns[-1])
    return session, turns


def test_a_path_is_what_was_appended(store: Store) -> None:
    session, turns = grown(store, begun(store), 12)
    assert session.head == turns[-1].id
    assert store.path("me", turns[-1].id) == turns
    assert store.path("me", turns[4].id) == turns[:5]
    assert store.path("you", turns[4].id) == []
    assert store.turn("you", turns[4].id) is None
    assert store.session("me", session.id) == session
    assert store.session("you", session.id) is None


@pytest.mark.parametrize("name", ["\0", "turn_\0", "", "é" * 300, "'; --", "%", "\n"])
def test_a_name_that_cannot_be_is_nobodys(store: Store, name: str) -> None:
    begun(store)
    assert store.session("me", name) is None
    assert store.turn("me", name) is None
    assert not store.sessions("me", 3, name)
    assert not store.path("me", name)


def test_of_two_who_append_at_once_one_is_told(store: Store) -> None:
    for _ in range(5):
        session, _ = grown(store, begun(store), 1)
        told: list[str] = []

        def append(session: Session, told: list[str]) -> None:
            try:
                told.append(store.append(session, following(session, 2)).head or "")
            except Conflict:
                told.append("")

        threads = [threading.Thread(target=append, args=(session, told)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (head,) = (one for one in told if one)
        found = store.session("me", session.id)
        assert found is not None
        assert found.head == head
        assert len(store.path("me", head)) == 2


def test_a_key_stores_one_turn(store: Store) -> None:
    session = begun(store)
    first = following(session, 1, "key")
    moved = store.append(session, first)
    with pytest.raises(Conflict) as caught:
        store.append(moved, following(moved, 2, "key"))
    assert caught.value.turn == first.id == store.turn_of_request(session.id, "key")
    assert store.session("me", session.id) == moved, "neither the turn nor the move was kept"
    store.append(begun(store), following(session, 1, "key"))  # another session's keys are its own


def test_a_turn_goes_when_nothing_leads_to_it(store: Store) -> None:
    session, turns = grown(store, begun(store), 5)
    twin = begun(store, turns[2].id)
    back = store.move(session, turns[0].id)
    assert store.turn("me", turns[4].id) is None
    assert store.path("me", turns[2].id) == turns[:3], "a branch stands there"
    store.drop_session(twin)
    assert store.turn("me", turns[1].id) is None
    assert store.path("me", turns[0].id) == turns[:1]
    kept = Turn(new_id("resp"), "me", turns[0].id, 2, (), {"response": {}})
    store.add_turn(kept)
    store.drop_session(back)
    assert store.path("me", kept.id) == [turns[0], kept], "a response stands on it"
    store.drop_turn(kept)
    assert store.turn("me", turns[0].id) is None
    with pytest.raises(Conflict):
        begun(store, turns[0].id)


@pytest.mark.parametrize("other", ["drops", "branches"])
def test_what_postgresql_gives_up_for_two_at_once_is_gone_unless_one_of_them_needs_it(
    other: str, postgresql: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither is shown what the other is about to do."""
    store = SqlStore(postgresql)
    trunk, turns = grown(store, begun(store), 1)
    twin = begun(store, turns[0].id)
    if other == "branches":
        store.drop_session(twin)
    there: list[int] = []

    def together(function: Callable[[sa.Connection, str | None], None]) -> Callable[[sa.Connection, str | None], None]:
        def run(connection: sa.Connection, turn_id: str | None) -> None:
            function(connection, turn_id)
            there.append(1)
            wait_until(lambda: len(there) == 2 or is_somebody_waiting())

        return run

    def is_somebody_waiting() -> bool:
        with store._engine.connect() as connection:
            return bool(connection.execute(sa.text("select count(*) from pg_locks where not granted")).scalar_one())

    for name in ("_sweep", "_demand"):
        monkeypatch.setattr(store_sql, name, together(getattr(store_sql, name)))
    made: list[Session] = []

    def act() -> None:
        if other == "drops":
            store.drop_session(twin)
        else:
            with suppress(Conflict):
                made.append(begun(store, turns[0].id))

    acting = threading.Thread(target=act)
    acting.start()
    store.drop_session(trunk)
    acting.join()
    assert (store.turn("me", turns[0].id) is not None) == bool(made)
    store.close()


def test_many_turns_go_in_as_few_statements_as_one(tmp_path: Path) -> None:
    """Nobody else can write meanwhile: 4,096 turns, one by one, took two seconds."""
    store = SqlStore(f"sqlite:///{tmp_path / 'kept.db'}")
    statements: list[str] = []
    sa.event.listen(store._engine, "before_cursor_execute", lambda *given: statements.append(given[2]))
    counts = []
    for size in (1, 300):
        session, turns = grown(store, begun(store), size)
        twin = begun(store, turns[size // 2].id)
        statements.clear()
        store.drop_session(session)
        store.drop_session(twin)
        counts.append(len(statements))
        assert [turn for turn in turns if store.turn("me", turn.id)] == []
    store.close()
    assert counts[0] == counts[1]


def test_a_session_is_stored_with_its_first_turns_or_not_at_all(store: Store) -> None:
    first = following(begun(store), 1)
    second = Turn(new_id("turn"), "me", first.id, 2, (), {})
    session = Session(new_id("sess"), "me", second.id, {}, 1, 1)
    store.add_session(session, [first, second])
    assert store.path("me", second.id) == [first, second]
    astray = Session(new_id("sess"), "me", new_id("turn"), {}, 1, 1)
    other = Turn(new_id("turn"), "me", None, 1, (), {})
    with pytest.raises(Conflict):
        store.add_session(astray, [other])
    assert store.session("me", astray.id) is None
    assert store.turn("me", other.id) is None


def test_of_two_who_describe_a_session_at_once_one_is_told_and_it_stays_where_it_is(store: Store) -> None:
    session, turns = grown(store, begun(store), 1)
    changed = store.describe(session, {"title": "東\0"})
    assert changed == store.session("me", session.id)
    assert (changed.about, changed.head) == ({"title": "東\0"}, turns[0].id)
    assert changed.updated > session.updated
    with pytest.raises(Conflict):
        store.describe(session, {"title": "mine"})
    assert store.append(session, following(session, 2)).head is not None, "a new title moves nothing"


def test_sessions_are_listed_page_by_page(store: Store) -> None:
    owner = new_id("owner")
    made = [Session(new_id("sess"), owner, None, {}, 100 + number // 2, 1) for number in range(7)]
    for session in made:
        store.add_session(session)
    expected = sorted(made, key=lambda one: (one.created, one.id), reverse=True)
    found = store.sessions(owner, 3, None)
    while len(more := store.sessions(owner, 3, found[-1].id)) > 0:
        found += more
    assert found == expected
    assert store.num_sessions(owner) == 7
    assert store.sessions(owner, 3, "none") == []


def test_random_moves_leave_what_a_naive_model_has(store: Store) -> None:
    draw = random.Random(3)
    paths: dict[str, list[Turn]] = {}  # by session, as they should be
    sessions: dict[str, Session] = {}
    known: dict[str, Turn] = {}
    for _ in range(60):
        action = draw.choice(["new", "append", "append", "rewind", "branch", "drop"])
        if action == "new" or not sessions:
            session = begun(store)
            paths[session.id], sessions[session.id] = [], session
            continue
        session = sessions[draw.choice(sorted(sessions))]
        path = paths[session.id]
        match action:
            case "append":
                turn = following(session, len(path) + 1)
                known[turn.id] = turn
                sessions[session.id] = store.append(session, turn)
                path.append(turn)
            case "rewind":
                kept = draw.randint(0, len(path))
                sessions[session.id] = store.move(session, path[kept - 1].id if kept else None)
                del path[kept:]
            case "branch" if path:
                at = draw.randint(1, len(path))
                twin = begun(store, path[at - 1].id)
                paths[twin.id], sessions[twin.id] = path[:at], twin
            case "drop":
                store.drop_session(session)
                del paths[session.id], sessions[session.id]
    needed = {turn.id for path in paths.values() for turn in path}
    for turn_id, turn in known.items():
        assert store.turn("me", turn_id) == (turn if turn_id in needed else None)
    for session_id, path in paths.items():
        head = sessions[session_id].head
        assert (store.path("me", head) if head else []) == path


def test_the_file_is_its_owners_and_in_wal_mode(tmp_path: Path) -> None:
    path = tmp_path / "new" / "kept.db"
    store = open_store(f"sqlite:///{path}")
    session, _ = grown(store, begun(store), 2)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_bytes()[18:20] == b"\2\2", "SQLite's own mark of WAL mode"
    twice = open_store(f"sqlite:///{path}")
    assert twice.session("me", session.id) == session
    store.close()
    twice.close()


def test_a_file_below_the_home_is_named_as_a_shell_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a user without a home, as containers have them, is told; no folder named ~ comes to be."""

    def no_entry(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    open_store(SESSIONS).close()
    assert (tmp_path / "home" / ".local" / "state" / "niwaki" / "sessions.db").exists()
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", no_entry)
    with pytest.raises(ConfigError, match=r"sessions\.db: there is no home folder; name a file as sqlite:///FILE"):
        open_store(SESSIONS)
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


@pytest.mark.parametrize("wrong", ["redis://127.0.0.1:1", "mysql://x", "nothing", "sqlite:////proc/none/x.db", ""])
def test_a_store_that_cannot_be_is_refused(wrong: str) -> None:
    with pytest.raises(ConfigError):
        open_store(wrong)


def test_a_postgresql_that_is_gone_without_a_word_is_waited_for_as_long_as_its_url_says_or_ten_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[dict[str, int]] = []

    def create(url: sa.URL, *, connect_args: dict[str, int], **options: object) -> None:
        asked.append(connect_args)
        raise OSError("nobody is there")

    monkeypatch.setattr(sa, "create_engine", create)
    for url in ("postgresql://me@far/turns", "postgresql://me@far/turns?connect_timeout=3"):
        with pytest.raises(ConfigError, match="nobody is there"):
            SqlStore(url)
    first, second = asked
    assert (first["connect_timeout"], first["tcp_user_timeout"]) == (10, 10_000)
    assert second == {name: value for name, value in first.items() if name != "connect_timeout"}


def test_a_full_redis_is_told_and_nothing_of_a_turn_is_there(redis: str) -> None:
    store = RedisStore(redis)
    session, turns = grown(store, begun(store), 2)
    turn = following(session, 3, "a key")
    store._redis.config_set("maxmemory", 1)
    with pytest.raises(StoreFailed, match="maxmemory"):
        store.append(session, turn)
    with pytest.raises(StoreFailed, match="maxmemory"):
        begun(store, turns[0].id)
    store._redis.config_set("maxmemory", 0)
    assert store.session("me", session.id) == session
    assert store.turn("me", turn.id) is None
    moved = store.append(session, turn)
    store.drop_session(moved)
    assert [one for one in (*turns, turn) if store.turn("me", one.id)] == []
    store.close()


def test_a_damaged_database_is_told_as_one_that_fails(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'kept.db'}"
    store = open_store(url)
    session, _ = grown(store, begun(store), 20)
    store.close()
    file = tmp_path / "kept.db"
    content = file.read_bytes()
    file.write_bytes(content[:4096] + b"\xff" * (len(content) - 4096))  # its first page has the tables' names
    store = open_store(url)
    with pytest.raises(StoreFailed, match=r"malformed|not a database"):
        store.session("me", session.id)
    store.close()


def test_a_full_disk_is_told_and_logged_without_what_was_to_be_stored(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """SQLite says of a database at its own limit what it says of a full disk."""
    unbounded = store_sql._sqlite

    def bounded(url: sa.URL) -> sa.Engine:
        made = unbounded(url)
        sa.event.listen(made, "connect", lambda connection, _: connection.execute("PRAGMA max_page_count=24"))
        return made

    monkeypatch.setattr(store_sql, "_sqlite", bounded)
    config = ServerConfig(port=0, sessions=f"sqlite:///{tmp_path / 'full.db'}")
    with serving(engine, config) as url, httpx2.Client(base_url=url, timeout=PATIENCE) as client:
        kept = client.post("/v1/sessions", json={}).json()["id"]
        long = [{"role": "user", "content": "a secret " * 20_000}]
        answer = client.post("/v1/sessions", json={"messages": long})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "store_failed")
        assert int(answer.headers["retry-after"]) > 0
        assert client.get(f"/v1/sessions/{kept}").status_code == 200
    assert "the session store failed: database or disk is full" in caplog.text
    assert "secret" not in caplog.text


def test_a_database_that_does_not_answer_keeps_nobody_waiting_who_needs_none(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, asked = threading.Event(), threading.Semaphore(0)

    def silent(self: SqlStore, owner: str, session_id: str) -> None:
        asked.release()
        assert gate.wait(PATIENCE)

    monkeypatch.setattr(SqlStore, "session", silent)
    with serving(engine, ServerConfig(port=0, sessions="sqlite://")) as url:

        def ask() -> None:
            httpx2.get(f"{url}/v1/sessions/any", timeout=PATIENCE)

        asking = [threading.Thread(target=ask) for _ in range(8)]
        try:
            for thread in asking:
                thread.start()
            for _ in range(4):
                assert asked.acquire(timeout=PATIENCE)
            body = {"prompt": "the cat", "max_tokens": 1}
            assert httpx2.post(f"{url}/v1/completions", json=body, timeout=30).status_code == 200
        finally:
            gate.set()
            for thread in asking:
                thread.join()
