"""Masks, distances and endings against an oracle of its own kind: Brzozowski derivatives over characters."""

from __future__ import annotations

import random
import re
from functools import cache
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from niwaki.runtime.api import Choices, Constraint, ConstraintError, Regex
from niwaki.runtime.constraints import ConstraintCompiler, Matcher, Vocabulary, compile_constraint, token_graph
from niwaki.runtime.constraints.matcher import AutomatonConstraint
from tests.runtime.derivatives import Oracle, Place, can_end, random_regex

END = 0


def vocabulary_of(*texts: bytes | None, size: int | None = None) -> Vocabulary:
    return Vocabulary((None, *texts), {END}, size)


BYTES_AND_WORDS = vocabulary_of(
    b"a", b"b", b"\xc3", b"\xa9", b"\xb8", b"ab", b"aab", "é".encode(), "aé".encode(), b"b\xc3",
    b"\xa9a", b"a", b"", None, size=70,
)  # fmt: skip
NO_SINGLES = vocabulary_of(b"ab", b"ba", b"aa", "éa".encode(), b"\xc3", b"\xb8b", b"bbb", size=9)


@pytest.fixture(scope="module")
def compilers() -> object:
    made = [ConstraintCompiler(BYTES_AND_WORDS, seconds=20), ConstraintCompiler(NO_SINGLES, seconds=20)]
    yield made
    for compiler in made:
        compiler.close()


def bits_of(row: np.ndarray) -> set[int]:
    return {int(i) for i in np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))}


def mask_of(matcher: Matcher, vocabulary: Vocabulary, remaining: int | None = None) -> set[int]:
    row = np.full(vocabulary.num_words, 0xFFFFFFFF, np.uint32)
    if remaining is None:
        matcher.fill_mask(row)
    else:
        matcher.fill_mask_within(row, remaining)
    return bits_of(row)


def with_end(tokens: set[int], place: Place) -> set[int]:
    return tokens | {END} if can_end(place) else tokens


# ---------------------------------------------------------------------------------------------------------------
# Claims
# ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", [0, 1], ids=["bytes and words", "no single bytes"])
def test_masks_distances_and_endings_are_those_of_the_oracle_at_every_place(
    which: int, compilers: list[ConstraintCompiler]
) -> None:
    rng = random.Random(which)
    compiler = compilers[which]
    vocabulary = compiler.vocabulary
    satisfiable = 0
    for _ in range(150):
        text, node = random_regex(rng, 4)
        oracle = Oracle(node, vocabulary)
        start = (node, b"")
        if start not in oracle.distances:
            with pytest.raises(ConstraintError):
                compiler.compile(Regex(text))
            continue
        satisfiable += 1
        compiled = compiler.compile(Regex(text))
        for place, path in oracle.paths.items():
            if place not in oracle.distances:
                continue
            matcher = compiled.matcher()
            for token_id in path:
                matcher.accept(token_id)
            distance = oracle.distances[place]
            assert mask_of(matcher, vocabulary) == with_end(oracle.allowed(place), place), text
            assert matcher.can_end == can_end(place), text
            assert matcher.distance == distance, text
            assert matcher.is_done == (can_end(place) and not oracle.allowed(place)), text
            assert matcher.shortest_ending(distance - 1) is None
            ending = matcher.shortest_ending(distance)
            assert ending is not None
            assert len(ending) == distance
            for remaining in range(distance, distance + 4):
                expected = with_end(oracle.allowed(place, remaining), place)
                assert mask_of(matcher, vocabulary, remaining) == expected, (text, remaining)
            for token_id in set(range(vocabulary.size)) - oracle.allowed(place) - {END}:
                with pytest.raises(ConstraintError, match="not allowed"):
                    matcher.accept(token_id)
            for token_id in ending:
                matcher.accept(token_id)
            assert matcher.can_end
    assert satisfiable > 40


