"""A session is made of an export, renamed, and stored whole or not at all."""

from __future__ import annotations

import threading

import httpx2
import pytest
from pydantic import BaseModel

from niwaki.runtime.server import store_sql, wire
from niwaki.runtime.server.openai_models import MAX_MESSAGES
from niwaki.runtime.server.store import StoreFailed, Turn
from tests.runtime.server.test_sessions import Json, history, made, said


def test_what_one_exports_another_session_begins_with(client: httpx2.Client) -> None:
    session = made(client)
    said(client, session, "one")
    exported = client.get(f"/v1/sessions/{session}").json()
    copy = made(client, messages=exported["messages"])
    assert history(client, copy) == history(client, session)
    said(client, copy, "two")
    assert len(history(client, copy)) == 4
    assert len(history(client, session)) == 2


def test_an_export_that_is_sent_back_whole_is_the_same_session_once_more(client: httpx2.Client) -> None:
    session = made(client, title="cats", metadata={"a": "b"}, messages=[{"role": "system", "content": "the cat"}])
    said(client, session, "one")
    said(client, session, "two")
    exported = client.get(f"/v1/sessions/{session}").json()
    copy = made(client, **exported)
    again = client.get(f"/v1/sessions/{copy}").json()
    assert copy != session
    assert {turn["id"] for turn in again["turns"]}.isdisjoint(turn["id"] for turn in exported["turns"])
    assert without_ids(again) == without_ids(exported)
    assert client.post(f"/v1/sessions/{copy}/rewind", json={"turn": again["turns"][1]["id"]}).status_code == 200
    said(client, copy, "three")
    assert len(history(client, copy)) == len(history(client, session))
    empty = client.get(f"/v1/sessions/{made(client)}").json()
    assert history(client, made(client, **empty)) == []
    wrong = client.post("/v1/sessions", json=exported | {"messages": exported["messages"][1:]})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "messages")


def test_an_export_of_more_messages_than_a_chat_may_have_is_a_session_once_more(client: httpx2.Client) -> None:
    turn = {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}
    long = made(client, turns=[turn] * (MAX_MESSAGES // 2 + 1))
    exported = client.get(f"/v1/sessions/{long}").json()
    assert len(exported["messages"]) == MAX_MESSAGES + 2
    assert len(history(client, made(client, **exported))) == MAX_MESSAGES + 2


def test_a_long_export_is_read_beside_the_event_loop(client: httpx2.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its messages are checked one by one: half a second of 4 MiB, in which nobody else would be answered."""
    threads: list[str] = []
    validate = wire._validated

    def noting(model: type[BaseModel], given: bytes) -> BaseModel:
        threads.append(threading.current_thread().name)
        return validate(model, given)

    monkeypatch.setattr(wire, "_validated", noting)
    turn = {"messages": [{"role": "user", "content": "x" * 1000}]}
    made(client, turns=[turn])
    long = made(client, turns=[turn] * 300)
    wrong = client.post("/v1/sessions", json={"turns": [turn] * 300 + [{"messages": [{"role": "user"}]}]})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "turns[300].messages[0].content")
    assert len(history(client, long)) == 300
    beside = [name.startswith("niwaki-read") for name in threads]
    assert beside == [False, True, True]


def without_ids(exported: Json) -> Json:
    turns = exported["turns"]
    assert isinstance(turns, list)
    kept = {name: exported[name] for name in ("object", "title", "metadata", "messages")}
    return kept | {"turns": [{name: value for name, value in turn.items() if name != "id"} for turn in turns]}


def test_a_session_that_cannot_be_stored_whole_is_not_there(
    client: httpx2.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = client.get("/v1/sessions", params={"limit": 100}).json()
    row = store_sql._row

    def row_once(turn: Turn) -> dict[str, object]:
        if turn.number > 1:
            raise StoreFailed("the disk is full")
        return row(turn)

    monkeypatch.setattr(store_sql, "_row", row_once)
    turn = {"messages": [{"role": "user", "content": "x"}]}
    assert client.post("/v1/sessions", json={"turns": [turn, turn]}).status_code == 503
    assert client.get("/v1/sessions", params={"limit": 100}).json() == before


def test_a_session_gets_another_title_and_keeps_the_rest(client: httpx2.Client) -> None:
    session = made(client, title="old", metadata={"a": "b"})
    said(client, session, "one")
    whole = history(client, session)
    page = f"/v1/sessions/{session}"
    assert client.post(page, json={"title": "new"}).json()["title"] == "new"
    told = client.post(page, json={"metadata": {"c": "d"}}).json()
    assert (told["title"], told["metadata"]) == ("new", {"c": "d"})
    told = client.post(page, json={"title": None, "metadata": None}).json()
    assert (told["title"], told["metadata"]) == (None, {})
    assert client.get(page).json()["title"] is None
    assert client.post(page, json={}).json()["turn"] == client.get(page).json()["turns"][-1]["id"]
    assert history(client, session) == whole
    bodies: list[Json] = [{"title": 5}, {"messages": []}]
    for wrong in bodies:
        assert client.post(page, json=wrong).status_code == 400
    assert client.post("/v1/sessions/none", json={"title": "x"}).status_code == 404
