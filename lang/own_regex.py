"""Regexes in the spelling of Python's `re`, which tells at once what is malformed and whether a text matches.

`re` misses some of the dialect: \\p{...}, \\x{...}, \\z, (?<name>...), and look-behind of no fixed length. Knows no
automata.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final

# An escape, a set in brackets, the beginning of a group with a name.
_ESCAPE: Final = r"\\(?:[pP](?:\{[^}]*\}|.)|[xuU]\{[^}]*\}|.)"
_PIECES: Final = re.compile(rf"{_ESCAPE}|\[\^?\]?(?:{_ESCAPE}|[^\]\\])*\]|\(\?<(?![=!])[^>]*>", re.DOTALL)
_PIECES_OF_A_SET: Final = re.compile(rf"{_ESCAPE}|[\[&|~]|(?<=-)-", re.DOTALL)
_HAS_PROPERTY: Final = re.compile(r"(?:[^\\]|\\[^pP])*\\[pP]", re.DOTALL)
_NO_FIXED_LENGTH: Final = "look-behind requires fixed-width pattern"  # the last of its checks: the rest is right


@lru_cache(maxsize=1024)  # a program writes the same gen for each of its rows
def fault_of(pattern: str) -> tuple[int, str] | None:
    """Where the pattern is malformed, counted from 1, and why; None if Python finds nothing."""
    try:
        re.compile(_PIECES.sub(_blank, pattern))
    except re.error as error:
        return None if error.msg == _NO_FIXED_LENGTH else ((error.pos or 0) + 1, error.msg)
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
    return _PIECES.sub(_spelt, pattern)


def _blank(piece: re.Match[str]) -> str:
    """Something as long that Python knows, so that places stay."""
    match piece.group():
        case set_ if set_[0] == "[":  # brackets, &&, ||, ~~ and -- in it mean themselves, and Python would warn of them
            begin = len(set_) - len(set_[1:].lstrip("^"))
            return set_[:begin] + _PIECES_OF_A_SET.sub(_blank_in_a_set, set_[begin:])
        case group if group[0] == "(":
            return "(?:" + "0" * (len(group) - 3)
        case "\\z":
            return "\\Z"
        case escape:
            return _blank_escape(escape)


def _blank_in_a_set(piece: re.Match[str]) -> str:
    return _blank_escape(piece.group()) if piece.group()[0] == "\\" else "0"


def _blank_escape(escape: str) -> str:
    return "0" * len(escape) if escape[1] in "pP" or escape[2:3] == "{" else escape


def _spelt(piece: re.Match[str]) -> str:
    """The same in Python's words."""
    match piece.group():
        case set_ if set_[0] == "[":
            begin = len(set_) - len(set_[1:].lstrip("^"))
            return set_[:begin] + _PIECES_OF_A_SET.sub(_spelt_in_a_set, set_[begin:])
        case group if group[0] == "(":
            return f"(?P{group[2:]}"
        case "\\z":
            return "\\Z"
        case escape:
            return _spelt_escape(escape)


def _spelt_in_a_set(piece: re.Match[str]) -> str:
    return _spelt_escape(piece.group()) if piece.group()[0] == "\\" else f"\\{piece.group()}"


def _spelt_escape(escape: str) -> str:
    return f"\\U{escape[3:-1]:0>8}" if escape[2:3] == "{" else escape
