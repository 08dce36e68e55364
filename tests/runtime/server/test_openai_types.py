"""What is answered is what the types of OpenAI's client demand, field by field: the client itself forgives much."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseItemList, ResponseStreamEvent
from pydantic import TypeAdapter

from niwaki.runtime.engine import Engine
from niwaki.runtime.server.errors import ApiError, overloaded
from niwaki.runtime.server.responses_bodies import ResponseRequest
from niwaki.runtime.server.responses_shapes import Writer, blank
from niwaki.runtime.server.serve import serving

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"name": "get_weather", "description": "The weather", "parameters": PARAMETERS, "strict": True}
TOOLS = {"tools": [{"type": "function", **WEATHER}], "tool_choice": "required"}
CHAT_TOOLS = {"tools": [{"type": "function", "function": WEATHER}], "tool_choice": "required"}
SHAPE = {"format": {"type": "json_schema", "name": "place", "schema": PARAMETERS, "strict": True}}
TALK: list[dict[str, object]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "input_text", "text": "Weather"}, {"type": "input_text", "text": "?"}]},
    {"type": "message", "role": "assistant", "content": "Where?"},
    {"type": "reasoning", "id": "rs_1", "summary": []},
    {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": "4 degrees"},
    {"role": "user", "content": "Oslo."},
]


@pytest.fixture(scope="module")
def tiny() -> Iterator[httpx2.Client]:
    """The bundled model, which knows calls."""
    with Engine(kv_tokens=2048) as engine, serving(engine) as url, httpx2.Client(base_url=url, timeout=60) as client:
        yield client


def events_of(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@pytest.mark.parametrize(
    ("body", "ending"),
    [
        ({"input": "Say hello.", "max_output_tokens": 60}, "completed"),
        ({"input": TALK, "instructions": "Be nice.", "metadata": {"a": "b"}, "max_output_tokens": 2}, "incomplete"),
        ({"input": "Where?", "text": SHAPE, "max_output_tokens": 40}, "completed"),
        ({"input": "Weather in Oslo?", "max_output_tokens": 60} | TOOLS, "completed"),
        ({"input": "Weather in Oslo?", "max_output_tokens": 12} | TOOLS, "incomplete"),
    ],
)
def test_a_response_its_events_and_its_items_are_of_their_types(
    tiny: httpx2.Client, body: dict[str, object], ending: str
) -> None:
    asked = {"model": "niwaki-tiny", "temperature": 0} | body
    answer = tiny.post("/v1/responses", json=asked).json()
    whole = Response.model_validate(answer)
    assert whole.status == ending
    assert {item["status"] for item in answer["output"]} == {ending}
    assert whole.usage is not None
    details = whole.usage.input_tokens_details
    assert details.cached_tokens + details.cache_write_tokens == whole.usage.input_tokens
    events = events_of(tiny.post("/v1/responses", json=asked | {"stream": True}).text)
    for event in events:
        EVENT.validate_python(event)
    assert events[-1]["type"] == f"response.{ending}"
    assert [without_ids(item) for item in events[-1]["response"]["output"]] == list(map(without_ids, answer["output"]))
    ResponseItemList.model_validate(tiny.get(f"/v1/responses/{answer['id']}/input_items").json())


def without_ids(item: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in item.items() if name not in ("id", "call_id")}


def test_input_items_are_read_page_by_page_in_either_order_and_can_be_sent_back(tiny: httpx2.Client) -> None:
    body = {"model": "niwaki-tiny", "input": TALK, "max_output_tokens": 1}
    page = f"/v1/responses/{tiny.post('/v1/responses', json=body).json()['id']}/input_items"
    latest = tiny.get(page).json()
    forward = tiny.get(page, params={"order": "asc"}).json()
    assert latest["data"] == forward["data"][::-1]
    assert [item["type"] for item in forward["data"]] == [item.get("type", "message") for item in TALK]
    found: list[object] = []
    after: dict[str, str] = {}
    while True:
        part = tiny.get(page, params={"order": "asc", "limit": 3, **after}).json()
        found += part["data"]
        if not part["has_more"]:
            break
        after = {"after": part["last_id"]}
    assert found == forward["data"]
    assert tiny.get(page, params={"after": "none"}).json()["data"] == []
    assert tiny.get(page, params={"order": "up"}).status_code == 400
    again = tiny.post("/v1/responses", json=body | {"input": forward["data"]}).json()
    assert again["usage"]["input_tokens"] == tiny.post("/v1/responses", json=body).json()["usage"]["input_tokens"]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (overloaded("gone"), "server_error"),
        (ApiError(429, "slower", code="rate_limit_exceeded"), "rate_limit_exceeded"),
    ],
)
def test_a_response_that_fails_keeps_what_it_said(error: ApiError, code: str) -> None:
    writer = Writer(blank(ResponseRequest(input="x"), "toy", 1))
    events = [*writer.begin(), *writer.more({"content": "half a"}), *writer.fail(error)]
    for event in events:
        EVENT.validate_python(event)
    kinds = [event["type"] for event in events]
    assert kinds[-3:] == ["response.content_part.done", "response.output_item.done", "response.failed"]
    failed = Response.model_validate(writer.response)
    assert failed.error is not None
    assert (failed.status, failed.error.code, failed.error.message) == ("failed", code, error.message)
    assert failed.output_text == "half a"
    assert [item.status for item in failed.output if item.type == "message"] == ["incomplete"]


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"n": 2},
        {"logprobs": True, "top_logprobs": 2},
        {"max_tokens": 60} | CHAT_TOOLS,
        {"max_tokens": 12} | CHAT_TOOLS,
    ],
)
def test_a_chat_and_its_chunks_are_of_their_types(tiny: httpx2.Client, more: dict[str, object]) -> None:
    asked = {"model": "niwaki-tiny", "messages": [{"role": "user", "content": "Weather in Oslo?"}]} | more
    asked = {"temperature": 0, "max_tokens": 4} | asked
    whole = ChatCompletion.model_validate(tiny.post("/v1/chat/completions", json=asked).json())
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = events_of(tiny.post("/v1/chat/completions", json=asked | options).text)
    parsed = [ChatCompletionChunk.model_validate(chunk) for chunk in chunks]
    assert parsed[-1].usage is not None
    assert whole.usage is not None
    assert parsed[-1].usage.total_tokens == whole.usage.total_tokens
    assert len({chunk.id for chunk in parsed}) == 1
    calls = [call for choice in whole.choices for call in choice.message.tool_calls or ()]
    deltas = [call for chunk in parsed for choice in chunk.choices for call in choice.delta.tool_calls or ()]
    assert [call.function.name for call in deltas if call.id] == [call.function.name for call in calls]  # type: ignore[union-attr]  # functions all
    said = "".join(call.function.arguments or "" for call in deltas if call.function is not None)
    assert said == "".join(call.function.arguments for call in calls)  # type: ignore[union-attr]  # functions all


def test_a_completion_and_a_model_are_of_their_types(tiny: httpx2.Client) -> None:
    asked = {"model": "niwaki-tiny", "prompt": "The", "max_tokens": 2, "logprobs": 2}
    Completion.model_validate(tiny.post("/v1/completions", json=asked).json())
    *pieces, last = events_of(tiny.post("/v1/completions", json=asked | {"stream": True}).text)
    Completion.model_validate(last)
    for piece in pieces:  # OpenAI's server, too, writes null before the end, which its client's type does not have
        (choice,) = piece["choices"]
        assert choice["finish_reason"] is None
        Completion.model_validate(piece | {"choices": [choice | {"finish_reason": "stop"}]})
    for card in tiny.get("/v1/models").json()["data"]:
        Model.model_validate(card)
