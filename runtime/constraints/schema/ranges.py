"""Ranges of numbers as regexes, with bounds of any size and any digits.

A text of a range is between its bounds by its digits, and so is the double that a reader makes of it: of
`exclusiveMaximum: 3` 2.9999999999999996 is the last that is not whole, since 2.9999999999999999 is read as 3.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from typing import Final, NamedTuple, TypeAlias

from niwaki.runtime.constraints.schema.document import Json, as_fraction

LOWER: Final = ("minimum", "exclusiveMinimum")
UPPER: Final = ("maximum", "exclusiveMaximum")
EXACT_WHOLE: Final = 2**53  # beyond it not every whole number is a double
MOST_DIGITS: Final = 40  # of a bound, without the zeros that it ends in; of more the next inside is taken
# A double is written with an exponent below 0.0001 and from 10 ** 16 on.
EXPONENTS: Final = ((-324, -5), (16, 308))
LARGEST: Final = Fraction(repr(sys.float_info.max))
SMALLEST: Final = Fraction("5e-324")
FINITE_DIGITS: Final = 308  # so many digits before the point are surely a finite double
MOST_TOLD: Final = 16  # digits of a number that tell surely whether its double is whole
SHORT_DECIMALS: Final = 4
SHORT_DIGITS: Final = 15
ENDING_IN_LARGEST: Final = rf"1(?:\.(?:[0-6][0-9]*|{repr(sys.float_info.max)[2:18]}))?e\+{EXPONENTS[1][1]}"
SOME: Final = r"(?:\.[0-9]+)?"
Options: TypeAlias = list[str]  # regexes, of which one is matched


def fraction_regex() -> str:
    """The numbers that are not whole, and whose double is not: as Python writes them, so none ends in 0.

    Of a number with n digits before its point the first 16 - n behind it tell surely that its double is not whole
    where they are not all 0, and not all 9 before more of them. All of at most 15 digits are among these.
    """
    more = "(?:[0-9]*[1-9])?"

    def behind(num_told: int, num_zeros: int) -> str:
        options = [f"[1-8]{more}"]
        if num_zeros:
            options.append(f"0{{1,{num_zeros}}}[1-9]{more}")
        if num_told > 1:
            options.append(f"9{{1,{num_told - 1}}}(?:[1-8]|[0-8][0-9]*[1-9])?")
        options.append(f"9{{{num_told}}}")
        return "|".join(options)

    options = [rf"0\.(?:{behind(MOST_TOLD, -EXPONENTS[0][0] - 24)})"]
    options += [
        rf"[1-9][0-9]{{{count - 1}}}\.(?:{behind(MOST_TOLD - count, MOST_TOLD - count - 1)})"
        for count in range(1, MOST_TOLD)
    ]
    options.append(rf"[1-3][0-9]{{{MOST_TOLD - 1}}}\.(?:[3-6]{more}|7)")  # below 2 ** 52 there are halves
    mantissa = r"(?:\.[0-9]*[1-9])?"
    options.append(rf"[1-9]{mantissa}e-(?:0?[2-9]|[1-9][0-9]|[12][0-9]{{2}}|3[01][0-9]|32[0-3])|[3-9]{mantissa}e-324")
    return f"-?(?:{'|'.join(options)})"


def is_range(schema: dict[str, Json]) -> bool:
    """Whether a normal schema of numbers asks for bounds, and for nothing else."""
    return bool(schema.keys() & {*LOWER, *UPPER}) and not schema.keys() & {"multipleOf", "not"}


def range_regex(schema: dict[str, Json], *, is_whole: bool) -> str:
    """The numbers of such a schema, empty where there are none. Whole ones are spelled in one way."""
    first, last = _ends(schema, Bound.first_whole)
    if is_whole:
        return "|".join(_signed(first, last, Fraction(1), _whole))
    low, high = _ends(schema, Bound.first_plain)
    plain = _signed(low, high, SMALLEST, _plain)
    is_within = (low is None or first is None or first >= low) and (high is None or last is None or last <= high)
    # Beside a bound that is no double there may be whole numbers, exact for a reader, and no double before it.
    whole = [] if is_within else _signed(first, last, Fraction(1), _finite_whole)
    return "|".join([*whole, *plain, *_signed(*_ends(schema, Bound.first_double), SMALLEST, _scientific)])


def widest_bound(schema: dict[str, Json]) -> int:
    """How many characters a bound of the range has at most."""
    ends = (*_ends(schema, Bound.first_whole), *_ends(schema, Bound.first_plain))
    return max(len(str(whole)) + len(digits) + 2 for whole, digits in (_split(end) for end in ends if end is not None))


def shortest_number(schema: dict[str, Json], *, is_whole: bool) -> str | None:
    """A short text of the range; None where it is empty."""
    text = _short_text(*_ends(schema, Bound.first_whole), 0)
    if text is None and not is_whole:
        text = _short_text(*_ends(schema, Bound.first_plain), sys.float_info.dig - EXPONENTS[0][0])
    return None if text is None or (len(text) > FINITE_DIGITS and not is_whole and "." not in text) else text


def short_decimals(schema: dict[str, Json]) -> Iterator[str]:
    """Different numbers of the range that are not whole, those with few digits first; not all of them."""
    low, high = _ends(schema, Bound.first_plain)
    start = low if low is not None else Fraction(0) if high is None else min(Fraction(0), high - 1)
    stop = start + 1 if high is None else min(high, start + 1)
    for decimals in range(1, SHORT_DECIMALS + 1):
        unit = 10**decimals
        for number in range(math.ceil(start * unit), math.floor(stop * unit) + 1):
            digits = str(abs(number)).rjust(decimals + 1, "0")
            if number % 10 and len(digits) <= SHORT_DIGITS:
                yield f"{'-' * (number < 0)}{digits[:-decimals]}.{digits[-decimals:]}"


def _short_text(low: Fraction | None, high: Fraction | None, most_decimals: int) -> str | None:
    """With the fewest decimals."""
    if low is not None and high is not None and low > high:
        return None
    if (low is None or low <= 0) and (high is None or high >= 0):
        return "0"
    if low is None or low < 0:
        text = _short_text(Fraction(0) if high is None else -high, None if low is None else -low, most_decimals)
        return None if text is None else f"-{text}"
    for decimals in range(most_decimals + 1):
        near = math.ceil(low * 10**decimals)
        if high is None or Fraction(near, 10**decimals) <= high:
            text = str(near).rjust(decimals + 1, "0")
            return f"{text[:-decimals]}.{text[-decimals:]}" if decimals else text
    return None


# -- bounds


class Bound(NamedTuple):
    """A lower bound; an upper one is its negative. `literal`: as the schema has it, where that is a double."""

    value: Fraction
    is_out: bool
    literal: float | None

    @property
    def _as_read(self) -> Fraction:
        """What must be reached by the digits of a whole number and for a reader, whom 1e23 is a little less."""
        if self.literal is None or not self._is_coarse:
            return self.value
        return max(self.value, Fraction(self.literal))

    @property
    def _is_coarse(self) -> bool:
        return self.literal is not None and abs(self.literal) > EXACT_WHOLE

    def first_whole(self) -> Fraction:
        """The first whole number inside."""
        bound = self._as_read
        return _shortened(math.floor(bound) + 1 if self.is_out else math.ceil(bound))

    def first_double(self) -> Fraction:
        """The digits of the first double inside: both are, and both of all further ones."""
        if not self.is_out and (self.literal is not None or abs(self.value) <= EXACT_WHOLE):
            return self.value
        near = float(self.value)
        while not self._holds(Fraction(near)) or not self._holds(as_fraction(near)):
            near = math.nextafter(near, math.inf)
            if near == math.inf:
                return 2 * LARGEST
        return as_fraction(near)

    def first_plain(self) -> Fraction:
        """Likewise, where a text may also be a whole number."""
        first = self.first_double()
        return max(first, self.first_whole()) if self._is_coarse else first

    def _holds(self, value: Fraction) -> bool:
        return value > self.value if self.is_out else value >= self.value


def _ends(
    schema: dict[str, Json], first_inside: Callable[[Bound], Fraction]
) -> tuple[Fraction | None, Fraction | None]:
    """The first and the last number of a range."""
    low, high = _strictest(schema, LOWER, 1), _strictest(schema, UPPER, -1)
    return None if low is None else first_inside(low), None if high is None else -first_inside(high)


def _strictest(schema: dict[str, Json], keys: Sequence[str], sign: int) -> Bound | None:
    given = [(sign * value, key == keys[1]) for key in keys if isinstance(value := schema.get(key), int | float)]
    found = [Bound(as_fraction(value), is_out, value if isinstance(value, float) else None) for value, is_out in given]
    return max(found, key=lambda bound: bound[:2], default=None)


def _shortened(bound: int) -> Fraction:
    """The bound, or the next number of not too many digits."""
    num_zeros = max(0, len(str(abs(bound))) - MOST_DIGITS)
    is_short = not num_zeros or not bound % 10**num_zeros
    return Fraction(bound if is_short else (bound // 10**num_zeros + 1) * 10**num_zeros)


def _signed(
    low: Fraction | None,
    high: Fraction | None,
    least: Fraction,
    write: Callable[[Fraction, Fraction | None], Iterable[str]],
) -> Options:
    """`least` is the least number above zero."""
    if low is not None and high is not None and low > high:
        return []
    found: Options = []
    if low is None or low < 0:
        below = [*write(least if high is None or high >= 0 else -high, None if low is None else -low)]
        found += [f"-(?:{'|'.join(below)})"] if below else []
    if high is None or high >= 0:
        found += write(max(Fraction(0), low or Fraction(0)), high)
    return found


# -- numbers from zero on


def _whole(low: Fraction, high: Fraction | None) -> Iterator[str]:
    return _naturals(int(low), None if high is None else int(high))


def _finite_whole(low: Fraction, high: Fraction | None) -> Iterator[str]:
    last = 10**FINITE_DIGITS - 1
    return _naturals(int(low), last if high is None else min(int(high), last))


def _plain(low: Fraction, high: Fraction | None) -> Iterator[str]:
    """Without an exponent."""
    if high is None and low >= 10 ** (FINITE_DIGITS - 1):
        high = LARGEST
    if high is not None and low > high:
        return
    first, over = _split(low)
    last, under = (None, "") if high is None else _split(high)
    if first == last:
        yield rf"{first}\.{_between(over, under)}" if over else rf"{first}(?:\.{_at_most(under, is_first=True)})?"
        return
    if over:
        yield rf"{first}\.{_at_least(over)}"
    between = [*_naturals(first + bool(over), None if last is None else last - 1, FINITE_DIGITS)]
    if between:
        yield f"{_either(between)}{SOME}"
    if last is not None:
        yield rf"{last}(?:\.{_at_most(under, is_first=True)})?"


def _scientific(low: Fraction, high: Fraction | None) -> Iterator[str]:
    """With one, as doubles are written."""
    is_open = high is None and low < 10 ** EXPONENTS[1][1]
    most = LARGEST if high is None else min(high, LARGEST)
    if low > most:
        return
    lowest = EXPONENTS[0][0] - 1 if low == 0 else _exponent(low)
    highest = EXPONENTS[0][0] - 1 if most == 0 else _exponent(most)
    for first, last in EXPONENTS:
        if first <= lowest <= last:
            largest = most / Fraction(10) ** lowest if lowest == highest else None
            yield _either([*_mantissas(low / Fraction(10) ** lowest, largest)]) + _written(lowest, lowest)
        start, stop = max(first, lowest + 1), min(last, highest - 1)
        if start <= stop:
            yield f"[1-9]{SOME}{_written(start, stop)}"
        if first <= highest <= last and lowest < highest and not is_open:
            yield _either([*_plain(Fraction(1), most / Fraction(10) ** highest)]) + _written(highest, highest)
    if is_open:
        yield ENDING_IN_LARGEST


def _mantissas(low: Fraction, high: Fraction | None) -> Iterator[str]:
    """From `low` on, below 10."""
    if high is not None:
        yield from _plain(low, high)
        return
    first, over = _split(low)
    if over:
        yield rf"{first}\.{_at_least(over)}"
    if first + bool(over) <= 9:
        yield f"{_class(first + bool(over), 9)}{SOME}"


def _exponent(value: Fraction) -> int:
    """Of its first digit."""
    near = len(str(value.numerator)) - len(str(value.denominator))
    return near if Fraction(10) ** near <= value else near - 1


def _written(first: int, last: int) -> str:
    """The exponents from `first` to `last`, of one sign; those of one digit may have a 0 before it."""
    sign, low, high = ("-", -last, -first) if first < 0 else (r"\+", first, last)
    short = [f"0?{_class(low, min(high, 9))}"] if low <= 9 else []
    return f"e{sign}{_either([*short, *_naturals(max(low, 10), high)])}"


def _split(value: Fraction) -> tuple[int, str]:
    """The whole part, and the digits behind the point: a number of finitely many."""
    whole, rest = divmod(value, 1)
    digits = []
    while rest:
        digit, rest = divmod(rest * 10, 1)
        digits.append(str(digit))
    return whole, "".join(digits)


# -- digits before the point


def _naturals(low: int, high: int | None, most_digits: int | None = None) -> Iterator[str]:
    """All from `low` to `high`, without leading zeros."""
    first, last = str(low), "" if high is None else str(high)
    if high is None:
        more = f"{len(first)},{'' if most_digits is None else most_digits - 1}"
        yield from _options_from(first)
        if most_digits is None or len(first) < most_digits:
            yield f"[1-9][0-9]{{{more}}}"
        return
    if low > high:
        return
    if len(first) == len(last):
        same = next((index for index, digit in enumerate(first) if digit != last[index]), len(first))
        yield from (first[:same] + option for option in _options_within(first[same:], last[same:]))
        return
    yield from _options_from(first)
    if len(last) - len(first) > 1:
        yield f"[1-9][0-9]{{{len(first)},{len(last) - 2}}}"
    yield from _options_to(last, 1)


def _options_within(first: str, last: str) -> Iterator[str]:
    """Of so many digits, the first of which differ; the same empty text, where they do not."""
    if not first:
        yield ""
        return
    low, high = int(first[0]), int(last[0])
    yield f"{low}{_either([*_options_from(first[1:])])}"
    if low + 1 < high:
        yield _class(low + 1, high - 1) + _any(len(first) - 1)
    yield f"{high}{_either([*_options_to(last[1:])])}"


def _options_from(first: str) -> Iterator[str]:
    if not first.strip("0"):
        yield _any(len(first)) if first != "0" else "[0-9]"
        return
    digit, rest = int(first[0]), first[1:]
    if not rest.strip("0"):
        yield _class(digit, 9) + _any(len(rest))
        return
    yield f"{digit}{_either([*_options_from(rest)])}"
    if digit < 9:
        yield _class(digit + 1, 9) + _any(len(rest))


def _options_to(last: str, least: int = 0) -> Iterator[str]:
    """`least`: the least first digit."""
    if not last:
        yield ""
        return
    digit, rest = int(last[0]), last[1:]
    if not rest.strip("9"):
        yield _class(least, digit) + _any(len(rest))
        return
    if digit > least:
        yield _class(least, digit - 1) + _any(len(rest))
    yield f"{digit}{_either([*_options_to(rest)])}"


# -- digits behind the point, without zeros at the end of a bound


def _at_least(low: str) -> str:
    if not low:
        return "[0-9]*"
    zeros, digit, rest = _behind_zeros(low)
    options = [f"{digit}{_at_least(rest)}"] if rest else []
    if digit + bool(rest) <= 9:
        options.append(f"{_class(digit + bool(rest), 9)}[0-9]*")
    fewer = f"0{{0,{zeros - 1}}}" if zeros > 1 else ""
    return _either([f"{_zeros(zeros)}{_either(options)}", *([f"{fewer}[1-9][0-9]*"] if zeros else [])])


def _at_most(high: str, *, is_first: bool = False) -> str:
    """`is_first`: one digit must stand here."""
    if not high:
        return "0+" if is_first else "0*"
    nines = len(high) - len(high.lstrip("9"))
    if nines > 1 and high[nines:]:
        least = 1 if is_first else 0
        fewer = [f"9{{{least},{nines - 1}}}(?:[0-8][0-9]*)?", *(["[0-8][0-9]*"] if is_first else [])]
        return _either([f"9{{{nines}}}{_at_most(high[nines:])}", *fewer])
    zeros, digit, rest = _behind_zeros(high)
    body = f"{_zeros(zeros)}{_either([f'{digit}{_at_most(rest)}', f'{_class(0, digit - 1)}[0-9]*'])}"
    if zeros:
        return _either([body, f"0{{{int(is_first)},{zeros}}}"])
    return body if is_first else f"{body}?"


def _between(low: str, high: str) -> str:
    if not low or low[0] == high[0]:
        return f"{low[0]}{_between(low[1:], high[1:])}" if low else _at_most(high)
    digit, last = int(low[0]), int(high[0])
    options = [f"{digit}{_at_least(low[1:])}", f"{last}{_at_most(high[1:])}"]
    if digit + 1 < last:
        options.append(f"{_class(digit + 1, last - 1)}[0-9]*")
    return _either(options)


def _behind_zeros(digits: str) -> tuple[int, int, str]:
    """How many zeros they begin with, the digit behind them, and the rest."""
    behind = digits.lstrip("0")
    return len(digits) - len(behind), int(behind[0]), behind[1:]


# -- regexes


def _either(options: Options) -> str:
    return options[0] if len(options) == 1 else f"(?:{'|'.join(options)})"


def _class(low: int, high: int) -> str:
    return str(low) if low == high else f"[{low}-{high}]"


def _any(count: int) -> str:
    return "[0-9]" * count if count < 2 else f"[0-9]{{{count}}}"


def _zeros(count: int) -> str:
    return "0" * count if count < 5 else f"0{{{count}}}"
