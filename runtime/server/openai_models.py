"""The bodies of OpenAI's chat and completion requests, with the field's usual extensions. Every field is bounded."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from pydantic import BeforeValidator, Discriminator, Field, JsonValue, Tag, model_validator
from pydantic_core import PydanticCustomError

from niwaki.runtime.api import (
    MAX_LOGIT_BIAS,
    MAX_STOPS,
    Choices,
    Constraint,
    Grammar,
    JsonSchema,
    Message,
    Regex,
    SamplingOptions,
    Spacing,
)
from niwaki.runtime.checkpoint.tokenizer import Tokenizer
from niwaki.runtime.server.effort import NO_EFFORT, TOKENS, Effort, reasons_of
from niwaki.runtime.server.errors import ApiError
from niwaki.runtime.server.other_servers import ChatFieldsOfOthers, FieldsOfOthers
from niwaki.runtime.server.tools import MAX_REASONING, MadeCalls, Plan, ToolChoice, Tools, plan_of
from niwaki.runtime.server.wire import (
    CacheHint,
    ChoiceTexts,
    Echoed,
    Name,
    NoMedia,
    Off,
    On,
    Pattern,
    Prompt,
    Strict,
    Text,
    TextList,
    TokenId,
    TokenIdList,
    TokenIdLists,
    Unsupported,
    Verbosity,
    prompts_of,
)

MAX_NEW = 1_000_000
MAX_MESSAGES = 4096
# A nucleus of no mass is the likeliest token alone; clients write it 0, the sampler wants it above.
SMALLEST_TOP_P = 1e-9

Stop = Annotated[str, Field(min_length=1, max_length=1024)]
LogitBias = Annotated[
    dict[Annotated[str, Field(pattern="^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]],
    Field(max_length=MAX_LOGIT_BIAS, json_schema_extra={"additionalProperties": False}),
]
MaxNew = Annotated[int, Field(ge=1, le=MAX_NEW)]


class StreamOptions(Strict):
    """`include_usage`: a last chunk with the usage. `continuous_usage_stats`: the usage so far in every chunk,
    its details null before the end."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Off | None = None  # no chunk is padded


