"""W4: interleaved agents whose histories do not fit the pool together. Prints hit rates; no clock is read.

Run it as `python -m tests.benchmarks.bench_agents [--pause STEPS] [--json PATH]`. 32 agents of 8 turns each; the next
turn of an agent comes when the one before is answered, or so many of the engine's steps later, as after a call of a
tool; so all of them are under way at once, over a pool of half of their tokens. The engine core runs them against a
model that costs nothing, longest prefix match against first come, first served. Nobody can do better than to compute
every token of a prompt once, as a pool without bounds would, nor, in the order in which the turns were admitted and
answered, than to evict what is needed last, which takes the future to know. Aims, without pauses: at least 97 % of that
optimum, and 1.5 times first come, first served.
"""

from __future__ import annotations

import argparse
import json
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from niwaki.runtime.api import Generation, SamplingParams
from niwaki.runtime.bundled import MODEL_DIR
from niwaki.runtime.checkpoint.tokenizer import Tokenizer
from niwaki.runtime.loop.core import EngineCore
from niwaki.runtime.options.config import EngineConfig
from niwaki.runtime.options.limits import TokenIds
from niwaki.runtime.requests.jobs import GenerateJob
from niwaki.runtime.requests.request import Request
from tests.benchmarks.bench_host import PAGE_SIZE, StubRunner

AGENTS, TURNS = 32, 8
FIRST, OBSERVED, ANSWERED = 256, 48, 16  # tokens: of the first prompt, of what is read, of what is said in a turn
MAX_RUNNING = 8


@dataclass(frozen=True, slots=True)
class Outcome:
    policy: str
    eviction: str
    prompt_tokens: int
    cached_tokens: int
    unique_tokens: int  # of all prompts
    pool_tokens: int
    preemptions: int
    best_eviction: float  # of all hit rates in the order in which the turns were admitted and answered

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens

    @property
    def optimum(self) -> float:
        return 1 - self.unique_tokens / self.prompt_tokens


class Event(NamedTuple):
    """A turn gets its place, or is answered. `size`: tokens of its prompt."""

    agent: int
    size: int
    is_answered: bool


class Agents:
    """Who is in which turn. Submits the next turn of an agent `pause` steps after the last one was answered."""

    def __init__(self, core: EngineCore, tokenizer: Tokenizer, agents: int, turns: int, pause: int) -> None:
        self.core, self.tokenizer, self.turns, self.pause = core, tokenizer, turns, pause
        self.step = 0
        self.due: deque[tuple[int, int, TokenIds, int]] = deque()  # when, whose, what it knows, which turn
        self.events: list[Event] = []
        self._agents: dict[int, int] = {}  # whose the requests are
        self.rng = np.random.default_rng(0)
        self.params = SamplingParams(max_new_tokens=ANSWERED, temperature=0.0, ignore_eos=True)
        self.next_id = self.prompt_tokens = self.unique_tokens = 0
        self.left = agents * turns
        for agent in range(agents):
            self.ask(agent, np.zeros(0, np.int32), FIRST, 0)

    def take_step(self) -> None:
        self.step += 1
        if not self.core.has_work:
            self.step = max(self.step, self.due[0][0])
        while self.due and self.due[0][0] <= self.step:
            _, agent, known, turn = self.due.popleft()
            self.ask(agent, known, OBSERVED, turn)
        running, answered = set(self.core._roster.running), len(self.events)
        self.core.step()
        left = [r for number, r in self.core._roster.running.items() if number not in running]
        admitted = [Event(self._agents[r.id], r.num_prompt, is_answered=False) for r in left]
        self.events[answered:answered] = admitted  # before those who were answered in this step

    def ask(self, agent: int, known: TokenIds, num_new: int, turn: int) -> None:
        """`known`: what the agent's last turn left, its answer included."""
        ids = np.concatenate([known, self.rng.integers(16, 2000, num_new, dtype=np.int32)])
        self.prompt_tokens += len(ids)
        # New in this turn are what is read, and the last token of the answer before, whose KV was never needed.
        self.unique_tokens += num_new + (1 if len(known) else 0)
        generation = Generation()

        def answered() -> None:
            self.left -= 1
            self.events.append(Event(agent, len(ids), is_answered=True))
            if turn + 1 < self.turns:
                (output,) = generation.result()
                history = np.concatenate([ids, np.array(output.token_ids, np.int32)])
                if self.pause:
                    self.due.append((self.step + self.pause, agent, history, turn + 1))
                else:
                    self.ask(agent, history, OBSERVED, turn + 1)

        generation.add_done_callback(answered)
        self.next_id += 1
        self._agents[self.next_id] = agent
        job = GenerateJob(generation, 1)
        self.core.submit([Request(self.next_id, job, 0, ids, self.params, self.tokenizer)])


