"""Regexes that no automaton holds are llguidance's, where who reads a text stands at one place of them at a time."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

import numpy as np
import pytest

from niwaki.runtime.api import Regex
from niwaki.runtime.constraints import ConstraintCompiler, Matcher, Vocabulary
from niwaki.runtime.constraints.grammar_engine import GrammarConstraint
from niwaki.runtime.constraints.grammar_source import source_of_large_regex
from niwaki.runtime.constraints.grammar_vocabulary import GrammarVocabulary
from niwaki.runtime.constraints.matcher import AutomatonConstraint
from niwaki.runtime.constraints.pattern import parse
from niwaki.runtime.constraints.regex_growth import stands_once
from tests.toy_constraints import takes

WORDS = [b"ab", b"ba-", b"aaaa", "日本".encode(), "é-".encode()[:2], b"\n#", b"##", b"1.5"]
END = 256 + len(WORDS)
VOCABULARY = Vocabulary([*(bytes([byte]) for byte in range(256)), *WORDS, None], {END})


@pytest.fixture(scope="module")
def compiler() -> Iterator[ConstraintCompiler]:
    made = ConstraintCompiler(VOCABULARY)
    yield made
    made.close()


def allowed(matcher: Matcher) -> list[int]:
    row = np.zeros(VOCABULARY.num_words, np.uint32)
    matcher.fill_mask(row)
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()


@pytest.mark.parametrize(
    "pattern",
    [
        ".{0,9}",
        "(?s).{3,9}",
        r"-?\d{1,4}(\.\d{1,3})?",
        "(- [^\n]{1,5}\n){1,4}",
        "[^#]{2,6}#(ab|ba){0,3}",
        "日?[^本日]{0,4}本",
    ],
)
def test_both_engines_have_the_same_masks(pattern: str, compiler: ConstraintCompiler) -> None:
    automaton = compiler.compile(Regex(pattern))
    assert isinstance(automaton, AutomatonConstraint)
    read = parse(pattern)
    assert read.node is not None
    source = source_of_large_regex(read.node, pattern, read.cost)
    assert source is not None
    grammar = GrammarConstraint(source, GrammarVocabulary(VOCABULARY))
    draw = random.Random(3)
    for _ in range(20):
        one, other = automaton.matcher(), grammar.matcher()
        for _ in range(12):
            tokens = allowed(one)
            assert tokens == allowed(other)
            assert one.can_end == other.can_end
            token = draw.choice(tokens)
            if token == END:
                break
            one.accept(token)
            other.accept(token)


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        (".{0,10000}", ["", "é" * 10_000], ["a\n", "é" * 10_001]),
        ('[^"]{3,50000}', ["\n日a", "x" * 50_000], ["xx", 'xyz"']),
        ("(- [^\n]{1,500}\n){1,40}", ["- a\n", "- a b\n" * 40], ["", "- a", "- \n", "- a b\n" * 41]),
    ],
)
def test_large_counts_mean_what_they_say(
    pattern: str, yes: list[str], no: list[str], compiler: ConstraintCompiler
) -> None:
    compiled = compiler.compile(Regex(pattern))
    assert isinstance(compiled, GrammarConstraint)
    assert [takes(compiled.matcher(), text) for text in yes] == [True] * len(yes)
    assert [takes(compiled.matcher(), text) for text in no] == [False] * len(no)


@pytest.mark.parametrize("pattern", [r"A: [^\n]{12,9000}\n#[a-f]{8}", "(- [^\n]{1,500}\n){2,40}", "[一-鿿]{5,4000}。"])
def test_within_a_budget_they_end_and_match(pattern: str, compiler: ConstraintCompiler) -> None:
    compiled = compiler.compile(Regex(pattern))
    assert isinstance(compiled, GrammarConstraint)
    start = compiled.matcher().distance
    draw = random.Random(5)
    for spare in (0, 1, 4, 20, 60):
        matcher, text = compiled.matcher(), b""
        for remaining in range(start + spare, 0, -1):
            tokens = allowed(matcher)
            token = next(one for one in draw.sample(tokens, len(tokens)) if matcher.admits(one, remaining))
            if token == END:
                break
            matcher.accept(token)
            text += VOCABULARY.token_bytes[token] or b""
        assert matcher.can_end, (spare, text)
        assert re.fullmatch(pattern, text.decode())


@pytest.mark.parametrize(
    ("pattern", "is_one"),
    [
        (".{0,10000}", True), ("[^.]{20,}\\.", True), ("(ab{1,300}){1,400}", True), ("(a{1,9}b){3,3}a", True),
        (".{0,10000}a", False), ("(a{1,1000}){1,1000}", False), ("(a|b)*a(a|b){20}", False), ("(a?b?){4000}", False),
        ("a{2,4000}a", False), ("a{4000}a", True), ("(a|ab){0,4000}c", False),
        ("(a{1,2}){0,9000}", False), ("(- [^\n]{1,500}){0,40}", False), ("(- [^\n]{1,500}\n){0,40}", True),
    ],
)  # fmt: skip
def test_which_stand_once(pattern: str, is_one: bool) -> None:
    node = parse(pattern).node
    assert node is not None
    assert stands_once(node) == is_one
