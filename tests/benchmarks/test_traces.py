"""A few of the traces that `python -m tests.benchmarks.traces` and `mixed` run by the thousand."""

from __future__ import annotations

import pytest

from tests.benchmarks import mixed
from tests.benchmarks.traces import operations, traces


@pytest.mark.parametrize("runs_ahead", [False, True], ids=["in turn", "ahead"])
def test_a_few_traces_hold(runs_ahead: bool) -> None:
    *_, (done, counts) = traces(8, seed=2, runs_ahead=runs_ahead)
    assert done == 8
    assert counts.answers > 8
    assert counts.cached_tokens > 0


def test_a_few_operations_hold() -> None:
    operations(400, seed=2)


def test_a_few_mixed_traces_hold() -> None:
    *_, (done, counts) = mixed.traces(4, seed=2)
    assert done == 4
    assert counts["stories"] > 8
