"""The page /docs: every route with its body, written from /openapi.json, without a script or a thing from elsewhere."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from html import escape
from typing import TypeAlias, cast

Document: TypeAlias = Mapping[str, object]

STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "h2{font-size:1.1rem;margin:2rem 0 .3rem}code,pre{font-family:ui-monospace,monospace;font-size:.85rem}"
    "pre{overflow:auto;padding:.6rem;border:1px solid #8886;border-radius:.4rem}"
    "@media(prefers-color-scheme:dark){body{background:#111;color:#ddd}a{color:#8bf}}"
)
HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; frame-ancestors 'none'",
    "cache-control": "no-cache",
    "x-content-type-options": "nosniff",
}


def reference_page(document: Document) -> str:
    """HTML of an OpenAPI document."""
    schemas = _at(document, "components", "schemas")
    routes = [
        (method.upper(), path, cast("Document", operation))
        for path, methods in sorted(_at(document, "paths").items())
        for method, operation in sorted(cast("Document", methods).items())
    ]
    parts = "".join(part for route in routes for part in _route(*route, schemas))
    title = escape(str(_at(document, "info").get("title", "")))
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{title}: every page</title><style>{STYLE}</style>"
        f'<h1>{title}</h1><p>Every page of this server; for programs <a href="/openapi.json">openapi.json</a>.'
        f"{parts}</html>\n"
    )


def _route(method: str, path: str, operation: Document, schemas: Document) -> Iterator[str]:
    yield f"<h2><code>{method} {escape(path)}</code></h2>"
    about = str(operation.get("description") or operation.get("summary") or "")
    if about:
        yield "<p>" + re.sub("`([^`]+)`", r"<code>\1</code>", escape(about)) + "</p>"
    body = _at(operation, "requestBody", "content", "application/json", "schema")
    yield from _shape("body", body, schemas)
    answer = _at(operation, "responses", "200", "content", "application/json", "schema")
    if "$ref" in answer:
        yield from _shape("answer", answer, schemas)


def _shape(what: str, schema: Document, schemas: Document) -> Iterator[str]:
    name = str(schema.get("$ref", "")).rpartition("/")[2]
    if not name:
        return
    own, *parts = _with_parts(name, schemas).items()
    yield f"<details><summary>{what}: {escape(name)}</summary><pre>{escape(own[1])}</pre>"
    for part, text in parts:
        yield f"<p><code>{escape(part)}</code></p><pre>{escape(text)}</pre>"
    yield "</details>"


def _with_parts(name: str, schemas: Document) -> Mapping[str, str]:
    """The text of a schema, and of those that it names, and so on."""
    found: dict[str, str] = {}
    names = [name]
    while names:
        one = names.pop(0)
        if one not in found:
            found[one] = json.dumps(schemas.get(one), indent=2, ensure_ascii=False)
            names += re.findall('"#/components/schemas/([^"]+)"', found[one])
    return found


def _at(document: Document, *names: str) -> Document:
    """What stands there, or nothing."""
    for name in names:
        document = cast("Document", document.get(name, {}))
    return document
