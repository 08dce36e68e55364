"""EBNF is read in pieces only where that is the same as character by character: the masks are equal, token by token."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from niwaki.runtime.api import ConstraintError, Grammar
from niwaki.runtime.constraints import Vocabulary
from niwaki.runtime.constraints.grammar_ebnf import lark_of_ebnf
from niwaki.runtime.constraints.grammar_source import HEADER, source_of_grammar
from niwaki.runtime.constraints.grammar_vocabulary import GrammarVocabulary
from niwaki.runtime.constraints.guidance import build

PIECES = ["ab", "abc", "ba", "bca", "aa", "b1", "12", "1.2", "(a", ")b", '":"', '{"', '"}', ", ", "  ", "é", "éa", "aè"]
TOKENS = [*(bytes([byte]) for byte in range(256)), *(piece.encode() for piece in PIECES), b"\xc3", b"a\xc3", b"\xa9b"]
WORDS = GrammarVocabulary(Vocabulary([*dict.fromkeys(TOKENS), None], {len(dict.fromkeys(TOKENS))}))
END = WORDS.eos_ids[0]
JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws     ::= | " " | "\n" [ \t]{0,20}
"""
ATOMS = st.sampled_from(
    ['"a"', '"ab"', '"abc"', '"b"', '""', "[ab]", "[^a]", "[a-c1]", ".", '"("', '")"', '"é"', "[à-é]", '"è"', '"1."']
)


def expressions(names: list[str]) -> st.SearchStrategy[str]:
    """Of characters and rules; a rule may come behind others, or a character, so that it ends."""
    return st.recursive(
        ATOMS | st.sampled_from(names),
        lambda inner: st.one_of(
            st.lists(inner, min_size=2, max_size=3).map(lambda parts: f"({' '.join(parts)})"),
            st.lists(inner, min_size=2, max_size=3).map(lambda options: f"({' | '.join(options)})"),
            st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "{0,3}", "{2,}"])).map(
                lambda pair: f"({pair[0]}){pair[1]}"
            ),
        ),
        max_leaves=6,
    )


@st.composite
def grammars(draw: st.DrawFn) -> str:
    """Some rules lead to themselves, always beside a text without that."""
    bodies = [draw(expressions(["x", "y"])) for _ in range(3)]
    ends = [draw(ATOMS) for _ in range(2)]
    root, x, y = bodies
    return f'root ::= {root} x\nx ::= {ends[0]} | "(" {x} ")" | "a" x\ny ::= {ends[1]} | "b" {y}\n'


def walks_alike(grammar: str, rng: random.Random, walks: int, length: int) -> int:
    """Follow random texts in both readings; how many masks were compared."""
    one, other = (build(HEADER + lark_of_ebnf(grammar, joins=joins) + "\n", WORDS.tokenizer) for joins in (True, False))
    compared = 0
    for _ in range(walks):
        here, there = one.deep_copy(), other.deep_copy()
        written = b""
        for _ in range(length):
            mask = here.compute_bitmask()
            assert mask == there.compute_bitmask(), (grammar, written)
            assert here.is_accepting() == there.is_accepting(), (grammar, written)
            compared += 1
            bits = int.from_bytes(mask, "little")
            allowed = [token for token in range(WORDS.vocabulary.size) if bits >> token & 1 and token != END]
            if not allowed:
                break
            token = rng.choice(allowed)
            assert here.consume_token(token) == there.consume_token(token) is True
            written += WORDS.vocabulary.token_bytes[token] or b""
        assert not here.is_error(), here.get_error()
    return compared


def is_refused(grammar: str, *, joins: bool) -> bool:
    """By the engine: as grammars are in which nothing ends."""
    lark = HEADER + lark_of_ebnf(grammar, joins=joins) + "\n"
    return LLMatcher(WORDS.tokenizer, LLMatcher.grammar_from_lark(lark), log_level=0).is_error()


@settings(max_examples=150, deadline=None, derandomize=True)
@given(grammars())
def test_pieces_and_characters_have_the_same_masks(grammar: str) -> None:
    if is_refused(grammar, joins=False):
        assert is_refused(grammar, joins=True)
        return
    walks_alike(grammar, random.Random(grammar), walks=4, length=12)


