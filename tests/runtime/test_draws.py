"""What a type's mask lets through, the type's own validator takes: random texts of every kind of type."""

from __future__ import annotations

from tests.benchmarks.draws import TYPES, faults


def test_random_texts_of_every_kind_of_type_are_complete_and_read_by_it() -> None:
    assert [*faults(draws=2 * len(TYPES), seed=1)] == []
