"""Branches over HTTP, for programs that run elsewhere: open, append, generate, score, fork and close, by id.

A branch belongs to the key that opened it and is closed when nobody has used it for a while, so that a client that
vanished locks nothing for ever.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Annotated, Literal, TypeVar

from fastapi import APIRouter, Request, Response
from pydantic import Field

from niwaki.runtime.api import (
    Backend,
    Branch,
    Choices,
    Constraint,
    Delta,
    EngineStopped,
    Generation,
    Grammar,
    JsonSchema,
    Message,
    Output,
    Pending,
    Regex,
    SamplingOptions,
    SamplingParams,
    Score,
    Segment,
    Spacing,
    TokenLogprob,
    ToolCall,
)
from niwaki.runtime.server.access import key_of, service_of
from niwaki.runtime.server.errors import ApiError, as_api_error, overloaded
from niwaki.runtime.server.feed import Ended, Failed, Feed, Piece
from niwaki.runtime.server.openai_models import MAX_NEW, Pattern, Stop
from niwaki.runtime.server.openai_shapes import Json, finite
from niwaki.runtime.server.service import Service
from niwaki.runtime.server.sse import EventStream, event, unless_gone
from niwaki.runtime.server.wake import wake
from niwaki.runtime.server.wire import (
    MAX_PROMPTS,
    Name,
    Strict,
    Text,
    TokenId,
    json_response,
    read_body,
    takes,
    to_json,
)

MAX_BRANCHES = 4096
IDLE_SECONDS = 600.0
SWEEP_SECONDS = 15.0

Result = TypeVar("Result")


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
    choices: Annotated[list[Text], Field(min_length=1, max_length=4096, fail_fast=True)]


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
    logit_bias: Annotated[list[tuple[TokenId, float]], Field(max_length=300, fail_fast=True)]
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None
    stop: Annotated[list[Stop], Field(max_length=32, fail_fast=True)]
    stop_token_ids: Annotated[list[TokenId], Field(max_length=32, fail_fast=True)]
    stop_regex: Pattern | None
    ignore_eos: bool
    return_logprob: bool
    top_logprobs_num: int
    priority: int
    constraint: ConstraintBody | None
    heal: bool = False

    def params(self) -> SamplingParams:
        """Raises RequestError: a field is out of its bounds."""
        said = {
            name: getattr(self, name) for name in type(self).model_fields if name not in ("constraint", "logit_bias")
        }
        options = SamplingOptions(**said, logit_bias=dict(self.logit_bias), constraint=self._constraint())
        return options.resolve()

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
    delta: Segments
    params: ParamsBody


class ScoreBody(Strict):
    delta: Segments
    continuations: Annotated[list[Text], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
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
# The branches of one server
# ---------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class HeldBranch:
    """One open branch. `is_busy` while a call on it runs: a branch has one user at a time."""

    branch: Branch
    key: bytes
    is_busy: bool = False
    used_at: float = field(default_factory=time.monotonic)


class Branches:
    """Who holds which branch. Its methods run on the event loop; the backend's own run on threads."""

    def __init__(self, backend: Backend, idle_seconds: float = IDLE_SECONDS) -> None:
        self.backend = backend
        self._idle_seconds = idle_seconds
        self._held: dict[str, HeldBranch] = {}
        self._sweeping: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._held)

    def check_room(self) -> None:
        if len(self._held) >= MAX_BRANCHES:
            raise overloaded(f"{len(self._held)} branches are open already; close some")

    def hold(self, branch: Branch, key: bytes, branch_id: str = "") -> str:
        """Keep an open branch, by the id that it was promised or a new one, which is returned."""
        if self._sweeping is None:
            self._sweeping = asyncio.create_task(self._sweep())
        branch_id = branch_id or uuid.uuid4().hex
        self._held[branch_id] = HeldBranch(branch, key)
        return branch_id

    def find(self, branch_id: str, key: bytes) -> HeldBranch:
        """Raises ApiError: 404 for an unknown, closed or foreign one."""
        held = self._held.get(branch_id)
        if held is None or held.key != key:
            raise ApiError(404, "no such branch: closed, expired, or never there", param="branch", code="not_found")
        return held

    def take(self, branch_id: str, key: bytes) -> HeldBranch:
        """The branch for one call; `give_back` it. Raises ApiError: 404, or 409 while another call uses it."""
        held = self.find(branch_id, key)
        if held.is_busy:
            raise ApiError(409, "another call uses this branch; wait for it, or fork", param="branch", code="conflict")
        held.is_busy = True
        return held

    def give_back(self, held: HeldBranch) -> None:
        held.is_busy = False
        held.used_at = time.monotonic()

    def close(self, branch_id: str, key: bytes) -> None:
        self._close(branch_id, self.find(branch_id, key))

    def close_all(self) -> None:
        if self._sweeping is not None:
            self._sweeping.cancel()
        for branch_id, held in tuple(self._held.items()):
            self._close(branch_id, held)

    def _close(self, branch_id: str, held: HeldBranch) -> None:
        del self._held[branch_id]
        try:
            self.backend.close(held.branch)
        except EngineStopped:
            return  # it holds nothing any more

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(min(SWEEP_SECONDS, self._idle_seconds / 2))
            oldest = time.monotonic() - self._idle_seconds
            for branch_id, held in tuple(self._held.items()):
                if not held.is_busy and held.used_at < oldest:
                    self._close(branch_id, held)


