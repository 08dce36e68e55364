"""The calls of a state: a gen or a select is sent on its branch, and what comes back is noted.

At most one call runs at a time; the backend's callback, on whatever thread it comes, records the result and runs on.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import cast

from niwaki.lang.backends import Lease
from niwaki.lang.clock import Alarm, Countdown, clock
from niwaki.lang.history import Called, History, num_tokens
from niwaki.lang.meta import Selected, usage_of
from niwaki.lang.nodes import Gen, Select, reasoning_name
from niwaki.lang.origin import Origin, add_origin
from niwaki.lang.place import Place
from niwaki.lang.reading import Reading
from niwaki.lang.run import Run
from niwaki.lang.tools import Ask, Call
from niwaki.lang.transcript import Span
from niwaki.lang.types import schema_type
from niwaki.lang.waiting import parsing
from niwaki.runtime.api import (
    AsksForReaders,
    Backend,
    Branch,
    Delta,
    Generation,
    GenerationError,
    JsonSchema,
    Output,
    Pending,
    Regex,
    SamplingOptions,
    SamplingParams,
    Score,
    Segment,
    TimedOut,
)
from niwaki.runtime.api.choices import decided
from niwaki.runtime.api.readiness import readiness

log = logging.getLogger("niwaki.lang")


@dataclass(eq=False, slots=True)
class Active:
    """What the executor waits for: a call with its pendings, the marks of a join, or another state's text."""

    origin: Origin
    pending: tuple[Pending[tuple[Output, ...]] | Pending[tuple[Score, ...]], ...] = ()
    marks_left: int = 0
    is_streaming: bool = False
    streamed: list[str] = field(default_factory=list)  # the text that deltas brought
    num_streamed: int = 0  # tokens
    textless: list[Delta] = field(default_factory=list)  # tokens that have shown no text yet
    alarm: Alarm | None = None
    since: float = field(default_factory=readiness.clock)


