"""Regexes as trees of characters, and what may follow where: an oracle of masks that shares nothing with automata."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache

from niwaki.runtime.constraints import Vocabulary

UNIVERSE = frozenset("abéø")  # é and ø share their first byte


@dataclass(frozen=True)
class Chars:
    members: frozenset[str]  # none: no text at all


@dataclass(frozen=True)
class Then:
    first: Node
    rest: Node


@dataclass(frozen=True)
class Either:
    options: frozenset[Node]


@dataclass(frozen=True)
class Star:
    item: Node


@dataclass(frozen=True)
class Nothing:
    """The empty text."""


Node = Chars | Then | Either | Star | Nothing
NEVER = Chars(frozenset())


def then(first: Node, rest: Node) -> Node:
    if NEVER in (first, rest):
        return NEVER
    if isinstance(first, Nothing):
        return rest
    if isinstance(rest, Nothing):
        return first
    return then(first.first, then(first.rest, rest)) if isinstance(first, Then) else Then(first, rest)


def either(*options: Node) -> Node:
    flat: set[Node] = set()
    for option in options:
        flat |= option.options if isinstance(option, Either) else {option}
    flat.discard(NEVER)
    return NEVER if not flat else next(iter(flat)) if len(flat) == 1 else Either(frozenset(flat))


@cache
def is_nullable(node: Node) -> bool:
    match node:
        case Chars():
            return False
        case Then(first, rest):
            return is_nullable(first) and is_nullable(rest)
        case Either(options):
            return any(map(is_nullable, options))
        case _:
            return True


@cache
def derivative(node: Node, character: str) -> Node:
    match node:
        case Chars(members):
            return Nothing() if character in members else NEVER
        case Then(first, rest):
            after = then(derivative(first, character), rest)
            return either(after, derivative(rest, character)) if is_nullable(first) else after
        case Either(options):
            return either(*(derivative(option, character) for option in options))
        case Star(item):
            return then(derivative(item, character), node)
        case Nothing():
            return NEVER


Place = tuple[Node, bytes]  # what must follow, after the bytes of an unfinished character


def after_byte(place: Place, byte: int) -> Place | None:
    node, pending = place
    pending += bytes([byte])
    possible = [c for c in UNIVERSE if c.encode().startswith(pending) and derivative(node, c) != NEVER]
    if not possible:
        return None
    return (derivative(node, possible[0]), b"") if possible[0].encode() == pending else (node, pending)


def after_token(place: Place, text: bytes) -> Place | None:
    current: Place | None = place
    for byte in text:
        current = after_byte(current, byte) if current is not None else None
    return current


def can_end(place: Place) -> bool:
    return not place[1] and is_nullable(place[0])


class Oracle:
    """All places that tokens lead to, and the fewest tokens from each to an end."""

    def __init__(self, node: Node, vocabulary: Vocabulary) -> None:
        self.paths: dict[Place, tuple[int, ...]] = {(node, b""): ()}
        self.edges: dict[Place, dict[int, Place]] = {}
        usable = [(i, t) for i, t in enumerate(vocabulary.token_bytes) if t and i not in vocabulary.eos_ids]
        for place in (order := list(self.paths)):
            self.edges[place] = {}
            for token_id, text in usable:
                after = after_token(place, text)
                if after is None:
                    continue
                self.edges[place][token_id] = after
                if after not in self.paths:
                    self.paths[after] = (*self.paths[place], token_id)
                    order.append(after)
        self.distances = {place: 0 for place in order if can_end(place)}
        for _ in order:
            for place in order:
                near = [self.distances[p] + 1 for p in self.edges[place].values() if p in self.distances]
                if near and min(near) < self.distances.get(place, 10**9):
                    self.distances[place] = min(near)

    def allowed(self, place: Place, remaining: int = 10**9) -> set[int]:
        return {t for t, after in self.edges[place].items() if self.distances.get(after, 10**9) < remaining}


def random_regex(rng: random.Random, depth: int) -> tuple[str, Node]:
    """A regex that `re` reads too, and the same as a tree."""
    kind = rng.choice(("leaf", "leaf", "cat", "cat", "alt", "repeat") if depth else ("leaf",))
    if kind == "leaf":
        text, members = rng.choice(
            [
                ("a", "a"),
                ("b", "b"),
                ("é", "é"),
                ("[ab]", "ab"),
                ("[^a]", "béø"),
                (".", "abéø"),
                ("[é-ø]", "éø"),
                ("(?:)", ""),
            ]
        )
        return text, Chars(frozenset(members)) if members else Nothing()
    first, first_node = random_regex(rng, depth - 1)
    if kind == "repeat":
        low, high = rng.choice([(0, None), (1, None), (0, 1), (2, 2), (1, 3), (0, 2), (2, None)])
        sign = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get(
            (low, high), f"{{{low},{'' if high is None else high}}}"
        )
        node: Node = Star(first_node) if high is None else Nothing()
        for _ in range((high or low) - low):
            node = either(Nothing(), then(first_node, node))
        for _ in range(low):
            node = then(first_node, node)
        return f"(?:{first}){sign}{rng.choice(['', '?'])}", node
    rest, rest_node = random_regex(rng, depth - 1)
    if kind == "cat":
        return first + rest if "|" not in first + rest else f"(?:{first})(?:{rest})", then(first_node, rest_node)
    return f"({first}|{rest})", either(first_node, rest_node)
