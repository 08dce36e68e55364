"""How a schema's grammar spells numbers and strings: the bodies of its terminals. `lark.py` puts them into rules.

`once`: the part is spelled in one way only, as in an array that allows no item twice (`distinct.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import lru_cache
from typing import Final

from niwaki.runtime.api import ConstraintError
from niwaki.runtime.constraints.regex_language import ANY_CHARACTER, Languages, Term, TooManyTerms
from niwaki.runtime.constraints.regex_lark import in_json, terminal
from niwaki.runtime.constraints.schema.document import Json, as_fraction
from niwaki.runtime.constraints.schema.ranges import LOWER, UPPER, fraction_regex, is_range, range_regex
from niwaki.runtime.constraints.schema.steps import (
    as_engine_reads,
    no_multiple_regex,
    step_in,
    step_regex,
    steps_not_in,
)
from niwaki.runtime.constraints.schema.strings import asked_of, of_length

_HEX: Final = "[0-9a-fA-F]"
# \u of anything but half a surrogate pair. So written, 0.96 of the time in which llguidance builds a grammar with it.
_ESCAPE: Final = rf"\\u(?:[0-9abcefABCEF]{_HEX}|[dD][0-7]|[dD][89abAB]{_HEX}{_HEX}\\u[dD][c-fC-F]){_HEX}{_HEX}"
CHARACTER: Final = rf'(?:[^"\\\x00-\x1F]|\\["\\\/bfnrt]|{_ESCAPE})'
INTEGER: Final = "-?(?:0|[1-9][0-9]*)"
# Of what a reader takes for a finite double. The exponent stands behind few digits, and more digits before none.
NUMBER: Final = (
    r"-?(?:(?:0|[1-9][0-9]{8,307})(?:\.[0-9]+)?"
    r"|[1-9][0-9]{0,7}(?:\.[0-9]+)?(?:[eE](?:-[0-9]{1,3}|\+?[0-2]?[0-9]{1,2}))?)"
)
# Each number in one way, of at most 15 digits where it is not whole: as many as a double keeps apart.
ONCE_INTEGER: Final = "0|-?[1-9][0-9]*"
ONCE_FRACTION: Final = (
    r"(/-?[1-9][0-9]*\.[0-9]*[1-9]/ & /-?[0-9.]{3,16}/)"
    r" | /-?0\.0{0,3}[1-9](?:[0-9]{0,13}[1-9])?/"
    r" | /-?[1-9](?:\.[0-9]{0,13}[1-9])?e-(?:0[5-9]|[1-9][0-9]|[12][0-9]{2})/"
)
BASICS: Final = {
    "STRING": f'STRING: /"{CHARACTER}*"/',
    "INTEGER": f"INTEGER: /{INTEGER}/",
    "NUMBER": f"NUMBER: /{NUMBER}/",
    "ONCE_INTEGER": f"ONCE_INTEGER: /{ONCE_INTEGER}/",
    "ONCE_FRACTION": f"ONCE_FRACTION: {ONCE_FRACTION}",
    "KEY": f'KEY: "\\"" /{in_json(ANY_CHARACTER)}*/ "\\""',  # any, as keys are spelled
}
ENGINE_OPTIONS: Final = {"x-guidance": {"whitespace_flexible": False}}
NUMBER_KEYWORDS: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
STRING_KEYWORDS: Final = ("pattern", "minLength", "maxLength")


def any_number(kind: str, *, once: bool) -> list[str]:
    """Of an integer or a number of which nothing else is asked: the terminals of `BASICS` that are its alternatives."""
    if once:
        return ["ONCE_INTEGER"] if kind == "integer" else ["ONCE_INTEGER", "ONCE_FRACTION"]
    return [kind.upper()]


def asks_of_numbers(schema: dict[str, Json]) -> bool:
    return "not" in schema or any(key in schema for key in NUMBER_KEYWORDS)


def number(kind: str, schema: dict[str, Json], *, once: bool) -> str | None:
    """The body of an integer or a number of which more is asked; None where only the engine knows its multiples."""
    if kind == "integer" and "not" in schema:
        return " & ".join(f"/{regex}/" for regex in _no_multiples(schema))
    if "not" in schema:
        asked = _numbers_asked(schema)
        within = f" & /{range_regex(asked, is_whole=False)}/" if asked else ""
        return f"{'ONCE_FRACTION' if once else f'/{fraction_regex()}/'}{within}"
    step = step_in(schema, is_whole=kind == "integer")
    if step is not None:
        limits = _limits(schema)
        within = f" & /{range_regex(limits, is_whole=kind == 'integer')}/" if limits else ""
        return f"/{step_regex(step)}/{within}{' & ONCE_INTEGER' if once else ''}"
    if is_range(schema):
        regex = range_regex(schema, is_whole=kind == "integer")
        is_spelled_once = kind == "integer" or not once
        return f"/{regex}/" if is_spelled_once else f"/{regex}/ & (ONCE_INTEGER | ONCE_FRACTION)"
    return None


def number_of_engine(kind: str, schema: dict[str, Json]) -> str:
    """The same as a rule by the engine's own reader of schemas."""
    asked = _numbers_asked(schema)
    if isinstance(step_number := schema.get("multipleOf"), int | float):
        steps = as_engine_reads(as_fraction(step_number))
        assert steps is not None, "a normal schema has no other"
        asked["multipleOf"], *others = steps
        asked |= {"allOf": [{"multipleOf": other} for other in others]} if others else {}
    return _of_engine({"type": kind, **asked})


