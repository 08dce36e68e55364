"""The summary of a tree: it has the marks of what is cached, and of nothing else."""

from __future__ import annotations

import random

import numpy as np

from niwaki.radix import Cache, TokenIds
from niwaki.radix.summary import BLOCK_TOKENS, marks_of


def write(cache: Cache, ids: TokenIds, namespace: str = "") -> None:
    lease = cache.acquire(ids, namespace, room_for=len(ids))
    assert lease is not None
    cache.release(lease, ids, len(ids))


def test_marks_tell_how_many_blocks_of_a_prompt_are_cached() -> None:
    draw = random.Random(1)
    cache = Cache(4096)
    trunks = [np.array(draw.choices(range(50), k=200), dtype=np.int32) for _ in range(6)]
    for _ in range(80):  # prompts that part anywhere, also inside of blocks and pages
        trunk = draw.choice(trunks)
        tail = np.array(draw.choices(range(50), k=draw.randrange(90)), dtype=np.int32)
        ids = np.concatenate([trunk[: draw.randrange(1, 200)], tail])
        name = draw.choice(["", "a"])
        held = set(cache.summary(100_000))
        marks = marks_of(ids, name)
        found = [mark in held for mark in marks]
        assert found == sorted(found, reverse=True), "who lacks one lacks all behind it"
        assert sum(found) == min(cache.match(ids, name) // BLOCK_TOKENS, len(marks))
        write(cache, ids, name)


def test_prompts_share_marks_up_to_where_they_part_and_none_across_namespaces() -> None:
    ids = np.arange(100, dtype=np.int32)
    other = ids.copy()
    other[70] = 7
    assert len(marks_of(ids)) == 3
    assert [a == b for a, b in zip(marks_of(ids), marks_of(other), strict=True)] == [True, True, False]
    assert marks_of(ids, limit=2) == marks_of(ids)[:2]
    assert not set(marks_of(ids)) & set(marks_of(ids, "tenant"))


def test_a_short_summary_keeps_what_was_used_last_and_all_that_it_stands_on() -> None:
    cache = Cache(4096)
    for first in range(0, 5000, 1000):
        write(cache, np.arange(first, first + 320, dtype=np.int32))
    cache.acquire(np.arange(2000, 2320, dtype=np.int32))
    assert cache.summary(10) == marks_of(np.arange(2000, 2320, dtype=np.int32))
    assert cache.summary(4) == marks_of(np.arange(2000, 2320, dtype=np.int32))[:4]
