"""From `niwaki serve` on the command line to the first token at a client, over again; the model is the bundled one.

    python -m tests.benchmarks.bench_start [--runs 5]

The kernels are compiled before: the first start on a machine takes half a minute longer.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import httpx2
import psutil

from tests.benchmarks.bench_server import our_server

AIM_SECONDS = 5.0


def seconds_to_first_token() -> tuple[float, float]:
    """In wall time, and in processor time of the server and of its engine's process together."""
    began = time.perf_counter()
    with our_server(None) as (side, server):
        body = {"prompt": "The cat", "max_tokens": 8, "stream": True, "ignore_eos": True}
        with httpx2.stream("POST", f"{side.url}/completions", json=body, timeout=60) as answer:
            next(line for line in answer.iter_lines() if line.startswith("data: {"))
        taken = time.perf_counter() - began
        times = [one.cpu_times() for one in (server, *server.children())]
        return taken, sum(one.user + one.system for one in times)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args().runs
    wall, used = zip(*[seconds_to_first_token() for _ in range(runs)], strict=True)
    print(
        f"{os.cpu_count()} processors, {psutil.getloadavg()[0]:.1f} loaded; first token after "
        f"{statistics.median(wall):.2f} s ({min(wall):.2f} to {max(wall):.2f}), "
        f"{statistics.median(used):.2f} s of processor time; aim: {AIM_SECONDS:g} s"
    )
    return 0 if statistics.median(wall) < AIM_SECONDS else 1


if __name__ == "__main__":
    raise SystemExit(main())
