"""What the pages answer, for /openapi.json: each JSON answer as a model that has all its fields and no others.

Answers are written as plain dicts where they are made; the tests hold every one of them against its model here.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, RootModel

from niwaki.runtime.api import BackendInfo
from niwaki.runtime.pictures.tree_view import TreeNode
from niwaki.runtime.server.effort import Effort
from niwaki.runtime.server.openai_models import ChatMessage
from niwaki.runtime.server.responses_bodies import (
    AllowedFunctions,
    ChosenFunction,
    Item,
    ResponseFunction,
    SchemaAnswer,
)
from niwaki.runtime.server.tools import MadeCall


class Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")


Count = Annotated[int, Field(ge=0)]
Triple = tuple[float | None, int, str | None]  # log-probability, token id, text
Usage = dict[str, float]  # the engine's counters


# ---------------------------------------------------------------------------------------------------------------
# OpenAI's chat and completions
# ---------------------------------------------------------------------------------------------------------------


class CachedTokens(Answer):
    cached_tokens: Count


class ReasoningTokens(Answer):
    reasoning_tokens: Count


class UsageAnswer(Answer):
    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: CachedTokens
    completion_tokens_details: ReasoningTokens


class ModelCard(Answer):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelsAnswer(Answer):
    object: Literal["list"]
    data: list[ModelCard]


class SaidMessage(Answer):
    """`content` is null where the answer is calls alone."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str = ""
    tool_calls: list[MadeCall] = []


class ChatToken(Answer):
    token: str | None
    logprob: float | None
    bytes: list[int] | None


class ChatTokens(ChatToken):
    top_logprobs: list[ChatToken]


class ChatLogprobs(Answer):
    content: list[ChatTokens]
    refusal: None


class Choice(Answer):
    """`matched_stop`: the text or the token id that ended it."""

    index: Count
    finish_reason: Literal["stop", "length", "tool_calls", "abort"]
    matched_stop: str | int | None


class ChatChoice(Choice):
    message: SaidMessage
    logprobs: ChatLogprobs | None


class CompletionLogprobs(Answer):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None]
    text_offset: list[int]


class CompletionChoice(Choice):
    text: str
    logprobs: CompletionLogprobs | None


class _Completed(Answer):
    id: str
    created: int
    model: str
    usage: UsageAnswer


class ChatAnswer(_Completed):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class TurnAnswer(ChatAnswer):
    """A chat's answer in a session, and where it is kept."""

    session: str
    turn: str


class CompletionAnswer(_Completed):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


# ---------------------------------------------------------------------------------------------------------------
# Responses
# ---------------------------------------------------------------------------------------------------------------


class TextFormatAnswer(Answer):
    type: Literal["text", "json_object"]


class TextAnswer(Answer):
    format: TextFormatAnswer | SchemaAnswer


class ReasoningAsked(Answer):
    effort: Effort | None
    summary: None


class Incomplete(Answer):
    reason: Literal["max_output_tokens"]


class InputTokens(CachedTokens):
    cache_write_tokens: Count


class ResponseUsage(Answer):
    input_tokens: Count
    input_tokens_details: InputTokens
    output_tokens: Count
    output_tokens_details: ReasoningTokens
    total_tokens: Count


class OutputText(Answer):
    type: Literal["output_text"]
    text: str
    annotations: Annotated[list[JsonValue], Field(max_length=0)]
    logprobs: Annotated[list[JsonValue], Field(max_length=0)]


class ReasoningText(Answer):
    type: Literal["reasoning_text"]
    text: str


Status = Literal["completed", "incomplete", "in_progress"]


class OutputMessage(Answer):
    id: str
    type: Literal["message"]
    status: Status
    role: Literal["assistant"]
    content: list[OutputText]


class OutputReasoning(Answer):
    id: str
    type: Literal["reasoning"]
    status: Status
    summary: Annotated[list[JsonValue], Field(max_length=0)]
    content: list[ReasoningText]


class OutputCall(Answer):
    id: str
    type: Literal["function_call"]
    status: Status
    call_id: str
    name: str
    arguments: str


class ResponseError(Answer):
    code: str
    message: str


class ResponseAnswer(Answer):
    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete", "in_progress", "failed"]
    background: Literal[False]
    error: ResponseError | None
    incomplete_details: Incomplete | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None
    metadata: dict[str, str]
    model: str
    output: list[OutputMessage | OutputReasoning | OutputCall]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ReasoningAsked
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: bool
    temperature: float
    text: TextAnswer
    tool_choice: Literal["none", "auto", "required"] | ChosenFunction | AllowedFunctions
    tools: list[ResponseFunction]
    top_logprobs: Literal[0]
    top_p: float
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    user: str | None


