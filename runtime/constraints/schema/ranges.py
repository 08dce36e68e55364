"""Ranges of numbers as regexes: whole bounds of any size, each as exact as its digits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Final, TypeAlias

from niwaki.runtime.constraints.schema.document import Json

LOWER: Final = ("minimum", "exclusiveMinimum")
UPPER: Final = ("maximum", "exclusiveMaximum")
MOST: Final = 10**40  # of bounds: a regex grows with the square of its digits
EXACT_WHOLE: Final = 2**53  # beyond it a reader's double may round a fraction over a bound
# As Python writes a double: below 0.0001 and from 10 ** 16 on with an exponent, here one that all doubles have.
TINY: Final = r"[1-9](?:\.[0-9]+)?e-(?:0[5-9]|[1-9][0-9]|[12][0-9]{2}|3[01][0-9]|32[0-3])"
LEAST_EXPONENT, MOST_EXPONENT = 16, 307
SOME: Final = r"(?:\.[0-9]+)?"
NONE: Final = r"(?:\.0+)?"
POSITIVE: Final = r"\.[0-9]*[1-9][0-9]*"
Bound: TypeAlias = tuple[int, bool]  # and whether it is out itself


def is_range(schema: dict[str, Json]) -> bool:
    """Whether a normal schema of numbers asks for whole bounds, not too large, and for nothing else."""
    bounds = [schema[key] for key in (*LOWER, *UPPER) if key in schema]
    is_whole = all(type(bound) is int and abs(bound) <= MOST for bound in bounds)
    return bool(bounds) and is_whole and not schema.keys() & {"multipleOf", "not"}


def range_regex(schema: dict[str, Json], *, is_whole: bool) -> str:
    """The numbers of such a schema, empty where there are none. Whole ones are spelled in one way. A text's digits are
    between the bounds, and behind a large one, so is the double that they are read as."""
    lows = [(bound, key == LOWER[1]) for key in LOWER if isinstance(bound := schema.get(key), int)]
    highs = [(bound, key != UPPER[1]) for key in UPPER if isinstance(bound := schema.get(key), int)]
    low, highest = max(lows, default=None), min(highs, default=None)
    high = None if highest is None else (highest[0], not highest[1])
    if is_whole:
        return "|".join(_signed(low, high, _whole))
    inner = _inner(low, 1), _inner(high, -1)
    parts = [] if inner == (low, high) else _signed(low, high, _whole)
    return "|".join([*parts, *_signed(*inner, _decimal)])


def _inner(bound: Bound | None, towards: int) -> Bound | None:
    """The bound, a large one as the next double inside."""
    if bound is None or abs(bound[0]) <= EXACT_WHOLE:
        return bound
    near = float(bound[0])
    while (int(near) - bound[0]) * towards < bound[1]:
        near = math.nextafter(near, math.inf * towards)
    return int(near), False


def _signed(low: Bound | None, high: Bound | None, write: Callable[[Bound, Bound | None], list[str]]) -> list[str]:
    if low is not None and high is not None and (low[0] > high[0] or (low[0] == high[0] and (low[1] or high[1]))):
        return []
    found = []
    if low is None or low[0] < 0:
        least = (0, True) if high is None or high[0] >= 0 else (-high[0], high[1])
        below = write(least, None if low is None else (-low[0], low[1]))
        found += [f"-(?:{'|'.join(below)})"] if below else []
    if high is None or high[0] >= 0:
        found += write((0, False) if low is None or low[0] < 0 else low, high)
    return found


def _whole(low: Bound, high: Bound | None) -> list[str]:
    return _naturals(low[0] + low[1], None if high is None else high[0] - high[1])


def _decimal(low: Bound, high: Bound | None) -> list[str]:
    """From 0 on."""
    (first, is_open), last = low, None if high is None else high[0] - 1
    found = [f"(?:{part}){SOME}" for part in _naturals(first + is_open, last)]
    if is_open and (last is None or first <= last):
        found.append(f"{first}{POSITIVE}")
    if high is not None and not high[1] and (first < high[0] or (first == high[0] and not is_open)):
        found.append(f"{high[0]}{NONE}")
    if first == 0 and (last is None or last >= 0):
        found.append(TINY)
    if high is None:
        exponents = _naturals(max(LEAST_EXPONENT, len(str(first))), MOST_EXPONENT)
        found.append(rf"[1-9]{SOME}e\+(?:{'|'.join(exponents)})")
    return found


def _naturals(low: int, high: int | None) -> list[str]:
    """All from `low` to `high`, without leading zeros."""
    first, last = str(low), "" if high is None else str(high)
    if high is None:
        return [*_from(first), f"[1-9][0-9]{{{len(first)},}}"]
    if low > high:
        return []
    if len(first) == len(last):
        return list(_between(first, last))
    longer = [f"[1-9][0-9]{{{len(first)},{len(last) - 2}}}"] if len(last) - 2 >= len(first) else []
    return [*_from(first), *longer, *_to(last, "1")]


def _between(first: str, last: str) -> Iterator[str]:
    """Those of so many digits."""
    same = next((index for index, digit in enumerate(first) if digit != last[index]), len(first))
    head = first[:same]
    if same == len(first):
        yield head
        return
    yield from (f"{head}{first[same]}{rest}" for rest in _from(first[same + 1 :]))
    yield from _digits(head, int(first[same]) + 1, int(last[same]) - 1, len(first) - same - 1)
    yield from (f"{head}{last[same]}{rest}" for rest in _to(last[same + 1 :], "0"))


def _from(first: str) -> Iterator[str]:
    yield first
    for index in reversed(range(len(first))):
        yield from _digits(first[:index], int(first[index]) + 1, 9, len(first) - index - 1)


def _to(last: str, least: str) -> Iterator[str]:
    """`least`: the least first digit."""
    for index, digit in enumerate(last):
        yield from _digits(last[:index], 0 if index else int(least), int(digit) - 1, len(last) - index - 1)
    yield last


def _digits(head: str, low: int, high: int, count: int) -> Iterator[str]:
    if low <= high:
        yield f"{head}[{low}-{high}]" + (f"[0-9]{{{count}}}" if count else "")
