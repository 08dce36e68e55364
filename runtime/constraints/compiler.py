"""From a constraint as data to a compiled one: the walls, the compile, the cache. The one door for all kinds."""

from __future__ import annotations

import threading
from collections import OrderedDict
from pathlib import Path
from typing import Final, assert_never

import numpy as np

from niwaki.runtime.api import (
    AllOf,
    Choices,
    ConfigError,
    Constraint,
    ConstraintError,
    Grammar,
    JsonSchema,
    Reasoned,
    Regex,
    StopRegex,
    ToolCalls,
)
from niwaki.runtime.constraints import grammar_worker, worker
from niwaki.runtime.constraints.automaton import START, ByteDfa, from_edges, from_texts
from niwaki.runtime.constraints.composed import ComposedConstraint
from niwaki.runtime.constraints.grammar_engine import GrammarConstraint
from niwaki.runtime.constraints.grammar_source import source_of, text_of_schema
from niwaki.runtime.constraints.grammar_vocabulary import GrammarVocabulary
from niwaki.runtime.constraints.grammar_worker import SEARCH, WALK
from niwaki.runtime.constraints.matcher import AutomatonConstraint
from niwaki.runtime.constraints.pattern import Pattern, all_of, first_match, one_of, parse, request_of, shown
from niwaki.runtime.constraints.process import CompileProcess
from niwaki.runtime.constraints.protocol import CompiledConstraint
from niwaki.runtime.constraints.schema import TookTooLong, shortest_text
from niwaki.runtime.constraints.schema.spacing import spaced_text
from niwaki.runtime.constraints.tools import calls_piece, reasoned_piece
from niwaki.runtime.constraints.vocabulary import Vocabulary

MAX_COST: Final = 12_000  # states before making deterministic; the worker does about 10,000 a second
ENTRY_BYTES: Final = 3000  # of a cached constraint beside its arrays: objects, headers, dictionaries
MAX_CHOICES: Final = 100_000
MAX_CHOICES_BYTES: Final = 4 * 1024 * 1024
GRAMMAR_WORKER: Final = Path(__file__).with_name("grammar_worker.py")