# ---------------------------------------------------------------------------------------------------------------
# Pages
# ---------------------------------------------------------------------------------------------------------------


def branches_router(branches: Branches) -> APIRouter:
    """The pages of one server's branches."""
    router = APIRouter()
    backend = branches.backend

    @router.get("/backend")
    async def info(request: Request) -> Response:
        """What a program may ask about its backend."""
        return json_response(asdict(backend.info()))

    @router.get("/backend/usage")
    async def usage(request: Request) -> Response:
        return json_response(dict(backend.usage()))

    @router.post("/backend/render", openapi_extra=takes(RenderBody))
    async def render(request: Request) -> Response:
        """The model's chat template over messages."""
        service = service_of(request)
        body = await read_body(request, RenderBody, service.config)
        messages = [message.message() for message in body.messages]
        text = await _apart(service, lambda: backend.render(messages, add_generation_prompt=body.add_generation_prompt))
        return json_response({"text": text})

    @router.post("/branches", openapi_extra=takes(OpenBody))
    async def open_branch(request: Request) -> Response:
        """A new, empty branch."""
        service, key = service_of(request), key_of(request)
        body = await read_body(request, OpenBody, service.config)
        branches.check_room()
        service.admit(1)
        branch = backend.open(namespace=service.namespace(key, body.namespace))
        return json_response({"id": branches.hold(branch, key)})

    @router.get("/branches/{branch_id}")
    async def read(request: Request, branch_id: str) -> Response:
        """Its token ids."""
        held = branches.find(branch_id, key_of(request))
        return json_response({"id": branch_id, "token_ids": list(held.branch.token_ids)})

    @router.delete("/branches/{branch_id}")
    async def close(request: Request, branch_id: str) -> Response:
        """Close it; what runs on it is cancelled."""
        branches.close(branch_id, key_of(request))
        return json_response({"id": branch_id})

    @router.post("/branches/{branch_id}/fork", openapi_extra=takes(AppendBody))
    async def fork(request: Request, branch_id: str) -> Response:
        """Append, then make a second handle on the same text."""
        service, key = service_of(request), key_of(request)
        body = await read_body(request, AppendBody, service.config)
        branches.check_room()
        held = branches.take(branch_id, key)
        try:
            await _apart(service, lambda: backend.append(held.branch, _segments(body.delta)))
            twin = backend.fork(held.branch)
        finally:
            branches.give_back(held)
        return json_response({"id": branches.hold(twin, key)})

    @router.post("/branches/{branch_id}/append", openapi_extra=takes(AppendBody))
    async def append(request: Request, branch_id: str) -> Response:
        """Add text without generating."""
        service = service_of(request)
        body = await read_body(request, AppendBody, service.config)
        held = branches.take(branch_id, key_of(request))
        try:
            await _apart(service, lambda: backend.append(held.branch, _segments(body.delta)))
        finally:
            branches.give_back(held)
        return json_response({"id": branch_id})

    @router.post("/branches/{branch_id}/generate", openapi_extra=takes(GenerateBody, streams=True))
    async def generate(request: Request, branch_id: str) -> Response:
        """Append, then generate: events with deltas, then one with the outputs or the error."""
        service = service_of(request)
        body = await read_body(request, GenerateBody, service.config)
        params = _or_refused(body.params.params)
        held = branches.take(branch_id, key_of(request))

        def start() -> Sequence[Generation]:
            return [backend.generate(held.branch, _segments(body.delta), params)]

        try:
            feed = await service.begin_generations(1, start, compiles=params.constraint is not None)
        except BaseException as error:
            branches.give_back(held)
            if isinstance(error, Exception):
                raise as_api_error(error, param="delta", constraint="params.constraint") from error
            raise

        turn = ExitStack()  # ends once: when the result is told, or when the client goes before
        turn.callback(branches.give_back, held)

        def finish() -> None:
            service.finish(feed)
            turn.close()

        return EventStream(_events(feed, turn), finish)

    @router.post("/branches/{branch_id}/score", openapi_extra=takes(ScoreBody))
    async def score(request: Request, branch_id: str) -> Response:
        """Append, then score each continuation."""
        service = service_of(request)
        body = await read_body(request, ScoreBody, service.config)
        held = branches.take(branch_id, key_of(request))
        try:
            service.admit(len(body.continuations))
            pending = await _apart(
                service,
                lambda: backend.score(
                    held.branch,
                    _segments(body.delta),
                    body.continuations,
                    heal=body.heal,
                    unconditional=body.unconditional,
                ),
            )
            waiting = _Waiting(pending, len(body.continuations))
            service.enter(waiting)
            try:
                scores = await unless_gone(request.receive, waiting.result())
            finally:
                service.finish(waiting)
        finally:
            branches.give_back(held)
        return json_response({"scores": [_score(one) for one in scores]})

    return router


