"""From a constraint as data to a compiled one: the walls, the compile, the cache. The one door for all kinds."""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Final, assert_never

import numpy as np
from llguidance import LLMatcher, LLTokenizer

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
from niwaki.runtime.api.errors import StopRegexError
from niwaki.runtime.constraints.automaton import START, ByteDfa, from_edges, from_texts
from niwaki.runtime.constraints.composed import ComposedConstraint
from niwaki.runtime.constraints.grammar_engine import GrammarConstraint
from niwaki.runtime.constraints.grammar_source import GrammarSource, build_here
from niwaki.runtime.constraints.grammar_vocabulary import GrammarVocabulary
from niwaki.runtime.constraints.guidance import give_way
from niwaki.runtime.constraints.matcher import AutomatonConstraint
from niwaki.runtime.constraints.process import CompilePool
from niwaki.runtime.constraints.protocol import CompiledConstraint
from niwaki.runtime.constraints.schema import TookTooLong
from niwaki.runtime.constraints.sources import (
    Compilable,
    Source,
    named,
    quick_source,
    read_answer,
    refusal,
    request_for,
    texts_of,
    too_complex,
)
from niwaki.runtime.constraints.tools import calls_piece, reasoned_piece
from niwaki.runtime.constraints.transitions import Transitions
from niwaki.runtime.constraints.vocabulary import Vocabulary

RECOUNTED: Final = 8  # constraints of the cache whose size is looked at again with each that is added
ENTRY_BYTES: Final = 3000  # of a cached constraint beside its arrays: objects, headers, dictionaries


class ConstraintCompiler:
    """Compiles constraints over one vocabulary, and keeps the last ones used within `max_bytes`.

    Safe to use from several threads; may take `seconds` of processor time, so never call it on the engine's loop.
    Close it when done: it may own a process.
    """

    def __init__(self, vocabulary: Vocabulary, *, seconds: float = 1.0, max_bytes: int = 256 * 1024 * 1024) -> None:
        self.vocabulary = vocabulary
        self._max_bytes = max_bytes
        self._seconds = seconds
        self._pool = CompilePool(seconds)
        self._words: GrammarVocabulary | None = None  # built with the first schema or grammar
        self._lock = threading.Lock()
        # What is quick is done here, one at a time: the engine's loop wants the interpreter's lock, too.
        self._here = threading.Lock()
        self._pause: Callable[[], None] | None = None  # see `steps_beside`
        self._builder: ThreadPoolExecutor | None = None  # of one thread, made when it is needed
        # With the outcome (a str: why it is refused) the size of its source, which may be 100,000 texts: counted once.
        self._known: OrderedDict[Constraint, tuple[CompiledConstraint | str, int]] = OrderedDict()
        # What is compiled grows while it is used, and counting all of 1,000 took 0.8 ms: a part is, each time.
        self._sizes: OrderedDict[Constraint, int] = OrderedDict()  # the one counted longest ago first
        self._counted = 0  # the sum of these

    def compile(self, constraint: Constraint) -> CompiledConstraint:
        """The constraint, compiled now or before.

        Raises:
            ConstraintError: malformed, not enforceable exactly, too large, or admitting no text.
        """
        if (known := self.known(constraint)) is not None:
            return known
        try:
            compiled: CompiledConstraint = self._compiled(constraint)
        except TookTooLong as error:  # not remembered: it says as much about the machine's load
            raise too_complex(constraint, self._seconds, error) from None
        except ConstraintError as error:
            self._remember(constraint, str(error))
            raise
        self._remember(constraint, compiled)
        return compiled

    def known(self, constraint: Constraint) -> CompiledConstraint | None:
        """What `compile` has at hand, and raises at once; None where it must compile."""
        with self._lock:
            known, _ = self._known.get(constraint, (None, 0))
            if known is not None:
                self._known.move_to_end(constraint)
        if isinstance(known, str):
            raise ConstraintError(known)
        return known

    def steps_beside(self, wait_for_pause: Callable[[], None]) -> None:
        """An engine's loop runs in this process, and its steps go first. `wait_for_pause` waits until it does without
        the interpreter's lock."""
        self._pause = wait_for_pause

    def first_match(self, pattern: str) -> ByteDfa:
        """The automaton of the texts that end with their first match of the pattern. Raises StopRegexError as
        `compile`."""
        try:
            compiled = self.compile(StopRegex(pattern))
        except ConstraintError as error:
            message = str(error)
            raise StopRegexError(f"stop_{message}" if message.startswith("regex ") else message) from None
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
            return sum(_entry_bytes(*entry) for entry in self._known.values())

    def __len__(self) -> int:
        return len(self._known)

    def close(self) -> None:
        """End the compile processes and the thread, if any run."""
        self._pool.close()
        with self._here:
            builder, self._builder = self._builder, None
        if builder is not None:
            builder.shutdown()

    def _compiled(self, constraint: Constraint) -> CompiledConstraint:
        match constraint:
            case JsonSchema() | Grammar():
                found = self._source(constraint, self._vocabulary_of_grammars().longest_word)
            case ToolCalls():
                return ComposedConstraint(calls_piece(constraint, self.vocabulary, self.compile), self.vocabulary)
            case Reasoned():
                return ComposedConstraint(reasoned_piece(constraint, self.vocabulary, self.compile), self.vocabulary)
            case Choices(choices):
                return self._walked(constraint, from_texts(texts_of(choices)))
            case Regex() | StopRegex() | AllOf():
                found = self._source(constraint)
            case _:
                assert_never(constraint)
        if isinstance(found, GrammarSource):
            return self._grammar(constraint, found)
        return self._walked(constraint, _automaton(constraint, found))

    def _walked(self, constraint: Constraint, dfa: ByteDfa) -> AutomatonConstraint:
        try:
            return AutomatonConstraint(dfa, self.vocabulary)
        except ConstraintError as error:
            raise ConstraintError(f"{named(constraint)} cannot be used: {error}") from None

    def _grammar(self, constraint: Compilable, found: GrammarSource) -> GrammarConstraint:
        words = self._vocabulary_of_grammars()
        try:
            with self._here if found.is_small else contextlib.nullcontext():
                self._wait_for_pause()
                made = GrammarConstraint(found, words, self._build)
        except ConstraintError as error:
            raise refusal(constraint, f"cannot be enforced: {error}") from None
        self._wait_for_pause()  # its first matcher takes a third of a millisecond
        return made

    def _wait_for_pause(self) -> None:
        if self._pause is not None:
            self._pause()

    def _build(self, source: GrammarSource, tokenizer: LLTokenizer) -> LLMatcher:
        """Beside an engine on a thread of lower priority, also what is quick: a millisecond of a processor that the
        step and its masks want. Small ones are built one at a time. What comes behind it waits for a pause again."""
        if self._pause is None or not source.is_small:
            return build_here(source, tokenizer)
        if self._builder is None:
            self._builder = ThreadPoolExecutor(1, "niwaki-grammar", give_way)
        built = self._builder.submit(build_here, source, tokenizer).result()
        self._wait_for_pause()
        return built

    def _vocabulary_of_grammars(self) -> GrammarVocabulary:
        try:
            with self._lock:
                words = self._words = self._words or GrammarVocabulary(self.vocabulary)
        except ConfigError as error:
            raise ConstraintError(str(error)) from None
        return words

    def _source(self, constraint: Compilable, word: bytes = b"") -> Source:
        """Worked out here where that is surely quick, else where it can be killed. Raises as `source_of`."""
        with self._here:
            self._wait_for_pause()
            found = quick_source(constraint, self._seconds, word, self._wait_for_pause)
        return found or read_answer(self._pool.ask(request_for(constraint, word)))

    def _remember(self, constraint: Constraint, outcome: CompiledConstraint | str) -> None:
        with self._lock:
            self._known[constraint] = outcome, _source_bytes(constraint)
            self._known.move_to_end(constraint)
            self._count(constraint)
            for other in [*islice(self._sizes, RECOUNTED)]:
                self._count(other)
            while len(self._known) > 1 and self._counted > self._max_bytes:
                oldest, _ = self._known.popitem(last=False)
                self._counted -= self._sizes.pop(oldest)

    def _count(self, constraint: Constraint) -> None:
        size = _entry_bytes(*self._known[constraint])
        self._counted += size - self._sizes.get(constraint, 0)
        self._sizes[constraint] = size
        self._sizes.move_to_end(constraint)