class SamplingFields(FieldsOfOthers):
    """What chat and completions have in common."""

    model: Name | None = None
    n: Annotated[int, Field(ge=1, le=16)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: LogitBias | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Name | None = None
    # extensions
    regex: Pattern | None = None
    choices: ChoiceTexts | None = None
    json_schema: Pattern | None = None  # the text of a JSON schema
    json_spacing: Spacing | None = None  # of this one's JSON, or of `response_format`'s
    grammar: Pattern | None = None  # Lark's notation
    ebnf: Pattern | None = None
    top_k: Annotated[int, Field(ge=-1, le=1_000_000)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_NEW)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=10)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    stop_regex: Pattern | None = None  # the text ends where its first match ends
    ignore_eos: bool | None = None
    cache_salt: Name | None = None
    priority: Annotated[int, Field(ge=-1000, le=1000)] | None = None  # higher goes first

    def constraints(self) -> dict[str, Constraint]:
        """By the field that holds it."""
        found: dict[str, Constraint] = {}
        if self.regex is not None:
            found["regex"] = Regex(self.regex)
        if self.choices is not None:
            found["choices"] = Choices(tuple(self.choices))
        if self.json_schema is not None:
            found["json_schema"] = self.in_json(self.json_schema)
        if self.grammar is not None:
            found["grammar"] = Grammar(self.grammar, "lark")
        if self.ebnf is not None:
            found["ebnf"] = Grammar(self.ebnf, "ebnf")
        return found | self.constraints_of_others(self.in_json)

    def in_json(self, schema: str) -> JsonSchema:
        return JsonSchema(schema, self.json_spacing or "compact")

    def constraint(self) -> tuple[str, Constraint] | None:
        """The one constraint and the field that holds it. Raises ApiError when there are two."""
        found = list(self.constraints().items())
        if len(found) > 1:
            names = " and ".join(name for name, _ in found)
            raise ApiError(400, f"at most one of {names}", param=found[1][0], code="invalid_value")
        return found[0] if found else None

    def constraint_param(self) -> str | None:
        """The field that a refusal of the constraint is about; None where nothing has to be compiled."""
        constraint = self.constraint()
        if constraint is None:
            return None if self.stop_regex is None else "stop_regex"
        return constraint[0]

    def options(self, max_new_tokens: int, top_logprobs: int | None) -> SamplingOptions:
        """The engine's options. `top_logprobs` None: no log-probabilities. Raises ApiError when fields disagree."""
        constraint = self.constraint()
        if self.min_tokens is not None and self.min_tokens > max_new_tokens:
            message = f"min_tokens {self.min_tokens} is above the {max_new_tokens} tokens that there may be"
            raise ApiError(400, message, param="min_tokens", code="invalid_value")
        return SamplingOptions(
            max_new_tokens=max_new_tokens,
            min_tokens=self.min_tokens,
            n=self.n,
            temperature=self.temperature,
            top_p=None if self.top_p is None else max(self.top_p, SMALLEST_TOP_P),
            top_k=-1 if self.top_k == 0 else self.top_k,
            min_p=self.min_p,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=bias_of(self.logit_bias),
            seed=None if self.seed is None else self.seed % 2**63,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            stop_regex=self.stop_regex,
            ignore_eos=self.ignore_eos,
            return_logprob=None if top_logprobs is None else True,
            top_logprobs_num=top_logprobs,
            priority=self.priority,
            constraint=None if constraint is None else constraint[1],
        )

    def check(self) -> None:
        """What one field alone cannot tell. Raises ApiError."""
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options needs stream: true", param="stream_options")
        if self.json_spacing is None:
            return
        if not any(isinstance(one, JsonSchema) for one in self.constraints().values()):
            raise ApiError(400, "json_spacing is about JSON: give json_schema or response_format", param="json_spacing")

    def token_ids(self) -> dict[str, list[int]]:
        """The tokens of the vocabulary that are named, by field."""
        named = {"logit_bias": list(bias_of(self.logit_bias) or ()), "stop_token_ids": self.stop_token_ids or []}
        return {field: ids for field, ids in named.items() if ids}

    @property
    def num_outputs(self) -> int:
        return self.n or 1


class TextPart(Strict):
    """A piece of a message. Images, sound and files are refused: nothing is fetched for a client."""

    type: Annotated[Literal["text"], NoMedia]
    text: Text
    cache_control: CacheHint = None
    prompt_cache_breakpoint: CacheHint = None


class RefusalPart(Strict):
    """Of an earlier answer, which another server's model would not give."""

    type: Literal["refusal"]
    refusal: Text

    @property
    def text(self) -> str:
        return self.refusal


def part_kind(value: object) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "(refusal)" if kind == "refusal" else "(part)"


def content_kind(value: object) -> str:
    return "(parts)" if isinstance(value, list) else "(text)"


Part = Annotated[
    Annotated[TextPart, Tag("(part)")] | Annotated[RefusalPart, Tag("(refusal)")], Discriminator(part_kind)
]
Parts = Annotated[list[Part], Field(min_length=1, max_length=1024, fail_fast=True)]
Content = Annotated[Annotated[Text, Tag("(text)")] | Annotated[Parts, Tag("(parts)")], Discriminator(content_kind)]


def _refuse_made_call(call: object) -> object:
    if call is not None:
        raise PydanticCustomError("unsupported", "functions are tools here: a call that was made stands in tool_calls")
    return call


