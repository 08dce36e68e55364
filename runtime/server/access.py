"""What every route depends on: the service behind it, and who is asking. Routes without `authenticated` are public."""

from __future__ import annotations

from fastapi import Request
from starlette.types import Scope

from niwaki.runtime.server.service import Service, caller

OPERATING = ("/metrics", "/health", "/ready")


def service_of(request: Request) -> Service:
    service = request.app.state.service
    assert isinstance(service, Service)
    return service


def key_of(request: Request) -> bytes:
    """The digest of the caller's key; empty where the server has no keys. Raises ApiError: 401."""
    return service_of(request).key_of(request.headers.get("authorization"))


def owner_of(request: Request) -> str:
    """Under what the caller's key is written in a store. Raises ApiError: 401."""
    return key_of(request).hex()


async def authenticated(request: Request) -> None:
    caller.set(key_of(request))


async def scraping(request: Request) -> None:
    """Who reached the port of metrics may read them: scrapers that find their targets have no place for a key."""
    if not is_for_metrics(service_of(request), request.scope):
        await authenticated(request)


def is_for_metrics(service: Service, scope: Scope) -> bool:
    """Whether a request came in by the port of metrics, which has no other pages than those of `OPERATING`."""
    here = scope.get("server")
    return here is not None and here[1] is not None and here[1] == service.config.metrics_port


async def administrative(request: Request) -> None:
    service_of(request).check_admin(request.headers.get("authorization"))
