"""Branches over HTTP, for programs that run elsewhere: open, append, generate, score, fork and close, by id.

A branch belongs to the key that opened it and is closed when nobody has used it for a while, so that a client that
vanished locks nothing for ever.
"""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from typing import TypeVar

from fastapi import APIRouter, Request, Response

from niwaki.runtime.api import (
    Branch,
    EngineStopped,
    Generation,
    Pending,
    Score,
)
from niwaki.runtime.host.branch_tokens import append_within
from niwaki.runtime.link.wake import wake
from niwaki.runtime.server.access import key_of, service_of
from niwaki.runtime.server.answers import (
    BackendAnswer,
    BranchAnswer,
    BranchTokensAnswer,
    RenderAnswer,
    ScoresAnswer,
    UsageCounters,
)
from niwaki.runtime.server.beginning import Beginning
from niwaki.runtime.server.branch_shapes import (
    AppendBody,
    GenerateBody,
    ListenBody,
    OpenBody,
    RenderBody,
    ScoreBody,
    delta_json,
    output_json,
    score_json,
    segments_of,
)
from niwaki.runtime.server.errors import ApiError, ServerEnds, as_api_error, overloaded
from niwaki.runtime.server.feed import Ended, Failed, Feed, Piece
from niwaki.runtime.server.programs import Engine
from niwaki.runtime.server.rates import tokens_of
from niwaki.runtime.server.service import Service, size_of_rows
from niwaki.runtime.server.sse import EventStream, chunk_event, event, unless_gone
from niwaki.runtime.server.wire import (
    gives,
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
# The branches of one server
# ---------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class HeldBranch:
    """One open branch. `is_busy` while a call on it runs: a branch has one user at a time. `feed`: of the generation
    that runs on it."""

    branch: Branch
    key: bytes
    is_busy: bool = False
    feed: Feed | None = None
    used_at: float = field(default_factory=time.monotonic)


class Branches:
    """Who holds which branch. Its methods run on the event loop; the backend's own run on threads."""

    def __init__(self, backend: Engine, idle_seconds: float = IDLE_SECONDS) -> None:
        self.backend = backend
        self._idle_seconds = idle_seconds
        self._held: dict[str, HeldBranch] = {}
        self._counts = Counter[bytes]()  # of them, by key
        self._sweeping: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._held)

    def check_room(self, key: bytes) -> None:
        """Raises ApiError: too many are open. Where callers have keys, none of them takes all that the others need."""
        if len(self._held) >= MAX_BRANCHES:
            raise overloaded(f"{len(self._held)} branches are open already; close some")
        if key and self._counts[key] >= MAX_BRANCHES // 2:
            raise overloaded(f"{self._counts[key]} branches of this key are open already; close some")

    def hold(self, branch: Branch, key: bytes, branch_id: str = "") -> str:
        """Keep an open branch, by the id that it was promised or a new one, which is returned."""
        if self._sweeping is None:
            self._sweeping = asyncio.create_task(self._sweep())
        branch_id = branch_id or uuid.uuid4().hex
        self._held[branch_id] = HeldBranch(branch, key)
        self._counts[key] += 1
        return branch_id

    def find(self, branch_id: str, key: bytes) -> HeldBranch:
        """Raises ApiError: 404 for an unknown, closed or foreign one."""
        held = self._held.get(branch_id)
        if held is None or held.key != key:
            raise ApiError(
                404,
                "no such branch: closed, expired, or of a server before this one; run the program again",
                param="branch",
                code="not_found",
            )
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
        held.feed = None
        held.used_at = time.monotonic()

    @contextmanager
    def given_back(self, held: HeldBranch) -> Iterator[None]:
        """Behind the block; not where the server ends, when nobody takes it any more and a thread may still be at work
        on it."""
        try:
            yield
        except ServerEnds:
            raise
        except BaseException:
            self.give_back(held)
            raise
        self.give_back(held)

    def close(self, branch_id: str, key: bytes) -> None:
        self._close(branch_id, self.find(branch_id, key))

    def close_all(self) -> None:
        if self._sweeping is not None:
            self._sweeping.cancel()
        for branch_id, held in tuple(self._held.items()):
            self._close(branch_id, held)

    def _close(self, branch_id: str, held: HeldBranch) -> None:
        del self._held[branch_id]
        self._counts[held.key] -= 1
        if not self._counts[held.key]:
            del self._counts[held.key]
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

    @router.get("/backend", responses=gives(BackendAnswer))
    async def info(request: Request) -> Response:
        """What a program may ask about its backend."""
        return json_response(asdict(backend.info()))

    @router.get("/backend/usage", responses=gives(UsageCounters))
    async def usage(request: Request) -> Response:
        return json_response(dict(backend.usage()))

    @router.post("/backend/render", openapi_extra=takes(RenderBody), responses=gives(RenderAnswer))
    async def render(request: Request) -> Response:
        """The model's chat template over messages."""
        service = service_of(request)
        body = await read_body(request, RenderBody, service.config)
        messages = [message.message() for message in body.messages]
        text = await _apart(service, lambda: backend.render(messages, add_generation_prompt=body.add_generation_prompt))
        return json_response({"text": text})

    @router.post("/branches", openapi_extra=takes(OpenBody), responses=gives(BranchAnswer))
    async def open_branch(request: Request) -> Response:
        """A new, empty branch."""
        service, key = service_of(request), key_of(request)
        body = await read_body(request, OpenBody, service.config)
        branches.check_room(key)
        service.admit(1)
        branch = backend.open(namespace=service.namespace(key, body.namespace))
        return json_response({"id": branches.hold(branch, key)})

    @router.get("/branches/{branch_id}", responses=gives(BranchTokensAnswer))
    async def read(request: Request, branch_id: str) -> Response:
        """Its token ids."""
        held = branches.find(branch_id, key_of(request))
        return json_response({"id": branch_id, "token_ids": list(held.branch.token_ids)})

    @router.delete("/branches/{branch_id}", responses=gives(BranchAnswer))
    async def close(request: Request, branch_id: str) -> Response:
        """Close it; what runs on it is cancelled."""
        branches.close(branch_id, key_of(request))
        return json_response({"id": branch_id})

    @router.post("/branches/{branch_id}/fork", openapi_extra=takes(AppendBody), responses=gives(BranchAnswer))
    async def fork(request: Request, branch_id: str) -> Response:
        """Append, then make a second handle on the same text."""
        service, key = service_of(request), key_of(request)
        body = await read_body(request, AppendBody, service.config)
        branches.check_room(key)
        held = branches.take(branch_id, key)
        try:
            await _apart(service, lambda: append_within(backend, held.branch, segments_of(body.delta)))
            twin = backend.fork(held.branch)
        finally:
            branches.give_back(held)
        return json_response({"id": branches.hold(twin, key)})

    @router.post("/branches/{branch_id}/append", openapi_extra=takes(AppendBody), responses=gives(BranchAnswer))
    async def append(request: Request, branch_id: str) -> Response:
        """Add text without generating."""
        service = service_of(request)
        body = await read_body(request, AppendBody, service.config)
        held = branches.take(branch_id, key_of(request))
        try:
            await _apart(service, lambda: append_within(backend, held.branch, segments_of(body.delta)))
        finally:
            branches.give_back(held)
        return json_response({"id": branch_id})

    @router.post(
        "/branches/{branch_id}/generate",
        openapi_extra=takes(GenerateBody, streams=True),
        status_code=200,
        response_class=EventStream,
    )
    async def generate(request: Request, branch_id: str) -> Response:
        """Append, then generate: events with deltas, if asked for, then one with the outputs or the error."""
        service = service_of(request)
        body = await read_body(request, GenerateBody, service.config)
        params = body.params.params()
        held = branches.take(branch_id, key_of(request))

        def start() -> Sequence[Generation]:
            # Of late pieces, not of none: they may be asked for while it runs.
            streams = body.streams or None
            return [backend.generate(held.branch, segments_of(body.delta), params, streams=streams)]

        try:
            feed = held.feed = await service.begin_generations(
                1, start, compiles=params.compiles, streams=service.must_stream(body.streams)
            )
        except BaseException as error:
            if not isinstance(error, ServerEnds):  # as in `given_back`
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

    @router.post("/branches/{branch_id}/listen", openapi_extra=takes(ListenBody), responses=gives(BranchAnswer))
    async def listen(request: Request, branch_id: str) -> Response:
        """Tell of the generation that runs on it by deltas, all of them; none may run any more."""
        await read_body(request, ListenBody, service_of(request).config)
        held = branches.find(branch_id, key_of(request))
        if held.feed is not None:
            held.feed.listen()
        return json_response({"id": branch_id})

    @router.post("/branches/{branch_id}/score", openapi_extra=takes(ScoreBody), responses=gives(ScoresAnswer))
    async def score(request: Request, branch_id: str) -> Response:
        """Append, then score each continuation."""
        service = service_of(request)
        body = await read_body(request, ScoreBody, service.config)
        held = branches.take(branch_id, key_of(request))

        def start() -> None:
            delta, options = segments_of(body.delta), {"heal": body.heal, "unconditional": body.unconditional}
            waiting.add(backend.score(held.branch, delta, body.continuations, **options))

        with branches.given_back(held):
            waiting = _Waiting(size_of_rows(len(body.continuations), unconditional=body.unconditional))
            service.admit(waiting.size)
            service.enter(waiting)
            try:
                await waiting.begun(_apart(service, start))
                scores = await unless_gone(request.receive, waiting.result())
            finally:
                service.finish(waiting)
        return json_response({"scores": [score_json(one) for one in scores]})

    return router


