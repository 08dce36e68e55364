"""Looking around, stops and conjunctions: every text up to a length is judged as Python's re judges it."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator

import pytest
from interegular.fsm import FSM

from niwaki.runtime.api import AllOf, Choices, Constraint, ConstraintError, JsonSchema, Reasoned, Regex, StopRegex
from niwaki.runtime.constraints import ConstraintCompiler, Vocabulary, transitions
from niwaki.runtime.constraints.automaton import ByteDfa
from niwaki.runtime.constraints.matcher import AutomatonConstraint
from niwaki.runtime.constraints.pattern import Pattern, all_of, first_match, parse, request_of
from niwaki.runtime.requests.stops import StopText

VOCABULARY = Vocabulary([*(bytes([byte]) for byte in range(256)), None, b"ab", b"ba"], {256})


@pytest.fixture(scope="module")
def compiler() -> Iterator[ConstraintCompiler]:
    made = ConstraintCompiler(VOCABULARY, seconds=10)
    yield made
    made.close()


def texts(alphabet: str, longest: int) -> Iterator[str]:
    for length in range(longest + 1):
        yield from map("".join, itertools.product(alphabet, repeat=length))


def taken(pattern: Pattern, alphabet: str, longest: int) -> set[str]:
    """The texts that the automaton of a pattern takes."""
    automaton = transitions.automaton_of(request_of(pattern.expression))
    table: list[dict[int, int]] = [{} for _ in automaton.accepting]
    for source, label, target in zip(automaton.sources, automaton.labels, automaton.targets, strict=True):
        table[source][label] = target
    found = set()
    for text in texts(alphabet, longest):
        state: int | None = 0
        for byte in text.encode():
            state = None if state is None else table[state].get(byte)
        if state is not None and automaton.accepting[state]:
            found.add(text)
    return found


def matched(regex: str, alphabet: str, longest: int) -> set[str]:
    compiled = re.compile(regex)
    return {text for text in texts(alphabet, longest) if compiled.fullmatch(text)}


@pytest.mark.parametrize(
    "regex",
    [
        r"(?=.{0,3}\Z)[ab]+",
        r"(?:(?!ab).)*",
        r"(?!ab)[ab]*",
        r"[ab]*(?<=a)",
        r"[ab]*(?<!ab)b?",
        r"(?=.*a)(?=.*b)[ab]{0,5}",
        r"(?:a(?=b)|b(?=a|\Z))*",
        r"a\Z|b",
        r"(a|^)b*",
        r"(?:(?<=a)b|a|(?<!a)a)*",
        r"(?:(?=a)a|b)*",
        r"(?=(?!aa)a)[ab]*",
        r"(?:(?:(?<=b)|^)a|b)*",
        r"(?!.*(?:aa|bb))(?:[ab]{2})*",
        r"(?i:(?=AB)[ab]*)",
    ],
)
def test_a_look_around_is_what_re_takes_it_for(regex: str) -> None:
    assert taken(parse(regex), "ab", 7) == matched(regex, "ab", 7)


@pytest.mark.parametrize(
    ("regex", "alphabet"),
    [
        (r"\bab\b|a\Bb", "ab "),
        (r"(?:\b[ab]+\b ?)*", "ab "),
        (r"[ab ]*\b", "ab "),
        (r"(?m:^a$\n?)*", "a\n"),
        (r"(?m)(?:^[ab]$|\n)*", "ab\n"),
        (r"é(?=ü).(?<=ü)|(?!é).", "éüa"),
    ],
)
def test_boundaries_lines_and_characters_beyond_ascii(regex: str, alphabet: str) -> None:
    assert taken(parse(regex), alphabet, 5) == matched(regex, alphabet, 5)


def random_regex(rng: random.Random, depth: int, inside: str = "") -> str:
    kind = rng.randrange(8 if depth else 2)
    if kind < 2:
        return rng.choice(["a", "b", ".", "[ab]", "(?:)"])
    one = random_regex(rng, depth - 1, inside)
    if kind < 5:
        return one + random_regex(rng, depth - 1, inside)
    if kind == 5:
        return f"(?:{one}|{random_regex(rng, depth - 1, inside)})"
    if kind == 6:
        return f"(?:{one}){rng.choice(['*', '?', '{1,2}', '+'])}"
    opening = inside or rng.choice(["?=", "?!", "?<=", "?<!"])
    if opening.startswith("?<"):  # re wants them of one length
        return f"({opening}{rng.choice(['a', 'b', 'ab', 'ba', '.a'])})"
    return f"({rng.choice(['?=', '?!'])}{random_regex(rng, depth - 1, opening)})"


def test_random_regexes_with_look_arounds_are_judged_as_re_judges_them() -> None:
    rng = random.Random(11)
    for _ in range(60):
        regex = random_regex(rng, 4)
        assert taken(parse(regex), "ab", 5) == matched(regex, "ab", 5), regex


def test_a_stop_regex_ends_with_its_first_match() -> None:
    for regex in ("ab", "a+b", "b|aa", r"(?<=b)a", r"a\b", "[ab]{2}", "^ab"):
        compiled = re.compile(regex)
        expected = {
            text
            for text in texts("ab", 6)
            if any(match_ends(compiled, text, len(text)))
            and not any(end for length in range(len(text)) for end in match_ends(compiled, text[:length], length))
        }
        assert taken(first_match(regex), "ab", 6) == expected, regex


def match_ends(compiled: re.Pattern[str], text: str, end: int) -> Iterator[bool]:
    """Whether a match that begins at each place ends at `end`."""
    for start in range(end + 1):
        yield any(compiled.fullmatch(text, start, end) for _ in (0,))


def test_a_conjunction_is_the_intersection() -> None:
    patterns = ["[ab]*a[ab]{2}", "(?:a|bb)*", ".{3,5}", "(?!aaa).*"]
    every = set.intersection(*(matched(pattern, "ab", 6) for pattern in patterns))
    assert taken(all_of([parse(pattern) for pattern in patterns]), "ab", 6) == every
    assert every


def same(one: FSM, other: FSM) -> bool:
    return bool(one.equivalent(other))  # type: ignore[no-untyped-call]  # its types are partial


def fsm(pattern: Pattern) -> FSM:
    return transitions._fsm(transitions.automaton_of(request_of(pattern.expression)))


def test_laws_of_languages_hold_between_automata() -> None:
    one, other = "(?:ab|b)*", "b[ab]*"
    both = fsm(all_of([parse(one), parse(other)]))
    assert same(both, fsm(parse(f"(?=(?:{one})$){other}")))
    assert same(both, fsm(parse(one)) & fsm(parse(other)))
    assert same(fsm(parse(f"(?!(?:{other})$)(?:{one})")), fsm(parse(one)) - fsm(parse(other)))
    assert fsm(parse("(?!a)[ab]+")).isdisjoint(fsm(parse("a[ab]*")))
    assert fsm(all_of([parse("a+"), parse("b+")])).empty()  # type: ignore[no-untyped-call]  # as above


def accepts(compiler: ConstraintCompiler, constraint: Constraint, text: str) -> bool:
    matcher = compiler.compile(constraint).matcher()
    try:
        for byte in text.encode():
            matcher.accept(byte)
    except ConstraintError:
        return False
    return matcher.can_end


def test_they_are_constraints_of_generations(compiler: ConstraintCompiler) -> None:
    short = AllOf((Regex("[a-z]+( [a-z]+)*"), Regex("(?s).{0,9}")))
    assert accepts(compiler, short, "ab cd ef")
    assert not accepts(compiler, short, "ab cd ef gh")
    assert accepts(compiler, AllOf((Choices(("yes", "no", "perhaps")), Regex("[a-z]{3,}"))), "yes")
    assert not accepts(compiler, AllOf((Choices(("yes", "no")), Regex("[a-z]{3,}"))), "no")
    assert accepts(compiler, StopRegex(r"\d{2}"), "It is 42")
    assert not accepts(compiler, StopRegex(r"\d{2}"), "It is 427")
    ended = AllOf((StopRegex(r"\."), Regex("[A-Z].*")))
    assert accepts(compiler, ended, "Yes.")
    assert not accepts(compiler, ended, "Yes. No.")
    thought = Reasoned("<think>", "</think>", 20, short)
    assert accepts(compiler, thought, "<think>so</think>ab cd")
    password = Regex(r"(?=.*[0-9])(?=.*[A-Z])(?!.*\s)[!-~]{8,12}")
    assert accepts(compiler, password, "abcDEF12")
    assert not accepts(compiler, password, "abcdef12")


@pytest.mark.parametrize(
    ("constraint", "reason"),
    [
        (AllOf((Regex("a+"), Regex("b+"))), "the conjunction of regex 'a\\+' and regex 'b\\+' matches no text"),
        (AllOf(()), "at least one part"),
        (AllOf((Regex("a+"), Regex("(b"))), "regex '\\(b' is not valid at 3"),
        (AllOf((Regex("a+"), Choices(()))), "choices must hold at least one"),
        (StopRegex("a*"), "stop_regex 'a\\*' matches the empty text"),
        (StopRegex("(a"), "not valid"),
        (AllOf((Regex("(?:a{1,400}){1,400}"), Regex("a"))), "too large"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(
    compiler: ConstraintCompiler, constraint: Constraint, reason: str
) -> None:
    with pytest.raises(ConstraintError, match=reason):
        compiler.compile(constraint)


def test_one_that_grows_without_end_is_cut_off_in_its_process() -> None:
    compiler = ConstraintCompiler(VOCABULARY, seconds=1)
    with pytest.raises(ConstraintError, match="too complex"):
        compiler.compile(AllOf((Regex("[ab]*a[ab]{24}"), Regex("(?:[ab]*(?=ab))*[ab]*"))))
    assert accepts(compiler, Regex("(?=a)[ab]*"), "ab")  # another child works on
    compiler.close()


def test_text_stops_where_the_first_match_ends_however_it_arrives(compiler: ConstraintCompiler) -> None:
    def stopped(pattern: str, pieces: list[str], stops: tuple[str, ...] = ()) -> tuple[str, str | None]:
        ends = compiler.first_match(pattern)
        assert isinstance(ends, ByteDfa)
        watch = StopText(stops, pattern, ends)
        text = ""
        for piece in pieces:
            text += watch.push(piece)
            if watch.matched is not None:
                return text, watch.matched
        return text + watch.finish(), None

    text = "Ünder 12 or 345."
    for width in (1, 2, 5, 40):
        pieces = [text[at : at + width] for at in range(0, len(text), width)]
        assert stopped(r"\d+ or \d", pieces) == ("Ünder 12 or 3", r"\d+ or \d")
        assert stopped(r"\d{3}", pieces, ("12",)) == ("Ünder ", "12")
        assert stopped(r"\d", pieces, ("12",)) == ("Ünder 1", r"\d")
        assert stopped("^x", pieces) == (text, None)


def test_a_conjunction_holds_regular_parts_only(compiler: ConstraintCompiler) -> None:
    compiled = compiler.compile(AllOf((Regex("a|b"), Choices(("b", "c")))))
    assert isinstance(compiled, AutomatonConstraint)
    assert compiled.matcher().forced() == (ord("b"),)
    assert compiler.compile(JsonSchema('{"const":1}')).matcher().shortest_ending(9) is not None


@pytest.mark.parametrize("width", [1, 2])
def test_a_match_that_ends_early_is_passed_over_and_one_that_begins_there_is_not(
    width: int, compiler: ConstraintCompiler
) -> None:
    watch, text, shown = StopText((), "[0-9]+;", compiler.first_match("[0-9]+;")), "1; 2; 34; 5;", ""
    for at in range(0, len(text), width):
        shown += watch.push(text[at : at + width], is_early=at < 8)
        if watch.matched is not None:
            break
    assert (shown, watch.matched) == ("1; 2; 34;", "[0-9]+;")
