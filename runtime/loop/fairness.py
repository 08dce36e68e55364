"""Places for all: a caller with a thousand requests does not hold up another's only one, nor does a program that forks
a thousand branches. Pure functions.

A program is a number: that of the branch from which its branches were forked, or of a call with many prompts. None
stands for itself. An owner is what the namespaces of a caller's caches begin with.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

Group = str | int | None  # an owner, or a program
Claim = tuple[str, int | None]  # whose a request is, and of which program


@lru_cache(maxsize=4096)
def owner_of(namespace: str) -> str:
    """A caller may have several caches, `OWNER/NAME` each: they are no more callers for that."""
    return namespace.partition("/")[0]


def over_share(line: Sequence[tuple[int, Claim]], running: Iterable[Claim], num_places: int) -> set[int]:
    """Who of `line` (ids, each with whose it is, in the order of admission) should let others go first: whose owner has
    an equal share of the places, with those that run and those before it in line, or whose program has one of the
    owner's."""
    taken = list(running)
    if len({*taken, *(claim for _, claim in line)}) < 2:
        return set()
    lines: dict[str, list[tuple[int, int | None]]] = {}
    runs: dict[str, list[int | None]] = {}
    for number, (owner, program) in line:
        lines.setdefault(owner, []).append((number, program))
    for owner, program in taken:
        runs.setdefault(owner, []).append(program)
    owners = lines.keys() | runs.keys()
    over = _over(
        [(number, owner) for number, (owner, _) in line],
        [owner for owner, programs in runs.items() for _ in programs],
        num_places,
    )
    for owner, own in lines.items():
        over |= _over(own, runs.get(owner, ()), num_places // len(owners))
    return over


def _over(line: Sequence[tuple[int, Group]], running: Iterable[Group], num_places: int) -> set[int]:
    counts = Counter(running)
    groups = {group for _, group in line} | counts.keys()
    groups.discard(None)
    if len(groups) < 2:
        return set()
    share = max(1, num_places // len(groups))
    over: set[int] = set()
    for number, group in line:
        if group is not None:
            counts[group] += 1
            if counts[group] > share:
                over.add(number)
    return over


def seen(claims: Sequence[Claim], priorities: Sequence[int], rank_of: Callable[[int], int], most: int) -> Sequence[int]:
    """The places in line of those who are looked at, where at most so many are. `rank_of` a place: the priority there
    with what was waited for; the line stands in its order.

    The highest first, and of equals of each owner as many, of each of his programs as many of them. Who is beyond that
    has not waited for them: whoever came first would hold up all others until its last one is admitted.
    """
    if len(claims) <= most:
        return range(len(claims))
    num_programs = Counter(owner for owner, _ in set(claims))
    share = max(1, most // len(num_programs))
    counts = Counter[Claim]()
    within = Counter[str]()  # of an owner: those of no program beyond its share
    alike: dict[tuple[int, bool], list[int]] = {}  # the first places of a priority, within shares and beyond
    for place, (claim, priority) in enumerate(zip(claims, priorities, strict=True)):
        owner = claim[0]
        is_over = within[owner] >= share or counts[claim] >= max(1, share // num_programs[owner])
        if not is_over:
            counts[claim] += 1
            within[owner] += 1
        kept = alike.setdefault((priority, is_over), [])
        if len(kept) < most:
            kept.append(place)
    order = [
        (-(priority if is_over else rank_of(place)), is_over, place)
        for (priority, is_over), places in alike.items()
        for place in places
    ]
    return sorted(place for _, _, place in sorted(order)[:most])
