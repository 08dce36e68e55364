"""The regexes that SGLang gives its dtypes, for text programs that name them: `gen(regex=REGEX_INT)`.

The value is the text. Ours for values of a type are stricter (JSON): see `types.py`.
"""

from __future__ import annotations

from typing import Final

REGEX_INT: Final = r"[-+]?[0-9]+[ \n]*"
REGEX_FLOAT: Final = r"[-+]?[0-9]*\.?[0-9]+[ \n]*"
REGEX_BOOL: Final = r"(True|False)"
REGEX_STR: Final = r'"[\w\d\s]*"'  # in quotes, which are part of the value
