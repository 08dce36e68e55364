"""OpenAI's responses: the bodies of /v1/responses, and answers as output items and events. Nothing of HTTP."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from pydantic import Discriminator, Field, JsonValue, Tag

from niwaki.runtime.api import Message
from niwaki.runtime.server.errors import ApiError
from niwaki.runtime.server.openai_models import MAX_MESSAGES, MaxNew, TextFormat
from niwaki.runtime.server.store import Json, new_id
from niwaki.runtime.server.tools import MAX_TOOLS, FunctionName
from niwaki.runtime.server.wire import Name, NoMedia, Off, Strict, Text, Unsupported

# ---------------------------------------------------------------------------------------------------------------
# Bodies
# ---------------------------------------------------------------------------------------------------------------


class InputText(Strict):
    """A piece of a message; `output_text` in messages of earlier answers."""

    type: Annotated[Literal["input_text", "output_text"], NoMedia]
    text: Text
    annotations: Annotated[list[JsonValue], Field(max_length=0)] | None = None
    logprobs: Annotated[list[JsonValue], Field(max_length=0)] | None = None


def _kind(value: object) -> str:
    return "(parts)" if isinstance(value, list) else "(text)"


InputParts = Annotated[list[InputText], Field(min_length=1, max_length=1024, fail_fast=True)]
InputContent = Annotated[Annotated[Text, Tag("(text)")] | Annotated[InputParts, Tag("(parts)")], Discriminator(_kind)]


def _texts_of(content: str | Sequence[InputText]) -> list[str]:
    return [content] if isinstance(content, str) else [part.text for part in content]


class MessageItem(Strict):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: InputContent
    id: Name | None = None
    status: Literal["completed", "incomplete", "in_progress"] | None = None

    def messages(self) -> list[Json]:
        return [{"role": self.role, "content": "".join(_texts_of(self.content))}]

    def listed(self) -> Json:
        is_answer = self.role == "assistant"
        more: Json = {"annotations": [], "logprobs": []} if is_answer else {}
        kind = "output_text" if is_answer else "input_text"
        parts = [{"type": kind, "text": text, **more} for text in _texts_of(self.content)]
        return {"id": self.id or new_id("msg"), "type": "message", "status": self.status or "completed"} | {
            "role": self.role, "content": parts
        }  # fmt: skip


class CallItem(Strict):
    """A call that an earlier answer made."""

    type: Literal["function_call"]
    call_id: Name
    name: FunctionName
    arguments: Text
    id: Name | None = None
    status: Literal["completed", "incomplete", "in_progress"] | None = None

    def messages(self) -> list[Json]:
        function = {"name": self.name, "arguments": self.arguments}
        return [{"role": "assistant", "tool_calls": [{"id": self.call_id, "type": "function", "function": function}]}]

    def listed(self) -> Json:
        said = self.model_dump(include={"type", "call_id", "name", "arguments"})
        return {"id": self.id or new_id("fc"), "status": self.status or "completed"} | said


class CallOutputItem(Strict):
    """What a call gave."""

    type: Literal["function_call_output"]
    call_id: Name
    output: InputContent
    id: Name | None = None
    status: Literal["completed", "incomplete", "in_progress"] | None = None

    def messages(self) -> list[Json]:
        return [{"role": "tool", "tool_call_id": self.call_id, "content": "".join(_texts_of(self.output))}]

    def listed(self) -> Json:
        said = self.model_dump(include={"type", "call_id", "output"}, exclude_none=True)
        return {"id": self.id or new_id("fco"), "status": self.status or "completed"} | said


class ReasoningItem(Strict):
    """Of an earlier answer; the model's template is not told of it."""

    type: Literal["reasoning"]
    id: Name | None = None
    summary: Annotated[list[JsonValue], Field(max_length=1024)] | None = None
    content: Annotated[list[JsonValue], Field(max_length=1024)] | None = None
    status: Name | None = None

    def messages(self) -> list[Json]:
        return []

    def listed(self) -> Json:
        return {"id": self.id or new_id("rs"), "summary": []} | self.model_dump(exclude_none=True, exclude={"id"})


def _item_kind(value: object) -> str:
    found = value.get("type", "message") if isinstance(value, dict) else getattr(value, "type", "message")
    return found if isinstance(found, str) else "message"


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_item_kind),
]
Items = Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


class ResponseFunction(Strict):
    type: Literal["function"]
    name: FunctionName
    description: Text | None = None
    parameters: dict[str, JsonValue] | None = None
    strict: bool | None = None


class ChosenFunction(Strict):
    type: Literal["function"]
    name: FunctionName


