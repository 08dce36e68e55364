"""Strings and keys as regular languages: what their patterns mean, and what is asked while a schema is rewritten."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, lru_cache
from typing import Final, TypeVar

from llguidance import LLMatcher

from niwaki.runtime.api import ConstraintError
from niwaki.runtime.constraints.guidance import build, byte_tokenizer
from niwaki.runtime.constraints.regex_language import ANY_CHARACTER, Languages, Term, TooManyTerms
from niwaki.runtime.constraints.regex_meaning import found_in, has_word_boundary
from niwaki.runtime.constraints.regex_parser import parsed
from niwaki.runtime.constraints.schema.document import Json, Watch, json_text, refused
from niwaki.runtime.constraints.schema.facts import Way
from niwaki.runtime.constraints.schema.formats import FORMAT_PATTERNS

MAX_PATTERN: Final = 16 * 1024
MAX_TRIED_PATTERN: Final = 2000
_COUNT: Final = re.compile(r"\{\d*,?(\d{4,})")
LANGUAGE_SECONDS: Final = 0.01  # that a question about languages may take, and far more: 50 to 300 ms at the worst
QUICK_LOOKS: Final = 64  # of terms: for what is only a help
OPENING: Final = frozenset(",:[{ ")  # behind these a quote may begin a string as well as end one
MAX_KEPT: Final = 32  # patterns of a thread, as terms: a compilation asks up to five things of each
MAX_KEPT_TERMS: Final = 1000  # of one of them
QUICK_EXCLUDED: Final = 100  # characters of texts that a string must not be: 65 us for each text of 10

Answer = TypeVar("Answer")


class _Kept(threading.local):
    """The last patterns that this thread asked of: languages are of one thread."""

    def __init__(self) -> None:
        self.terms: dict[str, tuple[Languages, Term]] = {}


_kept = _Kept()


class Strings:
    """The languages of one schema's patterns, each read once."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._terms: dict[str, Term | None] = {}
        self._universal: dict[str, bool] = {}
        self._engines: dict[str, LLMatcher] = {}

    @cached_property
    def languages(self) -> Languages:
        self._watch.expect(LANGUAGE_SECONDS)
        return Languages()

    def term(self, pattern: str, pointer: str) -> Term | None:
        """The texts in which the pattern is found (validation 6.3.3); None where only the engine knows it.

        Raises:
            ConstraintError: it is no pattern, or none that can be enforced.
        """
        if pattern not in self._terms:
            self._terms[pattern] = self._read(pattern, pointer)
        return self._terms[pattern]

    def _read(self, pattern: str, pointer: str) -> Term | None:
        if len(pattern) > MAX_PATTERN:
            raise refused(pointer, f"a pattern of {len(pattern)} characters is too long: at most {MAX_PATTERN}")
        try:
            return read(self.languages, pattern)
        except TooManyTerms:
            raise refused(pointer, "the pattern is too large") from None
        except ConstraintError as error:
            try:
                self._engine(pattern, pointer)
            except ValueError:
                raise refused(pointer, str(error)) from None
            return None

    def matches(self, pattern: str, text: str, pointer: str) -> bool:
        """Whether the pattern is found in the text. Raises as `term`."""
        language = self.term(pattern, pointer)
        if language is not None:
            try:
                return self.languages.holds(language, text)
            except TooManyTerms:
                raise refused(pointer, "the pattern is too large to be compared with constants and names") from None
        place = self._engine(pattern, pointer).deep_copy()
        data = list(json_text(text).encode())
        return bool(place.try_consume_tokens(data) == len(data) and place.is_accepting())

    def is_universal(self, pattern: str, pointer: str) -> bool:
        """Whether the pattern is surely found in every string. Raises as `term`."""
        if pattern not in self._universal:
            term = self.term(pattern, pointer)
            self._universal[pattern] = (
                term is not None and term.is_nullable and self.languages.is_empty(self.languages.none_of(term)) is True
            )
        return self._universal[pattern]

    def _engine(self, pattern: str, pointer: str) -> LLMatcher:
        if pattern not in self._engines:
            if len(pattern) > MAX_TRIED_PATTERN or _COUNT.search(pattern):
                raise refused(pointer, "the pattern is too large to be compared with constants and names")
            schema = json_text({"type": "string", "pattern": pattern})
            grammar = f'%llguidance {{"no_forcing": true}}\nstart: %json {schema}\n'
            self._engines[pattern] = build(grammar, byte_tokenizer())
        return self._engines[pattern]

    def language(self, way: Way) -> Term | None:
        """The texts of a way of strings that is not finite; None where only the engine knows it."""
        languages = self.languages
        patterns = [*way.patterns, *((FORMAT_PATTERNS[name], place) for name, place in way.formats)]
        parts: list[Term] = []
        try:
            for sources, holds in ((patterns, True), (way.without, False)):
                for pattern, pointer in sources:
                    term = self.term(pattern, pointer)
                    if term is None:
                        return None
                    parts.append(term if holds else languages.none_of(term))
            if way.excluded:
                texts = [languages.text(value) for value in way.excluded if isinstance(value, str)]
                parts.append(languages.none_of(languages.any_of(texts)))
            if way.least or way.most is not None:
                parts.append(languages.repeat(languages.any_character, way.least, way.most))
            return languages.all_of(parts)
        except TooManyTerms:
            place = patterns[0][1] if patterns else "a string"
            raise refused(place, "what is asked of the string is too large") from None

    def is_empty(self, way: Way) -> bool:
        """Whether provably no text is in it."""
        if not (len(way.patterns) + len(way.formats) + len(way.without)) or _is_a_format(way):
            return False
        if (pattern := _only_pattern(way)) is not None:
            self._watch.expect(LANGUAGE_SECONDS)
            if (is_empty := _is_in_none(pattern)) is not None:
                return is_empty
        language = self.language(way)
        return language is not None and self.languages.is_empty(language) is True

    def schema(self, way: Way) -> dict[str, Json]:
        """The way as a normal schema of strings, in which equal facts are written equally."""
        texts = [value for value in way.excluded if isinstance(value, str)]
        is_bare = not (way.patterns or way.formats or way.without or texts)
        if not (is_bare or _is_a_format(way) or (_excludes_only(way) and sum(map(len, texts)) <= QUICK_EXCLUDED)):
            self._watch.expect(LANGUAGE_SECONDS)  # for whatever reads this schema
        schema: dict[str, Json] = {"type": "string"}
        if way.least:
            schema["minLength"] = way.least
        if way.most is not None:
            schema["maxLength"] = way.most
        patterns = [pattern for pattern, _ in way.patterns] + [FORMAT_PATTERNS[name] for name, _ in way.formats]
        is_alone = len(patterns) == 1 and not way.without and not way.excluded
        is_read = is_alone and way.patterns and _is_in_none(patterns[0]) is not None
        for pattern, pointer in () if is_read else (*way.patterns, *way.without):
            if self.term(pattern, pointer) is None and not (is_alone and way.patterns):
                raise refused(pointer, "the pattern cannot be enforced together with others, or negated")
        if patterns or way.without or way.excluded:
            schema["pattern"] = joined(patterns, [pattern for pattern, _ in way.without], texts)
        return schema


