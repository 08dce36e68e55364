"""Sessions: the server remembers exactly the turns that it acknowledged, also after it was started again."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import openai
import pytest

from niwaki.runtime.api import Segment
from niwaki.runtime.engine import Engine
from niwaki.runtime.server.config import ServerConfig, digests
from niwaki.runtime.server.serve import serving
from tests.lang.waiting import wait_until
from tests.runtime.server.conftest import LONG_TOKENS, held, nobody_waits

Json = dict[str, object]

ROOT = Path(__file__).parents[3]

SHORT = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}


def made(client: httpx2.Client, **body: object) -> str:
    answer = client.post("/v1/sessions", json=body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


def said(client: httpx2.Client, session: str, text: str, **more: object) -> Json:
    body = {"messages": [{"role": "user", "content": text}], **SHORT, **more}
    answer = client.post(f"/v1/sessions/{session}/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def content(answer: Json) -> str:
    return str(answer["choices"][0]["message"]["content"])  # type: ignore[index]


def history(client: httpx2.Client, session: str) -> list[tuple[str, str]]:
    found = client.get(f"/v1/sessions/{session}").json()
    return [(message["role"], message["content"]) for message in found["messages"]]


def test_a_turn_sends_only_what_is_new_and_goes_on_from_the_tokens_that_were_said(
    client: httpx2.Client, engine: Engine
) -> None:
    session = made(client, title="cats", messages=[{"role": "system", "content": "the cat"}])
    first = said(client, session, "sat on the mat?")
    second = said(client, session, "and the dog?")

    def generated(ids: list[int]) -> Json:
        found = engine.generate(
            input_ids=ids, sampling_params={"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
        )
        assert isinstance(found, dict)
        return {**found}

    ids = engine.tokenizer.encode(
        [*control("<|bos|><|system|>"), Segment("the cat"), *control("<|end|><|user|>"), Segment("sat on the mat?"),
         *control("<|end|><|assistant|>")], at_start=True,
    )  # fmt: skip
    expected = generated(ids)
    assert content(first) == expected["text"]
    more = [*control("<|end|><|user|>"), Segment("and the dog?"), *control("<|end|><|assistant|>")]
    output_ids = expected["output_ids"]
    assert isinstance(output_ids, list)
    assert content(second) == generated([*ids, *output_ids, *engine.tokenizer.encode(more)])["text"]
    assert history(client, session) == [
        ("system", "the cat"),
        ("user", "sat on the mat?"),
        ("assistant", content(first)),
        ("user", "and the dog?"),
        ("assistant", content(second)),
    ]


def control(text: str) -> list[Segment]:
    return [Segment(text, control=True)]


def test_the_next_turn_computes_only_what_is_new(client: httpx2.Client) -> None:
    session = made(client)
    first = said(client, session, "the cat sat on the mat and the dog sat on the log")
    second = said(client, session, "yes")
    before, after = dict(first["usage"]), dict(second["usage"])  # type: ignore[call-overload]
    # All but the token that the answer ended with, whose KV nobody has computed yet.
    assert after["prompt_tokens_details"]["cached_tokens"] >= before["total_tokens"] - 1


def test_openai_clients_talk_in_a_session_by_its_address_and_streams_name_the_turn(
    client: httpx2.Client, url: str
) -> None:
    session = made(client)
    with openai.OpenAI(base_url=f"{url}/v1/sessions/{session}", api_key="none", max_retries=0) as ai:
        stream = ai.chat.completions.create(
            model="toy", messages=[{"role": "user", "content": "the cat"}], max_tokens=6, stream=True
        )
        chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert history(client, session) == [("user", "the cat"), ("assistant", text)]
    turn = client.get(f"/v1/sessions/{session}").json()["turn"]
    assert (chunks[-1].model_extra or {})["turn"] == turn
    assert all("turn" not in (chunk.model_extra or {}) for chunk in chunks[:-1])


def test_what_was_cut_off_was_never_said(client: httpx2.Client, engine: Engine) -> None:
    session = made(client)
    acknowledged = [("user", "one"), ("assistant", content(said(client, session, "one")))]
    body = {"messages": [{"role": "user", "content": "lost"}], **SHORT, "max_tokens": 400, "stream": True}
    for num_read in (0, 1, 3):
        with held(engine):
            with client.stream("POST", f"/v1/sessions/{session}/chat/completions", json=body) as answer:
                lines = answer.iter_lines()
                for _ in range(num_read):
                    next(lines)
            wait_until(lambda: nobody_waits(client))
        wait_until(lambda: is_free(client, session))
        assert history(client, session) == acknowledged
    acknowledged += [("user", "two"), ("assistant", content(said(client, session, "two")))]
    assert history(client, session) == acknowledged


def is_free(client: httpx2.Client, session: str) -> bool:
    """Whether the server has noticed that the client is gone. Rewinding to where it stands changes nothing."""
    turn = client.get(f"/v1/sessions/{session}").json()["turn"]
    return client.post(f"/v1/sessions/{session}/rewind", json={"turn": turn}).status_code == 200


def test_a_second_turn_at_the_same_time_is_a_conflict_and_does_no_harm(client: httpx2.Client, engine: Engine) -> None:
    session = made(client)
    path = f"/v1/sessions/{session}/chat/completions"
    body: Json = {"messages": [{"role": "user", "content": "one"}], "max_tokens": 60, "ignore_eos": True}
    with held(engine) as release, client.stream("POST", path, json=body | {"stream": True}) as running:
        refused = client.post(path, json=body)
        deleted = client.delete(f"/v1/sessions/{session}")
        release()
        text = running.read().decode()
    assert (refused.status_code, deleted.status_code) == (409, 409)
    assert refused.json()["error"]["code"] == "conflict"
    assert text.endswith("data: [DONE]\n\n")
    assert len(history(client, session)) == 2


def test_a_request_that_is_sent_again_is_refused_and_names_its_turn(client: httpx2.Client) -> None:
    session = made(client)
    body = {"messages": [{"role": "user", "content": "one"}], **SHORT}

    def sent(key: str) -> httpx2.Response:
        return client.post(f"/v1/sessions/{session}/chat/completions", json=body, headers={"idempotency-key": key})

    first = sent("a")
    again = sent("a")
    assert again.status_code == 409
    assert again.json()["error"]["code"] == "already_stored"
    assert again.json()["error"]["param"] == first.json()["turn"]
    assert sent("b").status_code == 200
    assert len(history(client, session)) == 4


def test_a_session_is_rewound_branched_listed_and_deleted(client: httpx2.Client) -> None:
    session = made(client, title="trunk")
    turns = [said(client, session, text)["turn"] for text in ("one", "two", "three")]
    whole = history(client, session)
    twin = client.post(f"/v1/sessions/{session}/branch", json={"turn": turns[1], "title": "twin"}).json()
    assert history(client, twin["id"]) == whole[:4]
    said(client, twin["id"], "other")
    assert history(client, session) == whole, "a branch leaves its trunk alone"

    back = client.post(f"/v1/sessions/{session}/rewind", json={"turn": turns[0]})
    assert back.json()["turn"] == turns[0]
    assert history(client, session) == whole[:2]
    gone = client.post(f"/v1/sessions/{session}/rewind", json={"turn": turns[2]})
    said_of_it = f"this session has no such turn: '{turns[2]}'; GET /v1/sessions/{session} has its own"
    assert (gone.status_code, gone.json()["error"]["message"]) == (404, said_of_it)
    assert history(client, twin["id"])[:4] == whole[:4], "what a branch shares stays"

    listed = client.get("/v1/sessions", params={"limit": 2}).json()
    assert [one["title"] for one in listed["data"]] == ["twin", "trunk"]
    after = client.get("/v1/sessions", params={"limit": 100, "after": listed["data"][0]["id"]}).json()
    assert after["data"][0]["id"] == session

    assert client.delete(f"/v1/sessions/{session}").json()["deleted"] is True
    assert client.get(f"/v1/sessions/{session}").status_code == 404
    assert client.delete(f"/v1/sessions/{session}").status_code == 404
    assert len(history(client, twin["id"])) == 6
    assert client.post(f"/v1/sessions/{twin['id']}/rewind", json={"turn": None}).json()["turn"] is None
    assert history(client, twin["id"]) == []


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "x"}], "n": 2}, "n"),
        (
            {"messages": [{"role": "assistant", "content": "x"}], "continue_final_message": True},
            "continue_final_message",
        ),
        ({"messages": [{"role": "user", "content": "x " * 2000}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x"}], "regex": "a{3"}, "regex"),
        ({"messages": [{"role": "user", "content": "x"}], "model": "gpt-4"}, "model"),
    ],
)
def test_a_turn_that_is_refused_leaves_the_session_free(client: httpx2.Client, body: Json, param: str) -> None:
    session = made(client)
    refused = client.post(f"/v1/sessions/{session}/chat/completions", json=body)
    assert refused.status_code in (400, 404)
    assert refused.json()["error"]["param"] == param
    said(client, session, "one")


def test_unknown_sessions_and_wrong_addresses_are_told(client: httpx2.Client) -> None:
    assert client.get("/v1/sessions/none").status_code == 404
    body = {"messages": [{"role": "user", "content": "x"}]}
    assert client.post("/v1/sessions/none/chat/completions", json=body).status_code == 404
    refused = client.get("/v1/sessions", params={"limit": 0})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "limit")


@pytest.fixture
def guarded(engine: Engine) -> Iterator[str]:
    with serving(engine, ServerConfig(port=0, key_digests=digests(["first-key", "second-key"]))) as address:
        yield address


def test_nobody_sees_another_ones_sessions(guarded: str) -> None:
    first = httpx2.Client(base_url=guarded, headers={"authorization": "Bearer first-key"}, timeout=60)
    second = httpx2.Client(base_url=guarded, headers={"authorization": "Bearer second-key"}, timeout=60)
    with first, second:
        session = made(first)
        said(first, session, "one")
        assert second.get("/v1/sessions").json()["data"] == []
        for answer in (
            second.get(f"/v1/sessions/{session}"),
            second.delete(f"/v1/sessions/{session}"),
            second.post(f"/v1/sessions/{session}", json={"title": "mine"}),
            second.post(f"/v1/sessions/{session}/branch", json={}),
            second.post(f"/v1/sessions/{session}/rewind", json={"turn": None}),
        ):
            assert answer.status_code == 404
        assert len(history(first, session)) == 2


def test_sessions_outlive_the_server(engine: Engine, tmp_path: Path) -> None:
    config = ServerConfig(port=0, sessions=f"sqlite:///{tmp_path / 'kept.db'}")
    with serving(engine, config) as address, httpx2.Client(base_url=address, timeout=60) as client:
        session = made(client, title="kept")
        said(client, session, "the cat sat on the mat")
        before = history(client, session)
    with serving(engine, config) as address, httpx2.Client(base_url=address, timeout=60) as client:
        assert history(client, session) == before
        assert [one["title"] for one in client.get("/v1/sessions").json()["data"]] == ["kept"]
        answer = said(client, session, "and then?")
        messages = [{"role": role, "content": text} for role, text in [*before, ("user", "and then?")]]
        whole = client.post("/v1/chat/completions", json={"messages": messages, **SHORT}).json()
        assert content(answer) == content(whole)


def test_no_acknowledged_turn_is_lost_when_the_server_is_killed(long_folder: Path, tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "niwaki", "serve", "--model", str(long_folder), "--port", "0",
        "--kv-tokens", str(LONG_TOKENS + 512), "--sessions", f"sqlite:///{tmp_path / 'kept.db'}",
    ]  # fmt: skip

    def talk(session: str | None) -> tuple[str, list[tuple[str, str]]]:
        """Two turns in a session, a third that is cut by kill -9; the history before the kill."""
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            try:
                address = process.stdout.readline().split()[-1]
                with httpx2.Client(base_url=address, timeout=60) as client:
                    session = session or made(client)
                    before = history(client, session)
                    said(client, session, "one", max_tokens=2)
                    assert history(client, session)[:-2] == before
                    body = {**SHORT, "messages": [{"role": "user", "content": "lost"}], "max_tokens": LONG_TOKENS}
                    path = f"/v1/sessions/{session}/chat/completions"
                    with client.stream("POST", path, json=body | {"stream": True}) as answer:
                        lines = answer.iter_lines()  # held: an iterator that is dropped closes the connection
                        next(lines)
                        found = history(client, session)
                        process.kill()
                    return session, found
            finally:
                process.kill()

    session, first = talk(None)
    _, second = talk(session)
    assert len(first) == 2
    assert second[:2] == first
    assert [text for role, text in second if role == "user"] == ["one", "one"]


def test_the_kv_of_an_idle_conversation_is_given_up_and_made_again(engine: Engine) -> None:
    def num_pins() -> int:
        return engine.backend._core.pages.cache.stats().pins

    with (
        serving(engine, ServerConfig(port=0, session_seconds=0.1)) as address,
        httpx2.Client(base_url=address, timeout=60) as client,
    ):
        pins = num_pins()
        session = made(client)
        first = said(client, session, "one")
        wait_until(lambda: num_pins() == pins)
        said(client, session, "two")
        assert history(client, session)[1] == ("assistant", content(first))


@pytest.mark.parametrize("how", ["deleted", "rewound"])
def test_what_is_taken_back_of_a_session_holds_no_kv(how: str, engine: Engine) -> None:
    def num_pins() -> int:
        return engine.backend._core.pages.cache.stats().pins

    with serving(engine, ServerConfig(port=0)) as address, httpx2.Client(base_url=address, timeout=60) as client:
        pins = num_pins()
        session = made(client)
        said(client, session, "one")
        assert num_pins() > pins
        if how == "deleted":
            client.delete(f"/v1/sessions/{session}").raise_for_status()
        else:
            client.post(f"/v1/sessions/{session}/rewind", json={"turn": None}).raise_for_status()
        wait_until(lambda: num_pins() == pins)


def cached(answer: Json) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])  # type: ignore[index]


LONG_TEXT = "the cat sat on the mat and the dog sat on the log " * 20


def test_the_kv_of_an_idle_conversation_is_in_the_tier_before_the_pool_needs_its_room(toy_folder: Path) -> None:
    config = ServerConfig(port=0, session_seconds=0.2)
    with (
        Engine(toy_folder, kv_tokens=4096, host_cache_bytes=2**24) as engine,
        serving(engine, config) as address,
        httpx2.Client(base_url=address, timeout=60) as client,
    ):
        session = made(client)
        said(client, session, LONG_TEXT)
        num_pages = engine.stats()["pages_tree"]
        wait_until(lambda: engine.stats()["tier_memory_pages"] >= num_pages - 1)  # the last one may not be full
        assert engine.stats()["evicted_pages"] == 0
        assert engine.stats()["pages_tree"] == num_pages, "as long as the room is not needed it is there, too"
        engine.backend.check()
        assert engine.backend.flush(tiers=False)
        assert engine.stats()["pages_tree"] == 0
        answer = said(client, session, "and then?")
        assert cached(answer) >= (num_pages - 1) * 16
        assert engine.stats()["tier_restored_tokens"] == cached(answer)
        assert history(client, session)[0] == ("user", LONG_TEXT)


def command_of(toy_folder: Path, tmp_path: Path, *options: str) -> list[str]:
    """A server whose idle conversations' KV goes to tmp_path / "pages"."""
    return [
        sys.executable, "-m", "niwaki", "serve", "--model", str(toy_folder), "--port", "0", "--kv-tokens", "4096",
        "--sessions", f"sqlite:///{tmp_path / 'kept.db'}", "--session-seconds", "0.2",
        "--disk-cache-dir", str(tmp_path / "pages"), *options,
    ]  # fmt: skip


