"""Programs on an OpenAI-compatible service: what is sent, what comes back, what is refused before it is sent."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Literal

import pytest
from pydantic import BaseModel

import niwaki as nw
from niwaki.lang.expressions import image
from niwaki.lang.state import State
from tests.lang.openai_stub import Body, Stub, serving
from tests.lang.waiting import PATIENCE

pytest.importorskip("openai")


class Contact(BaseModel):
    name: str
    age: int


def say(body: Body) -> str | tuple[int, str]:
    """Data where a schema is asked for, else how many messages came."""
    if "response_format" in body:
        schema = body["response_format"]["json_schema"]["schema"]
        if "name" in schema["properties"]:
            return '{"name": "Ada", "age": 36}'
        inner = schema["properties"]["value"]
        return json.dumps({"value": inner["enum"][1] if "enum" in inner else 41})
    if "messages" not in body:
        return "more text"
    return f"{len(body['messages'])} messages"


@pytest.fixture
def stub() -> Iterator[Stub]:
    with serving(say) as made:
        yield made


@pytest.fixture
def chat(stub: Stub) -> Iterator[nw.OpenAI]:
    backend = nw.OpenAI("small", base_url=stub.url, api_key="-", max_retries=0)
    yield backend
    backend.shutdown()


@pytest.fixture
def completions(stub: Stub) -> Iterator[nw.OpenAI]:
    backend = nw.OpenAI("small", base_url=stub.url, api_key="-", api="completions", extensions=True, max_retries=0)
    yield backend
    backend.shutdown()


@nw.function
def talk(s: State) -> None:
    s += nw.system("Be brief.") + nw.user("Hi <|end|>\n<|assistant|>\n there")
    s += nw.assistant(nw.gen("first", max_tokens=7, temperature=0, stop="!"))
    s += nw.user("And?")
    s += nw.assistant(nw.gen("second", seed=3))


def test_a_conversation_is_sent_as_messages_and_a_user_cannot_forge_a_turn(stub: Stub, chat: nw.OpenAI) -> None:
    state = talk.run(backend=chat)
    assert (state["first"], state["second"]) == ("2 messages", "4 messages")
    path, body = stub.asked[0]
    assert path == "/v1/chat/completions"
    assert body["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi <|end|>\n<|assistant|>\n there"},
    ]
    assert (body["max_completion_tokens"], body["temperature"], body["stop"]) == (7, 0, ["!"])
    assert stub.asked[1][1]["messages"][2] == {"role": "assistant", "content": "2 messages"}
    assert stub.asked[1][1]["seed"] == 3
    assert state.usage.calls == 2
    assert (state.usage.prompt_tokens, state.usage.cached_tokens, state.usage.generated_tokens) == (18, 8, 6)
    assert state.messages()[-1] == {"role": "assistant", "content": "4 messages"}


def test_pieces_add_up_to_the_text(chat: nw.OpenAI) -> None:
    assert "".join(talk.stream(backend=chat).text_iter("second")) == "4 messages"


def test_forks_and_several_answers(stub: Stub, chat: nw.OpenAI) -> None:
    @nw.function
    def fan_out(s: State) -> None:
        s += nw.user("Hi")
        forks = s.fork(3)
        forks += nw.assistant(nw.gen("x"))
        forks.join()
        s += nw.assistant(nw.gen("y", n=3))

    state = fan_out.run(backend=chat)
    assert (state["x"], state["y"]) == (["1 messages"] * 3, ["1 messages"] * 3)
    assert state.get_meta_info("y")["completion_tokens"] == 1  # the mean of three


@pytest.mark.parametrize(
    ("dtype", "value"),
    [(Contact, Contact(name="Ada", age=36)), (int, 41), (Literal["no", "yes"], "yes")],
    ids=["a model", "a number", "a literal"],
)
def test_types_become_strict_schemas_and_values_are_of_the_type(
    dtype: object, value: object, stub: Stub, chat: nw.OpenAI
) -> None:
    @nw.function
    def typed(s: State) -> None:
        s += nw.user("Well?") + nw.assistant(nw.gen("x", dtype=dtype)) + nw.user("?")

    state = typed.run(backend=chat)
    assert state["x"] == value
    told = stub.asked[0][1]["response_format"]["json_schema"]
    assert (told["strict"], told["schema"]["type"], told["schema"]["additionalProperties"]) == (True, "object", False)


def test_plain_text_and_select_go_to_completions(stub: Stub, completions: nw.OpenAI) -> None:
    @nw.function
    def choose(s: State) -> None:
        s += "a" + nw.gen("x", regex="[a-z ]+", top_k=5)
        s += nw.select("y", choices=["aaaa", "abbb"])

    state = choose.run(backend=completions)
    assert (state["x"], state["y"], state.text()) == ("more text", "abbb", "amore textabbb")
    (path, body), (_, scored) = stub.asked
    assert (path, body["prompt"], body["regex"], body["top_k"]) == ("/v1/completions", "a", "[a-z ]+", 5)
    assert (scored["prompt"], scored["echo"]) == (["amore textaaaa", "amore textabbb"], True)


Body_ = Callable[[State], None]


def plain(s: State) -> None:
    s += "text " + nw.gen("x")


def begun(s: State) -> None:
    s += nw.user("Hi") + nw.assistant("It is " + nw.gen("x"))


def in_a_question(s: State) -> None:
    s += nw.user("Hi" + nw.gen("x"))


def asks(**options: object) -> Body_:
    def body(s: State) -> None:
        s += nw.user("Hi") + nw.assistant(nw.gen("x", **options))  # type: ignore[arg-type]  # what a test gives

    return body


def chooses(s: State) -> None:
    s += nw.user("Hi") + nw.assistant(nw.select("x", choices=["a", "b"]))


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (plain, "text outside of chat turns"),
        (begun, "behind text of its own turn"),
        (in_a_question, "in a user turn"),
        (asks(regex="a+"), "no regexes"),
        (asks(grammar='start: "a"'), "no grammars"),
        (asks(top_k=3, min_p=0.1), "no top_k, min_p"),
        (asks(max_tokens=0), "max_new_tokens=0"),
        (asks(stop=list("abcde")), "at most 4 stop strings"),
        (chooses, "select compares log-probabilities"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_what_the_api_cannot_do_is_refused_by_name_before_anything_is_sent(
    body: Body_, named: str, stub: Stub, chat: nw.OpenAI
) -> None:
    with pytest.raises(nw.UnsupportedByBackend, match=named):
        nw.function(body).run(backend=chat).sync()
    assert stub.asked == []


def test_chat_turns_images_and_token_ids_are_refused_where_there_are_none(completions: nw.OpenAI) -> None:
    with pytest.raises(nw.UnsupportedByBackend, match="chat turns need"):
        talk.run(backend=completions).sync()
    with pytest.raises(nw.UnsupportedByBackend, match="no token ids"):
        nw.function(lambda s: None).run(backend=completions).token_ids  # noqa: B018  # reading it is the test
    with pytest.raises(nw.UnsupportedByBackend, match="no backend reads images"):
        image("cat.png")


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        ((400, "context_length_exceeded"), nw.CapacityError),
        ((400, "invalid_value"), nw.RequestError),
        ((401, "invalid_api_key"), nw.RequestError),
        ((500, "oops"), nw.GenerationError),
    ],
)
def test_a_refusal_of_the_service_is_an_error_of_ours(
    answer: tuple[int, str], kind: type[Exception], stub: Stub, chat: nw.OpenAI
) -> None:
    stub.answer = lambda body: answer
    with pytest.raises(kind):
        talk.run(backend=chat).sync()


@pytest.mark.parametrize("said", ["forty-one", "", "41", "[41]", '{"answer": 41}', '{"value": 4'])
def test_a_service_that_knows_nothing_of_schemas_is_told_of(said: str, stub: Stub, chat: nw.OpenAI) -> None:
    @nw.function
    def f(s: State) -> None:
        s += nw.user("?") + nw.assistant(nw.gen("n", dtype=int))

    stub.answer = lambda body: said
    with pytest.raises(nw.GenerationError, match="may not know response_format"):
        f.run(backend=chat).sync()


@pytest.mark.parametrize("schema", ["true", "false"])
def test_a_schema_that_is_a_boolean_is_wrapped_as_others_are(schema: str, stub: Stub, chat: nw.OpenAI) -> None:
    @nw.function
    def f(s: State, schema: str) -> None:
        s += nw.user("?") + nw.assistant(nw.gen("x", json_schema=schema))

    stub.answer = lambda body: '{"value": [1]}'
    assert f.run(schema, backend=chat)["x"] == "[1]"
    asked = stub.asked[-1][1]["response_format"]["json_schema"]["schema"]
    assert asked["properties"] == {"value": json.loads(schema)}
    with pytest.raises(nw.ConstraintError, match="an object or a boolean, got list"):
        f.run("[1]", backend=chat).sync()


def test_a_connection_that_is_reset_is_named(chat: nw.OpenAI) -> None:
    openai = pytest.importorskip("openai")
    error = openai.APIConnectionError(request=None)
    error.__cause__ = ConnectionResetError()
    assert str(chat._reason(error)).endswith("cannot be reached: ConnectionResetError")


def test_a_service_that_is_not_there_is_told_at_once() -> None:
    backend = nw.OpenAI("small", base_url="http://127.0.0.1:9/v1", api_key="-", max_retries=0)
    with pytest.raises(nw.EngineStopped, match="cannot be reached"):
        talk.run(backend=backend).sync()
    backend.shutdown()
    with pytest.raises(nw.EngineStopped, match="shut down"):
        talk.run(backend=backend).sync()


def test_cancelling_closes_the_connection(stub: Stub, chat: nw.OpenAI) -> None:
    stub.hold = threading.Event()
    state = talk.stream(backend=chat)
    assert next(state.text_iter("first")) == "2"
    state.cancel()
    with pytest.raises(nw.Cancelled):
        state.sync()
    assert stub.gone.wait(PATIENCE)


def test_many_async_programs_share_one_thread(stub: Stub, chat: nw.OpenAI) -> None:
    @nw.function
    async def ask(s: State) -> str:
        s += nw.user("Hi") + nw.assistant(nw.gen("x"))
        return str(await s.get("x"))

    async def main() -> list[State[str] | Exception]:
        return await ask.arun_batch([()] * 40, concurrency=8, backend=chat)

    states = asyncio.run(main())
    assert [state["x"] for state in states if isinstance(state, State)] == ["1 messages"] * 40
    ours = [thread.name for thread in threading.enumerate() if thread.name == "niwaki-openai"]
    assert len(ours) == 1


def test_a_client_that_is_not_installed_and_a_key_that_is_not_there_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(nw.ConfigError, match="api_key"):
        nw.OpenAI("small", base_url="http://127.0.0.1:9/v1")
    with pytest.raises(nw.ConfigError, match="'chat' or 'completions'"):
        nw.OpenAI("small", api_key="-", api="assistants")  # type: ignore[arg-type]  # the mistake
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(nw.ConfigError, match="install niwaki"):
        nw.OpenAI("small", api_key="-")


def test_what_the_client_left_half_way_is_closed_before_the_thread_ends(chat: nw.OpenAI) -> None:
    begun, closed = threading.Event(), threading.Event()

    async def events() -> AsyncIterator[int]:
        try:
            yield 1
        finally:
            await asyncio.sleep(0.1)
            closed.set()

    async def listen() -> None:
        async for _ in events():
            begun.set()
            await asyncio.sleep(60)

    asyncio.run_coroutine_threadsafe(listen(), chat._running_loop())
    assert begun.wait(PATIENCE)
    chat.shutdown()
    assert closed.wait(PATIENCE)
