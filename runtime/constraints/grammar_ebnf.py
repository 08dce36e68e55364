"""GBNF-style EBNF as Lark: read character by character, in pieces where that is the same (`ebnf_terminals.py`)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, assert_never

from niwaki.runtime.api import ConstraintError
from niwaki.runtime.constraints.ebnf_terminals import with_terminals
from niwaki.runtime.constraints.ebnf_tree import (
    Chars,
    Either,
    Name,
    Node,
    Repeat,
    Rules,
    Sequence,
    Terminal,
    regex_of,
    sign_of,
    with_ends,
)
from niwaki.runtime.constraints.grammar_tails import without_tails
from niwaki.runtime.constraints.regex_tree import complement, normalised

_TOKEN: Final = re.compile(
    r"""(?P<blank>(?:\s|\#[^\r\n]*)+)|(?P<literal>"(?:[^"\\]|\\.)*")|(?P<set>\[(?:[^\]\\]|\\.)*\])|(?P<dot>\.)"""
    r"""|(?P<name>[\w-]+)(?P<defines>\s*::=)?|(?P<open>\()|(?P<close>\))|(?P<or>\|)"""
    r"""|(?P<repeat>[*+?]|\{\s*(?P<least>\d+)\s*(?P<comma>,\s*(?P<most>\d+)?\s*)?\})""",
    re.DOTALL,
)
_ESCAPE: Final = re.compile(r"x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}")
_SHORT: Final = {"n": "\n", "r": "\r", "t": "\t"}
_NOTHING: Final = '""'
NONCHARACTERS: Final = ((0x10FFFE, 0x10FFFF),)  # which sets of other regexes do not hold
ANY: Final = Chars(f"[\\x00-{chr(0x10FFFF)}]", ((0, 0x10FFFF),))
ITEMS: Final = ("literal", "set", "dot", "name", "close")  # what may be repeated


def lark_of_ebnf(source: str, *, joins: bool = True) -> str:
    """The grammar in Lark's syntax, from the rule `start`. Without `joins` every character is a piece of its own, and
    the rules stand as they are written.

    Raises:
        ConstraintError: it is no such grammar, or has no rule `root`.
    """
    tokens = [match for match in _tokens(source) if match.lastgroup != "blank"]
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
    rules = with_ends(_Reader(tokens, names, source).rules())
    if "start" not in rules:
        raise ConstraintError("the ebnf grammar admits no text: every way through its rule 'root' goes on for ever")
    if joins:
        rules = without_tails(rules)
        rules = with_terminals(rules, "start") or rules
    return "".join(f"\n{name}: {_written(node)}" for name, node in rules.items())


class _Reader:
    """Reads tokens in their right order as trees."""

    def __init__(self, tokens: list[re.Match[str]], names: dict[str, str], source: str) -> None:
        self._tokens, self._names, self._source = tokens, names, source
        self._place = 0

    def rules(self) -> Rules:
        found: Rules = {}
        while self._place < len(self._tokens):
            name = self._names[self._tokens[self._place]["name"]]
            self._place += 1
            found[name] = self._options()
        return found

    def _options(self) -> Node:
        options: list[Node] = []
        parts: list[Node] = []
        while self._place < len(self._tokens):
            match = self._tokens[self._place]
            if match.lastgroup in ("defines", "close"):
                break
            self._place += 1
            if match.lastgroup == "or":
                options.append(_sequence(parts))
                parts = []
            elif match.lastgroup == "repeat":
                parts.append(_repeated(parts.pop(), match))
            else:
                parts.append(self._part(match))
        options.append(_sequence(parts))
        return options[0] if len(options) == 1 else Either(tuple(options))

    def _part(self, match: re.Match[str]) -> Node:
        match match.lastgroup:
            case "literal":
                return _sequence([_chars(character[-1]) for character in _characters(match, self._source)])
            case "set":
                return _set(match, self._source)
            case "dot":
                return ANY
            case "open":
                inner = self._options()
                self._place += 1
                return inner
            case _:
                return Name(self._names[match["name"]])


def _sequence(parts: list[Node]) -> Node:
    return parts[0] if len(parts) == 1 else Sequence(tuple(parts))


def _repeated(part: Node, match: re.Match[str]) -> Node:
    if match["least"]:
        low = int(match["least"])
        most = match["most"] if match["comma"] else match["least"]
        return Repeat(part, low, int(most) if most else None)
    low, high = {"*": (0, None), "+": (1, None), "?": (0, 1)}[match[0]]
    return Repeat(part, low, high)


def _tokens(source: str) -> Iterator[re.Match[str]]:
    place = 0
    while place < len(source):
        match = _TOKEN.match(source, place)
        if match is None:
            begun = source[place]
            why = {"'": "; a text stands in double quotes", '"': ", as it is not closed", "[": ", as it is not closed"}
            raise _invalid(source, place, f"{begun!r} does not begin anything{why.get(begun, '')}")
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


def _written(node: Node) -> str:
    """As an expansion of Lark."""
    match node:
        case Name(name):
            return name
        case Chars() | Terminal():
            return f"/{regex_of(node.tree if isinstance(node, Terminal) else node)}/"
        case Sequence(parts):
            return f"({' '.join(map(_written, parts)) or _NOTHING})"
        case Either(options):
            return f"({' | '.join(map(_written, options))})"
        case Repeat(high=0):  # which llguidance refuses
            return f"({_NOTHING})"
        case Repeat(part):
            return f"({_written(part)}){sign_of(node)}"
        case _:
            assert_never(node)


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


def _set(match: re.Match[str], source: str) -> Chars:
    characters = _characters(match, source)
    is_negated = characters[:1] == ["^"]
    rest = characters[is_negated:]
    if not rest:
        raise _invalid(source, match.start(), f"no character is in {match[0]}")
    found = "[^" if is_negated else "["
    ranges: list[tuple[int, int]] = []
    place = 0
    while place < len(rest):
        low = high = rest[place][-1]
        if rest[place + 1 : place + 2] == ["-"] and place + 2 < len(rest):
            high = rest[place + 2][-1]
            place += 2
            if high < low:
                raise _invalid(source, match.start(), f"a range of {match[0]} ends below its start")
        found += _spelled(low) + (f"-{_spelled(high)}" if high != low else "")
        ranges.append((ord(low), ord(high)))
        place += 1
    listed = normalised(ranges)
    return Chars(f"{found}]", (*complement(listed), *NONCHARACTERS) if is_negated else listed)


def _chars(character: str) -> Chars:
    return Chars(_spelled(character), ((ord(character), ord(character)),))


def _spelled(character: str) -> str:
    """In a regex, inside a set or not."""
    return character if character.isalnum() or ord(character) > 0x7F else f"\\x{ord(character):02x}"


def _invalid(source: str, place: int, reason: str) -> ConstraintError:
    line = source.count("\n", 0, place) + 1
    return ConstraintError(f"the ebnf grammar is not valid in line {line}: {reason}")
