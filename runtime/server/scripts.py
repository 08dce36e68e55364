"""Whole programs in one request: POST /scripts takes what each branch says, calls and forks, and tells what came of it.

A script runs where the engine's results arrive, so what follows a generation is on its way before anybody is told. Its
branches end with it, or are left open for a program that goes on call by call.
"""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Annotated, Literal, TypeAlias

from fastapi import APIRouter, Request, Response
from pydantic import Field

from niwaki.runtime.api import Backend, Branch, Cancelled, EngineStopped, Generation, Pending, Score, Segment
from niwaki.runtime.choices import METHODS
from niwaki.runtime.server.access import key_of, service_of
from niwaki.runtime.server.branch_shapes import ParamsBody, output_json, score_json
from niwaki.runtime.server.branches import Branches
from niwaki.runtime.server.engine_client import EngineClient
from niwaki.runtime.server.errors import ApiError, as_api_error
from niwaki.runtime.server.metrics import Metrics
from niwaki.runtime.server.openai_shapes import Json
from niwaki.runtime.server.sse import EventStream, event
from niwaki.runtime.server.wake import wake
from niwaki.runtime.server.wire import ChoiceList, Name, Strict, Text, read_body, takes, to_json

MAX_BRANCHES = 256
MAX_OPS = 8192
MAX_PARTS = 65536

Number = Annotated[int, Field(ge=0, lt=MAX_OPS)]


class SayBody(Strict):
    """Append a text: pieces of it, and numbers of calls whose texts stand there."""

    do: Literal["say"]
    parts: Annotated[list[Number | Text], Field(max_length=MAX_PARTS, fail_fast=True)]
    control: bool = False


class CallBody(Strict):
    do: Literal["generate"]
    call: Number
    params: ParamsBody


class ChooseBody(Strict):
    """Score the choices, and decide. What was chosen is not appended."""

    do: Literal["choose"]
    call: Number
    choices: ChoiceList
    method: Literal[tuple(METHODS)]  # type: ignore[valid-type]  # their names
    heal: bool = False


class SplitBody(Strict):
    """Start another branch from here."""

    do: Literal["split"]
    branch: Number


OpBody: TypeAlias = Annotated[SayBody | CallBody | ChooseBody | SplitBody, Field(discriminator="do")]
Ops = Annotated[list[OpBody], Field(max_length=MAX_OPS, fail_fast=True)]


class ScriptBody(Strict):
    """POST /scripts. `is_over`: the branches end with the script, and the tokens of the first one are told."""

    branches: Annotated[list[Ops], Field(min_length=1, max_length=MAX_BRANCHES, fail_fast=True)]
    is_over: bool
    namespace: Name = ""

    def check(self) -> None:
        """Raises ApiError: a branch starts nowhere or twice, or two calls have one number."""
        ops = [op for branch in self.branches for op in branch]
        if len(ops) > MAX_OPS:
            raise ApiError(400, f"{len(ops)} ops in one script; at most {MAX_OPS}", param="branches")
        starts = [op.branch for op in ops if isinstance(op, SplitBody)]
        if sorted(starts) != list(range(1, len(self.branches))):
            raise ApiError(400, "every branch but the first must be split off once", param="branches")
        calls = [op.call for op in ops if isinstance(op, CallBody | ChooseBody)]
        if len(set(calls)) != len(calls):
            raise ApiError(400, "every call needs a number of its own", param="branches")


Result: TypeAlias = Generation | Pending[tuple[Score, ...]]
News: TypeAlias = Json | int  # for the client; or the number of a lane that is at its end, and goes on elsewhere
LAST = {"token_ids", "error"}  # keys of what is told at the end


class _Lane:
    """One branch, and what is left to do on it. Whoever brings what it waits for moves it on."""

    def __init__(self, number: int, ops: Sequence[OpBody]) -> None:
        """Raises ApiError: a parameter is out of its bounds."""
        self.number = number
        self.ops = deque(ops)
        self.params = {op.call: op.params.params() for op in ops if isinstance(op, CallBody)}
        self.branch: Branch | None = None
        self.is_kept = False
        self.delta: list[Segment] = []

    @property
    def width(self) -> int:
        """Sequences that it runs at once, at most. The rows of a choice count as one: they give no token."""
        return max((self.params[op.call].n if isinstance(op, CallBody) else 1 for op in self.calls), default=0)

    @property
    def calls(self) -> list[CallBody | ChooseBody]:
        return [op for op in self.ops if isinstance(op, CallBody | ChooseBody)]

    def taken(self) -> list[Segment]:
        """The text that the branch does not hold yet."""
        delta, self.delta = self.delta, []
        return delta


