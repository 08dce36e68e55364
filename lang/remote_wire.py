"""What a program's side and a niwaki server say to each other, as JSON, and what the server's errors mean here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from typing import TypeAlias

from niwaki.runtime.api import (
    Cancelled,
    CapacityError,
    Choices,
    Constraint,
    ConstraintError,
    Delta,
    EngineStopped,
    FinishReason,
    GenerationError,
    Grammar,
    JsonSchema,
    NiwakiError,
    Output,
    ProgramError,
    Regex,
    RequestError,
    SamplingParams,
    Score,
    Segment,
    TimedOut,
    TokenLogprob,
    UnsupportedByBackend,
)

Json: TypeAlias = dict[str, object]

# What the server's error codes mean here; every other one is a RequestError below 500, a GenerationError above.
ERRORS: dict[str, type[NiwakiError]] = {
    "context_length_exceeded": CapacityError,
    "invalid_constraint": ConstraintError,
    "invalid_program": ProgramError,
    "unsupported": UnsupportedByBackend,
    "cancelled": Cancelled,
    "overloaded": EngineStopped,
    "timeout": TimedOut,
}


def segments_json(segments: Sequence[Segment]) -> list[Json]:
    return [{"text": segment.text, "control": segment.control} for segment in segments]


def params_json(params: SamplingParams) -> Json:
    if params.logprob_start_len >= 0:
        raise UnsupportedByBackend(
            "a server's branches tell no log-probabilities of prompts; leave out logprob_start_len"
        )
    written: Json = {f.name: getattr(params, f.name) for f in fields(params) if f.name != "logprob_start_len"}
    return written | {"constraint": None if params.constraint is None else _constraint(params.constraint)}


def _constraint(constraint: Constraint) -> Json:
    match constraint:
        case Regex(pattern):
            return {"kind": "regex", "pattern": pattern}
        case Choices(choices):
            return {"kind": "choices", "choices": choices}
        case JsonSchema(text, spacing):
            return {"kind": "json_schema", "text": text, "spacing": spacing}
        case Grammar(source, syntax):
            return {"kind": "grammar", "source": source, "syntax": syntax}
        case _:
            raise UnsupportedByBackend(f"a {type(constraint).__name__} constraint cannot be sent to a server yet")


class _Object(dict[str, object]):
    """A JSON object of a server. Raises GenerationError for a field that is not there."""

    def __missing__(self, name: str) -> object:
        raise unexpected(f"it has no {name!r}")


def read_object(content: bytes) -> Json:
    """Raises GenerationError: it is no JSON object."""
    try:
        return as_object(json.loads(content, object_hook=_Object))
    except (ValueError, RecursionError) as error:
        raise unexpected(f"{type(error).__name__}: {error}") from None


def unexpected(what: str) -> GenerationError:
    return GenerationError(f"the server answered with something that no niwaki server says: {what}")


def as_told(error: Exception) -> NiwakiError:
    """What went wrong while an answer was read."""
    return error if isinstance(error, NiwakiError) else unexpected(f"{type(error).__name__}: {error}")


def error_at(status: int, content: bytes) -> NiwakiError:
    try:
        return error_of(status, read_object(content))
    except GenerationError:
        return GenerationError(f"the server answered {status} with something that no niwaki server says")


def error_of(status: int, body: Json) -> NiwakiError:
    told = as_object(body["error"])
    kind = ERRORS.get(str(told["code"]), RequestError if status < 500 else GenerationError)
    return kind(str(told["message"]))


def delta_of(told: Json) -> Delta:
    return Delta(
        str(told["text"]), ids_of(told["token_ids"]), _logprobs(told["logprobs"]), _lists(told["top_logprobs"])
    )


def output_of(told: Json) -> Output:
    finish = as_object(told["finish_reason"])
    return Output(
        text=str(told["text"]),
        token_ids=ids_of(told["token_ids"]),
        finish_reason=FinishReason(finish["type"], finish["matched"]),  # type: ignore[arg-type]  # written from one
        prompt_tokens=as_int(told["prompt_tokens"]),
        cached_tokens=as_int(told["cached_tokens"]),
        complete=bool(told["complete"]),
        forced=ids_of(told["forced"]),
        forced_spans=_spans(told["forced_spans"]),
        drafted=ids_of(told["drafted"]),
        drafted_spans=_spans(told["drafted_spans"]),
        allowed=tuple(None if one is None else as_int(one) for one in as_list(told["allowed"])),
        logprobs=_logprobs(told["logprobs"]),
        top_logprobs=_lists(told["top_logprobs"]),
        seconds=float(str(told["seconds"])),
    )


def _spans(told: object) -> tuple[tuple[int, int], ...]:
    return tuple((as_int(start), as_int(end)) for start, end in map(as_list, as_list(told)))


def score_of(told: Json) -> Score:
    seed = told["seed"]
    return Score(
        str(told["text"]),
        _logprobs(told["logprobs"]),
        as_int(told["prompt_tokens"]),
        as_int(told["cached_tokens"]),
        None if seed is None else as_int(seed),
    )


def _logprobs(told: object) -> tuple[TokenLogprob, ...]:
    found = []
    for entry in as_list(told):
        logprob, token_id, text = as_list(entry)
        found.append(
            TokenLogprob(
                None if logprob is None else float(str(logprob)), as_int(token_id), None if text is None else str(text)
            )
        )
    return tuple(found)


def _lists(told: object) -> tuple[tuple[TokenLogprob, ...], ...]:
    return tuple(_logprobs(one) for one in as_list(told))


def ids_of(told: object) -> tuple[int, ...]:
    return tuple(as_int(token_id) for token_id in as_list(told))


def as_int(told: object) -> int:
    if not isinstance(told, int):
        raise unexpected(f"expected a whole number, got {told!r:.80}")
    return told


def as_number(told: object) -> float:
    if not isinstance(told, int | float):
        raise unexpected(f"expected a number, got {told!r:.80}")
    return float(told)


def as_list(told: object) -> list[object]:
    if not isinstance(told, list):
        raise unexpected(f"expected a list, got {told!r:.80}")
    return told


def as_object(told: object) -> Json:
    if not isinstance(told, dict):
        raise unexpected(f"expected an object, got {told!r:.80}")
    return told
