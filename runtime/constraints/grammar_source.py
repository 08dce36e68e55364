"""From a schema or a grammar as users write it to one that llguidance builds: walls, rewriting, dialects, trial."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from struct import Struct
from typing import Final

from llguidance import LLMatcher, LLTokenizer

from niwaki.runtime.api import ConstraintError, Grammar, JsonSchema, Spacing
from niwaki.runtime.constraints.grammar_ebnf import lark_of_ebnf
from niwaki.runtime.constraints.grammar_lark import lark_without_tails
from niwaki.runtime.constraints.guidance import MAX_ITEMS, MAX_SCHEMA_ITEMS, build, tried
from niwaki.runtime.constraints.regex_growth import farthest_end, stands_once
from niwaki.runtime.constraints.regex_language import Languages, TooManyTerms
from niwaki.runtime.constraints.regex_lark import plain, terminal
from niwaki.runtime.constraints.regex_meaning import matched_by
from niwaki.runtime.constraints.regex_tree import Node
from niwaki.runtime.constraints.schema import (
    NormalSchema,
    array_ends,
    closings,
    normalise,
    shortest_text,
    text_with_witness,
)
from niwaki.runtime.constraints.schema.document import Json, json_text, nothing
from niwaki.runtime.constraints.schema.lark import lark_of
from niwaki.runtime.constraints.schema.spacing import spaced_grammar, spaced_text
from niwaki.runtime.constraints.schema.width import check_width

MAX_GRAMMAR_BYTES: Final = 64 * 1024
MAX_NESTING: Final = 64
MAX_REGEX_END: Final = 400  # bytes from any place of a large regex to its end, so that one is found
TAME_TEXT: Final = 64 * 1024  # bytes of a grammar of ours, about a millisecond each KiB
# Masks hold every token that fits, not only those of the canonical tokenization (which also keeps long forced texts
# from costing seconds a mask).
HEADER: Final = '%llguidance {"no_forcing": true}\n'
_FOUND = re.compile(r" \(at \".*\)$")  # told once more, as the engine has it
_LEXED = re.compile(r"in line (\d+) at (\d+): lexer error")
_PLACE = re.compile(r"^(?:at )?(\d+)\((\d+)\)")
_DEFINES = re.compile(r"^[^\S\n]*[\w.-]+\s*::=", re.MULTILINE)  # as rules of EBNF begin
NUMBERS = Struct("<qqq??IIIII")


class NoText(ValueError):
    """The engine refuses the grammar, or no text of it was found; with the reason."""


@dataclass(frozen=True, slots=True)
class Commitments:
    """By how many bytes a token can move the nearest end away.

    `value` bounds the shortest text of everything that one opening byte can begin (an item, a key with its value);
    `inside` what a single key, constant, pattern or number may still ask for once it is begun.
    """

    value: int
    inside: int


# What a user's own rules can begin is not measured: endings are looked for this many bytes before the budget ends.
GRAMMAR_COMMITMENTS: Final = Commitments(value=64, inside=128)


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """A Lark grammar in llguidance's dialect, tried where it might take for ever to build, and a text of it, as short
    as was found. `is_small`: it is provably quick to build. `other` is a text whose ends may be needed where those of
    the shortest do not fit, or empty. `layout` is the normal schema as JSON where arrays allow no item twice beside the
    grammar (`distinct.py`), else empty. `closings` and `array_ends`: see those of `schema`. `is_json`:
    `schema/lark.py` wrote it."""

    text: str
    shortest: bytes
    commitments: Commitments
    num_states: int
    is_small: bool
    other: bytes = b""
    layout: str = ""
    closings: tuple[bytes, ...] = ()
    array_ends: tuple[bytes, ...] = ()
    is_json: bool = False

    def to_bytes(self) -> bytes:
        numbers = (self.commitments.value, self.commitments.inside, self.num_states, self.is_small, self.is_json)
        # JSON of one line each: the control characters of patterns are escaped in it.
        lists = (b"\n".join(self.closings), b"\n".join(self.array_ends))
        texts = (self.shortest, self.other, self.layout.encode(), *lists)
        return NUMBERS.pack(*numbers, *map(len, texts)) + b"".join(texts) + self.text.encode()

    @classmethod
    def from_bytes(cls, body: bytes) -> GrammarSource:
        value, inside, num_states, is_small, is_json, *sizes = NUMBERS.unpack_from(body)
        starts = [*accumulate(sizes, initial=NUMBERS.size), len(body)]
        shortest, other, layout, *lists, text = (body[start:end] for start, end in pairwise(starts))
        closed, ended = [tuple(lines.split(b"\n")) if lines else () for lines in lists]
        commitments = Commitments(value, inside)
        return cls(
            text.decode(),
            shortest,
            commitments,
            num_states,
            bool(is_small),
            other,
            layout.decode(),
            closed,
            ended,
            bool(is_json),
        )


def build_here(source: GrammarSource, tokenizer: LLTokenizer) -> LLMatcher:
    """See `guidance.build`."""
    max_items = MAX_SCHEMA_ITEMS if source.is_json else MAX_ITEMS
    return build(source.text, tokenizer, is_shallow=source.is_small, max_items=max_items)


def source_of_schema(constraint: JsonSchema, seconds: float, word: bytes) -> GrammarSource:
    """The grammar of a schema. `word`: letters that are one token, for texts of a least length.

    Raises:
        TookTooLong: working out the normal form took more processor time.
        ConstraintError: not a schema, too large, or not enforceable exactly.
        NoText: see there.
    """
    return _source_of(normalise(constraint.schema, seconds), constraint.spacing, word)


def source_of_small_schema(
    constraint: JsonSchema, seconds: float, word: bytes, wait_for_pause: Callable[[], None] = nothing
) -> GrammarSource | None:
    """Likewise; None where building the grammar is not provably quick. `wait_for_pause`: as for `normalise`."""
    normal = normalise(constraint.schema, seconds, wait_for_pause)
    return _source_of(normal, constraint.spacing, word, wait_for_pause) if normal.is_small else None


def _source_of(
    normal: NormalSchema, spacing: Spacing, word: bytes, wait_for_pause: Callable[[], None] = nothing
) -> GrammarSource:
    wait_for_pause()
    text = text_of_schema(normal.schema, spacing)
    check_width(text)
    wait_for_pause()

    def letters(count: int) -> bytes:
        return word * (count // len(word)) + word[: count % len(word)]

    def solve(part: dict[str, Json]) -> bytes:
        return _tried(text_of_schema(part), searches=True, max_items=MAX_SCHEMA_ITEMS)

    compact = shortest_text(normal.schema, solve, letters)
    other = text_with_witness(normal.schema, solve, letters) if normal.has_witness else b""
    if not normal.is_tame or len(text) > TAME_TEXT:
        _tried(text, searches=False, max_items=MAX_SCHEMA_ITEMS)
    has_closings, has_ends = normal.has_patterns or normal.has_automata, normal.has_automata
    blanks = 1 if spacing == "compact" else 2  # at most one byte more for each byte
    return GrammarSource(
        text,
        spaced_text(compact, spacing),
        Commitments(blanks * normal.value, normal.inside),
        normal.num_nodes,
        normal.is_small,
        spaced_text(other, spacing),
        json_text(normal.schema) if normal.is_distinct else "",
        closings(normal.schema) if has_closings else (),
        tuple(spaced_text(end, spacing) for end in array_ends(normal.schema, solve, letters)) if has_ends else (),
        is_json=True,
    )


def text_of_schema(schema: Json, spacing: Spacing = "compact") -> str:
    """The grammar of a normal schema. Raises as `spaced_grammar`."""
    return f"{HEADER}{spaced_grammar(lark_of(schema), spacing)}"


def source_of_grammar(grammar: Grammar) -> GrammarSource:
    """The grammar as the engine takes it.

    Raises:
        ConstraintError: malformed or too large.
        NoText: see there.
    """
    text = HEADER + _lark_of(grammar) + "\n"
    num_rules = text.count("\n") - 1
    try:
        shortest = _tried(text, searches=True)
    except NoText as error:
        reason = _PLACE.sub(_in_their_grammar, _FOUND.sub("", str(error)))
        is_ebnf = grammar.syntax == "lark" and _DEFINES.search(grammar.source) is not None
        remedy = "; rules written name ::= are EBNF: give it as ebnf=" * is_ebnf
        raise NoText(_LEXED.sub(partial(_in_our_words, grammar.source), reason) + remedy) from None
    return GrammarSource(text, shortest, GRAMMAR_COMMITMENTS, num_rules, False)


def _in_their_grammar(place: re.Match[str]) -> str:
    """A place of the engine's, which counts our first line, too."""
    return f"in line {int(place[1]) - HEADER.count(chr(10))} at {place[2]}"


