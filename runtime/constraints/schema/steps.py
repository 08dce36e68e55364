"""Multiples of a step as regexes, where the last digits of a number tell them: of 0.01, 0.25, 2.5, 5 or 100, whose
digits divide a power of ten. Exact whatever the number's size. Of other steps the engine knows the multiples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Final, NamedTuple

from niwaki.runtime.constraints.schema.document import Json, as_fraction
from niwaki.runtime.constraints.schema.ranges import FINITE_DIGITS

MOST_ENDS: Final = 100  # different last digits
MOST_DECIMALS: Final = 40
LARGEST_READ: Final = 2**32 - 1  # the digits of a step that the engine takes
PARTS: Final = (2, 4, 5, 8, 10, 16, 20, 25, 40, 50, 100)  # of a step
SMALL_FACTORS: Final = 100
NO_MULTIPLE_ENDS: Final = 3  # last digits that tell what is no multiple
WITHIN_FREE: Final = 3


class Step(NamedTuple):
    """A number is a multiple if the last `num_ends` digits of it with `decimals` behind its point are one of `digits`,
    which are the last digits of the step, its zeros behind the point left out."""

    digits: int
    decimals: int
    num_ends: int


def step_of(step: Fraction) -> Step | None:
    """None where the last digits do not tell, or in too many ways."""
    decimals = _decimals_of(step)
    if decimals is None:
        return None
    digits = int(step * 10**decimals)
    num_ends = next((count for count in range(len(str(digits)) * 4) if 10**count % digits == 0), None)
    if num_ends is None or 10**num_ends // digits > MOST_ENDS or num_ends - decimals >= FINITE_DIGITS:
        return None
    return Step(digits, decimals, num_ends)


def step_in(schema: dict[str, Json], *, is_whole: bool) -> Step | None:
    """That of a normal schema of numbers, by its `multipleOf`. Likewise."""
    value = schema.get("multipleOf")
    if not isinstance(value, int | float):
        return None
    step = as_fraction(value)
    return step_of(Fraction(step.numerator) if is_whole else step)


def last_digits_tell(step: int) -> bool:
    """Which whole numbers are no multiples of it: of 2, 4, 5, 8, 10 and so on."""
    return 10**NO_MULTIPLE_ENDS % step == 0


def is_no_multiple(number: Fraction, steps: Sequence[int]) -> bool:
    """Of any of them. Of WITHIN_FREE whole numbers in a row and one more, one is none: what ends in 1, 3, 7 or 9. So
    it is among multiples in a row of a number that itself is none."""
    return all((number / step).denominator > 1 for step in steps)


def steps_not_in(schema: dict[str, Json]) -> list[int]:
    """Of what a normal schema of whole numbers has no multiples."""
    negated = schema.get("not")
    parts = negated.get("anyOf") if isinstance(negated, dict) else None
    steps = [part["multipleOf"] for part in parts if isinstance(part, dict)] if isinstance(parts, list) else []
    return [step for step in steps if isinstance(step, int)]


def no_multiple_regex(steps: Sequence[int]) -> str:
    """The whole numbers that are multiples of none of them; none is read as infinite."""
    num_ends = next(count for count in range(1, NO_MULTIPLE_ENDS + 1) if all(10**count % step == 0 for step in steps))
    ends = [str(end) for end in range(10**num_ends) if all(end % step for step in steps)]
    options = [_one_of([end for end in ends if len(end) == size]) for size in range(1, num_ends + 1)]
    front = f"[1-9][0-9]{{0,{FINITE_DIGITS - 1 - num_ends}}}"
    options.append(front + _one_of([end.rjust(num_ends, "0") for end in ends]))
    return f"-?(?:{'|'.join(filter(None, options))})"


def _one_of(texts: list[str]) -> str:
    """One of these digits, all as many; empty where there are none."""
    rests: dict[str, list[str]] = {}
    for text in texts:
        if text:
            rests.setdefault(text[0], []).append(text[1:])
    firsts: dict[str, str] = {}  # by what may follow
    for first, behind in rests.items():
        rest = _one_of(behind)
        firsts[rest] = firsts.get(rest, "") + first
    return f"(?:{'|'.join(f'[{first}]{rest}' for rest, first in firsts.items())})" if firsts else ""


def step_regex(step: Step) -> str:
    """The multiples, with no more decimals than the step has and no exponent."""
    num_before = max(0, step.num_ends - step.decimals)  # of the last digits, those before the point
    fractions: dict[str, list[str]] = {}  # by the digits before the point
    for end in range(0, 10**step.num_ends, step.digits):
        text = str(end).rjust(step.num_ends, "0") if step.num_ends else ""
        fractions.setdefault(text[:num_before], []).append(text[num_before:])
    num_free = step.decimals - (step.num_ends - num_before)
    alike: dict[tuple[str, ...], list[str]] = {}
    for before, behind in fractions.items():
        alike.setdefault(tuple(behind), []).append(before)
    options = [f"{_whole(befores)}{_fraction(behind, num_free)}" for behind, befores in alike.items()]
    return f"-?(?:{'|'.join(options)})"


def _whole(ends: list[str]) -> str:
    """The whole numbers that end in one of these, all of a length, without leading zeros; none is read as infinite."""
    front = f"[1-9][0-9]{{0,{FINITE_DIGITS - 1 - len(ends[0])}}}"
    if ends == [""]:
        return f"(?:0|{front})"
    short = [end.lstrip("0") or "0" for end in ends]
    return f"(?:{'|'.join(short)}|{front}(?:{'|'.join(ends)}))"


def _fraction(ends: tuple[str, ...], num_free: int) -> str:
    """Those that end in one of these behind so many other digits; zeros at the end may be left out."""
    free = f"[0-9]{{{num_free}}}" if num_free else ""
    options = []
    for end in ends:
        kept = end.rstrip("0")
        if kept:
            num_zeros = len(end) - len(kept)
            options.append(f"{free}{kept}{f'0{{0,{num_zeros}}}' if num_zeros else ''}")
        elif end or num_free:
            most = f"0{{1,{len(end)}}}" if end else ""
            options += [f"[0-9]{{1,{num_free}}}"] if num_free else []
            options += [f"{free}{most}"] if most else []
    if not options:
        return ""
    is_optional = any(not end.strip("0") for end in ends)
    return rf"(?:\.(?:{'|'.join(options)})){'?' if is_optional else ''}"


def as_engine_reads(step: Fraction) -> tuple[float, ...] | None:
    """Doubles whose common multiples llguidance takes to be just those of the step; None where none are found.

    One near it mostly. For 1.13 there is none, but 1.13 is the least common multiple of 0.565 and 0.01, as 0.57 is that
    of 0.03 and 0.19.
    """
    alone = _as_read(step)
    decimals = _decimals_of(step)
    if alone is not None or decimals is None:
        return None if alone is None else (alone,)
    digits = int(step * 10**decimals)
    for parts in PARTS:
        fine, coarse = step / parts, Fraction(math.gcd(digits, 10 ** digits.bit_length()), 10**decimals)
        if digits * 10 ** ((_decimals_of(fine) or 0) - decimals) > LARGEST_READ:  # they are brought to as many decimals
            continue
        pair = _as_read(fine), _as_read(coarse)
        if pair[0] is not None and pair[1] is not None and least_common_multiple((fine, coarse)) == step:
            return pair[0], pair[1]
    for factor in range(3, SMALL_FACTORS):
        if digits % factor == 0 and math.gcd(factor, digits // factor) == 1 and factor < digits:
            both = [as_engine_reads(Fraction(part, 10**decimals)) for part in (factor, digits // factor)]
            if both[0] is not None and both[1] is not None and digits <= LARGEST_READ:
                return *both[0], *both[1]
    return None


def digits_of(step: Fraction) -> int:
    """Those of the step without its point: 25 of 0.25."""
    return int(step * 10 ** (_decimals_of(step) or 0))


def _decimals_of(number: Fraction) -> int | None:
    """None where they are endless, or too many."""
    return next((count for count in range(MOST_DECIMALS + 1) if (number * 10**count).denominator == 1), None)


def least_common_multiple(steps: Sequence[Fraction]) -> Fraction:
    step = steps[0]
    for other in steps[1:]:
        step = Fraction(math.lcm(step.numerator, other.numerator), math.gcd(step.denominator, other.denominator))
    return step


def _as_read(step: Fraction) -> float | None:
    """A double near the step whose text llguidance takes for just the step; None where none is found.

    It multiplies by ten until nothing is left behind the point, each time rounded: 0.07 becomes 7.000000000000001, and
    only the double below it 7 of two decimals. A step that it takes for another has too many digits, and is refused.
    """
    value = math.nextafter(math.nextafter(float(step), 0.0), 0.0)
    for _ in range(5):
        digits, decimals = _as_parsed(repr(value)), 0
        while not digits.is_integer() and decimals <= MOST_DECIMALS:
            digits, decimals = digits * 10.0, decimals + 1
        if digits.is_integer() and digits <= LARGEST_READ and Fraction(int(digits), 10**decimals) == step:
            return value
        value = math.nextafter(value, math.inf)
    return None


def _as_parsed(text: str) -> float:
    """The number as serde_json reads it: its digits as a double, divided by a power of ten."""
    number = Decimal(text)
    exponent = number.as_tuple().exponent
    assert isinstance(exponent, int), "a number"
    digits = float(number.scaleb(-exponent))
    return digits / float(f"1e{-exponent}") if exponent < 0 else digits * float(f"1e{exponent}")
