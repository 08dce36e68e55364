"""Regexes in the spelling of Python's `re`, which tells at once what is malformed and whether a text matches.

`re` misses some of the dialect: \\p{...}, \\x{...}, \\z, (?<name>...), and look-behind of no fixed length. Knows no
automata.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from typing import Final

# An escape, a set in brackets, a comment, the beginning of a group with a name.
_ESCAPE: Final = r"\\(?:[pP](?:\{[^}]*\}|.)|[xuU]\{[^}]*\}|.)"
_COMMENT: Final = r"\(\?\#(?:\\.|[^)\\])*\)"
_PIECES: Final = re.compile(rf"{_ESCAPE}|\[\^?\]?(?:{_ESCAPE}|[^\]\\])*\]|{_COMMENT}|\(\?<(?![=!])[^>]*>", re.DOTALL)
_MEMBERS: Final = re.compile(rf"{_ESCAPE}|.", re.DOTALL)
_HAS_PROPERTY: Final = re.compile(r"(?:[^\\]|\\[^pP])*\\[pP]", re.DOTALL)
_NO_FIXED_LENGTH: Final = "look-behind requires fixed-width pattern"  # the last of its checks: the rest is right


@lru_cache(maxsize=1024)  # a program writes the same gen for each of its rows
def fault_of(pattern: str) -> tuple[int, str] | None:
    """Where the pattern is malformed, counted from 1, and why; None if Python finds nothing."""
    try:
        re.compile(_in_python(pattern))
    except re.error as error:
        return None if error.msg == _NO_FIXED_LENGTH else (_place_of(error.pos or 0, pattern) + 1, error.msg)
    return None


def is_excluded(text: str, pattern: str) -> bool:
    """Whether the pattern does not match the text; False, too, where Python cannot tell."""
    if _HAS_PROPERTY.match(pattern):
        return False
    try:
        return re.fullmatch(_in_python(pattern), text) is None
    except re.error:  # look-behind of no fixed length; what else is malformed was refused before
        return False


@lru_cache(maxsize=1024)
def _in_python(pattern: str) -> str:
    return "".join(spelt for _, spelt in _spelt_pieces(pattern))


def _place_of(place: int, pattern: str) -> int:
    """Where in the pattern stands what is at that place of its spelling for Python: of a piece that is spelt otherwise,
    where it begins."""
    begin = 0
    for piece, spelt in _spelt_pieces(pattern):
        if place < len(spelt):
            return begin + (place if piece == spelt else 0)
        begin, place = begin + len(piece), place - len(spelt)
    return begin


def _spelt_pieces(pattern: str) -> Iterator[tuple[str, str]]:
    """The pattern in pieces, and what Python calls each."""
    end = 0
    for found in _PIECES.finditer(pattern):
        yield pattern[end : found.start()], pattern[end : found.start()]
        end = found.end()
        match found.group():
            case set_ if set_[0] == "[":
                yield from _spelt_members(set_)
            case comment if comment.startswith("(?#"):
                yield comment, comment
            case group if group[0] == "(":
                yield "(?<", "(?P<"
                yield group[3:], group[3:]
            case "\\z":
                yield "\\z", "\\Z"
            case escape:
                yield escape, _spelt_escape(escape)
    yield pattern[end:], pattern[end:]


def _spelt_members(set_: str) -> Iterator[tuple[str, str]]:
    """Brackets, &&, ||, ~~ and -- in it mean themselves; Python would warn of them."""
    begin = 2 if set_[1] == "^" else 1
    yield set_[:begin], set_[:begin]
    members = [found.group() for found in _MEMBERS.finditer(set_, begin, len(set_) - 1)]
    end_of_range = -1
    for place, (member, following) in enumerate(pairwise([*members, ""])):
        if member == "-" and place > end_of_range and 0 < place < len(members) - 1:
            end_of_range = place + 1
            yield member, member
        elif member in ("-", "[") or (member in ("&", "|", "~") and following == member):
            yield member, f"\\{member}"
        else:
            yield member, _spelt_escape(member)
    yield "]", "]"


def _spelt_escape(escape: str) -> str:
    if escape[1:2] in ("p", "P"):
        return "\\w"  # as long as nobody asks what it matches
    return f"\\U{escape[3:-1]:0>8}" if escape[2:3] == "{" else escape
