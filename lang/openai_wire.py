"""Between programs and OpenAI's API: branches become prompts or messages, answers become outputs. Sends nothing.

What the API has no word for is refused here, by name, before anything is sent.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from niwaki.runtime.api import (
    Choices,
    Constraint,
    ConstraintError,
    FinishReason,
    GenerationError,
    Grammar,
    JsonSchema,
    Message,
    Output,
    Regex,
    SamplingParams,
    Segment,
    TokenLogprob,
    UnsupportedByBackend,
)

Json: TypeAlias = dict[str, object]
Api: TypeAlias = Literal["chat", "completions"]
Logprobs: TypeAlias = tuple[tuple[TokenLogprob, ...], tuple[tuple[TokenLogprob, ...], ...]]

UNKNOWN_ID: Final = -1  # the API tells the texts of tokens, not their ids
MAX_STOPS: Final = 4  # the API's own limit; with extensions ours holds

# The marks of turns stand in control segments only, so nothing that a user wrote can pass for one.
END: Final = "<|end|>\n"
_MARK = re.compile(r"<\|end\|>\n|<\|(\w+)\|>\n")


def rendered(messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
    """Turns as the branches of this backend hold them; `messages_of` reads them back."""
    turns = "".join(f"<|{message.role}|>\n{message.content}{END}" for message in messages)
    return turns + ("<|assistant|>\n" if add_generation_prompt else "")


def messages_of(segments: Sequence[Segment]) -> list[Json]:
    """The finished turns before an answer.

    Raises:
        UnsupportedByBackend: there are no turns, text stands outside of them, or the answer has begun already.
    """
    messages: list[Json] = []
    role: str | None = None
    content = ""
    for segment in segments:
        if not segment.control:
            if role is None and segment.text.strip():
                raise UnsupportedByBackend(
                    f"text outside of chat turns ({segment.text[:40]!r}) has no place in OpenAI's chat API: write "
                    "user(...) and assistant(...), or use OpenAI(..., api='completions')"
                )
            content += segment.text
            continue
        for mark in _MARK.finditer(segment.text):
            if mark[1] is None:
                messages.append({"role": role, "content": content})
            role, content = mark[1], ""
    if role != "assistant":
        where = "outside of a turn" if role is None else f"in a {role} turn"
        raise UnsupportedByBackend(f"a gen {where}: OpenAI's chat API answers in an assistant turn only")
    if content:
        raise UnsupportedByBackend(
            f"a gen behind text of its own turn ({content[-40:]!r}): OpenAI's chat API cannot go on with an answer "
            "that has begun; let the gen be all of the assistant turn, or use OpenAI(..., api='completions')"
        )
    return messages


def prompt_of(segments: Sequence[Segment]) -> str:
    return "".join(segment.text for segment in segments)


@dataclass(frozen=True, slots=True)
class Ask:
    """A request's fields, and how its answer is to be read. `is_wrapped`: the text is the one field of an object."""

    api: Api
    fields: Json
    extra: Json
    num_outputs: int
    is_wrapped: bool = False
    is_bare: bool = False  # of a wrapped string: without its quotes

    @property
    def is_streamed(self) -> bool:
        """A wrapped answer would stream its wrapping, several answers would come mixed."""
        return self.num_outputs == 1 and not self.is_wrapped


def ask_of(model: str, api: Api, segments: Sequence[Segment], params: SamplingParams, *, extensions: bool) -> Ask:
    """The request for one generation. `extensions`: the service knows the fields that niwaki's server adds.

    Raises:
        UnsupportedByBackend: an option or a constraint that the API has no field for.
    """
    extra = _extra_options(params, extensions=extensions)
    if params.max_new_tokens == 0:
        raise UnsupportedByBackend("OpenAI's API answers with at least one token; max_new_tokens=0 asks for none")
    if len(params.stop) > MAX_STOPS and not extensions:
        raise UnsupportedByBackend(f"OpenAI's API takes at most {MAX_STOPS} stop strings, got {len(params.stop)}")
    fields: Json = {
        "model": model,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "n": params.n,
        "frequency_penalty": params.frequency_penalty,
        "presence_penalty": params.presence_penalty,
    }
    if params.stop:
        fields["stop"] = list(params.stop)
    if params.seed is not None:
        fields["seed"] = params.seed
    if params.logit_bias:
        fields["logit_bias"] = {str(token_id): bias for token_id, bias in params.logit_bias}
    if api == "chat":
        fields["messages"] = messages_of(segments)
        fields["max_completion_tokens"] = params.max_new_tokens
        if params.return_logprob:
            fields |= {"logprobs": True, "top_logprobs": params.top_logprobs_num}
    else:
        fields["prompt"] = prompt_of(segments)
        fields["max_tokens"] = params.max_new_tokens
        if params.return_logprob:
            fields["logprobs"] = params.top_logprobs_num
    match params.constraint:
        case None:
            return Ask(api, fields, extra, params.n)
        case JsonSchema(spacing="spaced"):
            raise UnsupportedByBackend('OpenAI\'s API has no spacing of JSON; leave json_spacing out, or say "free"')
        case JsonSchema(schema) if api == "chat":
            whole, is_wrapped = _as_object(json.loads(schema))
            fields["response_format"] = _format(whole)
            return Ask(api, fields, extra, params.n, is_wrapped)
        case Choices(choices) if api == "chat" and not extensions:
            whole, _ = _as_object({"type": "string", "enum": list(choices)})
            fields["response_format"] = _format(whole)
            return Ask(api, fields, extra, params.n, is_wrapped=True, is_bare=True)
        case constraint:
            return Ask(api, fields, extra | _extra_constraint(constraint, extensions=extensions), params.n)