class AllowedFunctions(Strict):
    """Of the tools that the model is told, only these may be called."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[ChosenFunction], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


class ObjectAnswer(Strict):
    type: Literal["json_object"]


class SchemaAnswer(Strict):
    """Enforced exactly, whatever `strict` says; what cannot be is refused."""

    type: Literal["json_schema"]
    name: FunctionName
    json_schema: Annotated[dict[str, JsonValue], Field(alias="schema")]
    description: Text | None = None
    strict: bool | None = None


class TextOptions(Strict):
    format: Annotated[TextFormat | ObjectAnswer | SchemaAnswer, Field(discriminator="type")] | None = None
    verbosity: Unsupported = None


class ResponseStreamOptions(Strict):
    include_obfuscation: Off | None = None  # no event is padded


class ResponseRequest(Strict):
    """POST /v1/responses"""

    input: Annotated[Annotated[Text, Tag("(text)")] | Annotated[Items, Tag("(parts)")], Discriminator(_kind)]
    model: Name | None = None
    instructions: Text | None = None
    previous_response_id: Name | None = None
    store: bool | None = None
    stream: bool | None = None
    max_output_tokens: MaxNew | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    text: TextOptions | None = None
    tools: Annotated[list[ResponseFunction], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: (
        Literal["none", "auto", "required"]
        | Annotated[ChosenFunction | AllowedFunctions, Field(discriminator="type")]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    metadata: Annotated[dict[Name, Annotated[str, Field(max_length=512)]], Field(max_length=16)] | None = None
    # told to the service only; they change no answer
    user: Name | None = None
    safety_identifier: Name | None = None
    prompt_cache_key: Name | None = None
    service_tier: Literal["auto", "default"] | None = None
    truncation: Literal["disabled"] | None = None
    background: Off | None = None
    include: Annotated[list[Literal["reasoning.encrypted_content"]], Field(max_length=8)] | None = None
    stream_options: ResponseStreamOptions | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=0)] | None = None  # none are told here
    # not here
    access_programs: Unsupported = None
    context_management: Unsupported = None
    conversation: Unsupported = None
    image: Unsupported = None
    max_tool_calls: Unsupported = None
    moderation: Unsupported = None
    prompt: Unsupported = None
    prompt_cache_options: Unsupported = None
    prompt_cache_retention: Unsupported = None
    reasoning: Unsupported = None

    def input_messages(self) -> list[Json]:
        """As messages of a chat. Calls that stand side by side are made by one message."""
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        found: list[Json] = []
        for message in (message for item in self.input for message in item.messages()):
            calls, last = message.get("tool_calls"), found[-1] if found else {}
            before = last.get("tool_calls")
            if isinstance(calls, list) and isinstance(before, list):
                found[-1] = last | {"tool_calls": [*before, *calls]}
            else:
                found.append(message)
        return found

    def input_items(self) -> list[Json]:
        """As they are listed later."""
        if isinstance(self.input, str):
            content = [{"type": "input_text", "text": self.input}]
            return [{"id": new_id("msg"), "type": "message", "status": "completed", "role": "user", "content": content}]
        return [item.listed() for item in self.input]

    def history(self, before: Sequence[Message]) -> list[Message]:
        """What comes before the input: instructions are this response's alone, those of earlier ones are not told."""
        return [*([] if self.instructions is None else [Message("system", self.instructions)]), *before]

    def chat(self) -> Json:
        """The chat request that does the same behind `history`, as JSON."""
        said: Json = {
            "messages": self.input_messages(),
            "model": self.model,
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "tools": [_chat_tool(tool) for tool in self.tools or ()] or None,
            "tool_choice": self._chat_choice(),
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": self._chat_format(),
        }
        return {name: value for name, value in said.items() if value is not None}

    def _chat_choice(self) -> object:
        match self.tool_choice:
            case ChosenFunction() as chosen:
                return _named(chosen)
            case AllowedFunctions(mode=mode, tools=tools):
                return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [*map(_named, tools)]}}
            case said:
                return said

    def _chat_format(self) -> Json | None:
        match self.text and self.text.format:
            case SchemaAnswer() as schema:
                return {"type": "json_schema", "json_schema": schema.model_dump(by_alias=True, exclude={"type"})}
            case ObjectAnswer():
                return {"type": "json_object"}
        return None


def _named(chosen: ChosenFunction) -> Json:
    return {"type": "function", "function": {"name": chosen.name}}


def _chat_tool(tool: ResponseFunction) -> Json:
    return {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}


# ---------------------------------------------------------------------------------------------------------------
# Answers
# ---------------------------------------------------------------------------------------------------------------

ERROR_CODES = ("rate_limit_exceeded",)  # that a response may have, of ours; else it is `server_error`


def blank(body: ResponseRequest, model: str, created: int) -> Json:
    """A response before anything was answered."""
    text = body.text and body.text.format
    return {
        "id": new_id("resp"),
        "object": "response",
        "created_at": created,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": {"type": "text"} if text is None else text.model_dump(by_alias=True, exclude_none=True)},
        "tool_choice": _told_choice(body),
        "tools": [
            {"parameters": None, "strict": True} | tool.model_dump(exclude_none=True) for tool in body.tools or ()
        ],
        "top_logprobs": 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
    }


def _told_choice(body: ResponseRequest) -> object:
    if body.tool_choice is None or isinstance(body.tool_choice, str):
        return body.tool_choice or "auto"
    return body.tool_choice.model_dump()