class _Waiting:
    """A pending result that a client waits for."""

    def __init__(self, pending: Pending[tuple[Score, ...]], size: int) -> None:
        self.size = size
        self._pending = pending
        self._loop = asyncio.get_running_loop()
        self._done = asyncio.Event()
        self._reason: EngineStopped | None = None
        pending.add_done_callback(self._tell)

    @property
    def num_tokens(self) -> int:
        """Of what was scored, as far as the cache did not have it."""
        if not self._pending.is_done or self._pending.error() is not None:
            return 0
        return sum(score.prompt_tokens - score.cached_tokens for score in self._pending.result())

    def _tell(self) -> None:
        wake(self._loop, self._done)

    async def result(self) -> tuple[Score, ...]:
        await self._done.wait()
        if self._reason is not None:
            raise self._reason
        return self._pending.result()

    def interrupt(self, reason: EngineStopped) -> None:
        self._reason = reason
        self.close()
        self._done.set()

    def close(self) -> None:
        try:
            self._pending.cancel()
        except EngineStopped:
            return  # nothing runs any more


async def _events(feed: Feed, turn: ExitStack) -> AsyncIterator[bytes]:
    async for events in feed.batches():
        for one in events:
            match one:
                case Piece(_, delta):
                    yield event(to_json({"delta": _delta(delta)}))
                case Ended():
                    turn.close()  # who reads this may use the branch at once
                    yield event(to_json({"outputs": [_output(output) for output in one.outputs]}))
                case Failed(_, error):
                    yield event(to_json(as_api_error(error).body()))


async def _apart(service: Service, function: Callable[[], Result]) -> Result:
    try:
        return await service.apart(function)
    except Exception as error:
        raise as_api_error(error, param="delta") from error


def _or_refused(function: Callable[[], Result]) -> Result:
    try:
        return function()
    except Exception as error:
        raise as_api_error(error, param="params") from error


def _segments(delta: Sequence[SegmentBody]) -> list[Segment]:
    return [Segment(segment.text, segment.control) for segment in delta]


def _triples(logprobs: Sequence[TokenLogprob]) -> list[tuple[float | None, int, str | None]]:
    return [(finite(one.logprob), one.token_id, one.text) for one in logprobs]


def _delta(delta: Delta) -> Json:
    return {
        "text": delta.text,
        "token_ids": delta.token_ids,
        "logprobs": _triples(delta.logprobs),
        "top_logprobs": [_triples(top) for top in delta.top_logprobs],
    }


def _output(output: Output) -> Json:
    return {
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": asdict(output.finish_reason),
        "prompt_tokens": output.prompt_tokens,
        "cached_tokens": output.cached_tokens,
        "complete": output.complete,
        "logprobs": _triples(output.logprobs),
        "top_logprobs": [_triples(top) for top in output.top_logprobs],
        "seconds": output.seconds,
    }


def _score(score: Score) -> Json:
    return {
        "text": score.text,
        "logprobs": _triples(score.logprobs),
        "prompt_tokens": score.prompt_tokens,
        "cached_tokens": score.cached_tokens,
    }
