"""Whole programs in one request: POST /scripts takes what each branch says, calls and forks, and tells what came of it.

A script runs beside the engine (`link.lanes`), so what follows a call is on its way before anybody is told. Its
branches end with it, or are left open for a program that goes on call by call.
"""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Annotated, Literal, TypeAlias

from fastapi import APIRouter, Request, Response
from pydantic import Field

from niwaki.runtime.api import Backend, Branch, EngineStopped
from niwaki.runtime.api.choices import METHODS
from niwaki.runtime.api.script import Choose, Generate, Lane, Op, Say, Script, Split
from niwaki.runtime.link.engine_client import EngineClient
from niwaki.runtime.link.frames import (
    CallEnded,
    CallFailed,
    Failed,
    LaneEnded,
    ScriptBegun,
    ScriptOver,
    ScriptReport,
    error_of,
)
from niwaki.runtime.link.lanes import Lanes, RunningScript
from niwaki.runtime.link.wake import wake
from niwaki.runtime.server.access import key_of, service_of
from niwaki.runtime.server.beginning import Beginning
from niwaki.runtime.server.branch_shapes import ParamsBody, output_json, score_json
from niwaki.runtime.server.branches import Branches
from niwaki.runtime.server.errors import ApiError, as_api_error
from niwaki.runtime.server.metrics import Metrics
from niwaki.runtime.server.rates import tokens_of
from niwaki.runtime.server.service import MAX_SEQUENCES, size_of_rows
from niwaki.runtime.server.sse import EventStream, event
from niwaki.runtime.server.wire import ChoiceList, Json, Name, Strict, Text, read_body, takes, to_json

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
    """Score the choices, and decide, or draw as `params` say. What was chosen is not appended."""

    do: Literal["choose"]
    call: Number
    choices: ChoiceList
    method: Literal[tuple(METHODS)]  # type: ignore[valid-type]  # their names
    heal: bool = False
    params: ParamsBody | None = None


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


News: TypeAlias = Json | int  # for the client; or the number of a lane that is at its end, and goes on elsewhere
LAST = {"token_ids", "error"}  # keys of what is told at the end


class Running:
    """A script on its way, as the service counts and ends it. Made and read on the event loop."""

    def __init__(self, body: ScriptBody, metrics: Metrics) -> None:
        """Raises ApiError: the body makes no sense."""
        body.check()
        self._script = Script(tuple(tuple(map(_op, ops)) for ops in body.branches), body.is_over)
        self._generations = {op.call for lane in self._script.branches for op in lane if isinstance(op, Generate)}
        self._metrics = metrics
        self.size = _size_of(self._script.branches)
        self.num_tokens = 0
        self.has_ended = False
        self._loop = asyncio.get_running_loop()
        self._arrived = asyncio.Event()
        self._beginning = Beginning()
        self._lock = threading.Lock()  # the fields below
        self._news: list[News] = []
        self._there: RunningScript | None = None
        self._is_closed = False

    def start(self, backend: Backend, namespace: str, names: Mapping[int, str]) -> None:
        """`names`: by which the client will know the branches. Takes a while. Raises EngineStopped: no engine."""
        tell = partial(self._hear, {str(number): name for number, name in names.items()})
        there: RunningScript
        if isinstance(backend, EngineClient):
            there = backend.run_script(self._script, namespace, tell)
        else:
            there = lanes = Lanes(backend, self._script, namespace, tell, apart=_apart)
            lanes.start()
        with self._lock:
            self._there = there
            is_closed = self._is_closed
        if is_closed:  # meanwhile
            there.cancel()

    async def begun(self, beginning: Awaitable[None]) -> None:
        """Wait for `beginning`, which calls `start`. Raises what it raises, or what `interrupt` was given meanwhile:
        then it goes on by itself, as what compiles does, and what it has started is cancelled."""
        await self._beginning.wait(beginning)

    async def news(self) -> AsyncIterator[News]:
        """In order, up to the end."""
        while not self.has_ended:
            await self._arrived.wait()
            self._arrived.clear()
            with self._lock:
                news, self._news = self._news, []
            for one in news:
                if isinstance(one, int) and self._is_closed:  # with its branch, before somebody came to take it
                    continue
                self.has_ended = self.has_ended or (isinstance(one, dict) and one.keys() <= LAST)
                yield one

    def take(self, lane: int) -> Branch:
        """The branch of a lane that is at its end, which is the caller's from now on."""
        assert self._there is not None, "it was started"
        return self._there.take(lane)

    def interrupt(self, reason: EngineStopped) -> None:
        self._tell(as_api_error(reason).body())
        self.close()
        self._beginning.leave(reason)

    def close(self) -> None:
        """Stop what still runs, and close what nobody took over. Calling it twice is allowed."""
        with self._lock:
            self._is_closed = True
            there = self._there
        if there is not None:
            there.cancel()

    # -- wherever results arrive ------------------------------------------------------------------------------------

    def _hear(self, names: Mapping[str, str], report: ScriptReport) -> None:
        match report:
            case CallEnded(_, call, text, outputs, scores):
                self._metrics.gave(outputs)
                with self._lock:
                    self.num_tokens += tokens_of(outputs, scores)
                told = {"outputs": [output_json(one) for one in outputs]} if outputs else {}
                told |= {"scores": [score_json(one) for one in scores]} if scores else {}
                self._tell({"call": call, "text": text, **told})
            case CallFailed(_, call):
                error = error_of(report)
                if call in self._generations:
                    self._metrics.lost(error)
                answer = as_api_error(error, param="branches", constraint="params.constraint")
                self._tell({"call": call, "status": answer.status, **answer.body()})
            case LaneEnded(_, lane):
                self._tell(lane)
            case ScriptBegun():
                if names:
                    self._tell({"branches": names})
            case ScriptOver(_, token_ids):
                self._tell({"token_ids": token_ids})
            case Failed():
                self._tell(as_api_error(error_of(report), param="branches").body())

    def _tell(self, news: News) -> None:
        with self._lock:
            self._news.append(news)
        wake(self._loop, self._arrived.set)


