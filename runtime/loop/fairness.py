"""Places for all programs: one that forks a thousand branches does not hold up another's only one. Pure functions.

A program is a number, that of the branch from which its branches were forked; None for requests of no branch, which
stand for themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence


def over_share(line: Sequence[tuple[int, int | None]], running: Iterable[int | None], num_places: int) -> set[int]:
    """Who of `line` (ids, each with its program, in the order of admission) should let others go first: whose program
    has an equal share of the places, with those that run and those before it in line."""
    programs = {program for _, program in line if program is not None}
    if not programs:
        return set()
    counts = Counter(program for program in running if program is not None)
    programs |= counts.keys()
    if len(programs) == 1:
        return set()
    share = max(1, num_places // len(programs))
    over: set[int] = set()
    for number, program in line:
        if program is not None:
            counts[program] += 1
            if counts[program] > share:
                over.add(number)
    return over


def seen(programs: Sequence[int | None], most: int) -> Sequence[int]:
    """The places in line of those who are looked at, where at most so many are: of each program as many, in order."""
    if len(programs) <= most:
        return range(len(programs))
    share = max(1, most // len(set(programs)))
    counts: Counter[int | None] = Counter()
    within, beyond = list[int](), list[int]()
    for place, program in enumerate(programs):
        counts[program] += 1
        (within if counts[program] <= share else beyond).append(place)
    return sorted((within + beyond)[:most])