def _numbers_asked(schema: dict[str, Json]) -> dict[str, Json]:
    return {key: schema[key] for key in NUMBER_KEYWORDS if key in schema}


def _limits(schema: dict[str, Json]) -> dict[str, Json]:
    return {key: schema[key] for key in (*LOWER, *UPPER) if key in schema}


def _no_multiples(schema: dict[str, Json]) -> Iterator[str]:
    """Regexes all of which match the whole numbers of a schema that are no multiples."""
    yield no_multiple_regex(steps_not_in(schema))
    limits = _limits(schema)
    if limits:
        yield range_regex(limits, is_whole=True)
    if "multipleOf" in schema and (step := step_in(schema, is_whole=True)) is not None:
        yield step_regex(step)


def any_string(*, once: bool) -> str:
    """Of a string of which nothing else is asked: its terminal of `BASICS`."""
    return "KEY" if once else "STRING"


def asks_of_strings(schema: dict[str, Json]) -> bool:
    return "pattern" in schema or bool(schema.get("minLength", 0)) or schema.get("maxLength") is not None


def string(schema: dict[str, Json], *, once: bool) -> str | None:
    """The body of a string of which more is asked; None where only the engine knows its pattern.

    Raises:
        ConstraintError: only the engine knows it, which does not spell a string in one way.
    """
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if "pattern" not in schema:
        character = in_json(ANY_CHARACTER) if once else CHARACTER
        return f'/"{character}{{{least},{"" if most is None else most}}}"/'
    body = text_terminal(str(schema["pattern"]), int(str(least)), None if most is None else int(str(most)))
    if body is None and once:
        raise ConstraintError(f"the pattern {schema['pattern']} cannot be enforced below uniqueItems")
    return body


def string_of_engine(schema: dict[str, Json]) -> str:
    """The same as a rule by the engine's own reader of schemas."""
    return _of_engine({"type": "string", **{key: schema[key] for key in STRING_KEYWORDS if key in schema}})


def key_terminal(pattern: str) -> str:
    """The body of the keys in which a pattern is found.

    Raises:
        ConstraintError: only the engine knows the pattern.
    """
    body = text_terminal(pattern, 0, None)
    if body is None:
        raise ConstraintError(f"the pattern of keys {pattern} cannot be enforced")
    return body


@lru_cache(maxsize=512)
def text_terminal(pattern: str, least: int, most: int | None) -> str | None:
    """The strings in which a pattern is found, as a terminal; None where only the engine knows the pattern, and where
    no text is in it."""

    def written(languages: Languages, term: Term) -> str | None:
        language = of_length(languages, term, least, most)
        if languages.is_empty(language) is True:
            return None
        return f'"\\"" {terminal(languages, language, in_json)} "\\""'

    try:
        return asked_of(pattern, written)
    except (ConstraintError, TooManyTerms):
        return None


def _of_engine(schema: dict[str, Json]) -> str:
    return f"%json {json.dumps({**schema, **ENGINE_OPTIONS})}"