def _automaton(constraint: Compilable, found: Transitions) -> ByteDfa:
    dfa = from_edges(
        np.frombuffer(found.accepting, np.uint8).astype(np.bool_),
        np.array(found.sources, np.int32),
        np.frombuffer(found.labels, np.uint8),
        np.array(found.targets, np.int32),
    )
    if dfa is None:
        raise ConstraintError(f"{named(constraint)} matches no text")
    if isinstance(constraint, StopRegex) and dfa.accepting[START]:
        raise ConstraintError(f"{named(constraint)} matches the empty text: it would stop at once")
    return dfa


def _entry_bytes(outcome: CompiledConstraint | str, source_bytes: int) -> int:
    return ENTRY_BYTES + source_bytes + (len(outcome) if isinstance(outcome, str) else outcome.num_bytes)


def compile_constraint(constraint: Constraint, vocabulary: Vocabulary, *, seconds: float = 1.0) -> CompiledConstraint:
    """Compile once, without a cache. Raises ConstraintError as `ConstraintCompiler.compile` does."""
    compiler = ConstraintCompiler(vocabulary, seconds=seconds)
    try:
        return compiler.compile(constraint)
    finally:
        compiler.close()


def _source_bytes(constraint: Constraint) -> int:
    match constraint:
        case Regex(pattern):
            return _text_bytes(pattern)
        case Choices(choices):
            return sum(_text_bytes(choice) + 50 for choice in choices)
        case JsonSchema(schema):
            return _text_bytes(schema)
        case Grammar(source):
            return _text_bytes(source)
        case StopRegex(pattern):
            return _text_bytes(pattern)
        case AllOf(parts):
            return sum(map(_source_bytes, parts))
        case ToolCalls(tools, answer=answer):
            own = sum(_text_bytes(tool.name) + _text_bytes(tool.parameters) for tool in tools)
            return own + (0 if answer is None else _source_bytes(answer))
        case Reasoned(constraint=inner):
            return 0 if inner is None else _source_bytes(inner)
        case _:
            assert_never(constraint)


def _text_bytes(text: object) -> int:
    return 4 * len(str(text))  # a constraint that was refused may hold what is no text
