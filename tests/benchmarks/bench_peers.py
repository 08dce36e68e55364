"""niwaki beside other engines: the same weights, requests and threads, in one run, every engine in its own environment.

make bench-peers    # or python -m tests.benchmarks.bench_peers --model L60 --peer vllm=build/peers/vllm/bin/python ...

Rounds go through all engines, each time beginning with another, so that what else the machine does meets all of them;
what counts is the median of the rounds' ratios. Lengths are exact: end tokens are ignored. Every run begins with an
empty cache. `niwaki-plain` is niwaki without its prefix cache, `niwaki-serial` the same with the branches of each
program in turn, where a workload has any.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import torch

from niwaki.runtime.checkpoint.loader import read_model_folder
from tests.benchmarks.bench_prefix import machine
from tests.benchmarks.harness import Comparison, table, write_json
from tests.benchmarks.peers.workloads import BRANCHING, COUNTED, WORKLOADS, Limits, least_seconds, serial, waves_of
from tests.benchmarks.shapes import RANDOM, model_folder

PEER = Path(__file__).parent / "peers" / "peer.py"
ROOT = Path(__file__).parent.parent.parent
LOGS = ROOT / "build" / "peers"
ONLY = {
    "ctranslate2": ("W0",),  # static batches that share nothing: what it is good at
    "niwaki-serial": BRANCHING,
}
OWN = ("niwaki-plain", "niwaki-serial")


class Peer:
    """A process that runs workloads when it is asked to."""

    def __init__(self, name: str, python: str, arguments: Sequence[str], threads: int, log: IO[bytes]) -> None:
        is_own = name.startswith("niwaki")
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        environment["PYTHONPATH"] = str(ROOT) if is_own else ""
        openmp = Path(python).parent.parent / "lib" / "libiomp5.so"
        if name.startswith("vllm") and openmp.exists():
            environment["LD_PRELOAD"] = str(openmp)  # as its documentation recommends
        self._process = subprocess.Popen(
            [python, *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment,
        )  # fmt: skip
        self.name = name
        self._answer()

    def run(self, workload: str) -> tuple[float, int]:
        """Seconds and new tokens."""
        answer = self.ask(workload)
        return float(str(answer["seconds"])), int(str(answer["new_tokens"]))

    def ask(self, line: str) -> Mapping[str, object]:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)

    def _answer(self) -> Mapping[str, object]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended with {self._process.wait()}: see {LOGS / self.name}.log")
        answer = json.loads(line)
        assert isinstance(answer, dict)
        return answer


def measure(peers: Sequence[Peer], workload: str, rounds: int, least: float) -> list[Comparison]:
    """niwaki, the first, against each of the others: every round one ratio. `least`: seconds at the machine's limit."""
    peers = [peer for peer in peers if workload in ONLY.get(peer.name, (workload,))]
    seconds: dict[str, list[float]] = {peer.name: [] for peer in peers}
    counts = {peer.run(workload)[1] for peer in peers}  # warms up
    assert len(counts) == 1, f"unequal work: {counts}"
    for number in range(rounds):
        for peer in [*peers[number % len(peers) :], *peers[: number % len(peers)]]:
            seconds[peer.name].append(peer.run(workload)[0])
    own = statistics.median(seconds["niwaki"])
    notes = {"new tokens a second": max(counts) / own, "share of the machine's limit": least / own}
    results = []
    for other in peers[1:]:
        ratios = [b / a for a, b in zip(seconds["niwaki"], seconds[other.name], strict=True)]
        results.append(
            Comparison(
                workload,
                WORKLOADS[workload].shape,
                "niwaki",
                other.name,
                rounds,
                own,
                statistics.median(seconds[other.name]),
                statistics.median(ratios),
                min(ratios),
                max(ratios),
                "" if other.name in OWN else WORKLOADS[workload].aim,
                notes if other is peers[1] else {},
            )
        )
    return results


def means(results: Sequence[Comparison]) -> str:
    """The geometric means over the best peer of each workload, and over niwaki without its cache: with the branches of
    a program in turn, and all at once."""
    counted = [one for one in results if one.workload in COUNTED]
    others = [one for one in counted if one.b not in OWN]
    plain = [one for one in counted if one.b == "niwaki-plain"]
    in_turn = [one for one in counted if one.b == "niwaki-serial"]
    in_turn += [one for one in plain if one.workload not in BRANCHING]
    lines = []
    for title, aim, found in (
        ("the best peer", "aim 2", others),
        ("niwaki without its prefix cache, branches in turn", "aim 4", in_turn),
        ("niwaki without its prefix cache", "no aim", plain),
    ):
        least = {one.workload: min(it.ratio for it in found if it.workload == one.workload) for one in found}
        if least:
            mean = statistics.geometric_mean(least.values())
            lines.append(f"geometric mean of {len(least)} workloads over {title}: {mean:.2f} ({aim})")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON", help="vllm, vllm-compiled, ...")
    parser.add_argument("--model", choices=["niwaki-tiny", *RANDOM], default="L15")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--weights", choices=["auto", "int8", "int4"], default="auto", help="beside llama_cpp alone")
    parser.add_argument("--only", choices=list(WORKLOADS), action="append")
    parser.add_argument("--json", type=Path, help="write the results there as well")
    options = parser.parse_args(argv)
    model = model_folder(options.model).resolve()
    config = read_model_folder(model).config
    names = options.only or list(WORKLOADS)
    waves = waves_of(names, config.vocab_size)
    torch.set_num_threads(options.threads)
    limits = Limits.measured()
    print(f"the machine's limits: {limits.bandwidth / 1e9:.1f} GB/s, {limits.flops / 1e12:.2f} TFLOP/s in bfloat16")
    LOGS.mkdir(parents=True, exist_ok=True)
    results: list[Comparison] = []
    peers: list[Peer] = []
    in_turn = {name: serial(name, waves[name]) for name in names}
    with tempfile.TemporaryDirectory() as folder:
        files = {kind: Path(folder, f"{kind}.json") for kind in ("waves", "in-turn")}
        files["waves"].write_text(json.dumps(waves), "utf-8")
        files["in-turn"].write_text(json.dumps(in_turn), "utf-8")
        for given in (*(f"{name}={sys.executable}" for name in ("niwaki", *OWN)), *options.peer):
            name, python = given.split("=", 1)
            if not set(names) & set(ONLY.get(name, names)):
                continue
            with (LOGS / f"{name}.log").open("wb") as log:
                file = files["in-turn" if name == "niwaki-serial" else "waves"]
                arguments = [str(PEER), name, str(model), str(file), str(options.threads), options.weights]
                peers.append(Peer(name, python, arguments, options.threads, log))
            print(f"{name} is ready", flush=True)
        for workload in names:
            found = measure(peers, workload, options.rounds, least_seconds(waves[workload], config, limits))
            print(table(found), flush=True)
            results += found
        for peer in peers:
            peer.close()
    print(means(results))
    if options.json is not None:
        about = {**machine(), "threads": options.threads, "model": options.model, "weights": options.weights}
        write_json(options.json, results, {**about, "bandwidth": limits.bandwidth, "flops": limits.flops})
    return 0


if __name__ == "__main__":
    sys.exit(main())
