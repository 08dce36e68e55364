"""What the next step computes: a pure function from what waits, what runs and what room there is to a plan.

Knows token counts and page counts. Never touches the cache, a tensor or the clock: the engine core asks, then acts.
Every step is one ragged batch: a row is a request and how many tokens it contributes. Rows that decode come first (one
token each, or a short run of forced ones), then chunks of prefills that are under way, then admissions. Where one
prefill would fill the step, half of it is for those who have much less left.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from operator import attrgetter
from typing import Literal

import numpy as np
from msgspec.structs import replace

from niwaki.runtime.loop.common import Heads, Prefilling
from niwaki.runtime.loop.fairness import Claim, over_share, owner_of
from niwaki.runtime.loop.filling import GROWTH_SHARE, Step, expected_pages, growth_tokens, missing_pages, pages_for
from niwaki.runtime.loop.plans import AGED_STEPS, AGED_TOKENS, Plan, Room, Running, Waiting

Policy = Literal["lpm", "fcfs"]

_PRIORITY = attrgetter("priority")
_NUM_CACHED = attrgetter("num_cached")
_WAITS_FROM = attrgetter("waits_from")
_FIRST_STEP = attrgetter("first_step")
_IDS = attrgetter("ids")
_MAX_NEW_TOKENS = attrgetter("max_new_tokens")
_NUM_LOCKED_PAGES = attrgetter("num_locked_pages")

# For every so many seconds without a row a request counts as one priority higher: nothing waits for ever. Of a small
# model 1,024 steps are some four seconds, and behind whoever had waited for so many what was urgent stood in line.
PRIORITY_SECONDS = 30.0
# So many of them find places of lower ones in one step: each is a plan of its own.
MOST_URGENT = 4
# Where all who run and wait take no more than this share of the pool, it has room for what they come back with as well.
# At 1/2, W4's agents with answers of 64 tokens opened more conversations than the pool could hold to their ends, and
# 2 % fewer tokens were found; at 2/5 none.
ROOMY = 0.4
# Who has this many times less to compute than the prefill that is under way need not wait for its end.
MUCH_LESS = 4


def plan(waiting: Sequence[Waiting], running: Sequence[Running], room: Room, policy: Policy = "lpm") -> Plan:
    """The next step.

    Who is of a higher priority than somebody who runs waits for no place, and for no prefill: lower ones give way.

    Who has nothing pending has no row: a text under a constraint that sits a step out (`late.py`).

    Progress: while anything that has something pending runs, somebody gets a row, and the first admitted of the highest
    priority is never preempted, so requests end; when nothing runs, the first request that fits an empty pool is
    admitted. A plan without rows means that there is nothing to do, or nothing that could ever fit, which
    `Limits.check_room` refuses beforehand.
    """
    kept, preempted = _make_room(running, room)
    if preempted:  # what was just given up must not be taken by a newcomer
        room = replace(room, free_pages=room.free_pages + sum(map(_gain, preempted)))
        return _filled((), kept, preempted, room, policy)
    urgent = _with_urgent(waiting, kept, room, policy)
    if urgent is not None:
        return _alone(urgent, waiting, kept) if room.admits_alone else urgent
    return _filled(waiting, kept, (), room, policy)


def outranked(running: Sequence[Running], room: Room) -> int | None:
    """Who waits and is of this priority or a lower one changes nothing in `plan`: all places are taken, by requests
    that count for as much. None where there is a place. (Where one who is of a higher priority drives two out for
    their pages, the second's place is free for the others in the next step.)"""
    if len(running) < room.max_running:
        return None
    return min(map(_rank_of_running, running))


def is_steady(plan: Plan, num_running: int, *, num_waiting: int, max_batch_tokens: int) -> bool:
    """Whether the next plan is that every running request decodes one token, and nothing else, where all have one.

    That plan then holds for the steps behind it, until somebody comes or goes or pages run short: where nobody waits
    there is nobody to admit; else this plan was the same, and what is promised to running requests never shrinks while
    they decode, so whoever waits finds no more room than now. (What is kept for one who was set back shrinks where they
    grow into its pages; others are offered that in the next plan.)
    """
    if not num_waiting:
        return num_running <= max_batch_tokens
    return len(plan.rows) == num_running and plan.num_tokens == num_running and not (plan.admit or plan.preempt)


def is_decoding(request: Running, page_size: int) -> bool:
    """Whether its next row is short: the last sampled token, or a run of forced ones of at most a page."""
    return request.num_pending <= page_size


def rank(priority: int, waited_seconds: float) -> int:
    """As what priority a request counts after so long without a row."""
    return priority + int(waited_seconds // PRIORITY_SECONDS)


def next_victim(running: Sequence[Running]) -> Running | None:
    """Whom to preempt: of the lowest priority, who loses the fewest computed tokens, the latest admitted on a tie.

    Never the first admitted of the highest priority, so that at least this one always ends; None if it is alone.
    """
    if len(running) < 2:
        return None
    protected = max(range(len(running)), key=lambda index: (running[index].priority, -index))
    others = [index for index in range(len(running)) if index != protected]
    chosen = min(others, key=lambda index: (running[index].priority, _gain(running[index]), -index))
    return running[chosen]


def _with_urgent(waiting: Sequence[Waiting], running: Sequence[Running], room: Room, policy: Policy) -> Plan | None:
    """The plan where who waits and is of a higher priority than somebody who runs finds a place: one after the other,
    MOST_URGENT at most, all of them or as long as each brings all before it along. None where there are none. A long
    wait alone drives nobody out, but protects whoever got in by it."""
    if not running or max(map(_PRIORITY, waiting), default=0) <= min(map(_rank_of_running, running)):
        return None
    places = list(_places(waiting, running, room))

    def tried(count: int) -> Plan | None:
        urgent = [first for first, _ in places[:count]]
        victims = [each for _, leaving in places[:count] for each in leaving]
        made = _giving_way(waiting, running, victims, urgent, room, policy)
        return made if {request.id for request in urgent} <= set(made.admit) else None

    if len(places) > 1 and (of_all := tried(len(places))) is not None:
        return of_all  # mostly, and each plan on the way to it takes as long
    made: Plan | None = None
    for count in range(1, len(places) + 1):
        more = tried(count)
        if more is None:
            break
        made = more
    return made


def _places(
    waiting: Sequence[Waiting], running: Sequence[Running], room: Room
) -> Iterator[tuple[Waiting, list[Running]]]:
    """Of the first who outrank somebody, MOST_URGENT at most: whom each drives out, behind those before it."""
    stay, left = list(running), room
    for first in nlargest(MOST_URGENT, waiting, key=_PRIORITY):
        leaving = _place_for(first, stay, left) if any(_gives_way(each, first) for each in stay) else None
        if leaving is None:
            return
        yield first, leaving
        gone = {each.id for each in leaving}
        stay = [each for each in stay if each.id not in gone]
        taken = sum(_wanted_pages(_without(first, leaving, room.page_size), Heads(room.page_size), room.page_size))
        free_pages = left.free_pages + sum(map(_gain, leaving)) - taken
        left = replace(left, free_pages=free_pages, max_running=left.max_running - 1)


def _alone(made: Plan, waiting: Sequence[Waiting], running: Sequence[Running]) -> Plan:
    """Without rows of those who run and are of a lower priority than the highest that is admitted."""
    highest = max(request.priority for request in waiting if request.id in made.admit)
    lower = {request.id for request in running if _rank_of_running(request) < highest}
    rows = tuple(row for row in made.rows if row.id not in lower)
    return Plan(rows, made.admit, made.preempt, made.aged, is_alone=len(rows) < len(made.rows))


def _gives_way(running: Running, waiting: Waiting) -> bool:
    return _rank_of_running(running) < waiting.priority


def _place_for(first: Waiting, running: Sequence[Running], room: Room) -> list[Running] | None:
    """Whom of lower priority to preempt, so that `first` finds a place and pages: as few as that takes, of the lowest
    priority and who loses least first. None where it does not find them even so."""
    page_size = room.page_size
    free_slots = room.max_running - len(running)
    free_pages = room.free_pages - sum(expected_pages(each, page_size) for each in running)
    lower = [each for each in running if _gives_way(each, first)]
    lower.sort(key=lambda each: (_rank_of_running(each), _gain(each)))
    victims: list[Running] = []
    while True:
        num_pages, growth_pages = _wanted_pages(first, Heads(page_size), page_size)
        is_alone = len(victims) == len(running)
        if free_slots > 0 and num_pages + (0 if is_alone else growth_pages) <= free_pages:
            return victims
        if len(victims) == len(lower):
            return None
        leaving = lower[len(victims)]
        victims.append(leaving)
        free_slots += 1
        free_pages += _gain(leaving) + expected_pages(leaving, page_size)
        first = _without(first, [leaving], page_size)


def _without(request: Waiting, leaving: Sequence[Running], page_size: int) -> Waiting:
    """How it stands when they have left: of its cached pages, those that one of them alone holds are locked no more.

    They are the end of its pages, from the first one on that nobody else holds.
    """
    for each in leaving:
        shared = each.num_pages - _gain(each)
        if request.namespace != each.namespace or request.num_locked_pages <= shared:
            continue
        stop = (shared + 1) * page_size
        if each.ids is None or np.array_equal(each.ids[:stop], request.ids[:stop]):
            request = replace(request, num_locked_pages=shared)
    return request


def _giving_way(
    waiting: Sequence[Waiting], running: Sequence[Running], victims: Sequence[Running], urgent: Sequence[Waiting],
    room: Room, policy: Policy
) -> Plan:  # fmt: skip
    """The plan where `victims` leave, and prefills that the `urgent` outrank leave them the tokens of the step."""
    room = replace(room, free_pages=room.free_pages + sum(map(_gain, victims)))
    stand = {request.id: _without(request, victims, room.page_size) for request in urgent}
    gone = {each.id for each in victims}
    return _filled(
        [stand.get(request.id, request) for request in waiting],
        [each for each in running if each.id not in gone],
        victims, room, policy, urgent,
    )  # fmt: skip


def _filled(
    waiting: Sequence[Waiting], running: Sequence[Running], preempted: Sequence[Running], room: Room, policy: Policy,
    urgent: Sequence[Waiting] = ()
) -> Plan:  # fmt: skip
    """The rows of those who run, of a higher priority first, and admissions. `urgent`: for whose tokens prefills of a
    lower priority leave room."""
    step = Step(room)
    prefills: list[Running] = []
    for request in running:
        if is_decoding(request, room.page_size):
            step.add_running(request)
        else:
            prefills.append(request)
    most = _prompt_tokens(waiting, prefills, room)
    if most is not None:
        step.tokens_left = min(step.tokens_left, most)
        step.keys_per_token = room.keys_per_token
    # Whose prefill goes on after this step, and whoever is admitted in it: a request with the same prefix waits.
    under_way = Prefilling(room.page_size, waiting)
    for prefill in running:
        if prefill.num_pending > 1 and prefill.ids is not None:
            under_way.add(prefill.ids, prefill.namespace, prefill.priority)
    prefills.sort(key=lambda each: -_rank_of_running(each))
    passing, long = _NOBODY, prefills[0] if prefills else None
    if policy == "lpm" and not urgent and prefills and step.is_filled_by(prefills[0]):
        passing = _passing(waiting, running, prefills, step, room, under_way if room.shares_prefixes else None)
        step.least_of = prefills[0].id if step.has_page_for(prefills[0]) else None
        prefills.sort(key=lambda each: each.id not in passing.parts)
    for request in prefills:
        if request.id in passing.parts:
            leaving = step.tokens_left - passing.parts[request.id]
        else:
            higher = [one for one in urgent if _gives_way(request, one)]
            leaving = passing.num_kept + sum(step.work_of(_num_found(one), _num_new(one)) for one in higher)
        step.add_running(request, leaving=leaving)
    line, aged = _in_order(waiting, running, step, room, policy, passing.admit)
    admitted = _admit(line, running, step, policy, aged, under_way)
    if long is not None and passing.num_kept:
        step.lengthen(long)  # by what was kept for some who were not admitted after all
    left = tuple(request.id for request in preempted)
    return Plan(tuple(step.rows), admitted, left, aged if aged in admitted else None)


def _prompt_tokens(waiting: Sequence[Waiting], prefills: Sequence[Running], room: Room) -> int | None:
    """How many tokens of prompts the step may have. None: as many as it has room for."""
    if room.max_lower_tokens is None:
        return room.max_prompt_tokens
    lower = room.max_lower_tokens
    lower += sum(each.num_pending for each in prefills if _rank_of_running(each) >= room.highest)
    lower += sum(_num_new(each) for each in waiting if _rank_of(each, room) >= room.highest)
    return lower if room.max_prompt_tokens is None else min(lower, room.max_prompt_tokens)


# -- running requests --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Passing:
    """Who goes before a long prefill."""

    parts: Mapping[int, int] = field(default_factory=dict)  # work of prefills that are under way, by id
    admit: frozenset[int] = frozenset()  # who wait
    num_kept: int = 0  # work of these


_NOBODY = _Passing()


def _passing(
    waiting: Sequence[Waiting], running: Sequence[Running], prefills: Sequence[Running], step: Step, room: Room,
    under_way: Prefilling | None
) -> _Passing:  # fmt: skip
    """Who has much less left than the first of `prefills`, which would fill the step: as many as take half of it, and
    find places and pages."""
    long = prefills[0]
    most = long.num_pending // MUCH_LESS
    rank_of_long = _rank_of_running(long)
    tokens = step.tokens_left // 2
    parts: dict[int, int] = {}
    for each in sorted(prefills, key=lambda each: each.num_pending):
        if tokens and each.num_pending <= most and _rank_of_running(each) == rank_of_long:
            parts[each.id] = min(tokens, step.work_of(each.num_computed, each.num_pending))
            tokens -= parts[each.id]
    slots = step.slots_left - len(prefills)
    pages = step.free_pages - step.promised_pages - sum(expected_pages(each, step.page_size) for each in prefills)
    heads = Heads(step.page_size)
    kept, admit = 0, set[int]()
    for request in waiting:
        if kept == tokens or len(admit) >= slots:
            break
        if _num_new(request) > most or _rank_of(request, room) < rank_of_long:
            continue
        num_pages = sum(_wanted_pages(request, heads, step.page_size))
        if num_pages > pages or (under_way is not None and under_way.helps(request)):
            continue
        pages -= num_pages
        kept += min(step.work_of(_num_found(request), _num_new(request)), tokens - kept)
        admit.add(request.id)
    return _Passing(parts, frozenset(admit), kept)


def _gain(request: Running) -> int:
    """Pages that preempting `request` gives back."""
    return request.num_pages if request.num_exclusive_pages is None else request.num_exclusive_pages


def _make_room(running: Sequence[Running], room: Room) -> tuple[list[Running], list[Running]]:
    """Who stays and who is preempted, so that every decoding row finds its next page.

    When nobody decodes, the first prefill must be able to go on: prefills that hold all pages between them and wait for
    each other would be a deadlock.
    """
    kept, preempted = list(running), list[Running]()
    free_pages = room.free_pages
    while kept and _demand(kept, room) > free_pages:
        victim = next_victim(kept)
        if victim is None:
            break
        kept.remove(victim)
        preempted.append(victim)
        free_pages += _gain(victim)
    return kept, preempted


def _demand(running: list[Running], room: Room) -> int:
    """Pages without which this step would stall somebody."""
    page_size = room.page_size
    decoding = [request for request in running if is_decoding(request, page_size)]
    if decoding:
        return sum(missing_pages(request, request.num_tokens, page_size) for request in decoding)
    return min(missing_pages(request, request.num_computed + 1, page_size) for request in running)


# -- admissions -------------------------------------------------------------------------------------------------------


def _admit(
    line: Sequence[Waiting], running: Sequence[Running], step: Step, policy: Policy, aged: int | None,
    under_way: Prefilling
) -> tuple[int, ...]:  # fmt: skip
    """Admit in the order of `line` while there are slots, tokens and pages. Adds the rows to `step`."""
    admitted: list[int] = []
    heads = Heads(step.page_size)
    shares = step.shares_prefixes
    for request in line:
        if step.slots_left <= 0:
            break
        num_found = _num_found(request)
        num_first = step.num_first(request, num_found)
        if num_first <= 0:
            break
        if shares and under_way.helps(request):
            continue
        new_pages, growth_pages = _wanted_pages(request, heads, step.page_size)
        is_alone = not running and not admitted
        wanted = new_pages if is_alone else new_pages + growth_pages + step.promised_pages
        if wanted > step.free_pages:
            if not is_alone and (policy == "fcfs" or request.id == aged):
                break  # let the pool drain for it: overtaking would starve it
            if request.is_set_back and not is_alone:
                # Whoever overtook it on the pages that it still has cached would have it compute them again.
                step.free_pages -= _cached_pages(request, step.page_size) - heads.num_shared(request)
                heads.add(request)
            continue
        step.add_admitted(request, num_found, num_first)
        step.slots_left -= 1
        step.free_pages -= new_pages
        step.promised_pages += growth_pages
        admitted.append(request.id)
        heads.add(request)
        under_way.admit(request)
    return tuple(admitted)


def _short_from(waiting: Sequence[Waiting], step: Step, room: Room) -> int | None:
    """From which priority on downwards the pool is short: where those who run and those who wait, of this and higher
    ones, take more than ROOMY of it with their growth. None: of no priority, so whoever goes first, the others still
    find what is cached of theirs."""
    left = ROOMY * room.num_pages - (room.num_pages - step.free_pages + step.promised_pages)
    priorities: set[int] = set(map(_PRIORITY, waiting))
    for priority in sorted(priorities, reverse=True):
        alike = waiting if len(priorities) == 1 else [each for each in waiting if each.priority == priority]
        num_tokens = sum(map(len, map(_IDS, alike))) + GROWTH_SHARE * sum(map(_MAX_NEW_TOKENS, alike))
        left -= num_tokens / room.page_size + len(alike) - sum(map(_NUM_LOCKED_PAGES, alike))
        if left < 0 or not room.num_pages:
            return priority
    return None


def _aged(waiting: Sequence[Waiting], room: Room, short: int, *, are_equal: bool) -> int | None:
    """Whose turn it is for its long wait: of the highest priority, who waited longest. None while it is not his, and
    where no prefix goes before him."""
    if are_equal:
        oldest = min(waiting, key=_FIRST_STEP)
    else:
        oldest = max(waiting, key=lambda request: (_rank_of(request, room), -request.first_step))
        if oldest.priority > short:
            return None
    num_new = _num_new(oldest) + growth_tokens(oldest.max_new_tokens, room.page_size)
    is_old = room.since_aged >= AGED_STEPS and oldest.first_step <= room.step - AGED_STEPS
    return oldest.id if is_old or room.tokens_since_aged >= AGED_TOKENS * num_new else None


def _in_order(
    waiting: Sequence[Waiting], running: Sequence[Running], step: Step, room: Room, policy: Policy,
    passing: Collection[int]
) -> tuple[Sequence[Waiting], int | None]:  # fmt: skip
    """Who is considered first, and whose turn it is for its long wait. Sorting is stable: equals stay in order of
    arrival.

    The longest cached prefix goes first where it might be evicted while it waits. Where there is room for all, an order
    saves nothing, and who came first goes first.
    """
    if step.slots_left <= 0 or not waiting:
        return (), None
    if policy == "fcfs":
        return sorted(waiting, key=lambda request: -_rank_of(request, room)), None
    are_equal = len(set(map(_PRIORITY, waiting))) == 1 and room.now - min(map(_WAITS_FROM, waiting)) < PRIORITY_SECONDS
    short = _short_from(waiting, step, room)
    aged = None if short is None else _aged(waiting, room, short, are_equal=are_equal)
    if short is None:
        line = list(waiting)
    elif are_equal:
        line = sorted(waiting, key=_NUM_CACHED, reverse=True)  # which keeps equals in order, too
    else:
        line = sorted(waiting, key=lambda request: -request.num_cached if request.priority <= short else 0)

    def place(request: Waiting) -> tuple[int, bool, bool]:
        return -_rank_of(request, room), request.id != aged, request.id not in passing

    if not are_equal or aged is not None or passing:
        line.sort(key=place)
    whose = {(each.namespace, each.program) for each in line}
    if len(whose.union((each.namespace, each.program) for each in running)) < 2:
        return line, aged
    claims = [(request.id, _claim(request)) for request in line]
    over = over_share(claims, map(_claim, running), step.slots_left + len(running))
    if over:
        line.sort(key=lambda request: _behind_shares(request, request.id in over, room, aged))
    return line, aged


def _claim(request: Waiting | Running) -> Claim:
    return owner_of(request.namespace), request.program


def _behind_shares(request: Waiting, is_over: bool, room: Room, aged: int | None) -> tuple[int, bool, bool]:
    """Waiting raises nobody who is over his share, as caller or program: as the others of it end, he is within."""
    return -(request.priority if is_over else _rank_of(request, room)), request.id != aged, is_over


def _wanted_pages(request: Waiting, admitted: Heads, page_size: int) -> tuple[int, int]:
    """New pages that its tokens take, and those that are kept free for its growth."""
    num_pages = pages_for(len(request.ids), page_size)
    growth = growth_tokens(request.max_new_tokens, page_size)
    growth_pages = pages_for(len(request.ids) + growth, page_size) - num_pages
    return num_pages - admitted.num_shared(request), growth_pages


def _cached_pages(request: Waiting, page_size: int) -> int:
    return _num_found(request) // page_size


def _num_new(request: Waiting) -> int:
    """Tokens that it must compute itself."""
    return len(request.ids) - _num_found(request)


def _num_found(request: Waiting) -> int:
    """Tokens that it takes from the cache."""
    return min(request.num_cached, request.most_cached)


def _rank_of(request: Waiting, room: Room) -> int:
    return rank(request.priority, room.now - request.waits_from)


def _rank_of_running(request: Running) -> int:
    return rank(request.priority, request.waited_seconds)
