"""The scheduler: single plans, and a small engine without a model that runs whole loads on the real cache."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
from msgspec.structs import replace

from niwaki.radix import Cache, Lease, TokenIds
from niwaki.runtime.loop.plans import AGED_STEPS, Plan, Room, Row, Running, Waiting
from niwaki.runtime.loop.scheduler import PRIORITY_STEPS, Policy, next_victim, plan

ROOM = Room(free_pages=1000, page_size=16, max_batch_tokens=512, max_running=64)


def tokens(seed: int, size: int) -> TokenIds:
    return np.random.default_rng(seed).integers(0, 2000, size, dtype=np.int32)


def decoding(id: int, *, num_tokens: int = 33, num_pages: int = 3, priority: int = 0) -> Running:
    return Running(id, num_tokens, num_tokens - 1, num_pages, max_new_tokens=10, priority=priority)


# -- one plan ---------------------------------------------------------------------------------------------------------


def test_decoding_rows_come_first_and_get_a_token_each_however_long_the_prefills() -> None:
    prefill = Running(1, 5000, 0, 313, max_new_tokens=10, ids=tokens(1, 5000))
    made = plan([], [prefill, *(decoding(i) for i in range(2, 12))], ROOM)
    assert made.rows[:10] == tuple(Row(i, 1) for i in range(2, 12))
    assert made.rows[10:] == (Row(1, 502),)


def test_a_short_run_of_forced_tokens_counts_as_decoding() -> None:
    prefill = Running(1, 5000, 0, 313, max_new_tokens=10, ids=tokens(1, 5000))
    forced = Running(2, 40, 31, 3, max_new_tokens=10)
    assert plan([], [prefill, forced], ROOM).rows == (Row(2, 9), Row(1, 503))


def test_the_budget_is_never_exceeded_and_prefills_are_cut_to_fit() -> None:
    waiting = [Waiting(i, tokens(i, 300), max_new_tokens=8) for i in range(5)]
    made = plan(waiting, [], ROOM)
    assert made.rows == (Row(0, 300), Row(1, 212))
    assert made.admit == (0, 1)
    assert made.num_tokens == ROOM.max_batch_tokens


def test_longest_prefix_match_goes_first_and_fcfs_does_not_care() -> None:
    waiting = [Waiting(i, tokens(i, 400), max_new_tokens=8, num_cached=cached) for i, cached in enumerate((0, 16, 320))]
    room = replace(ROOM, max_running=2)
    assert plan(waiting, [], room, "lpm").admit == (2, 1)
    assert plan(waiting, [], room, "fcfs").admit == (0, 1)


def test_who_waited_longest_goes_before_any_match_one_at_a_time() -> None:
    waiting = [
        Waiting(1, tokens(1, 100), max_new_tokens=8, num_cached=96),
        Waiting(2, tokens(2, 100), max_new_tokens=8, waited_steps=AGED_STEPS),
        Waiting(3, tokens(3, 100), max_new_tokens=8, waited_steps=AGED_STEPS + 5),
    ]
    made = plan(waiting, [], ROOM)
    assert (made.admit, made.aged) == ((3, 1, 2), 3)
    made = plan(waiting, [], replace(ROOM, since_aged=AGED_STEPS - 1))
    assert (made.admit, made.aged) == ((1, 2, 3), None), "the turn of the next one has not come"


@pytest.mark.parametrize("policy", ["lpm", "fcfs"])
def test_higher_priority_goes_first_until_the_lower_one_has_waited_very_long(policy: Policy) -> None:
    low = Waiting(1, tokens(1, 100), max_new_tokens=8, num_cached=96, waited_steps=AGED_STEPS)
    high = Waiting(2, tokens(2, 100), max_new_tokens=8, priority=1)
    room = replace(ROOM, max_running=1)
    assert plan([low, high], [], room, policy).admit == (2,)
    assert plan([replace(low, waited_steps=2 * PRIORITY_STEPS), high], [], room, policy).admit == (1,)


def test_who_does_not_fit_is_overtaken_until_it_has_aged() -> None:
    running = [decoding(0)]
    big = Waiting(1, tokens(1, 400), max_new_tokens=8, num_cached=16)
    small = Waiting(2, tokens(2, 20), max_new_tokens=8)
    room = replace(ROOM, free_pages=12)
    assert plan([big, small], running, room).admit == (2,)
    assert plan([replace(big, waited_steps=AGED_STEPS), small], running, room).admit == ()
    assert plan([big, small], running, room, "fcfs").admit == ()


def test_a_lone_request_that_fills_the_whole_pool_is_admitted() -> None:
    room = replace(ROOM, free_pages=10)
    assert plan([Waiting(1, tokens(1, 160), max_new_tokens=1)], [], room).rows == (Row(1, 160),)


def test_one_that_can_never_fit_does_not_block_the_others() -> None:
    waiting = [Waiting(1, tokens(1, 161), max_new_tokens=1, waited_steps=10**6), Waiting(2, tokens(2, 30), 8)]
    assert plan(waiting, [], replace(ROOM, free_pages=10)).admit == (2,)


def test_admission_leaves_room_for_those_who_run_to_grow() -> None:
    running = [decoding(i) for i in range(4)]  # each needs a page for 10 more tokens some time
    newcomer = Waiting(9, tokens(9, 16), max_new_tokens=16)  # a page now, one to grow
    assert plan([newcomer], running, replace(ROOM, free_pages=1)).admit == ()
    grown = [replace(one, num_pages=4) for one in running]
    assert plan([newcomer], grown, replace(ROOM, free_pages=1)).admit == ()
    assert plan([newcomer], grown, replace(ROOM, free_pages=2)).admit == (9,)


def test_pages_that_others_hold_already_cost_nothing() -> None:
    forks = [Waiting(i, np.concatenate([tokens(0, 320), tokens(i, 8)]), 8, num_cached=320) for i in range(1, 5)]
    room = replace(ROOM, free_pages=20 + 4)
    assert plan(forks, [], room).admit == (1, 2, 3, 4), (
        "the first takes the 20 pages of the prefix, the others one each"
    )
    assert plan(forks, [decoding(9, num_pages=4)], room).admit == (1, 2, 3, 4)
    held = [replace(fork, num_locked_pages=20) for fork in forks]
    assert plan(held, [decoding(9, num_pages=4)], replace(ROOM, free_pages=4)).admit == (1, 2, 3, 4)
    assert plan(forks, [decoding(9, num_pages=4)], replace(ROOM, free_pages=4)).admit == ()


# -- sharing inside the batch -----------------------------------------------------------------------------------------


def test_a_request_waits_for_a_prefix_that_is_being_prefilled() -> None:
    prefix = tokens(0, 1000)
    owner = Running(1, 1000, 512, 63, max_new_tokens=8, ids=prefix)
    same = Waiting(2, np.concatenate([prefix, tokens(2, 10)]), 8, num_cached=512)
    other = Waiting(3, tokens(3, 50), 8)
    assert plan([same, other], [owner], replace(ROOM, max_batch_tokens=2048)).admit == (3,)
    assert plan([replace(same, namespace="b")], [owner], replace(ROOM, max_batch_tokens=2048)).admit == (2,)
    assert plan([same], [owner], replace(ROOM, max_batch_tokens=2048, shares_prefixes=False)).admit == (2,)


def test_who_may_not_use_the_cache_does_not_wait_for_it_either() -> None:
    owner = Running(1, 1000, 512, 63, max_new_tokens=8, ids=tokens(0, 1000))
    scored = Waiting(2, tokens(0, 500), 8, max_cached=0)
    assert plan([scored], [owner], replace(ROOM, max_batch_tokens=2048)).admit == (2,)
    assert plan([replace(scored, max_cached=None)], [owner], replace(ROOM, max_batch_tokens=2048)).admit == ()
    cut = replace(scored, num_cached=500, max_cached=100)
    assert plan([cut], [], replace(ROOM, max_batch_tokens=2048)).rows == (Row(2, 400),)


def test_of_many_equal_prompts_one_is_admitted_and_the_rest_follow_a_step_later() -> None:
    prompt = tokens(0, 40)
    waiting = [Waiting(i, prompt, 8) for i in range(5)]
    assert plan(waiting, [], ROOM).admit == (0,)
    owner = Running(0, 41, 40, 3, max_new_tokens=7)
    assert plan([replace(one, num_cached=39) for one in waiting[1:]], [owner], ROOM).admit == (1, 2, 3, 4)


def test_a_gain_below_a_page_is_not_worth_waiting_for() -> None:
    owner = Running(1, 100, 96, 7, max_new_tokens=8, ids=tokens(0, 100))
    fork = Waiting(2, np.concatenate([tokens(0, 100), tokens(2, 50)]), 8, num_cached=96)
    assert plan([fork], [owner], ROOM).admit == (2,)


@pytest.mark.parametrize(("length", "count"), [(2, 1), (2, 15), (9, 1), (9, 2), (16, 1), (16, 2)])
@pytest.mark.parametrize("is_running", [True, False])
def test_short_prompts_wait_for_an_equal_one_where_together_they_save_a_page(
    length: int, count: int, *, is_running: bool
) -> None:
    ids = tokens(0, length)
    first = Waiting(0, ids, 8)
    running = [Running(99, length, 0, 1, 8, ids=ids)] if is_running else []
    others = [Waiting(i, ids.copy(), 8) for i in range(1, count + 1)]
    waits = (length - 1) * count >= ROOM.page_size
    admitted = [one.id for one in others] if not waits else []
    waiting = others if is_running else [first, *others]
    # The first one's place is its own: it counts for nobody.
    assert plan(waiting, running, ROOM).admit == tuple([] if is_running else [0]) + tuple(admitted)


def test_a_short_prompt_does_not_wait_for_the_long_one_that_begins_like_it() -> None:
    owner = Running(1, 3000, 0, 188, max_new_tokens=8, ids=tokens(0, 3000))
    assert plan([Waiting(2, tokens(0, 2), 8)], [owner], replace(ROOM, max_batch_tokens=4096)).admit == (2,)


def test_who_waits_for_whose_prefill_is_as_if_each_were_compared_with_all() -> None:
    def helps(one: Waiting, ids: TokenIds, namespace: str) -> bool:
        start = min(one.num_cached, one.most_cached)
        stop = min(start + ROOM.page_size, one.most_cached)
        alike = [
            other
            for other in waiting
            if other.id not in admitted
            and other.namespace == one.namespace
            and other.ids[: other.most_cached].tolist() == one.ids[: one.most_cached].tolist()
            and other.most_cached - other.num_cached < ROOM.page_size
        ]
        is_whole = stop > start and len(ids) >= len(one.ids) and (stop - start) * len(alike) >= ROOM.page_size
        is_gain = stop == start + ROOM.page_size or is_whole
        return namespace == one.namespace and is_gain and ids[:stop].tolist() == one.ids[:stop].tolist()

    rng = random.Random(5)
    texts = [np.array([rng.randrange(2) for _ in range(48)], np.int32) for _ in range(3)]
    room = replace(ROOM, max_batch_tokens=100_000)
    found = set()
    for _ in range(300):
        prompts = [rng.choice(texts)[: rng.randint(2, 48)] for _ in range(8)]
        prompts = [np.append(ids, np.int32(rng.randrange(2))) for ids in prompts]
        waiting = [
            Waiting(i, ids, 8, num_cached=rng.randrange(len(ids)), namespace=rng.choice(["", "", "b"]))
            for i, ids in enumerate(prompts)
        ]
        waiting.sort(key=lambda one: -one.num_cached)
        owner = Running(99, 60, 16, 10, 8, ids=np.append(rng.choice(texts), tokens(0, 12)), namespace="")
        assert owner.ids is not None
        prefilling, admitted = [(owner.ids, "")], []
        for one in waiting:
            if not any(helps(one, *prefill) for prefill in prefilling):
                admitted.append(one.id)
                prefilling.append((one.ids, one.namespace))
        assert plan(waiting, [owner], room).admit == tuple(admitted)
        found.add(len(admitted))
    assert len(found) > 3, "some wait and some do not"


# -- preemption -------------------------------------------------------------------------------------------------------


def test_nobody_is_preempted_while_the_next_tokens_fit() -> None:
    running = [decoding(i, num_tokens=33, num_pages=2) for i in range(4)]
    assert plan([], running, replace(ROOM, free_pages=4)).preempt == ()


def test_who_loses_least_among_the_lowest_priority_is_preempted_and_the_first_admitted_never() -> None:
    running = [
        decoding(0, num_tokens=17, num_pages=1),
        decoding(1, num_tokens=65, num_pages=4),
        decoding(2, num_tokens=49, num_pages=3),
        decoding(3, num_tokens=33, num_pages=2, priority=1),
    ]
    made = plan([Waiting(9, tokens(9, 4), 4)], running, replace(ROOM, free_pages=2))
    assert made.preempt == (0,), "3 has the higher priority, and is the one that is never preempted"
    assert made.admit == (), "what was just given up is not taken by a newcomer"
    flat = [replace(one, priority=0) for one in running]
    assert [one.id for one in (next_victim(flat), next_victim(flat[:3]), next_victim(flat[:2])) if one] == [3, 2, 1]
    assert next_victim(flat[:1]) is None


def test_prefills_that_hold_all_pages_between_them_do_not_wait_for_each_other() -> None:
    running = [Running(i, 200, 80, 5, max_new_tokens=8, ids=tokens(i, 200)) for i in range(4)]
    made = plan([], running, replace(ROOM, free_pages=0))
    assert made.preempt == (3,)
    assert made.rows == (Row(0, 80),)


# -- whole loads ------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Request:
    id: int
    ids: TokenIds
    max_new_tokens: int  # still to come
    arrives: int = 0
    priority: int = 0
    namespace: str = ""
    lease: Lease | None = None
    num_computed: int = 0
    most_computed: int = 0
    waited_steps: int = 0
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

    def run(self, requests: list[Request], *, max_steps: int) -> None:
        future = sorted(requests, key=lambda request: (request.arrives, request.id))
        while future or self.waiting or self.running:
            while future and future[0].arrives <= self.now:
                self.waiting.append(future.pop(0))
            self.step()
            assert self.now < max_steps, f"{len(self.waiting)} wait, {len(self.running)} run after {self.now} steps"

    def step(self) -> Plan:
        made = plan(
            [self.as_waiting(request) for request in self.waiting],
            [self.as_running(request) for request in self.running],
            self.room(),
            self.policy,
        )
        assert made.num_tokens <= self.max_batch_tokens
        assert made.rows or not (self.running or self.waiting), "a step without rows is a stall"
        self.since_aged = 0 if made.aged is not None else self.since_aged + 1
        for id in made.preempt:
            self.preempt(id)
        for id in made.admit:
            self.admit(id)
        rows = [(request, row.num_tokens) for row in made.rows for request in self.running if request.id == row.id]
        rows = [(request, size) for request, size in rows if self.reserve(request, size)]
        assert rows or not (self.running or self.waiting), "nobody got the pages for its row"
        for request, size in rows:
            self.forward(request, size)
        for request in (*self.waiting, *self.running):
            request.waited_steps += all(request is not other for other, _ in rows)
        self.now += 1
        self.cache.check()
        return made

    def room(self) -> Room:
        free_pages = self.cache.num_free + self.cache.num_evictable
        shares = self.cache.enabled
        return Room(free_pages, self.cache.page_size, self.max_batch_tokens, self.max_running, shares, self.since_aged)

    def as_waiting(self, request: Request) -> Waiting:
        found = self.cache.peek(request.ids[:-1], request.namespace)
        return Waiting(
            request.id,
            request.ids,
            request.max_new_tokens,
            num_cached=found.num_cached,
            num_locked_pages=found.num_locked_pages,
            priority=request.priority,
            waited_steps=request.waited_steps,
            namespace=request.namespace,
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
            waited_steps=request.waited_steps,
        )

    def preempt(self, id: int) -> None:
        request = next(one for one in self.running if one.id == id)
        assert request.lease is not None
        self.running.remove(request)
        self.cache.release(request.lease, request.ids, request.num_computed)
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
def test_every_request_ends_in_a_pool_of_any_size_that_fits_the_largest(
    num_pages: int, page_size: int, policy: Policy
) -> None:
    engine = FakeEngine(Cache(num_pages, page_size), policy=policy)
    load = random_load(num_pages, 300 if num_pages == 400 else 60, longest=min(200, num_pages * page_size))
    engine.run(load, max_steps=20_000)
    assert len(engine.finished) == len(load)
    stats = engine.cache.stats()
    assert stats.held_pages == 0
    assert stats.evictable_pages == stats.tree_pages
    useful_tokens = engine.computed_tokens - engine.recomputed_tokens
    assert engine.recomputed_tokens <= 0.3 * useful_tokens, f"{engine.recomputed_tokens} of {useful_tokens} recomputed"


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
    common = tokens(0, 128)
    stream = [
        Request(i, np.concatenate([common, tokens(i, 8)]), max_new_tokens=8, arrives=i // 2) for i in range(1, 240)
    ]
    lonely = Request(10_000, tokens(10_000, 100), max_new_tokens=8, arrives=20)
    engine = FakeEngine(Cache(64), max_batch_tokens=64, max_running=4)
    engine.run([*stream, lonely], max_steps=3000)
    assert lonely.first_token_step is not None
    assert lonely.first_token_step < 20 + AGED_STEPS + 20
    assert stream[-1].first_token_step is not None
    assert stream[-1].first_token_step > 2 * lonely.first_token_step, "there was always a better match waiting"


def test_high_priority_is_served_at_once_under_twice_the_load_that_fits() -> None:
    rng = random.Random(1)
    low = [Request(i, tokens(i, 64), max_new_tokens=16, arrives=i // 2) for i in range(200)]
    high = [Request(1000 + i, tokens(1000 + i, 64), 8, arrives=rng.randint(5, 100), priority=1) for i in range(10)]
    engine = FakeEngine(Cache(200), max_batch_tokens=256, max_running=16)
    engine.run([*low, *high], max_steps=3000)
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
    for same in (replace(urgent, priority=0), replace(urgent, priority=0, waited_steps=3 * PRIORITY_STEPS)):
        assert plan([same], running, full).preempt == ()
    aged = [replace(request, waited_steps=PRIORITY_STEPS) for request in running]
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
