"""Looking around: anchors, look-ahead, look-behind and word boundaries are signs in a pattern, with their own automata.

`transitions.py` follows the pattern's automaton and those of the signs together; here they are told apart. Knows no
tokens.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Final, TypeAlias, assert_never

from niwaki.runtime.api import ConstraintError
from niwaki.runtime.constraints.regex_tree import (
    EMPTY,
    MAX_CODE_POINT,
    Alternatives,
    Anchor,
    Characters,
    Concatenation,
    Look,
    Node,
    Repeat,
    cost_of,
    invalid,
    shown,
    source_of,
)

MAX_LOOKS: Final = 24  # different ones, in one regex
FIRST_LOOK: Final = 0x21
# A pattern in the Rust dialect, or ["look", pattern with signs, [[is ahead, is negated, expression], ...]].
Expression: TypeAlias = "str | list[object]"

CHARACTER: Final = Characters(r"[\x{0}-\x{10FFFD}]", ((0, MAX_CODE_POINT),), 7)
ANYTHING: Final = Repeat(CHARACTER, 0, None)
_ASCII_WORDS: Final = Characters("[0-9A-Z_a-z]", ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)), 1)
_BEYOND_WORDS: Final = (*_ASCII_WORDS.superset, (0x80, MAX_CODE_POINT))
UNICODE_WORDS: Final = Characters(r"\w", _BEYOND_WORDS, 330, classes=(r"\w",))


@dataclass(frozen=True, slots=True)
class Meaning:
    """`cost` counts the states of the pattern and of each thing that it looks for; `node` is the regex where nothing in
    it looks around, else None."""

    expression: Expression
    cost: int
    node: Node | None


def meaning_of(node: Node, text: str) -> Meaning:
    """The regex `node`, written as `text`, as a full match.

    Raises:
        ConstraintError: it looks ahead inside a look-behind or the other way round, or in too many ways.
    """
    node = _without_anchors(node, first=True, last=True)
    expression, cost = _expression(node, text, None)
    return Meaning(expression, cost, node if isinstance(expression, str) else None)


def first_match_of(node: Node, text: str) -> Meaning:
    """The texts that end with their first match of the regex. Raises as `meaning_of`."""
    whole = meaning_of(Concatenation((ANYTHING, node)), text)
    return Meaning(["first", whole.expression], whole.cost, None)


def request_of(expression: Expression) -> str:
    """What `transitions.automaton_of` takes: no pattern begins with a NUL."""
    return expression if isinstance(expression, str) else "\0" + json.dumps(expression)


def boundary(index: int, *, is_between: bool) -> Node:
    r"""\b (or \B): a word character on exactly one side (or not), by the ASCII definition and by Unicode's, so that
    every dialect agrees."""
    sides = ((False, True), (True, False)) if is_between else ((False, False), (True, True))
    found = [
        Alternatives(
            tuple(
                Concatenation((Look(words, False, no_before, index), Look(words, True, no_after, index)))
                for no_before, no_after in sides
            )
        )
        for words in (_ASCII_WORDS, UNICODE_WORDS)
    ]
    if not is_between:  # Python finds none in the empty text, up to 3.13
        found.append(Alternatives((Look(CHARACTER, False, False, index), Look(CHARACTER, True, False, index))))
    return Concatenation(tuple(found))


def _without_anchors(node: Node, *, first: bool, last: bool) -> Node:
    """The tree with its anchors replaced: by nothing where no character stands before (`first`) or after (`last`), else
    by a look for none."""
    match node:
        case Characters():
            return node
        case Anchor(is_start, index):
            return EMPTY if (first if is_start else last) else Look(CHARACTER, not is_start, True, index)
        case Look(item, is_ahead, is_negated, index):
            # It begins (or ends) where we stand; its other end is no end of the text.
            inner = _without_anchors(item, first=is_ahead and first, last=not is_ahead and last)
            return Look(inner, is_ahead, is_negated, index)
        case Repeat(item, low, high):
            once = high == 1
            return Repeat(_without_anchors(item, first=first and once, last=last and once), low, high)
        case Alternatives(items):
            return Alternatives(tuple(_without_anchors(item, first=first, last=last) for item in items))
        case Concatenation(items):
            with_text = [i for i, item in enumerate(items) if not _is_zero_width(item)]
            first_text = with_text[0] if with_text else len(items)
            last_text = with_text[-1] if with_text else -1
            return Concatenation(
                tuple(
                    _without_anchors(item, first=first and i <= first_text, last=last and i >= last_text)
                    for i, item in enumerate(items)
                )
            )
        case _:
            assert_never(node)


def _is_zero_width(node: Node) -> bool:
    match node:
        case Anchor() | Look():
            return True
        case Concatenation(items) | Alternatives(items):
            return all(map(_is_zero_width, items))
        case _:
            return False


def _expression(node: Node, text: str, inside: bool | None) -> tuple[Expression, int]:
    """The expression and its cost. `inside`: that of a look-around, which looks ahead, or not."""
    looks: list[Look] = []
    signed = _signed(node, looks)
    source, cost = source_of(signed), cost_of(signed)
    if not looks:
        return source, cost
    if len(looks) > MAX_LOOKS:
        raise ConstraintError(f"regex {shown(text)} looks around in {len(looks)} ways; at most {MAX_LOOKS}")
    around: list[object] = []
    for look in looks:
        if inside is not None and inside != look.is_ahead:
            raise invalid(
                text,
                look.index,
                "a look-ahead (also $ and \\b) inside a look-behind, or the other way round, sees text outside of it, "
                "which is not worked out; take it out of the other",
            )
        items = (look.item, ANYTHING) if look.is_ahead else (ANYTHING, look.item)
        expression, more = _expression(Concatenation(items), text, look.is_ahead)
        around.append([look.is_ahead, look.is_negated, expression])
        cost += more
    return ["look", source, around], cost


def _signed(node: Node, looks: list[Look]) -> Node:
    """The tree with a sign for each look-around, which is noted in `looks`, once."""
    match node:
        case Look():
            same = [i for i, known in enumerate(looks) if _sign(known) == _sign(node)]
            if not same:
                looks.append(node)
            number = same[0] if same else len(looks) - 1
            return Characters(f"\\x{{10FFFE}}\\x{{{FIRST_LOOK + number:X}}}", (), 1)
        case Concatenation(items):
            return Concatenation(tuple(_signed(item, looks) for item in items))
        case Alternatives(items):
            return Alternatives(tuple(_signed(item, looks) for item in items))
        case Repeat(item, low, high):
            return Repeat(_signed(item, looks), low, high)
        case _:
            return node


def _sign(look: Look) -> tuple[Node, bool, bool]:
    return look.item, look.is_ahead, look.is_negated
