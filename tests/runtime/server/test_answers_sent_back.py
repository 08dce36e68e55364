"""What OpenAI's client answers may be sent back as it is, whichever way a program writes that down."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest
from openai.types.chat import ChatCompletionMessageParam

from niwaki.runtime.engine import Engine
from niwaki.runtime.server.serve import serving

# The client's own, of a value where its class says that there is none.
pytestmark = pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")

HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Say hello."}]


class Verdict(pydantic.BaseModel):
    ok: bool


class Add(pydantic.BaseModel):
    """Add numbers."""

    number: Literal[3, 4]


WAYS: dict[str, Callable[[pydantic.BaseModel], Any]] = {
    "itself": lambda answer: answer,
    "model_dump": lambda answer: answer.model_dump(warnings=False),
    "what was set": lambda answer: answer.model_dump(warnings=False, exclude_unset=True),
}


@pytest.fixture(scope="module")
def official() -> Iterator[openai.OpenAI]:
    """Of the bundled model, which can call."""
    with (
        Engine(kv_tokens=4096) as engine,
        serving(engine) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client,
    ):
        yield client


def chat_answer(client: openai.OpenAI, *, streams: bool, **more: Any) -> Any:
    asked = {"model": "niwaki-tiny", "messages": HELLO, "max_tokens": 60, "temperature": 0, **more}
    if not streams:
        return client.chat.completions.parse(**asked).choices[0].message
    with client.chat.completions.stream(**asked) as stream:
        for _ in stream:
            pass
        return stream.get_final_completion().choices[0].message


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_a_chats_answer_is_a_message_of_the_next_request(official: openai.OpenAI, way: str, streams: bool) -> None:
    said = chat_answer(official, streams=streams, response_format=Verdict)
    assert isinstance(said.parsed, Verdict)
    again = official.chat.completions.create(
        model="niwaki-tiny", messages=[*HELLO, WAYS[way](said), *HELLO], max_tokens=2
    )
    plain: ChatCompletionMessageParam = {"role": "assistant", "content": said.content}
    written = official.chat.completions.create(model="niwaki-tiny", messages=[*HELLO, plain, *HELLO], max_tokens=2)
    assert again.usage is not None
    assert written.usage is not None
    assert again.usage.prompt_tokens == written.usage.prompt_tokens, "the model is told of its content alone"


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_a_chats_call_is_a_message_of_the_next_request(official: openai.OpenAI, way: str, streams: bool) -> None:
    tools = [openai.pydantic_function_tool(Add)]
    said = chat_answer(official, streams=streams, tools=tools, tool_choice="required", parallel_tool_calls=False)
    (call,) = said.tool_calls
    assert isinstance(call.function.parsed_arguments, Add)
    answered: ChatCompletionMessageParam = {"role": "tool", "tool_call_id": call.id, "content": "3"}
    messages = [*HELLO, WAYS[way](said), answered]
    assert official.chat.completions.create(model="niwaki-tiny", messages=messages, tools=tools, max_tokens=2).usage


@pytest.mark.parametrize("way", WAYS)
def test_a_call_of_responses_is_an_item_of_the_next_request(official: openai.OpenAI, way: str) -> None:
    schema = openai.pydantic_function_tool(Add)["function"]
    tools: Any = [{"type": "function", **schema}]
    asked: Any = {"model": "niwaki-tiny", "tools": tools, "max_output_tokens": 60}
    said = official.responses.parse(input="Say hello.", tool_choice="required", parallel_tool_calls=False, **asked)
    items: Any = [{"role": "user", "content": "Say hello."}, *map(WAYS[way], said.output)]
    calls = [one for one in said.output if one.type == "function_call"]
    items += [{"type": "function_call_output", "call_id": one.call_id, "output": "3"} for one in calls]
    assert calls
    assert official.responses.create(input=items, **asked).usage is not None


@pytest.mark.parametrize("way", WAYS)
def test_an_answer_of_responses_is_an_item_of_the_next_request(official: openai.OpenAI, way: str) -> None:
    said = official.responses.parse(model="niwaki-tiny", input="Say hello.", text_format=Verdict, max_output_tokens=60)
    items: Any = [{"role": "user", "content": "Say hello."}, *map(WAYS[way], said.output)]
    items.append({"role": "user", "content": "Once more."})
    assert official.responses.create(model="niwaki-tiny", input=items, max_output_tokens=16).usage is not None
