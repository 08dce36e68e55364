"""What every route depends on: the service behind it, and who is asking. Routes without `authenticated` are public."""

from __future__ import annotations

from fastapi import Request

from niwaki.runtime.server.service import Service, caller


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


async def administrative(request: Request) -> None:
    service_of(request).check_admin(request.headers.get("authorization"))
