"""/v1/responses through OpenAI's own client: what it parses is what was answered, and a conversation goes on by ids."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import httpx2
import openai
import pydantic
import pytest
from openai.types.responses import (
    Response,
    ResponseCompletedEvent,
    ResponseFunctionToolCall,
    ResponseIncompleteEvent,
    ResponseTextDeltaEvent,
)

from niwaki.runtime.engine import Engine
from niwaki.runtime.server.config import ServerConfig, digests
from niwaki.runtime.server.serve import serving
from tests.runtime.server.conftest import held


@pytest.fixture(scope="module")
def bundled() -> Iterator[openai.OpenAI]:
    """The bundled model, which knows calls."""
    with (
        Engine(kv_tokens=2048) as tiny,
        serving(tiny) as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as made,
    ):
        yield made


@pytest.fixture(scope="module")
def ai(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_a_response_says_what_the_chat_says(ai: openai.OpenAI) -> None:
    answer = ai.responses.create(
        model="toy", instructions="the cat", input="sat on the mat?", temperature=0, max_output_tokens=12
    )
    chat = ai.chat.completions.create(
        model="toy",
        messages=[{"role": "system", "content": "the cat"}, {"role": "user", "content": "sat on the mat?"}],
        temperature=0,
        max_tokens=12,
    )
    assert answer.output_text == chat.choices[0].message.content
    is_cut = chat.choices[0].finish_reason == "length"
    assert answer.status == ("incomplete" if is_cut else "completed")
    assert (answer.incomplete_details is not None) == is_cut
    assert answer.usage is not None
    assert chat.usage is not None
    assert answer.usage.input_tokens == chat.usage.prompt_tokens
    assert answer.usage.total_tokens == chat.usage.total_tokens


def test_the_events_of_a_stream_add_up_to_the_response(ai: openai.OpenAI, engine: Engine) -> None:
    with (
        held(engine) as release,
        ai.responses.stream(model="toy", input="the dog", temperature=0, max_output_tokens=12) as stream,
    ):
        events = []
        for one in stream:
            events.append(one)
            if isinstance(one, ResponseTextDeltaEvent):
                release()  # not before: who begins to read late gets several pieces as one
    last = events[-1]
    assert isinstance(last, ResponseCompletedEvent | ResponseIncompleteEvent)
    final = last.response
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"
    ]  # fmt: skip
    assert kinds[-4:-1] == ["response.output_text.done", "response.content_part.done", "response.output_item.done"]
    deltas = [event.delta for event in events if isinstance(event, ResponseTextDeltaEvent)]
    assert len(deltas) > 1
    assert "".join(deltas) == final.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert ai.responses.retrieve(final.id).output_text == final.output_text


def test_a_response_goes_on_from_the_one_before(ai: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "toy", "temperature": 0, "max_output_tokens": 4}
    first = ai.responses.create(input="one", instructions="the cat", **asked)
    second = ai.responses.create(input="two", previous_response_id=first.id, **asked)
    whole = ai.chat.completions.create(
        model="toy",
        messages=[  # instructions belong to one response, as OpenAI has it
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": first.output_text},
            {"role": "user", "content": "two"},
        ],
        temperature=0,
        max_tokens=4,
    )
    assert second.output_text == whole.choices[0].message.content
    assert second.previous_response_id == first.id
    items = ai.responses.input_items.list(second.id)
    assert [item.model_dump()["content"][0]["text"] for item in items] == ["two"]
    ai.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        ai.responses.retrieve(first.id)
    third = ai.responses.create(input="three", previous_response_id=second.id, **asked)
    assert third.usage.input_tokens > second.usage.input_tokens, "what stands on a deleted one keeps it"


def test_a_conversation_that_went_on_once_is_neither_read_nor_computed_again(
    ai: openai.OpenAI, paths_read: list[str]
) -> None:
    asked: dict[str, Any] = {"model": "toy", "temperature": 0, "max_output_tokens": 12}
    sat: Any = {"format": {"type": "json_schema", "name": "sat", "schema": {"enum": ["sat", "mat"]}}}
    answers = [ai.responses.create(input="the cat", text=sat, **asked)]
    for number in range(4):
        more = {"text": sat} if number < 3 else {}
        answers.append(
            ai.responses.create(input=f"turn {number}", previous_response_id=answers[-1].id, **asked, **more)
        )
    assert paths_read == [answers[0].id]
    messages: list[Any] = [{"role": "user", "content": "the cat"}]
    for number, answer in enumerate(answers[:-1]):
        messages.append({"role": "assistant", "content": answer.output_text})
        messages.append({"role": "user", "content": f"turn {number}"})
    whole = ai.chat.completions.create(model="toy", messages=messages, temperature=0, max_tokens=12)
    assert answers[-1].output_text == whole.choices[0].message.content
    for before, after in pairwise(answers[1:]):
        assert before.usage is not None
        assert after.usage is not None
        assert after.usage.input_tokens_details.cached_tokens >= before.usage.input_tokens
    ai.responses.delete(answers[-1].id)
    with pytest.raises(openai.BadRequestError, match="no such response"):
        ai.responses.create(input="more", previous_response_id=answers[-1].id, **asked)
    twin = ai.responses.create(input="turn 3", previous_response_id=answers[-2].id, **asked)
    assert twin.output_text == answers[-1].output_text, "who goes on from an earlier one finds its place, too"
    assert len(paths_read) == 1


def test_instructions_hold_for_one_response_wherever_its_conversation_stands(ai: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "toy", "temperature": 0, "max_output_tokens": 4}
    first = ai.responses.create(input="one", **asked)
    second = ai.responses.create(input="two", previous_response_id=first.id, **asked)
    third = ai.responses.create(input="three", instructions="the cat", previous_response_id=second.id, **asked)
    said = [("system", "the cat"), ("user", "one"), ("assistant", first.output_text), ("user", "two")]
    said += [("assistant", second.output_text), ("user", "three")]
    messages: Any = [{"role": role, "content": content} for role, content in said]
    whole = ai.chat.completions.create(model="toy", messages=messages, temperature=0, max_tokens=4)
    assert third.output_text == whole.choices[0].message.content


def test_a_place_is_found_by_nobody_who_has_another_key(engine: Engine) -> None:
    with serving(engine, ServerConfig(port=0, key_digests=digests(["my own key", "your own key"]))) as address:
        mine, yours = (
            openai.OpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0)
            for key in ("my own key", "your own key")
        )
        with mine, yours:
            asked: dict[str, Any] = {"model": "toy", "max_output_tokens": 2}
            first = mine.responses.create(input="one", **asked)
            second = mine.responses.create(input="two", previous_response_id=first.id, **asked)
            with pytest.raises(openai.BadRequestError, match="no such response"):
                yours.responses.create(input="three", previous_response_id=second.id, **asked)
            mine.responses.create(input="three", previous_response_id=second.id, **asked)


def test_what_is_not_stored_cannot_be_gone_on_from(ai: openai.OpenAI) -> None:
    answer = ai.responses.create(model="toy", input="one", store=False, max_output_tokens=2)
    with pytest.raises(openai.NotFoundError):
        ai.responses.retrieve(answer.id)
    with pytest.raises(openai.BadRequestError, match="no such response"):
        ai.responses.create(model="toy", input="two", previous_response_id=answer.id)


class Verdict(pydantic.BaseModel):
    ok: bool


def test_a_parsed_response_is_of_its_type(ai: openai.OpenAI) -> None:
    answer = ai.responses.parse(model="toy", input="is it?", text_format=Verdict, max_output_tokens=20)
    assert isinstance(answer.output_parsed, Verdict)


def test_calls_are_items_and_their_results_go_back_in(bundled: openai.OpenAI) -> None:
    tool = {
        "type": "function",
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        "strict": True,
    }
    asked: dict[str, Any] = {"model": "niwaki-tiny", "tools": [tool], "temperature": 0, "max_output_tokens": 60}
    first = bundled.responses.create(input="How is the weather in Oslo?", tool_choice="required", **asked)
    assert isinstance(first, Response)
    (call,) = first.output
    assert isinstance(call, ResponseFunctionToolCall)
    assert call.name == "get_weather"
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "4 degrees"}
    second = bundled.responses.create(input=[output], previous_response_id=first.id, **asked)
    assert second.output
    in_parts = output | {"output": [{"type": "input_text", "text": part} for part in ("4 ", "degrees")]}
    again = bundled.responses.create(input=[in_parts], previous_response_id=first.id, **asked)
    assert again.output_text == second.output_text
    assert again.usage is not None
    assert second.usage is not None
    assert again.usage.input_tokens == second.usage.input_tokens
    with bundled.responses.stream(input="How is the weather in Oslo?", tool_choice="required", **asked) as stream:
        arguments = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
        (streamed,) = stream.get_final_response().output
    assert isinstance(streamed, ResponseFunctionToolCall)
    assert "".join(arguments) == streamed.arguments == call.arguments


def test_of_the_tools_that_the_model_is_told_only_those_allowed_are_called(bundled: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 9}}, "required": ["city"]}
    tools: Any = [{"type": "function", "name": name, "parameters": schema} for name in ("get_weather", "get_map")]
    allowed: Any = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_map"}]}
    answer = bundled.responses.create(
        model="", input="How is the weather in Oslo?", tools=tools, tool_choice=allowed, temperature=0
    )
    assert {item.name for item in answer.output if isinstance(item, ResponseFunctionToolCall)} == {"get_map"}
    assert answer.tool_choice.to_dict() == allowed  # type: ignore[union-attr]  # the object that it is


def test_a_conversation_goes_on_behind_a_call_that_the_budget_cut_off(bundled: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"text": {"type": "string", "minLength": 400}}, "required": ["text"]}
    tool: Any = {"type": "function", "name": "say", "parameters": schema}
    cut = bundled.responses.create(
        model="", input="Hello", tools=[tool], tool_choice="required", temperature=0, max_output_tokens=20
    )
    assert cut.status == "incomplete"
    (call,) = cut.output
    assert isinstance(call, ResponseFunctionToolCall)
    assert not call.arguments.endswith("}")
    after = bundled.responses.create(model="", input="Hello", previous_response_id=cut.id, max_output_tokens=8)
    assert after.output_text


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "http://x"}]}]}, "input"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"background": 0}, "background"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "strin"}}}}, "text.format"),
        ({"no_such": 1}, "no_such"),
        ({"previous_response_id": "resp_none"}, "previous_response_id"),
        ({"input": [{"type": "function_call_output", "call_id": "x", "output": "y"}], "tools": 5}, "tools"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(client: httpx2.Client, more: dict[str, object], param: str) -> None:
    answer = client.post("/v1/responses", json={"input": "x"} | more)
    assert answer.status_code == 400, answer.text
    assert str(answer.json()["error"]["param"]).startswith(param)


def test_embeddings_are_refused_for_what_they_are(ai: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="not trained to embed") as caught:
        ai.embeddings.create(model="toy", input=["the cat"])
    assert caught.value.code == "unsupported"
    with pytest.raises(openai.BadRequestError, match="'toy' generates text and was not trained to embed"):
        ai.embeddings.create(model="text-embedding-3-small", input="the cat")  # no other name would help
