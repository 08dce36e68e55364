"""What a constraint is compiled to before its vocabulary plays a part: an automaton over bytes, or a grammar with a
short text of it.

This is the part of compiling that may take long, or for ever. So most of it is done in a process that can be killed
(`compile_worker.py`), and this file imports no NumPy: that process starts quickly.
"""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple
from typing import Any, Final, TypeAlias, assert_never

from niwaki.runtime.api import (
    AllOf,
    Choices,
    Constraint,
    ConstraintError,
    Grammar,
    JsonSchema,
    Reasoned,
    Regex,
    StopRegex,
    ToolCalls,
)
from niwaki.runtime.constraints.grammar_source import (
    GrammarSource,
    NoText,
    source_of_grammar,
    source_of_large_regex,
    source_of_schema,
    source_of_small_schema,
)
from niwaki.runtime.constraints.pattern import Pattern, all_of, first_match, one_of, parse, request_of, shown
from niwaki.runtime.constraints.schema import TookTooLong
from niwaki.runtime.constraints.schema.document import MAX_SCHEMA_BYTES, most_counted, nothing, read_schema, refused
from niwaki.runtime.constraints.transitions import Transitions, automaton_of

MAX_COST: Final = 12_000  # states before making deterministic; about 10,000 a second are built
MAX_CHOICES: Final = 100_000
MAX_CHOICES_BYTES: Final = 4 * 1024 * 1024
# What is as short as this, and without the words that ask for languages or counting, is rewritten in about a
# millisecond, or the time that it takes is noticed.
QUICK_REGEX: Final = 400
QUICK_SCHEMA: Final = 4000
_SLOW_WORDS = re.compile(
    r'"(?:contains|\w*Contains|pattern\w*|propertyNames|unevaluated\w*|uniqueItems|\w*Properties|multipleOf'
    r'|\$dynamic\w*|\$recursive\w*)"\s*:(?<!"additionalProperties":)'
)
QUICK_SECONDS: Final = 0.003  # of processor time for rewriting: nine of ten schemas with references take below 2 ms
WATCHED: Final = 0.9  # of the limit of the process
AUTOMATON, GRAMMAR, REFUSED, TOO_LONG, FAULT = (bytes([status]) for status in range(5))

Compilable: TypeAlias = Regex | Choices | StopRegex | AllOf | JsonSchema | Grammar
Source: TypeAlias = Transitions | GrammarSource


def source_of(constraint: Compilable, seconds: float, word: bytes) -> Source:
    """What to build. `word`: letters that the vocabulary has as one token, for texts of a least length.

    Raises:
        ConstraintError: malformed, too large, not enforceable exactly, or admitting no text.
        TookTooLong: it took more processor time, as far as that was noticed.
    """
    with _refusals_of(constraint):
        match constraint:
            case JsonSchema():
                return source_of_schema(constraint, seconds, word)
            case Grammar():
                return source_of_grammar(constraint)
            case Regex(text):
                pattern = parse(text)
                large = pattern.node if pattern.cost > MAX_COST else None
                found = None if large is None else source_of_large_regex(large, text, pattern.cost)
                return found or _automaton(pattern, constraint)
            case _:
                return _automaton(_pattern(constraint), constraint)


def quick_source(
    constraint: Compilable, seconds: float, word: bytes, wait_for_pause: Callable[[], None] = nothing
) -> Source | None:
    """`source_of` where that is surely done at once: most regexes and schemas that are met in practice are plain. None
    where it is not sure. `wait_for_pause`: called again and again, that others' work goes first."""
    with _refusals_of(constraint):
        match constraint:
            case Regex(str(text)) if len(text) <= QUICK_REGEX:
                pattern = parse(text)
                return _automaton(pattern, constraint) if pattern.is_harmless else None
            case JsonSchema(str(text)) if _is_plain(text) or len(text) > MAX_SCHEMA_BYTES:  # which is refused at once
                try:
                    return source_of_small_schema(constraint, min(seconds, QUICK_SECONDS), word, wait_for_pause)
                except TookTooLong:
                    return None
            case _:
                return None


def _is_plain(schema: str) -> bool:
    return len(schema) <= QUICK_SCHEMA and not _SLOW_WORDS.search(schema)


def texts_of(choices: tuple[str, ...]) -> list[bytes]:
    """The choices as UTF-8. An empty text is allowed among others.

    Raises:
        ConstraintError: no choices, too many, or one that is not text.
    """
    if not choices:
        raise ConstraintError("choices must hold at least one text, got none")
    if len(choices) > MAX_CHOICES:
        raise ConstraintError(f"at most {MAX_CHOICES} choices, got {len(choices)}")
    texts = []
    for choice in choices:
        if not isinstance(choice, str):
            raise ConstraintError(f"choices must be strings, got {choice!r}")
        try:
            texts.append(choice.encode())
        except UnicodeEncodeError:
            raise ConstraintError(f"the choice {shown(choice)} holds a lone surrogate, which is not text") from None
    size = sum(map(len, texts))
    if size > MAX_CHOICES_BYTES:
        raise ConstraintError(f"the choices hold {size} bytes together, at most {MAX_CHOICES_BYTES}")
    return texts


