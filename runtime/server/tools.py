"""Tools in OpenAI's chat: the bodies that offer and answer calls, and the answers that make them. Nothing of HTTP."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from pydantic import Field, JsonValue

from niwaki.runtime.api import (
    CallFormat,
    Choices,
    Constraint,
    Grammar,
    JsonSchema,
    Reasoned,
    Regex,
    RequestError,
    Tool,
    ToolCall,
    ToolCalls,
    UnsupportedByBackend,
)
from niwaki.runtime.api.calls import AnswerReader, CallArguments, CallBegin, Content, Event, Reasoning
from niwaki.runtime.api.constraints import TOOL_NAME
from niwaki.runtime.checkpoint.tokenizer import Tokenizer
from niwaki.runtime.server.errors import ApiError
from niwaki.runtime.server.wire import Echoed, Json, Name, Strict, Text

MAX_TOOLS = 128
MAX_CALLS = 128
MAX_REASONING = 1_000_000

# ---------------------------------------------------------------------------------------------------------------
# Bodies
# ---------------------------------------------------------------------------------------------------------------

FunctionName = Annotated[str, Field(pattern=f"^{TOOL_NAME}$")]


class Function(Strict):
    """`parameters` is enforced exactly, whatever `strict` says; what cannot be is refused."""

    name: FunctionName
    description: Text | None = None
    parameters: dict[str, JsonValue] | None = None
    strict: bool | None = None


class FunctionTool(Strict):
    type: Literal["function"]
    function: Function

    def tool(self) -> Tool:
        parameters = self.function.parameters
        written = "" if parameters is None else json.dumps(parameters, ensure_ascii=False)
        return Tool(self.function.name, written, self.function.description or "")


class FunctionChoice(Strict):
    name: FunctionName


class NamedTool(Strict):
    type: Literal["function"]
    function: FunctionChoice


class AllowedList(Strict):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


class AllowedTools(Strict):
    """OpenAI's newer form: of the tools that the model is told, only these may be called."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedList


ToolChoice = Literal["none", "auto", "required"] | Annotated[NamedTool | AllowedTools, Field(discriminator="type")]
Tools = Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS, fail_fast=True)]


class CalledFunction(Strict):
    name: FunctionName
    arguments: Text
    parsed_arguments: Echoed = None  # of OpenAI's client


class MadeCall(Strict):
    """A call of an earlier answer, as it was told."""

    id: Name
    type: Literal["function"]
    function: CalledFunction
    index: Annotated[int, Field(ge=0, lt=2**31)] | None = None  # a stream's, which OpenAI's client leaves there

    def call(self) -> ToolCall:
        return ToolCall(self.function.name, self.function.arguments or "{}", self.id)


MadeCalls = Annotated[list[MadeCall], Field(max_length=MAX_CALLS, fail_fast=True)]  # vLLM answers [] for none

# ---------------------------------------------------------------------------------------------------------------
# What a request asks of its answer
# ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Plan:
    """What an answer may consist of, beside plain text. `told` are the tools that the model hears of, `callable` those
    that it may call."""

    told: tuple[Tool, ...] = ()
    callable: tuple[Tool, ...] = ()
    form: CallFormat | None = None
    is_required: bool = False
    is_parallel: bool = True
    think: tuple[str, str] | None = None
    reasoning_tokens: int | None = None
    shows_reasoning: bool = False  # inside the content, not apart
    is_either: bool = False  # calls, or an answer in a form of its own

    def constraint(self, answer: Constraint | None) -> Constraint | None:
        """One constraint for calls, reasoning and the form of the answer, none of them dropped."""
        assert answer is None or isinstance(answer, Regex | Choices | JsonSchema | Grammar), "a request has no other"
        inner: Regex | Choices | JsonSchema | Grammar | ToolCalls | None = answer
        if self.form is not None:
            offered = tuple(replace(tool, description="") for tool in self.callable)
            inner = ToolCalls(offered, self.form, self.is_required, self.is_parallel, answer)
        if self.think is None or self.reasoning_tokens is None:
            return inner
        return Reasoned(*self.think, self.reasoning_tokens, inner)

    def behind(self, prompt: str) -> Plan:
        """The plan for a prompt that may have begun the reasoning itself, or ended it: there is to be none."""
        if self.think is None:
            return self
        if prompt.rstrip().endswith(self.think[1]):
            return replace(self, think=None)
        return replace(self, think=("", self.think[1])) if prompt.rstrip().endswith(self.think[0]) else self

    def reader(self) -> AnswerReader | None:
        """Of one answer; None where it is text and nothing else."""
        if self.form is None and (self.think is None or self.shows_reasoning):
            return None
        names = [tool.name for tool in self.callable] if self.is_either else None
        return AnswerReader(self.form, self.think, names, shows_thoughts=self.shows_reasoning)


