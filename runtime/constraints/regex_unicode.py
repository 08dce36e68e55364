r"""The characters of \d, \s, \w and \p{...} one by one, where Unicode's tables in Python know them."""

from __future__ import annotations

import unicodedata
from functools import lru_cache
from itertools import groupby
from typing import Final

from niwaki.runtime.constraints.regex_tree import MAX_CODE_POINT, Ranges, complement, normalised

# What Python, ECMAScript or Rust takes for a blank: what is no blank must be none in any of them.
SPACES: Final[Ranges] = normalised(
    [(code, code) for code in (0x85, 0xA0, 0x1680, 0x180E, 0x2028, 0x2029, 0x202F, 0x205F, 0x3000, 0xFEFF)]
    + [(0x09, 0x0D), (0x1C, 0x20), (0x2000, 0x200A)]
)
CATEGORIES: Final = frozenset(
    "C Cc Cf Cn Co L Ll Lm Lo Lt Lu M Mc Me Mn N Nd Nl No P Pc Pd Pe Pf Pi Po Ps S Sc Sk Sm So Z Zl Zp Zs".split()
)
# Planes without characters and of private use, three quarters of all code points: not looked at one by one.
UNIFORM: Final = (
    ("Cn", 0x40000, 0xDFFFF),
    ("Co", 0xF0000, 0xFFFFD),
    ("Cn", 0xFFFFE, 0xFFFFF),
    ("Co", 0x100000, 0x10FFFD),
    ("Cn", 0x10FFFE, 0x10FFFF),
)
LONG_NAMES: Final = {
    "Other": "C",
    "Letter": "L",
    "Lowercase_Letter": "Ll",
    "Uppercase_Letter": "Lu",
    "Mark": "M",
    "Number": "N",
    "Decimal_Number": "Nd",
    "digit": "Nd",
    "Punctuation": "P",
    "punct": "P",
    "Symbol": "S",
    "Separator": "Z",
    "Space_Separator": "Zs",
}


@lru_cache(maxsize=64)
def members(name: str) -> Ranges | None:
    r"""The characters of a class as the Rust dialect writes it, `\D` or `\p{Lu}`; None where they are not known."""
    letter = name[1]
    if letter in "DSWP":
        found = members(f"\\{letter.lower()}{name[2:]}")
        return None if found is None else complement(found)
    if letter == "s":
        return SPACES
    if letter == "d":
        return _of_category(("Nd",))
    if letter == "w":
        return normalised((*_of_category(("L", "M", "N", "Pc")), (0x200C, 0x200D)))
    category = name[2:].strip("{}")
    category = LONG_NAMES.get(category, category)
    return _of_category((category,)) if category in CATEGORIES else None


@lru_cache(maxsize=64)
def _of_category(prefixes: tuple[str, ...]) -> Ranges:
    return normalised((low, high) for category, low, high in _runs() if category.startswith(prefixes))


@lru_cache(maxsize=1)
def _runs() -> tuple[tuple[str, int, int], ...]:
    """All characters, those of one category behind each other at once: a loop over each one takes half a second."""
    found = [*UNIFORM]
    low = 0
    for _, begin, end in (*UNIFORM, ("", MAX_CODE_POINT + 1, MAX_CODE_POINT)):
        for category, run in groupby(map(unicodedata.category, map(chr, range(low, begin)))):
            above = low + len(list(run))
            found.append((category, low, above - 1))
            low = above
        low = end + 1
    return tuple(sorted(found, key=lambda run: run[1]))