def _is_a_format(way: Way) -> bool:
    """And nothing else: there are texts of each, and what is asked of it is asked once for all schemas."""
    is_alone = len(way.formats) == 1 and not (way.patterns or way.without or way.excluded)
    return is_alone and not way.least and way.most is None


def _excludes_only(way: Way) -> bool:
    return not (way.patterns or way.formats or way.without or way.least) and way.most is None


def _only_pattern(way: Way) -> str | None:
    """The pattern, where nothing else is asked of a string."""
    is_alone = len(way.patterns) == 1 and not (way.formats or way.without or way.excluded)
    return way.patterns[0][0] if is_alone and not way.least and way.most is None else None


@lru_cache(maxsize=512)
def _is_in_none(pattern: str) -> bool | None:
    """Whether the pattern is provably found in no text; None where it is long, too large or not ours to read. Its
    language is one that is kept for other questions: to read it for one schema as well took as long again."""
    if len(pattern) > MAX_PATTERN:
        return None
    try:
        return asked_of(pattern, lambda languages, term: languages.is_empty(term) is True)
    except (ConstraintError, TooManyTerms):
        return None


def read(languages: Languages, pattern: str) -> Term:
    """The texts in which a pattern is found. Raises as `found_in`."""
    return found_in(languages, parsed(pattern), pattern)


