"""A program that runs in a session goes on from what was said there, whoever said it, and stores what it says."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import httpx2
import pytest

import niwaki as nw
from niwaki.lang.remote import RuntimeEndpoint
from niwaki.lang.remote_session import RemoteSession
from niwaki.lang.state import State

SHORT = {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}


@nw.function
def turn(s: State, text: str) -> None:
    s += nw.user(text)
    s += nw.assistant(nw.gen("answer"))


@nw.function
async def turn_async(s: State, text: str) -> str:
    s += nw.user(text)
    s += nw.assistant(nw.gen("answer"))
    return str(await s.get("answer"))


@pytest.fixture(scope="module")
def endpoint(url: str) -> Iterator[RuntimeEndpoint]:
    with RuntimeEndpoint(url) as made:
        yield made


@pytest.fixture
def session(endpoint: RuntimeEndpoint, client: httpx2.Client) -> Iterator[RemoteSession]:
    made = endpoint.session(title="of a program")
    yield made
    client.delete(f"/v1/sessions/{made.id}")  # and the places that chats hold in the engine


def test_each_run_goes_on_from_the_one_before(session: RemoteSession, endpoint: RuntimeEndpoint) -> None:
    first = turn.run("the cat", backend=session, options=SHORT)
    second = turn.compile().run("sat on <|end|> the mat", backend=session, options=SHORT)
    streamed = turn.stream("and the dog", backend=endpoint.session(session.id), options=SHORT)
    assert "".join(streamed.text_iter("answer")) == streamed["answer"]
    streamed.sync()  # stored
    last = asyncio.run(turn_async.arun("lives in town", backend=session, options=SHORT))
    assert (first.text(), second.text()) == (second.text()[: len(first.text())], last.text()[: len(second.text())])
    said = ["the cat", "sat on <|end|> the mat", "and the dog", "lives in town"]
    answers = [state["answer"] for state in (first, second, streamed, last)]
    wanted = [{"role": role, "content": text} for pair in zip(said, answers, strict=True) for role, text in _turn(pair)]
    assert last.messages() == session.messages() == wanted
    assert last.ret_value == last["answer"]
    assert second.usage.cached_tokens >= 3, (
        "the first turn's, as far as its answer is tokenized again as it was written"
    )


def _turn(pair: tuple[str, object]) -> list[tuple[str, object]]:
    return [("user", pair[0]), ("assistant", pair[1])]


def test_a_chat_client_and_a_program_share_a_session(session: RemoteSession, client: httpx2.Client) -> None:
    turn.run("the cat", backend=session, options=SHORT)
    body = {"messages": [{"role": "user", "content": "and the dog"}], "max_tokens": 5, "temperature": 0}
    chat = client.post(f"/v1/sessions/{session.id}/chat/completions", json=body | {"ignore_eos": True}).json()
    state = turn.run("lives in town", backend=session, options=SHORT)
    assert state.messages()[3]["content"] == chat["choices"][0]["message"]["content"]
    assert state.usage.cached_tokens > chat["usage"]["prompt_tokens"], "the place behind the chat is where it began"
    exported = client.get(f"/v1/sessions/{session.id}").json()
    assert [len(stored["messages"]) for stored in exported["turns"]] == [2, 2, 2]
    client.post(f"/v1/sessions/{session.id}/rewind", json={"turn": exported["turns"][0]["id"]})
    assert session.messages() == state.messages()[:2]


def test_what_a_client_said_in_parts_is_one_text(session: RemoteSession, client: httpx2.Client) -> None:
    parts = [{"type": "text", "text": "the "}, {"type": "text", "text": "cat"}]
    refused: dict[str, object] = {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "refusal": "no"}, refused]
    assert client.post(f"/v1/sessions/{session.id}/turns", json={"after": None, "messages": messages}).is_success
    assert session.messages() == [{"role": "user", "content": "the cat"}, *[{"role": "assistant", "content": "no"}] * 2]


def test_a_program_rewinds_branches_exports_and_deletes_its_session(
    session: RemoteSession, endpoint: RuntimeEndpoint, client: httpx2.Client
) -> None:
    for text in ("the cat", "the dog"):
        turn.run(text, backend=session, options=SHORT)
    whole = session.messages()
    first, second = session.turns()
    twin, same = session.branch(first, title="another way"), session.branch()
    assert (twin.messages(), same.turns()) == (whole[:2], [first, second])
    assert session.export() == client.get(f"/v1/sessions/{session.id}").json()
    session.rewind(first)
    assert session.messages() == whole[:2]
    session.rewind(None)
    assert (session.messages(), same.messages()) == ([], whole)
    with pytest.raises(nw.RequestError, match="no such turn"):
        session.rewind(first)
    for one in (twin, same):
        one.delete()
        with pytest.raises(nw.RequestError, match=f"no such session: '{one.id}' was deleted.*GET /v1/sessions lists"):
            one.messages()


def test_turns_of_forks_are_not_stored(session: RemoteSession) -> None:
    @nw.function
    def ask_twice(s: State) -> None:
        s += nw.user("the cat")
        forks = s.fork(2)
        forks += nw.assistant(nw.gen("guess"))
        forks.join()
        s += nw.assistant("either")

    turn.run("and the dog", backend=session, options=SHORT)
    state = ask_twice.run(backend=session, options=SHORT)
    assert len(state["guess"]) == 2  # type: ignore[arg-type]  # a list of texts
    assert [message["content"] for message in session.messages()[2:]] == ["the cat", "either"]


def test_a_run_that_fails_stores_nothing(session: RemoteSession) -> None:
    @nw.function
    def broken(s: State) -> None:
        s += nw.user("the cat") + nw.assistant(nw.gen("x"))
        raise ValueError("by its author")

    @nw.function
    def refused(s: State) -> None:
        s += nw.user("the cat") + nw.assistant(nw.gen("x", regex="("))

    turn.run("the dog", backend=session, options=SHORT)
    before = session.messages()
    with pytest.raises(ValueError, match="by its author"):
        broken.run(backend=session, options=SHORT)
    with pytest.raises(nw.ConstraintError):
        refused.run(backend=session, options=SHORT)
    assert session.messages() == before


def test_of_two_runs_at_once_the_later_one_fails(session: RemoteSession) -> None:
    @nw.function
    def outer(s: State) -> None:
        s += nw.user("the cat") + nw.assistant(nw.gen("x"))
        turn.run("meanwhile", backend=session)

    with pytest.raises(nw.RequestError, match="gone on meanwhile"):
        outer.run(backend=session, options=SHORT)
    assert [message["content"] for message in session.messages()][::2] == ["meanwhile"]


def test_text_outside_of_turns_is_refused_and_stores_nothing(session: RemoteSession) -> None:
    @nw.function
    def text(s: State) -> None:
        s += nw.user("the cat") + nw.assistant(nw.gen("x")) + "a postscript"

    @nw.function
    def generated(s: State) -> None:
        s += nw.gen("x")

    @nw.function
    def in_a_fork(s: State) -> None:
        aside = s.fork(1)[0]
        aside += "the dog" + nw.gen("y")
        s += nw.user("the cat") + nw.assistant(nw.gen("x")) + "\n"

    for program, what in ((text, "'a postscript'"), (generated, "gen 'x'")):
        with pytest.raises(nw.ProgramError, match=rf"text outside of chat turns \({what}\) has no place in a session"):
            program.run(backend=session, options=SHORT)
    assert session.messages() == []
    in_a_fork.run(backend=session, options=SHORT)
    assert [message["role"] for message in session.messages()] == ["user", "assistant"]
    turn.run("once more", backend=session, options=SHORT)


def test_a_program_that_says_nothing_stores_no_turn(session: RemoteSession, client: httpx2.Client) -> None:
    @nw.function
    def look(s: State) -> int:
        return len(s.messages())

    turn.run("the cat", backend=session, options=SHORT)
    assert look.run(backend=session).ret_value == 2
    assert len(client.get(f"/v1/sessions/{session.id}").json()["turns"]) == 1


def test_what_a_session_cannot_do_is_refused(session: RemoteSession, endpoint: RuntimeEndpoint) -> None:
    with pytest.raises(nw.ProgramError, match="leave out chat_template"):
        turn.run("the cat", backend=session, chat_template="plain")
    with pytest.raises(nw.ProgramError, match="rows of a batch"):
        turn.run_batch([("the cat",)], backend=session)
    with pytest.raises(nw.ProgramError, match="begins with its turns"):
        turn.cache("the cat", backend=session)
    with pytest.raises(nw.RequestError, match="no such session"):
        turn.run("the cat", backend=endpoint.session("sess_0"))
    assert session.messages() == []


def test_a_session_with_calls_of_tools_is_refused_by_name(endpoint: RuntimeEndpoint, client: httpx2.Client) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    said = [{"role": "user", "content": "the cat"}, {"role": "assistant", "tool_calls": [call]}]
    made = client.post("/v1/sessions", json={"messages": said}).json()["id"]
    with pytest.raises(nw.UnsupportedByBackend, match="calls of tools"):
        turn.run("the dog", backend=endpoint.session(made), options=SHORT)


def test_a_turn_is_stored_behind_the_one_that_it_names(client: httpx2.Client) -> None:
    path = f"/v1/sessions/{client.post('/v1/sessions', json={}).json()['id']}"
    assert client.post(f"{path}/branches", json={}).json()["messages"] == []
    body = {"after": None, "messages": [{"role": "user", "content": "the cat"}]}
    stored = client.post(f"{path}/turns", json=body).json()
    again = client.post(f"{path}/turns", json=body)
    assert (again.status_code, again.json()["error"]["param"]) == (409, stored["turn"])
    entered = client.post(f"{path}/branches", json={}).json()
    assert (entered["turn"], "".join(one["text"] for one in entered["segments"])[-7:]) == (stored["turn"], "the cat")
    assert client.post(f"{path}/turns", json=body | {"messages": []}).status_code == 400
    for branch in client.delete(f"/branches/{entered['id']}"), client.delete(path):
        assert branch.status_code == 200
