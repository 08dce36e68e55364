"""What travels on the pages of branches and of scripts: bodies in, answers out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Literal

from pydantic import Field

from niwaki.runtime.api import (
    MAX_LOGIT_BIAS,
    MAX_STOPS,
    Choices,
    Constraint,
    Delta,
    Grammar,
    JsonSchema,
    Message,
    Output,
    Regex,
    RequestError,
    SamplingOptions,
    SamplingParams,
    Score,
    Segment,
    Spacing,
    TokenLogprob,
    ToolCall,
)
from niwaki.runtime.server.errors import as_api_error
from niwaki.runtime.server.openai_models import MAX_NEW, Stop
from niwaki.runtime.server.openai_shapes import finite
from niwaki.runtime.server.wire import MAX_PROMPTS, ChoiceList, Json, Name, Pattern, Strict, Text, TokenId

# ---------------------------------------------------------------------------------------------------------------
# Bodies
# ---------------------------------------------------------------------------------------------------------------


class SegmentBody(Strict):
    text: Text
    control: bool = False


Segments = Annotated[list[SegmentBody], Field(max_length=65536, fail_fast=True)]


class OpenBody(Strict):
    namespace: Name = ""


class AppendBody(Strict):
    delta: Segments


class RegexBody(Strict):
    kind: Literal["regex"]
    pattern: Pattern


class ChoicesBody(Strict):
    kind: Literal["choices"]
    choices: ChoiceList


class SchemaBody(Strict):
    kind: Literal["json_schema"]
    text: Pattern
    spacing: Spacing = "compact"


class GrammarBody(Strict):
    kind: Literal["grammar"]
    source: Pattern
    syntax: Literal["lark", "ebnf"]


ConstraintBody = Annotated[RegexBody | ChoicesBody | SchemaBody | GrammarBody, Field(discriminator="kind")]


class ParamsBody(Strict):
    """`SamplingParams`, resolved by the program's side; every bound is checked again."""

    max_new_tokens: Annotated[int, Field(ge=0, le=MAX_NEW)]
    min_tokens: int
    n: Annotated[int, Field(ge=1, le=16)]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    logit_bias: Annotated[list[tuple[TokenId, float]], Field(max_length=MAX_LOGIT_BIAS, fail_fast=True)]
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None
    stop: Annotated[list[Stop], Field(max_length=MAX_STOPS, fail_fast=True)]
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOPS, fail_fast=True)]
    stop_regex: Pattern | None
    ignore_eos: bool
    return_logprob: bool
    top_logprobs_num: int
    priority: int
    constraint: ConstraintBody | None
    heal: bool = False

    def params(self) -> SamplingParams:
        """Raises ApiError: a field is out of its bounds."""
        said = {
            name: getattr(self, name) for name in type(self).model_fields if name not in ("constraint", "logit_bias")
        }
        options = SamplingOptions(**said, logit_bias=dict(self.logit_bias), constraint=self._constraint())
        try:
            return options.resolve()
        except RequestError as error:
            raise as_api_error(error, param="params") from error

    def _constraint(self) -> Constraint | None:
        match self.constraint:
            case None:
                return None
            case RegexBody(pattern=pattern):
                return Regex(pattern)
            case ChoicesBody(choices=choices):
                return Choices(tuple(choices))
            case SchemaBody(text=text, spacing=spacing):
                return JsonSchema(text, spacing)
            case GrammarBody(source=source, syntax=syntax):
                return Grammar(source, syntax)


class GenerateBody(Strict):
    """`streams` false: there are no deltas until somebody asks for them at /listen."""

    delta: Segments
    params: ParamsBody
    streams: bool = True


class ListenBody(Strict):
    """Nothing."""


class ScoreBody(Strict):
    delta: Segments
    continuations: ChoiceList
    heal: bool = False
    unconditional: bool = False


class CallBody(Strict):
    name: Name
    arguments: Text
    id: Name = ""


class MessageBody(Strict):
    role: Name
    content: Text
    calls: Annotated[tuple[CallBody, ...], Field(max_length=MAX_PROMPTS)] = ()
    call_id: Name = ""
    name: Name = ""

    def message(self) -> Message:
        calls = tuple(ToolCall(call.name, call.arguments, call.id) for call in self.calls)
        return Message(self.role, self.content, calls, self.call_id, self.name)


class RenderBody(Strict):
    messages: Annotated[list[MessageBody], Field(max_length=4096, fail_fast=True)]
    add_generation_prompt: bool


# ---------------------------------------------------------------------------------------------------------------
# Between bodies and the engine's plain data
# ---------------------------------------------------------------------------------------------------------------


def segments_of(delta: Sequence[SegmentBody]) -> list[Segment]:
    return [Segment(segment.text, segment.control) for segment in delta]


def delta_json(delta: Delta) -> Json:
    return {
        "text": delta.text,
        "token_ids": delta.token_ids,
        "logprobs": _triples(delta.logprobs),
        "top_logprobs": [_triples(top) for top in delta.top_logprobs],
    }


def output_json(output: Output) -> Json:
    return {
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": asdict(output.finish_reason),
        "prompt_tokens": output.prompt_tokens,
        "cached_tokens": output.cached_tokens,
        "complete": output.complete,
        "forced": output.forced,
        "forced_spans": output.forced_spans,
        "drafted": output.drafted,
        "drafted_spans": output.drafted_spans,
        "allowed": output.allowed,
        "logprobs": _triples(output.logprobs),
        "top_logprobs": [_triples(top) for top in output.top_logprobs],
        "seconds": output.seconds,
    }


def score_json(score: Score) -> Json:
    return {
        "text": score.text,
        "logprobs": _triples(score.logprobs),
        "prompt_tokens": score.prompt_tokens,
        "cached_tokens": score.cached_tokens,
        "seed": score.seed,
    }


def _triples(logprobs: Sequence[TokenLogprob]) -> list[tuple[float | None, int, str | None]]:
    return [(finite(one.logprob), one.token_id, one.text) for one in logprobs]