class _Waiting:
    """A result that a client waits for, pending or about to be."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._loop = asyncio.get_running_loop()
        self._done = asyncio.Event()
        self._beginning = Beginning()
        self._reason: EngineStopped | None = None
        self._lock = threading.Lock()  # the two below
        self._pending: Pending[tuple[Score, ...]] | None = None
        self._is_closed = False

    def add(self, pending: Pending[tuple[Score, ...]]) -> None:
        """It has begun. Called once, on any thread."""
        with self._lock:
            self._pending = pending
            is_closed = self._is_closed
        pending.add_done_callback(self._tell)
        if is_closed:  # meanwhile
            pending.cancel()

    @property
    def num_tokens(self) -> int:
        """Of what was scored, as far as the cache did not have it."""
        if self._pending is None or not self._pending.is_done or self._pending.error() is not None:
            return 0
        return tokens_of(scores=self._pending.result())

    def _tell(self) -> None:
        wake(self._loop, self._done.set)

    async def begun(self, beginning: Awaitable[None]) -> None:
        """Wait for `beginning`, which calls `add`. Raises what it raises, or what `interrupt` was given meanwhile."""
        await self._beginning.wait(beginning)

    async def result(self) -> tuple[Score, ...]:
        await self._done.wait()
        if self._reason is not None:
            raise self._reason
        assert self._pending is not None, "it was added before"
        return self._pending.result()

    def interrupt(self, reason: EngineStopped) -> None:
        self._reason = reason
        self.close()
        self._done.set()
        self._beginning.leave(reason)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            pending = self._pending
        try:
            if pending is not None:
                pending.cancel()
        except EngineStopped:
            return  # nothing runs any more


async def _events(feed: Feed, turn: ExitStack) -> AsyncIterator[bytes]:
    async for events in feed.batches():
        for one in events:
            match one:
                case Piece(_, delta):
                    yield chunk_event({"delta": delta_json(delta)})
                case Ended():
                    turn.close()  # who reads this may use the branch at once
                    yield event(to_json({"outputs": [output_json(output) for output in one.outputs]}))
                case Failed(_, error):
                    yield event(to_json(as_api_error(error).body()))


async def _apart(service: Service, function: Callable[[], Result]) -> Result:
    try:
        return await service.apart(function)
    except Exception as error:
        raise as_api_error(error, param="delta") from error