class Calling(Reading):
    """A state that can call its backend. Whoever runs its steps calls; one thread at a time."""

    def __init__(self, run: Run, *, is_fork: bool) -> None:
        super().__init__(run, is_fork=is_fork)
        self._active: Active | None = None
        self._is_streaming = False
        self._place = Place()
        # What happened, for whoever wants to see it: nothing here reads it back.
        self.history = History(run.program) if is_fork else run.history

    @abstractmethod
    def fail(self, error: BaseException, origin: Origin | None = None) -> None:
        """End the state."""

    @abstractmethod
    def abort(self, error: BaseException) -> None:
        """`fail`, for this state and for all that were forked from it."""

    @abstractmethod
    def _pump(self) -> None:
        """Run the steps that can run."""

    # -- streaming ----------------------------------------------------------------------------------------------------

    def _start_streaming(self) -> None:
        """Ask for deltas, also those of a generation that runs already."""
        with self._lock:
            self._is_streaming = True
            active = self._active
            if active is None or active.is_streaming:
                return
            active.is_streaming = True
        # Without the lock: a generation calls back while holding its own.
        for pending in active.pending:
            if isinstance(pending, Generation):
                pending.add_delta_callback(partial(self._on_delta, active))

    # -- generating ---------------------------------------------------------------------------------------------------

    def _generate(self, node: Gen, origin: Origin) -> None:
        backend = self.run.backend
        params = self.params_of(node)
        branch, delta = self._branch_and_delta(backend)
        call = self.history.calls(node, params, branch, origin)
        if self._is_streaming and isinstance(backend, AsksForReaders):
            generation = backend.generate_read(branch, delta, params)
        else:
            generation = backend.generate(branch, delta, params)
        call.end = num_tokens(branch)
        with self._lock:
            self._place.all_sent()
            dtype = node.dtype if node.ask is None else None  # beside calls and reasoning the text is not the value
            span = Span(len(self._made.chunks), dtype=dtype, fills=params.n == 1)
            if node.name is not None:
                self._made.spans[node.name] = span
            is_streaming = self._is_streaming  # from here on `_start_streaming` asks for the deltas of `active`
            active = Active(origin, (generation,), is_streaming=is_streaming)
            has_failed = self._error is not None
            if not has_failed:
                self._active = active
                self._changed.notify_all()
        if has_failed:  # cancelled while it was being sent
            generation.cancel()
            return
        self._set_alarm(active, node)
        if is_streaming:
            generation.add_delta_callback(partial(self._on_delta, active))
        generation.add_done_callback(partial(self._on_generated, active, generation, node, span, call))

    def params_of(self, node: Gen) -> SamplingParams:
        """The node's options over the run's, over the model's own, over the defaults; with the type's constraint."""
        if self.run.remaining() == 0.0:
            raise self.run.timed_out()
        backend = self.run.backend
        info = backend.info()
        options = node.options.over(self.run.defaults)
        if node.type is None:
            params = options.resolve()
            return params if node.ask is None else self._asked(node.ask, params, backend)
        kind = node.type
        # A stop that ends a bare number would end a call, too: beside calls and reasoning it is the schema's.
        is_other = not info.knows_patterns or (node.ask is not None and bool(kind.stop))
        if isinstance(kind.constraint, Regex) and node.dtype is not None and is_other:
            kind = schema_type(cast("type", node.dtype))
        said = (options.stop,) if isinstance(options.stop, str) else tuple(options.stop or ())
        stop = tuple(dict.fromkeys((*said, *kind.stop)))
        params = replace(options, constraint=kind.constraint, stop=stop or None).resolve()
        return params if node.ask is None else self._asked(node.ask, params, backend)

    def _asked(self, ask: Ask, params: SamplingParams, backend: Backend) -> SamplingParams:
        before = self._made.chunks[-1] if self._made.chunks else ""
        return replace(params, constraint=ask.constraint(backend, params.constraint, params.max_new_tokens, before))

    def _on_delta(self, active: Active, delta: Delta) -> None:
        with self._lock:
            if self._active is not active:
                return
            active.num_streamed += len(delta.token_ids)
            active.textless.append(delta)
            if delta.text:
                active.streamed.append(delta.text)
                self._append_piece(delta.text, active)
                self._changed.notify_all()

    def _on_generated(self, active: Active, generation: Generation, node: Gen, span: Span, call: Called) -> None:
        self._stop_alarm(active)
        try:
            outputs = generation.result(0)
            with parsing():
                answers = [_value(output, node, self.run.backend) for output in outputs]
            values = [answer.value for answer in answers]
            shorter = _kind_of_shorter(node, outputs, values)
            with self._lock:
                if self._active is not active:
                    return
                marks = () if node.ask is None else node.ask.marks(self.run.backend)
                self._take_output(active, outputs[0], span, marks)
                self.history.answered(call, outputs)
                self._made.usage = self._made.usage.plus(usage_of(outputs))
                if shorter is not None:
                    self.run.shortened[active.origin.place if node.name is None else node.name] = None
                if node.name is not None:
                    self._made.record(node.name, values[0] if len(values) == 1 else values, outputs)
                    if node.ask is not None and node.ask.reasoning:
                        reasons = [answer.reasoning for answer in answers]
                        name = reasoning_name(node.name)
                        self._made.assign(name, reasons[0] if len(reasons) == 1 else reasons)
                        self._expected[name] -= 1
                    self._expected[node.name] -= 1
                self._active = None
                self._changed.notify_all()
            _tell_of_cut(node, outputs, shorter, active.origin)
        except BaseException as error:  # nothing may escape into the backend's thread
            self.fail(error, active.origin)
        self._pump()

    def _take_output(self, active: Active, output: Output, span: Span, marks: tuple[str, ...]) -> None:
        """The text of the first output, less what deltas brought already. The branch holds it by itself."""
        streamed = "".join(active.streamed)
        if not output.text.startswith(streamed):
            raise GenerationError(f"the backend streamed {streamed!r} and then ended with {output.text!r}")
        if len(output.text) > len(streamed):
            rest, seen = output.text[len(streamed) :], active.num_streamed
            tokens = output.token_ids[seen:], output.logprobs[seen:], tuple(output.top_logprobs[seen:])
            active.textless.append(Delta(rest, *tokens))
            self._append_piece(rest, active)
        span.end = len(self._made.chunks)
        self._place.add_generated(output.text, marks)

    def _append_piece(self, text: str, active: Active) -> None:
        self._made.write_generated(text, tuple(active.textless))
        active.textless = []

    # -- selecting ----------------------------------------------------------------------------------------------------

    def _score(self, node: Select, origin: Origin) -> None:
        if self.run.remaining() == 0.0:
            raise self.run.timed_out()
        backend = self.run.backend
        branch, delta = self._branch_and_delta(backend)
        params = self.draws_of(node)
        call = self.history.calls(node, params, branch, origin)
        alone = node.method.needs_unconditional
        scoring = backend.score(branch, delta, node.choices, heal=self.heals(node), unconditional=alone)
        call.end = num_tokens(branch)
        active = Active(origin, (scoring,))
        with self._lock:
            self._place.all_sent()
            has_failed = self._error is not None
            if not has_failed:
                self._active = active
        if has_failed:
            scoring.cancel()
            return
        self._set_alarm(active, node)
        scoring.add_done_callback(partial(self._on_scored, active, scoring, node, call))

    def as_select(self, node: Gen) -> Select | None:
        """What answers the gen where the backend scores whole values; None: it is generated."""
        select = node.as_select()
        return select if select is not None and self.run.backend.info().scores else None

    def draws_of(self, node: Select) -> SamplingParams | None:
        """How values are drawn; None: the best choice is taken."""
        if node.gen is None:
            return None
        options = node.gen.options.over(self.run.defaults)
        said = {name: getattr(options, name) for name in ("temperature", "top_p", "top_k", "min_p", "seed", "n")}
        params = SamplingOptions(**said).resolve()
        return None if params.is_greedy and params.n == 1 else params

    def heals(self, node: Select) -> bool:
        return self.run.options.heal is not False if node.heal is None else node.heal

    def _on_scored(self, active: Active, scoring: Pending[tuple[Score, ...]], node: Select, call: Called) -> None:
        self._stop_alarm(active)
        try:
            told, count = scoring.result(0), len(node.choices)
            scores = told[:count]
            decision = decided(node.method, scores, told[count:], call.params)
            choice = node.choices[decision.index]
            values = [_chosen(node, index) for index in decision.drawn or (decision.index,)]
            with self._lock:
                if self._active is not active:
                    return
                self._made.write(choice)
                self._place.add([Segment(choice)])
                possible = tuple(_chosen(node, index) for index in range(count))
                outcome = Selected(node.choices, possible, scores, decision)
                self.history.answered(call, outcome)
                self._made.usage = self._made.usage.plus(usage_of(outcome))
                if node.name is not None:
                    self._made.spans[node.name] = Span(len(self._made.chunks) - 1, len(self._made.chunks))
                    self._made.record(node.name, values[0] if len(values) == 1 else values, outcome)
                    self._expected[node.name] -= 1
                self._active = None
                self._changed.notify_all()
        except BaseException as error:  # nothing may escape into the backend's thread
            self.fail(error, active.origin)
        self._pump()

    # -- a call's own time --------------------------------------------------------------------------------------------

    def _set_alarm(self, active: Active, node: Gen | Select) -> None:
        if node.timeout is not None:
            active.alarm = clock.at_end_of(Countdown(node.timeout), self._end_late_call, active, node)

    def _stop_alarm(self, active: Active) -> None:
        if active.alarm is not None:
            active.alarm.cancel()

    def _end_late_call(self, active: Active, node: Gen | Select) -> None:
        """A gen's own time is over."""
        with self._lock:
            if self._active is not active:
                return
        kind = "gen" if isinstance(node, Gen) or node.gen is not None else "select"
        what = f"a {kind}" if node.name is None else f"{kind} {node.name!r}"
        error = TimedOut(
            f"{what} was not done within its timeout of {node.timeout} s; give it more time or fewer tokens"
        )
        add_origin(error, self.run.program, active.origin)
        self.abort(error)

    # -- the branch ---------------------------------------------------------------------------------------------------

    def _flush(self) -> Branch:
        backend = self.run.backend
        branch, delta = self._branch_and_delta(backend)
        if delta:
            position = num_tokens(branch)
            backend.append(branch, delta)
            self.history.sent(position, branch)
        with self._lock:
            self._place.all_sent()
        return branch

    def _branch_and_delta(self, backend: Backend) -> tuple[Branch, tuple[Segment, ...]]:
        """The branch, opened where there is none, and the text that it does not hold yet."""
        with self._lock:
            lease = self._place.lease
        if lease is None:
            lease = Lease(backend, self.run.open())
            with self._lock:
                if self._error is not None:
                    raise self._error
                self._place.hold(lease)
        return lease.branch, self._place.unsent()


