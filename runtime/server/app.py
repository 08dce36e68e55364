"""The application: routes, who may use them, how errors leave, and what is counted. Knows nothing of sockets."""

from __future__ import annotations

import asyncio
import re
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import PlainTextResponse
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import HTMLResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from niwaki.runtime.api import NiwakiError
from niwaki.runtime.server import native, native_beside, openai_routes, pages
from niwaki.runtime.server.access import OPERATING, authenticated, is_for_metrics, scraping, service_of
from niwaki.runtime.server.answers import OpenApiAnswer, StateAnswer
from niwaki.runtime.server.elsewhere import hint_of_page
from niwaki.runtime.server.errors import ApiError, ClientGone, as_api_error, overloaded
from niwaki.runtime.server.heads import check_head
from niwaki.runtime.server.logs import access_log, request_id
from niwaki.runtime.server.metrics import CONTENT_TYPE
from niwaki.runtime.server.quick import QuickPages, quick_pages
from niwaki.runtime.server.reference import HEADERS, reference_page
from niwaki.runtime.server.service import Service
from niwaki.runtime.server.tracing import Tracing
from niwaki.runtime.server.wire import ErrorAnswer, gives, json_response, reference, schemas

MAX_REQUEST_ID = 128
CLIENT_CLOSED = 499  # nobody reads it; the field's number for it in counts
# What is refused before it is routed and read while the queue is full: more of these come than of all others.
GENERATING = re.compile(
    "/v1/(chat/completions|completions|responses|sessions/[^/]+/(chat/completions|branches))|/generate|/scripts"
    "|/branches(/[^/]+/(generate|score))?|/programs/[^/]+(/batch)?"
)
# As clients ask for them whose base_url lacks the /v1.
OPENAI_PAGES = ("/chat/completions", "/completions", "/responses", "/models", "/embeddings")
PROBED = ("/health", "/ready")  # by those who know the server's address and none of its names, as Kubernetes' probes do

ERRORS = {
    status: {"description": about, "content": {"application/json": {"schema": reference(ErrorAnswer)}}}
    for status, about in (("4XX", "The request cannot be done"), ("5XX", "The server could not do it"))
}


def make_app(service: Service, version: str, *more: APIRouter, tracing: Tracing | None = None) -> FastAPI:
    """The ASGI application in front of one service. Its lifespan closes the service. `more` routes need the key."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.start()
        yield
        service.close()

    # The documentation pages of FastAPI load scripts from elsewhere; /openapi.json is a route of ours, behind the key.
    app = FastAPI(title="niwaki", version=version, lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.router.redirect_slashes = False  # it would tell which pages there are without the key
    app.state.service = service
    # A request is held against the routes in this order: those that are asked most stand first.
    guarded = APIRouter(dependencies=[Depends(authenticated)])
    private = (openai_routes.router, native.router, native_beside.router, *more, _private, pages.router)
    for router in private:
        guarded.include_router(router)
    for router in (guarded, _public, pages.public_router):
        app.include_router(router)
    app.include_router(_measured)
    app.include_router(native_beside.admin_router)
    for kind in (NiwakiError, HTTPException, RequestValidationError):
        app.add_exception_handler(kind, _answer_error)
    app.add_middleware(QuickPages, pages=quick_pages(private), refused=_answer_error)
    app.add_middleware(_Turnstile, service=service)
    if service.config.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=service.config.cors_origins,
            allow_methods=["GET", "POST", "PUT", "DELETE"],
            allow_headers=["*"],  # OpenAI's client for browsers sends some of its own
            expose_headers=["x-request-id", "retry-after"],
        )
    app.add_middleware(_Door, service=service, tracing=tracing or Tracing())
    return app


_public = APIRouter()
_private = APIRouter()
_measured = APIRouter(dependencies=[Depends(scraping)])


@_public.get("/health", responses=gives(StateAnswer) | gives(StateAnswer, 503))
async def health(request: Request) -> Response:
    """Liveness: the engine was heard within some seconds. Does no model work."""
    is_alive = service_of(request).engine.is_alive
    return json_response({"status": "ok" if is_alive else "engine stopped"}, 200 if is_alive else 503)


@_public.get("/ready", responses=gives(StateAnswer) | gives(StateAnswer, 503))
async def ready(request: Request) -> Response:
    """Readiness: new requests are taken."""
    is_ready = service_of(request).is_ready
    return json_response({"status": "ok" if is_ready else "not ready"}, 200 if is_ready else 503)


@_measured.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Prometheus's text format."""
    return Response(service_of(request).metrics.text(), media_type=CONTENT_TYPE)


@_private.get("/openapi.json", responses=gives(OpenApiAnswer))
async def openapi(request: Request) -> Response:
    return json_response(_description(request.app))


@_private.get("/docs", response_class=HTMLResponse)
async def docs(request: Request) -> Response:
    """Every page with its bodies, to be read in a browser."""
    return HTMLResponse(reference_page(_description(request.app)), headers=HEADERS)


def _description(app: FastAPI) -> dict[str, Any]:
    document = app.openapi()
    for methods in document["paths"].values():
        for operation in methods.values():
            operation["responses"].pop("422", None)  # FastAPI's own form of a refusal, which nobody gets
            operation["responses"] |= ERRORS
    document["components"] = {"schemas": schemas()}
    return document