def _extra_options(params: SamplingParams, *, extensions: bool) -> Json:
    plain = SamplingParams()
    names = ("top_k", "min_p", "min_tokens", "repetition_penalty", "stop_token_ids", "ignore_eos")
    if params.logprob_start_len >= 0:
        raise UnsupportedByBackend("OpenAI's API tells no log-probabilities of prompts; leave out logprob_start_len")
    extra: Json = {name: getattr(params, name) for name in names if getattr(params, name) != getattr(plain, name)}
    if extra and not extensions:
        raise UnsupportedByBackend(
            f"OpenAI's API has no {', '.join(extra)}; leave it out, or say OpenAI(..., extensions=True) where the "
            "service knows it"
        )
    return extra


def _extra_constraint(constraint: Constraint, *, extensions: bool) -> Json:
    if not extensions:
        what = {Regex: "regexes", Grammar: "grammars", JsonSchema: "schemas outside of chat", Choices: "choices"}
        raise UnsupportedByBackend(
            f"OpenAI's API has no {what.get(type(constraint), type(constraint).__name__)}; use a dtype or a "
            "json_schema in chat, or say OpenAI(..., extensions=True) where the service knows more"
        )
    match constraint:
        case Regex(pattern):
            return {"regex": pattern}
        case Choices(choices):
            return {"choices": list(choices)}
        case JsonSchema(schema):
            return {"json_schema": schema}
        case Grammar(source, syntax):
            return {"grammar" if syntax == "lark" else "ebnf": source}
        case _:
            raise UnsupportedByBackend(f"a {type(constraint).__name__} constraint has no field in OpenAI's API")


def _as_object(schema: Json | bool) -> tuple[Json, bool]:
    """The schema, as the field of an object where it is none itself: the API takes objects only.

    Raises:
        ConstraintError: it is no schema.
    """
    if not isinstance(schema, dict | bool):
        raise ConstraintError(f"a JSON schema must be an object or a boolean, got {type(schema).__name__}")
    if isinstance(schema, dict) and schema.get("type") == "object":
        return schema, False
    inner = dict(schema) if isinstance(schema, dict) else schema
    whole: Json = {"type": "object", "properties": {"value": inner}, "required": ["value"]}
    whole["additionalProperties"] = False
    if isinstance(inner, dict) and "$defs" in inner:  # references count from the root
        whole["$defs"] = inner.pop("$defs")
    return whole, True


def _format(schema: Json) -> Json:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


# ---------------------------------------------------------------------------------------------------------------
# Answers
# ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CountedOutput(Output):
    """An output whose tokens were counted, not told."""

    num_tokens: int = 0

    @property
    def completion_tokens(self) -> int:
        return self.num_tokens


@dataclass(frozen=True, slots=True)
class Used:
    """What a request cost, as far as the service says."""

    prompt: int = 0
    cached: int = 0
    generated: int = 0


def used_of(told: Mapping[str, object] | None) -> Used:
    if not told:
        return Used()
    details = told.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, Mapping) else None
    return Used(_count(told.get("prompt_tokens")), _count(cached), _count(told.get("completion_tokens")))


def output_of(ask: Ask, text: str, finish: str | None, used: Used, logprobs: Logprobs, seconds: float) -> CountedOutput:
    """One answer. Of several, each is said to have their mean number of tokens: the API tells the sum."""
    tokens, top = logprobs
    return CountedOutput(
        text=_unwrapped(text, ask) if finish != "length" else text,
        token_ids=(),
        finish_reason=_finish(finish),
        prompt_tokens=used.prompt,
        cached_tokens=used.cached,
        complete=finish != "length" or not (ask.is_wrapped or "response_format" in ask.fields),
        logprobs=tokens,
        top_logprobs=top,
        seconds=seconds,
        num_tokens=used.generated // ask.num_outputs,
    )


def logprobs_of(api: Api, told: Mapping[str, object] | None) -> Logprobs:
    """The tokens of an answer, and the likeliest ones in the place of each."""
    if not told:
        return (), ()
    if api == "chat":
        content = _list(told.get("content"))
        tokens = tuple(_token(one) for one in content)
        return tokens, tuple(tuple(_token(other) for other in _list(one.get("top_logprobs"))) for one in content)
    texts, values = _list(told.get("tokens")), _list(told.get("token_logprobs"))
    tokens = tuple(TokenLogprob(_number(v), UNKNOWN_ID, str(t)) for t, v in zip(texts, values, strict=True))
    top = tuple(
        tuple(TokenLogprob(_number(v), UNKNOWN_ID, str(t)) for t, v in (one or {}).items())
        for one in _list(told.get("top_logprobs"))
    )
    return tokens, top


def _unwrapped(text: str, ask: Ask) -> str:
    if not ask.is_wrapped:
        return text
    try:
        value = json.loads(text)["value"]
    except (ValueError, TypeError, KeyError):
        raise GenerationError(
            f'the service was asked for an object with a "value" and answered {text[:80]!r}: it may not know '
            "response_format"
        ) from None
    return value if ask.is_bare else json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _finish(told: str | None) -> FinishReason:
    match told:
        case "length":
            return FinishReason("length")
        case "content_filter":
            return FinishReason("abort")
        case _:
            return FinishReason("stop")


def _token(told: Mapping[str, object]) -> TokenLogprob:
    return TokenLogprob(_number(told.get("logprob")), UNKNOWN_ID, str(told.get("token")))


def _count(told: object) -> int:
    return told if isinstance(told, int) else 0


def _number(told: object) -> float | None:
    return float(told) if isinstance(told, int | float) else None


def _list(told: object) -> list[dict[str, object]]:
    """Of whatever the service sent; what is in it is looked at where it is used."""
    return told if isinstance(told, list) else []
