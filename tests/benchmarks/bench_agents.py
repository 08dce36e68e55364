"""W4: interleaved agents whose histories do not fit the pool together. Prints hit rates; no clock is read.

Run it as `python -m tests.benchmarks.bench_agents [--json PATH]`. 32 agents of 8 turns each; the next turn of an agent
comes when the one before is answered, so all of them are under way at once, over a pool of half of their tokens. The
engine core runs them against a model that costs nothing, longest prefix match against first come, first served. The
offline optimum knows the future: every token of a prompt is computed once. Aims: at least 97 % of the optimum, and 1.5
times first come, first served.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path

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
    prompt_tokens: int
    cached_tokens: int
    unique_tokens: int  # of all prompts
    pool_tokens: int
    preemptions: int

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens

    @property
    def optimum(self) -> float:
        return 1 - self.unique_tokens / self.prompt_tokens


class Agents:
    """Who is in which turn. Submits the next turn of an agent as soon as the last one is answered."""

    def __init__(self, core: EngineCore, tokenizer: Tokenizer, agents: int, turns: int) -> None:
        self.core, self.tokenizer, self.turns = core, tokenizer, turns
        self.rng = np.random.default_rng(0)
        self.params = SamplingParams(max_new_tokens=ANSWERED, temperature=0.0, ignore_eos=True)
        self.next_id = self.prompt_tokens = self.unique_tokens = 0
        self.left = agents * turns
        for _ in range(agents):
            self.ask(np.zeros(0, np.int32), FIRST, 0)

    def ask(self, known: TokenIds, num_new: int, turn: int) -> None:
        """`known`: what the agent's last turn left, its answer included."""
        ids = np.concatenate([known, self.rng.integers(16, 2000, num_new, dtype=np.int32)])
        self.prompt_tokens += len(ids)
        # New in this turn are what is read, and the last token of the answer before, whose KV was never needed.
        self.unique_tokens += num_new + (1 if len(known) else 0)
        generation = Generation()

        def answered() -> None:
            self.left -= 1
            if turn + 1 < self.turns:
                (output,) = generation.result()
                self.ask(np.concatenate([ids, np.array(output.token_ids, np.int32)]), OBSERVED, turn + 1)

        generation.add_done_callback(answered)
        self.next_id += 1
        job = GenerateJob(generation, 1)
        self.core.submit([Request(self.next_id, job, 0, ids, self.params, self.tokenizer)])


def run(policy: str, agents: int = AGENTS, turns: int = TURNS, max_running: int = MAX_RUNNING) -> Outcome:
    length = FIRST + (turns - 1) * OBSERVED + turns * ANSWERED
    pool_tokens = agents * length // 2
    config = EngineConfig(schedule_policy=policy, max_running_requests=max_running, chunked_prefill_size=512)
    tokenizer = Tokenizer(MODEL_DIR)
    runner = StubRunner(pool_tokens // PAGE_SIZE)
    core = EngineCore(runner, tokenizer, config, pool_tokens // PAGE_SIZE)  # type: ignore[arg-type]  # what it asks
    driven = Agents(core, tokenizer, agents, turns)
    while driven.left:
        core.step()
    core.pages.cache.check()
    return Outcome(
        policy,
        driven.prompt_tokens,
        core.counters.cached_tokens,
        driven.unique_tokens,
        pool_tokens,
        core.counters.preemptions,
    )


def table(outcomes: list[Outcome]) -> str:
    lines = [f"{'':<28}{'hit rate':>10}{'of optimum':>12}{'preempted':>11}"]
    names = {"lpm": "longest prefix match", "fcfs": "first come, first served"}
    lines += [
        f"{names[one.policy]:<28}{one.hit_rate:>10.1%}{one.hit_rate / one.optimum:>12.1%}{one.preemptions:>11}"
        for one in outcomes
    ]
    lines.append(f"{'offline optimum':<28}{outcomes[0].optimum:>10.1%}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    outcomes = [run("lpm"), run("fcfs")]
    print(table(outcomes))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps([asdict(one) for one in outcomes], indent=2) + "\n")


if __name__ == "__main__":
    main()