@contextmanager
def killed_at_last(command: list[str]) -> Iterator[str]:
    """The address of a server while the block runs."""
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().split()[-1]
        finally:
            process.kill()


def talk(address: str, pages: Path, session: str | None = None, key: str = "none") -> tuple[str, int]:
    """A turn, until all of its KV is in the folder; and how much the cache had of it."""
    with httpx2.Client(base_url=address, timeout=60, headers={"authorization": f"Bearer {key}"}) as client:
        answer = said(client, session or made(client), LONG_TEXT if session is None else "and then?")
        num_pages = answer["usage"]["total_tokens"] // 16 - 1  # type: ignore[index]
        wait_until(lambda: len(list(pages.glob("*.page"))) >= num_pages)
        return str(answer["session"]), cached(answer)


def test_the_kv_of_an_idle_conversation_outlives_the_server_in_a_folder(toy_folder: Path, tmp_path: Path) -> None:
    command, pages = command_of(toy_folder, tmp_path), tmp_path / "pages"
    with killed_at_last(command) as address:
        session, first = talk(address, pages)
    with killed_at_last(command) as address:
        _, second = talk(address, pages, session)
    assert first == 0
    assert second > 200


def test_with_keys_it_does_so_for_the_key_that_it_belongs_to(toy_folder: Path, tmp_path: Path) -> None:
    ours, theirs = "a-key-of-ours", "a-key-of-theirs"
    command = command_of(toy_folder, tmp_path, "--api-key", ours, "--api-key", theirs)
    pages = tmp_path / "pages"
    with killed_at_last(command) as address:
        session, first = talk(address, pages, key=ours)
    with killed_at_last(command) as address:
        _, second = talk(address, pages, session, key=ours)
        _, of_others = talk(address, pages, key=theirs)  # the same words
    assert second > 200
    assert (first, of_others) == (0, 0)