class ConstraintCompiler:
    """Compiles constraints over one vocabulary, and keeps the last ones used within `max_bytes`.

    Safe to use from several threads; may take `seconds` of processor time, so never call it on the engine's loop.
    Close it when done: it may own a process.
    """

    def __init__(self, vocabulary: Vocabulary, *, seconds: float = 1.0, max_bytes: int = 256 * 1024 * 1024) -> None:
        self.vocabulary = vocabulary
        self._max_bytes = max_bytes
        self._seconds = seconds
        self._process = CompileProcess(seconds)
        self._grammar_process = CompileProcess(seconds, GRAMMAR_WORKER)
        self._words: GrammarVocabulary | None = None  # built with the first schema or grammar
        self._lock = threading.Lock()
        self._known: OrderedDict[Constraint, CompiledConstraint | str] = OrderedDict()  # a str: why it is refused

    def compile(self, constraint: Constraint) -> CompiledConstraint:
        """The constraint, compiled now or before.

        Raises:
            ConstraintError: malformed, not enforceable exactly, too large, or admitting no text.
        """
        with self._lock:
            known = self._known.get(constraint)
            if known is not None:
                self._known.move_to_end(constraint)
        if isinstance(known, str):
            raise ConstraintError(known)
        if known is not None:
            return known
        try:
            compiled: CompiledConstraint = self._compiled(constraint)
        except TookTooLong:  # not remembered: it says as much about the machine's load as about the constraint
            raise ConstraintError(
                f"{_named(constraint)} is too complex to compile within {self._seconds:g} s; simplify it"
            ) from None
        except ConstraintError as error:
            self._remember(constraint, str(error))
            raise
        self._remember(constraint, compiled)
        return compiled

    def first_match(self, pattern: str) -> ByteDfa:
        """The automaton of the texts that end with their first match of the pattern. Raises as `compile`."""
        compiled = self.compile(StopRegex(pattern))
        assert isinstance(compiled, AutomatonConstraint), "an automaton stands behind every regex"
        return compiled.dfa

    def is_known(self, constraint: Constraint) -> bool:
        """Whether `compile` would answer at once, from the cache."""
        with self._lock:
            return constraint in self._known

    @property
    def num_bytes(self) -> int:
        """Memory held by the cache."""
        with self._lock:
            return self._num_bytes()

    def __len__(self) -> int:
        return len(self._known)

    def close(self) -> None:
        """End the compile processes, if any run."""
        self._process.close()
        self._grammar_process.close()

    def _compiled(self, constraint: Constraint) -> CompiledConstraint:
        match constraint:
            case JsonSchema() | Grammar():
                return self._grammar(constraint)
            case ToolCalls():
                return ComposedConstraint(calls_piece(constraint, self.vocabulary, self.compile), self.vocabulary)
            case Reasoned():
                return ComposedConstraint(reasoned_piece(constraint, self.vocabulary, self.compile), self.vocabulary)
            case Regex(pattern):
                dfa = self._automaton(parse(pattern), _named(constraint))
            case Choices(choices):
                dfa = choices_automaton(choices)
            case StopRegex(pattern):
                dfa = self._automaton(first_match(pattern), _named(constraint))
                if dfa.accepting[START]:
                    raise ConstraintError(f"{_named(constraint)} matches the empty text: it would stop at once")
            case AllOf(parts):
                if not parts:
                    raise ConstraintError("a conjunction needs at least one part")
                dfa = self._automaton(all_of([_pattern(part) for part in parts]), _named(constraint))
            case _:
                assert_never(constraint)
        try:
            return AutomatonConstraint(dfa, self.vocabulary)
        except ConstraintError as error:
            raise ConstraintError(f"{_named(constraint)} cannot be used: {error}") from None

    def _automaton(self, pattern: Pattern, name: str) -> ByteDfa:
        if pattern.cost > MAX_COST:
            raise ConstraintError(
                f"{name} is too large: about {pattern.cost} states written out, at most {MAX_COST}; use smaller counts"
            )
        build = worker.automaton_of if pattern.is_harmless else self._process.compile
        try:
            found = build(request_of(pattern.expression))
        except ValueError as error:
            raise ConstraintError(f"{name} cannot be compiled: {error}") from None
        dfa = from_edges(
            np.frombuffer(found.accepting, np.uint8).astype(np.bool_),
            np.array(found.sources, np.int32),
            np.frombuffer(found.labels, np.uint8),
            np.array(found.targets, np.int32),
        )
        if dfa is None:
            raise ConstraintError(f"{name} matches no text")
        return dfa

    def _grammar(self, constraint: JsonSchema | Grammar) -> GrammarConstraint:
        source = source_of(constraint, self._seconds)
        try:
            with self._lock:
                words = self._words = self._words or GrammarVocabulary(self.vocabulary)
            # A grammar is tried elsewhere first: what hangs or dies there never reaches this process.
            ask = grammar_worker.tried if source.is_small else self._grammar_process.ask
            if source.schema is None:
                shortest = ask(SEARCH + source.text)
            else:
                compact = shortest_text(source.schema, lambda part: ask(SEARCH + text_of_schema(part)), words.letters)
                shortest = spaced_text(compact, source.spacing)
                if not source.is_small:
                    ask(WALK + source.text)
            return GrammarConstraint(
                source.text,
                words,
                shortest,
                source.commitments,
                source.num_states,
                is_shallow=source.is_small,
            )
        except RecursionError:
            raise ConstraintError(f"{_named(constraint)} is nested too deeply; nest it less") from None
        except ConfigError as error:
            raise ConstraintError(str(error)) from None
        except ValueError as error:
            raise ConstraintError(f"{_named(constraint)} cannot be enforced: {error}") from None

    def _remember(self, constraint: Constraint, outcome: CompiledConstraint | str) -> None:
        with self._lock:
            self._known[constraint] = outcome
            self._known.move_to_end(constraint)
            while len(self._known) > 1 and self._num_bytes() > self._max_bytes:
                self._known.popitem(last=False)

    def _num_bytes(self) -> int:
        return sum(
            ENTRY_BYTES + _source_bytes(constraint) + (len(outcome) if isinstance(outcome, str) else outcome.num_bytes)
            for constraint, outcome in self._known.items()
        )


def compile_constraint(constraint: Constraint, vocabulary: Vocabulary, *, seconds: float = 1.0) -> CompiledConstraint:
    """Compile once, without a cache. Raises ConstraintError as `ConstraintCompiler.compile` does."""
    compiler = ConstraintCompiler(vocabulary, seconds=seconds)
    try:
        return compiler.compile(constraint)
    finally:
        compiler.close()


def _pattern(part: Regex | Choices | StopRegex) -> Pattern:
    match part:
        case Regex(text):
            return parse(text)
        case StopRegex(text):
            return first_match(text)
        case Choices(choices):
            choices_automaton(choices)  # checks them
            return one_of(choices)


def choices_automaton(choices: tuple[str, ...]) -> ByteDfa:
    """The automaton of a finite set of texts. An empty text is allowed among others.

    Raises:
        ConstraintError: no choices, too many, only the empty text, or one that is not text.
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
    return from_texts(texts)


def _named(constraint: Constraint) -> str:
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
            return f"the conjunction of {' and '.join(map(_named, parts))}"
        case ToolCalls(tools):
            return f"the set of {len(tools)} tools"
        case Reasoned():
            return "the constraint behind the reasoning"
        case _:
            assert_never(constraint)


def _source_bytes(constraint: Constraint) -> int:
    match constraint:
        case Regex(pattern):
            return 4 * len(pattern)
        case Choices(choices):
            return sum(4 * len(choice) + 50 for choice in choices)
        case JsonSchema(schema):
            return 4 * len(schema)
        case Grammar(source):
            return 4 * len(source)
        case StopRegex(pattern):
            return 4 * len(pattern)
        case AllOf(parts):
            return sum(map(_source_bytes, parts))
        case ToolCalls(tools, answer=answer):
            own = sum(4 * (len(tool.name) + len(tool.parameters)) for tool in tools)
            return own + (0 if answer is None else _source_bytes(answer))
        case Reasoned(constraint=inner):
            return 0 if inner is None else _source_bytes(inner)
        case _:
            assert_never(constraint)
