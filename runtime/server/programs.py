"""A team's own programs as pages: POST /programs/NAME with the parameters as JSON answers with the values as JSON."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from niwaki.runtime.api import EngineStopped, NiwakiError
from niwaki.runtime.engine import Engine
from niwaki.runtime.server.access import service_of
from niwaki.runtime.server.errors import failed_inside
from niwaki.runtime.server.sse import unless_gone
from niwaki.runtime.server.wire import json_response, read_body, takes


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

    async def call(self, body: BaseModel, backend: Engine) -> Mapping[str, object]:
        """Run it. Cancelling the call cancels what it runs."""
        ...


def programs_router(programs: Sequence[ServedProgram], engine: Engine) -> APIRouter:
    """One page for each program."""
    router = APIRouter()
    for program in programs:
        router.add_api_route(
            f"/programs/{program.name}",
            _page_of(program, engine),
            methods=["POST"],
            summary=program.name,
            description=program.about,
            openapi_extra=takes(program.body),
        )
    return router


class _Run:
    """A program that runs for a client, as the service counts and ends it."""

    size = 1

    def __init__(self, task: asyncio.Future[Mapping[str, object]]) -> None:
        self._task = task
        self._reason: EngineStopped | None = None

    async def values(self) -> Mapping[str, object]:
        """What the program answers. Raises what it failed with, as an ApiError when it is no NiwakiError."""
        try:
            return await self._task
        except asyncio.CancelledError:
            if self._reason is not None:
                raise self._reason from None
            raise
        except NiwakiError:
            raise
        except Exception as error:
            raise failed_inside(error, "the program failed") from error

    def interrupt(self, reason: EngineStopped) -> None:
        self._reason = reason
        self._task.cancel()

    def close(self) -> None:
        self._task.cancel()


def _page_of(program: ServedProgram, engine: Engine) -> Callable[[Request], Awaitable[Response]]:
    async def page(request: Request) -> Response:
        service = service_of(request)
        body = await read_body(request, program.body, service.config)
        service.admit(1)
        run = _Run(asyncio.ensure_future(program.call(body, engine)))
        service.enter(run)
        try:
            values = await unless_gone(request.receive, run.values())
        finally:
            service.finish(run)
        return json_response(values)

    return page