def test_regexes_accept_the_strings_that_python_accepts(compilers: list[ConstraintCompiler]) -> None:
    rng = random.Random(5)
    strings = ["".join(s) for n in range(7) for s in product("abé", repeat=n)]
    for _ in range(200):
        text, _ = random_regex(rng, 5)
        if not (wanted := [s for s in strings if re.fullmatch(text, s)]):
            continue
        compiled = compilers[0].compile(Regex(text))
        assert isinstance(compiled, AutomatonConstraint)
        assert [s for s in strings if compiled.dfa.accepts(s.encode())] == wanted, text


@pytest.mark.parametrize(
    ("pattern", "accepted", "refused"),
    [
        # Only what Python and ECMAScript both take for the class, and nothing that either leaves out of its complement.
        (r"\d{4}-[\d]\d", ["2024-01"], ["2024-1", "2024-011", "abcd-01", "١٢٣٤-٥٦"]),
        (r"\w+", ["a_1"], ["", "a b", "a-", "größe", "名前"]),
        (r"\W", ["-", "€"], ["a", "ö", "名"]),
        (r"[^\w]", ["-", "€"], ["a", "ö", "名"]),
        (r"[^\W\d]+", ["size"], ["a1", " ", "größe"]),
        (r"[^\d]", ["a", "é"], ["1", "١"]),
        (r"\s", [" ", "\t"], ["a", "  ", "\u2003"]),
        (r"\S", ["a", "é"], [" ", "\u2003"]),
        (r".", ["é", "€", "😀", "\r"], ["\n", "", "ab"]),
        (r"(?s).", ["\n", "😀"], [""]),
        (r"(?i)ja|nein", ["JA", "nEiN"], ["jane"]),
        (r"(?i:a)b", ["Ab", "ab"], ["AB"]),
        (r"^(?:a|b)$", ["a", "b"], ["ab", "a\n"]),
        (r"\A(^|,)x\Z", ["x", ",x"], ["", ",,x"]),
        (r"[]a-]+\]", ["]]", "-a]"], ["a"]),
        (r"\x41\u00e9\U0001F600\x{1F600}\101?", ["Aé😀😀"], ["A"]),
        (r'{"a": [0-9]{1,2}}', ['{"a": 7}', '{"a": 42}'], ['{"a": 123}']),
        (r"a{,2}b", ["b", "ab", "aab"], ["aaab"]),
        (r"\p{Lu}\P{L}", ["É1"], ["é1", "ÉE"]),
        (r"(?P<year>[12]\d)(?#note)(?<m>x)?", ["19", "20x"], ["x"]),
        (r"[\x00-\x1f]", ["\x00", "\x1f"], [" "]),
    ],
)
def test_the_dialect_means_what_it_says(
    pattern: str, accepted: list[str], refused: list[str], compilers: list[ConstraintCompiler]
) -> None:
    if r"\101" in pattern:
        with pytest.raises(ConstraintError, match="back-reference"):
            compilers[0].compile(Regex(pattern))
        pattern = pattern.replace(r"\101?", "")
    everything = Vocabulary([bytes([b]) for b in range(256)], ())
    compiled = compile_constraint(Regex(pattern), everything, seconds=20)
    assert isinstance(compiled, AutomatonConstraint)
    assert [s for s in accepted if not compiled.dfa.accepts(s.encode())] == []
    assert [s for s in refused if compiled.dfa.accepts(s.encode())] == []


def test_choices_are_exactly_the_texts_given(compilers: list[ConstraintCompiler]) -> None:
    rng = random.Random(1)
    strings = ["".join(s) for n in range(6) for s in product("abé", repeat=n)]
    for size in (1, 2, 5, 40):
        chosen = rng.sample(strings, size)
        compiled = compilers[0].compile(Choices(tuple(chosen)))
        assert isinstance(compiled, AutomatonConstraint)
        assert [s for s in strings if compiled.dfa.accepts(s.encode())] == [s for s in strings if s in chosen]


def test_a_choice_that_begins_another_may_end_or_go_on() -> None:
    matcher = compile_constraint(Choices(("a", "ab", "")), BYTES_AND_WORDS).matcher()
    assert (matcher.can_end, matcher.is_done) == (True, False)
    assert mask_of(matcher, BYTES_AND_WORDS) == {END, 1, 6, 12}
    matcher.accept(1)
    assert mask_of(matcher, BYTES_AND_WORDS) == {END, 2}
    matcher.accept(2)
    assert matcher.is_done
    assert mask_of(matcher, BYTES_AND_WORDS) == {END}