class ChatMessage(Strict):
    """A turn. An assistant's may make calls instead of saying something; a tool's answers one, by its id."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    tool_calls: MadeCalls | None = None
    tool_call_id: Name | None = None
    name: Name | None = None  # of who speaks, or of the tool: for templates that write it
    # told by our own answers, and by others under its second name; templates know nothing of it
    reasoning_content: Text | None = None
    reasoning: Text | None = None
    parsed: Echoed = None  # of OpenAI's client
    refusal: Text | None = None  # an assistant's, in place of its content
    function_call: Annotated[None, BeforeValidator(_refuse_made_call)] = None  # their older form
    audio: Unsupported = None
    annotations: Unsupported = None

    @model_validator(mode="after")
    def _is_of_its_role(self) -> ChatMessage:
        if self.tool_calls and self.role != "assistant":
            raise PydanticCustomError("role", "only an assistant's message has tool_calls", {"field": "tool_calls"})
        if (self.tool_call_id is None) == (self.role == "tool"):
            raise PydanticCustomError(
                "role", "a tool's message, and no other, has a tool_call_id", {"field": "tool_call_id"}
            )
        if self._refuses and self.role != "assistant":
            raise PydanticCustomError("role", "only an assistant's message has a refusal", {"field": "refusal"})
        if self.content is None and self.refusal is None and not self.tool_calls:
            raise PydanticCustomError("missing", "a message needs content", {"field": "content"})
        return self

    @property
    def _refuses(self) -> bool:
        parts = self.content if isinstance(self.content, list) else ()
        return self.refusal is not None or any(isinstance(part, RefusalPart) for part in parts)

    def message(self) -> Message:
        role = "system" if self.role == "developer" else self.role  # OpenAI's newer name; templates know the older
        content = self.content or self.refusal or ""  # templates know of contents alone: it is what was said
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        calls = tuple(made.call() for made in self.tool_calls or ())
        return Message(role, text, calls, self.tool_call_id or "", self.name or "")


class Prediction(Strict):
    """What the answer may be. It saves time where a service reads it, and changes no answer."""

    type: Literal["content"]
    content: Content


class NamedSchema(Strict):
    """OpenAI's json_schema. It is enforced exactly, whatever `strict` says; what cannot be is refused."""

    name: Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    description: Text | None = None
    json_schema: Annotated[dict[str, JsonValue], Field(alias="schema")]
    strict: bool | None = None


class TextFormat(Strict):
    type: Literal["text"]


class ObjectFormat(Strict):
    type: Literal["json_object"]


class SchemaFormat(Strict):
    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[TextFormat | ObjectFormat | SchemaFormat, Field(discriminator="type")]


def _refuse_call(choice: object) -> object:
    if choice != "none" and choice is not None:
        raise PydanticCustomError("unsupported", "functions are tools here: offer tools, choose with tool_choice")
    return choice


# The older form of `tool_choice`, where it asks for none.
NoCall = Annotated[Literal["none"], BeforeValidator(_refuse_call)]


