"""The contract between programs and the runtime: plain data, one error tree, one protocol.

Knows the standard library only, so that importing the language never loads torch. Everything that crosses the
seam between `lang` and a backend is defined here; nothing here does model work.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Generic, Literal, NamedTuple, Protocol, TypeVar, TypeVarTuple, runtime_checkable

log = logging.getLogger("niwaki")

# ---------------------------------------------------------------------------------------------------------------
# Errors
# ---------------------------------------------------------------------------------------------------------------


class NiwakiError(Exception):
    """Root of every error that niwaki raises on purpose. Messages say what, which value, and what to do."""


class ConfigError(NiwakiError, ValueError):
    """An engine or program option is unknown, of the wrong type, or impossible."""


class ModelError(NiwakiError):
    """A model folder is missing, incomplete, truncated or of an unsupported architecture."""


class RequestError(NiwakiError, ValueError):
    """A generation request has an invalid field."""


class ConstraintError(NiwakiError, ValueError):
    """A constraint is malformed, cannot be enforced exactly, or admits no text."""


class CapacityError(NiwakiError):
    """A request needs more tokens than an empty pool, or the model's context, can hold."""


class GenerationError(NiwakiError):
    """One request failed inside the runtime; its neighbours did not."""


class EngineStopped(NiwakiError):
    """The backend was shut down, or died, before the request ended."""


class Cancelled(NiwakiError):
    """The request or the program was cancelled before it ended."""


class TimedOut(NiwakiError, TimeoutError):
    """A result did not arrive within the time that the caller gave."""


class UnsupportedByBackend(NiwakiError):
    """The backend cannot do what was asked; raised before any work is done."""


class ProgramError(NiwakiError):
    """A program misused the language (nested roles, joined twice, ...)."""


class UnknownVariable(ProgramError, KeyError):
    """A program state has no variable of that name."""

    def __str__(self) -> str:  # KeyError would show the repr of the message
        return str(self.args[0]) if self.args else ""


# ---------------------------------------------------------------------------------------------------------------
# Constraints, as plain data. The runtime compiles them (runtime/constraints); programs only name them.
# ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Regex:
    """The whole generated text matches `pattern` (full match, Unicode)."""

    pattern: str


@dataclass(frozen=True, slots=True)
class Choices:
    """The generated text is one of `choices`."""

    choices: tuple[str, ...]


Spacing = Literal["compact", "spaced", "free"]


@dataclass(frozen=True, slots=True)
class JsonSchema:
    """The generated text is a JSON value that `schema` admits, written compactly: `{"name":"Ada","age":36}`.

    `schema` is the text of a JSON Schema (2020-12; older drafts are read too). Keys come in the schema's order.
    `spacing`: "spaced" as `json.dumps` writes by default, with a blank behind each comma and colon; "free" with or
    without a blank, or a line's end and at most 32 of indentation, behind these and inside brackets.
    """

    schema: str
    spacing: Spacing = "compact"


@dataclass(frozen=True, slots=True)
class Grammar:
    """The generated text is a sentence of a context-free grammar, from its rule `start` (lark) or `root` (ebnf)."""

    source: str
    syntax: Literal["lark", "ebnf"] = "lark"


@dataclass(frozen=True, slots=True)
class StopRegex:
    """The generated text ends with its first match of `pattern`: as soon as an end of it matches, and not before."""

    pattern: str


