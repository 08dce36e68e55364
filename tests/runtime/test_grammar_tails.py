"""Rules that end with themselves are written as repeats: for the same texts, which may then be long.

NIWAKI_DRAWS=10000 draws so many grammars."""

from __future__ import annotations

import os
import random
from typing import Literal

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from niwaki.runtime.api import ConstraintError, Grammar
from niwaki.runtime.constraints import ConstraintCompiler, Vocabulary
from niwaki.runtime.constraints.ebnf_tree import Either, Name, Node, Repeat, Rules, Sequence
from niwaki.runtime.constraints.grammar_lark import lark_without_tails
from niwaki.runtime.constraints.grammar_source import HEADER
from niwaki.runtime.constraints.grammar_tails import without_tails
from niwaki.runtime.constraints.grammar_vocabulary import GrammarVocabulary
from niwaki.runtime.constraints.guidance import build

DRAWS = int(os.environ.get("NIWAKI_DRAWS", "100"))
LONGEST = 5  # letters of the texts that are compared
RULES = ("x", "y")
TOGETHER = ("x", "y", "z")
LETTERS: list[Node] = [Name("a"), Name("b"), Name("c"), Sequence(())]


def nodes() -> st.SearchStrategy[Node]:
    return st.recursive(
        st.sampled_from([*LETTERS, *map(Name, RULES)]),
        lambda inner: st.one_of(
            st.lists(inner, min_size=2, max_size=3).map(lambda parts: Sequence(tuple(parts))),
            st.lists(inner, min_size=2, max_size=3).map(lambda options: Either(tuple(options))),
            st.tuples(inner, st.sampled_from([(0, 1), (0, None), (1, None), (1, 1), (1, 2)])).map(
                lambda pair: Repeat(pair[0], *pair[1])
            ),
        ),
        max_leaves=8,
    )


def texts(rules: Rules) -> dict[str, set[str]]:
    """Of each rule, up to the longest: by adding what follows from what is known until nothing does."""
    known: dict[str, set[str]] = {name: set() for name in rules}

    def of(node: Node) -> set[str]:
        match node:
            case Name(name):
                return known.get(name, {name})
            case Sequence(parts):
                found = {""}
                for part in parts:
                    found = joined(found, of(part))
                return found
            case Either(options):
                return set().union(*map(of, options))
            case Repeat(part, low, high):
                once = of(part)
                found, last = (set() if low else {""}), {""}
                for count in range(1, high + 1 if high else LONGEST + 2):
                    last = joined(last, once)
                    found |= last if count >= low else set()
                return found
            case _:
                raise AssertionError(node)

    while True:
        more = {name: of(node) for name, node in rules.items()}
        if more == known:
            return known
        known.update(more)


def joined(one: set[str], other: set[str]) -> set[str]:
    return {a + b for a in one for b in other if len(a + b) <= LONGEST}


@settings(max_examples=DRAWS, deadline=None, derandomize=True)
@given(st.tuples(nodes(), nodes()))
def test_the_texts_are_the_same(bodies: tuple[Node, Node]) -> None:
    rules = dict(zip(RULES, bodies, strict=True))
    found = texts(without_tails(rules))
    assert {name: found[name] for name in RULES} == texts(rules)


def tails() -> st.SearchStrategy[Node]:
    """Each of three rules ends with one of them, in one way or several."""
    some = st.sampled_from([*LETTERS, *map(Name, TOGETHER)])
    tail = st.tuples(some, st.sampled_from([*map(Name, TOGETHER)])).map(Sequence)
    bounded = tail.map(lambda node: Repeat(node, 0, 1))
    return st.tuples(st.one_of(tail, bounded), st.one_of(tail, bounded), some).map(Either)


