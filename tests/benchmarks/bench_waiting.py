"""Who waits how long where many more clients ask than there are places. Prints waiting by kind, and hit rates.

python -m tests.benchmarks.bench_waiting                # the scheduler and the cache without a model, in steps
python -m tests.benchmarks.bench_waiting --engine       # the bundled model, in seconds

200 clients over 64 places; whoever is answered asks again at once. A third of them chat: conversations of eight turns
behind a system prompt of 300 tokens. A third ask behind a short common prefix, a third behind none. With room for all
of their texts in the pool, and with less; longest prefix match against first come, first served. What one waits when
the benchmark ends counts, too: who starves is not left out.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from niwaki.radix import Cache, TokenIds
from niwaki.runtime.api import Generation, SamplingParams
from niwaki.runtime.engine import Engine
from niwaki.runtime.loop.scheduler import Policy
from tests.runtime.test_scheduler_loads import FakeEngine, Request

CLIENTS, PLACES, PAGE_SIZE = 200, 64, 16
KINDS = ("chat", "branch", "plain")
TURNS = 8
STEPS, SECONDS = 3000, 30.0
POOLS = (200_000, 100_000, 40_000, 25_000)  # tokens; all texts at once take some 65,000


@dataclass(frozen=True, slots=True)
class Asked:
    client: int
    ids: TokenIds
    max_new_tokens: int


class Clients:
    """What each of them asks next. Those who chat know what they were told."""

    def __init__(self, count: int, seed: int = 0) -> None:
        self.count = count
        self._rng = np.random.default_rng(seed)
        self._system, self._examples = self._tokens(300, 300), self._tokens(40, 40)
        self._histories: dict[int, tuple[TokenIds, int]] = {}  # and the turns in them

    def ask(self, client: int) -> Asked:
        match kind_of(client):
            case "chat":
                known, turns = self._histories.get(client, (self._system, 0))
                self._histories[client] = known, turns + 1
                return self._asked(client, np.concatenate([known, self._tokens(20, 60)]), 30, 90)
            case "branch":
                return self._asked(client, np.concatenate([self._examples, self._tokens(10, 40)]), 10, 60)
            case _:
                return self._asked(client, self._tokens(30, 120), 30, 90)

    def tell(self, asked: Asked, text: TokenIds) -> None:
        """`text`: the prompt and the answer."""
        if asked.client in self._histories:
            turns = self._histories[asked.client][1]
            self._histories[asked.client] = (text, turns) if turns < TURNS else (self._system, 0)

    def _asked(self, client: int, ids: TokenIds, least: int, most: int) -> Asked:
        return Asked(client, ids, int(self._rng.integers(least, most)))

    def _tokens(self, least: int, most: int) -> TokenIds:
        return self._rng.integers(16, 2000, int(self._rng.integers(least, most + 1)), dtype=np.int32)


def kind_of(client: int) -> str:
    return KINDS[client % len(KINDS)]


@dataclass(slots=True)
class Outcome:
    name: str
    waits: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    num_answered: int = 0
    prompt_tokens: int = 0  # of chats, which are as many in any order, if not of the same length
    cached_tokens: int = 0

    def note(self, asked: Asked, waited: float, cached: int) -> None:
        self.waits[kind_of(asked.client)].append(waited)
        self.num_answered += 1
        if kind_of(asked.client) == "chat":
            self.prompt_tokens += len(asked.ids)
            self.cached_tokens += min(cached, len(asked.ids))

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / max(1, self.prompt_tokens)

    @property
    def all_waits(self) -> list[float]:
        return [wait for waits in self.waits.values() for wait in waits]


def simulated(
    policy: Policy, pool_tokens: int, *, clients: int = CLIENTS, places: int = PLACES, steps: int = STEPS
) -> Outcome:
    """Waiting in steps. What was asked in the first tenth of them is left out: all ask at once then."""
    asking = Clients(clients)
    cache = Cache(pool_tokens // PAGE_SIZE, PAGE_SIZE)
    engine = FakeEngine(cache, max_batch_tokens=512, max_running=places, policy=policy, checks=False)
    outcome = Outcome(f"{policy}, {pool_tokens:,} tokens")
    sent: dict[int, Asked] = {}

    def send(client: int) -> None:
        asked = sent[len(sent)] = asking.ask(client)
        engine.waiting.append(Request(len(sent) - 1, asked.ids, asked.max_new_tokens, arrives=engine.now))

    for client in range(clients):
        send(client)
    for _ in range(steps):
        engine.step()
        for request in engine.finished:
            asked = sent[request.id]
            asking.tell(asked, request.ids)
            if request.arrives >= steps // 10:
                assert request.admitted_step is not None, "it was answered"
                outcome.note(asked, request.admitted_step - request.arrives, request.num_cached)
            send(asked.client)
        engine.finished.clear()
    for request in engine.waiting:
        outcome.waits[kind_of(sent[request.id].client)].append(engine.now - request.arrives)
    cache.check()
    return outcome


def measured(policy: Policy, pool_tokens: int, *, seconds: float) -> Outcome:
    """Waiting in seconds, on the bundled model."""
    asking = Clients(CLIENTS)
    outcome = Outcome(f"{policy}, {pool_tokens:,} tokens")
    with Engine(kv_tokens=pool_tokens, max_running_requests=PLACES, schedule_policy=policy) as engine:
        engine.generate("Hello", {"max_new_tokens": 8})
        began = time.perf_counter()
        open_since: dict[int, float] = {}
        is_over = False

        def send(client: int) -> None:
            asked, now = asking.ask(client), time.perf_counter()
            open_since[client] = now
            params = SamplingParams(max_new_tokens=asked.max_new_tokens, temperature=0.0, ignore_eos=True)
            generation = engine.backend.start(asked.ids, params)
            generation.add_done_callback(lambda: answered(asked, now, generation))

        def answered(asked: Asked, since: float, generation: Generation) -> None:
            if is_over:
                return
            (output,) = generation.result()
            asking.tell(asked, np.concatenate([asked.ids, np.array(output.token_ids, np.int32)]))
            if since - began >= seconds / 10:
                outcome.note(asked, output.queued_seconds, output.cached_tokens)
            send(asked.client)

        for client in range(CLIENTS):
            send(client)
        time.sleep(seconds)
        is_over = True
        now = time.perf_counter()
        oldest = sorted(open_since.items(), key=lambda item: item[1])[: CLIENTS - PLACES]
        for client, since in oldest:  # mostly of those who wait
            outcome.waits[kind_of(client)].append(now - since)
    return outcome


def table(outcomes: Sequence[Outcome], unit: str) -> str:
    head = f"{'waits, ' + unit:<24}" + "".join(f"{kind + ' p50 / p95 / max':>26}" for kind in KINDS)
    lines = [head + f"{'mean':>8}{'answered':>10}{'hit rate':>10}"]
    for one in outcomes:
        columns = ""
        for waits in one.waits.values():
            p50, p95 = np.percentile(waits or [0.0], (50, 95))
            column = " / ".join(f"{value:.{0 if unit == 'steps' else 1}f}" for value in (p50, p95, max(waits or [0.0])))
            columns += f"{column:>26}"
        mean = statistics.fmean(one.all_waits)
        lines.append(f"{one.name:<24}{columns}{mean:>8.1f}{one.num_answered:>10}{one.hit_rate:>10.1%}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", action="store_true", help="the bundled model instead of none")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for how long, with --engine")
    parser.add_argument("--pools", type=int, nargs="*", default=POOLS, metavar="TOKENS")
    options = parser.parse_args()
    policies: tuple[Policy, Policy] = ("lpm", "fcfs")
    pairs = [(policy, pool) for pool in options.pools for policy in policies]
    if options.engine:
        print(table([measured(*pair, seconds=options.seconds) for pair in pairs], "seconds"))
    else:
        print(table([simulated(*pair) for pair in pairs], "steps"))


if __name__ == "__main__":
    main()
