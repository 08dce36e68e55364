"""Numbers: whether a constant satisfies the facts, and the facts as ranges that the engine reads exactly."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Final

from niwaki.runtime.constraints.schema.document import Json, refused
from niwaki.runtime.constraints.schema.facts import Way, both
from niwaki.runtime.constraints.schema.ranges import MOST, is_range, range_regex

MAX_EXCLUDED_NUMBERS: Final = 16
MAX_LISTED_NUMBERS: Final = 32
MAX_DECIMALS: Final = 20  # of a step
EXACT_WHOLE: Final = 2**53  # the engine reads bounds as float64


def number_satisfies(value: float, way: Way) -> bool:
    exact = Fraction(value) if isinstance(value, int) else Fraction(repr(value))
    if way.low is not None and (exact < way.low[0] or (exact == way.low[0] and way.low[1])):
        return False
    if way.high is not None and (exact > way.high[0] or (exact == way.high[0] and way.high[1])):
        return False
    if way.is_whole is not None and (exact.denominator == 1) != way.is_whole:
        return False
    return all((exact / step).denominator == 1 for step in way.multiples)


def whole_numbers(way: Way) -> list[Json] | None:
    """All numbers of a way of whole ones between two bounds; None where they are not so, or too many to list."""
    if not way.is_whole or way.low is None or way.high is None or way.high[0] - way.low[0] > MAX_LISTED_NUMBERS:
        return None
    near = range(math.floor(way.low[0]), math.ceil(way.high[0]) + 1)
    return [number for number in near if number_satisfies(number, way) and number not in way.excluded]


def number_schemas(way: Way, place: str) -> list[dict[str, Json]]:
    """Bounds, with the excluded numbers cut out of the range."""
    if way.is_whole is False:
        if way.low is not None or way.high is not None or way.multiples or way.excluded:
            raise refused(place, "that a number is not whole cannot be enforced together with bounds")
        return [{"type": "number", "not": {"type": "integer"}}]
    numbers = sorted(
        Fraction(value) if isinstance(value, int) else Fraction(repr(value))
        for value in way.excluded
        if isinstance(value, int | float)
    )
    if len(numbers) > MAX_EXCLUDED_NUMBERS:
        raise refused(place, f"{len(numbers)} excluded numbers are too many: at most {MAX_EXCLUDED_NUMBERS}")
    pieces = [way]
    for number in numbers:
        cuts = [Way("number", high=(number, True)), Way("number", low=(number, True))]
        pieces = [found for piece in pieces for cut in cuts if (found := both(piece, cut)) is not None]
    return [
        schema for piece in pieces for part in _by_decimals(piece) if (schema := _range_schema(part, place)) is not None
    ]


def _by_decimals(way: Way) -> list[Way]:
    """The way, and those of its multiples that have fewer decimals than it: of 0.25 the engine takes 0.50, not 0.5."""
    if not way.multiples or way.is_whole:
        return [way]
    step = _common_multiple(way.multiples)
    decimals = next((count for count in range(MAX_DECIMALS) if (step * 10**count).denominator == 1), 0)
    if (step * 10**decimals).numerator == 1:
        return [way]
    shorter = [_common_multiple((step, Fraction(1, 10**count))) for count in range(1, decimals)]
    return [way, *(replace(way, multiples=(other,)) for other in dict.fromkeys(shorter))]


def _common_multiple(steps: Sequence[Fraction]) -> Fraction:
    """The least one."""
    step = steps[0]
    for other in steps[1:]:
        step = Fraction(math.lcm(step.numerator, other.numerator), math.gcd(step.denominator, other.denominator))
    return step


def _range_schema(way: Way, place: str) -> dict[str, Json] | None:
    schema: dict[str, Json] = {"type": "integer" if way.is_whole else "number"}
    low, high = way.low, way.high
    if way.is_whole:
        if low is not None:
            bound = math.floor(low[0]) + 1 if low[1] else math.ceil(low[0])
            low = (Fraction(bound), False)
        if high is not None:
            bound = math.ceil(high[0]) - 1 if high[1] else math.floor(high[0])
            high = (Fraction(bound), False)
        if low is not None and high is not None and low[0] > high[0]:
            return None
    bounds = [bound[0] for bound in (low, high) if bound is not None]
    is_exact = not way.multiples and all(bound.denominator == 1 and abs(bound) <= MOST for bound in bounds)
    if low is not None:
        schema["exclusiveMinimum" if low[1] else "minimum"] = _as_number(low[0], 1, place, is_exact)
    if high is not None:
        schema["exclusiveMaximum" if high[1] else "maximum"] = _as_number(high[0], -1, place, is_exact)
    if way.multiples:
        step = _common_multiple(way.multiples)
        if not _has_multiple(Fraction(step.numerator) if way.is_whole else step, low, high):
            return None
        if not (way.is_whole and step == 1):
            schema["multipleOf"] = _as_number(step, 0, place)
    if is_range(schema) and not range_regex(schema, is_whole=bool(way.is_whole)):
        return None
    return schema


def _has_multiple(step: Fraction, low: tuple[Fraction, bool] | None, high: tuple[Fraction, bool] | None) -> bool:
    if low is None or high is None:
        return True
    first, last = math.ceil(low[0] / step), math.floor(high[0] / step)
    first += low[1] and first * step == low[0]
    last -= high[1] and last * step == high[0]
    return first <= last


def _as_number(value: Fraction, towards: int, place: str, is_exact: bool = False) -> Json:
    """The bound; where it is not written out here (`ranges.py`) as the engine reads it, a float64: where that is not
    exact, the next one inside the range."""
    if is_exact or (value.denominator == 1 and abs(value) <= EXACT_WHOLE):
        return int(value)
    near = float(value)
    if Fraction(repr(near)) == value and (value.denominator != 1 or Fraction(near) == value):
        return int(value) if value.denominator == 1 else near
    if towards == 0:
        raise refused(place, f"multipleOf {value} cannot be enforced exactly")
    while (Fraction(near) - value) * towards < 0:
        near = math.nextafter(near, math.inf * towards)
    return int(near) if near.is_integer() else near
