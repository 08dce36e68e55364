"""Different keys that an object's schema does not name, the short ones first: what `minProperties` asks for."""

from __future__ import annotations

from itertools import chain, count, islice
from typing import Final

from niwaki.runtime.api import ConstraintError
from niwaki.runtime.constraints.regex_language import Languages, TooManyTerms
from niwaki.runtime.constraints.schema.document import Json, refused
from niwaki.runtime.constraints.schema.strings import joined, read

MAX_MATCHED: Final = 50  # of each pattern: each is looked for among those that the ones before leave


def free_keys(schema: dict[str, Json], wanted: int) -> list[tuple[str, Json]]:
    """Keys for an object of this normal schema, with the schemas of their values: at least `wanted` different ones, or
    all that there are, or beside patterns at least 50.

    Raises:
        ConstraintError: only the engine knows a pattern of keys.
        TooManyTerms: one is too large.
    """
    properties, patterns = schema.get("properties"), schema.get("patternProperties")
    known = properties if isinstance(properties, dict) else {}
    rest = schema.get("additionalProperties", True)
    if not isinstance(patterns, dict) or not patterns:
        names = (name for name in chain([""], map(str, count())) if name not in known)
        return [] if rest is False else [(name, rest) for name in islice(names, wanted)]
    regions = [([one], [other for other in patterns if other != one], patterns[one]) for one in patterns]
    found: list[tuple[str, Json]] = []
    for matched, unmatched, values in (*regions, ([], [*patterns], rest)):
        if values is not False:
            found += [(key, values) for key in _matching(joined(matched, unmatched, known), wanted)]
    return found


def has_free_keys(schema: dict[str, Json], wanted: int, place: str) -> bool:
    """Whether there are so many of them.

    Raises:
        ConstraintError: that is not known.
    """
    try:
        found = free_keys(schema, wanted)
    except (ConstraintError, TooManyTerms):
        raise refused(place, f"minProperties: its patterns of keys do not show {wanted} different ones") from None
    if len(found) < wanted and wanted > MAX_MATCHED and schema.get("patternProperties"):
        raise refused(place, f"minProperties: beside patterns of keys at most {MAX_MATCHED} more can be asked for")
    return len(found) >= wanted


def _matching(pattern: str, wanted: int) -> list[str]:
    languages = Languages()
    term = read(languages, pattern)
    found: list[str] = []
    while len(found) < min(wanted, MAX_MATCHED):
        others = languages.none_of(languages.any_of([languages.text(key) for key in found]))
        key = languages.shortest(languages.all_of([term, others]))
        if key is None:
            break
        found.append(key)
    return found