def best_eviction(events: Sequence[Event], pool_tokens: int) -> float:
    """The hit rate of an eviction that knows all `events`: what is needed last goes first, from its end. Who runs holds
    his prompt at least, so none does better in that order, where nobody is set back."""
    later: list[int] = []  # for each, when the same agent is admitted next
    seen: dict[int, int] = {}
    for place in reversed(range(len(events))):
        later.append(seen.get(events[place].agent, len(events)))
        if not events[place].is_answered:
            seen[events[place].agent] = place
    kept: dict[int, int] = {}
    needed: dict[int, int] = {}
    running: dict[int, int] = {}
    hits = total = 0
    for (agent, size, is_answered), when in zip(events, reversed(later), strict=True):
        if is_answered:
            del running[agent]
            kept[agent], needed[agent] = size + ANSWERED - 1, when
        else:
            hits += kept.pop(agent, 0)
            running[agent] = size
            total += size
        over = sum(kept.values()) + sum(running.values()) - pool_tokens
        for other in sorted(kept, key=lambda other: -needed[other]):
            if over > 0:
                gone = min(over, kept[other])
                kept[other] -= gone
                over -= gone
    return hits / total


def run(
    policy: str,
    agents: int = AGENTS,
    turns: int = TURNS,
    max_running: int = MAX_RUNNING,
    *,
    eviction: str = "lru",
    pause: int = 0,
) -> Outcome:
    length = FIRST + (turns - 1) * OBSERVED + turns * ANSWERED
    pool_tokens = agents * length // 2
    config = EngineConfig(
        schedule_policy=policy,
        eviction_policy=eviction,
        max_running_requests=max_running,
        chunked_prefill_size=512,
    )
    tokenizer = Tokenizer(MODEL_DIR)
    runner = StubRunner(pool_tokens // PAGE_SIZE)
    core = EngineCore(runner, tokenizer, config, pool_tokens // PAGE_SIZE)  # type: ignore[arg-type]  # what it asks
    driven = Agents(core, tokenizer, agents, turns, pause)
    while driven.left:
        driven.take_step()
    core.pages.cache.check()
    return Outcome(
        policy,
        eviction,
        driven.prompt_tokens,
        core.counters.cached_tokens,
        driven.unique_tokens,
        pool_tokens,
        core.counters.preemptions,
        best_eviction(driven.events, pool_tokens),
    )


def table(outcomes: list[Outcome]) -> str:
    lines = [f"{'':<32}{'hit rate':>10}{'best in its order':>19}{'preempted':>11}"]
    names = {"lpm": "longest prefix match", "fcfs": "first come, first served"}
    for one in outcomes:
        name = f"{names[one.policy]}, {one.eviction}"
        lines.append(f"{name:<32}{one.hit_rate:>10.1%}{one.best_eviction:>19.1%}{one.preemptions:>11}")
    lines.append(f"{'a pool without bounds':<32}{outcomes[0].optimum:>10.1%}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pause", type=int, default=0, metavar="STEPS")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    chosen = [("lpm", "lru"), ("lpm", "returning"), ("lpm", "lfu"), ("fcfs", "lru")]
    outcomes = [run(policy, eviction=eviction, pause=options.pause) for policy, eviction in chosen]
    print(table(outcomes))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps([asdict(one) for one in outcomes], indent=2) + "\n")


if __name__ == "__main__":
    main()
