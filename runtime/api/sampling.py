"""How a generation samples and when it ends: what a caller says, and what it comes to with every default filled in."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import TypeVar

from niwaki.runtime.api.constraints import Constraint
from niwaki.runtime.api.errors import RequestError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one generation samples and when it ends. Every field resolved and in bounds (see `SamplingOptions`)."""

    max_new_tokens: int = 128  # new tokens at most; also spelt max_tokens. 0: none, to score a text
    min_tokens: int = 0  # tokens before an end token, a stop or a stop_regex may end the text
    n: int = 1  # answers to one prompt
    temperature: float = 1.0  # 0 (below 1e-6): always the likeliest token
    top_p: float = 1.0  # draw among the likeliest tokens that have this share; 1: all
    top_k: int = -1  # draw among so many of the likeliest; -1: all
    min_p: float = 0.0  # leave out tokens less likely than this share of the likeliest; 0: none
    frequency_penalty: float = 0.0  # subtracted from a token's logit for each time that it was generated
    presence_penalty: float = 0.0  # subtracted from a token's logit once it was generated
    repetition_penalty: float = 1.0  # of tokens in prompt or answer: divides positive logits, multiplies negative ones
    logit_bias: tuple[tuple[int, float], ...] = ()  # token ids, and what is added to their logits
    seed: int | None = None  # seed of the random numbers; None: the engine chooses one
    stop: tuple[str, ...] = ()  # the text ends before the first of these
    stop_token_ids: tuple[int, ...] = ()  # the text also ends before one of these
    stop_regex: str | None = None  # the text ends where its first match ends, with the match
    ignore_eos: bool = False  # continue after the model's end token
    return_logprob: bool = False  # also return each token's log-probability
    top_logprobs_num: int = 0  # and those of so many of the likeliest tokens in its place
    logprob_start_len: int = -1  # with return_logprob: the first prompt token whose own is wanted; -1: none
    priority: int = 0  # higher goes first, and is preempted and (eviction_policy="priority") evicted last
    constraint: Constraint | None = None  # what the text must be; programs say regex, dtype, json_schema, ...
    heal: bool = False  # take back the prompt's last tokens if what follows may merge with them

    @property
    def is_greedy(self) -> bool:
        return self.temperature < 1e-6

    @property
    def compiles(self) -> bool:
        """Whether something in it has to be compiled before it runs."""
        return self.constraint is not None or self.stop_regex is not None


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """The same fields as `SamplingParams`, None where the caller leaves it to whoever stands behind.

    The order is: what `gen` says, over what `run` says, over the model's own generation_config, over the defaults.
    """

    max_new_tokens: int | None = None
    min_tokens: int | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    stop_regex: str | None = None
    ignore_eos: bool | None = None
    return_logprob: bool | None = None
    top_logprobs_num: int | None = None
    logprob_start_len: int | None = None
    priority: int | None = None
    constraint: Constraint | None = None
    heal: bool | None = None

    def over(self, base: SamplingOptions) -> SamplingOptions:
        """These options, and those of `base` where this one says nothing."""
        own = self._said()
        if not own:
            return base
        below = base._said()
        # A fresh object of the few that were said: dataclasses.replace reads every field twice, for every gen.
        return SamplingOptions(**{**below, **own}) if below else self  # type: ignore[arg-type]  # names are fields

    def resolve(self) -> SamplingParams:
        """Fill in the defaults and check every bound.

        Raises:
            RequestError: naming the field, its value and its bounds.
        """
        said = self._said()
        if self.stop is not None:
            listed = (self.stop,) if isinstance(self.stop, str) else self.stop
            said["stop"] = _listed("stop", listed, "a text or a list of texts")
        if self.stop_token_ids is not None:
            said["stop_token_ids"] = _listed("stop_token_ids", self.stop_token_ids, "a list of token ids")
            _check_token_ids("stop_token_ids", self.stop_token_ids)
        if self.logit_bias is not None:
            said["logit_bias"] = _biases(self.logit_bias)
        params = SamplingParams(**said)  # type: ignore[arg-type]  # names and types are those of the twin class
        _check_bounds(params, said)
        return params

    def __repr__(self) -> str:
        return f"SamplingOptions({', '.join(f'{name}={value!r}' for name, value in self._said().items())})"

    def _said(self) -> dict[str, object]:
        return {name: value for name, value in zip(_OPTION_NAMES, _options_of(self), strict=True) if value is not None}