def plan_of(
    tools: Sequence[FunctionTool] | None,
    choice: str | NamedTool | AllowedTools | None,
    *,
    is_parallel: bool,
    reasoning_tokens: int | None,
    separates: bool | None,
    tokenizer: Tokenizer,
) -> Plan:
    """What the fields of a request ask for, with a model of this tokenizer.

    Raises:
        ApiError: 400, with the field: a tool that is not offered, or a model that was not made for it.
    """
    plan = Plan()
    if tools and choice != "none":
        plan = _offered([tool.tool() for tool in tools], choice, tokenizer, is_parallel=is_parallel)
    elif choice not in (None, "none", "auto"):
        raise ApiError(400, "tool_choice needs tools to choose from", param="tool_choice", code="invalid_value")
    if reasoning_tokens is None and not separates:
        return plan
    think = tokenizer.reasoning_markers
    if think is None:
        raise ApiError(
            400,
            "this model's vocabulary has no markers of reasoning, so there is none to bound or to separate",
            param="separate_reasoning" if reasoning_tokens is None else "reasoning_tokens",
            code="unsupported",
        )
    return replace(plan, think=think, reasoning_tokens=reasoning_tokens, shows_reasoning=separates is False)


def _offered(
    tools: Sequence[Tool], choice: str | NamedTool | AllowedTools | None, tokenizer: Tokenizer, *, is_parallel: bool
) -> Plan:
    try:
        form = tokenizer.call_format
        tokenizer.check_tools(tools)
    except UnsupportedByBackend as error:
        raise ApiError(400, str(error), param="tools", code="unsupported") from None
    except RequestError as error:
        raise ApiError(400, str(error), param="tools", code="invalid_value") from None
    match choice:
        case NamedTool(function=FunctionChoice(name=name)):
            return Plan(tuple(tools), (_named(name, tools),), form, is_required=True, is_parallel=False)
        case AllowedTools(allowed_tools=allowed):
            names = list(dict.fromkeys(tool.function.name for tool in allowed.tools))
            some = tuple(_named(name, tools) for name in names)
            return Plan(tuple(tools), some, form, allowed.mode == "required", is_parallel)
        case _:
            return Plan(tuple(tools), tuple(tools), form, choice == "required", is_parallel)


def _named(name: str, tools: Sequence[Tool]) -> Tool:
    found = next((tool for tool in tools if tool.name == name), None)
    if found is None:
        offered = ", ".join(repr(tool.name) for tool in tools)
        raise ApiError(400, f"tool_choice names {name!r}; offered are {offered}", param="tool_choice")
    return found


# ---------------------------------------------------------------------------------------------------------------
# Answers
# ---------------------------------------------------------------------------------------------------------------


class Talk:
    """One answer on its way to the client: what its reader finds, as OpenAI writes it."""

    def __init__(self, reader: AnswerReader) -> None:
        self._reader = reader
        self._has_calls = False

    @property
    def has_whole_calls(self) -> bool:
        """Whether it made calls, and can be answered: a stop may have cut off the last one's arguments."""
        return self._has_calls and not self._reader.is_inside_call

    def more(self, text: str) -> Json:
        """The delta of a chunk; empty where it would say nothing."""
        return self._delta(self._reader.push(text))

    def rest(self) -> Json:
        """The delta of the last chunk."""
        return self._delta(self._reader.finish())

    def message(self, text: str) -> Json:
        """The message of a whole answer."""
        told = [self.more(text), self.rest()]
        calls: list[Json] = []
        for entry in (entry for delta in told for entry in _entries(delta)):
            if "id" in entry:
                calls.append({key: entry[key] for key in ("id", "type", "function")})
            else:
                function, more = calls[-1]["function"], entry["function"]
                assert isinstance(function, dict)
                assert isinstance(more, dict)
                function["arguments"] += more["arguments"]
        content = "".join(str(delta.get("content", "")) for delta in told)
        message: Json = {"role": "assistant", "content": content if content or not calls else None, "refusal": None}
        reasoning = "".join(str(delta.get("reasoning_content", "")) for delta in told)
        return (
            message | ({"reasoning_content": reasoning} if reasoning else {}) | ({"tool_calls": calls} if calls else {})
        )

    def _delta(self, events: Sequence[Event]) -> Json:
        """One entry for each call that it has news of: clients read the first of an index only."""
        texts: dict[str, str] = {}
        heads: dict[int, Json] = {}
        functions: dict[int, dict[str, str]] = {}
        for event in events:
            match event:
                case Content(text):
                    texts["content"] = texts.get("content", "") + text
                case Reasoning(text):
                    texts["reasoning_content"] = texts.get("reasoning_content", "") + text
                case CallBegin(index, name):
                    self._has_calls = True
                    # Nine letters and digits: the templates of one family take no other ids.
                    heads[index] = {"id": uuid.uuid4().hex[:9], "type": "function"}
                    functions[index] = {"name": name, "arguments": ""}
                case CallArguments(index, text):
                    functions.setdefault(index, {"arguments": ""})["arguments"] += text
        calls = [{"index": i, **heads.get(i, {}), "function": function} for i, function in functions.items()]
        return {**texts, **({"tool_calls": calls} if calls else {})}


def _entries(delta: Json) -> Sequence[Json]:
    entries = delta.get("tool_calls", [])
    assert isinstance(entries, list)
    return entries
