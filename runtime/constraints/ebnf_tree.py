"""The tree of an EBNF grammar: characters, rules by name, and what is made of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

from niwaki.runtime.constraints.regex_tree import Ranges


@dataclass(frozen=True, slots=True)
class Chars:
    """One character of a set: as a regex has it, and the code points, maybe some too many."""

    source: str
    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Name:
    """A rule."""

    name: str


@dataclass(frozen=True, slots=True)
class Sequence:
    parts: tuple[Node, ...]  # none: the empty text


@dataclass(frozen=True, slots=True)
class Either:
    options: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    part: Node
    low: int
    high: int | None  # None: any number


@dataclass(frozen=True, slots=True)
class Terminal:
    """What the engine's lexer reads as one piece: the longest text that it can. `tree` has no names."""

    tree: Node


Node = Chars | Name | Sequence | Either | Repeat | Terminal
Rules = dict[str, Node]


def children(node: Node) -> tuple[Node, ...]:
    match node:
        case Sequence(parts):
            return parts
        case Either(options):
            return options
        case Repeat(part):
            return (part,)
        case _:
            return ()


def names_in(node: Node) -> set[str]:
    """The rules that it leads to at once."""
    return {node.name} if isinstance(node, Name) else set().union(*map(names_in, children(node)))


def with_ends(rules: Rules) -> Rules:
    """The rules that have a text, without the options that have none: from inside such a one no text ends."""
    users: dict[str, list[str]] = {}
    for name, node in rules.items():
        for used in names_in(node):
            users.setdefault(used, []).append(name)
    ending: set[str] = set()
    asked = set(rules)
    while asked:
        found = {name for name in asked if _ends(rules[name], ending)}
        ending |= found
        asked = {user for name in found for user in users.get(name, ())} - ending
    return {name: kept for name, node in rules.items() if (kept := _with_end(node, ending)) is not None}


def _ends(node: Node, ending: set[str]) -> bool:
    match node:
        case Name(name):
            return name in ending
        case Sequence(parts):
            return all(_ends(part, ending) for part in parts)
        case Either(options):
            return any(_ends(option, ending) for option in options)
        case Repeat(part, low, _):
            return low == 0 or _ends(part, ending)
        case Chars() | Terminal():
            return True
        case _:
            assert_never(node)


def _with_end(node: Node, ending: set[str]) -> Node | None:
    match node:
        case Name(name):
            return node if name in ending else None
        case Sequence(parts):
            found = [_with_end(part, ending) for part in parts]
            whole = tuple(part for part in found if part is not None)
            return Sequence(whole) if len(whole) == len(parts) else None
        case Either(options):
            left = tuple(one for option in options if (one := _with_end(option, ending)) is not None)
            return (left[0] if len(left) == 1 else Either(left)) if left else None
        case Repeat(part, low, high):
            once = _with_end(part, ending)
            return Repeat(once, low, high) if once is not None else None if low else Sequence(())
        case Chars() | Terminal():
            return node
        case _:
            assert_never(node)


def regex_of(node: Node) -> str:
    """As a regex; of a tree without names."""
    match node:
        case Chars(source):
            return source
        case Sequence(parts):
            return "".join(map(regex_of, parts))
        case Either(options):
            return f"(?:{'|'.join(map(regex_of, options))})"
        case Repeat(part):
            return f"(?:{regex_of(part)}){sign_of(node)}"
        case Name() | Terminal():
            raise AssertionError("a regex holds no rules")
        case _:
            assert_never(node)


def sign_of(repeat: Repeat) -> str:
    match repeat.low, repeat.high:
        case 0, None:
            return "*"
        case 1, None:
            return "+"
        case 0, 1:
            return "?"
        case low, high:
            return f"{{{low},{'' if high is None else high}}}"
