"""GBNF-style EBNF as Lark: characters one by one, as EBNF reads them.

A terminal of Lark takes the longest text that it can: of `[a-z]+ "b"` it would leave nothing for the `b`. So each
character is a terminal of its own, which costs time at every token: masks of JSON's grammar took 18 us each where those
of terminals as long as can be took 5 (22 November 2026, the bundled vocabulary).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from niwaki.runtime.api import ConstraintError

_TOKEN: Final = re.compile(
    r"""(?P<blank>(?:\s|\#[^\r\n]*)+)|(?P<literal>"(?:[^"\\]|\\.)*")|(?P<set>\[(?:[^\]\\]|\\.)*\])|(?P<dot>\.)"""
    r"""|(?P<name>[\w-]+)(?P<defines>\s*::=)?|(?P<open>\()|(?P<close>\))|(?P<or>\|)"""
    r"""|(?P<repeat>[*+?]|\{\s*(?P<least>\d+)\s*(?P<comma>,\s*(?P<most>\d+)?\s*)?\})""",
    re.DOTALL,
)
_ESCAPE: Final = re.compile(r"x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}")
_SHORT: Final = {"n": "\n", "r": "\r", "t": "\t"}
_NOTHING: Final = '""'
ITEMS: Final = ("literal", "set", "dot", "name", "close")  # what may be repeated


def lark_of_ebnf(source: str) -> str:
    """The grammar in Lark's syntax, from the rule `start`.

    Raises:
        ConstraintError: it is no such grammar, or has no rule `root`.
    """
    tokens = list(_tokens(source))
    names: dict[str, str] = {}
    for match in tokens:
        name = match["name"]
        if match["defines"]:
            if name in names:
                raise _invalid(source, match.start(), f"the rule {name!r} is defined twice")
            names[name] = "start" if name == "root" else f"rule_{len(names)}"
    if "root" not in names:
        raise ConstraintError("an ebnf grammar begins with its rule 'root', which this one has not")
    for match in tokens:
        if match["name"] and match["name"] not in names:
            raise _invalid(source, match.start(), f"there is no rule {match['name']!r}")
    _check_order(tokens, source)
    return "".join(_written(match, names, source) for match in tokens)


def _tokens(source: str) -> Iterator[re.Match[str]]:
    place = 0
    while place < len(source):
        match = _TOKEN.match(source, place)
        if match is None:
            raise _invalid(source, place, f"{source[place]!r} does not begin anything")
        yield match
        place = match.end()


def _check_order(tokens: list[re.Match[str]], source: str) -> None:
    """Brackets in pairs, inside a rule; repeats behind what they repeat."""
    opened: list[int] = []
    before = ""
    for match in tokens:
        kind = match.lastgroup or ""
        if kind == "blank":
            continue
        if kind == "repeat" and before not in ITEMS:
            raise _invalid(source, match.start(), f"there is nothing that {match[0]} could repeat")
        if not before and kind != "defines":
            raise _invalid(source, match.start(), "a rule begins with its name and ::=")
        if kind == "close" and not opened:
            raise _invalid(source, match.start(), "')' closes nothing")
        if kind == "defines" and opened:
            break
        if kind == "open":
            opened.append(match.start())
        elif kind == "close":
            opened.pop()
        before = kind
    if opened:
        raise _invalid(source, opened[-1], "'(' is not closed")


def _written(match: re.Match[str], names: dict[str, str], source: str) -> str:
    match match.lastgroup:
        case "blank":
            return " "
        case "literal":
            return f"({' '.join(map(_literal, _characters(match, source))) or _NOTHING})"
        case "set":
            return f"/{_set(match, source)}/"
        case "dot":
            return f"/[\\x00-{chr(0x10FFFF)}]/"
        case "defines":
            return f"\n{names[match['name']]}: "
        case "name":
            return names[match["name"]]
        case "repeat" if match["least"] and not match["comma"]:
            return f"{{{match['least']},{match['least']}}}"
        case _:
            return match[0]


def _characters(match: re.Match[str], source: str) -> list[str]:
    """The characters between the quotes or brackets; an escaped one that means itself is behind a backslash."""
    found = []
    text, place = match[0][1:-1], 0
    while place < len(text):
        if text[place] != "\\":
            found.append(text[place])
            place += 1
            continue
        number = _ESCAPE.match(text, place + 1)
        escaped = text[place + 1]
        if number is not None:
            code = int(number[0][1:], 16)
            if code > 0x10FFFF or 0xD800 <= code <= 0xDFFF:
                raise _invalid(source, match.start() + 1 + place, f"\\{number[0]} is no character")
            found.append("\\" + chr(code))
        elif escaped in _SHORT or not (escaped.isalnum() or escaped.isspace()):
            found.append("\\" + _SHORT.get(escaped, escaped))
        else:
            raise _invalid(source, match.start() + 1 + place, f"unknown escape \\{escaped}")
        place += 1 + (len(number[0]) if number is not None else 1)
    return found


def _set(match: re.Match[str], source: str) -> str:
    characters = _characters(match, source)
    is_negated = characters[:1] == ["^"]
    rest = characters[is_negated:]
    if not rest:
        raise _invalid(source, match.start(), f"no character is in {match[0]}")
    found = "[^" if is_negated else "["
    place = 0
    while place < len(rest):
        low = high = rest[place][-1]
        if rest[place + 1 : place + 2] == ["-"] and place + 2 < len(rest):
            high = rest[place + 2][-1]
            place += 2
            if high < low:
                raise _invalid(source, match.start(), f"a range of {match[0]} ends below its start")
        found += _in_set(low) + (f"-{_in_set(high)}" if high != low else "")
        place += 1
    return found + "]"


def _in_set(character: str) -> str:
    return character if character.isalnum() or ord(character) > 0x7F else f"\\x{ord(character):02x}"


def _literal(character: str) -> str:
    return f'"{_in_literal(character[-1])}"'


def _in_literal(character: str) -> str:
    if character in '"\\':
        return "\\" + character
    return character if ord(character) >= 0x20 and character != "\x7f" else f"\\x{ord(character):02x}"


def _invalid(source: str, place: int, reason: str) -> ConstraintError:
    line = source.count("\n", 0, place) + 1
    return ConstraintError(f"the ebnf grammar is not valid in line {line}: {reason}")
