"""A shortest text of a normal schema, put together from those of its parts."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from fractions import Fraction
from itertools import chain, count, product
from typing import Final

from niwaki.runtime.api import ConstraintError
from niwaki.runtime.constraints.regex_language import TooManyTerms
from niwaki.runtime.constraints.schema.arrays import least_items, read_automaton
from niwaki.runtime.constraints.schema.distinct import DISTINCT, DISTINCT_KEYS, kinds_of
from niwaki.runtime.constraints.schema.document import Json, as_fraction, json_text
from niwaki.runtime.constraints.schema.free_keys import free_keys
from niwaki.runtime.constraints.schema.presence import witnesses
from niwaki.runtime.constraints.schema.ranges import is_range, short_decimals, shortest_number
from niwaki.runtime.constraints.schema.steps import WITHIN_FREE, is_no_multiple, steps_not_in
from niwaki.runtime.constraints.schema.strings import joined, shortest_of, witness_of

VARIANTS: Final = 6  # how deep they are looked for
MAX_CLOSINGS: Final = 24
LONGEST_CLOSING: Final = 64  # bytes
LETTERS: Final = b"abcdefghijklmnopqrstuvwxyz"
LONGEST: Final = 4
LEAVES: Final = {"null": b"null", "boolean": b"true", "integer": b"0", "number": b"0", "string": b'""'}
Solve = Callable[[dict[str, Json]], bytes]
Letters = Callable[[int], bytes]


def _same_letter(count: int) -> bytes:
    return b"a" * count


def shortest_text(root: Json, solve: Solve, letters: Letters = _same_letter) -> bytes:
    """A shortest JSON text of the schema. `solve` finds one of a string or number that a few lines cannot; `letters`
    are so many of any.

    Raises:
        ConstraintError: the schema admits no finite text. And what `solve` raises.
    """
    found = _Texts(root, solve, letters).of(root)
    if found is None:
        raise ConstraintError("the schema admits no text: every value of it would have to hold another one")
    return found


def text_with_witness(root: Json, solve: Solve, letters: Letters) -> bytes:
    """Likewise, with a key before the one that an `x-witness` asks for, to be found from within such a key."""
    return _Texts(root, solve, letters, shows_witness=True).of(root) or b""


def closings(root: Json) -> tuple[bytes, ...]:
    """What strings may have to end with before they can: a short text of each pattern, of values and of keys, and the
    quote behind it. The short ones first; not of patterns that take long to look into."""
    patterns: dict[str, None] = {}
    parts: list[Json] = [root]
    for part in parts:  # grows while we walk
        if isinstance(part, list):
            parts += part
        elif isinstance(part, dict):
            if isinstance(pattern := part.get("pattern"), str):
                patterns[pattern] = None
            if isinstance(keys := part.get("patternProperties"), dict):
                patterns |= dict.fromkeys(keys)
            if "x-witness" in part and "object" in kinds_of(part):
                patterns |= dict.fromkeys(pattern for pattern, _ in witnesses(part))
            parts += part.values()
    texts = [text for pattern in [*patterns][:MAX_CLOSINGS] if (text := witness_of(pattern))]
    found = {json_text(text).encode()[1:]: None for text in texts}
    return tuple(sorted((closing for closing in found if len(closing) <= LONGEST_CLOSING), key=len))


def array_ends(root: Json, solve: Solve, letters: Letters = _same_letter) -> tuple[bytes, ...]:
    """What arrays that ask for certain items may have to end with before they can: the last items of a shortest one, or
    of one that began otherwise, and the bracket behind them. The short ones first."""
    asking: list[dict[str, Json]] = []
    parts: list[Json] = [root]
    for part in parts:  # grows while we walk
        if isinstance(part, list):
            parts += part
        elif isinstance(part, dict):
            asking += [part] if "x-automaton" in part and "array" in kinds_of(part) else []
            parts += [value for key, value in part.items() if key != "enum"]  # constants say nothing
    if not asking:
        return ()
    texts = _Texts(root, solve, letters)
    found: dict[bytes, None] = {}
    for part in asking[:MAX_CLOSINGS]:
        automaton = read_automaton(part)
        for state in range(min(len(automaton[0]), MAX_CLOSINGS)):  # what is asked for may come late
            items = least_items(automaton, texts.of, state) or []
            found |= dict.fromkeys(b",".join(items[start:]) + b"]" for start in range(len(items)))
    return tuple(sorted((end for end in found if len(end) <= LONGEST_CLOSING), key=len)[:MAX_CLOSINGS])


def examples(root: Json) -> tuple[str, str]:
    """Two instances of a normal schema: a shortest one, and one that has the optional keys and an item, too."""

    def unsolved(part: dict[str, Json]) -> bytes:
        return b"..."  # numbers and texts that only the engine finds

    texts = _Texts(root, unsolved)
    return (texts.of(root) or b"").decode(), (_fuller(root, texts, 0) or b"").decode()


MAX_FULLER: Final = 6
AS_SHORT: Final = {"x-automaton", "x-witness", DISTINCT_KEYS}  # of these no fuller example is made


def _fuller(schema: Json, texts: _Texts, depth: int) -> bytes | None:
    if isinstance(schema, dict) and isinstance(reference := schema.get("$ref"), str) and depth < MAX_FULLER:
        return _fuller(texts.definitions[reference.removeprefix("#/$defs/")], texts, depth + 1)
    if not isinstance(schema, dict) or depth >= MAX_FULLER or schema.keys() & AS_SHORT:
        return texts.of(schema)
    if isinstance(branches := schema.get("anyOf"), list):
        return max((_fuller(branch, texts, depth + 1) or b"" for branch in branches), key=len) or None
    kinds = schema.get("type")
    if "object" in (kinds if isinstance(kinds, list) else [kinds]):
        properties = schema.get("properties")
        known = properties if isinstance(properties, dict) else {}
        values = {name: _fuller(value, texts, depth + 1) for name, value in known.items() if value is not False}
        pairs = [json_text(name).encode() + b":" + value for name, value in values.items() if value is not None]
        limit = schema.get("maxProperties")
        if pairs and not (isinstance(limit, int) and len(pairs) > limit):
            return b"{" + b",".join(pairs) + b"}"
    if "array" in (kinds if isinstance(kinds, list) else [kinds]) and not schema.get("prefixItems"):
        item = _fuller(schema.get("items", True), texts, depth + 1)
        least = schema.get("minItems", 0)
        if item is not None and schema.get("maxItems") != 0:
            return b"[" + b",".join([item] * max(1, least if isinstance(least, int) else 0)) + b"]"
    return texts.of(schema)


class _Texts:
    def __init__(
        self, root: Json, solve: Solve, letters: Letters = _same_letter, *, shows_witness: bool = False
    ) -> None:
        self._shows_witness = shows_witness
        definitions = root.get("$defs") if isinstance(root, dict) else None
        self.definitions = definitions if isinstance(definitions, dict) else {}
        self._solve = solve
        self._letters = letters
        self._solved: dict[str, bytes] = {}
        self._shortest: dict[str, bytes] = {}
        # By identity, so with what it is that of: the parts in which no definition is whose text may become shorter.
        self._settled: dict[int, tuple[Json, bytes | None]] = {}
        self._is_settled = True
        self._unsettled = set(self.definitions)
        changed = True
        while changed:  # ends: lengths only fall
            changed = False
            for name in [name for name in self.definitions if name in self._unsettled]:
                self._is_settled = True
                text, known = self.of(self.definitions[name]), self._shortest.get(name)
                if self._is_settled:
                    self._unsettled.discard(name)
                if text is not None and (known is None or len(text) < len(known)):
                    self._shortest[name] = text
                    changed = True
        self._unsettled.clear()

    def of(self, schema: Json) -> bytes | None:
        """None: no value, or none known yet."""
        if not isinstance(schema, dict):
            return b"0" if schema else None
        if len(schema) == 1 and isinstance(kind := schema.get("type"), str) and kind in LEAVES:  # most parts are such
            return LEAVES[kind]
        if isinstance(reference := schema.get("$ref"), str):
            name = reference.removeprefix("#/$defs/")
            self._is_settled &= name not in self._unsettled
            return self._shortest.get(name)
        if id(schema) in self._settled:
            return self._settled[id(schema)][1]
        outside, self._is_settled = self._is_settled, True
        found = self._of(schema)
        if self._is_settled:
            self._settled[id(schema)] = schema, found
        self._is_settled &= outside
        return found

    def _of(self, schema: dict[str, Json]) -> bytes | None:
        if isinstance(branches := schema.get("anyOf"), list):
            asked = [branch for branch in branches if isinstance(branch, dict) and "x-witness" in branch]
            return _least([self.of(branch) for branch in (self._shows_witness and asked) or branches])
        if isinstance(values := schema.get("enum"), list):
            return _least([json_text(value).encode() for value in values])
        kinds = schema.get("type")
        if kinds is None:
            return b"0"
        return _least([self._of_kind(str(kind), schema) for kind in (kinds if isinstance(kinds, list) else [kinds])])

    def _of_kind(self, kind: str, schema: dict[str, Json]) -> bytes | None:
        match kind:
            case "null" | "boolean":
                return b"null" if kind == "null" else b"true"
            case "integer" | "number":
                if kind == "number" and "not" in schema:
                    return next(short_decimals(schema)).encode()
                if is_range(schema):
                    text = shortest_number(schema, is_whole=kind == "integer")
                    return None if text is None else text.encode()
                return _number(schema) or self._solution(kind, schema)
            case "string":
                if "pattern" in schema:
                    return self._text(schema)
                least = schema.get("minLength", 0)
                return b'"' + self._letters(least if isinstance(least, int) else 0) + b'"'
            case "array":
                return self._array(schema)
            case _:
                return self._object(schema)

    def _text(self, schema: dict[str, Json]) -> bytes | None:
        least, most = schema.get("minLength", 0), schema.get("maxLength")
        try:
            found = shortest_of(str(schema["pattern"]), int(str(least)), None if most is None else int(str(most)))
        except (ConstraintError, TooManyTerms):  # only the engine knows the pattern, or it is large
            alone = {key: value for key, value in schema.items() if key in ("pattern", "minLength", "maxLength")}
            return self._solution("string", alone)
        return None if found is None else json_text(found).encode()

    def _array(self, schema: dict[str, Json]) -> bytes | None:
        if "x-automaton" in schema:
            found = least_items(read_automaton(schema), self.of)
            return None if found is None else b"[" + b",".join(found) + b"]"
        prefix, least = schema.get("prefixItems"), schema.get("minItems", 0)
        places = prefix if isinstance(prefix, list) else []
        items: list[bytes] = []
        for index in range(least if isinstance(least, int) else 0):
            if DISTINCT in schema:
                part = places[index] if index < len(places) else schema.get("items", True)
                other = next((text for text in self._variants(part, VARIANTS) if text not in items), None)
                if other is None:
                    return None
                items.append(other)
                continue
            text = self.of(places[index] if index < len(places) else schema.get("items", True))
            if text is None:
                return None
            items.append(text)
        return b"[" + b",".join(items) + b"]"

    def _variants(self, schema: Json, depth: int) -> Iterator[bytes]:
        """Different values of the schema, the short ones first; not all of them."""
        first = self.of(schema)
        if first is None:
            return
        yield first
        if not isinstance(schema, dict) or not schema:
            yield from (str(number).encode() for number in count(1))
        elif isinstance(reference := schema.get("$ref"), str):
            if depth:
                yield from self._variants(self.definitions[reference.removeprefix("#/$defs/")], depth - 1)
        elif isinstance(branches := schema.get("anyOf"), list):
            for branch in branches if depth else ():
                yield from self._variants(branch, depth - 1)
        elif isinstance(values := schema.get("enum"), list):
            yield from (json_text(value).encode() for value in values)
        else:
            kinds = schema.get("type")
            for kind in kinds if isinstance(kinds, list) else [kinds]:
                yield from self._variants_of_kind(str(kind), schema, depth)

    def _variants_of_kind(self, kind: str, schema: dict[str, Json], depth: int) -> Iterator[bytes]:
        match kind:
            case "boolean":
                yield from (b"true", b"false")
            case "integer" | "number" if kind == "integer" or "not" not in schema:
                yield from _whole_numbers(schema)
                if kind == "number" and is_range(schema):
                    yield from (text.encode() for text in short_decimals(schema))
            case "string" if "pattern" not in schema:
                least, most = _number_or(schema.get("minLength"), 0), _number_or(schema.get("maxLength"), LONGEST)
                for size in range(max(1, least), max(least, most) + 1):
                    for head in product(LETTERS, repeat=min(size, 4)):
                        yield b'"%s"' % (bytes(head) + b"a" * (size - 4))
            case "object":
                required = schema.get("required")
                properties = schema.get("properties")
                known = properties if isinstance(properties, dict) else {}
                wanted = {name: known[name] for name in known if isinstance(required, list) and name in required}
                if DISTINCT_KEYS in schema:
                    num_free = _number_or(schema["minProperties"], 0) - len(wanted)
                    wanted |= free_keys(schema, num_free)[:num_free]
                texts = {name: text for name, value in wanted.items() if (text := self.of(value)) is not None}
                for name in wanted if depth else ():
                    for text in self._variants(wanted[name], depth - 1):
                        pairs = {**texts, name: text}
                        yield b"{%s}" % b",".join(json_text(key).encode() + b":" + pairs[key] for key in wanted)
                for name, value in known.items() if depth and not wanted else ():
                    for text in self._variants(value, depth - 1):
                        yield b"{%s:%s}" % (json_text(name).encode(), text)

    def _object(self, schema: dict[str, Json]) -> bytes | None:
        properties, required, least = schema.get("properties"), schema.get("required"), schema.get("minProperties", 0)
        known = properties if isinstance(properties, dict) else {}
        wanted = [name for name in known if isinstance(required, list) and name in required]
        pairs = []
        for name in wanted:
            value = self.of(known[name])
            if value is None:
                return None
            pairs.append(json_text(name).encode() + b":" + value)
        if "x-witness" in schema:
            witness = _least([self._pair(pair) for pair in witnesses(schema)])
            if witness is None:
                return None
            return b"{" + b",".join([*pairs, *[witness] * (1 + self._shows_witness)]) + b"}"
        if DISTINCT_KEYS in schema and isinstance(least, int):
            others = [self._value_of(key, values) for key, values in free_keys(schema, least - len(pairs))]
            more = sorted((pair for pair in others if pair is not None), key=len)[: least - len(pairs)]
            return b"{" + b",".join(pairs + more) + b"}" if len(pairs) + len(more) == least else None
        if isinstance(least, int) and least > len(pairs):  # one key of any name, see presence.py
            patterns = schema.get("patternProperties")
            if isinstance(patterns, dict) and patterns:
                keys, are_all = _keys_of(patterns, schema.get("additionalProperties", True), known)
                other = _least([self._value_of(key, values) for key, values in keys])
                if other is None and not are_all:
                    return self._solution("object", {**schema, "$defs": self.definitions})
            else:
                other = self._unknown_pair(schema, known)
            if other is None:
                return None
            pairs.append(other)
        return b"{" + b",".join(pairs) + b"}"

    def _unknown_pair(self, schema: dict[str, Json], known: Collection[str]) -> bytes | None:
        """With a key that the schema does not name; None where such a key can have no value."""
        key = next(name for name in chain([""], map(str, count())) if name not in known)
        return self._value_of(key, schema.get("additionalProperties", True))

    def _value_of(self, key: str, values: Json) -> bytes | None:
        value = self.of(values)
        return None if value is None else json_text(key).encode() + b":" + value

    def _pair(self, pair: tuple[str, Json]) -> bytes | None:
        value = self.of(pair[1])
        key = None if value is None else self._text({"pattern": pair[0]})
        return None if value is None or key is None else key + b":" + value

    def _solution(self, kind: str, schema: dict[str, Json]) -> bytes:
        alone = {**schema, "type": kind}
        key = json_text(alone)
        if key not in self._solved:
            self._solved[key] = self._solve(alone)
        return self._solved[key]


def _keys_of(
    patterns: dict[str, Json], additional: Json, known: Collection[str]
) -> tuple[list[tuple[str, Json]], bool]:
    """A short key that is not `known` for each pattern, which no other one matches, and one that none does, each with
    the schema of its values; and whether no value fits another key better."""
    options = [([one], [other for other in patterns if other != one], patterns[one]) for one in patterns]
    found: list[tuple[str, Json]] = []
    are_all = True
    for matched, unmatched, values in (*options, ([], [*patterns], additional)):
        try:
            key = None if values is False else shortest_of(joined(matched, unmatched, known), 0, None)
        except (ConstraintError, TooManyTerms):
            are_all = False
            continue
        if key is not None:
            found.append((key, values))
    return found, are_all and bool(found)


def _whole_numbers(schema: dict[str, Json]) -> Iterator[bytes]:
    """Whole numbers within the bounds, those near a bound or 0 first."""
    low, high = _bound(schema, "minimum"), _bound(schema, "maximum")
    over, under = _bound(schema, "exclusiveMinimum"), _bound(schema, "exclusiveMaximum")
    first = _number(schema)
    step, others = (_bound(schema, "multipleOf") or Fraction(1)).numerator, steps_not_in(schema)
    for sign in (1, -1):
        for index in count(1) if first is not None else ():
            number = int(first or 0) + sign * index * step
            is_over = (high is not None and number > high) or (under is not None and number >= under)
            if is_over or (low is not None and number < low) or (over is not None and number <= over):
                break
            if is_no_multiple(Fraction(number), others):
                yield str(number).encode()


def _number_or(value: Json, other: int) -> int:
    return value if isinstance(value, int) else other


def _least(texts: list[bytes | None]) -> bytes | None:
    return min((text for text in texts if text is not None), key=len, default=None)


def _number(schema: dict[str, Json]) -> bytes | None:
    """A short whole number within the bounds; None where there is none that is easily found."""
    low, high = (_bound(schema, key) for key in ("minimum", "maximum"))
    over, under = (_bound(schema, key) for key in ("exclusiveMinimum", "exclusiveMaximum"))
    step = _bound(schema, "multipleOf") or Fraction(1)
    step = Fraction(step.numerator)  # whole and a multiple
    others = steps_not_in(schema)
    window = WITHIN_FREE + 1 if others else 1
    candidates = [step * count for count in range(window)]
    for bound in (low, high, over, under):
        if bound is not None:
            place = math.floor(bound / step)
            candidates += [step * near for near in range(place - window, place + window + 1)]
    fitting = [
        number
        for number in candidates
        if (low is None or number >= low)
        and (high is None or number <= high)
        and (over is None or number > over)
        and (under is None or number < under)
        and is_no_multiple(number, others)
    ]
    return _least([str(int(number)).encode() for number in fitting])


def _bound(schema: dict[str, Json], key: str) -> Fraction | None:
    value = schema.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return as_fraction(value)