def usage_told(used: Json) -> Json:
    """A chat's usage by the names of responses. What the cache did not give is in it from now on."""
    cached, details = used["prompt_tokens_details"], used["completion_tokens_details"]
    assert isinstance(cached, dict)
    written = int(str(used["prompt_tokens"])) - cached["cached_tokens"]
    return {
        "input_tokens": used["prompt_tokens"],
        "input_tokens_details": {**cached, "cache_write_tokens": written},
        "output_tokens": used["completion_tokens"],
        "output_tokens_details": details,
        "total_tokens": used["total_tokens"],
    }


class Writer:
    """One response on its way: reads what a chat's deltas say, gives the events, and holds what is written so far."""

    def __init__(self, response: Json) -> None:
        self.response = response
        self._items: list[Json] = []
        self._text = ""  # of the item that is being written: its text or its arguments
        self._num_events = 0

    def begin(self) -> Iterator[Json]:
        yield self._event("response.created", response=self.response)
        yield self._event("response.in_progress", response=self.response)

    def more(self, delta: Json) -> Iterator[Json]:
        """The events of a chat's delta, or of a whole message."""
        for kind, name in (("reasoning", "reasoning_content"), ("message", "content")):
            text = delta.get(name)
            if isinstance(text, str) and text:
                yield from self._enter(kind)
                yield from self._say(text)
        calls = delta.get("tool_calls", [])
        assert isinstance(calls, list)
        for call in calls:
            if "id" in call:
                yield from self._close()
                yield from self._open("function_call", call_id=call["id"], name=call["function"]["name"], arguments="")
            if call["function"]["arguments"]:
                yield from self._say(call["function"]["arguments"])

    def end(self, used: Json, *, is_whole: bool) -> Iterator[Json]:
        """The last events; `response` is what the client gets, from now on."""
        yield from self._close("completed" if is_whole else "incomplete")
        details = None if is_whole else {"reason": "max_output_tokens"}
        status = "completed" if is_whole else "incomplete"
        self.response = self.response | {
            "status": status, "incomplete_details": details, "output": self._items, "usage": usage_told(used)
        }  # fmt: skip
        yield self._event(f"response.{status}", response=self.response)

    def fail(self, error: ApiError) -> Iterator[Json]:
        """The last events; what was said stays said."""
        yield from self._close("incomplete")
        code = error.code if error.code in ERROR_CODES else "server_error"
        said = {"code": code, "message": error.message}
        self.response = self.response | {"status": "failed", "error": said, "output": self._items}
        yield self._event("response.failed", response=self.response)

    # -- items ------------------------------------------------------------------------------------------------------

    def _enter(self, kind: str) -> Iterator[Json]:
        """Go on with an item of this kind: the one that is open, or a new one."""
        if self._items and self._items[-1]["type"] == kind and self._items[-1]["status"] == "in_progress":
            return
        yield from self._close()
        more: Json = {"role": "assistant", "content": []} if kind == "message" else {"summary": [], "content": []}
        yield from self._open(kind, **more)
        yield self._event("response.content_part.added", **self._place(), content_index=0, part=self._part(kind, ""))

    def _open(self, kind: str, **more: object) -> Iterator[Json]:
        prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc"}[kind]
        self._items.append({"id": new_id(prefix), "type": kind, "status": "in_progress", **more})
        self._text = ""
        yield self._event("response.output_item.added", output_index=len(self._items) - 1, item=self._items[-1])

    def _say(self, text: str) -> Iterator[Json]:
        self._text += text
        kind = self._items[-1]["type"]
        match kind:
            case "function_call":
                yield self._event("response.function_call_arguments.delta", **self._place(), delta=text)
            case "message":
                yield self._event(
                    "response.output_text.delta", **self._place(), content_index=0, delta=text, logprobs=[]
                )
            case _:
                yield self._event("response.reasoning_text.delta", **self._place(), content_index=0, delta=text)

    def _close(self, status: str = "completed") -> Iterator[Json]:
        """End the open item, if there is one."""
        if not self._items or self._items[-1]["status"] != "in_progress":
            return
        item, text = self._items[-1], self._text
        place = self._place()
        if item["type"] == "function_call":
            item = item | {"arguments": text}
            yield self._event("response.function_call_arguments.done", **place, name=item["name"], arguments=text)
        else:
            kind = str(item["type"])
            part = self._part(kind, text)
            item = item | {"content": [part]}
            said: Json = {"text": text} | ({"logprobs": []} if kind == "message" else {})
            name = "output_text" if kind == "message" else "reasoning_text"
            yield self._event(f"response.{name}.done", **place, content_index=0, **said)
            yield self._event("response.content_part.done", **place, content_index=0, part=part)
        self._items[-1] = item | {"status": status}
        yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=self._items[-1])

    def _place(self) -> Json:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    def _part(self, kind: str, text: str) -> Json:
        if kind == "message":
            return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        return {"type": "reasoning_text", "text": text}

    def _event(self, kind: str, **said: object) -> Json:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **said}
