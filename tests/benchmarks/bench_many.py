"""Many programs at once on the bundled model: 2,000 async, 200 on threads, 3 gens and a fork each; what they take.

python -m tests.benchmarks.bench_many --threaded 200 --asynchronous 0
python -m tests.benchmarks.bench_many --threaded 0 --asynchronous 2000
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
    most_threads, most_bytes, is_over = 0, 0, threading.Event()
    process = psutil.Process()

    def watch() -> None:
        nonlocal most_threads, most_bytes
        while not is_over.wait(0.05):
            most_threads = max(most_threads, threading.active_count())
            most_bytes = max(most_bytes, process.memory_info().rss)

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
    most = f"at most {most_threads} threads and {most_bytes / MEBIBYTE:.0f} MiB"
    print(f"{count} {what} programs: {seconds:.1f} s, {most}; check() passed", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threaded", type=int, default=200)
    parser.add_argument("--asynchronous", type=int, default=2000)
    arguments = parser.parse_args(argv)
    with Engine() as engine:
        many = [(number,) for number in range(arguments.asynchronous)]

        async def all_at_once() -> list[State[int] | Exception]:
            return await asynchronous.arun_batch(many, concurrency=len(many), backend=engine, options=OPTIONS)

        rows = [(number,) for number in range(arguments.threaded)]

        def on_threads() -> list[State[int] | Exception]:
            return threaded.run_batch(rows, num_threads=len(rows), backend=engine, options=OPTIONS)

        # Async ones first, while no thread of the others is still ending.
        if many:
            measured("async", engine, lambda: asyncio.run(all_at_once()))
        if rows:
            measured("threaded", engine, on_threads)
    return 0


if __name__ == "__main__":
    sys.exit(main())
