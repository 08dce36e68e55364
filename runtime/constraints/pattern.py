"""Regexes as users write them: parsed, bounded, and rewritten for the automaton builder. Knows no tokens.

The dialect is what Python's `re` and the Rust `regex` crate have in common, under a full match (docs/constraints.md
lists it). What is outside it is refused with its position: nothing is ever read differently from what it says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from niwaki.runtime.api import ConstraintError
from niwaki.runtime.constraints.regex_growth import stays_small
from niwaki.runtime.constraints.regex_looks import Expression, first_match_of, meaning_of, request_of
from niwaki.runtime.constraints.regex_parser import parsed
from niwaki.runtime.constraints.regex_tree import Node, invalid, shown

__all__ = ["MAX_PATTERN_BYTES", "Pattern", "all_of", "first_match", "invalid", "one_of", "parse", "request_of", "shown"]
MAX_PATTERN_BYTES: Final = 64 * 1024


@dataclass(frozen=True, slots=True)
class Pattern:
    """A regex of the dialect.

    `expression` is the same language for `transitions.automaton_of`: in the Rust dialect where it does not look around.
    `cost` is about the number of states of its automaton before it is made deterministic; `is_harmless` means that it
    provably stays as small when it is, so that it may be compiled without a process to kill. `node` is the regex itself
    where it does not look around.
    """

    text: str
    expression: Expression
    cost: int
    is_harmless: bool
    node: Node | None = None


def parse(text: str) -> Pattern:
    """Read a regex.

    Raises:
        ConstraintError: too long, not valid, or outside the dialect, with the position (1 is the first character).
    """
    meaning = meaning_of(_read(text), text)
    is_harmless = meaning.node is not None and stays_small(meaning.node)
    return Pattern(text, meaning.expression, meaning.cost, is_harmless, meaning.node)


def first_match(text: str) -> Pattern:
    """The texts that end with their first match of a regex. Raises as `parse`."""
    meaning = first_match_of(_read(text), text)
    return Pattern(text, meaning.expression, meaning.cost, False)


def all_of(patterns: Sequence[Pattern]) -> Pattern:
    """The texts that all of them hold."""
    text = " and ".join(pattern.text for pattern in patterns)
    expression: Expression = ["all", *(pattern.expression for pattern in patterns)]
    return Pattern(text, expression, sum(pattern.cost for pattern in patterns), False)


def one_of(texts: Sequence[str]) -> Pattern:
    """Exactly these texts."""
    source = "|".join("".join(f"\\x{{{ord(char):X}}}" for char in text) for text in texts)
    return Pattern(f"one of {len(texts)} choices", source, sum(len(text.encode()) + 1 for text in texts), False)


def _read(text: str) -> Node:
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > MAX_PATTERN_BYTES:
        raise ConstraintError(f"a regex of {size} bytes is too long: at most {MAX_PATTERN_BYTES}")
    return parsed(text)
