"""Where blanks may stand in JSON: nowhere, as `json.dumps` writes them, or as one likes up to a limit."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from niwaki.runtime.api import ConstraintError, Spacing

# What the marks of a grammar's rules become. A blank is a space, or a line's end and what it is indented by.
_MARKS: Final[Mapping[Spacing, Mapping[str, str]]] = {
    "compact": {},
    "spaced": {'","': '", "', '":"': '": "'},
    "free": {  # a question mark before a name would be read as a part of it
        '","': '"," BLANK? ',
        '":"': '":" BLANK? ',
        '"{"': '"{" BLANK? ',
        '"["': '"[" BLANK? ',
        '"}"': ' BLANK? "}"',
        '"]"': ' BLANK? "]"',
    },
}
_BLANK: Final = r"BLANK: / |\n[ \t]{0,32}/"
_LITERAL: Final = re.compile(r'"(?:[^"\\]|\\.)*"')
_NO_MARKS: Final = re.compile(r"[A-Z]|\w+: %json ")  # the beginning of a terminal, and of a schema for the engine
_STRING_OR_MARK: Final = re.compile(rb'"(?:[^"\\]|\\.)*"|[,:]')


def spaced_grammar(grammar: str, spacing: Spacing) -> str:
    """`lark_of`'s grammar with blanks. A mark is a literal of its own there: a text that holds one stands in quotes.

    Raises:
        ConstraintError: there is no such spacing.
    """
    marks = _MARKS.get(spacing)
    if marks is None:
        raise ConstraintError(f"a schema's spacing is one of {', '.join(_MARKS)}, got {spacing!r}")
    if not marks:
        return grammar
    lines = [
        line if _NO_MARKS.match(line) else _LITERAL.sub(lambda found: marks.get(found[0], found[0]), line)
        for line in grammar.removesuffix("\n").split("\n")  # texts may hold what only others take for an end of a line
    ]
    return "\n".join([*lines, _BLANK, ""] if spacing == "free" else [*lines, ""])


def spaced_text(text: bytes, spacing: Spacing) -> bytes:
    """A compact JSON text with the blanks that must be there."""
    if spacing != "spaced":
        return text
    return _STRING_OR_MARK.sub(lambda found: found[0] + b" " if found[0] in b",:" else found[0], text)
