"""What a normal schema costs: how far one token can move the end away, and whether compiling it is surely quick."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Final

from niwaki.runtime.api import ConstraintError
from niwaki.runtime.constraints.regex_language import Languages, Term, TooManyTerms
from niwaki.runtime.constraints.regex_parser import parsed
from niwaki.runtime.constraints.regex_tree import cost_of as cost_of_regex
from niwaki.runtime.constraints.schema.arrays import least_path
from niwaki.runtime.constraints.schema.distinct import DISTINCT_KEYS
from niwaki.runtime.constraints.schema.document import Json, Watch, json_text
from niwaki.runtime.constraints.schema.formats import FORMAT_PATTERNS
from niwaki.runtime.constraints.schema.free_keys import free_keys
from niwaki.runtime.constraints.schema.presence import witnesses
from niwaki.runtime.constraints.schema.ranges import LOWER, UPPER, is_range, widest_bound
from niwaki.runtime.constraints.schema.steps import step_in
from niwaki.runtime.constraints.schema.strings import asked_of

NUMBER_BYTES: Final = 48  # a bounded number: its digits
WIDEST: Final = 6  # bytes of a character: an escape
UNKNOWN_PATTERN: Final = 400
MOST_INSIDE: Final = 4000
SMALL_TEXT: Final = 6000
SMALL_SHORTEST: Final = 16_000  # bytes of a shortest text, which is written out: a short schema may ask for a billion
SMALL_COUNT: Final = 500
SMALL_LENGTH: Final = 1 << 16  # at most, beside a pattern: counted as a text is read, nothing is written out
SMALL_LOOKED_COUNT: Final = 99  # where looks stand beside counts, each place of the one is met with each of the other
SMALL_PATTERN: Final = 6000  # characters
SMALL_INSIDE: Final = 3000  # bytes of one text
WITNESS: Final = "x-witness"
TAME_PATTERNS: Final = 32  # of keys, in one object: 0.1 to 0.5 ms each
TAME_DECIMALS: Final = 6  # of a step
LEAVES: Final = {"null": 4, "boolean": 4, "integer": 1, "number": 1, "string": 2}  # bytes, where nothing else is asked
_COUNT = re.compile(r"\{(\d*)(?:,(\d*))?\}")
_LOOK = re.compile(r"\(\?<?[=!]")
_BOUNDARY = re.compile(r"\\[bB]")  # of a word: all letters of all scripts, several times over


@dataclass(frozen=True, slots=True)
class Cost:
    value: int
    inside: int
    widest: int  # as `value`, where the short kinds of a part may be used up
    is_small: bool
    is_tame: bool
    has_witness: bool
    has_patterns: bool
    has_automata: bool


def cost_of(root: Json, watch: Watch) -> Cost:
    """See `normal.NormalSchema`."""
    measure = _Measure(root, watch)
    is_short = (measure.shortest or 0) <= SMALL_SHORTEST
    is_plain = measure.is_tame and is_short and measure.has_known_keys and not measure.has_witness
    is_small = is_plain and _is_short(root)
    widest = max(measure.value, measure.widest + 4)
    return Cost(
        measure.value, min(measure.inside, MOST_INSIDE), widest, is_small, measure.is_tame, measure.has_witness,
        measure.has_patterns, measure.has_automata,
    )  # fmt: skip


def _is_short(root: Json) -> bool:
    """Whether the text of the schema has SMALL_TEXT characters at most. To write all of a long one took a twentieth of
    the time that it is rewritten in."""
    least = 0
    parts = [root]
    while parts and least <= SMALL_TEXT:
        part = parts.pop()
        if isinstance(part, dict):
            least += sum(map(len, part)) + 4 * len(part)
            parts += part.values()
        elif isinstance(part, list):
            parts += part
        elif isinstance(part, str):
            least += len(part)
    return least <= SMALL_TEXT and len(json_text(root)) <= SMALL_TEXT


class _Measure:
    def __init__(self, root: Json, watch: Watch) -> None:
        definitions = root.get("$defs") if isinstance(root, dict) else None
        self._definitions: dict[str, Json] = definitions if isinstance(definitions, dict) else {}
        self._shortest: dict[str, int] = {}
        self.value = self.inside = self.widest = 0
        self.is_tame = True
        self.has_witness = False  # an `x-witness` somewhere
        self.has_patterns = self.has_automata = False
        self.has_known_keys = True  # none that only a pattern describes
        self._is_settled = True
        self._settled: dict[int, int | None] = {}  # of the parts that no open definition is in; the root holds them all
        self._unsettled: set[str] = set()  # definitions that lead to themselves, or to such: their lengths may yet fall
        # An object at the root is begun before anything else, and all that it needs is needed from the start: no byte
        # inside asks for it again.
        self._begun: dict[str, Json] | None = None
        names, changed = list(self._definitions), True
        while names and changed:
            changed = False
            for name in names:
                watch.check()
                self._is_settled = True
                found = self._of(self._definitions[name])
                if found is not None:
                    changed |= self._shortest.get(name) != found
                    self._shortest[name] = found
                if self._is_settled:
                    self._unsettled.discard(name)
                else:
                    self._unsettled.add(name)
            names = [name for name in names if name in self._unsettled]
        if isinstance(root, dict) and root.get("type") == "object" and not root.keys() & {"minProperties", WITNESS}:
            self._begun = root
        self.shortest = self._of(root)

    def _of(self, schema: Json) -> int | None:
        """The shortest text of a schema in bytes, about; None where it is not known yet."""
        if not isinstance(schema, dict):
            return 1 if schema else None
        if len(schema) == 1 and isinstance(kind := schema.get("type"), str) and kind in LEAVES:  # most parts are such
            self.widest = max(self.widest, LEAVES[kind])
            self.value = max(self.value, LEAVES[kind] + 4)
            return LEAVES[kind]
        if id(schema) in self._settled:
            return self._settled[id(schema)]
        outside, self._is_settled = self._is_settled, True
        found = self._shortest_of(schema)
        if found is not None and found + 4 > self.value and schema is not self._begun:
            self.value = found + 4
        if self._is_settled:
            self._settled[id(schema)] = found
        self._is_settled &= outside
        return found

    def _shortest_of(self, schema: dict[str, Json]) -> int | None:
        if "$ref" in schema:
            name = str(schema["$ref"]).removeprefix("#/$defs/")
            self._is_settled &= name in self._shortest and name not in self._unsettled
            return self._shortest.get(name)
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
        self.widest = max(self.widest, *lengths, 0)
        if schema is not self._begun:  # any of its kinds may be begun
            self.value = max([self.value, *(length + 4 for length in lengths)])
        return min(lengths, default=None)

    def _of_kind(self, kind: str, schema: dict[str, Json]) -> int | None:
        match kind:
            case "null" | "boolean":
                return 4
            case "integer" | "number":
                if kind == "number" and "not" in schema and not schema.keys() & {*LOWER, *UPPER}:
                    return 3
                if schema.keys() & {"not", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}:
                    size = widest_bound(schema) if schema.keys() & {*LOWER, *UPPER} else NUMBER_BYTES
                    if kind == "number" or not is_range(schema):  # of a whole one nothing but its digits are asked
                        size = max(NUMBER_BYTES, size)
                    self.inside = max(self.inside, size)
                    is_told = step_in(schema, is_whole=kind == "integer") is not None
                    self.is_tame &= is_told or _is_small_step(schema.get("multipleOf"))
                    return size
                return 1
            case "string":
                return self._of_string(schema)
            case "array" if "x-automaton" in schema:
                self.has_automata = True
                return least_path(schema, self._of)
            case "array":
                prefix = schema.get("prefixItems")
                items = [*prefix] if isinstance(prefix, list) else []
                least = schema.get("minItems")
                count = least if isinstance(least, int) else 0
                lengths = [self._of(item) for item in [*items, schema.get("items", True)]]
                wanted = lengths[:count]
                self._count(count)
                if None in wanted:
                    return None
                more = max(0, count - len(lengths)) * ((lengths[-1] or 0) + 1)
                return 2 + more + sum(length + 1 for length in wanted if length is not None)
            case _:
                return self._of_object(schema)

    def _of_string(self, schema: dict[str, Json]) -> int:
        least, inside = schema.get("minLength"), 0
        shortest = least if isinstance(least, int) else 0
        self._count(least)
        if isinstance(pattern := schema.get("pattern"), str):
            most = schema.get("maxLength")  # alone it costs the same whatever it is
            self.is_tame &= not isinstance(most, int) or most <= (SMALL_COUNT if _has_looks(pattern) else SMALL_LENGTH)
            inside = self._pattern(pattern) + shortest
        self.inside = max(self.inside, inside)
        return 2 + shortest + inside

    def _of_object(self, schema: dict[str, Json]) -> int | None:
        properties = schema.get("properties")
        required = schema.get("required")
        wanted = set(map(str, required)) if isinstance(required, list) else set()
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
                self.has_known_keys &= not inner
                self.is_tame &= len(inner) <= TAME_PATTERNS
                self.inside = max([self.inside, *map(self._pattern, inner)])
                for value in inner.values():
                    self._of(value)
            else:
                self._of(inner)
        if DISTINCT_KEYS in schema:
            more = self._of_free_keys(schema, len(wanted))
            total = None if total is None or more is None else total + more
        if WITNESS in schema:
            lengths = [self._of_pair(pair) for pair in (*witnesses(schema), *witnesses(schema, "behind"))]
            least = min((length for length in lengths if length is not None), default=None)
            total = None if total is None or least is None else total + least
            self.has_witness = True
        return total

    def _of_free_keys(self, schema: dict[str, Json], num_known: int) -> int | None:
        least = schema["minProperties"]
        assert isinstance(least, int)
        self._count(least)
        found = [(key, length) for key, value in free_keys(schema, least - num_known) if (length := self._of(value))]
        pair = max((len(json_text(key).encode()) + length + 2 for key, length in found), default=None)
        return None if pair is None else pair * (least - num_known)

    def _of_pair(self, pair: tuple[str, Json]) -> int | None:
        key, value = self._pattern(pair[0]), self._of(pair[1])
        self.inside = max(self.inside, key)
        if value is not None:
            self.value = max(self.value, value + key + 4)
        return None if value is None else value + key + 4

    def _count(self, count: Json) -> None:
        if isinstance(count, int | float) and not isinstance(count, bool) and count > SMALL_COUNT:
            self.is_tame = False

    def _pattern(self, pattern: str) -> int:
        self.has_patterns = True
        inside = _pattern_bytes(pattern)
        self.is_tame &= inside <= SMALL_INSIDE and len(pattern) <= SMALL_PATTERN and _has_small_counts(pattern)
        self.is_tame &= _BOUNDARY.search(pattern) is None
        return inside


def _has_small_counts(pattern: str) -> bool:
    most = SMALL_LOOKED_COUNT if _has_looks(pattern) else SMALL_COUNT
    counts = [count for low, high in _COUNT.findall(pattern) for count in (low, high)]
    return all(len(count) < 6 and int(count or 0) <= most for count in counts)


def _has_looks(pattern: str) -> bool:
    """Those of formats are known to be quick."""
    return _LOOK.search(pattern) is not None and pattern not in FORMAT_PATTERNS.values()


def _is_small_step(step: Json) -> bool:
    """Whether an automaton of its multiples is small: it has a state for each rest of dividing by its digits."""
    if not isinstance(step, int | float):
        return True
    exact = Fraction(repr(step))
    decimals = next((count for count in range(TAME_DECIMALS + 1) if (exact * 10**count).denominator == 1), None)
    return decimals is not None and exact * 10**decimals <= SMALL_COUNT


@lru_cache(maxsize=512)
def _pattern_bytes(pattern: str) -> int:
    """How many bytes a text of the pattern that was begun may still ask for, at most."""

    def need(languages: Languages, term: Term) -> int:
        return _need(term, {})[1] if term.is_plain else cost_of_regex(parsed(pattern))

    try:
        return min(asked_of(pattern, need), MOST_INSIDE)
    except (ConstraintError, TooManyTerms):  # outside our dialect, not outside the engine's
        return UNKNOWN_PATTERN


def _need(term: Term, known: dict[Term, tuple[int, int]]) -> tuple[int, int]:
    """(the bytes of a shortest text, of a shortest rest wherever a text was begun) of a term without "all" and "not".

    Where a text can be read in several ways, one of them is followed to its end: an upper bound.
    """
    if term in known:
        return known[term]
    parts = [_need(part, known) for part in term.parts]
    match term.kind:
        case "chars":
            width = 1 if any(low <= 0x7E and high >= 0x23 for low, high in term.ranges) else WIDEST
            found = width, width
        case "sequence":
            total = sum(least for least, _ in parts)
            found = (
                total,
                max([total, *(rest + (parts[1][0] if index == 0 else 0) for index, (_, rest) in enumerate(parts))]),
            )
        case "any":
            found = min(least for least, _ in parts), max(rest for _, rest in parts)
        case _:
            least, rest = parts[0]
            found = term.low * least, max(term.low * least, rest + max(0, term.low - 1) * least)
    known[term] = found
    return found