_lines_told: set[Origin] = set()


def _tell_of_cut(node: Gen, outputs: Sequence[Output], shorter: str | None, origin: Origin) -> None:
    """Warn, once for each line of a program, that the budget ended a text: one that breaks its constraint, or a value
    (`shorter` says what it is) that is valid and may not be all that the model had to say."""
    cut = [output for output in outputs if output.finish_reason.type == "length"]
    if not cut or origin in _lines_told:
        return
    num_tokens = max(output.completion_tokens for output in cut)
    if node.type is not None and not all(output.complete for output in cut):
        fault = f"used up its {_tokens(num_tokens)} before its text satisfied the {node.type.name}"
    elif shorter is not None:
        fault = (
            f"came to the end of its {_tokens(num_tokens)}: its {shorter} is valid, and may be shorter than the "
            "model wanted"
        )
    else:
        return
    _lines_told.add(origin)
    name = "a gen" if node.name is None else f"gen {node.name!r}"
    log.warning(f"{origin}: {name} {fault}; give it a larger max_tokens (told once for a line)")


def _tokens(count: int) -> str:
    return f"{count} {'token' if count == 1 else 'tokens'}"


def _kind_of_shorter(node: Gen, outputs: Sequence[Output], values: Sequence[object]) -> str | None:
    """What a budget made shorter, where nothing in it shows that. Numbers end with their budgets in many programs, and
    regexes and grammars are the author's own."""
    if not any(output.finish_reason.type == "length" and output.complete for output in outputs):
        return None
    if any(isinstance(one, Call) for value in values for one in (value if isinstance(value, list) else [value])):
        return "call"
    if node.type is None or node.dtype in (int, float):
        return None
    return node.type.name if node.dtype is not None or isinstance(node.type.constraint, JsonSchema) else None