@pytest.mark.parametrize(
    "grammar",
    [
        JSON,
        'root ::= x "bc"\nx ::= "a" | "ab" | "(" x ")"',
        'root ::= x "b"\nx ::= [a-z]+ | "(" x ")"',
        'root ::= x "é"\nx ::= ("a" | "aè") | "(" x ")"',  # that begin with the same byte
        'root ::= x+\nx ::= "ab" | "a" | "b1" | "(" x ")"',
        'root ::= x x\nx ::= "a"{1,2} | "(" x ")"',
        'root ::= s (";" s)*\ns ::= "if" " "+ e | [a-z]+ "=" e\ne ::= [a-z]+ | [0-9]+ ("." [0-9]+)? | "(" e ")"',
        'root ::= x*\nx ::= "<" [a-b]+ ">" x* "</" [a-b]+ ">" | [^<>]+',
    ],
)
def test_grammars_as_people_write_them_have_the_same_masks(grammar: str) -> None:
    assert walks_alike(grammar, random.Random(1), walks=20, length=40) > 80


def test_what_holds_no_recursion_is_read_in_one_piece_and_conflicts_are_not() -> None:
    def num_pieces(grammar: str) -> int:
        return lark_of_ebnf(grammar).count("/") // 2

    assert num_pieces('root ::= ("a" | "ab") "bc" [0-9]{1,9}') == 1
    assert num_pieces(JSON) == 11
    assert num_pieces('root ::= x "b"\nx ::= [ac]+ | "(" x ")"') == 4
    # What [a-z]+ takes may be the b: its characters stand alone.
    assert lark_of_ebnf('root ::= x "b"\nx ::= [a-z]+ | "(" x ")"').count("+") == lark_of_ebnf(
        'root ::= x "b"\nx ::= [a-z]+ | "(" x ")"', joins=False
    ).count(")+")


def test_a_text_is_found_where_all_places_have_the_same_mask() -> None:
    grammar = 'root ::= "b" x | root{1,2} | "b"{0,2} "ab" root{2}\nx ::= root{2,} y | "aa"\ny ::= root{2,} [ab]?'
    assert source_of_grammar(Grammar(grammar, "ebnf")).shortest == b"baa"


def test_ways_that_never_end_are_no_part_of_a_grammar() -> None:
    """A model that took one would write on until its budget ends."""
    dead = 'x ::= "c" x\ny ::= "(" y ")" | x x'
    assert lark_of_ebnf(f'root ::= "b" | "a" x | y{{2}} "b"\n{dead}') == lark_of_ebnf('root ::= "b"')
    left = lark_of_ebnf('root ::= "b" | "d" x* [e] | (y | "f")?\n' + dead)
    assert left == lark_of_ebnf('root ::= "b" | "d" "" [e] | "f"?')
    with pytest.raises(ConstraintError, match="its rule 'root' goes on for ever"):
        lark_of_ebnf(f"root ::= x | y\n{dead}")


def test_large_grammars_are_read_in_little_time_whatever_they_hold() -> None:
    """Beyond what is compared, characters are left alone; no rule is followed by calls."""
    chain = "\n".join(f'r{n} ::= "a" r{n + 1} | "b"' for n in range(2000))
    assert "rule_2002" not in lark_of_ebnf(f'root ::= r0 | r2000 r2000 s\n{chain}\nr2000 ::= "c"\ns ::= "d" s')
    assert "rule_2000" in lark_of_ebnf(f'root ::= r0\n{chain}\nr2000 ::= "c"')
    many = "\n".join(f'r{n} ::= "({n}" [a-z]{{0,150}} root? ")"' for n in range(40))
    lark_of_ebnf(f"root ::= {' | '.join(f'r{n}' for n in range(40))}\n{many}")


@pytest.mark.parametrize(
    ("grammar", "shortest"),
    [
        ('root ::= [^x] root "a" | "é"', "é"),
        (r"""root ::= ([^\\\-\]] root ["a] | [\\] root) | "é" """, "é"),
    ],
)
def test_a_character_that_a_text_cannot_do_without_is_found(grammar: str, shortest: str) -> None:
    """Beside a class of almost all characters it was not among those that are tried, and no text was found."""
    assert source_of_grammar(Grammar(grammar, "ebnf")).shortest == shortest.encode()


@pytest.mark.parametrize(
    ("grammar", "shortest"),
    [
        ('root ::= [^"]+ "日本"', " 日本"),
        ('root ::= .* "日本語"', "日本語"),
        ('root ::= "éü" [^"]* "(éü)"', "éü(éü)"),
    ],
)
def test_a_text_that_stands_behind_any_characters_is_found(grammar: str, shortest: str) -> None:
    """All masks before it are alike, also between its bytes, and such a grammar was said to have no text."""
    assert source_of_grammar(Grammar(grammar, "ebnf")).shortest == shortest.encode()
