"""A team's own programs as pages: POST /programs/NAME with the parameters as JSON answers with the values as JSON.

GET /programs lists them, and GET /programs/NAME tells of one. /programs/NAME/batch takes many rows. With
`?stream=true` the values come as server-sent events: while they grow, or as each row ends.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Annotated, Protocol, TypeVar, cast

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel, Field, JsonValue, PlainValidator, RootModel, ValidationError, create_model
from pydantic_core import to_json as json_of

from niwaki.runtime.api import (
    Backend,
    Branch,
    ConfigError,
    EngineStopped,
    Generation,
    NiwakiError,
    Pending,
    ProgramError,
    SamplingParams,
    Score,
    Segment,
    UnsupportedByBackend,
)
from niwaki.runtime.server.access import service_of
from niwaki.runtime.server.answers import Answer, ProgramCard, ProgramList, Variables
from niwaki.runtime.server.errors import ApiError, as_api_error, failed_inside, log
from niwaki.runtime.server.metrics import Metrics
from niwaki.runtime.server.rates import tokens_of
from niwaki.runtime.server.service import Service
from niwaki.runtime.server.sse import DONE, EventStream, event, unless_gone
from niwaki.runtime.server.wire import (
    MAX_PROMPTS,
    ErrorAnswer,
    Strict,
    as_refusal,
    gives,
    json_response,
    read_body,
    takes,
    to_json,
)

MAX_PARALLEL = 32  # rows of one batch that run at once; their generations are batched by the engine


_Value = TypeVar("_Value")


class Grown(Protocol):
    """What a variable is so far."""

    @property
    def name(self) -> str: ...

    @property
    def value(self) -> object: ...

    @property
    def is_done(self) -> bool: ...


class ServedProgram(Protocol):
    """What is served; `niwaki.lang.endpoint.Endpoint` makes one of a program."""

    @property
    def name(self) -> str: ...

    @property
    def about(self) -> str: ...

    @property
    def body(self) -> type[BaseModel]:
        """The model of its parameters."""
        ...

    @property
    def answer(self) -> type[BaseModel] | None:
        """The model of what it answers, where that is known."""
        ...

    async def call(self, body: BaseModel, backend: Backend) -> Mapping[str, object]:
        """Run it. Cancelling the call cancels what it runs."""
        ...

    def stream(self, body: BaseModel, backend: Backend) -> AsyncIterator[Grown | Mapping[str, object]]:
        """Run it and tell its variables as they grow; what `call` gives comes last."""
        ...

    def parameter_in(self, error: NiwakiError, body: BaseModel) -> str | None:
        """The parameter whose value the error quotes, if it quotes one."""
        ...

    def always_fails_with(self, error: NiwakiError) -> bool:
        """Whether it is known to fail so whatever it is given."""
        ...


class Engine(Backend, Protocol):
    """What programs run on, those that are served and those elsewhere."""

    def generate(
        self, branch: Branch, delta: Sequence[Segment], params: SamplingParams, *, streams: bool | None = True
    ) -> Generation:
        """As `Backend.generate`; without `streams` there are no pieces, with None from when somebody asks for them."""
        ...


def programs_router(programs: Sequence[ServedProgram], backend: Engine) -> APIRouter:
    """Three pages for each program, and their index."""
    router = APIRouter()
    cards = [_card_of(program) for program in programs]
    router.add_api_route(
        "/programs",
        _told_page_of({"programs": cards}),
        methods=["GET"],
        summary="the programs that are served",
        description="Their names, what they are for, where they are, and JSON schemas of their parameters and answers.",
        responses=gives(ProgramList),
    )
    for program, card in zip(programs, cards, strict=True):
        batch = _batch_of(program)
        answer = _answer_of(program)
        router.add_api_route(
            f"/programs/{program.name}",
            _told_page_of(card),
            methods=["GET"],
            summary=f"about {program.name}",
            responses=gives(ProgramCard),
        )
        router.add_api_route(
            f"/programs/{program.name}",
            _page_of(program, backend),
            methods=["POST"],
            summary=program.name,
            description=program.about,
            openapi_extra=takes(program.body, streams=True),
            responses=gives(answer),
        )
        router.add_api_route(
            f"/programs/{program.name}/batch",
            _batch_page_of(program, batch, backend),
            methods=["POST"],
            summary=f"{program.name}, many rows",
            description="Runs the program on every row. Answers with `results`, one for each row and in their order: "
            "`values`, or the `error` that this row alone failed with: a wrong parameter, or what the program raised. "
            "As a stream it tells each as soon as it is there, with its `index`.",
            openapi_extra=takes(batch, streams=True),
            responses=gives(_results_of(program.name, answer)),
        )
    return router


def _card_of(program: ServedProgram) -> dict[str, object]:
    """As `ProgramCard`."""
    return {
        "name": program.name,
        "description": program.about,
        "path": f"/programs/{program.name}",
        "batch_path": f"/programs/{program.name}/batch",
        "parameters": program.body.model_json_schema(),
        "answer": _answer_of(program).model_json_schema(),
    }


def _told_page_of(about: Mapping[str, object]) -> Callable[..., Awaitable[Response]]:
    async def page() -> Response:
        return json_response(about)

    return page


def _answer_of(program: ServedProgram) -> type[BaseModel]:
    """What it answers, and the names of the values that budgets made shorter where there are any."""
    if program.answer is None or issubclass(program.answer, RootModel):
        return program.answer or Variables
    about = "the values that their max_tokens made shorter than the model wanted: valid, and maybe not whole"
    shortened: tuple[type[list[str]], object] = (list[str], Field(default_factory=list, description=about))
    made: type[BaseModel] = create_model(f"{program.name}_answer", __base__=program.answer, shortened=shortened)
    return made


def _batch_of(program: ServedProgram) -> type[BaseModel]:
    reader = PlainValidator(partial(_row_or_refusal, program.body), json_schema_input_type=program.body)
    row = Annotated[BaseModel | ApiError, reader]
    rows = Annotated[list[row], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    made: type[BaseModel] = create_model(f"{program.name}_rows", __base__=Strict, rows=(rows, ...))
    return made


def _row_or_refusal(body: type[BaseModel], row: JsonValue) -> BaseModel | ApiError:
    """A row, or what is wrong with it: that is its own result, and the others run. It is read as JSON once more: as
    Python's own, a text would be no date and a list no tuple."""
    try:
        return body.model_validate_json(json_of(row, inf_nan_mode="constants"))
    except ValidationError as error:
        return as_refusal(error, row)


