"""The line of who may be evicted against a sorted list: ranks in any order, taken, put back, and ranked anew."""

from __future__ import annotations

import random

import pytest

from niwaki.radix.line import BUCKET_BITS, Line

MOST = 1 << 40


class Leaf:
    def __init__(self, number: int) -> None:
        self.number = number
        self.queued_rank = 0


@pytest.mark.parametrize("spread", [0, 5, 100, 10_000])
@pytest.mark.parametrize("seed", range(2))
def test_whatever_order_ranks_come_in_the_least_is_taken_first(spread: int, seed: int) -> None:
    draw = random.Random(f"{spread} {seed}")
    line: Line[Leaf] = Line(MOST)
    waiting: dict[Leaf, int] = {}
    for now in range(1, 1000):
        action = draw.random()
        if action < 0.45 or not waiting:
            leaf = Leaf(now)
        elif action < 0.6:  # used again
            leaf = draw.choice(list(waiting))
        else:
            rank, leaf = line.take()
            while rank != leaf.queued_rank:
                rank, leaf = line.take()
            assert rank == waiting[leaf] == min(waiting.values())
            if action < 0.8:
                line.put_back(rank, leaf)
            else:
                leaf.queued_rank = 0
                del waiting[leaf]
            continue
        rank = now + draw.randint(0, spread) + draw.choice([0, 0, 0, MOST])
        if rank != waiting.get(leaf):
            line.add(rank, leaf)
            waiting[leaf] = rank
        line.check()
        assert set(line.valid()) == set(waiting)
        assert len(line) < 2 * len(waiting) + 200, "what is stale does not gather"


def test_ranks_that_rise_are_never_sorted() -> None:
    line: Line[Leaf] = Line(MOST)
    leaves = [Leaf(number) for number in range(100)]
    for rank, leaf in enumerate(leaves, start=1):
        line.add(rank << BUCKET_BITS, leaf)
    assert [line.take()[1] for _ in leaves] == leaves
    assert line.num_apart == 0
