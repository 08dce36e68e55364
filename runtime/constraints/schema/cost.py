"""What a normal schema costs: how far one token can move the end away, and whether compiling it is surely quick."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from niwaki.runtime.api import ConstraintError
from niwaki.runtime.constraints.regex_parser import Parser
from niwaki.runtime.constraints.regex_tree import cost_of as cost_of_regex
from niwaki.runtime.constraints.schema.arrays import least_path
from niwaki.runtime.constraints.schema.document import Json, json_text

NUMBER_BYTES: Final = 48  # a bounded number: its digits
UNKNOWN_PATTERN: Final = 400
MOST_INSIDE: Final = 4000
SMALL_TEXT: Final = 6000
SMALL_COUNT: Final = 500
SMALL_PATTERN: Final = 3000
_COUNT = re.compile(r"\{\d*,?(\d{3,})")


@dataclass(frozen=True, slots=True)
class Cost:
    value: int
    inside: int
    is_small: bool


def cost_of(root: Json) -> Cost:
    """See `normal.NormalSchema`."""
    measure = _Measure(root)
    text = json_text(root)
    return Cost(measure.value, min(measure.inside, MOST_INSIDE), len(text) <= SMALL_TEXT and measure.is_small)


class _Measure:
    def __init__(self, root: Json) -> None:
        definitions = root.get("$defs") if isinstance(root, dict) else None
        self._definitions: dict[str, Json] = definitions if isinstance(definitions, dict) else {}
        self._shortest: dict[str, int] = {}
        self.value = self.inside = 0
        self.is_small = True
        for _ in range(len(self._definitions) + 1):
            before = dict(self._shortest)
            for name, schema in self._definitions.items():
                found = self._of(schema)
                if found is not None:
                    self._shortest[name] = found
            if self._shortest == before:
                break
        self._of(root)

    def _of(self, schema: Json) -> int | None:
        """The shortest text of a schema in bytes, about; None where it is not known yet."""
        if not isinstance(schema, dict):
            return 1 if schema else None
        found = self._shortest_of(schema)
        if found is not None:
            self.value = max(self.value, found + 4)
        return found

    def _shortest_of(self, schema: dict[str, Json]) -> int | None:
        if isinstance(reference := schema.get("$ref"), str):
            return self._shortest.get(reference.removeprefix("#/$defs/"))
        if isinstance(branches := schema.get("anyOf"), list):
            known = [length for branch in branches if (length := self._of(branch)) is not None]
            return min(known, default=None)
        if isinstance(values := schema.get("enum"), list):
            lengths = [len(json_text(value).encode()) for value in values]
            self.inside = max(self.inside, *lengths)
            self.value = max(self.value, *lengths)
            return min(lengths)
        names = schema.get("type")
        if names is None:
            return 1
        kinds = names if isinstance(names, list) else [names]
        lengths = [length for kind in kinds if (length := self._of_kind(str(kind), schema)) is not None]
        return min(lengths, default=None)

    def _of_kind(self, kind: str, schema: dict[str, Json]) -> int | None:
        match kind:
            case "null" | "boolean":
                return 4
            case "integer" | "number":
                if "not" in schema:
                    return 3
                if schema.keys() & {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}:
                    self.inside = max(self.inside, NUMBER_BYTES)
                    self._count(schema.get("multipleOf"))
                    return NUMBER_BYTES
                return 1
            case "string":
                return self._of_string(schema)
            case "array" if "x-automaton" in schema:
                return least_path(schema, self._of)
            case "array":
                prefix = schema.get("prefixItems")
                items = [*prefix] if isinstance(prefix, list) else []
                least = schema.get("minItems")
                count = least if isinstance(least, int) else 0
                lengths = [self._of(item) for item in [*items, schema.get("items", True)]]
                wanted = [lengths[min(index, len(lengths) - 1)] for index in range(count)]
                self._count(count)
                self._count(schema.get("maxItems"))
                return None if None in wanted else 2 + sum(length + 1 for length in wanted if length is not None)
            case _:
                return self._of_object(schema)

    def _of_string(self, schema: dict[str, Json]) -> int:
        least, inside = schema.get("minLength"), 0
        shortest = least if isinstance(least, int) else 0
        self._count(least)
        self._count(schema.get("maxLength"))
        if isinstance(pattern := schema.get("pattern"), str):
            inside = _pattern_bytes(pattern)
            self.is_small &= inside <= SMALL_PATTERN and len(pattern) <= SMALL_PATTERN
        self.inside = max(self.inside, inside * (1 + min(shortest, 8)))
        return 2 + shortest + inside

    def _of_object(self, schema: dict[str, Json]) -> int | None:
        properties = schema.get("properties")
        required = schema.get("required")
        wanted = required if isinstance(required, list) else []
        total: int | None = 2
        for name, inner in properties.items() if isinstance(properties, dict) else ():
            length = self._of(inner)
            key = len(json_text(name).encode()) + 2
            self.inside = max(self.inside, key)
            if length is not None:
                self.value = max(self.value, length + key)
            if name in wanted:
                total = None if total is None or length is None else total + length + key
        for keyword in ("additionalProperties", "patternProperties"):
            inner = schema.get(keyword, {})
            if keyword == "patternProperties" and isinstance(inner, dict):
                self.is_small &= not inner
                self.inside = max([self.inside, *(_pattern_bytes(regex) for regex in inner)])
                for value in inner.values():
                    self._of(value)
            else:
                self._of(inner)
        return total

    def _count(self, count: Json) -> None:
        if isinstance(count, int | float) and not isinstance(count, bool) and (count > SMALL_COUNT or count % 1):
            self.is_small = False


@lru_cache(maxsize=512)
def _pattern_bytes(pattern: str) -> int:
    try:
        return min(cost_of_regex(Parser(pattern).parse()), MOST_INSIDE)
    except ConstraintError:  # outside our dialect, not outside the engine's
        return UNKNOWN_PATTERN