def _results_of(name: str, answer: type[BaseModel]) -> type[BaseModel]:
    row: type[BaseModel] = create_model(f"{name}_values", __base__=Answer, values=(answer, ...))
    made: type[BaseModel] = create_model(f"{name}_results", __base__=Answer, results=(list[row | ErrorAnswer], ...))  # type: ignore[valid-type]  # a class that is made at run time
    return made


class _Run:
    """A program that runs for a client, as the service counts and ends it. It runs on `backend`, which counts, too."""

    def __init__(self, backend: Engine, metrics: Metrics, size: int = 1) -> None:
        self.size = size
        self.num_tokens = 0
        self.backend = cast("Backend", _Metered(backend, self._charge, metrics.ended))
        self._task: asyncio.Future[object] | None = None
        self._reason: EngineStopped | None = None

    async def result(self, work: Callable[[], Awaitable[_Value]]) -> _Value:
        """What the work gives. Raises what it failed with, as an ApiError when it is no NiwakiError."""
        task = asyncio.ensure_future(_contained(work))
        self._task = cast("asyncio.Future[object]", task)
        if self._reason is not None:  # told between two steps of a stream, or before the first
            task.cancel()
        try:
            return await task
        except asyncio.CancelledError:
            if self._reason is not None:
                raise self._reason from None
            raise
        except NiwakiError:
            raise
        except Exception as error:
            raise _failed(error) from error
        finally:
            task.cancel()

    def interrupt(self, reason: EngineStopped) -> None:
        self._reason = reason
        self.close()

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _charge(self, num_tokens: int) -> None:
        self.num_tokens += num_tokens


async def _contained(work: Callable[[], Awaitable[_Value]]) -> _Value:
    """What it gives. Raises an Exception also where it raises what is to end a thread or a process, as `sys.exit()` and
    tasks that were cancelled do: out of a task the first would end the server, with everybody's requests."""
    try:
        return await work()
    except Exception:
        raise
    except BaseException as stop:
        task = asyncio.current_task()
        if isinstance(stop, GeneratorExit) or (task is not None and task.cancelling()):
            raise
        raise RuntimeError(f"the program raised {type(stop).__name__}") from stop


class _Metered:
    """A backend that tells how many tokens were computed, and each generation's end; in all else the one that it
    stands before."""

    def __init__(self, backend: Engine, charge: Callable[[int], None], ended: Callable[[Generation], None]) -> None:
        self._backend = backend
        self._charge = charge
        self._ended = ended

    def __getattr__(self, name: str) -> object:
        return getattr(self._backend, name)

    def generate(self, branch: Branch, delta: Sequence[Segment], params: SamplingParams) -> Generation:
        generation = self._backend.generate(branch, delta, params, streams=None)

        def count() -> None:
            self._ended(generation)
            if generation.error() is None:
                self._charge(tokens_of(generation.result()))

        generation.add_done_callback(count)
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
        pending = self._backend.score(branch, delta, continuations, heal=heal, unconditional=unconditional)

        def count() -> None:
            if pending.error() is None:
                self._charge(tokens_of(scores=pending.result()))

        pending.add_done_callback(count)
        return pending


