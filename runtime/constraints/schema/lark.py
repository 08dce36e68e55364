"""A normal schema as a Lark grammar in llguidance's dialect: a rule for each part, equal parts once.

JSON is written compactly. A key that the schema names, and a string that must match something, are spelled in one way
only, that of `json.dumps(..., ensure_ascii=False)`: another spelling of a known key would pass for an unknown one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from functools import cached_property
from math import isqrt
from typing import Final

from niwaki.runtime.api import ConstraintError
from niwaki.runtime.constraints.schema import constants, spelling
from niwaki.runtime.constraints.schema.arrays import read_automaton
from niwaki.runtime.constraints.schema.distinct import DISTINCT, DISTINCT_KEYS, Layout
from niwaki.runtime.constraints.schema.document import Json, json_text
from niwaki.runtime.constraints.schema.endless import all_end, without_endless
from niwaki.runtime.constraints.schema.presence import witnesses
from niwaki.runtime.constraints.schema.spelling import BASICS, key_terminal, text_terminal
from niwaki.runtime.constraints.schema.strings import anywhere

ANY_VALUE: Final = """value: "null"|"true"|"false"|NUMBER|STRING|any_array|any_object
any_array: "["(value(","value)*)?"]"
any_object: "{"(any_pair(","any_pair)*)?"}"
any_pair: STRING":"value"""
ANY_ONCE: Final = """once_value: "null"|"true"|"false"|ONCE_INTEGER|ONCE_FRACTION|KEY|any_array|any_object"""
LEAVES: Final = {"integer": "INTEGER", "number": "NUMBER", "string": "STRING"}
COMMA: Final = '","'
OR: Final = "|"
FEW_OPTIONAL: Final = 6  # pairs behind one that must come, which need no rules of their own
FEW_PLACES: Final = 64  # of an array that may be missing, each with a rule of its own
MAX_LITERALS: Final = 12  # more constants than this are one terminal


def lark_of(root: Json) -> str:
    """The grammar of a normal schema; its first rule is `start`."""
    writer = _Writer(root)
    definitions = _as_dict(root.get("$defs")) if isinstance(root, dict) else {}
    parts = {name: writer.define(name, schema) for name, schema in definitions.items()}
    start = writer.part(root)
    writer.define_once(definitions)
    shared = [f"{_rule_of(name)}: {parts[name]}" for name in parts if name in writer.awaited]
    body = "\n".join([f"start: {start}", *shared, *writer.lines])
    if not all_end(definitions):  # only a part that holds itself can be endless
        body = without_endless(body)
    body = "\n".join([body, *[ANY_VALUE] * writer.holds_any, *[ANY_ONCE] * writer.holds_any_once])
    return "\n".join([body, *(line for name, line in BASICS.items() if name in body)]) + "\n"


class _Writer:
    """`once`: the part is an item of an array that allows none twice, or in such a one, and spelled in one way only
    (`distinct.py`)."""

    def __init__(self, root: Json) -> None:
        self._root = root
        self._parts: dict[tuple[int, bool], str] = {}  # of the objects that are parts; the root holds them all
        self._defined: dict[str, str] = {}  # the parts that are definitions
        self.awaited: set[str] = set()  # those that were referred to before they were written: they hold themselves
        self._once_definitions: dict[str, None] = {}
        self._known: dict[str, str] = {}  # what a rule is written from -> its name; so equal parts are one rule
        self.lines: list[str] = []
        self.holds_any = False  # a part that may be any value
        self.holds_any_once = False

    @cached_property
    def _layout(self) -> Layout:
        return Layout(self._root)

    def define(self, name: str, schema: Json) -> str:
        """The expression of a definition, which from here on stands for a reference to it: what is referred to at one
        place and stands as it is at another is one rule then, and so is all that leads to it."""
        found = self._defined[name] = self.part(schema)
        return found

    def define_once(self, definitions: dict[str, Json]) -> None:
        """The rules of the definitions that are spelled in one way somewhere."""
        done = 0
        while done < len(self._once_definitions):  # grows meanwhile
            name = [*self._once_definitions][done]
            self.lines.append(f"{_rule_of(name, once=True)}: {self.part(definitions[name], once=True)}")
            done += 1

    def part(self, schema: Json, *, once: bool = False) -> str:
        """An expression for the schema: a name, or something that stands in brackets where it must."""
        if schema is True or schema == {}:
            self.holds_any = True
            self.holds_any_once |= once
            return "once_value" if once else "value"
        assert isinstance(schema, dict), "an impossible part is never written"
        if len(schema) == 1 and not once and isinstance(kind := schema.get("type"), str) and kind in LEAVES:
            return LEAVES[kind]  # most parts are such
        reference = schema.get("$ref")
        if isinstance(reference, str):
            name = reference.removeprefix("#/$defs/")
            if once:
                self._once_definitions[name] = None
            elif name in self._defined:
                return self._defined[name]
            else:
                self.awaited.add(name)
            return _rule_of(name, once=once)
        known = self._parts.get((id(schema), once))
        if known is None:
            expressions = list(dict.fromkeys(self._alternatives(schema, once)))
            is_name = len(expressions) == 1 and expressions[0].isidentifier()
            known = self._parts[id(schema), once] = expressions[0] if is_name else self._rule(expressions)
        return known

    def _rule(self, alternatives: Iterable[str]) -> str:
        body = OR.join(alternatives)
        key = f"rule {body}"
        if key not in self._known:
            self._known[key] = f"r{len(self._known)}"
            self.lines.append(f"{self._known[key]}: {body}")
        return self._known[key]

    def _terminal(self, body: str) -> str:
        key = f"terminal {body}"
        if key not in self._known:
            self._known[key] = f"T{len(self._known)}"
            self.lines.append(f"{self._known[key]}: {body}")
        return self._known[key]

    def _alternatives(self, schema: dict[str, Json], once: bool) -> list[str]:
        if isinstance(branches := schema.get("anyOf"), list):
            return [self.part(branch, once=once) for branch in branches]
        if isinstance(values := schema.get("enum"), list):
            plain = [constants.literal(json_text(value)) for value in values if not isinstance(value, list | dict)]
            others = self._constants([value for value in values if isinstance(value, list | dict)])
            return others + (plain if len(plain) <= MAX_LITERALS else [self._terminal(OR.join(plain))])
        kinds = schema.get("type")
        return [
            option
            for kind in (kinds if isinstance(kinds, list) else [kinds])
            for option in self._of_kind(str(kind), schema, once)
        ]

    def _constants(self, values: list[Json]) -> list[str]:
        if len(values) <= MAX_LITERALS:
            return [constants.constant(value) for value in values]
        return constants.written(values, self._rule, self._terminal)

    def _of_kind(self, kind: str, schema: dict[str, Json], once: bool) -> list[str]:
        match kind:
            case "null":
                return ['"null"']
            case "boolean":
                return ['"true"', '"false"']
            case "integer" | "number":
                return self._number(kind, schema, once)
            case "string":
                return [self._string(schema, once)]
            case "array":
                once = DISTINCT in schema or (once and self._layout.spells_once(schema))
                return [self._automaton(schema, once) if "x-automaton" in schema else self._array(schema, once)]
            case _:
                return [self._object(schema, once and self._layout.spells_once(schema))]

    def _number(self, kind: str, schema: dict[str, Json], once: bool) -> list[str]:
        if not spelling.asks_of_numbers(schema):
            return spelling.any_number(kind, once=once)
        body = spelling.number(kind, schema, once=once)
        return [self._rule([spelling.number_of_engine(kind, schema)]) if body is None else self._terminal(body)]

    def _string(self, schema: dict[str, Json], once: bool) -> str:
        if not spelling.asks_of_strings(schema):
            return spelling.any_string(once=once)
        body = spelling.string(schema, once=once)
        return self._rule([spelling.string_of_engine(schema)]) if body is None else self._terminal(body)

    # -- arrays

    def _array(self, schema: dict[str, Json], once: bool) -> str:
        prefix, rest = schema.get("prefixItems"), schema.get("items", True)
        places = prefix if isinstance(prefix, list) else []
        least, most = _count(schema, "minItems") or 0, _count(schema, "maxItems")
        if most is not None:
            places = places[:most]
        length = len(places)
        tail = ""
        if rest is not False and (most is None or most > length):
            item = self.part(rest, once=once)
            if not length:
                return self._rule([_listed("[", item, "]", least, most)])
            tail = _repeated(f'(","{item})', max(0, least - length), None if most is None else most - length)
        items = [(COMMA if index else "") + self.part(place, once=once) for index, place in enumerate(places)]
        inside = constants.beside("".join(items[:least]), self._may_end(items[least:], tail))
        return self._rule([f'"["{inside}"]"'])

    def _may_end(self, items: Sequence[str], tail: str) -> str:
        """Items of which the last ones may be missing, and `tail` behind them all. Of many each is written twice: in a
        run that is all there, and in one that ends before. With a rule for each in the one for that before it, 1,500
        took more than a second to build, and at every item as many rules ended as there were items."""
        if len(items) <= FEW_PLACES:
            for item in reversed(items):
                tail = self._rule([f"({constants.beside(item, tail)})?"])
            return tail
        size = isqrt(len(items))
        for start in reversed(range(0, len(items), size)):
            run = items[start : start + size]
            some = ""
            for item in reversed(run[1:-1]):
                some = self._rule([f"({constants.beside(item, some)})?"])
            options = [constants.beside("".join(run), tail)]
            options += [constants.beside(run[0], some)] if len(run) > 1 else []
            tail = self._rule([f"({OR.join(options)})?"])
        return tail

    def _automaton(self, schema: dict[str, Json], once: bool) -> str:
        """An array whose items are read by an automaton."""
        key = f"automaton {once} {json_text(schema)}"
        if key in self._known:
            return self._known[key]
        name = self._known[key] = f"a{len(self._known)}"
        states, ends = read_automaton(schema)
        options = [[(self.part(item, once=once), target) for item, target in edges] for edges in states]
        has_loops = any(target == source for source, edges in enumerate(states) for _, target in edges)
        inside = self._read_from_left(name, options, ends) if has_loops else self._read_ahead(name, options, ends)
        self.lines.append(f'{name}: "["{inside}"]"')
        return name

    def _read_from_left(self, name: str, states: Sequence[Sequence[tuple[str, int]]], ends: AbstractSet[int]) -> str:
        """A rule for what leads to each state. The other way round llguidance goes through all items of an array at
        each that is written: of 300 with `minContains: 30` one took 0.4 s, and a text of 5,000 met its limit."""
        leading: dict[int, list[str]] = {target: [] for edges in states for _, target in edges}
        for source, edges in enumerate(states):
            for item, target in edges:
                leading[target] += [item] * (source == 0)
                leading[target] += [f'{name}_{source}","{item}'] * (source in leading)
        self.lines += [f"{name}_{state}: {OR.join(bodies)}" for state, bodies in sorted(leading.items())]
        last = OR.join(f"{name}_{state}" for state in sorted(ends) if state in leading)
        return f"({last}){'?' * (0 in ends)}" if last else ""

    def _read_ahead(self, name: str, states: Sequence[Sequence[tuple[str, int]]], ends: AbstractSet[int]) -> str:
        """A rule for what follows behind each state: where none comes again, an array has as many items as there are
        states at most. The other way round all rules may begin with the array: nine values that never repeat took 0.25
        ms for each byte instead of 4 microseconds."""
        for state, edges in enumerate(states):
            comma = COMMA if state else ""
            bodies = [f"{comma}{item} {name}_{target}" for item, target in edges] + ['""'] * (state in ends)
            self.lines.append(f"{name}_{state}: {OR.join(bodies)}")
        return f"{name}_0"

    # -- objects

    def _object(self, schema: dict[str, Json], once: bool) -> str:
        properties = _as_dict(schema.get("properties"))
        required = schema.get("required")
        wanted = set(required) if isinstance(required, list) else set()
        extra = self._extra(schema, list(properties))
        least, most = _count(schema, "minProperties"), _count(schema, "maxProperties")
        low = max(0, (least or 0) - len(wanted))
        high = None if most is None else most - len(wanted)
        pairs = [
            (f'{constants.literal(json_text(name))}":"{self.part(value, once=once)}', name in wanted)
            for name, value in properties.items()
            if value is not False
        ]
        later = _repeated(f'(","{extra})', low, high) if extra else ""
        begun = [_begun(extra, low, high)] if later else []
        must = low > 0 and bool(later)
        if "x-witness" in schema:
            witness = self._witness(schema)
            begun = [f'({extra}",")*{witness}' if extra else witness]
            later = f'{later}","{witness}'
            must = True
        num_first = next((index for index, (_, is_wanted) in enumerate(pairs, 1) if is_wanted), len(pairs))
        if sum(not is_wanted for _, is_wanted in pairs[num_first:]) <= FEW_OPTIONAL:  # a comma stands before them all
            behind = pairs[num_first:]
            later = "".join([*(f'","{p}' if is_wanted else f'(","{p})?' for p, is_wanted in behind), later])
            pairs = pairs[:num_first]
        # From the last pair on: what may be written from here (`begun`), what behind another pair (`later`), and
        # whether any must be. Each pair stands once, behind what one comma may lead to: with a place for it behind each
        # of the pairs before, 3,000 keys took 0.8 s to build and now 0.16.
        for index in range(len(pairs) - 1, -1, -1):
            pair, is_wanted = pairs[index]
            begun = [pair + later, *([] if is_wanted else begun)]
            must = must or is_wanted
            if index:
                is_read_once = len(begun) == 1 and pairs[index - 1][1]
                begun = begun if is_read_once else [self._rule(begun)]
                later = f'","{begun[0]}' if must else f'(","{begun[0]})?'
        if begun and not (must and len(begun) == 1):
            begun = [f"({OR.join(begun)}){'' if must else '?'}"]
        return self._rule(["".join(['"{"', *begun, '"}"'])])

    def _witness(self, schema: dict[str, Json]) -> str:
        """The pair that must come, and those behind it."""
        one, behind = (
            [f'{self._terminal(key_terminal(key))}":"{self.part(value)}' for key, value in witnesses(schema, which)]
            for which in ("pairs", "behind")
        )
        return f'{self._rule(one)}(","{self._rule(behind)})*' if behind else self._rule(one)

    def _extra(self, schema: dict[str, Json], names: Sequence[str]) -> str:
        """A pair whose key the schema does not name, or nothing."""
        patterned = _as_dict(schema.get("patternProperties"))
        rest = schema.get("additionalProperties", True)
        known = OR.join(constants.literal(json_text(name)) for name in names)
        options = []
        for regex, value in patterned.items():
            body = text_terminal(regex, 0, None) if value is not False else None
            if body is not None:
                options.append(f'{self._terminal(_but(body, known))}":"{self.part(value)}')
        if rest is not False:
            key = "KEY" if DISTINCT_KEYS in schema else "STRING"
            if patterned:
                others = f"^{''.join(f'(?!{anywhere(regex)})' for regex in patterned)}"
                body = text_terminal(others, 0, None)
                if body is None:
                    raise ConstraintError(f"the patterns of keys {', '.join(patterned)} cannot be enforced")
                key = self._terminal(_but(body, known))
            elif known:
                key = self._terminal(f"KEY&~({known})")
            options.append(f'{key}":"{self.part(rest)}')
        return self._rule(options) if options else ""


def _rule_of(definition: str, *, once: bool = False) -> str:
    return f"{'o' if once else 'd'}_{definition}"


def _but(body: str, known: str) -> str:
    return f"({body})&~({known})" if known else body


def _listed(opening: str, item: str, closing: str, low: int, high: int | None) -> str:
    return f'"{opening}"{_sequence(item, low, high)}"{closing}"'


def _sequence(item: str, low: int, high: int | None) -> str:
    """Items with commas between them."""
    if high == 0:
        return ""
    others = _repeated(f'(","{item})', max(0, low - 1), None if high is None else high - 1)
    return item + others if low else f"({item}{others})?"


def _begun(item: str, low: int, high: int | None) -> str:
    """As `_sequence`, of one item at least."""
    others = _repeated(f'(","{item})', max(0, low - 1), None if high is None else high - 1)
    return item + others


def _repeated(body: str, low: int, high: int | None) -> str:
    if high is None:
        return body + {0: "*", 1: "+"}.get(low, f"{{{low},}}")
    return f"{body}{{{low},{high}}}" if high > 0 else ""


def _as_dict(value: Json) -> dict[str, Json]:
    return value if isinstance(value, dict) else {}


def _count(schema: dict[str, Json], key: str) -> int | None:
    value = schema.get(key)
    return value if isinstance(value, int) else None
