"""Pages that several who are admitted in one plan found cached are counted once."""

from __future__ import annotations

import random

import numpy as np
import pytest

from niwaki.runtime.loop.plans import Plan, Room, Waiting
from niwaki.runtime.loop.scheduler import plan

PAGE = 4


def line_of(seed: int, count: int) -> list[Waiting]:
    """Prompts of which all full pages are cached; one token of each is not. They part at any token."""
    draw = random.Random(seed)
    texts = [[draw.randrange(2) for _ in range(8 * PAGE)] for _ in range(4)]
    line = []
    for number in range(count):
        num_cached = draw.randrange(8) * PAGE
        kept = draw.randrange(num_cached + 1)
        ids = draw.choice(texts)[:kept] + [draw.randrange(2) for _ in range(num_cached - kept)] + [9]
        namespace = draw.choice(["", "other"])
        line.append(Waiting(number, np.array(ids, np.int32), 1, num_cached=num_cached, namespace=namespace))
    return line


def pages_of(line: list[Waiting]) -> int:
    """All that they need: their common pages once, and one each."""
    heads = {
        (request.namespace, request.ids[:end].tobytes())
        for request in line
        for end in range(PAGE, len(request.ids), PAGE)
    }
    return len(heads) + len(line)


def planned(line: list[Waiting], free_pages: int) -> Plan:
    return plan(line, [], Room(free_pages, PAGE, max_batch_tokens=10_000, max_running=10_000))


@pytest.mark.parametrize("seed", range(20))
def test_all_are_admitted_where_there_is_just_room_for_what_they_do_not_share(seed: int) -> None:
    line = line_of(seed, 40)
    assert len(planned(line, pages_of(line)).admit) == 40
    assert len(planned(line, pages_of(line) - 1).admit) < 40