@dataclass(frozen=True, slots=True)
class AllOf:
    """The generated text satisfies every part: the intersection of their automata, exactly."""

    parts: tuple[Regex | Choices | StopRegex, ...]


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a model may call. `parameters` is the text of the JSON schema of its arguments, an object."""

    name: str
    parameters: str
    description: str = ""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call: the tool's name, and its arguments as the text of a JSON object."""

    name: str
    arguments: str
    id: str = ""


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a model writes calls: `begin`, a JSON object `{"name":...,arguments_key:...}`, `end`.

    Several calls stand one after the other with `between` in between, or as one list where `is_list`. `mark` is the
    part of `begin` that no other text of an answer holds; where it is empty a call is the whole answer.
    """

    name: str
    begin: str
    end: str
    mark: str
    arguments_key: str = "arguments"
    between: str = ""
    is_list: bool = False


@dataclass(frozen=True, slots=True)
class ToolCalls:
    """The generated text is free text, calls, or free text and then calls; where `is_required`, calls only.

    `answer` constrains the text that is no call: then it is either that or calls.
    """

    tools: tuple[Tool, ...]
    format: CallFormat
    is_required: bool = False
    is_parallel: bool = True  # False: one call at most
    answer: Regex | Choices | JsonSchema | Grammar | StopRegex | AllOf | None = None


@dataclass(frozen=True, slots=True)
class Reasoned:
    """`begin`, free text of at most `max_tokens` tokens, `end`; then what `constraint` admits (None: anything)."""

    begin: str
    end: str
    max_tokens: int
    constraint: Regex | Choices | JsonSchema | Grammar | StopRegex | AllOf | ToolCalls | None = None


Constraint = Regex | Choices | JsonSchema | Grammar | StopRegex | AllOf | ToolCalls | Reasoned

# ---------------------------------------------------------------------------------------------------------------
# Sampling
# ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one generation samples and when it ends. Every field resolved and in bounds (see `SamplingOptions`)."""

    max_new_tokens: int = 128
    min_tokens: int = 0
    n: int = 1
    temperature: float = 1.0  # below 1e-6: greedy
    top_p: float = 1.0
    top_k: int = -1  # -1: off (the field's spelling, kept on the wire)
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, added to its logit)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    stop_regex: str | None = None  # the text ends where its first match ends, with the match
    ignore_eos: bool = False
    return_logprob: bool = False
    top_logprobs_num: int = 0
    logprob_start_len: int = -1  # with return_logprob: the first prompt token whose own is wanted; -1: none
    priority: int = 0  # higher goes first, and is preempted and (eviction_policy="priority") evicted last
    constraint: Constraint | None = None
    heal: bool = False  # take back the prompt's last tokens where what follows may merge with them

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
            said["stop"] = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if self.stop_token_ids is not None:
            said["stop_token_ids"] = tuple(self.stop_token_ids)
        if self.logit_bias is not None:
            said["logit_bias"] = tuple(sorted(self.logit_bias.items()))
        params = SamplingParams(**said)  # type: ignore[arg-type]  # names and types are those of the twin class
        _check_bounds(params, said)
        return params

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
MAX_STOPS = 32
MAX_LOGIT_BIAS = 300


