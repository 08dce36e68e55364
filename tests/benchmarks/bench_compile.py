"""W6 and W7 as programs: compiled against interpreted, in process and over HTTP against a server of its own process.

    python -m tests.benchmarks.bench_compile --json build/bench_compile.json
    python -m tests.benchmarks.bench_compile --programs 4 --answer 8    # shorter, for a look

Both sides run the same bodies from the same threads on the bundled model, greedy, with equal work: the answers' lengths
are fixed. Every run begins with an empty cache. Aim: 1.3 times the programs a second. The notes tell the processor time
of all processes that took part, which other work on the machine changes less than the clock's time.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

import niwaki as nw
from niwaki.lang.backends import Administered, Host
from niwaki.lang.program import Program
from niwaki.lang.remote import RuntimeEndpoint
from niwaki.lang.state import State
from niwaki.runtime.engine import Engine
from tests.benchmarks.bench_server import our_server, processor_seconds
from tests.benchmarks.harness import MIN_PAIRS, Comparison, compare, number_of_pairs, table, write_json

WORDS = "the cat dog mat log sat on and in town lives works name city asks says who where what green".split()


def text_of(count: int, seed: int) -> str:
    """About `count` tokens."""
    draw = random.Random(seed)
    return " ".join(draw.choice(WORDS) for _ in range(count))


@nw.function
def skeleton(s: State, shared: str, topic: str, branches: int) -> None:
    """W6: points of one outline, each worked out by a branch of its own."""
    s += shared + topic + "\nThe points:\n"
    forks = s.fork(branches)
    for index, fork in enumerate(forks):
        fork += f"{index}. " + nw.gen("point")
    forks.join()
    s += "\n".join(s["point"])  # type: ignore[arg-type]  # a list of texts


@nw.function
def judge(s: State, shared: str, topic: str, branches: int) -> None:
    """W7: branch, solve, merge. Five calls."""
    s += shared + topic
    forks = s.fork(branches)
    for index, fork in enumerate(forks):
        fork += f"\nBy measure {index}: " + nw.gen("view")
    forks.join()
    s += "\nThe judges said:\n" + "\n".join(s["view"]) + "\nIn short: " + nw.gen("summary")  # type: ignore[arg-type]
    s += f"\nGiven that {s['summary']}, the verdict: " + nw.gen("verdict")


@dataclass(frozen=True, slots=True)
class Shape:
    workload: str
    program: Program
    programs: int
    branches: int
    shared: int  # tokens, as are the next two
    own: int
    answer: int

    def __str__(self) -> str:
        return f"{self.programs} x {self.branches} branches, P{self.shared} q{self.own} o{self.answer}"


W6 = Shape("W6", skeleton, 1, 8, 256, 8, 48)
W6_AT_ONCE = replace(W6, workload="W6x16", programs=16)
W7 = Shape("W7", judge, 32, 3, 384, 24, 32)


def runner(
    shape: Shape, program: Program, host: Host, threads: int, used: list[float], processes: Sequence[psutil.Process]
) -> Callable[[], None]:
    """All programs of a shape once, from threads that start the next one when one is done. `used` gets the seconds of
    processor time."""
    shared = text_of(shape.shared, 0)
    options = {"temperature": 0, "max_new_tokens": shape.answer, "ignore_eos": True, "backend": host}

    def one(number: int) -> None:
        program.run(shared, text_of(shape.own, number + 1), shape.branches, options=options).sync()

    def run() -> None:
        assert isinstance(host, Administered)
        host.flush_cache()
        before = sum(map(processor_seconds, processes))
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(one, range(shape.programs)))
        used.append(sum(map(processor_seconds, processes)) - before)

    return run


def measured(
    shape: Shape, host: Host, where: str, pairs: int, threads: int, server: Sequence[psutil.Process] = ()
) -> Comparison:
    processes = (psutil.Process(), *server)
    compiled: list[float] = []
    interpreted: list[float] = []

    def notes() -> dict[str, float]:
        a, b = statistics.median(compiled), statistics.median(interpreted)
        return {"processor s, compiled": a, "interpreted": b, "ratio": b / a}

    return compare(
        f"{shape.workload} {where}",
        str(shape),
        ("compiled", runner(shape, shape.program.compile(), host, threads, compiled, processes)),
        ("interpreted", runner(shape, shape.program, host, threads, interpreted, processes)),
        aim="1.3",
        pairs=pairs,
        notes=notes,
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--pairs", type=number_of_pairs, default=MIN_PAIRS)
    parser.add_argument("--programs", type=int, default=W7.programs, help="of W7")
    parser.add_argument("--answer", type=int, help="tokens of each answer, instead of the workloads' own")
    parser.add_argument("--threads", type=int, default=32)
    parser.add_argument("--only", choices=["W6", "W6x16", "W7"], help="one of the shapes only")
    parser.add_argument("--where", choices=["process", "http"], help="one of the two only")
    given = parser.parse_args(argv)
    shapes = [W6, W6_AT_ONCE, replace(W7, programs=given.programs)]
    if given.only is not None:
        shapes = [shape for shape in shapes if shape.workload == given.only]
    if given.answer is not None:
        shapes = [replace(shape, answer=given.answer) for shape in shapes]
    found: list[Comparison] = []
    if given.where != "http":
        with Engine() as engine:
            found += [measured(shape, engine, "in process", given.pairs, given.threads) for shape in shapes]
    if given.where != "process":
        with our_server(None) as (side, server), RuntimeEndpoint(side.url.removesuffix("/v1")) as endpoint:
            there = [server, *server.children(recursive=True)]
            found += [measured(shape, endpoint, "over HTTP", given.pairs, given.threads, there) for shape in shapes]
    print(table(found))
    if given.json is not None:
        machine = {"processors": os.cpu_count(), "machine": platform.machine(), "load": os.getloadavg()}
        write_json(given.json, found, machine)
    return 0


if __name__ == "__main__":
    sys.exit(main())
