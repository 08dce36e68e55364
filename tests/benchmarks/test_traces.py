"""A few of the traces that `python -m tests.benchmarks.traces` and `mixed` run by the thousand."""

from __future__ import annotations

import pytest

from niwaki.radix.eviction import EVICTIONS
from niwaki.runtime.forward.runner import Runner
from tests.benchmarks import mixed
from tests.benchmarks.traces import operations, traces


@pytest.mark.parametrize("threads", [False, True], ids=["step by step", "on its own thread"])
def test_a_few_traces_hold(threads: bool) -> None:
    *_, (done, counts) = traces(12, seed=2, per_engine=6, threads=threads)
    assert done == 12
    assert counts.answers > 12
    assert counts.parted == 0
    assert counts.cached_tokens > 0


def test_a_few_traces_of_the_usual_mode_hold() -> None:
    *_, (done, counts) = traces(8, seed=2, deterministic=False)
    assert done == 8
    assert 0 < counts.largest < 1e-5


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_copy_that_is_left_out_is_found(monkeypatch: pytest.MonkeyPatch, deterministic: bool) -> None:
    monkeypatch.setattr(Runner, "copy_pages", lambda runner, copies: None)
    with pytest.raises(AssertionError, match="Asked"):
        list(traces(30, seed=2, deterministic=deterministic))


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_a_few_operations_hold(eviction: str) -> None:
    operations(200, seed=2, eviction=eviction)


def test_a_few_mixed_traces_hold() -> None:
    *_, (done, counts) = mixed.traces(4, seed=2)
    assert done == 4
    assert counts["stories"] > 8
