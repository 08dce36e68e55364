"""Lark's notation, as far as it is read here: rules that end with themselves are found and written as repeats.

The engine reads grammars itself. What is not surely understood, an attribute or a priority, an alias, a grammar inside
the grammar, stays as it is written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby
from typing import Final, NamedTuple

from niwaki.runtime.constraints.ebnf_tree import Either, Name, Node, Repeat, Rules, Sequence, sign_of
from niwaki.runtime.constraints.grammar_tails import without_tails

_TOKEN: Final = re.compile(
    r"""(?P<blank>[ \t\r]+|(?://|\#)[^\n]*)|(?P<line>\n)"""
    r"""|(?P<leaf>"(?:\\.|[^"\\\n])*"i?(?!\w)|/(?:\\.|[^/\\\n])+/[imslux]*(?!\w)|_?[A-Z][_A-Z0-9]*(?!\w)"""
    r"""|_?[a-z][-_a-z0-9]*(?!\w))"""
    r"""|(?P<open>\()|(?P<close>\))|(?P<or>\|)|(?P<defines>:)|(?P<repeat>[*+?]|\{\d{1,6}(?:,\d{0,6})?\})|(?P<other>.)""",
    re.DOTALL,
)
_RULE: Final = re.compile(r"_?[a-z]")
_COUNT: Final = re.compile(r"\{(\d+)(,?)(\d*)\}")


class _Unread(Exception):
    """What stands there is not surely understood."""


class _Rule(NamedTuple):
    """`start` and `end`: of its body in the source. `body` is None where it is not read."""

    name: str
    start: int
    end: int
    body: Node | None


def lark_without_tails(source: str) -> str:
    """The grammar for the same texts. Each rule begins in the line in which it began."""
    try:
        rules = [*_rules(source)]
    except _Unread:
        return source
    names = [rule.name for rule in rules]
    if len({*names}) < len(names):
        return source
    read: Rules = {rule.name: rule.body for rule in rules if rule.body is not None}
    unread: Rules = {rule.name: Name(rule.name) for rule in rules if rule.body is None}  # whose names are taken, too
    found = without_tails(unread | read)
    found = {name: node for name, node in found.items() if name not in unread and node != read.get(name)}
    written = []
    place = 0
    for rule in rules:
        if rule.name in found:
            lines = "\n" * source.count("\n", rule.start, rule.end)
            written += [source[place : rule.start], " ", _written(found.pop(rule.name)), lines]
            place = rule.end
    written.append(source[place:])
    return "".join(written) + "".join(f"\n{name}: {_written(node)}" for name, node in found.items())


def _rules(source: str) -> Iterator[_Rule]:
    """The rules, not the terminals."""
    tokens = [match for match in _TOKEN.finditer(source) if match.lastgroup != "blank"]
    for head, *rest in _statements(tokens):
        if head[0] == "%":
            if "{" in (match[0] for match in rest):
                raise _Unread
            continue
        marks = 1 if head[0] in "?!" else 0
        tail = [head, *rest][marks:]
        if len(tail) < 2 or tail[0].lastgroup != "leaf" or tail[0][0][0] in '"/':
            raise _Unread
        if not _RULE.match(tail[0][0]):
            continue
        is_plain = len(tail) > 2 and tail[1].lastgroup == "defines" and not marks
        start = tail[1].end()
        yield _Rule(tail[0][0], start, tail[-1].end(), _body(tail[2:]) if is_plain else None)


def _statements(tokens: list[re.Match[str]]) -> Iterator[list[re.Match[str]]]:
    """Each begins in a line of its own, and goes on in lines that begin with `|`."""
    found: list[re.Match[str]] = []
    for is_break, group in groupby(tokens, lambda match: match.lastgroup == "line"):
        if is_break:
            continue
        line = [*group]
        if line[0].lastgroup != "or" and found:
            yield found
            found = []
        found += line
    if found:
        yield found


def _body(tokens: list[re.Match[str]]) -> Node | None:
    try:
        node, place = _options(tokens, 0)
    except _Unread:
        return None
    return node if place == len(tokens) else None


def _options(tokens: list[re.Match[str]], place: int) -> tuple[Node, int]:
    options: list[Node] = []
    parts: list[Node] = []
    is_item = False  # whether something stands there that may be repeated
    while place < len(tokens) and (kind := tokens[place].lastgroup) != "close":
        match = tokens[place]
        place += 1
        if kind == "leaf":
            parts.append(Name(match[0]))
        elif kind == "open":
            inner, place = _options(tokens, place)
            if place == len(tokens) or inner == Sequence(()):
                raise _Unread
            place += 1
            parts.append(inner)
        elif kind == "repeat" and is_item:
            parts[-1] = _repeated(parts[-1], match[0])
        elif kind == "or":
            options.append(_sequence(parts))
            parts = []
        else:
            raise _Unread
        is_item = kind in ("leaf", "open")
    options.append(_sequence(parts))
    return (options[0] if len(options) == 1 else Either(tuple(options))), place


def _sequence(parts: list[Node]) -> Node:
    return parts[0] if len(parts) == 1 else Sequence(tuple(parts))


def _repeated(part: Node, sign: str) -> Node:
    count = _COUNT.fullmatch(sign)
    if count is None:
        low, high = {"*": (0, None), "+": (1, None), "?": (0, 1)}[sign]
        return Repeat(part, low, high)
    least, comma, most = count.groups()
    return Repeat(part, int(least), int(most) if most else None if comma else int(least))


def _written(node: Node) -> str:
    match node:
        case Name(text):
            return text
        case Sequence(()):
            return '""'
        case Sequence(parts):
            return f"({' '.join(map(_written, parts))})"
        case Either(options):
            return f"({' | '.join(map(_written, options))})"
        case Repeat(part):
            return f"({_written(part)}){sign_of(node)}"
        case _:
            raise AssertionError("a rule of Lark is read as names")
