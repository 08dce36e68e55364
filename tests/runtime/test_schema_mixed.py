"""Keywords of all kinds in one schema, which no other test combines: values and drawn texts against a validator of the
draft that the schema names, both ways."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema  # type: ignore[import-untyped]  # ships no types
import pytest

from niwaki.runtime.api import ConstraintError, JsonSchema
from niwaki.runtime.constraints import ConstraintCompiler
from tests.benchmarks.bench_exact import decimal
from tests.runtime.test_schema_normal import VOCABULARY, Json, admits, drawn

DRAFTS = {
    "draft-04": jsonschema.Draft4Validator,
    "draft-06": jsonschema.Draft6Validator,
    "draft-07": jsonschema.Draft7Validator,
    "2020-12": jsonschema.Draft202012Validator,
}
TYPES = ["null", "boolean", "integer", "number", "string", "array", "object"]
NAMES = ["a", "b", "é", 'a"b', ""]
TEXTS = ["", "a", "ab", "abc", "é", "😀", "a\nb", '"', "\\", "1", "\x7f", "\u2028"]
NUMBERS = [0, 1, 2, 3, -1, 1.5, 0.5, 12, 10, -2.5, 9007199254740993, 1e-7, 0.1, 7]
PATTERNS = ["^a", "b$", "a|é", "^[ab]*$", "^.$", "[^a]", r"\d", "^$", "^(?!a)", r"^\S*$", r"\ba\b"]
# No keys beside one another, whose order is another matter, and numbers as the texts write them.
VALUES: list[Json] = [
    None, True, False, 0, 1, 2, -1, 0.5, 1.5, 12, "", "a", "ab", "é", 'a"b', [], [0], [1, 1], ["a"], [True, 1], [[]],
    [{}], [1, "a", None], [None, None], ["a", "b", "a"], {}, {"a": 0}, {"b": 1}, {"é": None}, {"": []},
    {"a": {"a": "b"}},
]  # fmt: skip


class Drawing:
    """A random schema in the words of a draft."""

    def __init__(self, rng: random.Random, draft: str) -> None:
        self.rng, self.draft = rng, draft
        self.definitions = 0
        self.left = rng.randint(2, 8)

    def root(self) -> dict[str, Json]:
        found = self.schema(2)
        schema = found if isinstance(found, dict) else {"not": {}}
        named = {f"d{number}": self.schema(1) for number in range(self.definitions)}
        while self.definitions > len(named):
            named[f"d{len(named)}"] = self.schema(0)
        uri = f"http://json-schema.org/{self.draft}/schema#" if "draft" in self.draft else None
        said: dict[str, Json] = {"$schema": uri} if uri else {}
        return {**said, "allOf": [schema], self.defs: named}

    @property
    def defs(self) -> str:
        return "$defs" if self.draft == "2020-12" else "definitions"

    def schema(self, depth: int) -> Json:
        rng = self.rng
        self.left -= 1
        words: list[Callable[[int], dict[str, Json]]] = [self.numbers, self.strings, self.constants, self.sizes]
        words += [self.reference, self.types]
        if depth > 0 and self.left > 0:
            words += 2 * [self.objects, self.arrays, self.combined, self.conditions]
        elif self.draft != "draft-04" and rng.random() < 0.1:
            return rng.random() < 0.6
        found: dict[str, Json] = self.types(0) if rng.random() < 0.35 else {}
        for _ in range(rng.choice([1, 2, 2, 3]) if depth > 0 else 1):
            found |= rng.choice(words)(depth - 1)
        return {"$ref": found["$ref"]} if "$ref" in found and self.draft != "2020-12" else found

    def types(self, depth: int) -> dict[str, Json]:
        return {"type": self.rng.choice(TYPES) if self.rng.random() < 0.7 else [*self.rng.sample(TYPES, 2)]}

    def numbers(self, depth: int) -> dict[str, Json]:
        key = self.rng.choice(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"])
        if key == "multipleOf":
            return {key: self.rng.choice([1, 2, 3, 0.5, 5, 0.1, 7])}
        limit = self.rng.choice(NUMBERS[:10])
        if self.draft == "draft-04" and key.startswith("ex"):
            return {key: self.rng.random() < 0.7, key.removeprefix("exclusive").lower(): limit}
        return {key: limit}

    def strings(self, depth: int) -> dict[str, Json]:
        key = self.rng.choice(["minLength", "maxLength", "pattern"])
        if key == "pattern":
            return {key: self.rng.choice(PATTERNS)}
        return {key: self.rng.randint(0, 3)}

    def constants(self, depth: int) -> dict[str, Json]:
        known: list[Json] = [*VALUES, *TEXTS, *NUMBERS]
        some = [self.rng.choice(known) for _ in range(self.rng.choice([1, 2, 4, 9]))]
        different = {json.dumps(one): one for one in some}
        return {"enum": [*different.values()]}

    def sizes(self, depth: int) -> dict[str, Json]:
        kind = self.rng.choice(["Items", "Properties"])
        found: dict[str, Json] = {f"{self.rng.choice(['min', 'max'])}{kind}": self.rng.randint(0, 3)}
        return found | ({"uniqueItems": True} if kind == "Items" and self.rng.random() < 0.6 else {})

    def reference(self, depth: int) -> dict[str, Json]:
        number = self.rng.randint(0, min(self.definitions, 2))
        self.definitions = max(self.definitions, number + 1)
        return {"$ref": f"#/{self.defs}/d{number}"}

    def objects(self, depth: int) -> dict[str, Json]:
        rng, found = self.rng, dict[str, Json]()
        for key in rng.sample(["properties", "patternProperties", "additionalProperties", "propertyNames"], 2):
            if key == "properties":
                found[key] = {rng.choice(NAMES): self.schema(depth) for _ in range(2)}
            elif key == "patternProperties":
                found[key] = {rng.choice(PATTERNS[:9]): self.schema(depth)}
            elif key == "additionalProperties":
                found[key] = rng.choice([False, self.schema(depth)])
            elif self.draft != "draft-04":
                found[key] = rng.choice([self.strings(0), self.schema(0)])
        if rng.random() < 0.4:
            found["required"] = [rng.choice(NAMES)]
        if self.draft == "2020-12" and rng.random() < 0.3:
            found["unevaluatedProperties"] = rng.choice([False, self.schema(depth)])
        return found

    def arrays(self, depth: int) -> dict[str, Json]:
        rng, found = self.rng, dict[str, Json]()
        is_new = self.draft == "2020-12"
        if rng.random() < 0.4:
            found["prefixItems" if is_new else "items"] = [self.schema(depth) for _ in range(rng.randint(1, 2))]
            if not is_new:
                found["additionalItems"] = rng.choice([False, self.schema(depth)])
        if "items" not in found and rng.random() < 0.6:
            rest = self.schema(depth)
            found["items"] = rest if isinstance(rest, dict) or self.draft != "draft-04" else {}
        if self.draft != "draft-04" and rng.random() < 0.5:
            found["contains"] = self.schema(depth)
            for key in ("minContains", "maxContains") if is_new else ():
                if rng.random() < 0.5:
                    found[key] = rng.randint(0, 2)
        if is_new and rng.random() < 0.3:
            found["unevaluatedItems"] = rng.choice([False, self.schema(depth)])
        return found | (self.sizes(0) if rng.random() < 0.4 else {})

    def combined(self, depth: int) -> dict[str, Json]:
        key = self.rng.choice(["anyOf", "oneOf", "allOf", "not"])
        return {key: self.schema(depth) if key == "not" else [self.schema(depth) for _ in range(2)]}

    def conditions(self, depth: int) -> dict[str, Json]:
        rng = self.rng
        if self.draft in ("draft-04", "draft-06") or rng.random() < 0.4:
            key = "dependentSchemas" if self.draft == "2020-12" else "dependencies"
            return {key: {rng.choice(NAMES): self.schema(depth)}}
        branches = {key: self.schema(depth) for key in ("then", "else") if rng.random() < 0.75}
        return {"if": self.schema(depth), **branches}


@pytest.fixture(scope="module")
def compiler() -> Iterator[ConstraintCompiler]:
    compiler = ConstraintCompiler(VOCABULARY, seconds=20, max_bytes=1)
    yield compiler
    compiler.close()


def valid_ones(validator: Any, values: list[Json]) -> list[bool] | None:
    """None where the schema refers to itself without an end, which ends in the validator as it may."""
    try:
        return [validator.is_valid(decimal(json.dumps(value))) for value in values]
    except RecursionError:
        return None
    except BaseException as error:  # rpds, which the validator looks references up with, panics instead
        if type(error).__name__ != "PanicException":
            raise
        return None


@pytest.mark.parametrize("draft", DRAFTS)
def test_values_and_drawn_texts_are_those_of_a_validator(draft: str, compiler: ConstraintCompiler) -> None:
    taken = 0
    for seed in range(40):
        rng = random.Random(f"{draft} {seed}")
        schema = Drawing(rng, draft).root()
        try:
            DRAFTS[draft].check_schema(schema)
        except jsonschema.SchemaError:
            continue
        validator = DRAFTS[draft](decimal(json.dumps(schema)))
        valid = valid_ones(validator, VALUES)
        if valid is None:
            continue
        try:
            matcher = compiler.compile(JsonSchema(json.dumps(schema))).matcher()
        except ConstraintError as error:
            if "no text" in str(error) and any(valid):
                pytest.fail(f"{seed}: {schema} admits values, but was refused: {error}")
            continue
        taken += 1
        for value, is_valid in zip(VALUES, valid, strict=True):
            assert admits(matcher, value) == is_valid, (seed, schema, value)
        for extra in (0, 6, 20):
            text = drawn(matcher.clone(), rng, matcher.distance + extra)
            assert validator.is_valid(decimal(text)), (seed, schema, text)
    assert taken > 15
