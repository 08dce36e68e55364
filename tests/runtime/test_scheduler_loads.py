"""Whole loads on the scheduler and the real cache, in a small engine without a model."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
from msgspec.structs import replace

from niwaki.radix import Cache, Lease, Pin, TokenIds
from niwaki.runtime.loop.filling import growth_tokens
from niwaki.runtime.loop.plans import AGED_STEPS, Plan, Room, Running, Waiting
from niwaki.runtime.loop.scheduler import PRIORITY_SECONDS, Policy, outranked, plan
from tests.runtime.test_scheduler import ROOM, decoding, tokens


@dataclass(eq=False)
class Request:
    id: int
    ids: TokenIds
    max_new_tokens: int  # still to come
    arrives: int = 0
    priority: int = 0
    namespace: str = ""
    lease: Lease | None = None
    kept: Pin | None = None  # of what it had computed, since it was preempted
    num_computed: int = 0
    most_computed: int = 0
    waited_steps: int = 0
    admitted_step: int | None = None  # the first time
    num_cached: int = 0  # then
    first_token_step: int | None = None
    last_row_step: int = 0


@dataclass
class FakeEngine:
    """The engine core's loop around `plan`, with a cache but no model: the next token is a function of the request."""

    cache: Cache
    max_batch_tokens: int = 256
    max_running: int = 64
    policy: Policy = "lpm"
    waiting: list[Request] = field(default_factory=list)
    running: list[Request] = field(default_factory=list)
    finished: list[Request] = field(default_factory=list)
    now: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    preemptions: int = 0
    longest_decode_gap: int = 0
    since_aged: int = AGED_STEPS
    tokens_since_aged: int = 0
    step_seconds: float = 0.01
    spares_higher: bool = False  # lower ones sit steps out for them, and have short pieces
    was_alone: bool = False
    steps_alone: int = 0
    unseen_steps: int = 0  # in which it did not matter who of low priority waits
    partly_seen_steps: int = 0  # of these, where others were of a high one
    checks: bool = True  # what must hold after each step, which takes longer than the step

    def run(self, requests: list[Request], *, max_steps: int) -> None:
        future = sorted(requests, key=lambda request: (request.arrives, request.id))
        while future or self.waiting or self.running:
            while future and future[0].arrives <= self.now:
                self.waiting.append(future.pop(0))
            self.step()
            assert self.now < max_steps, f"{len(self.waiting)} wait, {len(self.running)} run after {self.now} steps"

    def step(self) -> Plan:
        waiting = [self.as_waiting(request) for request in self.waiting]
        running = [self.as_running(request) for request in self.running]
        made = plan(waiting, running, self.room(), self.policy)
        least = outranked(running, self.room()) if self.checks else None
        seen = [request for request in waiting if least is None or request.priority > least]
        num_seen = sum(request.id in made.admit for request in seen)
        if len(seen) < len(waiting) and len(made.preempt) <= max(1, num_seen):  # else a place is left over
            assert plan(seen, running, self.room(), self.policy) == made, "the others need not be looked at"
            self.unseen_steps += 1
            self.partly_seen_steps += len(seen) > 0
        self.was_alone = made.is_alone
        self.steps_alone += made.is_alone
        assert made.num_tokens <= self.max_batch_tokens
        assert made.rows or not (self.running or self.waiting), "a step without rows is a stall"
        self.count_aged(made)
        for id in made.preempt:
            self.preempt(id)
        for id in made.admit:
            self.admit(id)
        rows = [(request, row.num_tokens) for row in made.rows for request in self.running if request.id == row.id]
        rows = [(request, size) for request, size in rows if self.reserve(request, size)]
        assert rows or not (self.running or self.waiting), "nobody got the pages for its row"
        for request, size in rows:
            self.forward(request, size)
        has_row = {request.id for request, _ in rows}
        for request in (*self.waiting, *self.running):
            request.waited_steps += request.id not in has_row
        self.now += 1
        if self.checks:
            self.cache.check()
        return made

    def count_aged(self, made: Plan) -> None:
        self.since_aged += 1
        if made.aged is not None:
            self.since_aged = self.tokens_since_aged = 0
        for one in self.waiting:
            if one.id in made.admit and one.id != made.aged:
                self.tokens_since_aged += len(one.ids) + growth_tokens(one.max_new_tokens, self.cache.page_size)

    def room(self) -> Room:
        free_pages = self.cache.num_free + self.cache.num_evictable
        shares = self.cache.enabled
        room = Room(free_pages, self.cache.page_size, self.max_batch_tokens, self.max_running, self.now)
        room = replace(room, shares_prefixes=shares, num_pages=self.cache.num_pages)
        room = replace(room, since_aged=self.since_aged, tokens_since_aged=self.tokens_since_aged)
        if not self.spares_higher:
            return room
        return replace(room, max_lower_tokens=128, highest=1, admits_alone=not self.was_alone)

    def as_waiting(self, request: Request) -> Waiting:
        found = self.cache.peek(request.ids[:-1], request.namespace)
        return Waiting(
            request.id,
            request.ids,
            request.max_new_tokens,
            num_cached=found.num_cached,
            num_locked_pages=found.num_locked_pages,
            priority=request.priority,
            first_step=self.now - request.waited_steps,
            waits_from=-request.waited_steps * self.step_seconds,
            namespace=request.namespace,
            is_set_back=request.kept is not None,
        )

    def as_running(self, request: Request) -> Running:
        assert request.lease is not None
        return Running(
            request.id,
            len(request.ids),
            request.num_computed,
            len(request.lease.page_ids),
            request.max_new_tokens,
            num_exclusive_pages=self.cache.num_exclusive(request.lease),
            priority=request.priority,
            ids=request.ids,
            namespace=request.namespace,
            waited_seconds=request.waited_steps * self.step_seconds,
        )

    def preempt(self, id: int) -> None:
        request = next(one for one in self.running if one.id == id)
        assert request.lease is not None
        self.running.remove(request)
        self.cache.release(request.lease, request.ids, request.num_computed)
        request.kept = self.cache.pin(request.ids[: request.num_computed], request.namespace)
        request.lease, request.num_computed = None, 0
        self.waiting.append(request)
        self.waiting.sort(key=lambda one: (one.arrives, one.id))
        self.preemptions += 1

    def admit(self, id: int) -> None:
        request = next(one for one in self.waiting if one.id == id)
        ids = request.ids
        lease = self.cache.acquire(ids, request.namespace, max_cached=len(ids) - 1, room_for=len(ids))
        if lease is not None:
            self.waiting.remove(request)
            self.running.append(request)
            request.lease, request.num_computed = lease, lease.num_cached
            if request.admitted_step is None:
                request.admitted_step, request.num_cached = self.now, lease.num_cached
            if request.kept is not None:
                self.cache.unpin(request.kept)
                request.kept = None

    def reserve(self, request: Request, num_tokens: int) -> bool:
        assert request.lease is not None
        stop = min(len(request.ids), request.num_computed + num_tokens)
        return self.cache.reserve(request.lease, stop)

    def forward(self, request: Request, num_tokens: int) -> None:
        assert request.lease is not None
        stop = min(len(request.ids), request.num_computed + num_tokens)
        self.computed_tokens += stop - request.num_computed
        self.recomputed_tokens += max(0, min(stop, request.most_computed) - request.num_computed)
        request.num_computed = stop
        request.most_computed = max(stop, request.most_computed)
        has_all = stop == len(request.ids)
        self.cache.commit(request.lease, request.ids, stop, share_tail=has_all and num_tokens > 1)
        if not has_all:
            return
        if request.first_token_step is None:
            request.first_token_step = self.now
        else:
            self.longest_decode_gap = max(self.longest_decode_gap, self.now - request.last_row_step)
        request.last_row_step = self.now
        request.max_new_tokens -= 1
        if request.max_new_tokens == 0:
            self.running.remove(request)
            self.finished.append(request)
            self.cache.release(request.lease, request.ids, stop)
            return
        token = (request.id * 31 + len(request.ids)) % 2000
        request.ids = np.append(request.ids, np.int32(token))