class Running:
    """A script on its way, as the service counts and ends it. Made and read on the event loop; it moves on wherever
    results arrive."""

    def __init__(self, backend: Backend, body: ScriptBody, namespace: str, metrics: Metrics) -> None:
        """Raises ApiError: the body makes no sense."""
        body.check()
        self._backend = backend
        # Nobody reads a script's texts token by token.
        self._generate = (
            partial(backend.generate, streams=False) if isinstance(backend, EngineClient) else backend.generate
        )
        self._metrics = metrics
        self._namespace = namespace
        self._is_over = body.is_over
        self._lanes = [_Lane(number, ops) for number, ops in enumerate(body.branches)]
        self.size = max(1, sum(lane.width for lane in self._lanes))
        self.num_tokens = 0
        self.has_ended = False
        self._loop = asyncio.get_running_loop()
        self._arrived = asyncio.Event()
        self._lock = threading.Lock()  # the fields below
        self._news: list[News] = []
        self._texts: dict[int, str] = {}
        self._waiting: dict[int, list[_Lane]] = {}  # for the text of a call
        self._num_busy = 1  # calls that run, and threads that move lanes; the start is one
        self._is_closed = False

    # -- the event loop's side --------------------------------------------------------------------------------------

    async def news(self) -> AsyncIterator[News]:
        """In order, up to the end."""
        while not self.has_ended:
            await self._arrived.wait()
            self._arrived.clear()
            with self._lock:
                news, self._news = self._news, []
            for one in news:
                self.has_ended = self.has_ended or (isinstance(one, dict) and one.keys() <= LAST)
                yield one

    def kept(self, lane: int) -> Branch:
        """The branch of a lane that is at its end, which is the caller's from now on."""
        self._lanes[lane].is_kept = True
        branch = self._lanes[lane].branch
        assert branch is not None, "it is at its end"
        return branch

    def interrupt(self, reason: EngineStopped) -> None:
        self._tell(as_api_error(reason).body())
        self.close()

    def close(self) -> None:
        """Stop what still runs, and close what nobody took over. Calling it twice is allowed."""
        with self._lock:
            self._is_closed = True
        for lane in self._lanes:
            self._close(lane)

    # -- wherever results arrive ------------------------------------------------------------------------------------

    def start(self, names: Mapping[int, str]) -> None:
        """`names`: by which the client will know the branches."""
        self._stand(self._lanes[0], self._backend.open(namespace=self._namespace))
        self._move(self._lanes[0])
        if names:  # told behind the lanes that are at their end already
            self._tell({"branches": {str(number): name for number, name in names.items()}})
        self._leave()

    def _move(self, *lanes: _Lane) -> None:
        """Move the lanes, and those that they start, as far as they come."""
        ready = deque(lanes)
        while ready:
            lane = ready.popleft()
            try:
                ready += self._advance(lane)
            except Exception as error:  # whatever it is, somebody waits for what the lane will not do
                for op in lane.calls[:1]:
                    self._tell(_failed(op, error))

    def _advance(self, lane: _Lane) -> list[_Lane]:
        """Up to the lane's next call, or a text that is not there yet. Gives the lanes that start from it."""
        started: list[_Lane] = []
        branch = lane.branch
        assert branch is not None, "a lane moves once it is started"
        while lane.ops:
            op = lane.ops[0]
            match op:
                case SayBody(parts=parts, control=control):
                    text = self._text(parts, lane)
                    if text is None:
                        return started
                    if text:
                        lane.delta.append(Segment(text, control))
                case SplitBody(branch=number):
                    self._append(lane, branch)
                    self._stand(self._lanes[number], self._backend.fork(branch))
                    started.append(self._lanes[number])
                case CallBody() | ChooseBody():
                    pending = self._call(lane, branch, op)
                    lane.ops.popleft()
                    pending.add_done_callback(partial(self._on_done, lane, op, pending))
                    return started
            lane.ops.popleft()
        self._append(lane, branch)
        if not self._is_over:
            self._tell(lane.number)
        return started

    def _call(self, lane: _Lane, branch: Branch, op: CallBody | ChooseBody) -> Result:
        with self._lock:
            self._num_busy += 1
        try:
            if isinstance(op, CallBody):
                return self._generate(branch, lane.taken(), lane.params[op.call])
            alone = METHODS[op.method].needs_unconditional
            return self._backend.score(branch, lane.taken(), op.choices, heal=op.heal, unconditional=alone)
        except BaseException:
            self._leave()
            raise

    def _on_done(self, lane: _Lane, op: CallBody | ChooseBody, pending: Result) -> None:
        if isinstance(pending, Generation):
            self._metrics.ended(pending)
        try:
            text, told = self._answer(op, pending)
        except Exception as error:  # nothing may escape into the backend's thread
            self._tell(_failed(op, error))
        else:
            with self._lock:
                self._texts[op.call] = text
                waiting = self._waiting.pop(op.call, [])
            # First what follows, so that it rides in the next step; the client is told meanwhile.
            self._move(lane, *waiting)
            self._tell({"call": op.call, "text": text, **told})
        self._leave()

    def _answer(self, op: CallBody | ChooseBody, pending: Result) -> tuple[str, Json]:
        """The call's text, and what the client is told beside it. Raises what the call failed with."""
        if isinstance(pending, Generation):
            outputs = pending.result(0)
            self._count(outputs[0].prompt_tokens - outputs[0].cached_tokens)
            self._count(sum(output.completion_tokens for output in outputs))
            return outputs[0].text, {"outputs": [output_json(output) for output in outputs]}
        scores = pending.result(0)
        self._count(sum(score.prompt_tokens - score.cached_tokens for score in scores))
        assert isinstance(op, ChooseBody), "only choices are scored"
        decision = METHODS[op.method].decide(scores[: len(op.choices)], scores[len(op.choices) :])
        return op.choices[decision.index], {"scores": [score_json(score) for score in scores]}

    def _text(self, parts: Sequence[int | str], lane: _Lane) -> str | None:
        """None: a call's text is missing, and the lane is moved on when it is there."""
        with self._lock:
            for part in parts:
                if isinstance(part, int) and part not in self._texts:
                    self._waiting.setdefault(part, []).append(lane)
                    return None
            return "".join(self._texts[part] if isinstance(part, int) else part for part in parts)

    def _append(self, lane: _Lane, branch: Branch) -> None:
        if lane.delta:
            self._backend.append(branch, lane.taken())

    def _stand(self, lane: _Lane, branch: Branch) -> None:
        lane.branch = branch
        with self._lock:
            is_closed = self._is_closed
        if is_closed:  # meanwhile: nobody else would close it
            self._close(lane)
            raise Cancelled("the script was cancelled")

    def _close(self, lane: _Lane) -> None:
        if lane.branch is not None and not lane.is_kept:
            with suppress(EngineStopped):  # it holds nothing any more
                self._backend.close(lane.branch)

    def _count(self, num_tokens: int) -> None:
        with self._lock:
            self.num_tokens += num_tokens

    def _leave(self) -> None:
        """A call has ended, or the start has. The last one tells that nothing more will come."""
        with self._lock:
            self._num_busy -= 1
            is_last = self._num_busy == 0
        if is_last:
            first = self._lanes[0]
            is_whole = self._is_over and not first.ops and first.branch is not None
            self._tell({"token_ids": list(first.branch.token_ids) if is_whole and first.branch else None})

    def _tell(self, news: News) -> None:
        with self._lock:
            self._news.append(news)
        wake(self._loop, self._arrived.set)


