"""Regular languages as terms, against Python's re: search and full match, look-around, witnesses, grammars."""

from __future__ import annotations

import json
import random
import re
import sys
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from niwaki.runtime.api import ConstraintError
from niwaki.runtime.constraints.guidance import build, byte_tokenizer
from niwaki.runtime.constraints.regex_language import Languages, Term, TooManyTerms, without
from niwaki.runtime.constraints.regex_lark import in_json, terminal
from niwaki.runtime.constraints.regex_meaning import found_in, matched_by
from niwaki.runtime.constraints.regex_parser import Parser
from niwaki.runtime.constraints.regex_tree import Ranges, holds, meet, normalised

TEXTS = ["".join(text) for size in range(5) for text in product("abc", repeat=size)] + ["a\nb", "é", '"', "\\n"]


def drawn(rng: random.Random, depth: int = 2) -> str:
    """A random regex, look-around and anchors at any place."""

    def atom(depth: int) -> str:
        kind = rng.random()
        if depth == 0 or kind < 0.4:
            return rng.choice(["a", "b", "[ab]", ".", "[^a]", "c"])
        if kind < 0.6:
            return f"(?:{drawn(rng, depth - 1)})"
        if kind < 0.7:
            return f"({rng.choice(['?=', '?!'])}{drawn(rng, depth - 1)})"
        if kind < 0.75:
            return f"({rng.choice(['?<=', '?<!'])}{rng.choice('ab')})"
        if kind < 0.85:
            return rng.choice("^$")
        return f"(?:{drawn(rng, depth - 1)}){rng.choice(['?', '*', '+', '{2}', '{1,2}', '{0,3}'])}"

    branches = ["".join(atom(depth) for _ in range(rng.randint(1, 3))) for _ in range(rng.choice([1, 1, 2]))]
    return "|".join(branches)


def searched(languages: Languages, pattern: str) -> Term:
    return found_in(languages, Parser(pattern).parse(), pattern)


def test_a_regex_means_what_re_finds_look_around_and_anchors_included() -> None:
    rng = random.Random(1)
    understood = 0
    for _ in range(400):
        pattern = drawn(rng)
        languages = Languages()
        try:
            expected = re.compile(pattern.replace("$", r"\Z"))
            found, whole = searched(languages, pattern), matched_by(languages, Parser(pattern).parse(), pattern)
        except (re.error, ConstraintError):
            continue
        understood += 1
        for text in rng.sample(TEXTS, 30):
            assert languages.holds(found, text) == bool(expected.search(text)), (pattern, text)
            assert languages.holds(whole, text) == bool(expected.fullmatch(text)), (pattern, text)
        witness = languages.shortest(found)
        if witness is None:
            assert not any(expected.search(text) for text in TEXTS), pattern
        else:
            assert expected.search(witness), (pattern, witness)
    assert understood > 300


def test_word_boundaries_and_looks_behind_inside_of_groups_mean_what_re_finds() -> None:
    def atom(depth: int) -> str:
        kind = rng.random()
        if depth == 0 or kind < 0.45:
            return rng.choice(["a", "-", "[a-]", ".", "[^a]", r"\w"])
        if kind < 0.6:
            return f"(?:{atom(depth - 1)}{atom(depth - 1)}|{atom(depth - 1)})"
        if kind < 0.7:
            return f"({rng.choice(['?<=', '?<!'])}{rng.choice(['a', '-', '[ab]'])})"
        if kind < 0.9:
            return rng.choice([r"\b", r"\b", r"\B", "(?!a)", "$"])
        return f"(?:{atom(depth - 1)}){rng.choice(['?', '+', '{2}', '{1,2}'])}"

    rng = random.Random(2)
    texts = ["".join(text) for size in range(6) for text in product("a-b", repeat=size)]
    understood = 0
    while understood < 100:
        pattern = "".join(atom(2) for _ in range(rng.randint(2, 4)))
        languages = Languages()
        try:
            expected = re.compile(pattern.replace("$", r"\Z"))
            found, whole = searched(languages, pattern), matched_by(languages, Parser(pattern).parse(), pattern)
        except (re.error, ConstraintError):
            continue
        understood += 1
        for text in (*rng.sample(texts[1:], 20), *texts[: sys.version_info < (3, 14)]):  # "" has no \B before
            assert languages.holds(found, text) == bool(expected.search(text)), (pattern, text)
            assert languages.holds(whole, text) == bool(expected.fullmatch(text)), (pattern, text)


