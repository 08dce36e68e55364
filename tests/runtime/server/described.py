"""Answers held against what /openapi.json says of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import httpx2
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]  # ships no types


class Described:
    """An OpenAPI document, asked about one answer after another."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self._document = document
        self._paths = [(re.compile(_pattern(path)), methods) for path, methods in document["paths"].items()]
        self._validator = cache(self._made)

    def check(self, response: httpx2.Response) -> None:
        """Raises AssertionError or ValidationError. A page or method that the document does not name may be refused."""
        request = response.request
        operation = next(self._operations(request.url.path, request.method.lower()), None)
        if operation is None:
            return
        answers = operation["responses"]
        status = str(response.status_code)
        found = answers.get(status) or answers.get(f"{status[0]}XX")
        assert found is not None, f"{request.method} {request.url.path}: {status} is not described"
        kind = response.headers.get("content-type", "").partition(";")[0]
        assert kind in found["content"], f"{request.method} {request.url.path}: {kind} is not described"
        if kind == "application/json":
            schema = found["content"][kind]["schema"]
            assert schema.keys() == {"$ref"}, "every JSON answer has a model"
            self._validator(schema["$ref"]).validate(response.json())

    def _operations(self, path: str, method: str) -> Iterator[Mapping[str, Any]]:
        return (methods[method] for pattern, methods in self._paths if method in methods and pattern.fullmatch(path))

    def _made(self, reference: str) -> Draft202012Validator:
        return Draft202012Validator({"$ref": reference, "components": self._document["components"]})


def _pattern(path: str) -> str:
    return re.sub(r"\\{\w+\\}", "[^/]+", re.escape(path))
