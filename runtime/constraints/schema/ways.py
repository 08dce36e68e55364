"""The ways to satisfy a schema: an "or" of facts about values of one kind, for each of its states.

Keywords of a schema hold together (product), and fail one at a time (union). Here stand those that apply other schemas
in place (2020-12 core 10.2, 8.2.3); `keywords.py` has the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import product
from typing import Final

from niwaki.runtime.api import ConstraintError
from niwaki.runtime.constraints.schema.document import Json, Watch, escaped, refused
from niwaki.runtime.constraints.schema.facts import FREE, KINDS, NEVER, Atom, State, Way, both, without_stricter
from niwaki.runtime.constraints.schema.keywords import (
    KEYWORDS,
    KIND_OF,
    Keyword,
    Ways,
    absent,
    branches_at,
    dict_at,
    keys_in,
    type_,
    type_names,
    unevaluated_items,
    unevaluated_properties,
)
from niwaki.runtime.constraints.schema.references import Document

MAX_WAYS: Final = 1000  # of one schema, for one kind
MANY_WAYS: Final = 64  # of more, those that no value satisfies are left out before they are joined with others
MOST_COMPARED: Final = 200  # of more, those that ask for all that another does and more are left out
MAX_STEPS: Final = 20_000  # of joining two ways, in one document: half a second. Real schemas took up to 4,600
MOST_BESIDE: Final = 8  # beside more the branches of oneOf are compared alone: each step would be as many
MAX_EXACT_BRANCHES: Final = 6  # of anyOf under unevaluated*: every subset of them is a way of its own

# Conditions are read after the others, so that keys are written in the order of `properties`, not in that of a
# condition on them; which keys must be there first, since conditions on these have fewer ways.
ORDER: Final = {"required": -1} | dict.fromkeys(
    "not if anyOf oneOf dependencies dependentSchemas dependentRequired".split(), 1
)
MAX_HOPS: Final = 8  # over references, to see which kinds a schema admits
# Keywords that apply other schemas in place -> the method of `Expander` that expands them. A table of an expander's own
# methods would hold itself, and all that is known of a schema would stay until a collector comes.
IN_PLACE: Final = {
    "allOf": "all_of",
    "anyOf": "any_of",
    "oneOf": "one_of",
    "not": "not_",
    **dict.fromkeys(("if", "then", "else"), "if_then_else"),
    **dict.fromkeys(("$ref", "$dynamicRef", "$recursiveRef"), "reference"),
    **dict.fromkeys(("dependentSchemas", "dependentRequired", "dependencies"), "dependent"),
}
ASKING: Final = frozenset((*KEYWORDS, *IN_PLACE, "unevaluatedProperties", "unevaluatedItems"))


class Circular(ConstraintError):
    """A schema that must be known before itself."""


class Expander:
    """Expands the schemas of one document, each once."""

    def __init__(self, document: Document, watch: Watch) -> None:
        self._document = document
        self._watch = watch
        self._known: dict[tuple[str, bool, str, bool], Ways] = {}
        self._open: set[tuple[str, bool, str, bool]] = set()
        self._steps = 0
        self._kinds: dict[Atom, tuple[str, ...]] = {}
        self.is_empty: Callable[[Way], bool] = lambda way: False  # set by the reader, which looks into states

    def of_state(self, state: State, kind: str) -> Ways:
        """The ways in which all atoms hold."""
        ways = [FREE[kind]]
        for pointer, holds in state:
            ways = self._product(ways, self.of(pointer, kind, holds, False), pointer)
        return ways

    def kinds(self, state: State) -> tuple[str, ...]:
        """The kinds of values that may be in the state; `type` leaves most out at once."""
        left: tuple[str, ...] = KINDS
        for atom in state:
            found = self._kinds_of(atom)
            if found is not KINDS:
                left = found if left is KINDS else tuple(kind for kind in left if kind in found)
        return left

    def _kinds_of(self, atom: Atom) -> tuple[str, ...]:
        if atom not in self._kinds:
            self._kinds[atom] = self._kinds_by_type(*atom)
        return self._kinds[atom]

    def _kinds_by_type(self, pointer: str, holds: bool) -> tuple[str, ...]:
        if not holds or pointer == NEVER[0][0]:
            return KINDS
        for _ in range(MAX_HOPS):
            schema = self._document.node(pointer)
            if not isinstance(schema, dict) or "$ref" not in schema:
                break
            pointer = self._document.target(pointer, "$ref", schema["$ref"])
        if not isinstance(schema, dict) or "type" not in schema or "$ref" in schema:
            return KINDS
        names = type_names(schema, pointer)
        return tuple(kind for kind in KINDS if kind in names or (kind == "number" and "integer" in names))

    def is_never(self, atom: Atom) -> bool:
        """Whether the atom alone plainly admits nothing."""
        pointer, holds = atom
        return holds if pointer == NEVER[0][0] else self._document.node(pointer) is (not holds)

    def of(self, pointer: str, kind: str, holds: bool, exact: bool) -> Ways:
        """The ways in which a schema holds or does not. `exact`: what each evaluates matters."""
        if pointer == "!never":
            return [] if holds else [FREE[kind]]
        key = (pointer, holds, kind, exact)
        if key in self._known:
            return self._known[key]
        if key in self._open:
            raise Circular(str(refused(pointer, "it refers to itself without anything in between")))
        self._open.add(key)
        try:
            ways = self._expanded(pointer, kind, holds, exact)
        finally:
            self._open.discard(key)
        self._known[key] = ways
        return ways

    def _expanded(self, pointer: str, kind: str, holds: bool, exact: bool) -> Ways:
        schema = self._document.node(pointer)
        if isinstance(schema, bool):  # core 4.3.2
            return [FREE[kind]] if schema == holds else []
        if not isinstance(schema, dict):
            raise refused(pointer, f"a schema must be an object or a boolean, got {schema!r}")
        keywords = ["type", *schema] if "type" in schema else list(schema)
        if "$ref" in schema and self._document.dialect(pointer).is_old:
            keywords = ["$ref"]  # up to draft 7 whatever stands beside a $ref is ignored
        else:
            self._document.check_words(pointer, schema)
        if "type" in keywords and holds and not type_(schema, pointer, kind, True, False):
            return []  # as below, for most kinds at once
        needs_all = exact or "unevaluatedProperties" in schema or "unevaluatedItems" in schema
        asking = tuple([name for name in keywords if name in ASKING])
        handlers = [self._keyword(name) for name in _handled(asking, kind)]
        if holds:
            ways = [FREE[kind]]
            for handler in handlers:
                if not ways:
                    return []
                if handler == self.all_of:  # each branch beside what is asked already, which leaves many ways out
                    ways = self._with_all(ways, branches_at(schema, pointer, "allOf"), kind, needs_all, pointer)
                    continue
                if handler == self.one_of and len(ways) <= MOST_BESIDE:
                    ways = self._with_one(ways, branches_at(schema, pointer, "oneOf"), kind, needs_all, pointer)
                    continue
                ways = self._product(ways, handler(schema, pointer, kind, True, needs_all), pointer)
            ways = unevaluated_properties(schema, pointer, ways)
            return unevaluated_items(schema, pointer, ways, is_2019=self._document.dialect(pointer).is_2019)
        if kind in ("object", "array") and ("unevaluatedProperties" in schema or "unevaluatedItems" in schema):
            return [Way(kind, beyond=((pointer, "unevaluated* cannot be negated"),))]
        failing: Ways = []
        for handler in handlers:
            failing += handler(schema, pointer, kind, False, False)
        return [way.without_annotations() for way in self._limited(failing, pointer)]

    def _keyword(self, name: str) -> Keyword:
        found: Keyword = getattr(self, IN_PLACE[name]) if name in IN_PLACE else KEYWORDS[name]
        return found

    def _product(self, ways: Ways, others: Ways, pointer: str) -> Ways:
        if not ways or not others:
            return []
        free = FREE[ways[0].kind]
        if len(ways) == 1 and ways[0] is free:
            return others
        if len(others) == 1 and others[0] is free:
            return ways
        self._watch.check()
        self._steps += len(ways) * len(others)
        if self._steps > MAX_STEPS:
            raise refused(pointer, "its combinations are too many to work out; simplify it")
        joined: Ways = []
        for one in ways:
            if len(others) > 1:
                self._watch.check()
            joined += [way for other in others if (way := both(one, other)) is not None]
        return self._limited(joined, pointer)

    def _limited(self, ways: Ways, pointer: str) -> Ways:
        if len(ways) < 2:
            return ways
        if any(way.is_free for way in ways) and not any(way.has_annotations for way in ways):
            return [FREE[ways[0].kind]]
        distinct = [*{way.key(): way for way in ways}.values()]
        if len(distinct) <= MANY_WAYS:
            return distinct
        self._watch.check()
        if len(distinct) <= MOST_COMPARED:
            return [way for way in distinct if not self._is_surely_empty(way)]
        fewer = without_stricter(distinct, MAX_WAYS, self._is_surely_empty)
        self._watch.check()
        if fewer is None:
            raise refused(pointer, f"it has more than {MAX_WAYS} alternatives when written out; simplify it")
        return fewer

    def _is_surely_empty(self, way: Way) -> bool:
        """False also where what it asks for cannot be enforced: joined with others it may yet be asked of nothing."""
        try:
            return self.is_empty(way)
        except ConstraintError:
            return False

    # -- applicators in place (core 10.2)

    def all_of(self, schema: dict[str, Json], pointer: str, kind: str, holds: bool, exact: bool) -> Ways:
        """allOf (core 10.2.1.1): every branch."""
        places = branches_at(schema, pointer, "allOf")
        if not holds:
            return [way for place in places for way in self.of(place, kind, False, False)]
        return self._with_all([FREE[kind]], places, kind, exact, pointer)

    def _with_all(self, ways: Ways, places: Sequence[str], kind: str, exact: bool, pointer: str) -> Ways:
        for place in places:
            ways = self._product(ways, self.of(place, kind, True, exact), pointer)
        return ways

    def any_of(self, schema: dict[str, Json], pointer: str, kind: str, holds: bool, exact: bool) -> Ways:
        """anyOf (core 10.2.1.2): at least one branch."""
        places = branches_at(schema, pointer, "anyOf")
        if not holds:
            return self._none_of(places, kind, pointer)
        if not exact:
            return self._limited([way for place in places for way in self.of(place, kind, True, False)], pointer)
        if len(places) > MAX_EXACT_BRANCHES:
            raise refused(f"{pointer}/anyOf", f"at most {MAX_EXACT_BRANCHES} branches under unevaluated keywords")
        found: Ways = []
        for chosen in product((True, False), repeat=len(places)):
            if any(chosen):
                ways = [FREE[kind]]
                for place, is_chosen in zip(places, chosen, strict=True):
                    ways = self._product(ways, self.of(place, kind, is_chosen, True), pointer)
                found += ways
        return self._limited(found, pointer)

    def one_of(self, schema: dict[str, Json], pointer: str, kind: str, holds: bool, exact: bool) -> Ways:
        """oneOf (core 10.2.1.3): one branch, and no other that could hold as well."""
        places = branches_at(schema, pointer, "oneOf")
        if holds:
            return self._with_one([FREE[kind]], places, kind, exact, pointer)
        per_place = [self.of(place, kind, True, exact) for place in places]
        found: Ways = [*self._none_of(places, kind, pointer)]
        for i, ways in enumerate(per_place):
            for j in range(i):
                common = self._product(ways, per_place[j], pointer)
                found += common if self._has_any(common) else ()
        return self._limited(found, pointer)

    def _with_one(self, ways: Ways, places: Sequence[str], kind: str, exact: bool, pointer: str) -> Ways:
        """The ways with one branch of oneOf. Only the branches that meet beside what is asked already are kept apart:
        mostly a key tells which it is, and that it must be there stands beside the oneOf."""
        alone = [self.of(place, kind, True, exact) for place in places]
        beside = [self._product(ways, found, pointer) for found in alone]
        meets = [[False] * len(places) for _ in places]
        for i in range(len(places)):
            for j in range(i) if alone[i] else ():
                is_met = self._has_any(self._product(alone[i], alone[j], pointer))
                if is_met and beside[i] is not alone[i]:
                    is_met = self._has_any(self._product(beside[i], alone[j], pointer))
                meets[i][j] = meets[j][i] = is_met
        found: Ways = []
        for i, chosen in enumerate(beside):
            for j, place in enumerate(places):
                if meets[i][j]:
                    chosen = self._product(chosen, self.of(place, kind, False, False), pointer)
            found += chosen
        return self._limited(found, pointer)

    def _has_any(self, ways: Ways) -> bool:
        return any(not self.is_empty(way) for way in ways)

    def not_(self, schema: dict[str, Json], pointer: str, kind: str, holds: bool, exact: bool) -> Ways:
        """not (core 10.2.1.4)."""
        return [way.without_annotations() for way in self.of(f"{pointer}/not", kind, not holds, False)]

    def if_then_else(self, schema: dict[str, Json], pointer: str, kind: str, holds: bool, exact: bool) -> Ways:
        """if, then, else (core 10.2.2.1 to 10.2.2.3)."""
        if "if" not in schema or ("then" not in schema and "else" not in schema and not exact):
            return [FREE[kind]] if holds else []
        condition = f"{pointer}/if"
        found: Ways = []
        for met, branch in ((True, "then"), (False, "else")):
            ways = [FREE[kind]] if holds else []
            if branch in schema:
                ways = self.of(f"{pointer}/{branch}", kind, holds, exact)
            found += self._product(self.of(condition, kind, met, exact), ways, pointer)
        return self._limited(found, pointer)

    def reference(self, schema: dict[str, Json], pointer: str, kind: str, holds: bool, exact: bool) -> Ways:
        """$ref and $dynamicRef (core 8.2.3), $recursiveRef (2019-09 core 8.2.4.2)."""
        ways = [FREE[kind]] if holds else []
        is_recursive = self._document.dialect(pointer).is_recursive
        for keyword in ("$ref", "$dynamicRef", "$recursiveRef"):
            if keyword in schema and (is_recursive or keyword != "$recursiveRef"):
                found = self.of(self._document.target(pointer, keyword, schema[keyword]), kind, holds, exact)
                ways = self._product(ways, found, pointer) if holds else ways + found
        return ways

    def dependent(self, schema: dict[str, Json], pointer: str, kind: str, holds: bool, exact: bool) -> Ways:
        """dependentSchemas (core 10.2.2.4), dependentRequired (validation 6.5.4), dependencies (up to draft 7)."""
        ways = [FREE[kind]] if holds else []
        if kind != "object":
            return ways
        for keyword in ("dependentSchemas", "dependentRequired", "dependencies"):
            for name, needed in dict_at(schema, pointer, keyword).items():
                place = f"{pointer}/{keyword}/{escaped(name)}"
                present = Way(kind, required=(name,))
                if isinstance(needed, list) and keyword != "dependentSchemas":
                    names = keys_in(needed, place)
                    then = [Way(kind, required=tuple(names))] if holds else [absent(other) for other in names]
                elif keyword != "dependentRequired":
                    then = self.of(place, kind, holds, exact)
                else:
                    raise refused(place, f"must be a list of keys, got {needed!r}")
                met = self._product([present], then, place)
                ways = self._product(ways, [absent(name), *met], place) if holds else ways + met
        return ways

    def _none_of(self, places: Sequence[str], kind: str, pointer: str) -> Ways:
        ways = [FREE[kind]]
        for place in places:
            ways = self._product(ways, self.of(place, kind, False, False), pointer)
        return ways


@lru_cache(maxsize=1024)
def _handled(keywords: tuple[str, ...], kind: str) -> tuple[str, ...]:
    """Of keywords that ask for something those that speak of a kind, in order; of those that are expanded together the
    first one."""
    found: dict[Keyword | str, str] = {}
    for name in sorted(keywords, key=lambda name: ORDER.get(name, 0)):
        handler = IN_PLACE.get(name) or KEYWORDS.get(name)
        if handler is not None and KIND_OF.get(name, kind) == kind:
            found.setdefault(handler, name)
    return tuple(found.values())
