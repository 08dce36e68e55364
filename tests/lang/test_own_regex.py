"""A program's regexes: all of the dialect is taken, a fault has its place, and scripted answers must match."""

from __future__ import annotations

import re
import warnings
from typing import Final

import pytest

import niwaki as nw
from niwaki.lang.own_regex import fault_of, is_excluded
from niwaki.lang.state import State
from niwaki.runtime.constraints.regex_parser import parsed

BEYOND_PYTHON: Final = [
    r"\p{L}{3}",
    r"[\p{Lu}\d]{3}",
    r"\pL+",
    r"\x{e9}",
    r"[\x{1F600}a]",
    r"a\z",
    r"(?<year>\d{4})",
    r"ab*(?<=b*)c",
    r"x+(?<!xxx|x)y",
    r"\\p\p{L}",
    r"[a-\x{e9}]",
    r"[\p{L}-]",
]


@pytest.mark.parametrize("pattern", BEYOND_PYTHON)
def test_what_only_our_dialect_has_is_taken(pattern: str) -> None:
    with pytest.raises(re.error):
        re.compile(pattern)
    parsed(pattern)
    nw.gen("x", regex=pattern)
    nw.gen("x", stop_regex=pattern)


@pytest.mark.parametrize("pattern", ["[[a]", "[a&&b]", "[a||b]", "[a~~b]", "[+--]"])
def test_a_set_that_python_warns_of_is_taken_in_silence(pattern: str) -> None:
    parsed(pattern)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nw.gen("x", regex=pattern)
        assert is_excluded("%", pattern)


@pytest.mark.parametrize(
    ("pattern", "place", "reason"),
    [
        (r"\p{L}(a", 6, "missing \\), unterminated subpattern"),
        (r"(?<year>\d)\p{L})", 17, "unbalanced parenthesis"),
        (r"\x{e9}[z-a]", 8, "bad character range z-a"),
        (r"(?<=a*)(b", 8, "missing \\), unterminated subpattern"),
        (r"[&&]\h", 5, r"bad escape \\h"),
        (r"\\z{2}(", 7, "missing \\), unterminated subpattern"),
        (r"(?#[)[||\x{e9}]\x{e9}[z-a]", 23, "bad character range z-a"),
        (r"[~-a]", 2, "bad character range ~-a"),
        (r"[a-\p{L}]", 2, "bad character range"),
        (r"(?<a b>x)", 4, "bad character in group name"),
    ],
)
def test_a_fault_beside_it_is_told_at_its_place(pattern: str, place: int, reason: str) -> None:
    with pytest.raises(nw.ConstraintError, match=f"is not valid at {place}: {reason}"):
        nw.gen("x", regex=pattern)


@pytest.mark.parametrize(
    ("pattern", "matching", "other"),
    [
        (r"\x{e9}+", "éé", "e"),
        (r"[\x{1F600}[]{2}", "😀[", "a["),
        (r"(?<year>\d{4})\z", "2026", "26"),
        (r"[&&a]+", "a&", "b"),
        (r"[+--]+", "+,-", "."),
        (r"(?<n>a)(?<m>b)", "ab", "ba"),
        (r"[a-~]+", "a~", "A"),
        (r"[Z-[|&-)]+", "Z[|&')", "-"),
        (r"[a-\x{e9}]+", "aé", "A"),
        (r"[--/]+", "-./", "0"),
        (r"[^--/]+", "0", "."),
        (r"(?#[)a[b]", "ab", "a[b]"),
        (r"(?#(?<)[|]", "|", "["),
        (r"(?#a\)[)b", "b", "[b"),
    ],
)
def test_a_scripted_answer_is_held_to_it(pattern: str, matching: str, other: str) -> None:
    def body(s: State) -> None:
        s += "Go: " + nw.gen("x", regex=pattern)

    assert nw.function(body).run(backend=nw.ScriptedBackend([matching]))["x"] == matching
    with pytest.raises(nw.ConstraintError, match="does not match the regex"):
        nw.function(body).run(backend=nw.ScriptedBackend([other])).sync()


@pytest.mark.parametrize("pattern", [r"\p{L}+", r"ab*(?<=b*)c"])
def test_a_scripted_answer_passes_where_python_cannot_tell(pattern: str) -> None:
    assert not is_excluded("anything", pattern)


def test_a_backslash_before_a_p_is_no_property() -> None:
    assert is_excluded("p", r"\\p")
    assert not is_excluded("\\p", r"\\p")


def test_a_scripted_answer_is_held_to_each_of_several_regexes() -> None:
    def body(s: State) -> None:
        s += "Go: " + nw.gen("x", regex=["[a-z]+", "(?!.*ss).*"])

    assert nw.function(body).run(backend=nw.ScriptedBackend(["as"]))["x"] == "as"
    with pytest.raises(nw.ConstraintError, match=r"'ass' does not match the regex '\(\?!"):
        nw.function(body).run(backend=nw.ScriptedBackend(["ass"])).sync()


def test_what_python_reads_stays_as_python_reads_it() -> None:
    patterns = (r"[]a]", r"[^]a]", r"[^[]", r"(?P<n>a)(?:b|c)", r"a{2,3}?", r"\[(?=a)", r"{\"a\": [0-9]+}", r"(?<!a)b")
    for pattern in patterns:
        assert fault_of(pattern) is None
        for text in ("]", "a", "[", "b", "ab", "aa", "", "b]"):
            with warnings.catch_warnings(action="ignore"):
                assert is_excluded(text, pattern) == (re.fullmatch(pattern, text) is None), (pattern, text)
