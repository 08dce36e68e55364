"""Rules that end with themselves, written as repeats, for exactly the same texts.

The engine goes back through all rows of a text where a rule such as `list: item "," list | item` ends, so what such a
rule writes ends at its limits behind one or two thousand items. Repeats cost the same at every one.

A rule is taken apart as `r: a r | r b r | r c | d`, where each of these may be missing, but for `d`, and may hold `r`
inside. Its texts are those of `a* d (c | b a* d)*`: by induction over its derivations each way, for any `a`, `b`, `c`
and `d`. Where none ends with itself, a rule stays as it is: the engine reads such as begin with themselves well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from niwaki.runtime.constraints.ebnf_tree import Either, Name, Node, Repeat, Rules, Sequence

NOTHING: Final = Sequence(())


def without_tails(rules: Rules) -> Rules:
    """The rules for the same texts; some are new. A `Name` of none of them is left alone. No part of a rule is written
    more than four times."""
    found: Rules = {}
    taken = {*rules}
    for name, node in rules.items():
        made = _repeating(name, node, taken)
        found |= made
        taken |= made.keys()
    return found


def _repeating(name: str, node: Node, taken: set[str]) -> Rules:
    """The rule, and one that it leads to if need be, of which the name is not taken."""
    before, rest = _ends_with(name, node)
    between: list[Node] = []
    prefixes: list[Node] = []
    for one in before:
        _part(one, name, between, prefixes)
    behind: list[Node] = []
    bases: list[Node] = []
    for one in rest:
        _part(one, name, behind, bases)
    prefixes = [one for one in prefixes if one != NOTHING]  # `r: r` says nothing
    if not before or not bases:
        return {name: node}
    once = _sequence([_repeated(prefixes), _either(bases)])
    if not between:
        return {name: _sequence([once, _repeated(behind)])}
    part = f"{name}_part"
    while part in taken:
        part += "_"
    more = _either([*behind, _sequence([_either(between), Name(part)])])
    return {name: _sequence([Name(part), Repeat(more, 0, None)]), part: once}


def _part(node: Node, name: str, behind: list[Node], others: list[Node]) -> None:
    """What comes behind the rule where it begins with it, and the texts that do not."""
    found, rest = _begins_with(name, node)
    behind += found
    others += rest


def _ends_with(name: str, node: Node) -> tuple[list[Node], list[Node]]:
    """What comes before the rule where the node ends with it, and the other texts of the node."""
    return _taken_apart(name, node, lambda parts: (parts[-1], lambda one: _sequence([*parts[:-1], one])))


def _begins_with(name: str, node: Node) -> tuple[list[Node], list[Node]]:
    """What comes behind the rule where the node begins with it, and the other texts of the node."""
    return _taken_apart(name, node, lambda parts: (parts[0], lambda one: _sequence([one, *parts[1:]])))


Divided = Callable[[tuple[Node, ...]], tuple[Node, Callable[[Node], Node]]]


def _taken_apart(name: str, node: Node, divided: Divided) -> tuple[list[Node], list[Node]]:
    """`divided`: the part of a sequence at the end that is looked at, and the sequence with another one there."""
    match node:
        case Name(found) if found == name:
            return [NOTHING], []
        case Sequence(parts) if parts:
            last, with_part = divided(parts)
            before, rest = _taken_apart(name, last, divided)
            if before:
                return [with_part(_either(before))], [with_part(_either(rest))] if rest else []
        case Either(options):
            pairs = [_taken_apart(name, option, divided) for option in options]
            if any(before for before, _ in pairs):
                return [one for before, _ in pairs for one in before], [one for _, rest in pairs for one in rest]
        case Repeat(part, low, 1):
            before, rest = _taken_apart(name, part, divided)
            if before:
                return before, [*rest, NOTHING] if low == 0 else rest
        case _:
            pass
    return [], [node]


def _sequence(parts: list[Node]) -> Node:
    flat = [one for part in parts for one in (part.parts if isinstance(part, Sequence) else (part,))]
    return flat[0] if len(flat) == 1 else Sequence(tuple(flat))


def _either(options: list[Node]) -> Node:
    return options[0] if len(options) == 1 else Either(tuple(options))


def _repeated(options: list[Node]) -> Node:
    return Repeat(_either(options), 0, None) if options else NOTHING
