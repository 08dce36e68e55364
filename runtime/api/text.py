"""What goes into a backend and what comes out: pieces of text, turns, generations, scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from niwaki.runtime.api.constraints import ToolCall
from niwaki.runtime.api.sampling import SamplingOptions


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of prompt text. Only `control` segments may produce special tokens (they come from a template)."""

    text: str
    control: bool = False


@dataclass(frozen=True, slots=True)
class Message:
    """One finished chat turn. An assistant's may hold calls, a tool's answers the call of id `call_id`. `name`: of who
    speaks, or of the tool."""

    role: str
    content: str
    calls: tuple[ToolCall, ...] = ()
    call_id: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class FinishReason:
    """Why a generation ended. `matched` is the stop string or the token id that ended it.

    "length": its budget is used up, or has kept a text under a constraint from going on as the model wanted, so that it
    is complete, and shorter than it would have been.
    """

    type: Literal["stop", "length", "abort"]
    matched: str | int | None = None


class TokenLogprob(NamedTuple):  # not a dataclass: there may be 20 for each token, and it is made in half the time
    """The log-probability of one token. `logprob` is None for the first token of a prompt."""

    logprob: float | None
    token_id: int
    text: str | None = None


if TYPE_CHECKING:
    Tops = Sequence[tuple[TokenLogprob, ...]]  # `likeliest.Likeliest`, or a tuple
else:
    Tops = tuple[tuple[TokenLogprob, ...], ...]  # as msgpack has it: it would make a list of a Sequence


# Not a dataclass: it is made for each token of each request. Nor a tuple, which Python's collections look through.
class Delta(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A piece of generated text as it arrives. The texts of all deltas add up to the final text."""

    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    top_logprobs: Tops = ()


@dataclass(frozen=True, slots=True)
class Output:
    """One finished generation (one of the n of a request)."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    complete: bool = True  # False: the budget ran out, or a stop cut the text, before the constraint was satisfied
    forced: tuple[int, ...] = ()  # which of `token_ids`, by index, the constraint left no choice about
    forced_spans: tuple[tuple[int, int], ...] = ()  # where those stand in `text`: starts and ends, in characters
    drafted: tuple[int, ...] = ()  # which of the others were guessed, and right: computed with those before them
    drafted_spans: tuple[tuple[int, int], ...] = ()
    # With log-probabilities and a constraint: how many tokens it allowed at each; None where a prompt's end was healed.
    allowed: tuple[int | None, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    top_logprobs: Tops = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # from the position on that the request asked for
    prompt_top_logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()  # the likeliest tokens at the same positions
    seconds: float = 0.0  # without those in which kernels were compiled, as in the next two
    queued_seconds: float = 0.0  # of them: before its first step
    first_seconds: float = 0.0  # of them: up to the step that gave its first token

    @property
    def completion_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Score:
    """The log-probabilities of one continuation's tokens, given what stands before it. `seed` is drawn by the backend,
    one for all that were scored together: whoever draws among them without a seed of his own takes it."""

    text: str
    logprobs: tuple[TokenLogprob, ...]
    prompt_tokens: int = 0
    cached_tokens: int = 0
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """What a program may ask about its backend."""

    model: str
    context_length: int
    defaults: SamplingOptions = field(default_factory=SamplingOptions)  # the model's own generation_config
    knows_patterns: bool = True  # False: Regex constraints are refused, and JSON schemas are not
    scores: bool = True  # False: `score` is refused, or not sure to work
    weights: str = ""  # a digest that tells them from others of the same name, where the backend knows them
