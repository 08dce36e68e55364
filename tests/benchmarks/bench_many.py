"""Many programs at once on the bundled model: 200 on threads, 2,000 async, 3 gens and a fork each; what is left then.

python -m tests.benchmarks.bench_many --threaded 200 --asynchronous 2000
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import sys
import threading
import time
from collections.abc import Callable, Sequence

import psutil

import niwaki as nw
from niwaki.lang.state import State
from niwaki.runtime.engine import Engine

MEBIBYTE = 2**20
OPTIONS = {"temperature": 0, "ignore_eos": True}


@nw.function
def threaded(s: State, number: int) -> int:
    s += f"Program {number}: " + nw.gen("first", max_tokens=3)
    forks = s.fork(2)
    forks += lambda i: f" branch {i}" + nw.gen("branch", max_tokens=2)
    forks.join()
    s += f" after {s['first']}" + nw.gen("last", max_tokens=2)
    return len(str(s["last"]))


@nw.function
async def asynchronous(s: State, number: int) -> int:
    s += f"Program {number}: " + nw.gen("first", max_tokens=3)
    forks = s.fork(2)
    forks += lambda i: f" branch {i}" + nw.gen("branch", max_tokens=2)
    forks.join()
    s += f" after {await s.get('first')}" + nw.gen("last", max_tokens=2)
    return len(str(await s.get("last")))


def measured(what: str, engine: Engine, run: Callable[[], Sequence[State | Exception]]) -> None:
    """Run it, count failures, threads and memory, and prove that every page came back."""
    most_threads, is_over = 0, threading.Event()

    def watch() -> None:
        nonlocal most_threads
        while not is_over.wait(0.05):
            most_threads = max(most_threads, threading.active_count())

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.perf_counter()
    states = run()
    seconds = time.perf_counter() - began
    is_over.set()
    watcher.join()
    failed = [state for state in states if isinstance(state, Exception)]
    assert not failed, failed[0]
    count = len(states)
    del states
    gc.collect()
    while engine.stats()["pages_held"]:
        time.sleep(0.01)
    engine.backend.check()
    memory = psutil.Process().memory_info().rss / MEBIBYTE
    print(f"{count} {what} programs: {seconds:.1f} s, at most {most_threads} threads, {memory:.0f} MiB; check() passed")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threaded", type=int, default=200)
    parser.add_argument("--asynchronous", type=int, default=2000)
    arguments = parser.parse_args(argv)
    # Of 3 KiB a token: 192 MiB. A pool that is sized by free memory may by itself be most of a gibibyte.
    with Engine(kv_tokens=65_536) as engine:
        rows = [(number,) for number in range(arguments.threaded)]
        measured(
            "threaded", engine, lambda: threaded.run_batch(rows, num_threads=len(rows), backend=engine, options=OPTIONS)
        )
        many = [(number,) for number in range(arguments.asynchronous)]

        async def all_at_once() -> list[State | Exception]:
            return await asynchronous.arun_batch(many, concurrency=len(many), backend=engine, options=OPTIONS)

        measured("async", engine, lambda: asyncio.run(all_at_once()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