def scripts_router(branches: Branches) -> APIRouter:
    router = APIRouter()

    @router.post("/scripts", openapi_extra=takes(ScriptBody, streams=True), status_code=200, response_class=EventStream)
    async def run_script(request: Request) -> Response:
        """Run a whole program: events with what each call gave, as it comes, and one at the end."""
        service, key = service_of(request), key_of(request)
        body = await read_body(request, ScriptBody, service.config)
        running = Running(branches.backend, body, service.namespace(key, body.namespace), service.metrics)
        branches.check_room()
        service.admit(running.size)
        service.enter(running)
        names = {} if body.is_over else {number: uuid.uuid4().hex for number in range(len(body.branches))}
        try:
            await service.apart(partial(running.start, names))
        except BaseException as error:
            service.finish(running)
            if isinstance(error, Exception):
                raise as_api_error(error, param="branches") from error
            raise
        held: list[str] = []

        async def events() -> AsyncIterator[bytes]:
            async for news in running.news():
                if isinstance(news, int):
                    branches.hold(running.kept(news), key, names[news])
                    held.append(names[news])
                else:
                    yield event(to_json(news))

        def finish() -> None:
            service.finish(running)
            if not running.has_ended:  # the client has gone, and will not come back for them
                for name in held:
                    with suppress(ApiError):  # it closed this one itself
                        branches.close(name, key)

        return EventStream(events(), finish)

    return router


def _failed(op: CallBody | ChooseBody, error: Exception) -> Json:
    told = as_api_error(error, param="branches", constraint="params.constraint")
    return {"call": op.call, "status": told.status, **told.body()}
