"""Pages of one address, called at once: the framework's way to them, through each router and the dependencies of each
route, took longer than what most of them do."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping

from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from niwaki.runtime.api import NiwakiError
from niwaki.runtime.server.access import authenticated

Page = Callable[[Request], Awaitable[Response]]
Pages = Mapping[tuple[str, str], Page]


def quick_pages(routers: Iterable[APIRouter]) -> Pages:
    """Of routers behind the key, by method and path: those whose function is told the request and nothing else."""
    found: dict[tuple[str, str], Page] = {}
    for route in (route for router in routers for route in router.routes):
        if isinstance(route, APIRoute) and "{" not in route.path and _is_told_the_request_alone(route.endpoint):
            found |= {(method, route.path): route.endpoint for method in route.methods or ()}
    return found


def _is_told_the_request_alone(page: Callable[..., object]) -> bool:
    return [*inspect.signature(page).parameters] == ["request"]


class QuickPages:
    """Around the routes, which have the other pages, and say what is wrong with an address or a method."""

    def __init__(
        self, app: ASGIApp, pages: Pages, refused: Callable[[Request, Exception], Awaitable[Response]]
    ) -> None:
        """`refused` answers what a page raised."""
        self._app = app
        self._pages = pages
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        page = self._pages.get((scope["method"], scope["path"])) if scope["type"] == "http" else None
        if page is None:
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive, send)
        try:
            await authenticated(request)
            response = await page(request)
        except NiwakiError as error:
            response = await self._refused(request, error)
        await response(scope, receive, send)
