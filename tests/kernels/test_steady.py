"""A steady batch's step in one call: all arrays move on, or none does."""

from __future__ import annotations

import numpy as np
import pytest

from niwaki.kernels.segments import Int32s, Int64s
from niwaki.kernels.steady import take_highest


def arrays_of(rows: int) -> tuple[Int32s, Int32s, Int64s, Int64s]:
    return np.full(rows, 7, np.int32), np.full(rows, 7, np.int32), np.arange(rows), np.zeros((rows, 3), np.int64)


def test_the_highest_of_each_row_is_taken_a_position_further() -> None:
    values = np.random.default_rng(1).normal(size=(5, 40)).astype(np.float32)
    best = values.argmax(axis=1)
    token_ids, kept, starts, positions = arrays_of(5)
    assert take_highest(values, best, np.zeros(40, np.bool_), token_ids, kept, starts, positions)
    assert token_ids.tolist() == kept.tolist() == best.tolist()
    assert starts.tolist() == [1, 2, 3, 4, 5]
    assert positions.tolist() == [[0, 0, 1]] * 5


@pytest.mark.parametrize("what", ["ends", np.nan, np.inf, -np.inf])
def test_where_one_must_be_looked_at_nothing_is_changed(what: str | float) -> None:
    values = np.random.default_rng(1).normal(size=(5, 40)).astype(np.float32)
    may_end = np.zeros(40, np.bool_)
    if what == "ends":
        may_end[values[4].argmax()] = True
    else:
        values[4] = what
    arrays = arrays_of(5)
    assert not take_highest(values, values.argmax(axis=1), may_end, *arrays)
    assert [one.tolist() for one in arrays] == [fresh.tolist() for fresh in arrays_of(5)]
