"""Rules that end with themselves, written as repeats, for exactly the same texts.

The engine goes back through all rows of a text where a rule such as `list: item "," list | item` ends, so what such a
rule writes ends at its limits behind one or two thousand items. Repeats cost the same at every one.

A rule is taken apart as `r: a r | r b r | r c | d`, where each of these may be missing, but for `d`, and may hold `r`
inside. Its texts are those of `a* d (c | b a* d)*`: by induction over its derivations each way, for any `a`, `b`, `c`
and `d`. Where none ends with itself, a rule stays as it is: the engine reads such as begin with themselves well.

Rules that end with themselves by way of one another are taken one by one: each gets what those before it are read as in
the place of their names where it ends with them, and is then taken apart. So each ends with later ones at most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Final

from niwaki.runtime.constraints.ebnf_tree import Either, Name, Node, Repeat, Rules, Sequence, children

NOTHING: Final = Sequence(())
MOST_TOGETHER: Final = 8  # rules that are read together
MOST_TIMES: Final = 8  # how many times their own size they may have then
MOST_PARTS: Final = 2000  # of them
PASSES: Final = 2  # a rule that stands before what may be empty ends another one once that is written out


def without_tails(rules: Rules) -> Rules:
    """The rules for the same texts; some are new. A `Name` of none of them is left alone. No part of a rule is written
    more than four times, of rules that are read together MOST_TIMES in the mean."""
    found: Rules = {}
    taken = {*rules}
    together = {name: group for group in _groups(rules) for name in group}
    for name, node in rules.items():
        if name in found:
            continue
        made = _read_together({one: rules[one] for one in together[name]}, taken) or _repeating(name, node, taken)
        found |= made
        taken |= made.keys()
    return found


def _read_together(group: Rules, taken: set[str]) -> Rules | None:
    """Rules that end with one another. None where that makes them large, or is of no use."""
    if not 1 < len(group) <= MOST_TOGETHER:
        return None
    most = min(MOST_TIMES * sum(map(_size, group.values())), MOST_PARTS)
    found: Rules = {}
    for name, node in group.items():
        whole = node
        for other in [*found] * PASSES:
            whole = _ending_otherwise(other, whole, found[other])
            if _size(whole) > most:
                return None
        found |= _repeating(name, whole, taken | found.keys())
        if sum(map(_size, found.values())) > most:
            return None
    tails = {name: _may_end_with(node) & found.keys() for name, node in found.items()}
    return None if any(len(one) > 1 or one[0] in tails[one[0]] for one in _circles(tails)) else found


def _ending_otherwise(name: str, node: Node, body: Node) -> Node:
    """The node with a rule's body for its name where it ends with that."""
    before, rest = _ends_with(name, node)
    return _either([_sequence([_either(before), body]), *rest]) if before else node


def _size(node: Node) -> int:
    return 1 + sum(map(_size, children(node)))


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


def _groups(rules: Rules) -> Iterator[list[str]]:
    """Rules that end with one another stand together, in their order."""
    order = {name: number for number, name in enumerate(rules)}
    tails = {name: _tails(node) & rules.keys() for name, node in rules.items()}
    return (sorted(group, key=order.__getitem__) for group in _circles(tails))


def _tails(node: Node) -> set[str]:
    """The rules that `_ends_with` finds."""
    match node:
        case Name(name):
            return {name}
        case Sequence(parts) if parts:
            return _tails(parts[-1])
        case Either(options):
            return set().union(*map(_tails, options))
        case Repeat(part, _, 1):
            return _tails(part)
        case _:
            return set()


def _may_end_with(node: Node) -> set[str]:
    """The rules that the last part of a text may be one of, also where it is repeated or what stands behind may be
    missing."""
    match node:
        case Name(name):
            return {name}
        case Sequence(parts):
            found: set[str] = set()
            for part in reversed(parts):
                found |= _may_end_with(part)
                if not (isinstance(part, Repeat) and part.low == 0):
                    break
            return found
        case Either(options):
            return set().union(*map(_may_end_with, options))
        case Repeat(part):
            return _may_end_with(part)
        case _:
            return set()


def _circles(leads_to: Mapping[str, AbstractSet[str]]) -> Iterator[list[str]]:
    """All names, those that lead to one another together (Tarjan, "Depth-first search and linear graph algorithms")."""
    numbers: dict[str, int] = {}  # in the order in which they are met
    lowest: dict[str, int] = {}  # of those that one leads to and that stand on the path
    path: dict[str, None] = {}
    for first in leads_to:
        way = [] if first in numbers else [(first, iter(leads_to[first]))]
        while way:
            name, others = way[-1]
            if name not in numbers:
                numbers[name] = lowest[name] = len(numbers)
                path[name] = None
            for other in others:
                if other not in numbers:
                    way.append((other, iter(leads_to[other])))
                    break
                if other in path:
                    lowest[name] = min(lowest[name], lowest[other])
            else:
                way.pop()
                if way:
                    lowest[way[-1][0]] = min(lowest[way[-1][0]], lowest[name])
                if lowest[name] == numbers[name]:
                    group: list[str] = []
                    while not group or group[-1] != name:
                        group.append(path.popitem()[0])
                    yield group
