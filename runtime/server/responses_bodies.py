"""The bodies of /v1/responses, and the chat that each of them means. Nothing of HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BeforeValidator, Discriminator, Field, JsonValue, Tag, model_validator
from pydantic_core import PydanticCustomError

from niwaki.runtime.api import Message
from niwaki.runtime.server.effort import Effort
from niwaki.runtime.server.openai_models import MAX_MESSAGES, MaxNew, RefusalPart, TextFormat, content_kind, part_kind
from niwaki.runtime.server.store import Json, new_id
from niwaki.runtime.server.tools import MAX_TOOLS, FunctionName
from niwaki.runtime.server.wire import CacheHint, Echoed, Name, NoMedia, Off, Strict, Text, Unsupported, Verbosity


class InputText(Strict):
    """A piece of a message; `output_text` in messages of earlier answers."""

    type: Annotated[Literal["input_text", "output_text"], NoMedia]
    text: Text
    annotations: Annotated[list[JsonValue], Field(max_length=0)] | None = None
    logprobs: Annotated[list[JsonValue], Field(max_length=0)] | None = None
    prompt_cache_breakpoint: CacheHint = None
    parsed: Echoed = None  # of OpenAI's client, as below


InputParts = Annotated[list[InputText], Field(min_length=1, max_length=1024, fail_fast=True)]
InputContent = Annotated[
    Annotated[Text, Tag("(text)")] | Annotated[InputParts, Tag("(parts)")], Discriminator(content_kind)
]

SaidPart = Annotated[
    Annotated[InputText, Tag("(part)")] | Annotated[RefusalPart, Tag("(refusal)")], Discriminator(part_kind)
]
SaidParts = Annotated[list[SaidPart], Field(min_length=1, max_length=1024, fail_fast=True)]
SaidContent = Annotated[
    Annotated[Text, Tag("(text)")] | Annotated[SaidParts, Tag("(parts)")], Discriminator(content_kind)
]


def _texts_of(content: str | Sequence[InputText | RefusalPart]) -> list[str]:
    return [content] if isinstance(content, str) else [part.text for part in content]


class MessageItem(Strict):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: SaidContent
    id: Name | None = None
    status: Literal["completed", "incomplete", "in_progress"] | None = None
    phase: Literal["commentary", "final_answer"] | None = None  # templates know nothing of it

    @model_validator(mode="after")
    def _is_of_its_role(self) -> MessageItem:
        if self.role != "assistant" and any(isinstance(part, RefusalPart) for part in self._parts):
            raise PydanticCustomError("role", "only an assistant's message has a refusal", {"field": "content"})
        return self

    @property
    def _parts(self) -> Sequence[InputText | RefusalPart]:
        return [InputText(type="input_text", text=self.content)] if isinstance(self.content, str) else self.content

    def messages(self) -> list[Json]:
        return [{"role": self.role, "content": "".join(_texts_of(self.content))}]

    def listed(self) -> Json:
        is_answer = self.role == "assistant"
        more: Json = {"annotations": [], "logprobs": []} if is_answer else {}
        kind = "output_text" if is_answer else "input_text"
        parts = [
            part.model_dump() if isinstance(part, RefusalPart) else {"type": kind, "text": part.text, **more}
            for part in self._parts
        ]
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
    parsed_arguments: Echoed = None
    # OpenAI's client writes what an answer does not say as null, one of these by the name that it has in Python.
    asynchronous: Annotated[Unsupported, Field(alias="async")] = None
    async_: Unsupported = None
    caller: Unsupported = None
    namespace: Unsupported = None

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


def _refuse_summary(kind: object) -> object:
    if kind in ("concise", "detailed"):
        raise PydanticCustomError("unsupported", "reasoning is told as it is, not summed up: leave it out, or say auto")
    return kind


class TextOptions(Strict):
    format: Annotated[TextFormat | ObjectAnswer | SchemaAnswer, Field(discriminator="type")] | None = None
    verbosity: Verbosity | None = None


class ReasoningOptions(Strict):
    """There are no summaries: what was reasoned is told as it is."""

    effort: Effort | None = None
    summary: Annotated[Literal["auto"], BeforeValidator(_refuse_summary)] | None = None
    generate_summary: Annotated[Literal["auto"], BeforeValidator(_refuse_summary)] | None = None  # its older name


class ResponseStreamOptions(Strict):
    include_obfuscation: Off | None = None  # no event is padded


class ResponseRequest(Strict):
    """POST /v1/responses"""

    input: Annotated[Annotated[Text, Tag("(text)")] | Annotated[Items, Tag("(parts)")], Discriminator(content_kind)]
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
    prompt_cache_retention: Literal["in_memory", "in-memory"] | None = None  # it is always so
    reasoning: ReasoningOptions | None = None
    # not here
    access_programs: Unsupported = None
    context_management: Unsupported = None
    conversation: Unsupported = None
    image: Unsupported = None
    max_tool_calls: Unsupported = None
    moderation: Unsupported = None
    prompt: Unsupported = None
    prompt_cache_options: Unsupported = None

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
            "reasoning_effort": self.reasoning and self.reasoning.effort,
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
