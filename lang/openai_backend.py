"""`OpenAI`: the backend of programs whose model is behind any OpenAI-compatible service. Text goes in, text comes out.

The official client does the sending, on one event loop of one thread, however many calls are under way. There are no
branches on the other side: each call sends its whole text.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar, cast

from niwaki.lang.openai_wire import (
    Api,
    Ask,
    Json,
    Used,
    ask_of,
    logprobs_of,
    output_of,
    prompt_of,
    rendered,
    used_of,
)
from niwaki.runtime.api import (
    BackendInfo,
    Branch,
    Cancelled,
    CapacityError,
    ConfigError,
    Delta,
    EngineStopped,
    Generation,
    GenerationError,
    Message,
    NiwakiError,
    Output,
    Pending,
    ProgramError,
    RequestError,
    SamplingParams,
    Score,
    Segment,
    TimedOut,
    UnsupportedByBackend,
)

if TYPE_CHECKING:
    from openai import AsyncOpenAI

T = TypeVar("T")


class Cancellable(Protocol):
    def cancel(self) -> None: ...


class TextBranch:
    """A text so far. Made by `OpenAI`."""

    __slots__ = ("running", "segments")

    def __init__(self, segments: Sequence[Segment] = ()) -> None:
        self.segments = list(segments)
        self.running: list[Cancellable] = []

    @property
    def token_ids(self) -> Sequence[int]:
        raise UnsupportedByBackend("OpenAI's API tells no token ids")


class OpenAI:
    """An OpenAI-compatible service as a backend: `program.run(..., backend=OpenAI("gpt-4.1-mini"))`.

    - `api="chat"` (the default) sends turns to /chat/completions: each gen must be a whole assistant turn.
    - `api="completions"` sends plain text to /completions, and can select if the service echoes log-probabilities.
    - `extensions=True` is for services with the fields that niwaki's server adds (regex, choices, grammar, top_k, ...).
    - Without an `api_key` the client takes OPENAI_API_KEY from the environment.
    - `timeout` is that of one request, in seconds.

    What the API cannot do raises UnsupportedByBackend before anything is sent.

    Raises:
        ConfigError: the client is not installed (`pip install 'niwaki[openai]'`), or has no key.
    """

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        api: Api = "chat",
        extensions: bool = False,
        timeout: float = 600.0,
        max_retries: int = 2,
        context_length: int = 128_000,
    ) -> None:
        if api not in ("chat", "completions"):
            raise ConfigError(f"api must be 'chat' or 'completions', got {api!r}")
        try:
            import openai  # heavy, and an extra
        except ModuleNotFoundError:
            raise ConfigError("OpenAI(...) needs the client openai; install niwaki[openai]") from None
        try:
            self._new_client = partial(
                openai.AsyncOpenAI, api_key=api_key, base_url=base_url, timeout=timeout, max_retries=max_retries
            )
            self._client: AsyncOpenAI = self._new_client()
        except openai.OpenAIError as error:
            raise ConfigError(f"OpenAI(...): {error}") from None
        self._model = model
        self._api = api
        self._extensions = extensions
        self._info = BackendInfo(model, context_length, knows_patterns=extensions, scores=False)
        self._used = dict.fromkeys(("prefilled_tokens", "cached_tokens", "generated_tokens", "requests"), 0.0)
        self._is_shut_down = False
        self._begin()
        _all.add(self)

    def _begin(self, *, is_in_child: bool = False) -> None:
        """Also in a fork: the loop's thread and the client's connections are its parent's."""
        self._lock = threading.Lock()  # the loop, and the counters
        self._loop: asyncio.AbstractEventLoop | None = None
        self._has_parents_client = is_in_child

    def __repr__(self) -> str:
        return f"OpenAI({self._model!r} at {self._client.base_url})"

    # -- the protocol -----------------------------------------------------------------------------------------------

    def info(self) -> BackendInfo:
        return self._info

    def open(self, *, namespace: str = "") -> TextBranch:
        return TextBranch()

    def fork(self, branch: Branch) -> TextBranch:
        return TextBranch(_own(branch).segments)

    def close(self, branch: Branch) -> None:
        for pending in tuple(_own(branch).running):
            pending.cancel()

    def append(self, branch: Branch, delta: Sequence[Segment]) -> None:
        _own(branch).segments.extend(delta)

    def generate(self, branch: Branch, delta: Sequence[Segment], params: SamplingParams) -> Generation:
        own = _own(branch)
        ask = ask_of(self._model, self._api, [*own.segments, *delta], params, extensions=self._extensions)
        own.segments.extend(delta)
        running = _Running()
        generation = Generation(running.cancel)

        async def answer() -> tuple[Output, ...]:
            outputs = await (self._stream(ask, generation) if ask.is_streamed else self._ask(ask))
            own.segments.append(Segment(outputs[0].text))
            return outputs

        self._start(own, generation, running, answer)
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
        own = _own(branch)
        if self._api == "chat":
            raise UnsupportedByBackend(
                "select compares log-probabilities, which OpenAI's chat API does not give for a prompt; use "
                "gen(dtype=Literal[...]), or OpenAI(..., api='completions') where the service echoes them"
            )
        own.segments.extend(delta)
        running = _Running()
        pending: Pending[tuple[Score, ...]] = Pending(running.cancel)
        prompt = prompt_of(own.segments)

        async def answer() -> tuple[Score, ...]:
            scores = await self._echo(prompt, continuations)
            # The service cuts prompt and choice as one text: what is scored alone are the tokens that it made.
            return scores + await self._echo("", [score.text for score in scores]) if unconditional else scores

        self._start(own, pending, running, answer)
        return pending

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        if self._api != "chat":
            raise UnsupportedByBackend("chat turns need OpenAI's chat API: leave out api='completions'")
        return rendered(messages, add_generation_prompt=add_generation_prompt)

    def usage(self) -> Mapping[str, float]:
        with self._lock:
            return dict(self._used)

    def shutdown(self) -> None:
        """Cancel what runs and end the thread. Calling it twice is allowed."""
        with self._lock:
            self._is_shut_down = True
            loop, self._loop = self._loop, None
        if loop is not None:
            asyncio.run_coroutine_threadsafe(self._close(), loop).result()
            loop.call_soon_threadsafe(loop.stop)

    # -- the loop -----------------------------------------------------------------------------------------------------

    def _start(
        self, branch: TextBranch, pending: Pending[T], running: _Running, work: Callable[[], Awaitable[T]]
    ) -> None:
        loop = self._running_loop()
        branch.running.append(pending)
        pending.add_done_callback(lambda: branch.running.remove(pending))
        future = asyncio.run_coroutine_threadsafe(self._tell(pending, work), loop)
        future.add_done_callback(lambda _: self._give_up(pending))
        running.cancel_by(future.cancel)

    async def _tell(self, pending: Pending[T], work: Callable[[], Awaitable[T]]) -> None:
        try:
            pending.succeed(await work())
        except Exception as error:  # whoever waits must be told, whatever it was
            pending.fail(self._reason(error))

    def _give_up(self, pending: Pending[T]) -> None:
        """The call is over: where it was not answered, it was cancelled, perhaps before it began."""
        if not pending.is_done:
            is_over = self._is_shut_down
            pending.fail(EngineStopped("the backend was shut down") if is_over else Cancelled("the call was cancelled"))

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._is_shut_down:
                raise EngineStopped(f"{self!r} was shut down")
            if self._loop is None:
                if self._has_parents_client:
                    self._client, self._has_parents_client = self._new_client(), False
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=_run, args=(self._loop,), name="niwaki-openai", daemon=True).start()
            return self._loop

    async def _close(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._client.close()

    # -- requests -----------------------------------------------------------------------------------------------------

    async def _post(self, api: Api, fields: Json, extra: Json) -> object:
        """The answer as the client reads it. Typed by nobody: what services really send is looked at field by field."""
        create: Callable[..., Awaitable[object]] = (
            self._client.chat.completions.create if api == "chat" else self._client.completions.create
        )
        return await create(**fields, extra_body=extra or None)

    async def _ask(self, ask: Ask) -> tuple[Output, ...]:
        began = time.perf_counter()
        answer = _plain(await self._post(ask.api, ask.fields, ask.extra))
        used = used_of(_mapping(answer.get("usage")))
        self._count(used)
        seconds = time.perf_counter() - began
        outputs = []
        for choice in _dicts(answer.get("choices")):
            text = choice.get("text") if ask.api == "completions" else _content(choice.get("message"))
            logprobs = logprobs_of(ask.api, _mapping(choice.get("logprobs")))
            outputs.append(output_of(ask, str(text or ""), _str(choice.get("finish_reason")), used, logprobs, seconds))
        if len(outputs) != ask.num_outputs:
            raise GenerationError(f"{self!r} gave {len(outputs)} answers instead of {ask.num_outputs}")
        return tuple(outputs)

    async def _stream(self, ask: Ask, generation: Generation) -> tuple[Output, ...]:
        began = time.perf_counter()
        told = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = cast("AsyncIterator[object]", await self._post(ask.api, {**ask.fields, **told}, ask.extra))
        deltas: list[Delta] = []
        finish: str | None = None
        used = Used()
        async for chunk in chunks:
            event = _plain(chunk)
            if event.get("usage"):
                used = used_of(_mapping(event.get("usage")))
            for choice in _dicts(event.get("choices")):
                finish = _str(choice.get("finish_reason")) or finish
                text = choice.get("text") if ask.api == "completions" else _content(choice.get("delta"))
                tokens, top = logprobs_of(ask.api, _mapping(choice.get("logprobs")))
                if text or tokens:
                    deltas.append(Delta(str(text or ""), (), tokens, top))
                    generation.push(deltas[-1])
        if finish is None:
            raise EngineStopped(f"{self!r} closed the connection before the answer ended")
        self._count(used)
        logprobs = (
            tuple(token for delta in deltas for token in delta.logprobs),
            tuple(top for delta in deltas for top in delta.top_logprobs),
        )
        text = "".join(delta.text for delta in deltas)
        return (output_of(ask, text, finish, used, logprobs, time.perf_counter() - began),)

    async def _echo(self, prompt: str, continuations: Sequence[str]) -> tuple[Score, ...]:
        """The log-probabilities of the tokens behind the prompt, as the service echoes them."""
        fields: Json = {"model": self._model, "prompt": [prompt + text for text in continuations]}
        fields |= {"max_tokens": 0, "echo": True, "logprobs": 0, "temperature": 0}
        answer = _plain(await self._post("completions", fields, {}))
        used = used_of(_mapping(answer.get("usage")))
        self._count(used)
        scores = []
        for text, choice in zip(continuations, _dicts(answer.get("choices")), strict=True):
            tokens, _ = logprobs_of("completions", _mapping(choice.get("logprobs")))
            begin, end, behind = 0, 0, []
            for token in tokens:
                end += len(token.text or "")
                if end > len(prompt):
                    behind.append(token)
                else:
                    begin = end
            if not behind:
                raise UnsupportedByBackend(f"{self!r} does not echo log-probabilities, which select needs")
            scores.append(Score((prompt + text)[begin:], tuple(behind), used.prompt // len(continuations), 0))
        return tuple(scores)

    def _count(self, used: Used) -> None:
        with self._lock:
            self._used["prefilled_tokens"] += used.prompt - used.cached
            self._used["cached_tokens"] += used.cached
            self._used["generated_tokens"] += used.generated
            self._used["requests"] += 1

    def _reason(self, error: Exception) -> NiwakiError:
        import openai  # loaded by now

        match error:
            case NiwakiError():
                return error
            case openai.APITimeoutError():
                return TimedOut(f"{self!r} did not answer in time")
            case openai.APIConnectionError():
                cause = error.__cause__ or error  # of a connection that was reset it says nothing but its name
                return EngineStopped(f"{self!r} cannot be reached: {str(cause) or type(cause).__name__}")
            case openai.APIStatusError(status_code=status, code=code) if status < 500 and status != 429:
                kind = CapacityError if code == "context_length_exceeded" else RequestError
                return kind(f"{self!r} refused the request ({status}): {error.message}")
            case _:
                return GenerationError(f"{self!r} failed: {error}")


class _Running:
    """How to cancel a call, known only once it has been handed to the loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_cancelled = False
        self._stop: Callable[[], object] | None = None

    def cancel_by(self, stop: Callable[[], object]) -> None:
        with self._lock:
            self._stop = stop
            is_late = self._is_cancelled
        if is_late:
            stop()

    def cancel(self) -> None:
        with self._lock:
            self._is_cancelled = True
            stop = self._stop
        if stop is not None:
            stop()


def _run(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_forever()
    loop.run_until_complete(loop.shutdown_asyncgens())
    while left := asyncio.all_tasks(loop):  # they close generators that the client left half way
        loop.run_until_complete(asyncio.wait(left))
    loop.close()


def _own(branch: Branch) -> TextBranch:
    if not isinstance(branch, TextBranch):
        raise ProgramError(f"this branch belongs to another backend: {type(branch).__name__}")
    return branch


def _plain(answer: object) -> Json:
    """What the client made of JSON, as the JSON that it was."""
    dump = getattr(answer, "model_dump", None)
    if dump is None:
        raise GenerationError(f"the service answered something that OpenAI's API has not: {answer!r:.200}")
    return cast("Json", dump())


def _content(message: object) -> object:
    return message.get("content") if isinstance(message, dict) else None


def _mapping(told: object) -> Json | None:
    return told if isinstance(told, dict) else None


def _dicts(told: object) -> list[Json]:
    return [one for one in told if isinstance(one, dict)] if isinstance(told, list) else []


def _str(told: object) -> str | None:
    return told if isinstance(told, str) else None


def _begin_in_child() -> None:
    for backend in tuple(_all):
        backend._begin(is_in_child=True)


_all: weakref.WeakSet[OpenAI] = weakref.WeakSet()
if hasattr(os, "register_at_fork"):  # where processes can be forked
    os.register_at_fork(after_in_child=_begin_in_child)