class InputItems(Answer):
    """The ids are null where the page is empty."""

    object: Literal["list"]
    data: list[Item]
    has_more: bool
    first_id: str | None
    last_id: str | None


class ResponseDeleted(Answer):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


# ---------------------------------------------------------------------------------------------------------------
# Sessions
# ---------------------------------------------------------------------------------------------------------------


class SessionAnswer(Answer):
    """`turn` is the last one; null before the first."""

    id: str
    object: Literal["session"]
    created_at: int
    updated_at: int
    turn: str | None
    title: str | None
    metadata: dict[str, str]


class StoredTurn(Answer):
    """The fields behind `messages` are those of a turn that was generated here."""

    id: str
    created_at: int
    messages: list[ChatMessage]
    model: str = ""
    usage: UsageAnswer | None = None
    finish_reason: str = ""


class SessionExport(SessionAnswer):
    messages: list[ChatMessage]
    turns: list[StoredTurn]


class SessionsAnswer(Answer):
    object: Literal["list"]
    data: list[SessionAnswer]
    has_more: bool


class SessionDeleted(Answer):
    id: str
    object: Literal["session.deleted"]
    deleted: Literal[True]


# ---------------------------------------------------------------------------------------------------------------
# SGLang's pages, branches, and what stands beside them
# ---------------------------------------------------------------------------------------------------------------


class GenerateFinish(Answer):
    type: Literal["stop", "length", "abort"]
    length: int = 0
    matched: str | int = ""
    message: str = ""


class GenerateMeta(Answer):
    """`cached_tokens` and what follows is not told of what was aborted, log-probabilities where they were asked for."""

    id: str
    finish_reason: GenerateFinish
    prompt_tokens: Count
    completion_tokens: Count
    cached_tokens: Count = 0
    complete: bool = True
    e2e_latency: float = 0.0
    output_token_logprobs: list[Triple] = []
    output_top_logprobs: list[list[Triple]] = []
    input_token_logprobs: list[Triple] = []
    input_top_logprobs: list[list[Triple] | None] = []


class GenerateAnswer(Answer):
    text: str
    output_ids: list[int]
    meta_info: GenerateMeta


class GenerateAnswers(RootModel[GenerateAnswer | list[GenerateAnswer]]):
    """A list where there were several prompts, or several answers to one."""


class TokenizeAnswer(Answer):
    tokens: list[int] | list[list[int]]
    count: int | list[int]
    max_model_len: int


class DetokenizeAnswer(Answer):
    text: str | list[str]


class ModelInfoAnswer(Answer):
    model_path: str
    tokenizer_path: str
    is_generation: Literal[True]
    context_length: int
    vocab_size: int


class ServerInfoAnswer(BaseModel):
    """The engine's settings stand beside these."""

    version: str
    usage: Usage


class AbortAnswer(Answer):
    success: Literal[True]


class BranchAnswer(Answer):
    id: str


class SessionSegment(Answer):
    text: str
    control: bool


class SessionMessage(Answer):
    role: str
    content: str


class SessionBranchAnswer(BranchAnswer):
    """The branch holds the text of `segments`, which ends with the last message; `turn` is that of the session."""

    turn: str | None
    messages: list[SessionMessage]
    segments: list[SessionSegment]


class BranchTokensAnswer(BranchAnswer):
    token_ids: list[int]


class ScoredAnswer(Answer):
    text: str
    logprobs: list[Triple]
    prompt_tokens: Count
    cached_tokens: Count
    seed: int | None


class ScoresAnswer(Answer):
    scores: list[ScoredAnswer]


class RenderAnswer(Answer):
    text: str


class TreeAnswer(Answer):
    model: str
    nodes: list[TreeNode]
    usage: Usage


class StateAnswer(Answer):
    status: str


class UsageCounters(RootModel[Usage]):
    """The engine's counters."""


class BackendAnswer(RootModel[BackendInfo]):
    """What a program may ask about its backend."""


class ProgramCard(Answer):
    """A served program: where it is, and JSON schemas of what it takes and answers."""

    name: str
    description: str
    path: str
    batch_path: str
    parameters: dict[str, JsonValue]
    answer: dict[str, JsonValue]


class ProgramList(Answer):
    programs: list[ProgramCard]


class Variables(RootModel[dict[str, JsonValue]]):
    """A program's variables, where its annotation does not say what they are."""


class OpenApiAnswer(RootModel[dict[str, JsonValue]]):
    """An OpenAPI document."""