@settings(max_examples=2 * DRAWS, deadline=None, derandomize=True)
@given(st.tuples(tails(), tails(), tails()))
def test_the_texts_of_rules_that_end_with_one_another_are_the_same(bodies: tuple[Node, Node, Node]) -> None:
    rules = dict(zip(TOGETHER, bodies, strict=True))
    found = texts(without_tails(rules))
    assert {name: found[name] for name in TOGETHER} == texts(rules)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('start: "a" start | "b"', 'start: (("a")* "b")'),
        ('start: "a" start |', 'start: ("a")*'),
        ('start: item ("," start)?\nitem: "b"', 'start: (((item ","))* item)\nitem: "b"'),
        (
            'start: start "+" start | "-" start | start "!" | "1"',
            'start: (start_part (("!" | ("+" start_part)))*)\nstart_part: (("-")* "1")',
        ),
        (
            'start: "b" x // one\nx: "a" x // two\n  | "b" // three\n',
            'start: "b" x // one\nx: (("a")* "b")\n // three\n',
        ),
        (
            'start: "x" other\nother: "y" start | "z"',
            'start: "x" other\nother: ((("y" "x"))* "z")',
        ),
        (
            'start: line rest\nrest: ";" start |\nline: "a"',
            'start: line rest\nrest: ((";" line))*\nline: "a"',
        ),
    ],
)
def test_rules_that_end_with_themselves_become_repeats(source: str, found: str) -> None:
    assert lark_without_tails(source) == found


@pytest.mark.parametrize(
    "source",
    [
        'start: start "a" | "b"',  # which the engine reads well
        'start: "a" start "b" | "c"',
        'start: ("a" start)* | "c"',
        'start: "a" start',  # of which no text ends
        'start: "b" x\n?x: "a" x | "b"',
        'start: "b" x\nx[lazy]: "a" x | "b"',
        'start: "b" x\nx.2: "a" x | "b"',
        'start: "b" x\nx: "a" x -> more\n  | "b"',
        'start: "b" x\nx: "a" x | %json {"type": "null"}',
        'start: "b" x\nx: "a" x | "b"\nx: "c"',
        'start: "b" x\nx: "a" x | <|end|>',
        'start: "b" x\nx: ("a" x | "b"',
    ],
)
def test_what_is_not_surely_understood_stays_as_it_is(source: str) -> None:
    assert lark_without_tails(source) == source


@settings(max_examples=20 * DRAWS, deadline=None)
@given(st.lists(st.sampled_from([*"ab:|()*+?!{},%[]\n \\", "start", "TEXT", '"', "/", "->", "a: a", "{2,3}", "//"])))
def test_no_text_is_too_odd_to_be_read(parts: list[str]) -> None:
    assert isinstance(lark_without_tails("".join(parts)), str)


def expressions() -> st.SearchStrategy[str]:
    atoms = ['"a"', '"ab"', '"b"', '"("', '")"', "/[ab]/", "/a+/", "WORD", "x", "y"]
    return st.recursive(
        st.sampled_from(atoms),
        lambda inner: st.one_of(
            st.lists(inner, min_size=2, max_size=3).map(lambda parts: f"({' '.join(parts)})"),
            st.lists(inner, min_size=2, max_size=3).map(lambda options: f"({' | '.join(options)})"),
            st.tuples(inner, st.sampled_from(["?", "*", "+", "{1,2}"])).map(lambda pair: f"({pair[0]}){pair[1]}"),
        ),
        max_leaves=5,
    )


@st.composite
def grammars(draw: st.DrawFn) -> str:
    """Each rule ends with itself in one way or several, and has a text without that."""
    found = ["start: x y", "WORD: /[a-c]{1,2}/"]
    for name in RULES:
        some = expressions()
        tails = [f"{draw(some)} {name}", f"{name} {draw(some)} {name}", f"{draw(some)} ({draw(some)} {name})?"]
        options = [*draw(st.lists(st.sampled_from(tails), min_size=1, max_size=2)), draw(st.sampled_from(["", '"c"']))]
        found.append(f"{name}: {draw(st.sampled_from([' | ', f'{chr(10)}  | '])).join(options)}")
    return "\n".join(found) + draw(st.sampled_from(["", "\n%ignore / /"])) + "\n"


@st.composite
def grammars_of_circles(draw: st.DrawFn) -> str:
    """Each rule ends with the next one, maybe with others too, and has a text without that."""
    found = ["start: x y", "WORD: /[a-c]{1,2}/"]
    for name, following in zip(TOGETHER, TOGETHER[1:] + TOGETHER[:1], strict=True):
        some = expressions()
        others = [f"{draw(some)} {draw(st.sampled_from(TOGETHER))}", f"{draw(some)} ({draw(some)} {following})?"]
        options = [f"{draw(some)} {following}", *draw(st.lists(st.sampled_from(others), max_size=2))]
        found.append(f"{name}: {' | '.join([*options, draw(st.sampled_from(['', chr(34) + 'c' + chr(34)]))])}")
    return "\n".join(found) + draw(st.sampled_from(["", "\n%ignore / /"])) + "\n"