def _apart(work: Callable[[], None]) -> None:
    """Not on the engine's thread, which brought a result: 4 MiB of text take seconds, and all others would wait."""
    threading.Thread(target=work, name="niwaki-tokenize", daemon=True).start()


def _op(body: OpBody) -> Op:
    """Raises ApiError: a parameter is out of its bounds."""
    match body:
        case SayBody(parts=parts, control=control):
            return Say(tuple(parts), control)
        case CallBody(call=call, params=params):
            return Generate(call, params.params())
        case ChooseBody(call=call, choices=choices, method=method, heal=heal, params=params):
            return Choose(call, tuple(choices), method, heal, None if params is None else params.params())
        case SplitBody(branch=number):
            return Split(number)


def _size_of(lanes: Sequence[Lane]) -> int:
    """Sequences that they run at once, at most. A choice is as many as `size_of_rows` says, but no reason to refuse a
    script: as one each, there may be too many in it."""
    calls = [[op for op in lane if isinstance(op, Generate | Choose)] for lane in lanes]
    widths = [max((op.params.n if isinstance(op, Generate) else 1 for op in lane), default=0) for lane in calls]
    rows = [max((_rows_of(op) for op in lane if isinstance(op, Choose)), default=0) for lane in calls]
    return max(1, sum(widths), min(MAX_SEQUENCES, sum(map(max, widths, rows))))


def _rows_of(op: Choose) -> int:
    return size_of_rows(len(op.choices), unconditional=METHODS[op.method].needs_unconditional)


def scripts_router(branches: Branches) -> APIRouter:
    router = APIRouter()

    @router.post("/scripts", openapi_extra=takes(ScriptBody, streams=True), status_code=200, response_class=EventStream)
    async def run_script(request: Request) -> Response:
        """Run a whole program: events with what each call gave, as it comes, and one at the end."""
        service, key = service_of(request), key_of(request)
        body = await read_body(request, ScriptBody, service.config)
        running = Running(body, service.metrics)
        branches.check_room(key)
        service.admit(running.size)
        service.enter(running)
        names = {} if body.is_over else {number: uuid.uuid4().hex for number in range(len(body.branches))}
        try:
            namespace = service.namespace(key, body.namespace)
            await running.begun(service.apart(partial(running.start, branches.backend, namespace, names)))
        except BaseException as error:
            service.finish(running)
            if isinstance(error, Exception):
                raise as_api_error(error, param="branches") from error
            raise
        held: list[str] = []

        async def events() -> AsyncIterator[bytes]:
            async for news in running.news():
                if isinstance(news, int):
                    branches.hold(running.take(news), key, names[news])
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
