"""The regex dialect against Python's re, text by text: what of it is taken means the same, whatever is combined."""

from __future__ import annotations

import random
import re
import unicodedata
import warnings
from collections.abc import Iterator
from itertools import product

import pytest

from niwaki.runtime.api import ConstraintError, Regex
from niwaki.runtime.constraints import ConstraintCompiler, Vocabulary
from niwaki.runtime.constraints.regex_unicode import CATEGORIES, members
from tests.toy_constraints import takes

VOCABULARY = Vocabulary([*(bytes([b]) for b in range(256)), None], {256})
TEXTS = ["".join(text) for size in range(4) for text in product("aAb1-_ \n]^", repeat=size)]
ATOMS = [
    "a", "b", "A", "1", "-", " ", ".", r"\d", r"\D", r"\w", r"\W", r"\s", r"\S", "[ab]", "[^a]", "[a-b]", "[]a]",
    "[^]a]", "[a-]", "[-a]", r"[\d_]", r"[^\w]", r"[^\d\n]", r"[^\sA]", r"[\]a]", r"[a\-b]", r"\x61", r"\u0061",
    r"\n", r"\-", r"[\^a]", "[a^]", r"\]", "(?i:a)", "(?i:[^a])", r"\_", r"[\s\S]", "(?#x)", "]", "}", "{", "{1",
    "[!--]",
]  # fmt: skip
GROUPS = ["(?:%s)", "(%s)", "(?P<n>%s)", "(?i:%s)", "(?s:%s)", "(?m:%s)", "(?=%s)", "(?!%s)", "(?<=%s)", "(?<!%s)"]
REPEATS = ["?", "*", "+", "{2}", "{1,2}", "{0,3}", "{2,}", "{,2}", "*?", "+?", "??", "{1,2}?"]
ANCHORS = ["^", r"\b", r"\B", r"\Z", r"\A"]  # not $, which is the very end here
OF_EACH = [*map(unicodedata.category, map(chr, range(0x110000)))]
# Digits, other numbers, blanks, marks and some letters of all scripts.
CHARACTERS = [
    chr(code)
    for code in range(1, 0x20000)
    if unicodedata.category(chr(code)) in ("Cc", "Cf", "Nd", "Nl", "No", "Zl", "Zp", "Zs") or code < 0x600
]


@pytest.fixture(scope="module")
def compiler() -> Iterator[ConstraintCompiler]:
    compiler = ConstraintCompiler(VOCABULARY, seconds=20, max_bytes=1)
    yield compiler
    compiler.close()


def drawn(rng: random.Random, depth: int = 2) -> str:
    def piece() -> str:
        kind = rng.random()
        if depth == 0 or kind < 0.5:
            return rng.choice(ATOMS)
        if kind < 0.75:
            return rng.choice(GROUPS) % drawn(rng, depth - 1)
        if kind < 0.83:
            return rng.choice(ANCHORS)
        item = rng.choice(ATOMS) if rng.random() < 0.5 else f"(?:{drawn(rng, depth - 1)})"
        return item + rng.choice(REPEATS)

    branches = ["".join(piece() for _ in range(rng.randint(1, 3))) for _ in range(rng.choice([1, 1, 2]))]
    flags = rng.choice(["(?i)", "(?s)", "(?is)"]) if depth == 2 and rng.random() < 0.25 else ""
    return flags + "|".join(branches)


def test_what_is_taken_matches_as_python_does(compiler: ConstraintCompiler) -> None:
    taken = 0
    for seed in range(60):
        rng = random.Random(seed)
        pattern = drawn(rng)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # Python may give sets of sets a meaning one day
                expected = re.compile(pattern)
            matcher = compiler.compile(Regex(pattern)).matcher()
        except (re.error, ConstraintError):
            continue
        taken += 1
        for text in rng.sample(TEXTS, 60):
            assert takes(matcher, text) == bool(expected.fullmatch(text)), (pattern, text)
    assert taken > 25


@pytest.mark.parametrize("pattern", [r"\W", r"\S", r"\D", r"[^\w]", r"[^\s]", r"[^\d]", r"[\Sa]", r"(?i)[^\wa]"])
def test_what_is_no_word_blank_or_digit_is_none_to_python_and_to_ecmascript(
    compiler: ConstraintCompiler, pattern: str
) -> None:
    matcher = compiler.compile(Regex(pattern)).matcher()
    found = [character for character in CHARACTERS if takes(matcher, character)]
    assert [character for character in found if not re.fullmatch(pattern, character)] == []
    assert len(found) > 300
    if "s" in pattern.lower():
        assert not takes(matcher, "\ufeff")


@pytest.mark.parametrize(
    "pattern",
    [
        "(?i)[^a]", "(?i)[^A-C]", "(?i)[^i]", "(?i)[^ı]", "(?i)[^sK]", "(?i)[^éß]", "(?i:[^Θµ])", r"(?i)[^a\n]",
        "(?i)a", "(?i)[é-ü]",
    ],
)  # fmt: skip
def test_what_a_set_leaves_out_in_any_case_is_left_out_in_both(compiler: ConstraintCompiler, pattern: str) -> None:
    matcher = compiler.compile(Regex(pattern)).matcher()
    characters = [*map(chr, range(1, 0x600)), "\u1e9e", "\u2126", "\u212a", "\u03f4"]
    found = [character for character in characters if takes(matcher, character)]
    assert found == [character for character in characters if re.fullmatch(pattern, character)]


def test_a_comment_stands_between_a_character_and_its_repeat(compiler: ConstraintCompiler) -> None:
    matcher = compiler.compile(Regex("(?#one)a(?#two){2}(?#three)|b(?#four)*?(?#five)c")).matcher()
    assert [text for text in ("", "a", "aa", "aaa", "c", "bbc", "b") if takes(matcher, text)] == ["aa", "c", "bbc"]


def test_the_characters_of_a_category_are_those_of_python() -> None:
    for category in sorted(CATEGORIES):
        found = members(f"\\p{{{category}}}")
        assert found is not None
        codes = [code for low, high in found for code in range(low, high + 1)]
        assert codes == [code for code, one in enumerate(OF_EACH) if one.startswith(category)]
