"""What is asked of the keys of an object that no name covers: disjoint patterns of them, and the rest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Final

from niwaki.runtime.constraints.regex_language import Term
from niwaki.runtime.constraints.schema.document import Watch, refused
from niwaki.runtime.constraints.schema.facts import NEVER, Atom, State, Way
from niwaki.runtime.constraints.schema.reader import Reader
from niwaki.runtime.constraints.schema.strings import escaped_text, joined

MAX_OVERLAPPING: Final = 4  # patterns of keys


class UnknownKeys:
    """Of the objects of one schema. Refuses patterns of which too many overlap, and what the reader refuses."""

    def __init__(self, reader: Reader, watch: Watch) -> None:
        self._reader = reader
        self._watch = watch
        self._meeting: dict[frozenset[str], bool] = {}  # patterns: whether one key may match all

    def pattern_of(self, ways: Sequence[Way]) -> str:
        """propertyNames as one pattern of keys."""
        options = []
        for way in ways:
            if way.beyond:
                raise refused(*way.beyond[0])
            if way.values is not None:
                options.append(f"^(?:{'|'.join(escaped_text(str(value)) for value in way.values)})$")
            else:
                schema = self._reader.strings.schema(way)
                bounds = f"{{{way.least},{'' if way.most is None else way.most}}}"
                lengths = [rf"^[\s\S]{bounds}$"] if way.least or way.most is not None else []
                options.append(joined([*([str(schema["pattern"])] if "pattern" in schema else []), *lengths]))
        return options[0] if len(options) == 1 else "|".join(f"(?:{option})" for option in options)

    def regions(
        self, way: Way, keys: str | None, known: dict[str, State], place: str
    ) -> tuple[State, list[tuple[str, State]]]:
        """What is asked of keys that no name covers: the rest, and disjoint patterns of keys with theirs.

        Overlapping patterns become one region for each set of them that a key can match.
        """
        sources = dict.fromkeys(regex for group in way.fields for regex, _ in group.patterns)
        patterns = [regex for regex in sources if not self._reader.strings.is_universal(regex, place)]
        terms = {regex: self._reader.strings.term(regex, f"{place}/patternProperties") for regex in patterns}
        regions: list[tuple[frozenset[str], str]] = []
        for chosen in self._overlaps(patterns, terms, place):
            others = [regex for regex in patterns if regex not in chosen and self._meet(terms, regex, chosen)]
            wanted = [*chosen, *([keys] if keys is not None else [])]
            regions.append((frozenset(chosen), joined(wanted, others)))
        if keys is not None:
            regions.append((frozenset(), joined([keys], patterns)))
        merged: dict[State, list[str]] = {}
        for matched, regex in regions:
            state = self._state_of_key(way, matched, place)
            if self._reader.is_impossible(state) and not patterns:
                continue
            # A written pattern also binds the known keys that match it, where they are not bound as much already.
            bound = [
                name
                for name, found in known.items()
                if not set(state) <= set(found) and self._reader.strings.matches(regex, name, place)
            ]
            merged.setdefault(state, []).append(joined([regex], names=bound) if bound else regex)
        found = [
            (regexes[0] if len(regexes) == 1 else "|".join(f"(?:{regex})" for regex in regexes), state)
            for state, regexes in merged.items()
        ]
        rest = NEVER if keys is not None else self._state_of_key(way, frozenset(), place)
        if self._reader.is_impossible(rest):
            found = [(regex, state) for regex, state in found if not self._reader.is_impossible(state)]
        return rest, found

    def _state_of_key(self, way: Way, matched: frozenset[str], place: str) -> State:
        """What is asked of the value of a key that matches just these patterns, and that no name covers."""
        atoms: list[Atom] = []
        is_universal = self._reader.strings.is_universal
        for group in way.fields:
            found = [state for regex, state in group.patterns if regex in matched or is_universal(regex, place)]
            if not found and group.additional is not None:
                found = [group.additional]
            atoms += [atom for state in found for atom in state]
        return tuple(dict.fromkeys(atoms))

    def _overlaps(self, patterns: list[str], terms: dict[str, Term | None], place: str) -> Iterator[tuple[str, ...]]:
        """The sets of patterns that one key can match, but the empty one."""
        yield from ((regex,) for regex in patterns)
        meeting = [(one, other) for one, other in combinations(patterns, 2) if self._meet(terms, one, (other,))]
        involved = [regex for regex in patterns if any(regex in pair for pair in meeting)]
        if len(involved) > MAX_OVERLAPPING:
            raise refused(f"{place}/patternProperties", f"{len(involved)} patterns overlap, at most {MAX_OVERLAPPING}")
        for size in range(2, len(involved) + 1):
            for chosen in combinations(involved, size):
                if all(pair in meeting for pair in combinations(chosen, 2)):
                    yield chosen

    def _meet(self, terms: dict[str, Term | None], regex: str, others: Sequence[str]) -> bool:
        """Whether a key may match the pattern and all the others."""
        names = frozenset((regex, *others))
        if names not in self._meeting:
            self._watch.check()
            found = [terms[name] for name in (regex, *others)]
            known = [term for term in found if term is not None]
            languages = self._reader.strings.languages
            self._meeting[names] = len(known) < len(found) or languages.is_empty(languages.all_of(known)) is not True
        return self._meeting[names]
