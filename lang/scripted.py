"""A backend that answers from a script: for tests of programs, without a model.

It keeps branches, tokens, budgets, stops and constraints as a real backend does, so a program that misuses one of
them fails here too. A token is a word with the blank before it, a run of blanks, or one other character.
"""

from __future__ import annotations

import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

from niwaki.lang.scripted_answers import Answers, Script, check_constraint, offered
from niwaki.runtime.api import (
    BackendInfo,
    Branch,
    CallFormat,
    Cancelled,
    ConstraintError,
    Delta,
    EngineStopped,
    FinishReason,
    Generation,
    Message,
    Output,
    Pending,
    ProgramError,
    SamplingOptions,
    SamplingParams,
    Score,
    Segment,
    TokenLogprob,
    Tool,
)
from niwaki.runtime.api.calls import NIWAKI, REASONING_MARKERS

TOKEN_LOGPROB = -0.1  # of each token of an answer
CHOSEN_LOGPROB = -1e-12  # of each token of the choice that the script names: so certain that a draw gives it, too
OTHER_LOGPROB = -100.0

_TOKEN = re.compile(r" ?\w+|\s+|[^\w\s]")


@dataclass(frozen=True, slots=True)
class Call:
    """One call that a program made: the whole prompt, and what was asked of it."""

    kind: Literal["generate", "score"]
    prompt: str
    params: SamplingParams | None = None
    choices: tuple[str, ...] = ()


