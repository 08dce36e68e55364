"""What is told about how a variable was made: plain dicts with SGLang's keys, and ours beside them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Required, TypeAlias, TypedDict, cast

from niwaki.runtime.api import FinishReason, GenerationError, Output, ProgramError, Score, TokenLogprob
from niwaki.runtime.api.choices import Decision, choice_logprobs, mean_logprob


@dataclass(frozen=True, slots=True)
class Selected:
    """The scores that a select saw, and its decision. `values` are what the choices stand for."""

    choices: tuple[str, ...]
    values: tuple[object, ...]
    scores: tuple[Score, ...]
    decision: Decision


Outcome: TypeAlias = tuple[Output, ...] | Selected
Logprob: TypeAlias = tuple[float | None, int, str | None]  # of a token, its id, its text


class Finish(TypedDict, total=False):
    """Why a generation ended: at a stop (`matched`), or at its budget (`length`)."""

    type: Required[Literal["stop", "length", "abort"]]
    matched: str | int
    length: int


class MetaInfo(TypedDict, total=False):
    """What `get_meta_info` returns. Its keys depend on the call; a `choices_method` of yours may add its own.

    Every call has `finish_reason` ({"type": "stop" | "length" | "abort", ...}), `complete` (whether the constraint, if
    any, is satisfied), `prompt_tokens`, `cached_tokens` (of these, from the cache) and `completion_tokens`. A gen has
    `seconds`, and `samples`, a list of such mappings, if `n` is above 1. With `return_logprob` a gen has
    `output_token_logprobs`, a list of (log-probability, token id, text); with `logprob_start_len` also
    `input_token_logprobs`, and with `top_logprobs_num` `output_top_logprobs`, a list of such lists. Choices have
    `choices`, `probabilities` and what their method compares: the page on select has all of these.
    """

    finish_reason: Required[Finish]
    complete: Required[bool]
    prompt_tokens: Required[int]
    cached_tokens: Required[int]
    completion_tokens: Required[int]
    seconds: float
    output_token_logprobs: list[Logprob]  # of a select: an empty list for each choice
    output_top_logprobs: list[list[Logprob]]
    input_token_logprobs: list[Logprob] | list[list[Logprob]]  # of a select: a list for each choice
    samples: list[MetaInfo]
    choices: list[str]
    probabilities: list[float]
    choice_logprobs: list[float]
    normalized_prompt_logprobs: list[float]
    normalized_unconditional_prompt_logprobs: list[float]
    unconditional_token_logprobs: list[list[Logprob]]
    greedy_logprob_matrix: list[list[float]]


class PieceInfo(TypedDict, total=False):
    """What `text_async_iter` tells with a piece: counts of everything so far, log-probabilities of this piece alone."""

    completion_tokens: Required[int]
    output_token_logprobs: list[Logprob]
    output_token_logprobs_length: int


@dataclass(frozen=True, slots=True)
class Usage:
    """Sums over the `calls` of one state: its gens and selects, without those of its forks.

    A later call's prompt contains the earlier text, so `prompt_tokens` counts that again; `cached_tokens` of them came
    from the cache. What was really computed is prompt_tokens - cached_tokens + generated_tokens. Of the
    `generated_tokens`, `forced_tokens` were written without asking the model, and `drafted_tokens` were guessed and
    found right in one step with those before them. `seconds` is the sum of the generations' times; they may have run
    side by side.
    """

    calls: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    forced_tokens: int = 0
    drafted_tokens: int = 0
    seconds: float = 0.0

    def plus(self, other: Usage) -> Usage:
        return Usage(
            self.calls + other.calls,
            self.prompt_tokens + other.prompt_tokens,
            self.cached_tokens + other.cached_tokens,
            self.generated_tokens + other.generated_tokens,
            self.forced_tokens + other.forced_tokens,
            self.drafted_tokens + other.drafted_tokens,
            self.seconds + other.seconds,
        )


def usage_of(outcome: Outcome) -> Usage:
    if isinstance(outcome, Selected):
        first = outcome.scores[0]
        return Usage(1, first.prompt_tokens, first.cached_tokens)
    return Usage(
        calls=1,
        prompt_tokens=outcome[0].prompt_tokens,
        cached_tokens=outcome[0].cached_tokens,
        generated_tokens=sum(output.completion_tokens for output in outcome),
        forced_tokens=sum(len(output.forced) for output in outcome),
        drafted_tokens=sum(len(output.drafted) for output in outcome),
        seconds=max(output.seconds for output in outcome),
    )


def meta_info(outcome: Outcome) -> MetaInfo:
    """The dict of `get_meta_info`. With n > 1: that of the first output, and all of them under "samples"."""
    if isinstance(outcome, Selected):
        return _of_selected(outcome)
    info = _of_output(outcome[0])
    if len(outcome) > 1:
        info["samples"] = [_of_output(output) for output in outcome]
    return info


def probabilities(outcome: Outcome, name: str) -> list[tuple[str, object, float]]:
    """Each choice that the variable `name` was chosen among, its value, and how probable it is, given that the text is
    one of them: they sum to one.

    Raises:
        ProgramError: it was not chosen.
        GenerationError: the scores cannot be compared.
    """
    if not isinstance(outcome, Selected):
        raise ProgramError(
            f"variable {name!r} was generated token by token, and nobody knows the probabilities of what else it might "
            "have been; select(...) or gen(dtype=Literal[...]) compares whole choices"
        )
    logprobs = choice_logprobs(outcome.scores)
    return list(zip(outcome.choices, outcome.values, map(math.exp, logprobs), strict=True))


def _of_output(output: Output) -> MetaInfo:
    info: MetaInfo = {
        "finish_reason": _finish(output.finish_reason, output),
        "prompt_tokens": output.prompt_tokens,
        "cached_tokens": output.cached_tokens,
        "completion_tokens": output.completion_tokens,
        "complete": output.complete,
        "seconds": output.seconds,
    }
    if output.logprobs:
        info["output_token_logprobs"] = _triples(output.logprobs)
    if output.prompt_logprobs:
        info["input_token_logprobs"] = _triples(output.prompt_logprobs)
    if output.top_logprobs:
        info["output_top_logprobs"] = [_triples(top) for top in output.top_logprobs]
    return info


def _of_selected(outcome: Selected) -> MetaInfo:
    first = outcome.scores[0]
    info: MetaInfo = {
        "choices": list(outcome.choices),
        "finish_reason": {"type": "stop"},
        "complete": True,
        "completion_tokens": 0,
        "input_token_logprobs": [_triples(score.logprobs) for score in outcome.scores],
        "output_token_logprobs": cast("list[Logprob]", [[] for _ in outcome.scores]),  # SGLang's
        "prompt_tokens": first.prompt_tokens,
        "cached_tokens": first.cached_tokens,
    }
    told = {**_known_of_choices(outcome.scores), **outcome.decision.meta}
    return cast("MetaInfo", {**told, **info})


def _known_of_choices(scores: tuple[Score, ...]) -> dict[str, object]:
    """What every method's choices have: their means, and their probabilities given that the text is one of them."""
    try:
        means = [mean_logprob(score) for score in scores]
        probabilities = [math.exp(logprob) for logprob in choice_logprobs(scores)]
    except GenerationError:  # a method of the author's may decide on scores that ours cannot compare
        return {}
    return {"normalized_prompt_logprobs": means, "probabilities": probabilities}


def _finish(reason: FinishReason, output: Output) -> Finish:
    if reason.type == "length":
        return {"type": "length", "length": output.completion_tokens}
    return {"type": reason.type} if reason.matched is None else {"type": reason.type, "matched": reason.matched}


def _triples(logprobs: tuple[TokenLogprob, ...]) -> list[Logprob]:
    return [(token.logprob, token.token_id, token.text) for token in logprobs]
