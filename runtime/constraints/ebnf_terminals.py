"""Which parts of an EBNF grammar the engine's lexer may read as one piece.

EBNF reads character by character. A lexer takes the longest text that any piece has, and does not look back: of
the pieces `[a-z]+` and `"b"` the first would leave nothing for the second. A piece costs less than its characters, so
parts without recursion are made pieces where the longest text is always the right one: where a text of one piece could
go on as a text of another begins, or a longer one of its own, what goes on must not be what may follow the piece in the
grammar. A part of which that is not so is left to its own parts, in the end to characters, of which none goes on.

Compared is by the first byte of what goes on, since that is where the lexer decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, assert_never

from niwaki.runtime.constraints.ebnf_tree import (
    Chars,
    Either,
    Name,
    Node,
    Repeat,
    Rules,
    Sequence,
    Terminal,
    children,
    names_in,
)
from niwaki.runtime.constraints.regex_tree import Ranges

MAX_RULES: Final = 300  # of a grammar that is looked at
MAX_POSITIONS: Final = 200  # characters written out of one piece
MAX_ALL_POSITIONS: Final = 1500  # of all pieces
MAX_PAIRS: Final = 1_000_000  # of places compared, in one grammar: 0.15 s
MAX_ATTEMPTS: Final = 40


def with_terminals(rules: Rules, root: str) -> Rules | None:
    """The rules, for the same texts as read by a lexer: every leaf is a `Terminal` or a `Name`. None where that is not
    found out with little effort."""
    if len(rules) > MAX_RULES:
        return None
    plain = _without_recursion(rules)
    divided: set[Node] = set()  # parts that are no pieces
    budget = [MAX_PAIRS]
    for _ in range(MAX_ATTEMPTS):
        chosen = _reached({name: _Choice(plain, divided).of(node) for name, node in rules.items()}, root)
        follow = _Follow(chosen, root).of_terminals
        automata = {tree: _Automaton(tree) for tree in follow}
        if sum(len(one.ranges) for one in automata.values()) > MAX_ALL_POSITIONS:
            return None
        wrong = {
            other
            for tree, allowed in follow.items()
            for other in follow
            if _goes_on(automata[tree], automata[other], budget) & allowed
        }
        if budget[0] < 0:
            return None
        if not wrong:
            return chosen
        divided |= wrong
    return None


def _without_recursion(rules: Rules) -> Rules:
    """The rules that do not lead to themselves, with all names written out, unless they are large."""
    waiting = {name: names_in(node) for name, node in rules.items()}
    users: dict[str, list[str]] = {name: [] for name in rules}
    for name, used in waiting.items():
        for other in used:
            users[other].append(name)
    plain: Rules = {}
    ready = [name for name, used in waiting.items() if not used]
    while ready:
        name = ready.pop()
        tree = _written_out(rules[name], plain)
        if tree is not None:
            plain[name] = tree
            for user in users[name]:
                waiting[user].discard(name)
                if not waiting[user]:
                    ready.append(user)
    return plain


def _reached(rules: Rules, root: str) -> Rules:
    found, todo = {root}, [root]
    while todo:
        new = names_in(rules[todo.pop()]) - found
        found |= new
        todo += new
    return {name: node for name, node in rules.items() if name in found}


def _written_out(node: Node, plain: Rules) -> Node | None:
    """Without names; None where one is not in `plain`, or it is large."""
    match node:
        case Name(name):
            return plain.get(name)
        case Sequence() | Either():
            parts = [_written_out(part, plain) for part in children(node)]
            known = tuple(part for part in parts if part is not None)
            if len(known) < len(parts):
                return None
            made: Node = Sequence(known) if isinstance(node, Sequence) else Either(known)
        case Repeat(part, low, high):
            inner = _written_out(part, plain)
            if inner is None:
                return None
            made = Repeat(inner, low, high)
        case _:
            return node
    return made if _num_positions(made) <= MAX_POSITIONS else None


def _num_positions(node: Node) -> int:
    match node:
        case Chars():
            return 1
        case Repeat(part, low, high):
            return _num_positions(part) * max(1, low if high is None else high)
        case _:
            return sum(map(_num_positions, children(node)))


def _is_nullable(tree: Node) -> bool:
    match tree:
        case Sequence(parts):
            return all(map(_is_nullable, parts))
        case Either(options):
            return any(map(_is_nullable, options))
        case Repeat(part, low):
            return low == 0 or _is_nullable(part)
        case _:
            return False


@dataclass(frozen=True, slots=True)
class _Choice:
    """Which parts are pieces: as large as can be, but for the `divided` ones. None of them has the empty text."""

    plain: Rules
    divided: set[Node]

    def of(self, node: Node) -> Node:
        tree = _written_out(node, self.plain)
        if tree is not None and self._is_piece(tree):
            return Terminal(tree)
        match node:
            case Chars() | Terminal():
                return Terminal(node)
            case Name():
                return node
            case Sequence(parts):
                return Sequence(tuple(self._runs(parts)))
            case Either(options):
                return Either(tuple(map(self.of, options)))
            case Repeat(part, low, high):
                inner = _written_out(part, self.plain)
                if low == 0 and inner is not None and high != 0:
                    some = Repeat(inner, 1, high)
                    if self._is_piece(some):
                        return Repeat(Terminal(some), 0, 1)
                return Repeat(self.of(part), low, high)
            case _:
                assert_never(node)

    def _is_piece(self, tree: Node) -> bool:
        return (
            tree not in self.divided
            and not _is_nullable(tree)
            and 0 < _num_positions(tree) <= MAX_POSITIONS
            and not _holds_nothing(tree)
        )

    def _runs(self, parts: tuple[Node, ...]) -> Iterator[Node]:
        """The parts, those side by side that are one piece as one."""
        run: list[Node] = []
        for part in parts:
            tree = _written_out(part, self.plain)
            if tree is not None:
                run.append(tree)
                continue
            yield from self._pieces(run)
            run = []
            yield self.of(part)
        yield from self._pieces(run)

    def _pieces(self, run: list[Node]) -> Iterator[Node]:
        """As few as can be, by halves."""
        if len(run) < 2:
            yield from map(self.of, run)
        elif self._is_piece(whole := Sequence(tuple(run))):
            yield Terminal(whole)
        else:
            yield from self._pieces(run[: len(run) // 2])
            yield from self._pieces(run[len(run) // 2 :])


def _holds_nothing(tree: Node) -> bool:
    """A count of none: kept as it is written."""
    return (isinstance(tree, Repeat) and tree.high == 0) or any(map(_holds_nothing, children(tree)))


# -- first bytes, as bits


def _first_bytes(ranges: Ranges) -> int:
    """Those that the characters begin with in UTF-8."""
    bits = 0
    for low, high in ranges:
        first, last = _first_byte(low), _first_byte(high)
        bits |= (1 << last + 1) - (1 << first)
    return bits


def _first_byte(code: int) -> int:
    if code < 0x80:
        return code
    if code < 0x800:
        return 0xC0 | code >> 6
    return 0xE0 | code >> 12 if code < 0x10000 else 0xF0 | code >> 18


class _Automaton:
    """The positions of a tree's characters (Glushkov's automaton): what begins it, may end it, and follows each."""

    def __init__(self, tree: Node) -> None:
        self.ranges: list[Ranges] = []
        self.after: list[set[int]] = []
        self.first, self.last, _ = self._read(tree)

    def _read(self, tree: Node) -> tuple[set[int], set[int], bool]:
        match tree:
            case Chars(_, ranges):
                self.ranges.append(ranges)
                self.after.append(set())
                place = len(self.ranges) - 1
                return {place}, {place}, False
            case Sequence(parts):
                return self._joined(parts)
            case Either(options):
                found = [self._read(option) for option in options]
                first = set().union(*(one for one, _, _ in found))
                last = set().union(*(one for _, one, _ in found))
                return first, last, any(is_nullable for _, _, is_nullable in found)
            case Repeat(part, low, None):
                head = [part] * max(1, low)
                first, last, is_nullable = self._joined(head[:-1])
                again, end, is_empty = self._read(head[-1])
                self._link(end, again)
                self._link(last, again)
                first = first | again if is_nullable else first
                last = last | end if is_empty or low == 0 else end
                return first, last, (is_nullable and is_empty) or low == 0
            case Repeat(part, low, int() as high):
                first, last, is_nullable = self._joined([part] * low)
                before = last
                for index in range(high - low):
                    again, end, _ = self._read(part)
                    self._link(before, again)
                    first = first | again if is_nullable and not index else first
                    last, before = last | end, end
                return first, last, is_nullable
            case _:
                raise AssertionError("a piece has no names")

    def _joined(self, parts: Iterable[Node]) -> tuple[set[int], set[int], bool]:
        first: set[int] = set()
        last: set[int] = set()
        is_nullable = True
        for part in parts:
            begins, ends, is_empty = self._read(part)
            self._link(last, begins)
            first = first | begins if is_nullable else first
            last = last | ends if is_empty else ends
            is_nullable = is_nullable and is_empty
        return first, last, is_nullable

    def _link(self, ends: set[int], begins: set[int]) -> None:
        for place in ends:
            self.after[place] |= begins


def _goes_on(one: _Automaton, other: _Automaton, budget: list[int]) -> int:
    """The first bytes of what may follow a text of `one` in a longer text of `other`. Takes what it costs from the
    budget, which must not fall below 0."""
    found = 0
    seen: set[tuple[int, int]] = set()
    todo = [(one.first, other.first)]
    while todo and budget[0] >= 0:
        here, there = todo.pop()
        budget[0] -= 1 + len(here) * len(there)
        for place in here:
            for beside in there:
                if (place, beside) not in seen and _meet(one.ranges[place], other.ranges[beside]):
                    seen.add((place, beside))
                    todo.append((one.after[place], other.after[beside]))
                    if place in one.last:
                        for behind in other.after[beside]:
                            found |= _first_bytes(other.ranges[behind])
    return found


def _meet(ranges: Ranges, others: Ranges) -> bool:
    return any(low <= top and bottom <= high for low, high in ranges for bottom, top in others)


@dataclass(slots=True)
class _Follow:
    """What may stand behind each piece of a grammar, as first bytes."""

    rules: Rules
    root: str
    of_terminals: dict[Node, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        first = dict.fromkeys(self.rules, 0)
        nullable = dict.fromkeys(self.rules, False)
        changed = True
        while changed:
            changed = False
            for name, node in self.rules.items():
                found = self._first(node, first, nullable)
                if found != (first[name], nullable[name]):
                    first[name], nullable[name] = found
                    changed = True
        behind = dict.fromkeys(self.rules, 0)
        changed = True
        while changed:
            before = dict(behind)
            for name, node in self.rules.items():
                self._pass_on(node, behind[name], behind, first, nullable)
            changed = before != behind

    def _first(self, node: Node, first: dict[str, int], nullable: dict[str, bool]) -> tuple[int, bool]:
        match node:
            case Terminal(tree):
                return _begins(tree), False
            case Name(name):
                return first[name], nullable[name]
            case Sequence(parts):
                found = 0
                for part in parts:
                    bits, is_nullable = self._first(part, first, nullable)
                    found |= bits
                    if not is_nullable:
                        return found, False
                return found, True
            case Either(options):
                told = [self._first(option, first, nullable) for option in options]
                bits = 0
                for one, _ in told:
                    bits |= one
                return bits, any(is_nullable for _, is_nullable in told)
            case Repeat(part, low, _):
                bits, is_nullable = self._first(part, first, nullable)
                return bits, is_nullable or low == 0
            case _:
                raise AssertionError("every character is in a piece")

    def _pass_on(
        self, node: Node, follow: int, behind: dict[str, int], first: dict[str, int], nullable: dict[str, bool]
    ) -> None:
        match node:
            case Terminal(tree):
                self.of_terminals[tree] = self.of_terminals.get(tree, 0) | follow
            case Name(name):
                behind[name] |= follow
            case Sequence(parts):
                for part in reversed(parts):
                    self._pass_on(part, follow, behind, first, nullable)
                    bits, is_nullable = self._first(part, first, nullable)
                    follow = bits | follow if is_nullable else bits
            case Either(options):
                for option in options:
                    self._pass_on(option, follow, behind, first, nullable)
            case Repeat(part, _, high):
                if high is None or high > 1:
                    follow |= self._first(part, first, nullable)[0]
                self._pass_on(part, follow, behind, first, nullable)
            case _:
                raise AssertionError("every character is in a piece")


def _begins(tree: Node) -> int:
    match tree:
        case Chars(_, ranges):
            return _first_bytes(ranges)
        case Sequence(parts):
            bits = 0
            for part in parts:
                bits |= _begins(part)
                if not _is_nullable(part):
                    break
            return bits
        case _:
            bits = 0
            for part in children(tree):
                bits |= _begins(part)
            return bits
