"""Some lines of the scorecard at full size: L4, L5 and L8 on engines in this process, the others each against a server
in its own processes.

python -m tests.benchmarks.scorecard L1 F1 ...      # all of them without a name
python -m tests.benchmarks.scorecard L1 --amount 1000
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Callable, Coroutine

import psutil

from tests.benchmarks.scorecard import faults, hostile, load, pools, pressure, walls
from tests.benchmarks.scorecard.load import Line

Test = Callable[[int], Coroutine[None, None, list[Line]]]

# By name: how it is done, and how many requests, connections, rounds, seconds, kills, bodies or sessions it is.
TESTS: dict[str, tuple[Test, int]] = {
    "L1": (load.l1, 10_000),
    "L2": (pressure.l2, 2_000),
    "L3": (pressure.l3, 5),
    "L4": (pools.l4, 60),
    "L5": (pools.l5, 200),
    "L6": (load.l6, 200_000),
    "L7": (load.l7, 60),
    "L8": (pools.l8, 10),
    "F1": (faults.f1, 20),
    "F2": (faults.f2, 5),
    "F3": (faults.f3, 2),
    "F4": (faults.f4, 10),
    "F5": (load.f5, 100),
    "F6": (hostile.f6, 50),
    "F8": (hostile.f8, 20),
    "B1": (hostile.b1, 10_000),
    "B3": (hostile.b3, 100_000),
    "B4": (walls.b4, 1_000),
    "I2": (hostile.i2, 200),
    "I4": (walls.i4, 1_000),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*TESTS, []], help="all without")
    parser.add_argument("--amount", type=int, help="instead of the scorecard's")
    given = parser.parse_args()
    is_good = True
    for name in given.names or TESTS:
        test, amount = TESTS[name]
        began = time.perf_counter()
        lines = asyncio.run(test(given.amount or amount))
        took, load_now = time.perf_counter() - began, psutil.getloadavg()[0]
        print(f"{name}: {took:.0f} s, {os.cpu_count()} processors, {load_now:.1f} loaded")
        for what, figure, holds in lines:
            is_good &= holds
            print(f"  {'ok ' if holds else 'NOT'}  {what}: {figure}", flush=True)
    return 0 if is_good else 1


if __name__ == "__main__":
    raise SystemExit(main())
