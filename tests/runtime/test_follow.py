"""A token that is followed in one call is judged, accepted and looked behind as by one call for each, also where the
places it leads through are known from other texts."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest

from niwaki.runtime.api import Choices, Constraint, Grammar, JsonSchema, Reasoned, Regex
from niwaki.runtime.constraints import ConstraintCompiler, Matcher
from niwaki.runtime.constraints.grammar_endings import EndingSearch
from niwaki.runtime.constraints.guidance import Native
from niwaki.runtime.constraints.masks import MaskFiller
from niwaki.runtime.constraints.protocol import ANY_LENGTH, Followed, follow
from tests.toy_constraints import make_compiler

CONSTRAINTS: list[Constraint] = [
    Grammar(r"start: /(.|\n)*/"),
    Grammar('start: "<" /[^>]/* ">"'),
    JsonSchema('{"type": "object", "additionalProperties": {"type": "array", "items": {"type": "integer"}}}'),
    JsonSchema('{"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}'),
    Regex("(?s).*"),
    Regex("(?:[a-z]{3}, )*[a-z]{3}[.]"),
    Choices(("a" * 9, "a" * 8 + "bc", "dead end")),
    Reasoned("<t>", "</t>", 4, Regex("[a-z]{3,}")),
]


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConstraintCompiler]:
    with closing(make_compiler(tmp_path_factory.mktemp("toy"))) as made:
        yield made


def allowed(matcher: Matcher, remaining: int, num_words: int) -> list[int]:
    row = np.zeros(num_words, np.uint32)
    matcher.fill_mask_within(row, remaining)
    found: list[int] = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()
    return found


@pytest.mark.parametrize("constraint", CONSTRAINTS, ids=lambda constraint: type(constraint).__name__)
@pytest.mark.parametrize("budget", [7, 40, 2000])
def test_what_is_followed_is_what_single_calls_tell(
    constraint: Constraint, budget: int, compiler: ConstraintCompiler
) -> None:
    compiled = compiler.compile(constraint)
    num_words = compiler.vocabulary.num_words
    filler = MaskFiller(num_words)
    found: Counter[Followed] = Counter()
    num_known = 0
    for text in range(60):
        draw = random.Random(text % 15)  # each text four times: later ones by known places
        one, other = compiled.matcher(), compiled.matcher()
        num_accepted = 0
        for remaining in range(budget, max(0, budget - 40), -1):
            if text % 15 == 14 and num_accepted > 3 and draw.random() < 0.3:
                back = draw.randint(1, 3)
                one.rollback(back)
                other.rollback(back)
                num_accepted -= back
            if one.is_done:
                break
            (row,) = filler.start([other]).rows()  # learns it
            assert isinstance(row, np.ndarray)
            token_id = draw.choice(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())
            told = follow(other, token_id, remaining)
            is_known = one.step(token_id, remaining)
            assert (Followed.FREE if is_known else one.follow(token_id, remaining)) is told
            assert not is_known or one.known_mask(ANY_LENGTH) is not None  # as a step asks for it
            num_known += is_known
            found[told] += 1
            num_accepted += told is not Followed.REFUSED
            if draw.random() < 0.2:
                assert one.can_end == other.can_end
                one = one.clone()
            assert one.fits(remaining - 1) == other.fits(remaining - 1)
            if draw.random() < 0.2:
                assert allowed(one, remaining - 1, num_words) == allowed(other, remaining - 1, num_words)
        assert one.shortest_ending(50) == other.shortest_ending(50)
        one.rollback(num_accepted)
        assert allowed(one, budget, num_words) == allowed(compiled.matcher(), budget, num_words)
    filler.close()
    assert found[Followed.FREE] + found[Followed.BOUND] > 60
    assert num_known > 60 or budget < 2000 or not isinstance(constraint, Grammar | JsonSchema | Regex)


def test_what_others_have_written_is_not_told_to_the_native_matcher_until_it_is_asked(
    compiler: ConstraintCompiler,
) -> None:
    compiled = compiler.compile(CONSTRAINTS[0])
    token_id = compiler.vocabulary.token_bytes.index(b"a")
    first, later = compiled.matcher(), compiled.matcher()
    filler = MaskFiller(compiler.vocabulary.num_words)
    for _ in range(5):
        filler.start([first]).rows()
        assert first.follow(token_id, 50) is Followed.FREE
    filler.start([first]).rows()
    filler.close()
    for _ in range(5):
        assert later.step(token_id, 50)
    assert later._num_untold == 5  # type: ignore[attr-defined]
    later.rollback(2)
    assert later._num_untold == 3  # type: ignore[attr-defined]
    assert later.can_end
    assert later.native is not None  # type: ignore[attr-defined]
    assert later._num_untold == 0  # type: ignore[attr-defined]
    later.rollback(3)
    assert allowed(later, 50, compiler.vocabulary.num_words) == allowed(
        compiled.matcher(), 50, compiler.vocabulary.num_words
    )


def test_the_last_part_of_a_composed_constraint_keeps_the_ending_that_it_has_found(
    compiler: ConstraintCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = JsonSchema(
        '{"type": "array", "items": {"type": "object", "properties": {"a": {"type": "integer", "minimum": 100}, '
        '"b": {"type": "string", "pattern": "^[a-c]{3,}(xy|zzz)$"}}, "required": ["a", "b"]}, "minItems": 2}'
    )
    num_searches = 0
    known_end = EndingSearch.known_end

    def counted(search: EndingSearch, place: Native, enough: int = 0) -> bytes | None:
        nonlocal num_searches
        num_searches += 1
        return known_end(search, place, enough)

    monkeypatch.setattr(EndingSearch, "known_end", counted)
    tokens = compiler.vocabulary.token_bytes
    for seed in range(12):
        found = []
        for kind, before in ((schema, b""), (Reasoned("<t>", "</t>", 4, schema), b"<t>a</t>")):
            matcher = compiler.compile(kind).matcher()
            for byte in before:
                matcher.accept(tokens.index(bytes([byte])))
            draw, num_searches = random.Random(seed), 0
            text: list[int] = []
            for remaining in range(60 + 5 * seed, 0, -1):
                drawn = allowed(matcher, remaining, compiler.vocabulary.num_words)
                draw.shuffle(drawn)
                text.append(next(token_id for token_id in drawn if matcher.admits(token_id, remaining)))
                matcher.accept(text[-1])
                if text[-1] in compiler.vocabulary.eos_ids:
                    break
            assert matcher.can_end
            found.append((text, num_searches))
        assert found[0] == found[1]
        assert found[0][1] > 0
