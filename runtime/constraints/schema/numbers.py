"""Numbers: whether a constant satisfies the facts, and the facts as ranges that the engine reads exactly."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Final

from msgspec.structs import replace

from niwaki.runtime.constraints.schema.document import AsDouble, Json, as_bound, as_fraction, refused
from niwaki.runtime.constraints.schema.facts import Way, both
from niwaki.runtime.constraints.schema.ranges import (
    EXACT_WHOLE,
    LARGEST,
    LOWER,
    UPPER,
    is_range,
    range_regex,
    short_decimals,
)
from niwaki.runtime.constraints.schema.steps import (
    WITHIN_FREE,
    as_engine_reads,
    digits_of,
    is_no_multiple,
    least_common_multiple,
    step_of,
)

MAX_EXCLUDED_NUMBERS: Final = 16
MAX_LISTED_NUMBERS: Final = 32
MAX_DECIMALS: Final = 20  # of a step
# The engine has a state for each rest: up to 0.45 s for 100,000 and 1.1 for 200,000, so that a limit in time alone
# would refuse some of these at times.
LARGEST_STEP: Final = 100_000


def number_satisfies(value: float, way: Way) -> bool:
    number = as_fraction(value)
    if way.low is not None and (number < way.low[0] or (number == way.low[0] and way.low[1])):
        return False
    if way.high is not None and (number > way.high[0] or (number == way.high[0] and way.high[1])):
        return False
    if way.is_whole is not None and (number.denominator == 1) != way.is_whole:
        return False
    if not all((number / step).denominator == 1 for step in way.multiples):
        return False
    return is_no_multiple(number, way.no_multiples)


def whole_numbers(way: Way) -> list[Json] | None:
    """All numbers of a way of whole ones between two bounds; None where they are not so, or too many to list."""
    if not way.is_whole or way.low is None or way.high is None or way.high[0] - way.low[0] > MAX_LISTED_NUMBERS:
        return None
    near = range(math.floor(way.low[0]), math.ceil(way.high[0]) + 1)
    return [number for number in near if number_satisfies(number, way) and number not in way.excluded]


def number_schemas(way: Way, place: str) -> list[dict[str, Json]]:
    """Bounds, with the excluded numbers cut out of the range."""
    if way.is_whole is False and way.multiples:
        raise refused(place, "that a number is not whole cannot be enforced together with multipleOf")
    numbers = sorted(as_bound(value) for value in way.excluded if isinstance(value, int | float))
    if way.is_whole is False:
        numbers = [number for number in numbers if number.denominator > 1]
    if len(numbers) > MAX_EXCLUDED_NUMBERS:
        raise refused(place, f"{len(numbers)} excluded numbers are too many: at most {MAX_EXCLUDED_NUMBERS}")
    pieces = [way]
    for number in numbers:
        cuts = [Way("number", high=(number, True)), Way("number", low=(number, True))]
        pieces = [found for piece in pieces for cut in cuts if (found := both(piece, cut)) is not None]
    parts = [part for piece in pieces for part in _by_decimals(piece)]
    if way.is_whole is False:
        parts = [part for part in parts if part.low is None or part.low != part.high or part.low[0].denominator > 1]
    schemas = [schema for part in parts if (schema := _range_schema(part, place)) is not None]
    return schemas if way.is_whole is not False else [_not_whole(schema, place) for schema in schemas]


def _not_whole(schema: dict[str, Json], place: str) -> dict[str, Json]:
    if next(short_decimals(schema), None) is None:
        raise refused(place, "that a number is not whole cannot be enforced between bounds so near or so large")
    return {**schema, "not": {"type": "integer"}}


def _by_decimals(way: Way) -> list[Way]:
    """The way, and those of its multiples that have fewer decimals than it: of 0.25 the engine takes 0.50, not 0.5."""
    if not way.multiples or way.is_whole:
        return [way]
    step = least_common_multiple(way.multiples)
    if step_of(step) is not None:
        return [way]
    decimals = next((count for count in range(MAX_DECIMALS) if (step * 10**count).denominator == 1), 0)
    if (step * 10**decimals).numerator == 1:
        return [way]
    shorter = [least_common_multiple((step, Fraction(1, 10**count))) for count in range(1, decimals)]
    return [way, *(replace(way, multiples=(other,)) for other in dict.fromkeys(shorter))]


def _range_schema(way: Way, place: str) -> dict[str, Json] | None:
    schema: dict[str, Json] = {"type": "integer" if way.is_whole else "number"}
    low, high = way.low, way.high
    if way.is_whole:
        if low is not None and not isinstance(low[0], AsDouble):
            bound = math.floor(low[0]) + 1 if low[1] else math.ceil(low[0])
            low = (Fraction(bound), False)
        if high is not None and not isinstance(high[0], AsDouble):
            bound = math.ceil(high[0]) - 1 if high[1] else math.floor(high[0])
            high = (Fraction(bound), False)
        if low is not None and high is not None and low[0] > high[0]:
            return None
    step = least_common_multiple(way.multiples) if way.multiples else Fraction(1)
    if way.is_whole:
        step = Fraction(step.numerator)
    is_exact = step_of(step) is not None
    if low is not None:
        schema[LOWER[low[1]]] = _as_number(low[0], LOWER[low[1]], place, is_exact=is_exact)
    if high is not None:
        schema[UPPER[high[1]]] = _as_number(high[0], UPPER[high[1]], place, is_exact=is_exact)
    if (way.multiples or way.no_multiples) and not _has_multiple(step, way.no_multiples, low, high):
        return None
    if way.no_multiples:
        if not is_exact:
            why = "what is no multiple cannot be enforced beside it"
            raise refused(place, f"multipleOf {_shown(step)} cannot be enforced exactly: {why}")
        schema["not"] = {"anyOf": [{"multipleOf": other} for other in sorted(way.no_multiples)]}
    if way.multiples:
        if not is_exact and as_engine_reads(step) is None:
            why = "the engine takes its digits for others"
            raise refused(place, f"multipleOf {_shown(step)} cannot be enforced exactly: {why}")
        if not is_exact and digits_of(step) > LARGEST_STEP:
            why = f"without its point it is more than {LARGEST_STEP}, and last digits do not tell its multiples"
            raise refused(place, f"multipleOf {_shown(step)} cannot be enforced: {why}")
        if not (way.is_whole and step == 1):
            schema["multipleOf"] = _as_number(step, "multipleOf", place, is_exact=is_exact)
    if is_range(schema) and not range_regex(schema, is_whole=bool(way.is_whole)):
        return None
    return schema


def _has_multiple(
    step: Fraction,
    others: Sequence[int],
    low: tuple[Fraction, bool] | None,
    high: tuple[Fraction, bool] | None,
) -> bool:
    """Whether one lies between the bounds that is a multiple of none of the others."""
    if any((step / other).denominator == 1 for other in others):
        return False
    if low is None or high is None:
        return True
    first, last = math.ceil(low[0] / step), math.floor(high[0] / step)
    first += low[1] and first * step == low[0]
    last -= high[1] and last * step == high[0]
    near = range(first, min(last, first + WITHIN_FREE) + 1)
    return any(is_no_multiple(count * step, others) for count in near)


def _shown(step: Fraction) -> str:
    return str(step if step.denominator == 1 else float(step))[:40]


def _as_number(value: Fraction, keyword: str, place: str, *, is_exact: bool) -> Json:
    """Of a bound or a step. `is_exact`: what is asked is written out here (`ranges.py`, `steps.py`); the engine reads
    numbers as float64, and of larger ones takes more than they say."""
    if abs(value) > LARGEST:
        raise refused(place, f"{keyword} of {len(str(value))} digits cannot be enforced exactly")
    near = float(value)
    if value.denominator == 1 and (is_exact or abs(value) <= EXACT_WHOLE):
        return near if isinstance(value, AsDouble) else int(value)
    if value.denominator == 1 or as_fraction(near) != value:
        beside = "" if keyword == "multipleOf" else " beside such a multipleOf"
        raise refused(place, f"{keyword} {value}{beside} cannot be enforced exactly")
    return near
