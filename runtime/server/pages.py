"""The web page at /, and what it draws: the caller's part of the radix tree, and the engine's numbers.

The page is static, so it is open to everybody; it asks the API for everything else, with the reader's key.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from niwaki.runtime.pictures.tree_view import DEFAULT_NODES, TreeNode
from niwaki.runtime.server.access import key_of, service_of
from niwaki.runtime.server.answers import TreeAnswer
from niwaki.runtime.server.errors import ApiError
from niwaki.runtime.server.wire import gives, json_response

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


@router.get("/debug/tree", responses=gives(TreeAnswer))
async def tree(request: Request, limit: Annotated[int, Query(ge=1, le=MAX_NODES)] = DEFAULT_NODES) -> Response:
    """The caller's part of the radix tree as it stands: at most `limit` nodes, parents before children."""
    service = service_of(request)
    namespace = service.namespace(key_of(request), None)
    nodes = await service.apart(lambda: service.engine.outline(limit, namespace))
    shown = [asdict(TreeNode.of(node, service.model.tokenizer)) for node in nodes]
    return json_response({"model": service.model_names[0], "nodes": shown, "usage": dict(service.engine.usage())})


def _file(name: str) -> Response:
    path = _files.get(name)
    if path is None:
        raise ApiError(404, "no such page", code="not_found")
    return Response(path.read_bytes(), media_type=f"{KINDS[path.suffix]}; charset=utf-8", headers=HEADERS)
