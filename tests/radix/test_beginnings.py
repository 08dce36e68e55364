"""Prompts that are remembered by how they begin."""

from __future__ import annotations

import numpy as np

from niwaki.radix.beginnings import MAX_LEFT, Beginnings
from niwaki.radix.handles import Match


def ids(*tokens: int) -> bytes:
    return np.array(tokens, np.int32).tobytes()


def test_prompts_that_wait_no_more_leave_nothing_behind() -> None:
    beginnings = Beginnings()
    for key in range(1000):
        beginnings.remember(key, Match(1, 0), ("", ids(7, key)))
        if key:
            beginnings.forget(key)
    assert list(beginnings.known) == [0]
    assert len(beginnings._heads) <= 2 + MAX_LEFT
    assert len(beginnings._keys) == len(beginnings._heads)
    beginnings.remember(999, Match(0, 0), ("", ids(7)))  # forgotten before, and back with another head
    beginnings.written("", ids(7, 999, 9, 9))
    assert list(beginnings.known) == [0]
    beginnings.written("other", ids(7, 0, 9, 9))
    assert list(beginnings.known) == [0], "a namespace is a tree of its own"
    beginnings.written("", ids(7, 0, 9, 9))
    assert not beginnings.known
