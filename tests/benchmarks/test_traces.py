"""A few of the traces that `python -m tests.benchmarks.traces` runs by the thousand."""

from __future__ import annotations

from tests.benchmarks.traces import operations, traces


def test_a_few_operations_and_traces_hold() -> None:
    operations(400, seed=2)
    *_, (done, counts) = traces(8, seed=2)
    assert done == 8
    assert counts.answers > 8
    assert counts.cached_tokens > 0