class ChatRequest(SamplingFields, ChatFieldsOfOthers):
    """POST /v1/chat/completions"""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_tokens: MaxNew | None = None
    max_completion_tokens: MaxNew | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    # told to the service only; they change no answer
    metadata: Annotated[dict[Name, Annotated[str, Field(max_length=512)]], Field(max_length=16)] | None = None
    store: Off | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: Name | None = None
    prompt_cache_key: Name | None = None
    modalities: list[Literal["text"]] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    # extensions: the budget of a span of reasoning before the answer, and whether it is told apart from the content
    reasoning_tokens: Annotated[int, Field(ge=0, le=MAX_REASONING)] | None = None
    separate_reasoning: bool | None = None
    continue_final_message: bool | None = None  # the answer goes on with the last message, an assistant's
    reasoning_effort: Effort | None = None
    verbosity: Verbosity | None = None
    function_call: NoCall | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory"] | None = None  # it is always so
    prediction: Prediction | None = None
    # not yet
    audio: Unsupported = None
    moderation: Unsupported = None
    prompt_cache_options: Unsupported = None
    web_search_options: Unsupported = None

    def check(self) -> None:
        last = self.messages[-1]
        if self.continue_final_message and (last.role != "assistant" or not last.content or last.tool_calls):
            message = "it needs an assistant's message with a content, and no calls, at the end"
            raise ApiError(400, f"continue_final_message: {message}", param="continue_final_message")
        if self.add_generation_prompt is False and not self.continue_final_message:
            field, message = "add_generation_prompt", "an answer is a new turn, unless it goes on with the last one"
            raise ApiError(400, f"{field}: {message}: continue_final_message", param=field, code="unsupported")
        super().check()

    def constraints(self) -> dict[str, Constraint]:
        found = super().constraints()
        match self.response_format:
            case ObjectFormat():
                found["response_format"] = self.in_json('{"type":"object"}')
            case SchemaFormat(json_schema=named):
                found["response_format"] = self.in_json(json.dumps(named.json_schema))
        return found

    def plan(self, tokenizer: Tokenizer) -> Plan:
        """What the answer may consist of. Raises ApiError as `plan_of` and `reasons_of`."""
        asked = reasons_of(self.reasoning_effort, tokenizer)
        if self.reasoning_tokens and self.reasoning_effort in NO_EFFORT:
            message = f"reasoning_tokens {self.reasoning_tokens} and the effort {self.reasoning_effort!r} disagree"
            raise ApiError(400, message, param="reasoning_effort", code="invalid_value")
        return plan_of(
            self.tools,
            self.tool_choice,
            is_parallel=self.parallel_tool_calls is not False,
            reasoning_tokens=asked.tokens if self.reasoning_tokens is None else self.reasoning_tokens,
            separates=asked.is_apart or None if self.separate_reasoning is None else self.separate_reasoning,
            tokenizer=tokenizer,
        )

    def variables(self, tokenizer: Tokenizer) -> Mapping[str, object]:
        """For the model's template. Raises ApiError: as `reasons_of`, and where two fields disagree."""
        said, given = reasons_of(self.reasoning_effort, tokenizer).variables, self.chat_template_kwargs or {}
        for name, value in said.items():
            if given.get(name, value) != value:
                message = f"reasoning_effort and chat_template_kwargs.{name} disagree; give one"
                raise ApiError(400, message, param="reasoning_effort", code="invalid_value")
        return {**given, **said}

    def constraint_param(self) -> str | None:
        if self.tools and self.tool_choice != "none":
            return "tools"
        found = super().constraint_param() or (None if self.reasoning_tokens is None else "reasoning_tokens")
        return found or ("reasoning_effort" if self.reasoning_effort in TOKENS else None)

    def max_new_tokens(self) -> int | None:
        """Raises ApiError when the two spellings disagree."""
        both = {value for value in (self.max_tokens, self.max_completion_tokens) if value is not None}
        if len(both) > 1:
            raise ApiError(400, "max_tokens and max_completion_tokens disagree; give one", param="max_tokens")
        return both.pop() if both else None

    def num_logprobs(self) -> int | None:
        """How many alternatives a token is told with; None for no log-probabilities."""
        if not self.logprobs:
            if self.top_logprobs:
                raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
            return None
        return self.top_logprobs or 0


class CompletionRequest(SamplingFields):
    """POST /v1/completions"""

    prompt: Annotated[Text | TextList | TokenIdList | TokenIdLists, Field(union_mode="left_to_right")]
    max_tokens: Annotated[int, Field(ge=0, le=MAX_NEW)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1, le=1)] | None = None
    add_special_tokens: On | None = None  # of vLLM
    suffix: Unsupported = None

    def prompts(self) -> Sequence[Prompt]:
        return prompts_of(self.prompt)

    def check(self) -> None:
        """What one field alone cannot tell. Raises ApiError."""
        if self.max_tokens == 0 and not self.echo:
            raise ApiError(400, "max_tokens 0 needs echo: true; there is nothing to answer", param="max_tokens")
        if self.echo and self.stream and self.logprobs is not None:
            raise ApiError(400, "echo with logprobs cannot be streamed; leave out stream", param="stream")
        super().check()


class EmbeddingRequest(Strict):
    """POST /v1/embeddings"""

    input: Annotated[Text | TextList | TokenIdList | TokenIdLists, Field(union_mode="left_to_right")]
    model: Name | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, le=65536)] | None = None
    user: Name | None = None


def bias_of(given: Mapping[str, float] | None) -> dict[int, float] | None:
    """JSON has no whole numbers as keys: their digits stand there."""
    return None if given is None else {int(token_id): bias for token_id, bias in given.items()}