TOKENS = [*(bytes([byte]) for byte in range(256)), *(piece.encode() for piece in ("ab", "aab", "bc", "(a", "b)", " a"))]
WORDS = GrammarVocabulary(Vocabulary([*TOKENS, None], {len(TOKENS)}))


@settings(max_examples=DRAWS, deadline=None, derandomize=True)
@given(grammars())
def test_the_masks_are_the_same(grammar: str) -> None:
    rewritten = lark_without_tails(grammar)
    assert rewritten != grammar
    compare_masks(grammar, rewritten)


@settings(max_examples=DRAWS, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.filter_too_much])
@given(grammars_of_circles())
def test_the_masks_of_rules_that_end_with_one_another_are_the_same(grammar: str) -> None:
    rewritten = lark_without_tails(grammar)
    assume(rewritten != grammar)  # where it would become large, it stays
    compare_masks(grammar, rewritten)


def compare_masks(grammar: str, rewritten: str) -> None:
    one, other = (build(HEADER + text, WORDS.tokenizer) for text in (grammar, rewritten))
    rng = random.Random(grammar)
    for _ in range(4):
        here, there = one.deep_copy(), other.deep_copy()
        for _ in range(10):
            mask = here.compute_bitmask()
            assert mask == there.compute_bitmask(), (grammar, rewritten)
            assert here.is_accepting() == there.is_accepting(), (grammar, rewritten)
            bits = int.from_bytes(mask, "little")
            allowed = [token for token in range(len(TOKENS)) if bits >> token & 1]
            if not allowed:
                break
            token = rng.choice(allowed)
            assert here.consume_token(token) == there.consume_token(token) is True
        assert not here.is_error()


BYTES = Vocabulary([*(bytes([byte]) for byte in range(256)), None], {256})


@pytest.mark.parametrize(
    ("syntax", "source", "item", "end"),
    [
        ("lark", 'start: "a" start | "b"', b"a", b"b"),
        ("lark", 'start: "a" start |', b"a", b""),
        ("lark", 'start: line\nline: /[a-z]+/ ";" line | /[a-z]+/', b"ab;", b"c"),
        ("lark", 'start: "(" start ")" start |', b"()", b""),
        ("lark", 'start: start ("+" | "*") start | /[0-9]/ | "(" start ")"', b"1+(2)*", b"3"),
        ("lark", 'start: "x" other\nother: "y" start | "z"', b"xy", b"xz"),
        ("lark", 'start: line rest\nrest: ";" start |\nline: /[a-z]+/', b"ab;", b"c"),
        ("lark", 'start: one | two | "."\none: "1" (two | start)\ntwo: "2" one | "22" start', b"12221", b"."),
        ("ebnf", 'root ::= "x" other\nother ::= "y" root | "z"', b"xy", b"xz"),
        ("ebnf", 'root ::= "a" root | "b"', b"a", b"b"),
        ("ebnf", 'root ::= "(" root ")" root | ""', b"()", b""),
        ("ebnf", 'root ::= item ("," root)?\nitem ::= [0-9]+ | "[" root "]"', b"1,[2],", b"3"),
    ],
)
def test_twenty_thousand_items_are_no_limit(
    syntax: Literal["lark", "ebnf"], source: str, item: bytes, end: bytes
) -> None:
    compiler = ConstraintCompiler(BYTES, seconds=20)
    matcher = compiler.compile(Grammar(source, syntax)).matcher()
    row = np.zeros(BYTES.num_words, np.uint32)
    for place, byte in enumerate(item * 20_000 + end):
        if place % 100 == 0:
            matcher.fill_mask(row)
            assert row[byte >> 5] >> (byte & 31) & 1
        matcher.accept(byte)
    matcher.fill_mask(row)
    assert matcher.can_end
    compiler.close()


def test_an_error_names_the_line_in_which_it_is() -> None:
    compiler = ConstraintCompiler(BYTES, seconds=20)
    with pytest.raises(ConstraintError, match="in line 5 "):
        compiler.compile(Grammar('start: x y\nx: "a" x\n  | "b"\n  | "c"\ny: missing\n'))
    compiler.close()
