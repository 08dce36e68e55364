"""Who waits and who runs: requests come in, get their pages, give them back.

Owned by `core.EngineCore`. `scheduler.plan` decides, this carries it out.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Sequence
from itertools import islice

from msgspec.structs import replace

from niwaki.radix.handles import Match, Pin
from niwaki.runtime.api import Generation
from niwaki.runtime.api.readiness import readiness
from niwaki.runtime.forward.runner import Row
from niwaki.runtime.kv.kv_pages import KVPages
from niwaki.runtime.loop import fairness, plans, scheduler
from niwaki.runtime.loop.counters import Counters
from niwaki.runtime.loop.filling import growth_tokens
from niwaki.runtime.loop.waiting_line import WaitingLine
from niwaki.runtime.options.config import EngineConfig
from niwaki.runtime.options.limits import TokenIds
from niwaki.runtime.requests.drafts import NOTHING, echo_tokens
from niwaki.runtime.requests.jobs import GenerateJob
from niwaki.runtime.requests.request import Request

log = logging.getLogger("niwaki.engine")

# A waiting request's match is looked up every step for the first so many in line; the rest wait their turn anyway.
MAX_MATCHED_WAITING = 256
# Prompts come in small pieces while somebody reads a stream, and so much longer: for whoever comes next.
READING_SECONDS = 10.0
# With so many streams more such a piece is as much longer: their own step is, and many are served by long batches.
READERS = 2
# So long after requests of two priorities were there, prompts of the lower come in pieces as small: for the next of the
# higher, which waits for the end of the step in which it comes.
MIXED_SECONDS = 10.0


class Roster:
    """A running request holds a lease of pages, a waiting one does not."""

    def __init__(
        self,
        pages: KVPages,
        config: EngineConfig,
        counters: Counters,
        most_logits: int,
        keys_per_token: float | None = None,
    ) -> None:
        """`most_logits`: rows of them that a step has room for, beside one of each request."""
        self.waiting = WaitingLine()
        self.running: dict[int, Request] = {}
        self._pages = pages
        self._cache = pages.cache
        self._config = config
        self._most_logits = most_logits
        self._keys_per_token = keys_per_token
        self._counters = counters
        self._policy: scheduler.Policy = "fcfs" if config.schedule_policy == "fcfs" else "lpm"
        self._since_aged = plans.AGED_STEPS
        self._tokens_since_aged = 0
        self._num_steps = 0  # of those who wait: that of each would be a thousand numbers to count up in every step
        self._read_until = 0.0
        # Whether somebody may read the stream of one who waits; where not, nobody does until `Generation.num_read` is
        # another number than this. To ask 256 of them in each step took 0.14 ms.
        self._line_is_read, self._num_read = False, Generation.num_read
        self._mixed_until, self._highest = 0.0, 0
        self._was_for_highest = False  # the last plan was; never two in a row, or others might wait for ever
        # Of those who wait and were looked at, by id: how they stood then, what of them may be cached, and what was.
        self._looked_at_before: dict[int, tuple[plans.Waiting, TokenIds, Match | None]] = {}
        self._set_back: dict[int, Pin] = {}  # of those who wait and were preempted: what they had computed

    # -- a step -----------------------------------------------------------------------------------------------------

    def plan(self) -> plans.Plan:
        now = time.perf_counter()
        room = plans.Room(
            free_pages=self._cache.num_free + self._cache.num_evictable,
            page_size=self._config.page_size,
            max_batch_tokens=self._config.step_tokens,
            max_running=self._config.max_running_requests,
            max_prompt_tokens=self._prompt_tokens(now),
            keys_per_token=self._keys_per_token,
            shares_prefixes=self._config.enable_prefix_cache,
            num_pages=self._cache.num_pages,
            since_aged=self._since_aged,
            tokens_since_aged=self._tokens_since_aged,
            step=self._num_steps,
            now=now,
        )
        priorities = self.waiting.priorities()
        of_all = priorities.union(request.params.priority for request in self.running.values())
        # What preempting each gives back matters only where somebody may have to go: measuring it for every row of
        # every step would cost time.
        may_preempt = room.free_pages < 2 * len(self.running) or (bool(priorities) and len(of_all) > 1)
        room = self._room_for_higher(room, of_all, now)
        running = [self._as_running(request, now, may_preempt=may_preempt) for request in self.running.values()]
        outranked = scheduler.outranked(running, room)
        if outranked is None and len(priorities) > 1 and not self._was_for_highest:
            made = self._plan_of_highest(max(priorities), running, room, now)
            if made is not None:
                self._was_for_highest = True
                return made
        line: Sequence[Request] = ()
        if priorities and (outranked is None or max(priorities) > outranked):
            line = self._looked_at(now, outranked)
        made = scheduler.plan([self._as_waiting(request) for request in line], running, room, self._policy)
        self._was_for_highest = made.is_alone
        return made

    def _plan_of_highest(
        self, highest: int, running: Sequence[plans.Running], room: plans.Room, now: float
    ) -> plans.Plan | None:
        """The plan in which all who wait and are of the highest priority are admitted, and nobody else: others' prompts
        would make the step longer that they wait for, and to look at a long line takes as long as a step. None where
        some find no room, or somebody has waited so long that he counts as much."""
        if any(
            scheduler.rank(one.params.priority, _waited(one, now)) >= highest
            for one in self.waiting.oldest_below(highest)
        ):
            return None
        line = self.waiting.first_of_each(MAX_MATCHED_WAITING, highest - 1)
        if len(line) > room.max_running - len(running):
            return None
        made = scheduler.plan([self._as_waiting(request) for request in line], running, room, self._policy)
        return made if len(made.admit) == len(line) else None

    def _room_for_higher(self, room: plans.Room, priorities: Collection[int], now: float) -> plans.Room:
        """`priorities`: of all who wait or run. On a device where a step takes as long with a few rows more nobody has
        to sit one out."""
        if len(priorities) > 1:
            self._mixed_until, self._highest = now + MIXED_SECONDS, max(priorities)
        if now > self._mixed_until or self._keys_per_token is None:
            return room
        return replace(
            room,
            max_lower_tokens=self._config.streaming_tokens,
            highest=self._highest,
            admits_alone=not self._was_for_highest,
        )

    def _looked_at(self, now: float, outranked: int | None) -> Sequence[Request]:
        """Of the line, as many as are looked at in a step: the highest first, of equals the first of each caller and
        program. None of the priority `outranked` or a lower one."""
        # Of a kind more than so many are never looked at: all of 3,800 took longer than the step that they waited for.
        line = self.waiting.first_of_each(MAX_MATCHED_WAITING, outranked)
        if len(line) <= MAX_MATCHED_WAITING:
            return line

        def rank_of(request: Request) -> int:
            return scheduler.rank(request.params.priority, _waited(request, now))

        if len({request.params.priority for request in line}) > 1:
            line = sorted(line, key=lambda request: -rank_of(request))
        if self._policy == "fcfs" or len({(request.namespace, request.job.program) for request in line}) == 1:
            return line[:MAX_MATCHED_WAITING]
        claims = [(fairness.owner_of(request.namespace), request.job.program) for request in line]
        priorities = [request.params.priority for request in line]
        places = fairness.seen(claims, priorities, lambda place: rank_of(line[place]), MAX_MATCHED_WAITING)
        return [line[place] for place in places]

    def _prompt_tokens(self, now: float) -> int | None:
        """The bound on prompts in a step, where streams are read or were a while ago. None for one that is alone: its
        own prompt holds nobody up."""
        num_read = sum(map(_is_read, self.running.values()))
        if num_read or self._waits_to_be_read():
            self._read_until = now + READING_SECONDS
        if now > self._read_until or len(self.running) + len(self.waiting) < 2:
            return None
        return self._config.streaming_tokens * (1 + num_read // READERS)

    def _waits_to_be_read(self) -> bool:
        """Whether somebody reads the stream of one of the first in line."""
        if self._line_is_read or self._num_read != Generation.num_read:
            self._num_read = Generation.num_read  # first: who begins to read meanwhile is found the next time
            self._line_is_read = any(map(_is_read, islice(self.waiting, MAX_MATCHED_WAITING)))
        return self._line_is_read

    def carry_out(self, plan: plans.Plan) -> list[tuple[Request, Row]]:
        """Preempt, admit, and give every row its pages."""
        for request_id in plan.preempt:
            self.preempt(self.running[request_id])
        self._since_aged += 1
        if plan.aged is not None:
            self._since_aged = self._tokens_since_aged = 0
        for request_id in plan.admit:
            request = self.waiting.find(request_id)
            if request_id != plan.aged:
                growth = growth_tokens(request.remaining_new, self._config.page_size)
                self._tokens_since_aged += request.num_to_compute + growth
            self._admit(request)
        self._num_steps += 1
        now = time.perf_counter()
        has_row = {step.id for step in plan.rows}
        for request in self.running.values():
            _note_row(request, now, has_row=request.id in has_row)
        return self._rows_of(plan)

    def pieces(self, prefills: Sequence[Request], num_beside: int) -> list[tuple[Request, Row]]:
        """Rows of prompts for the next step, beside `num_beside` rows that go on as they are; nobody waits who could
        find a place. Empty where a plan of all must say more."""
        now = time.perf_counter()
        room = plans.Room(
            free_pages=self._cache.num_free + self._cache.num_evictable,
            page_size=self._config.page_size,
            max_batch_tokens=self._config.step_tokens - num_beside,
            max_running=self._config.max_running_requests,
            max_prompt_tokens=self._prompt_tokens(now),
            keys_per_token=self._keys_per_token,
            now=now,
        )
        room = self._room_for_higher(room, {request.params.priority for request in self.running.values()}, now)
        running = [self._as_running(request, now, may_preempt=False) for request in prefills]
        plan = scheduler.plan((), running, room, self._policy)
        if plan.preempt:
            return []
        has_row = {step.id for step in plan.rows}
        for request in prefills:
            _note_row(request, now, has_row=request.id in has_row)
        return self._rows_of(plan)

    def _rows_of(self, plan: plans.Plan) -> list[tuple[Request, Row]]:
        """Its rows, each with its pages."""
        page_size = self._config.page_size
        batch: list[tuple[Request, Row]] = []
        logits_left = self._most_logits
        for step in plan.rows:
            if step.id not in self.running:  # its admission failed for want of a page
                continue
            request = self.running[step.id]
            assert request.lease is not None, "running requests hold a lease"
            num_unread = max(0, request.logits_from - request.num_computed)  # first tokens, whose logits nobody wants
            num_tokens = min(
                step.num_tokens, request.num_to_compute - request.num_computed, num_unread + max(1, logits_left)
            )
            end = request.num_computed + num_tokens
            has_pages = end <= len(request.lease.page_ids) * page_size  # most rows do: no call for them
            if num_tokens > 0 and (has_pages or self._cache.reserve(request.lease, end)):
                num_logits = max(0, num_tokens - num_unread)
                logits_left -= num_logits
                ids = request.ids[request.num_computed : end]
                batch.append((request, Row(ids, request.num_computed, request.lease.page_ids, num_logits)))
        return batch

    def guess(self, request: Request, num_rows: int) -> TokenIds:
        """What may follow in a step of so many rows, as far as there are pages for it."""
        if not (request.samples and request.is_drawn_plainly):
            return NOTHING
        try:
            guess = request.guess(self._config.draft_tokens, echo_tokens(num_rows))
        except Exception:  # it goes on without
            log.exception("no guess can be made for a request")
            request.guesser.be_quiet()
            return NOTHING
        assert request.lease is not None, "running requests hold a lease"
        return guess if len(guess) and self._cache.reserve(request.lease, request.length + len(guess)) else NOTHING

    def is_full_for(self, priorities: Iterable[int]) -> bool:
        """Whether no plan would be another with some of these among those who wait: all places are taken, by requests
        that count for as much."""
        if len(self.running) < self._config.max_running_requests:
            return False
        now = time.perf_counter()
        least = min(scheduler.rank(one.params.priority, _waited(one, now)) for one in self.running.values())
        return max(priorities) <= least

    def note_steps(self, count: int) -> None:
        """So many steps went by without a plan."""
        self._since_aged += count
        self._num_steps += count

    def _as_running(self, request: Request, now: float, *, may_preempt: bool) -> plans.Running:
        assert request.lease is not None, "running requests hold a lease"
        num_tokens = request.num_to_compute
        return plans.Running(
            id=request.id,
            num_tokens=num_tokens,
            num_computed=request.num_computed,
            num_pages=len(request.lease.page_ids),
            max_new_tokens=request.remaining_new,
            priority=request.params.priority,
            num_exclusive_pages=self._cache.num_exclusive(request.lease) if may_preempt else None,
            ids=request.ids[:num_tokens],
            namespace=request.namespace,
            waited_seconds=_waited(request, now),
            program=request.job.program,
        )

    def _as_waiting(self, request: Request) -> plans.Waiting:
        number = request.id
        known = self._looked_at_before.get(number)
        match = self._cache.remembered.get(number)
        if known is not None and match is not None and match is known[2]:
            return known[0]
        before, head, _ = known or self._first_look(request)
        if match is None:
            match = self._cache.peek(head, before.namespace, number)
        if (match.num_cached, match.num_locked_pages) != (before.num_cached, before.num_locked_pages):
            before = replace(before, num_cached=match.num_cached, num_locked_pages=match.num_locked_pages)
        self._looked_at_before[number] = before, head, match
        return before

    def _first_look(self, request: Request) -> tuple[plans.Waiting, TokenIds, None]:
        ids, most = request.ids, _max_cached(request)
        looked_at = plans.Waiting(
            id=request.id,
            ids=ids[: request.num_to_compute],
            max_new_tokens=request.remaining_new,
            priority=request.params.priority,
            first_step=request.first_step,
            waits_from=_waits_from(request),
            namespace=request.namespace,
            max_cached=most,
            program=request.job.program,
            is_set_back=request.num_lost > 0,
        )
        return looked_at, ids[:most], None

    # -- coming and going -------------------------------------------------------------------------------------------

    def _admit(self, request: Request) -> None:
        found = self._pages.acquire(
            request.ids,
            request.namespace,
            most=_max_cached(request),
            room_for=request.num_to_compute,
            priority=request.params.priority,
        )
        if found is None:
            return
        self.wait_no_more(request)
        request.hold_ids()
        request.lease, request.num_computed = found
        if request.num_cached is None:
            request.admitted = readiness.clock()
            request.num_cached = 0
        # Forced tokens behind the prompt may be cached; and after a preemption what it had computed itself.
        num_given = max(0, min(request.num_computed, request.num_prompt) - request.num_lost)
        request.num_cached += num_given
        self._counters.cached_tokens += num_given
        self.running[request.id] = request

    def wait(self, request: Request) -> None:
        request.first_step = self._num_steps - request.waited_steps
        self.waiting.add(request)
        self._line_is_read |= _is_read(request)

    def wait_no_more(self, request: Request) -> None:
        self.waiting.remove(request)
        request.waited_steps = self._num_steps - request.first_step
        self._looked_at_before.pop(request.id, None)
        self._cache.forget(request.id)
        kept = self._set_back.pop(request.id, None)
        if kept is not None:
            self._pages.unpin(kept)

    def preempt(self, request: Request) -> None:
        """Give the pages back; the tokens stay known, and what the tree keeps need not be computed again. It keeps that
        for longer than what nobody is about to ask for, such as the texts of those who have ended."""
        request.num_lost = max(request.num_lost, request.num_computed)
        self.leave(request)
        if request.num_lost and self._config.enable_prefix_cache:
            self._set_back[request.id] = self._pages.pin(request.ids[: request.num_lost], request.namespace)
        if request.waits_since is None:
            request.waits_since = time.perf_counter()
        self._counters.preemptions += 1
        self.wait(request)

    def leave(self, request: Request) -> None:
        """Out of the running ones. What it had computed goes into the tree."""
        if request.lease is not None:
            self._cache.release(request.lease, request.ids, request.num_computed)
            request.lease = None
            request.num_computed = 0
        self.running.pop(request.id, None)

    def drop(self, request: Request) -> None:
        """Leave without giving the tree anything that was not committed before."""
        if request.lease is not None:
            self._cache.discard(request.lease)
            request.lease = None
        self.running.pop(request.id, None)


def _waited(request: Request, now: float) -> float:
    """Seconds without a row that it could have had, until `now`."""
    return request.waited_seconds + (0.0 if request.waits_since is None else now - request.waits_since)


def _waits_from(request: Request) -> float:
    """Of one that waits: since when it would, had it waited all at once."""
    assert request.waits_since is not None, "it waits"
    return request.waits_since - request.waited_seconds


def _note_row(request: Request, now: float, *, has_row: bool) -> None:
    """Of a step. A prefill that a higher priority holds up waits, too."""
    if has_row:
        request.waited_seconds, request.waits_since = _waited(request, now), None
    elif request.waits_since is None and request.num_computed < request.num_to_compute:
        request.waits_since = now


def _is_read(request: Request) -> bool:
    """Whether somebody reads its text as it comes."""
    return isinstance(request.job, GenerateJob) and request.index == 0 and request.job.generation.is_read


def _max_cached(request: Request) -> int:
    # Leave at least one token uncached: attention needs a query row to give logits. Where the prompt's own
    # log-probabilities are asked for, all positions from `logits_from` on must run.
    return max(0, min(request.logits_from, request.num_to_compute - 1))


def pages_of(request: Request) -> list[int]:
    assert request.lease is not None, "running requests hold a lease"
    return request.lease.page_ids