class _Unread:
    """The first `length` tokens of several branches, appended but read by no call yet. The first to come reads them."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.is_read = False


class ScriptedBranch:
    """A place in a scripted backend. Made by `ScriptedBackend`."""

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        self.text = ""
        self.ids: list[int] = []
        self.num_cached = 0  # tokens that an earlier call, or the branch this one was forked from, has seen
        self.unread: tuple[_Unread, ...] = ()
        self.is_closed = False
        self.running: list[Generation] = []

    @property
    def token_ids(self) -> Sequence[int]:
        return tuple(self.ids)

    @property
    def num_tokens(self) -> int:
        return len(self.ids)


class ScriptedBackend:
    """Answers every generation and every select from `script`.

    A script is one of these:

    - a mapping. The first key answers that the prompt ends with (a string) or that is found in it (a compiled regex);
      a list of answers is used up one by one;
    - a sequence: answers in the order of the calls;
    - a function from the prompt to the answer.

    An answer is a text; a value (a model, a dict, a number), which becomes its compact JSON; a function from the prompt
    to either; or an exception, with which the call fails. To answer with a list, put it into a list of answers. If
    tools are offered, a dict with one's `name` and `arguments`, or a list of such dicts, is a call. For a select, the
    answer is the choice. An answer that the call's constraint excludes is an error.

    `defaults` are options that a program may override, as a model's generation_config would have them. With `threads`
    above 0 answers come from that many threads, which wait `delay` seconds (a number, or a function that draws one)
    before every token. With 0 they are there when the call returns.
    """

    def __init__(
        self,
        script: Script = (),
        *,
        defaults: SamplingOptions | None = None,
        context_length: int = 1_000_000,
        threads: int = 0,
        delay: float | Callable[[], float] = 0.0,
    ) -> None:
        self.calls: list[Call] = []
        self._script = Answers(script)
        self._info = BackendInfo("scripted", context_length, defaults or SamplingOptions())
        self._delay = delay
        self._num_threads = threads
        self._vocabulary: dict[str, int] = {}
        self._open: set[ScriptedBranch] = set()
        self._usage = {"prefilled_tokens": 0.0, "cached_tokens": 0.0, "generated_tokens": 0.0}
        self._is_stopped = False
        self._begin()
        _all.add(self)

    def _begin(self) -> None:
        """Also in a fork, which has no threads of its parent: what those were to answer, nobody answers there."""
        self._lock = threading.Lock()  # calls, vocabulary, branches, counters
        self._script.begin()
        count = self._num_threads
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="niwaki-scripted") if count else None

    # -- the protocol -------------------------------------------------------------------------------------------------

    def info(self) -> BackendInfo:
        return self._info

    def open(self, *, namespace: str = "") -> ScriptedBranch:
        return self._keep(ScriptedBranch(namespace))

    def fork(self, branch: Branch) -> ScriptedBranch:
        own = self._own(branch)
        copy = ScriptedBranch(own.namespace)
        if own.num_cached < len(own.ids):
            own.unread = (*own.unread, _Unread(len(own.ids)))
        copy.text, copy.ids, copy.num_cached, copy.unread = own.text, list(own.ids), own.num_cached, own.unread
        return self._keep(copy)

    def close(self, branch: Branch) -> None:
        if not isinstance(branch, ScriptedBranch):
            raise ProgramError(f"not a branch of this backend: {branch!r}")
        with self._lock:
            branch.is_closed = True
            self._open.discard(branch)
            running = tuple(branch.running)
        for generation in running:
            generation.cancel()

    def append(self, branch: Branch, delta: Sequence[Segment]) -> None:
        self._extend(self._own(branch), delta)

    def generate(self, branch: Branch, delta: Sequence[Segment], params: SamplingParams) -> Generation:
        own = self._own(branch)
        self._extend(own, delta)
        with self._lock:
            self.calls.append(Call("generate", own.text, params))
            num_cached = self._prefill(own)
        stopping = threading.Event()
        generation = Generation(cancel=stopping.set)
        own.running.append(generation)
        generation.add_done_callback(lambda: own.running.remove(generation))
        prompt, num_prompt = own.text, len(own.ids)

        def work() -> None:
            try:
                outputs = tuple(self._answer(prompt, params, num_prompt, num_cached) for _ in range(params.n))
                self._play(generation, outputs[0], stopping)
                self._extend(own, [Segment(outputs[0].text)])
                with self._lock:
                    own.num_cached = len(own.ids)
                    self._usage["generated_tokens"] += sum(output.completion_tokens for output in outputs)
                generation.succeed(outputs)
            except BaseException as error:  # whatever it is, somebody waits for it
                generation.fail(error)

        self._start(work)
        return generation

    def score(
        self,
        branch: Branch,
        delta: Sequence[Segment],
        continuations: Sequence[str],
        *,
        heal: bool = False,
        unconditional: bool = False,
    ) -> Pending[tuple[Score, ...]]:
        own = self._own(branch)
        self._extend(own, delta)
        with self._lock:
            self.calls.append(Call("score", own.text, choices=tuple(continuations)))
            num_cached = self._prefill(own)
        scoring: Pending[tuple[Score, ...]] = Pending(
            cancel=lambda: scoring.fail(Cancelled("the select was cancelled"))
        )
        prompt, num_prompt = own.text, len(own.ids)

        def work() -> None:
            try:
                self._wait(threading.Event())
                chosen = self._script.answer(prompt)
                if chosen not in continuations:
                    raise ConstraintError(
                        f"the scripted answer {chosen!r} is none of the choices {list(continuations)!r}"
                    )
                scores = [self._score_of(text, text == chosen, num_prompt, num_cached) for text in continuations]
                if unconditional:  # with no text before them nothing tells the choices apart
                    scores += [self._score_of(text, False, 0, 0) for text in continuations]
                scoring.succeed(tuple(scores))
            except BaseException as error:  # whatever it is, somebody waits for it
                scoring.fail(error)

        self._start(work)
        return scoring

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        turns = "".join(f"<|{message.role}|>\n{message.content}<|end|>\n" for message in messages)
        return turns + ("<|assistant|>\n" if add_generation_prompt else "")

    def call_format(self) -> CallFormat:
        return NIWAKI

    def reasoning_markers(self) -> tuple[str, str] | None:
        return REASONING_MARKERS[0]

    def render_with_tools(
        self, messages: Sequence[Message], tools: Sequence[Tool], *, add_generation_prompt: bool
    ) -> str:
        listed = "".join(f"{tool.name}: {tool.description}\n" for tool in tools)
        turns = self.render(messages, add_generation_prompt=add_generation_prompt)
        return f"<|tools|>\n{listed}<|end|>\n{turns}"

    def usage(self) -> Mapping[str, float]:
        with self._lock:
            return dict(self._usage)

    # -- what an engine has beside it ---------------------------------------------------------------------------------

    @property
    def num_open_branches(self) -> int:
        """0 when every state that ran here is gone."""
        with self._lock:
            return len(self._open)

    def flush_cache(self) -> bool:
        """There is no cache to keep."""
        return True

    def get_server_info(self) -> Mapping[str, object]:
        return {"model": self._info.model, "context_length": self._info.context_length, **self.usage()}

    def shutdown(self) -> None:
        """End the threads. Later calls fail with EngineStopped."""
        self._is_stopped = True
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=False)

    # -- branches and tokens ------------------------------------------------------------------------------------------

    def _keep(self, branch: ScriptedBranch) -> ScriptedBranch:
        if self._is_stopped:
            raise EngineStopped("the scripted backend was shut down")
        with self._lock:
            self._open.add(branch)
        return branch

    def _own(self, branch: Branch) -> ScriptedBranch:
        if self._is_stopped:
            raise EngineStopped("the scripted backend was shut down")
        if not isinstance(branch, ScriptedBranch):
            raise ProgramError(f"not a branch of this backend: {branch!r}")
        if branch.is_closed:
            raise ProgramError("the branch is closed")
        return branch

    def _extend(self, branch: ScriptedBranch, delta: Sequence[Segment]) -> None:
        for segment in delta:
            branch.text += segment.text
            branch.ids += self._ids(segment.text)

    def _ids(self, text: str) -> tuple[int, ...]:
        with self._lock:
            return tuple(self._vocabulary.setdefault(piece, len(self._vocabulary)) for piece in _TOKEN.findall(text))

    def _prefill(self, branch: ScriptedBranch) -> int:
        """Count the tokens that are new. Returns how many were there before. With the lock held."""
        num_cached = max(branch.num_cached, *(shared.length for shared in branch.unread if shared.is_read), 0)
        for shared in branch.unread:
            shared.is_read = True
        branch.unread = ()
        self._usage["cached_tokens"] += num_cached
        self._usage["prefilled_tokens"] += len(branch.ids) - num_cached
        branch.num_cached = len(branch.ids)
        return num_cached

    # -- answers ------------------------------------------------------------------------------------------------------

    def _start(self, work: Callable[[], None]) -> None:
        if self._pool is None:
            work()
        else:
            self._pool.submit(work)

    def _wait(self, stopping: threading.Event) -> None:
        seconds = self._delay() if callable(self._delay) else self._delay
        if seconds:
            stopping.wait(seconds) if self._pool is not None else time.sleep(seconds)
        if stopping.is_set():
            raise Cancelled("the generation was cancelled")

    def _play(self, generation: Generation, output: Output, stopping: threading.Event) -> None:
        """Push the text token by token."""
        self._wait(stopping)
        for i, piece in enumerate(_TOKEN.findall(output.text)):
            generation.push(Delta(piece, self._ids(piece), output.logprobs[i : i + 1]))
            self._wait(stopping)

    def _answer(self, prompt: str, params: SamplingParams, num_prompt: int, num_cached: int) -> Output:
        text = ""
        if params.max_new_tokens:  # else it was asked to read the prompt
            text = self._script.answer(prompt, offered(params))
            check_constraint(text, params)
        early = len("".join(_TOKEN.findall(text)[: params.min_tokens]))  # characters in which no stop ends
        found = [(text.find(stop, max(0, early - len(stop) + 1)), stop) for stop in params.stop]
        at, stop = min(((at, stop) for at, stop in found if at >= 0), default=(len(text), None))
        text, reason = text[:at], FinishReason("stop", stop)
        pieces = _TOKEN.findall(text)
        is_cut = len(pieces) > params.max_new_tokens
        if is_cut:
            pieces = pieces[: params.max_new_tokens]
            text, reason = "".join(pieces), FinishReason("length")
        ids = self._ids(text)
        logprobs = tuple(TokenLogprob(TOKEN_LOGPROB, i, piece) for i, piece in zip(ids, pieces, strict=True))
        return Output(
            text,
            ids,
            reason,
            num_prompt,
            num_cached,
            complete=not (is_cut and params.constraint is not None),
            logprobs=logprobs if params.return_logprob else (),
        )

    def _score_of(self, text: str, is_chosen: bool, num_prompt: int, num_cached: int) -> Score:
        logprob = CHOSEN_LOGPROB if is_chosen else OTHER_LOGPROB
        pieces = _TOKEN.findall(text)
        tokens = tuple(TokenLogprob(logprob, i, piece) for i, piece in zip(self._ids(text), pieces, strict=True))
        return Score(text, tokens, num_prompt, num_cached)


def _begin_in_child() -> None:
    for backend in tuple(_all):
        backend._begin()


_all: weakref.WeakSet[ScriptedBackend] = weakref.WeakSet()
if hasattr(os, "register_at_fork"):  # where processes can be forked
    os.register_at_fork(after_in_child=_begin_in_child)