def random_load(seed: int, count: int, *, longest: int) -> list[Request]:
    """Requests of all sizes up to `longest` tokens of KV, many of them behind one of a few common prefixes."""
    rng = random.Random(seed)
    prefixes = [tokens(1000 + i, rng.randint(1, longest // 2)) for i in range(4)]
    load = []
    for id in range(count):
        max_new = rng.randint(1, longest // 3)
        head = rng.choice(prefixes) if rng.random() < 0.7 else tokens(id, 0)
        size = rng.randint(1, max(1, longest - max_new + 1 - len(head)))
        ids = np.concatenate([head, tokens(id, size)])[: longest - max_new + 1]
        load.append(Request(id, ids, max_new, arrives=rng.randint(0, 60), priority=int(rng.random() < 0.1)))
    return load


@pytest.mark.parametrize(
    ("num_pages", "page_size", "policy"),
    [(8, 16, "lpm"), (8, 16, "fcfs"), (24, 16, "lpm"), (400, 16, "lpm"), (96, 1, "lpm"), (4, 32, "lpm")],
)
@pytest.mark.parametrize("spares_higher", [False, True])
def test_every_request_ends_in_a_pool_of_any_size_that_fits_the_largest(
    num_pages: int, page_size: int, policy: Policy, spares_higher: bool
) -> None:
    engine = FakeEngine(Cache(num_pages, page_size), policy=policy, spares_higher=spares_higher)
    load = random_load(num_pages, 300 if num_pages == 400 else 60, longest=min(200, num_pages * page_size))
    engine.run(load, max_steps=20_000)
    assert len(engine.finished) == len(load)
    assert engine.steps_alone == 0 or spares_higher
    assert engine.steps_alone > 0 or not spares_higher or num_pages < 400
    stats = engine.cache.stats()
    assert stats.held_pages == 0
    assert stats.evictable_pages == stats.tree_pages
    useful_tokens = engine.computed_tokens - engine.recomputed_tokens
    assert engine.recomputed_tokens <= 0.15 * useful_tokens, f"{engine.recomputed_tokens} of {useful_tokens} recomputed"


def test_every_request_ends_without_a_prefix_cache_too() -> None:
    engine = FakeEngine(Cache(16, 16, enabled=False))
    load = random_load(5, 50, longest=256)
    engine.run(load, max_steps=20_000)
    assert len(engine.finished) == len(load)
    assert engine.cache.num_free == 16


@pytest.mark.parametrize("prefix_size", [992, 1000])
def test_sixty_four_forks_compute_their_common_prefix_once(prefix_size: int) -> None:
    prefix = tokens(0, prefix_size)
    tails = np.arange(5000, 5000 + 64 * 24, dtype=np.int32).reshape(64, 24)  # no two start with the same token
    forks = [Request(i, np.concatenate([prefix, tail]), max_new_tokens=4) for i, tail in enumerate(tails)]
    engine = FakeEngine(Cache(400), max_batch_tokens=512)
    engine.run(forks, max_steps=100)
    assert engine.computed_tokens == prefix_size + 64 * (24 + 3), "the first token of 4 comes with the prompt"
    assert engine.preemptions == 0


def test_sixty_four_samples_of_one_prompt_compute_it_once() -> None:
    samples = [Request(i, tokens(0, 1000), max_new_tokens=4) for i in range(64)]
    engine = FakeEngine(Cache(400), max_batch_tokens=512)
    engine.run(samples, max_steps=100)
    assert engine.computed_tokens == 1000 + 63 * 1 + 64 * 3, "each sample computes the last prompt token for its logits"


def test_decoding_rows_get_a_token_in_every_step_while_long_prompts_arrive() -> None:
    load = [Request(i, tokens(i, 20), max_new_tokens=60) for i in range(8)]
    load += [Request(100 + i, tokens(100 + i, 900), max_new_tokens=4, arrives=5 * i) for i in range(12)]
    engine = FakeEngine(Cache(2000), max_batch_tokens=128)
    engine.run(load, max_steps=1000)
    assert engine.longest_decode_gap == 1


def test_nothing_starves_behind_a_stream_of_better_matches() -> None:
    def with_policy(policy: Policy) -> tuple[int, int]:
        """When the one that matches nothing has its first token, and when the last one of the stream."""
        common = tokens(0, 128)
        stream = [
            Request(i, np.concatenate([common, tokens(i, 8)]), max_new_tokens=8, arrives=i // 2) for i in range(1, 240)
        ]
        lonely = Request(10_000, tokens(10_000, 100), max_new_tokens=8, arrives=20)
        engine = FakeEngine(Cache(64), max_batch_tokens=64, max_running=4, policy=policy)
        engine.run([*stream, lonely], max_steps=3000)
        assert lonely.first_token_step is not None
        assert stream[-1].first_token_step is not None
        return lonely.first_token_step, stream[-1].first_token_step

    (found, last), (by_arrival, _) = with_policy("lpm"), with_policy("fcfs")
    assert found - 20 < 1.5 * (by_arrival - 20)
    assert last > 2 * found, "there was always a better match waiting"


@pytest.mark.parametrize("spares_higher", [False, True])
def test_high_priority_is_served_at_once_under_twice_the_load_that_fits(spares_higher: bool) -> None:
    rng = random.Random(1)
    low = [Request(i, tokens(i, 64), max_new_tokens=16, arrives=i // 2) for i in range(200)]
    high = [Request(1000 + i, tokens(1000 + i, 64), 8, arrives=rng.randint(5, 100), priority=1) for i in range(10)]
    engine = FakeEngine(Cache(200), max_batch_tokens=256, max_running=16, spares_higher=spares_higher)
    engine.run([*low, *high], max_steps=3000)
    assert engine.unseen_steps > 50
    assert engine.partly_seen_steps > 0
    waits = [request.first_token_step - request.arrives for request in high if request.first_token_step is not None]
    assert len(waits) == len(high)
    assert max(waits) <= 1, "a low one makes place, and its prefill takes a step"


def test_a_higher_priority_takes_the_place_of_who_loses_least_and_equals_take_none() -> None:
    running = [decoding(id, num_pages=2 + id, num_tokens=33 + 16 * id) for id in range(4)]
    full = replace(ROOM, max_running=4, free_pages=40)
    urgent = Waiting(9, tokens(9, 32), max_new_tokens=8, priority=1)
    made = plan([Waiting(8, tokens(8, 32), max_new_tokens=8), urgent], running, full)
    assert (made.preempt, made.admit) == ((0,), (9,))
    assert plan([urgent], running, replace(full, max_running=5)).preempt == (), "there is a place for it"
    for same in (replace(urgent, priority=0), replace(urgent, priority=0, waits_from=-3 * PRIORITY_SECONDS)):
        assert plan([same], running, full).preempt == ()
    aged = [replace(request, waited_seconds=PRIORITY_SECONDS) for request in running]
    assert plan([urgent], aged, full).preempt == (), "they waited long enough to count as much"


def test_nobody_makes_place_for_what_would_find_no_pages_even_so() -> None:
    running = [decoding(0), replace(decoding(1), priority=1)]
    large = Waiting(9, tokens(9, 32 * 16), max_new_tokens=8, priority=1)
    assert plan([large], running, replace(ROOM, free_pages=8)).preempt == ()


def test_plans_are_the_same_for_the_same_input() -> None:
    def trace() -> list[Plan]:
        engine = FakeEngine(Cache(24))
        engine.waiting = random_load(3, 60, longest=300)
        return [engine.step() for _ in range(120)]

    assert trace() == trace()
