"""The sort of kernels is NumPy's stable one."""

from __future__ import annotations

import numpy as np
import pytest

from niwaki.kernels.order import RUN, stable_order


@pytest.mark.parametrize("count", [0, 1, 2, RUN, RUN + 1, 2 * RUN, 3 * RUN + 5, 1000])
@pytest.mark.parametrize("kinds", [1, 3, 10**6])
def test_keys_are_in_order_and_equal_ones_as_they_stood(count: int, kinds: int) -> None:
    keys = np.random.default_rng(count).integers(-kinds, kinds, count)
    for kind in (np.int64, np.float32):
        some = keys.astype(kind)
        assert stable_order(some).tolist() == np.argsort(some, kind="stable").tolist()


def test_infinities_are_at_the_ends() -> None:
    keys = np.array([1.0, np.inf, -np.inf, 0.0, -0.0, np.inf, -1.0], np.float32)
    assert stable_order(keys).tolist() == [2, 6, 3, 4, 0, 1, 5]
