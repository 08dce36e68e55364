"""What the language itself costs, on a backend that answers at once: a gen, a fork, a row of a batch. CPU time.

python -m tests.benchmarks.bench_lang --json build/bench_lang.json
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import niwaki as nw
from niwaki.lang.state import State
from niwaki.runtime.api import (
    BackendInfo,
    Branch,
    FinishReason,
    Generation,
    Message,
    Output,
    Pending,
    SamplingParams,
    Score,
    Segment,
    TokenLogprob,
)

NUM_GENS = 10
NUM_FORKS = 64
ANSWER = Output(" word", (7,), FinishReason("stop"), 10, 9)


class StubBranch:
    token_ids: Sequence[int] = ()
    num_tokens = 0


class StubBackend:
    """Answers every call before it returns, with the same token: what is left is the language's own work."""

    def info(self) -> BackendInfo:
        return INFO

    def open(self, *, namespace: str = "") -> StubBranch:
        return StubBranch()

    def fork(self, branch: Branch) -> StubBranch:
        return StubBranch()

    def close(self, branch: Branch) -> None:
        pass

    def append(self, branch: Branch, delta: Sequence[Segment]) -> None:
        pass

    def generate(self, branch: Branch, delta: Sequence[Segment], params: SamplingParams) -> Generation:
        generation = Generation()
        generation.succeed((ANSWER,) * params.n)
        return generation

    def score(
        self,
        branch: Branch,
        delta: Sequence[Segment],
        continuations: Sequence[str],
        *,
        heal: bool = False,
        unconditional: bool = False,
    ) -> Pending[tuple[Score, ...]]:
        pending: Pending[tuple[Score, ...]] = Pending()
        pending.succeed(tuple(Score(text, (TokenLogprob(-1.0, 7, text),)) for text in continuations))
        return pending

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        return "".join(message.content for message in messages)

    def usage(self) -> Mapping[str, float]:
        return {}


INFO = BackendInfo("stub", 1_000_000)


@nw.function
def ten_gens(s: State) -> None:
    for index in range(NUM_GENS):
        s += "some text "
        s += nw.gen(f"x{index}", max_tokens=8, temperature=0, stop="\n")


@nw.function
def one_gen(s: State, text: str) -> None:
    s += text + nw.gen("x", max_tokens=8)


@dataclass(frozen=True, slots=True)
class Cost:
    """The median and the quartiles of `what`, in microseconds of CPU time."""

    what: str
    median: float
    low: float
    high: float
    aim: str


def cost(what: str, aim: str, run: Callable[[], float], times: int) -> Cost:
    """`run` gives the microseconds of one go."""
    for _ in range(max(3, times // 10)):
        run()
    gc.collect()
    found = [run() for _ in range(times)]
    low, median, high = statistics.quantiles(found, n=4)
    return Cost(what, median, low, high, aim)


def microseconds(run: Callable[[], object], per: int = 1) -> float:
    began = time.thread_time_ns()
    run()
    return (time.thread_time_ns() - began) / 1000 / per


def cost_of_a_gen(times: int = 200) -> Cost:
    backend = StubBackend()

    def run() -> float:
        return microseconds(lambda: ten_gens.run(backend=backend).sync(), per=NUM_GENS)

    return cost(f"a gen of a program of {NUM_GENS}, its run included", "150", run, times)


def cost_of_forks(times: int = 100) -> Cost:
    backend = StubBackend()

    def run() -> float:
        state = one_gen.run("some text ", backend=backend)
        state.sync()
        forks: list[object] = []  # outlives the timing: letting go is not a part of it
        return microseconds(lambda: forks.append(state.fork(NUM_FORKS)))

    return cost(f"fork({NUM_FORKS})", "1000", run, times)


def cost_of_a_row(rows: int = 2000, times: int = 5) -> Cost:
    """Of a batch on 32 threads: CPU time of the whole process."""
    backend = StubBackend()

    def run() -> float:
        began = time.process_time_ns()
        for _ in one_gen.run_batch(((f"text {i} ",) for i in range(rows)), generator_style=True, backend=backend):
            pass
        return (time.process_time_ns() - began) / 1000 / rows

    return cost("a row of run_batch with one gen", "", run, times)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    costs = [cost_of_a_gen(), cost_of_forks(), cost_of_a_row()]
    for one in costs:
        aim = f"  (aim: under {one.aim})" if one.aim else ""
        print(f"{one.what:45} {one.median:8.1f} us  [{one.low:.1f}, {one.high:.1f}]{aim}")
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps([asdict(one) for one in costs], indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
