"""B6: each field of each page at the edges that /openapi.json gives it, and of other types. What is outside is a 400
that names the field; what is inside is answered, or refused for what its value means; nothing is ever a 5xx."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import httpx2
import pytest
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]  # ships no types

from niwaki.runtime.engine import Engine
from tests.runtime.server.conftest import wait_until_idle

Schema = Mapping[str, Any]
Place = tuple[str | int, ...]  # keys from the body down to a field; 0: the first of a list
Field = tuple[Place, Schema]

DEPTH = 5  # of keys
MAX_SIZE = 70_000  # of a text or a list: a body has 4 MiB
NAN = "not a number: stands bare in the body"
OTHER_TYPES: tuple[object, ...] = (None, True, 5, 1.5, "x", [], {}, [None], {"no such field": 1})
# Bodies that are answered. {branch} and {session} are made anew for each request.
USER = [{"role": "user", "content": "the"}]
SHORT = {"max_new_tokens": 1}
RESOLVED: Mapping[str, object] = {
    **SHORT, "min_tokens": 0, "n": 1, "temperature": 0, "top_p": 1, "top_k": -1, "min_p": 0, "frequency_penalty": 0,
    "presence_penalty": 0, "repetition_penalty": 1, "logit_bias": [], "seed": None, "stop": [], "stop_token_ids": [],
    "stop_regex": None, "ignore_eos": False, "return_logprob": False, "top_logprobs_num": 0, "priority": 0,
    "constraint": None,
}  # fmt: skip
BASES: Mapping[str, Mapping[str, object]] = {
    "/v1/chat/completions": {"messages": USER, "max_tokens": 1},
    "/v1/completions": {"prompt": "the", "max_tokens": 1},
    "/v1/embeddings": {"input": "the"},
    "/v1/responses": {"input": "the", "max_output_tokens": 16, "store": False},
    "/generate": {"text": "the", "sampling_params": SHORT},
    "/abort_request": {"rid": "nobody's"},
    "/tokenize": {"prompt": "the"},
    "/detokenize": {"tokens": [5]},
    "/backend/render": {"messages": USER, "add_generation_prompt": True},
    "/branches": {},
    "/branches/{branch_id}/fork": {"delta": []},
    "/branches/{branch_id}/append": {"delta": [{"text": "the"}]},
    "/branches/{branch_id}/generate": {"delta": [{"text": "the"}], "params": RESOLVED},
    "/branches/{branch_id}/listen": {},
    "/branches/{branch_id}/score": {"delta": [{"text": "the"}], "continuations": ["a", "b"]},
    "/scripts": {"branches": [[]], "is_over": True},
    "/v1/sessions": {},
    "/v1/sessions/{session_id}": {},
    "/v1/sessions/{session_id}/rewind": {"turn": None},
    "/v1/sessions/{session_id}/branch": {},
    "/v1/sessions/{session_id}/branches": {},
    "/v1/sessions/{session_id}/turns": {"after": None, "messages": USER},
}
# Pages whose bodies are those of others.
SAME = {
    "/v1/tokenize": "/tokenize",
    "/v1/detokenize": "/detokenize",
    "/v1/sessions/{session_id}/chat/completions": "/v1/chat/completions",
}

# Why a body may be refused that has the form that it should: its values do not go together, name what is not there, are
# texts in a language of their own, or ask for what this model has not.
OF_MEANING = re.compile(
    "|".join(
        (
            "must be split off once", "was not trained to embed", "max_tokens 0 needs echo",
            "give either text or input_ids",
            "[0-9]+ [a-z_]+ for 1 prompts", "is above max_new_tokens", "is not in the vocabulary of",
            "json_spacing needs a json_schema", "this server has the model 'toy' only",
            "there is no such response", "this session has no such turn", "the session has gone on meanwhile",
            "a message needs content", "only an assistant's message has", "a tool's message, and no other, has",
            "the model's chat template refuses the roles", "it needs an assistant's message with a content",
            "this model's chat template has no form of tool calls", "tool_choice needs tools", "are not JSON: '",
            "this model does not reason", "no markers of reasoning",
            "the JSON schema is not valid JSON", "the grammar cannot be enforced", "an ebnf grammar has rules such as",
            "json_spacing is about JSON", "structured_outputs: give one of", "states written out, at most",
            "top_logprobs needs logprobs", "stream_options needs stream", "disagree; give one",
            "above the [0-9]+ tokens", "token ids must be from", "at most [0-9]+ fit with one new one",
            "new ones need [0-9]+ tokens", "at most [0-9]+ fit into the context",
            # Of texts so long that they are not shown whole: a slow machine does not count all of their states in time.
            r"\.\.\.' is too complex to compile within",
        )
    )
)  # fmt: skip

# Of a program's own calls: bounds are those of `SamplingParams`, which the document does not have.
WITHOUT_BOUNDS = {"/branches/{branch_id}/generate"}


class Document:
    """What /openapi.json says of bodies."""

    def __init__(self, said: Mapping[str, Any]) -> None:
        self.pages: dict[str, Schema] = {
            page: methods["post"]["requestBody"]["content"]["application/json"]["schema"]
            for page, methods in said["paths"].items()
            if "requestBody" in methods.get("post", {})
        }
        self._components = said["components"]

    def allows(self, page: str) -> Callable[[object], bool]:
        check = Draft202012Validator({**self.pages[page], "components": self._components})
        return lambda body: bool(check.is_valid(body))

    def fields(self, schema: Schema, place: Place = ()) -> Iterator[Field]:
        """Those of objects of this kind, and of the objects in them."""
        if len(place) >= DEPTH:
            return
        for kind in self.kinds(schema):
            inside = {**kind.get("properties", {}), **({0: kind["items"]} if "items" in kind else {})}
            for key, found in inside.items():
                yield (*place, key), found
                yield from self.fields(found, (*place, key))

    def kinds(self, schema: Schema) -> Iterator[Schema]:
        """Without references and unions."""
        while "$ref" in schema:
            schema = self._components["schemas"][schema["$ref"].rpartition("/")[2]]
        options = schema.get("anyOf") or schema.get("oneOf")
        if options is None:
            yield schema
        else:
            for option in options:
                yield from self.kinds(option)

    def least(self, schema: Schema) -> object:
        """A small value of this kind."""
        kind = next(kind for kind in self.kinds(schema) if kind.get("type") != "null")
        if "const" in kind or "enum" in kind:
            return kind["const"] if "const" in kind else kind["enum"][0]
        match kind.get("type"):
            case "object":
                return {key: self.least(kind["properties"][key]) for key in kind.get("required", ())}
            case "array":
                return self.items(kind, kind.get("minItems", 0))
            case "string":
                return "a" * max(1, kind.get("minLength", 0))
            case "integer" | "number":
                return kind.get("minimum", 1)
        return True

    def with_field(self, schema: Schema, body: object, place: Place, value: object) -> object:
        """A copy of the body where this stands there; what lies between is made as small as it can be.

        Raises LookupError where no body of this kind has such a place.
        """
        if not place:
            return value
        key, rest = place[0], place[1:]
        for kind in self.kinds(schema):
            inside = kind.get("items") if key == 0 else kind.get("properties", {}).get(key)
            if inside is None:
                continue
            with suppress(LookupError):  # there may be another kind that has it
                if key == 0:
                    items = list(body) if isinstance(body, list) and body else [self.least(inside)]
                    return [self.with_field(inside, items[0], rest, value), *items[1:]]
                held = dict(body) if isinstance(body, dict) else {}
                needed = {name: self.least(kind["properties"][name]) for name in kind.get("required", ())}
                return {**needed, **held, key: self.with_field(inside, held.get(str(key)), rest, value)}
        raise LookupError(place)

    def values(self, schema: Schema) -> Iterator[object]:
        """At the edges of each kind that it may have and right beside them, then of other kinds."""
        for kind in self.kinds(schema):
            for bound in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
                if bound in kind:
                    yield from (kind[bound] - 1, kind[bound], kind[bound] + 1)
            for name, made in (("Length", lambda size: "a" * size), ("Items", partial(self.items, kind))):
                bounds = [kind[bound + name] for bound in ("min", "max") if bound + name in kind]
                sizes = [bound + more for bound in bounds for more in (-1, 0, 1)]
                yield from (made(size) for size in sizes if 0 <= size <= MAX_SIZE)
            yield from kind.get("enum", ())
            if "const" in kind:
                yield kind["const"]
        yield from OTHER_TYPES
        yield NAN

    def items(self, kind: Schema, size: int) -> list[object]:
        return [self.least(kind.get("items", {}))] * size


@pytest.fixture(scope="module")
def document(client: httpx2.Client) -> Document:
    return Document(client.get("/openapi.json").json())


def test_every_page_with_a_body_is_asked(document: Document) -> None:
    assert document.pages.keys() == BASES.keys() | SAME.keys()
    for page, other in SAME.items():
        assert document.pages[page] == document.pages[other]


@pytest.mark.parametrize("page", BASES)
def test_fields_are_refused_outside_of_their_edges_and_by_their_names(
    client: httpx2.Client, engine: Engine, document: Document, page: str
) -> None:
    schema, is_allowed = document.pages[page], document.allows(page)
    assert is_allowed(BASES[page])
    asked: set[str] = set()
    wrong: list[str] = []
    for place, field in document.fields(schema):
        if place[0] == "input_ids":  # which is there instead of a text
            base: Mapping[str, object] = {name: given for name, given in BASES[page].items() if name != "text"}
        else:
            base = BASES[page]
        for value in document.values(field):
            body = document.with_field(schema, base, place, value)
            said = json.dumps(body).replace(f'"{NAN}"', "NaN")
            if said in asked:
                continue
            asked.add(said)
            answer = client.post(path(client, page), content=said, headers={"content-type": "application/json"})
            if page in WITHOUT_BOUNDS and answer.status_code == 400:
                continue
            fault = judged(answer, is_allowed(body) and value != NAN, str(place[0]))
            if fault:
                wrong.append(f"{place} = {str(value)[:50]}: {fault}")
    wait_until_idle(engine)
    assert not wrong, f"{len(wrong)} of {len(asked)}:\n" + "\n".join(wrong)


def path(client: httpx2.Client, page: str) -> str:
    if "{branch_id}" in page:
        page = page.replace("{branch_id}", client.post("/branches", json={}).json()["id"])
    if "{session_id}" in page:
        page = page.replace("{session_id}", client.post("/v1/sessions", json={}).json()["id"])
    return page


def judged(answer: httpx2.Response, is_allowed: bool, name: str) -> str | None:
    """What is wrong with it."""
    if answer.status_code >= 500:
        return f"{answer.status_code} {answer.text[:200]}"
    if is_allowed:
        is_right = answer.status_code == 200 or OF_MEANING.search(answer.json()["error"]["message"])
        return None if is_right else f"allowed, {answer.status_code} {answer.text[:200]}"
    if answer.status_code != 400:
        return f"not allowed, {answer.status_code}"
    param = answer.json()["error"]["param"]
    return None if param is None or str(param).startswith(name) else f"named {param}"
