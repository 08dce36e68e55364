"""What a type's mask lets through, the type's own validator takes: random texts of every kind of type.

NIWAKI_DRAWS=10000 draws so many of them.
"""

from __future__ import annotations

import datetime
import os
import random
from collections import Counter, OrderedDict
from collections.abc import Iterator
from typing import Annotated

import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from niwaki.lang.types import value_type
from niwaki.runtime.constraints import ConstraintCompiler
from tests.benchmarks.draws import SPARE, TYPES, VOCABULARY, Visit, drawn, fault, faults

DRAWS = int(os.environ.get("NIWAKI_DRAWS", "60"))


@pytest.fixture(scope="module")
def compiler() -> Iterator[ConstraintCompiler]:
    made = ConstraintCompiler(VOCABULARY, seconds=20)
    yield made
    made.close()


@settings(max_examples=DRAWS, deadline=None)
@given(which=st.integers(0, len(TYPES) - 1), seed=st.integers(0, 2**32 - 1), spare=st.sampled_from(SPARE))
def test_random_texts_of_every_kind_of_type_are_complete_and_read_by_it(
    compiler: ConstraintCompiler, which: int, seed: int, spare: int
) -> None:
    kind = value_type(TYPES[which])
    assert fault(kind, compiler.compile(kind.constraint), random.Random(seed), spare) is None


def test_keys_and_limits_that_the_types_validator_asks_for_are_held() -> None:
    kinds: list[object] = [
        dict[int, str],
        dict[Annotated[str, pydantic.Field(pattern="^a+$", max_length=3)], int],
        dict[datetime.date, int],
        dict[pydantic.UUID4, int],
        dict[str, OrderedDict[int, bool]],
        Counter[int],
        Annotated[pydantic.AnyUrl, pydantic.Field(max_length=12)],
    ]
    assert [*faults(draws=10 * len(kinds), seed=1, types=kinds)] == []


def test_what_is_admitted_near_the_end_of_a_budget_ends_within_it() -> None:
    """Also where the ending that a token was admitted for is another one than was known before."""
    rng = random.Random(5)
    compiler = ConstraintCompiler(VOCABULARY, seconds=20)
    try:
        compiled = compiler.compile(value_type(Visit).constraint)
        assert None not in [drawn(compiled, rng, rng.choice((0, 3, 12, 40))) for _ in range(24)]
    finally:
        compiler.close()