def _in_our_words(grammar: str, found: re.Match[str]) -> str:
    """What the engine calls a lexer error, with what is wrong where it is the other quote."""
    line, column = int(found[1]), int(found[2])
    is_quote = "\n".join(grammar.split("\n")[line - 1 : line])[column - 1 : column] == "'"
    remedy = "; a text stands in double quotes" * is_quote
    return f"in line {line} at {column}: no word of Lark's notation begins or ends here{remedy}"


def source_of_large_regex(node: Node, text: str, cost: int) -> GrammarSource | None:
    """A regex that no automaton holds, as a grammar of one terminal, whose places llguidance works out as texts come to
    them. None where these could be several at a time, which at some length are too many."""
    if not stands_once(node) or farthest_end(node) > MAX_REGEX_END:
        return None
    try:
        languages = Languages()
        term = matched_by(languages, node, text)
        shortest = languages.shortest(term)
        grammar = f"{HEADER}start: TEXT\nTEXT: {terminal(languages, term, plain)}\n"
    except (ConstraintError, TooManyTerms):
        return None
    if shortest is None:
        return None
    _tried(grammar, searches=False)
    return GrammarSource(grammar, shortest.encode(), Commitments(0, farthest_end(node)), cost, False)


def _tried(text: str, *, searches: bool, max_items: int = MAX_ITEMS) -> bytes:
    try:
        return tried(text, searches=searches, max_items=max_items)
    except ValueError as error:
        raise NoText(str(error)) from None


def _lark_of(grammar: Grammar) -> str:
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
    return lark_without_tails(source) if grammar.syntax == "lark" else source


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
    return lark_of_ebnf(source)