def _check_bounds(params: SamplingParams, said: Mapping[str, object]) -> None:
    """`said` are the fields that are not the defaults', which are in bounds."""
    for name in filter(INT_BOUNDS.__contains__, said):
        low, high = INT_BOUNDS[name]
        value = getattr(params, name)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise RequestError(f"{name} must be a whole number from {low} to {high}, got {value!r}")
    for name in filter(FLOAT_BOUNDS.__contains__, said):
        lowest, highest = FLOAT_BOUNDS[name]
        value = getattr(params, name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not lowest <= value <= highest:
            raise RequestError(f"{name} must be a number from {lowest} to {highest}, got {value!r}")
    if params.top_p == 0.0:
        raise RequestError("top_p must be above 0, got 0.0; for greedy text set temperature=0")
    if params.top_k == 0:
        raise RequestError("top_k must be -1 (off) or at least 1, got 0")
    if params.seed is not None and (isinstance(params.seed, bool) or not 0 <= params.seed < 2**63):
        raise RequestError(f"seed must be a whole number from 0 to 2**63 - 1, got {params.seed!r}")
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
        if not -100.0 <= bias <= 100.0:
            raise RequestError(f"logit_bias[{token_id}] must be from -100 to 100, got {bias!r}")
    if not isinstance(params.heal, bool):
        raise RequestError(f"heal must be True or False, got {params.heal!r}")
    if params.min_tokens > params.max_new_tokens:
        raise RequestError(f"min_tokens {params.min_tokens} is above max_new_tokens {params.max_new_tokens}")


# ---------------------------------------------------------------------------------------------------------------
# Text going in, text coming out
# ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of prompt text. Only `control` segments may produce special tokens (they come from a template)."""

    text: str
    control: bool = False


@dataclass(frozen=True, slots=True)
class Message:
    """One finished chat turn. An assistant's may hold calls, a tool's answers the call of id `call_id`."""

    role: str
    content: str
    calls: tuple[ToolCall, ...] = ()
    call_id: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class FinishReason:
    """Why a generation ended. `matched` is the stop string or the token id that ended it."""

    type: Literal["stop", "length", "abort"]
    matched: str | int | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log-probability of one token. `logprob` is None for the first token of a prompt."""

    logprob: float | None
    token_id: int
    text: str | None = None


class Delta(NamedTuple):  # not a dataclass: it is made for each token of each request, in half the time
    """A piece of generated text as it arrives. The texts of all deltas add up to the final text."""

    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    top_logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Output:
    """One finished generation (one of the n of a request)."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    complete: bool = True  # False: the budget ran out before the constraint was satisfied
    forced: tuple[int, ...] = ()  # which of `token_ids`, by index, the constraint left no choice about
    forced_spans: tuple[tuple[int, int], ...] = ()  # where those stand in `text`: starts and ends, in characters
    drafted: tuple[int, ...] = ()  # which of the others were guessed, and right: computed with those before them
    drafted_spans: tuple[tuple[int, int], ...] = ()
    # With log-probabilities and a constraint: how many tokens it allowed at each; None where a prompt's end was healed.
    allowed: tuple[int | None, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    top_logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # from the position on that the request asked for
    prompt_top_logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()  # the likeliest tokens at the same positions
    seconds: float = 0.0
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


# ---------------------------------------------------------------------------------------------------------------
# Waiting for a result: one class for every backend, sync and by callback
# ---------------------------------------------------------------------------------------------------------------

T = TypeVar("T")
Given = TypeVarTuple("Given")


class Pending(Generic[T]):
    """A result that will arrive. Written once by a backend (`succeed` or `fail`), read by anyone, any number of times.

    `add_done_callback` calls back at once when already done; otherwise on the thread that finishes it, so a
    callback must be short and must not wait.
    """

    def __init__(self, cancel: Callable[[], None] | None = None) -> None:
        self._lock = threading.RLock()  # taken by itself for every token: a Condition's own `with` runs Python
        self._changed = threading.Condition(self._lock)
        self._value: T | None = None
        self._error: BaseException | None = None
        self._done = False
        self._callbacks: list[Callable[[], None]] = []
        self._cancel = cancel

    @property
    def is_done(self) -> bool:
        return self._done

    def result(self, timeout: float | None = None) -> T:
        """Wait for the value. Raises what the backend failed with, or TimedOut (the work goes on)."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._done, timeout):
                raise TimedOut(f"no result within {timeout} s")
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]  # done without an error means that the value was set

    def error(self) -> BaseException | None:
        """What it failed with, or None (also while it still runs)."""
        return self._error

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        with self._changed:
            if not self._done:
                self._callbacks.append(callback)
                return
        _guarded(callback)

    def cancel(self) -> None:
        """Ask the backend to stop. The result becomes `Cancelled` unless it was already there."""
        if self._cancel is not None and not self._done:
            self._cancel()

    def succeed(self, value: T) -> None:
        """Backend side: set the value. Ignored when already done (a cancel may race with the last token)."""
        self._end(value, None)

    def fail(self, error: BaseException) -> None:
        """Backend side: set the error. Ignored when already done."""
        self._end(None, error)

    def _end(self, value: T | None, error: BaseException | None) -> None:
        with self._changed:
            if self._done:
                return
            self._value, self._error, self._done = value, error, True
            callbacks, self._callbacks = self._callbacks, []
            self._changed.notify_all()
        for callback in callbacks:
            _guarded(callback)


def _guarded(callback: Callable[[*Given], None], *given: *Given) -> None:
    """Run a waiter's callback. Its fault is its own: it must never stop the backend that brings the result."""
    try:
        callback(*given)
    except Exception:
        log.exception("a callback on a result failed")


class Generation(Pending[tuple[Output, ...]]):
    """A running generation: `result()` is a tuple of n outputs, `deltas()` streams the first of them."""

    def __init__(self, cancel: Callable[[], None] | None = None) -> None:
        super().__init__(cancel)
        self._deltas: list[Delta] = []
        self._watchers: tuple[Callable[[], None], ...] = ()
        self._num_waiting = 0  # in `deltas`
        self._is_streamed = False

    @property
    def is_streamed(self) -> bool:
        """Whether anybody has begun to read deltas. Until then a backend may send several as one."""
        return self._is_streamed

    def push(self, delta: Delta) -> None:
        """Backend side: one more piece of text. One thread at a time does this."""
        # Done for every token of every stream, so without a lock: the delta is there before anybody is told of it, and
        # whoever wants to be told says so before looking for what is there.
        self._deltas.append(delta)
        for tell in self._watchers:
            tell()
        if self._num_waiting:
            with self._changed:
                self._changed.notify_all()

    def watch(self, tell: Callable[[], None]) -> None:
        """Call `tell` whenever there may be more for `deltas_from`. It must neither wait nor raise."""
        self._is_streamed = True
        with self._lock:
            self._watchers += (tell,)
        if self._deltas:
            tell()

    def deltas_from(self, position: int) -> list[Delta]:
        """Those from `position` on that are there; waits for none."""
        return self._deltas[position:]

    def add_delta_callback(self, callback: Callable[[Delta], None]) -> None:
        """Call back with every delta, those that already came included, in order."""
        self.watch(_Caller(self._deltas, callback))

    def deltas(self, timeout: float | None = None) -> Iterator[Delta]:
        """All deltas from the first on, also when called late. Raises what the generation failed with.

        `timeout` bounds the wait for each next delta.
        """
        self._is_streamed = True
        position = 0
        while new := self._after(position, timeout):
            position += len(new)
            yield from new
        if self._error is not None:
            raise self._error

    def _after(self, position: int, timeout: float | None) -> list[Delta]:
        """Wait for deltas from `position` on; empty when there will be none."""
        with self._changed:
            self._num_waiting += 1
            has_come = self._changed.wait_for(lambda: self._done or len(self._deltas) > position, timeout)
            self._num_waiting -= 1
            if not has_come:
                raise TimedOut(f"no text within {timeout} s")
            return self._deltas[position:]


class _Caller:
    """A watcher that calls back with each delta once, whichever thread tells it first."""

    def __init__(self, deltas: list[Delta], callback: Callable[[Delta], None]) -> None:
        self._deltas = deltas
        self._callback = callback
        self._position = 0
        self._lock = threading.RLock()

    def __call__(self) -> None:
        with self._lock:
            while self._position < len(self._deltas):
                self._position += 1
                _guarded(self._callback, self._deltas[self._position - 1])


# ---------------------------------------------------------------------------------------------------------------
# The protocol
# ---------------------------------------------------------------------------------------------------------------


@runtime_checkable
class Branch(Protocol):
    """A place in the runtime: the token ids so far, their path in the tree locked while the branch is open."""

    @property
    def token_ids(self) -> Sequence[int]: ...


class Backend(Protocol):
    """What runs programs. A branch is used by one caller at a time; different branches may run at once.

    `Delta in`: every method that takes `delta` first appends that text to the branch, tokenized on its own, so
    nothing that was already there is tokenized again.
    """

    def info(self) -> BackendInfo: ...

    def open(self, *, namespace: str = "") -> Branch:
        """A new, empty branch. Branches of different namespaces share no cache."""
        ...

    def fork(self, branch: Branch) -> Branch:
        """A second handle on the same text, in O(1)."""
        ...

    def close(self, branch: Branch) -> None:
        """Unlock the branch's path. Closing twice is allowed. Running work of the branch is cancelled."""
        ...

    def append(self, branch: Branch, delta: Sequence[Segment]) -> None:
        """Add text without generating."""
        ...

    def generate(self, branch: Branch, delta: Sequence[Segment], params: SamplingParams) -> Generation:
        """Add text, then generate. When it is done the branch ends with the first output's text (stop strings and
        end tokens left out). Raises RequestError, ConstraintError or CapacityError at once where it can tell."""
        ...

    def score(
        self,
        branch: Branch,
        delta: Sequence[Segment],
        continuations: Sequence[str],
        *,
        heal: bool = False,
        unconditional: bool = False,
    ) -> Pending[tuple[Score, ...]]:
        """Add text, then score each continuation on it, all in one request. The branch does not move.

        With `heal`, the text's last tokens are cut anew with each continuation where one of them would merge with
        them, and those from the first that differs on are scored as part of it. With `unconditional`, the same tokens
        are scored with no text before them, too: those scores stand behind the others, in the same order."""
        ...

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        """The model's own chat template over `messages`; template text and contents in one string.

        Raises:
            UnsupportedByBackend: the model has no chat template.
        """
        ...

    def usage(self) -> Mapping[str, float]:
        """Counters since the start: prefilled, cached, generated tokens; pages free, in the tree, held."""
        ...


@runtime_checkable
class OffersTools(Protocol):
    """What a backend has beside `Backend` where its model was trained to call tools."""

    def call_format(self) -> CallFormat:
        """How this model writes calls.

        Raises:
            UnsupportedByBackend: its chat template has no form for them that we know.
        """
        ...

    def reasoning_markers(self) -> tuple[str, str] | None:
        """What stands before and behind this model's reasoning; None where it has no tokens for it."""
        ...

    def render_with_tools(
        self, messages: Sequence[Message], tools: Sequence[Tool], *, add_generation_prompt: bool
    ) -> str:
        """As `Backend.render`, with the tools told to the model. Raises as `call_format`."""
        ...
