"""Places for all programs: one that forks a thousand branches does not hold up another's only one. Pure functions.

A program is a number: that of the branch from which its branches were forked, or of a call with many prompts. None
stands for itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence


def over_share(line: Sequence[tuple[int, int | None]], running: Iterable[int | None], num_places: int) -> set[int]:
    """Who of `line` (ids, each with its program, in the order of admission) should let others go first: whose program
    has an equal share of the places, with those that run and those before it in line."""
    counts = Counter(running)
    programs = {program for _, program in line} | counts.keys()
    programs.discard(None)
    if len(programs) < 2:
        return set()
    share = max(1, num_places // len(programs))
    over: set[int] = set()
    for number, program in line:
        if program is not None:
            counts[program] += 1
            if counts[program] > share:
                over.add(number)
    return over


def seen(
    programs: Sequence[int | None], priorities: Sequence[int], rank_of: Callable[[int], int], most: int
) -> Sequence[int]:
    """The places in line of those who are looked at, where at most so many are. `rank_of` a place: the priority there
    with what was waited for; the line stands in its order.

    The highest first, and of equals of each program as many. Who is beyond that has not waited for them: a program that
    came first would hold up all others until its last one is admitted.
    """
    if len(programs) <= most:
        return range(len(programs))
    share = max(1, most // len(set(programs)))
    counts: dict[int | None, int] = {}
    alike: dict[tuple[int, bool], list[int]] = {}  # the first places of a priority, within shares and beyond
    for place, (program, priority) in enumerate(zip(programs, priorities, strict=True)):
        count = counts.get(program, 0)
        counts[program] = count + 1
        kept = alike.setdefault((priority, count >= share), [])
        if len(kept) < most:
            kept.append(place)
    order = [
        (-(priority if is_over else rank_of(place)), is_over, place)
        for (priority, is_over), places in alike.items()
        for place in places
    ]
    return sorted(place for _, _, place in sorted(order)[:most])