def asked_of(pattern: str, question: Callable[[Languages, Term], Answer]) -> Answer:
    """The answer to a question about the texts in which a pattern is found. Raises as `read`, and as the question."""
    kept = _kept.terms
    found = kept.pop(pattern, None)
    if found is None:
        languages = Languages()
        found = languages, read(languages, pattern)
    answer = question(*found)
    if found[0].num_terms <= MAX_KEPT_TERMS:
        kept[pattern] = found
        if len(kept) > MAX_KEPT:
            del kept[next(iter(kept))]
    return answer


def has_boundary(pattern: str) -> bool:
    r"""Whether it has a \b or \B; False where it is no pattern of ours."""
    if r"\b" not in pattern and r"\B" not in pattern:
        return False
    try:
        return has_word_boundary(parsed(pattern))
    except ConstraintError:
        return False


@lru_cache(maxsize=512)
def shortest_of(pattern: str, least: int, most: int | None) -> str | None:
    """A short text of so many characters in which the pattern is found; None where there is none.

    Raises:
        ConstraintError: only the engine knows the pattern.
        TooManyTerms: it is too large.
    """
    return asked_of(pattern, lambda languages, term: languages.shortest(of_length(languages, term, least, most)))


@lru_cache(maxsize=512)
def witness_of(pattern: str) -> str | None:
    """A short text in which the pattern is found, and behind which a quote ends a string, wherever both may stand; None
    where none is found quickly."""
    try:
        return asked_of(pattern, _witness)
    except (ConstraintError, TooManyTerms):
        return None


def _witness(languages: Languages, term: Term) -> str | None:
    text = languages.shortest(term, QUICK_LOOKS)
    if text and text[-1] in OPENING:
        text += "a"
        return text if languages.holds(term, text) else None
    return text


def of_length(languages: Languages, term: Term, least: int, most: int | None) -> Term:
    """The texts of a term with so many characters."""
    if not least and most is None:
        return term
    return languages.all_of([term, languages.repeat(languages.characters(ANY_CHARACTER), least, most)])


def joined(patterns: Sequence[str], without: Sequence[str] = (), names: Iterable[str] = ()) -> str:
    """One pattern of the texts in which all of `patterns` are found and none of `without`, and that are no `names`."""
    looks = [*map(_and, patterns), *map(_but, without), *_but_texts(names)]
    return patterns[0] if len(looks) == 1 and patterns else f"^{''.join(looks)}"


def _and(pattern: str) -> str:
    return f"(?={anywhere(pattern)})"


def _but(pattern: str) -> str:
    return f"(?!{anywhere(pattern)})"


def anywhere(pattern: str) -> str:
    """The pattern for a look at the start of the text, which finds it at any place."""
    return pattern if pattern.startswith("^") and "|" not in pattern else rf"[\s\S]*(?:{pattern})"


def _but_texts(texts: Iterable[str]) -> list[str]:
    options = [escaped_text(text) for text in texts]
    return [f"(?!(?:{'|'.join(options)})$)"] if options else []


def escaped_text(text: str) -> str:
    """The text as a regex."""
    return "".join(f"\\{char}" if char in r"\.+*?()|[]{}^$/-" else _visible(char) for char in text)


def _visible(char: str) -> str:
    return char if char.isprintable() else f"\\x{{{ord(char):X}}}"