def named(constraint: Constraint) -> str:
    """As errors call it."""
    match constraint:
        case Regex(pattern):
            return f"regex {shown(pattern)}"
        case Choices(choices):
            return f"the set of {len(choices)} choices"
        case JsonSchema():
            return "the JSON schema"
        case Grammar():
            return "the grammar"
        case StopRegex(pattern):
            return f"stop_regex {shown(pattern)}"
        case AllOf(parts):
            return f"the conjunction of {' and '.join(map(named, parts))}"
        case ToolCalls(tools):
            return f"the set of {len(tools)} tools"
        case Reasoned():
            return "the constraint behind the reasoning"
        case _:
            assert_never(constraint)


def too_complex(constraint: Constraint, seconds: float, error: TookTooLong) -> ConstraintError:
    """The error for what took too long."""
    return refusal(constraint, f"is too complex to compile within {seconds:g} s; simplify it", error.place)


def refusal(constraint: Constraint, reason: str, place: str | None = None) -> ConstraintError:
    """The error for what could not be compiled; for a schema with the pointer of why, or of what is most probably."""
    if place is None and isinstance(constraint, JsonSchema):
        place = most_counted(read_schema(constraint.schema))
    return refused(place, f"it {reason}") if place is not None else ConstraintError(f"{named(constraint)} {reason}")


@contextmanager
def _refusals_of(constraint: Compilable) -> Iterator[None]:
    try:
        yield
    except RecursionError:
        raise ConstraintError(f"{named(constraint)} is nested too deeply; nest it less") from None
    except NoText as error:
        raise refusal(constraint, f"cannot be enforced: {error}") from None


def _automaton(pattern: Pattern, constraint: Compilable) -> Transitions:
    if pattern.cost > MAX_COST:
        raise ConstraintError(
            f"{named(constraint)} is too large: about {pattern.cost} states written out, at most {MAX_COST}; "
            "use smaller counts"
        )
    try:
        return automaton_of(request_of(pattern.expression))
    except ValueError as error:
        raise ConstraintError(f"{named(constraint)} cannot be compiled: {error}") from None


def _pattern(constraint: Regex | Choices | StopRegex | AllOf) -> Pattern:
    match constraint:
        case Regex(text):
            return parse(text)
        case StopRegex(text):
            return first_match(text)
        case Choices(choices):
            texts_of(choices)  # checks them
            return one_of(choices)
        case AllOf(parts):
            if not parts:
                raise ConstraintError("a conjunction needs at least one part")
            return all_of([_pattern(part) for part in parts])


# -- between two processes --------------------------------------------------------------------------------------------

_KINDS: Final[dict[str, Callable[..., Compilable]]] = {
    kind.__name__: kind for kind in (Regex, Choices, StopRegex, JsonSchema, Grammar)
}


def request_for(constraint: Compilable, word: bytes) -> bytes:
    """What the process is asked."""
    return json.dumps([word.decode(), _written(constraint)]).encode()


def answer(request: bytes, seconds: float) -> bytes:
    """In the process."""
    word, written = json.loads(request)
    try:
        # A little before the process is killed, so that it tells what it was about.
        found = source_of(_read(written), WATCHED * seconds, word.encode())
    except (ConstraintError, MemoryError) as error:
        return REFUSED + (str(error) or "out of memory").encode()
    except TookTooLong as error:
        return TOO_LONG + (error.place or "").encode()
    except Exception:  # ours: a process that died of it would be told as a time-out, and leave no trace
        return FAULT + traceback.format_exc().encode()
    return (AUTOMATON if isinstance(found, Transitions) else GRAMMAR) + found.to_bytes()


def read_answer(body: bytes) -> Source:
    """Raises as `source_of`; RuntimeError where compiling itself is at fault."""
    status, rest = body[:1], body[1:]
    if status == AUTOMATON:
        return Transitions.from_bytes(rest)
    if status == GRAMMAR:
        return GrammarSource.from_bytes(rest)
    if status == REFUSED:
        raise ConstraintError(rest.decode())
    if status == FAULT:
        fault = RuntimeError(f"niwaki failed where it compiled: {rest.decode().strip().rpartition(chr(10))[2]}")
        fault.add_note(rest.decode())
        raise fault
    raise TookTooLong(rest.decode() or None)


def _written(constraint: Compilable) -> list[Any]:
    if isinstance(constraint, AllOf):
        return ["AllOf", *map(_written, constraint.parts)]
    return [type(constraint).__name__, *astuple(constraint)]


def _read(written: list[Any]) -> Any:  # what `_written` was given
    name, *values = written
    if name == "AllOf":
        return AllOf(tuple(map(_read, values)))
    return _KINDS[name](*(tuple(value) if isinstance(value, list) else value for value in values))