def test_terms_become_terminals_of_the_same_texts_inside_a_json_string() -> None:
    rng = random.Random(2)
    tokenizer = byte_tokenizer()
    built = 0
    while built < 40:
        pattern = drawn(rng)
        languages = Languages()
        try:
            term = searched(languages, pattern)
        except ConstraintError:
            continue
        if languages.is_empty(term) is not False:
            continue
        built += 1
        start = build(f'start: S\nS: "\\"" {terminal(languages, term, in_json)} "\\""\n', tokenizer)
        for text in [*rng.sample(TEXTS, 12), '"', "\\n", "é"]:
            place = start.deep_copy()
            written = list(json.dumps(text, ensure_ascii=False).encode())
            accepted = place.try_consume_tokens(written) == len(written) and place.is_accepting()
            assert accepted == languages.holds(term, text), (pattern, text)


@pytest.mark.parametrize(
    ("pattern", "witness"),
    [
        (r"^.*\.md$", ".md"),
        (r"^(?!.*\.\.)[a-z][a-z.]{2,62}[a-z]$", "aaaa"),
        (r"^(?:(?!foo).)*$", ""),
        (r"^.{0,1000}$", ""),
        (r"^[^<>]*(?<!/)$", ""),
        (r"^(a|b)*a(a|b){20}$", "a" + 20 * "b"),
        (r"(?!a)a", None),
    ],
)
def test_a_short_text_of_a_regex_is_found_or_there_is_none(pattern: str, witness: str | None) -> None:
    languages = Languages()
    found = languages.shortest(searched(languages, pattern))
    assert found is None if witness is None else found is not None and len(found) == len(witness)
    assert found is None or re.search(pattern, found)


@pytest.mark.parametrize(
    ("pattern", "members"),
    [
        ("^(a|b|cd)$", ["a", "b", "cd"]),
        ("^[xy]{1,2}$", ["x", "y", "xx", "xy", "yx", "yy"]),
        ("^a*$", None),
        ("a", None),
    ],
)
def test_the_texts_of_a_finite_language_are_listed(pattern: str, members: list[str] | None) -> None:
    languages = Languages()
    found = languages.members(searched(languages, pattern), 10)
    assert members is None if found is None else sorted(found) == sorted(members or ())


def test_the_complement_and_the_intersection_of_two_regexes() -> None:
    languages = Languages()
    one, other = searched(languages, "^[ab]*$"), searched(languages, "b$")
    assert languages.shortest(languages.all_of((one, languages.none_of(other)))) == ""
    assert languages.is_empty(languages.all_of((one, searched(languages, "c")))) is True
    assert languages.is_empty(languages.all_of((other, languages.none_of(one)))) is False


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("(?:b|^c)*d", "inside an endless repeat"),
        ("a(?:b(?<=ab))", "for more than one character is supported at the outermost level only"),
        ("".join(f"(?:(?<!{letter})x)" for letter in "abcdefghijklmnop"), "tell more than 16 sets of characters apart"),
        (r"^\p{Greek}$", "not known one by one"),
    ],
)
def test_what_is_not_worked_out_is_refused(pattern: str, reason: str) -> None:
    with pytest.raises(ConstraintError, match=reason):
        searched(Languages(), pattern)


def test_a_language_that_explodes_is_given_up_in_time() -> None:
    languages = Languages()
    parts = [searched(languages, f"^(?:[ab]*a[ab]{{{count}}})*$") for count in (11, 13, 17, 19)]
    explosive = languages.all_of([*parts, searched(languages, "bbbbb")])
    with pytest.raises(TooManyTerms):
        languages.shortest(explosive, 300)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    one=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 3))),
    other=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12))),
)
def test_sets_of_characters_meet_as_sets_do(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> None:
    def members(ranges: Ranges) -> set[int]:
        return {code for low, high in ranges for code in range(low, min(high, 100) + 1)}

    some, others = (normalised((low, low + more) for low, more in ranges) for ranges in (one, other))
    assert members(meet(some, others)) == members(meet(others, some)) == members(some) & members(others)
    assert meet(some, others) == normalised(meet(some, others))
    assert {code for code in range(101) if holds(some, code)} == members(some)
    assert members(without(some, others)) == members(some) - members(others)
    assert without(some, others) == normalised(without(some, others))
