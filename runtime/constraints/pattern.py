"""Regexes as users write them: parsed, bounded, and rewritten for the automaton builder. Knows no tokens.

The dialect is what Python's `re` and the Rust `regex` crate have in common, under a full match (docs/constraints.md
lists it). What is outside it is refused with its position: nothing is ever read differently from what it says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from niwaki.runtime.api import ConstraintError
from niwaki.runtime.constraints.regex_growth import stays_small
from niwaki.runtime.constraints.regex_parser import Parser
from niwaki.runtime.constraints.regex_tree import cost_of, invalid, shown, source_of, without_anchors

__all__ = ["MAX_PATTERN_BYTES", "Pattern", "invalid", "parse", "shown"]
MAX_PATTERN_BYTES: Final = 64 * 1024


@dataclass(frozen=True, slots=True)
class Pattern:
    """A regex of the dialect.

    `source` is the same language in the Rust dialect. `cost` is about the number of states of its automaton before
    it is made deterministic; `is_harmless` means that it provably stays as small when it is, so that it may be
    compiled without a process to kill.
    """

    text: str
    source: str
    cost: int
    is_harmless: bool


def parse(text: str) -> Pattern:
    """Read a regex.

    Raises:
        ConstraintError: too long, not valid, or outside the dialect, with the position (1 is the first character).
    """
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > MAX_PATTERN_BYTES:
        raise ConstraintError(f"a regex of {size} bytes is too long: at most {MAX_PATTERN_BYTES}")
    node = without_anchors(Parser(text).parse(), text, first=True, last=True)
    return Pattern(text, source_of(node), cost_of(node), stays_small(node))