def test_ten_thousand_choices_match_themselves_and_only_themselves() -> None:
    rng = random.Random(3)
    choices = tuple({"".join(rng.choices("abcdefgh ", k=rng.randint(3, 30))) for _ in range(10_000)})
    vocabulary = Vocabulary([bytes([b]) for b in range(256)] + [b"ab", b"cd", b"abc"], ())
    compiled = compile_constraint(Choices(choices), vocabulary)
    assert isinstance(compiled, AutomatonConstraint)
    assert all(compiled.dfa.accepts(choice.encode()) for choice in choices)
    known = set(choices)
    others = [choice[:-1] + "z" for choice in choices] + [choice[:-1] for choice in choices if choice[:-1] not in known]
    assert not any(compiled.dfa.accepts(other.encode()) for other in others)


def test_an_end_token_ends_the_text_and_can_be_taken_back() -> None:
    matcher = compile_constraint(Regex("a+"), BYTES_AND_WORDS).matcher()
    with pytest.raises(ConstraintError, match="token 0 is not allowed"):
        matcher.accept(END)
    matcher.accept(1)
    matcher.accept(END)
    assert (matcher.is_done, matcher.distance) == (True, 0)
    assert mask_of(matcher, BYTES_AND_WORDS) == {END}
    with pytest.raises(ConstraintError):
        matcher.accept(1)
    matcher.rollback(1)
    assert not matcher.is_done
    matcher.accept(1)
    with pytest.raises(ConstraintError, match="cannot take back 3 tokens of 2"):
        matcher.rollback(3)


def test_forced_tokens_are_those_that_every_mask_has_alone() -> None:
    vocabulary = vocabulary_of(b"a", b"b", b"c", b"bc")
    matcher = compile_constraint(Regex("aaa(b|c)|aaab+"), vocabulary).matcher()
    assert matcher.forced() == (1, 1, 1)
    assert compile_constraint(Regex("abc"), vocabulary).matcher().forced() == (1,)  # then b c, or bc
    assert compile_constraint(Regex("a?"), vocabulary).matcher().forced() == ()  # it may end instead


def test_a_row_of_signed_words_takes_the_same_bits() -> None:
    matcher = compile_constraint(Regex("[ab]+"), BYTES_AND_WORDS).matcher()
    row = np.zeros(BYTES_AND_WORDS.num_words, np.int32)
    matcher.fill_mask(row)
    assert bits_of(row) == mask_of(matcher, BYTES_AND_WORDS)


WALKED: tuple[Constraint, ...] = (
    Regex("(a|b)*éa{2,4}"),
    Regex("[^a]{3,}b|a*"),
    Choices(("ab", "abé", "aab", "øø", "")),
)