async def _answer_error(request: Request, error: Exception) -> Response:
    if isinstance(error, ClientGone):
        return Response(status_code=CLIENT_CLOSED)
    headers: Mapping[str, str] | None = None
    if isinstance(error, HTTPException):  # the framework's own: no such path, no such method
        headers = error.headers  # which methods there are
        what = {404: _no_page(request.scope["path"]), 405: "this page does not take that method"}.get(
            error.status_code, error.detail
        )
        error = ApiError(error.status_code, what, code="not_found" if error.status_code == 404 else None)
    if isinstance(error, RequestValidationError):  # of what stands in the address
        first = error.errors()[0]
        param = str(first["loc"][-1])[:256]
        error = ApiError(400, f"{param}: {first['msg']}", param=param, code=str(first["type"]))
    return _refusal(service_of(request), as_api_error(error), headers)


def _no_page(path: str) -> str:
    """What is said of a path that is none. The same whatever pages there are: who has no key learns nothing."""
    is_without = path.startswith(OPENAI_PAGES)
    is_twice = path.startswith("/v1/v1/")
    base = "; the address of OpenAI's API ends with /v1, once" * (is_without or is_twice)
    return f"no such page{base or hint_of_page(path)}"


def _refusal(service: Service, error: ApiError, headers: Mapping[str, str] | None = None) -> Response:
    if error.code in ("overloaded", "rate_limit_exceeded"):
        service.metrics.refused.labels(error.code).inc()
    return _response(error, headers)


def _response(error: ApiError, headers: Mapping[str, str] | None = None) -> Response:
    return Response(
        error.content(), error.status, {**error.headers(), **(headers or {})}, media_type="application/json"
    )


class _Turnstile:
    """Around the routes: refuses what generates while there is no room for it, or its key has used up what it may, for
    half of what it costs behind its route, where its body is read. Refusals must not take the processor from those who
    were let in. Inside of CORS: a page of another origin can read them."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] in ("POST", "PUT") and GENERATING.fullmatch(scope["path"]):
            try:
                self._check(scope)
            except ApiError as refusal:
                await _refusal(self._service, refusal)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        """Raises ApiError: 401, 503 or 429."""
        key = self._service.key_of(Headers(scope=scope).get("authorization"))
        self._service.check_room()
        self._service.check_rate(key)


class _Door:
    """Around every route: refuses heads that are too large and foreign Host names, gives each answer its request id,
    counts, logs and traces it, and answers for what no route expected."""

    def __init__(self, app: ASGIApp, service: Service, tracing: Tracing) -> None:
        self._app = app
        self._service = service
        self._tracing = tracing
        self._names = service.config.host_names
        self._is_named = bool(service.config.allowed_hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        own_id = _request_id(headers.get(b"x-request-id"))
        request_id.set(own_id.decode())
        status = CLIENT_CLOSED  # unless an answer begins
        began = time.perf_counter()
        texts = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers.items()}
        end_span = self._tracing.begin(scope["method"], scope["path"], texts)

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", own_id)]
                self._service.metrics.answers.labels(str(status)).inc()
            await send(message)

        # What may be read may be asked for without its body, which uvicorn leaves out.
        asked = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
        try:
            await self._answer(asked, receive, send_named, headers)
        except asyncio.CancelledError:  # uvicorn's, of who is not answered by the end of all
            if not self._service.is_draining:
                raise
            if status == CLIENT_CLOSED:
                await _response(overloaded("the server is shutting down"))(scope, receive, send_named)
        except Exception as unexpected:
            told = as_api_error(unexpected)  # logs it
            if status == CLIENT_CLOSED:
                await _response(told)(scope, receive, send_named)
        finally:
            seconds = time.perf_counter() - began
            said = {"method": scope["method"], "path": scope["path"], "status": status, "seconds": round(seconds, 4)}
            access_log.info("%(method)s %(path)s %(status)s in %(seconds)s s", said, extra=said)
            end_span(status, own_id.decode())

    async def _answer(self, scope: Scope, receive: Receive, send: Send, headers: Mapping[bytes, bytes]) -> None:
        check_head(scope)
        is_for_metrics_alone = is_for_metrics(self._service, scope)
        if is_for_metrics_alone and scope["path"] not in OPERATING:
            await _response(ApiError(404, f"this port has {', '.join(OPERATING)} only", code="not_found"))(
                scope, receive, send
            )
            return
        is_probe = self._is_named and (is_for_metrics_alone or scope["path"] in PROBED)
        if self._names and not is_probe and _host_name(headers.get(b"host", b"")) not in self._names:
            message = "this server is not known by that host name; --allowed-host adds one"
            await _response(ApiError(400, message, code="invalid_host"))(scope, receive, send)
            return
        await self._app(scope, receive, send)


def _request_id(given: bytes | None) -> bytes:
    """The client's own, if it is one that may stand in a header; it is echoed only, never looked anything up by."""
    if given is not None and 0 < len(given) <= MAX_REQUEST_ID and all(33 <= byte < 127 for byte in given):
        return given
    return uuid.uuid4().hex.encode()


def _host_name(header: bytes) -> str:
    """The name in a Host header, without the port."""
    text = header.decode("latin-1").lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.rpartition(":")[0] if ":" in text else text