Streams = Annotated[bool, Query(description="Server-sent events while it runs.")]


def _page_of(program: ServedProgram, backend: Engine) -> Callable[..., Awaitable[Response]]:
    async def page(request: Request, stream: Streams = False) -> Response:
        service = service_of(request)
        body = await read_body(request, program.body, service.config)
        service.admit(1)
        run = _Run(backend, service.metrics)
        service.enter(run)
        if stream:
            return EventStream(_events(_steps(program, body, run), run), lambda: service.finish(run))

        async def called() -> bytes:
            with _faults_of(program, body):
                return _written(await program.call(body, run.backend))

        return Response(await _answered(request, service, run, called), media_type="application/json")

    return page


def _batch_page_of(
    program: ServedProgram, batch: type[BaseModel], backend: Engine
) -> Callable[..., Awaitable[Response]]:
    async def page(request: Request, stream: Streams = False) -> Response:
        service = service_of(request)
        body = await read_body(request, batch, service.config)
        rows: Sequence[BaseModel | ApiError] = getattr(body, "rows")  # noqa: B009  # of a class made at run time
        size = sum(not isinstance(row, ApiError) for row in rows)
        service.admit(size)
        run = _Run(backend, service.metrics, size)
        service.enter(run)
        free = asyncio.Semaphore(MAX_PARALLEL)

        async def one(row: BaseModel | ApiError) -> bytes:
            if isinstance(row, ApiError):
                return to_json(row.body())
            async with free:
                try:
                    with _faults_of(program, row):
                        return _written({"values": await _contained(lambda: program.call(row, run.backend))})
                except ApiError as error:  # it is this row's own
                    return to_json(error.body())

        if stream:
            return EventStream(_events(_as_they_come(one, rows), run), lambda: service.finish(run))
        results = await _answered(request, service, run, lambda: _all(one, rows))
        return Response(b'{"results":[' + b",".join(results) + b"]}", media_type="application/json")

    return page


def _written(values: Mapping[str, object]) -> bytes:
    """As JSON. Raises ValueError: NaN or infinity; null would be a value of another type."""
    return json.dumps(values, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


async def _all(
    one: Callable[[BaseModel | ApiError], Awaitable[bytes]], rows: Sequence[BaseModel | ApiError]
) -> Sequence[bytes]:
    return await asyncio.gather(*(one(row) for row in rows))


async def _answered(request: Request, service: Service, run: _Run, work: Callable[[], Awaitable[_Value]]) -> _Value:
    try:
        return await unless_gone(request.receive, run.result(work))
    finally:
        service.finish(run)


async def _steps(program: ServedProgram, body: BaseModel, run: _Run) -> AsyncIterator[bytes]:
    """`{"name", "value", "done"}` while values grow, then `{"values"}` with all that the program answers."""
    with _faults_of(program, body):
        async for step in program.stream(body, run.backend):
            if isinstance(step, Mapping):
                yield _written({"values": step})
            else:
                yield _written({"name": step.name, "value": step.value, "done": step.is_done})


async def _as_they_come(
    one: Callable[[BaseModel | ApiError], Awaitable[bytes]], rows: Sequence[BaseModel | ApiError]
) -> AsyncIterator[bytes]:
    """The result of each row beside its `index`, the first one to be there first."""

    async def numbered(index: int) -> bytes:
        return b'{"index":%d,' % index + (await one(rows[index])).removeprefix(b"{")

    running = [asyncio.ensure_future(numbered(index)) for index in range(len(rows))]
    try:
        for next_one in asyncio.as_completed(running):
            yield await next_one
    finally:
        for task in running:
            task.cancel()


async def _events(steps: AsyncIterator[bytes], run: _Run) -> AsyncIterator[bytes]:
    """An event for each step; one that says why where they fail."""
    try:
        while (step := await run.result(lambda: anext(steps, None))) is not None:
            yield event(step)
    except NiwakiError as error:
        yield event(to_json(as_api_error(error).body()))
    yield DONE


@contextmanager
def _faults_of(program: ServedProgram, body: BaseModel) -> Iterator[None]:
    """Raises ApiError for what the program raises inside: 500 for a fault of its own, which no caller can do anything
    about; what an argument brought about, or the length of a text, as everywhere."""
    try:
        yield
    except NiwakiError as error:
        parameter = program.parameter_in(error, body)
        is_own = isinstance(error, (ProgramError, ConfigError, UnsupportedByBackend))
        if parameter is None and (is_own or program.always_fails_with(error)):
            raise _failed(error) from error
        log.debug("a program was refused something", exc_info=error)
        told = as_api_error(error)
        if told.status == 400:
            told.param = parameter
        raise told from error
    except Exception as error:
        raise _failed(error) from error


def _failed(error: Exception) -> ApiError:
    return failed_inside(error, "the program failed", in_program=True)