@given(
    constraint=st.sampled_from(WALKED),
    picks=st.lists(st.integers(0, 50), max_size=12),
    back=st.integers(0, 12),
    budget=st.integers(0, 12),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_rollback_and_clone_leave_a_matcher_as_one_that_took_the_same_tokens(
    constraint: Constraint, picks: list[int], back: int, budget: int
) -> None:
    compiled = compiled_once(constraint)
    matcher = compiled.matcher()
    taken: list[int] = []
    for pick in picks:
        options = sorted(mask_of(matcher, BYTES_AND_WORDS) - {END})
        if not options:
            break
        taken.append(options[pick % len(options)])
        before = matcher.clone()
        matcher.accept(taken[-1])
        assert mask_of(before, BYTES_AND_WORDS) >= {taken[-1]}
    back = min(back, len(taken))
    clone = matcher.clone()
    matcher.rollback(back)
    fresh = compiled.matcher()
    for token_id in taken[: len(taken) - back]:
        fresh.accept(token_id)
    assert mask_of(matcher, BYTES_AND_WORDS) == mask_of(fresh, BYTES_AND_WORDS)
    assert (matcher.can_end, matcher.distance) == (fresh.can_end, fresh.distance)
    for token_id in taken[len(taken) - back :]:
        matcher.accept(token_id)
    assert mask_of(matcher, BYTES_AND_WORDS) == mask_of(clone, BYTES_AND_WORDS)
    assert matcher.shortest_ending(budget) == clone.shortest_ending(budget)


@cache
def compiled_once(constraint: Constraint) -> AutomatonConstraint:
    compiled = compile_constraint(constraint, BYTES_AND_WORDS, seconds=20)
    assert isinstance(compiled, AutomatonConstraint)
    return compiled


def run_out(compiled: AutomatonConstraint, budget: int, rng: random.Random) -> Matcher:
    """A text of random allowed tokens, never ended while it may go on, within the budget."""
    matcher = compiled.matcher()
    for remaining in range(budget, 0, -1):
        options = sorted(mask_of(matcher, compiled.vocabulary, remaining) - {END})
        if not options:
            break
        matcher.accept(rng.choice(options))
    return matcher


WIDE = Vocabulary([None, *(bytes([b]) for b in range(256)), b"ab", b"b}", b'"}', "éa".encode()], {END})


@pytest.mark.parametrize("is_exact", [True, False])
def test_out_of_budget_the_text_ends_complete_where_any_text_fits(
    is_exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(0)
    for pattern in (r'\{"a": "[ab é]{0,9}"\}', "(ab|b)*(é|a{7})", "ab{3}(ab)+"):
        monkeypatch.setattr(token_graph, "MAX_VISITS", 20_000_000 if is_exact else 0)
        compiled = compile_constraint(Regex(pattern), WIDE, seconds=20)
        assert isinstance(compiled, AutomatonConstraint)
        assert compiled.is_exact == is_exact
        for budget in range(14):
            monkeypatch.setattr(token_graph, "MAX_VISITS", 20_000_000)  # of searches from here on
            fits = compiled.matcher().shortest_ending(budget) is not None
            for _ in range(10):
                assert run_out(compiled, budget, rng).can_end == fits, (pattern, budget)


def test_a_constraint_too_large_to_measure_gives_the_same_masks_and_endings(monkeypatch: pytest.MonkeyPatch) -> None:
    pattern = Regex(r'\{"a": "[ab é]{0,9}"\}|(ab)*')
    exact = compile_constraint(pattern, WIDE, seconds=20)
    monkeypatch.setattr(token_graph, "MAX_VISITS", 0)
    rough = compile_constraint(pattern, WIDE, seconds=20)
    rng = random.Random(0)
    for searches in (0, 20_000_000):
        monkeypatch.setattr(token_graph, "MAX_VISITS", searches)
        pair = exact.matcher(), rough.matcher()
        for _ in range(12):
            masks = [mask_of(one, WIDE) for one in pair]
            assert masks[0] == masks[1]
            assert pair[0].distance <= pair[1].distance
            endings = [one.shortest_ending(40) for one in pair]
            assert all(ending is not None for ending in endings)
            assert len(endings[0] or ()) == pair[0].distance
            if searches:
                assert len(endings[1] or ()) == pair[0].distance
            ended = pair[1].clone()
            for token_id in endings[1] or ():
                ended.accept(token_id)
            assert ended.can_end
            options = sorted(masks[0] - {END})
            if not options:
                break
            token_id = rng.choice(options)
            for one in pair:
                one.accept(token_id)


def test_rows_are_dropped_when_they_outgrow_their_memory_and_stay_right() -> None:
    free = compile_constraint(Regex("abcdefghij"), WIDE, seconds=20)
    assert isinstance(free, AutomatonConstraint)
    tight = AutomatonConstraint(free.dfa, WIDE, max_row_bytes=200)
    for _ in range(2):
        pair = free.matcher(), tight.matcher()
        for token_id in range(98, 107):
            for one in pair:
                one.accept(token_id)
            assert mask_of(pair[0], WIDE) == mask_of(pair[1], WIDE)
    assert tight.num_bytes < free.num_bytes