@dataclass(frozen=True, slots=True)
class Value:
    """What a variable gets, and the reasoning before it."""

    value: object
    reasoning: str = ""


def _chosen(node: Select, index: int) -> object:
    text = node.choices[index]
    return text if node.gen is None or node.gen.type is None else node.gen.type.parse(text)


def _value(output: Output, node: Gen, backend: Backend) -> Value:
    """The value that the variable gets.

    Raises:
        GenerationError: the text cannot be read as the type. A constraint excludes it, unless the budget ran out.
    """
    if node.type is None and node.ask is None:
        return Value(output.text)
    try:
        if node.ask is None:
            assert node.type is not None
            return Value(node.type.parse(output.text))
        answer = node.ask.read(output.text, backend, is_either=node.type is not None)
        if not answer.is_whole:
            raise GenerationError("it ends inside a call or inside the reasoning")
        if answer.calls:
            return Value(node.ask.calls(answer), answer.reasoning)
        if node.type is not None:
            return Value(node.type.parse(answer.content), answer.reasoning)
        return Value(answer.content if node.ask.separates else output.text, answer.reasoning)
    except Exception as error:
        kind = "call" if node.type is None else node.type.name
        name = "a gen" if node.name is None else f"gen {node.name!r}"
        if output.finish_reason.type == "length":
            raise GenerationError(
                f"{name} used up its {_tokens(output.completion_tokens)} before its {kind} was complete "
                f"({output.text!r}); give it a larger max_tokens"
            ) from error
        if not output.complete:
            raise GenerationError(
                f"{name} was stopped at {output.finish_reason.matched!r} before its {kind} was complete "
                f"({output.text!r}); give it a stop that the {kind} cannot hold"
            ) from error
        raise GenerationError(f"{name} generated {output.text!r}, which {kind} refuses: {error}") from error
