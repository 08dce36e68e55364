"""Regexes of the decimal numbers that JSON has."""

from __future__ import annotations

from typing import Final

from niwaki.runtime.api import ConstraintError

MAX_DIGITS: Final = 18  # before the point; a 64-bit integer holds every number of 18 digits
MAX_DECIMALS: Final = 17  # a float64 has no more


def float_pattern(is_signed: bool) -> str:
    whole = rf"(?:0|[1-9][0-9]{{0,{MAX_DIGITS - 1}}})"
    return rf"{'-?' if is_signed else ''}{whole}(?:\.[0-9]{{1,{MAX_DECIMALS}}})?"


def int_pattern(low: int | None, high: int | None) -> str:
    """The decimal numbers from `low` to `high`, both included, without leading zeros, plus signs or -0."""
    if low is None and high is None:
        return rf"(?:0|-?[1-9][0-9]{{0,{MAX_DIGITS - 1}}})"
    largest = 10**MAX_DIGITS - 1
    low = -largest if low is None else max(low, -largest)
    high = largest if high is None else min(high, largest)
    if low > high:
        raise ConstraintError(f"no whole number of at most {MAX_DIGITS} digits lies from {low} to {high}")
    parts = []
    if low < 0:
        parts.append(f"-(?:{_natural_pattern(max(1, -high), -low)})")
    if low <= 0 <= high:
        parts.append("0")
    if high > 0:
        parts.append(_natural_pattern(max(1, low), high))
    return "(?:" + "|".join(parts) + ")"


def _natural_pattern(low: int, high: int) -> str:
    """Numbers from `low` >= 1 to `high`, one alternative for each count of digits."""
    parts = []
    for length in range(len(str(low)), len(str(high)) + 1):
        first, last = max(low, 10 ** (length - 1)), min(high, 10**length - 1)
        parts.append(_same_length_pattern(str(first), str(last)))
    return "|".join(parts)


def _same_length_pattern(low: str, high: str) -> str:
    """Digit strings from `low` to `high`, which have the same length."""
    rest = len(low) - 1
    if not low:
        return ""
    if low == high:
        return low
    if low[0] == high[0]:
        return low[0] + f"(?:{_same_length_pattern(low[1:], high[1:])})"
    start, stop = int(low[0]), int(high[0])
    parts = []
    if low[1:] != "0" * rest:
        parts.append(f"{start}(?:{_same_length_pattern(low[1:], '9' * rest)})")
        start += 1
    if high[1:] != "9" * rest:
        parts.append(f"{stop}(?:{_same_length_pattern('0' * rest, high[1:])})")
        stop -= 1
    if start <= stop:
        digit = str(start) if start == stop else f"[{start}-{stop}]"
        parts.append(digit + (f"[0-9]{{{rest}}}" if rest else ""))
    return "|".join(parts)
