"""The web page at /, and what it draws: the caller's part of the radix tree, and the engine's numbers.

The page is static, so it is open to everybody; it asks the API for everything else, with the reader's key.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from niwaki.radix.outline import OutlineNode
from niwaki.runtime.server.access import key_of, service_of
from niwaki.runtime.server.errors import ApiError
from niwaki.runtime.server.openai_shapes import Json
from niwaki.runtime.server.service import Service
from niwaki.runtime.server.wire import json_response

FOLDER = Path(__file__).parent / "page"
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
HEADERS = {
    # Nothing but its own files, and no page around it.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cache-control": "no-cache",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
MAX_NODES = 500

public_router = APIRouter()
router = APIRouter()

_files = {path.name: path for path in FOLDER.iterdir() if path.suffix in KINDS}


@public_router.get("/", include_in_schema=False)
async def page() -> Response:
    return _file("index.html")


@public_router.get("/page/{name}", include_in_schema=False)
async def page_file(name: str) -> Response:
    return _file(name)


@router.get("/debug/tree")
async def tree(request: Request, limit: Annotated[int, Query(ge=1, le=MAX_NODES)] = 200) -> Response:
    """The caller's part of the radix tree as it stands: at most `limit` nodes, parents before children."""
    service = service_of(request)
    namespace = service.namespace(key_of(request), None)
    nodes = await service.apart(lambda: service.engine.outline(limit, namespace))
    return json_response({"nodes": [_node(service, node) for node in nodes], "usage": dict(service.engine.usage())})


def _node(service: Service, node: OutlineNode) -> Json:
    tokenizer = service.model.tokenizer
    return {
        "parent": None if node.parent < 0 else node.parent,
        "text": "".join(tokenizer.token_text(token_id) for token_id in node.token_ids),
        "num_tokens": node.num_tokens,
        "num_pages": node.num_pages,
        "num_children": node.num_children,
        "is_cut": len(node.token_ids) < node.num_tokens,
        "is_locked": node.is_locked,
        "is_pinned": node.is_pinned,
        "used": node.stamp,
    }


def _file(name: str) -> Response:
    path = _files.get(name)
    if path is None:
        raise ApiError(404, "no such page", code="not_found")
    return Response(path.read_bytes(), media_type=f"{KINDS[path.suffix]}; charset=utf-8", headers=HEADERS)
