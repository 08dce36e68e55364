"""From a schema or a grammar as users write it to one that llguidance builds: walls, rewriting, dialects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from llguidance.gbnf_to_lark import any_to_lark

from niwaki.runtime.api import ConstraintError, Grammar, JsonSchema, Spacing
from niwaki.runtime.constraints.grammar_engine import Commitments
from niwaki.runtime.constraints.schema import normalise
from niwaki.runtime.constraints.schema.document import Json
from niwaki.runtime.constraints.schema.lark import lark_of
from niwaki.runtime.constraints.schema.spacing import spaced_grammar

MAX_GRAMMAR_BYTES: Final = 64 * 1024
MAX_NESTING: Final = 64
# Masks hold every token that fits, not only those of the canonical tokenization (which also keeps long forced texts
# from costing seconds a mask).
HEADER: Final = '%llguidance {"no_forcing": true}\n'
# What a user's own rules can begin is not measured: endings are looked for this many bytes before the budget ends.
GRAMMAR_COMMITMENTS: Final = Commitments(value=64, inside=128)


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """A Lark grammar in llguidance's dialect. `is_small`: building it is provably quick. `schema`: where it is one, the
    normal form, and where blanks stand."""

    text: str
    commitments: Commitments
    num_states: int
    is_small: bool
    schema: Json = None
    spacing: Spacing = "compact"


def source_of(constraint: JsonSchema | Grammar, seconds: float) -> GrammarSource:
    """The grammar of a constraint.

    Raises:
        TookTooLong: it took more processor time.
        ConstraintError: malformed, too large, or not enforceable exactly.
    """
    if isinstance(constraint, Grammar):
        return _grammar(constraint)
    normal = normalise(constraint.schema, seconds)
    blanks = 1 if constraint.spacing == "compact" else 2  # at most one byte more for each byte
    return GrammarSource(
        text_of_schema(normal.schema, constraint.spacing),
        Commitments(blanks * normal.value, normal.inside),
        normal.num_nodes,
        normal.is_small,
        normal.schema,
        constraint.spacing,
    )


def text_of_schema(schema: Json, spacing: Spacing = "compact") -> str:
    """The grammar of a normal schema. Raises as `spaced_grammar`."""
    return f"{HEADER}{spaced_grammar(lark_of(schema), spacing)}"


def _grammar(grammar: Grammar) -> GrammarSource:
    source = grammar.source
    if not isinstance(source, str) or not source.strip():
        raise ConstraintError(f"a grammar must be text with at least one rule, got {source!r}")
    size = len(source.encode("utf-8", "surrogatepass"))
    if size > MAX_GRAMMAR_BYTES:
        raise ConstraintError(f"a grammar of {size} bytes is too large: at most {MAX_GRAMMAR_BYTES}")
    if "\0" in source or any("\ud800" <= char <= "\udfff" for char in source):
        raise ConstraintError("the grammar holds a NUL or a lone surrogate, which is not text")
    _check_nesting(source)
    if grammar.syntax == "ebnf":
        source = _lark_of_ebnf(source)
    elif grammar.syntax != "lark":
        raise ConstraintError(f"a grammar's syntax is 'lark' or 'ebnf', got {grammar.syntax!r}")
    if "%llguidance" in source:
        raise ConstraintError("a grammar may not set the engine's own options: take %llguidance out")
    return GrammarSource(HEADER + source + "\n", GRAMMAR_COMMITMENTS, source.count("\n") + 1, False)


def _check_nesting(source: str) -> None:
    """No more than MAX_NESTING open brackets; those in strings count too: too much is refused, never too little."""
    depth = 0
    for index, char in enumerate(source):
        if char in "([{":
            depth += 1
        elif char in ")]}":
            depth = max(0, depth - 1)
        elif char == "\n" and index and depth and source[index - 1] == "\n":
            depth = 0  # an empty line: a bracket left open in a string does not count for what follows
        if depth > MAX_NESTING:
            raise ConstraintError(f"a grammar may be nested {MAX_NESTING} levels deep, at {index} it is deeper")


def _lark_of_ebnf(source: str) -> str:
    if "::=" not in source:
        raise ConstraintError('an ebnf grammar has rules such as: root ::= "yes" | "no"; found no \'::=\'')
    try:
        converted = str(any_to_lark(source))
    except Exception as error:  # the converter raises bare exceptions, and of several kinds
        raise ConstraintError(f"the ebnf grammar is not valid: {str(error)[:300]}") from None
    return converted.replace("%llguidance {}", "")
