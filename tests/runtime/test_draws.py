"""What a type's mask lets through, the type's own validator takes: random texts of every kind of type."""

from __future__ import annotations

import random

from niwaki.lang.types import value_type
from niwaki.runtime.constraints import ConstraintCompiler
from tests.benchmarks.draws import TYPES, VOCABULARY, Visit, drawn, faults


def test_random_texts_of_every_kind_of_type_are_complete_and_read_by_it() -> None:
    assert [*faults(draws=2 * len(TYPES), seed=1)] == []


def test_what_is_admitted_near_the_end_of_a_budget_ends_within_it() -> None:
    """Also where the ending that a token was admitted for is another one than was known before."""
    rng = random.Random(5)
    compiler = ConstraintCompiler(VOCABULARY, seconds=20)
    try:
        compiled = compiler.compile(value_type(Visit).constraint)
        assert None not in [drawn(compiled, rng, rng.choice((0, 3, 12, 40))) for _ in range(24)]
    finally:
        compiler.close()