def test_turns_that_somebody_stands_behind_are_not_read_again(client: httpx2.Client, paths_read: list[str]) -> None:
    session = made(client)
    turns = [str(said(client, session, f"turn {number}")["turn"]) for number in range(3)]
    twin = str(client.post(f"/v1/sessions/{session}/branch", json={}).json()["id"])
    said(client, twin, "again")
    assert paths_read == []
    client.post(f"/v1/sessions/{session}/rewind", json={"turn": turns[0]})
    brought = made(client, messages=[{"role": "system", "content": "Be brief."}])
    paths_read.clear()
    said(client, session, "again")
    assert paths_read == []
    said(client, brought, "hello")  # nobody stands behind what was brought along
    assert len(paths_read) == 1
    said(client, brought, "again")
    assert len(paths_read) == 1

    def asked(of: str) -> list[str]:
        return [text for role, text in history(client, of) if role != "assistant"]

    assert asked(session) == ["turn 0", "again"]
    assert asked(twin) == ["turn 0", "turn 1", "turn 2", "again"]
    assert asked(brought) == ["Be brief.", "hello", "again"]


def test_turns_of_many_sessions_at_once_stay_apart(client: httpx2.Client) -> None:
    sessions = [made(client) for _ in range(4)]

    def talk(session: str) -> None:
        for number in range(3):
            said(client, session, f"{session} {number}", max_tokens=3)

    threads = [threading.Thread(target=talk, args=(session,)) for session in sessions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for session in sessions:
        asked = [text for role, text in history(client, session) if role == "user"]
        assert asked == [f"{session} {number}" for number in range(3)]
        client.delete(f"/v1/sessions/{session}")


def test_an_answer_of_a_shape_is_remembered_as_it_was_said(client: httpx2.Client) -> None:
    session = made(client)
    answer = said(client, session, "yes or no?", choices=["yes", "no"])
    assert content(answer) in ("yes", "no")
    assert history(client, session)[-1] == ("assistant", content(answer))
    assert json.loads(json.dumps(answer))["session"] == session