_OPTION_NAMES = tuple(f.name for f in fields(SamplingOptions))
_options_of = attrgetter(*_OPTION_NAMES)  # all at once: this is asked several times a gen


# field -> (low, high), both allowed. Integers must be ints (a bool is refused), floats finite.
INT_BOUNDS: dict[str, tuple[int, int]] = {
    "max_new_tokens": (0, 1_000_000),
    "min_tokens": (0, 1_000_000),
    "n": (1, 16),
    "top_k": (-1, 1_000_000),
    "top_logprobs_num": (0, 20),
    "logprob_start_len": (-1, 1_000_000),
    "priority": (-1000, 1000),
}
FLOAT_BOUNDS: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "frequency_penalty": (-2.0, 2.0),
    "presence_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.01, 10.0),
}
SWITCHES = frozenset(("ignore_eos", "return_logprob", "heal"))
MAX_STOPS = 32
MAX_LOGIT_BIAS = 300


def _listed(name: str, given: Collection[T], kind: str) -> tuple[T, ...]:
    """Raises RequestError: no list; an iterator, too, which would be empty when it is read again."""
    if not isinstance(given, Collection):
        raise RequestError(f"{name} must be {kind}, got {given!r}")
    return tuple(given)


def _check_token_ids(name: str, given: Collection[int]) -> None:
    for token_id in given:
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise RequestError(f"{name} must be token ids, got {token_id!r}; the tokenizer has those of a text")


def _biases(given: Mapping[int, float]) -> tuple[tuple[int, float], ...]:
    if not isinstance(given, Mapping):
        raise RequestError(f"logit_bias must map token ids to numbers, got {given!r}")
    _check_token_ids("the keys of logit_bias", given)
    return tuple(sorted(given.items()))


def _as_int(value: object) -> str:
    """What to do about a whole number of another library, such as NumPy's."""
    return "" if isinstance(value, int) or not hasattr(value, "__index__") else "; write int(...) around it"


def _check_bounds(params: SamplingParams, said: Mapping[str, object]) -> None:
    """`said` are the fields that are not the defaults', which are in bounds."""
    for name in filter(INT_BOUNDS.__contains__, said):
        low, high = INT_BOUNDS[name]
        value = getattr(params, name)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise RequestError(f"{name} must be a whole number from {low} to {high}, got {value!r}{_as_int(value)}")
    for name in filter(FLOAT_BOUNDS.__contains__, said):
        lowest, highest = FLOAT_BOUNDS[name]
        value = getattr(params, name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not lowest <= value <= highest:
            raise RequestError(f"{name} must be a number from {lowest} to {highest}, got {value!r}")
    if params.top_p == 0.0:
        raise RequestError("top_p must be above 0, got 0.0; for greedy text set temperature=0")
    if params.top_k == 0:
        raise RequestError("top_k must be -1 (off) or at least 1, got 0")
    if params.seed is not None and (type(params.seed) is not int or not 0 <= params.seed < 2**63):
        remedy = _as_int(params.seed)
        raise RequestError(f"seed must be a whole number from 0 to 2**63 - 1, got {params.seed!r}{remedy}")
    if len(params.stop) > MAX_STOPS:
        raise RequestError(f"at most {MAX_STOPS} stop strings, got {len(params.stop)}")
    for text in params.stop:
        if not isinstance(text, str) or not text:
            raise RequestError(f"stop strings must be non-empty strings, got {text!r}")
    if params.stop_regex is not None and (not isinstance(params.stop_regex, str) or not params.stop_regex):
        raise RequestError(f"stop_regex must be a non-empty string, got {params.stop_regex!r}")
    if len(params.logit_bias) > MAX_LOGIT_BIAS:
        raise RequestError(f"at most {MAX_LOGIT_BIAS} logit_bias entries, got {len(params.logit_bias)}")
    for token_id, bias in params.logit_bias:
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100.0 <= bias <= 100.0:
            raise RequestError(f"logit_bias[{token_id}] must be from -100 to 100, got {bias!r}")
    for name in filter(SWITCHES.__contains__, said):
        if not isinstance(said[name], bool):
            raise RequestError(f"{name} must be True or False, got {said[name]!r}")
    if params.min_tokens > params.max_new_tokens:
        raise RequestError(f"min_tokens {params.min_tokens} is above max_new_tokens {params.max_new_tokens}")
