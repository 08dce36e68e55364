"""Everything that one looks at on an NVIDIA GPU, in one run: `python -m tests.benchmarks.bench_gpu --json PATH`.

What matters most comes first: 1. What this GPU copies and multiplies. 2. The kernels: right, and how fast
(`niwaki.kernels.check`). 3. The CPU's greedy tokens of the bundled model, and what the examples print. 4. For the
shapes of 0.6B, 8B and 1B models with random weights: decoding through CUDA graphs and launch by launch, against what
the device's bandwidth allows (W0); a shared prefix, by tree attention and row by row (W14); the gap between two steps
(W17); prefill, a step of both kinds. 5. The logits of all families beside transformers'. 6. The bundled model in the
engine, steps launched ahead and in turn; ragged steps through graphs in pieces; attention cut into blocks, and decode
attention into parts, of several sizes; weights and caches of few bits; FlexAttention. Last, which of the aims are met.

Each is a part, run by a process of its own kind that is replaced where it crashes, hangs or loses the GPU: the others
go on. With `--quick` each thing is looked at once, nothing is begun after 7 minutes, and all ends after 8. What was
found is written as it comes, to `--json`, or to bench_gpu.json in the folder that OUT names; `--resume` takes over what
an earlier run has written.

Runs from a bare checkout with PYTHONPATH=. and needs torch, Triton, Numba, safetensors, tokenizers and psutil; for the
engine and the examples what docs/gpu.md lists, too. `--dry-run` needs no GPU: the same code over a tiny shape in
Triton's interpreter, whose times mean nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

import torch

from niwaki.kernels import check
from niwaki.kernels.triton.attention_cases import SLOW_PEERS
from niwaki.kernels.triton.case import REAL, Maker
from niwaki.kernels.triton.case import TINY as TINY_SIZE
from niwaki.kernels.triton.cases import cases
from niwaki.kernels.triton.tune import tune_all
from niwaki.runtime.models.config import ModelConfig
from tests.benchmarks.gpu_examples import GREEDY_STEPS, example_lines, greedy_lines, names
from tests.benchmarks.gpu_lines import (
    DRY,
    FULL,
    QUICK,
    SHAPES,
    TINY,
    Json,
    Work,
    cut_lines,
    decode_lines,
    engine_lines,
    family_lines,
    gap_lines,
    kind_lines,
    prefill_lines,
    prefix_lines,
    ragged_lines,
    split_lines,
)
from tests.benchmarks.isolated import OPTION, Isolated, serve

QUICK_MINUTES: Final = 7.0
GRACE_SECONDS: Final = 60.0  # then what was begun before is ended, too
PART_SECONDS: Final = {"quick": 60.0, "full": 300.0, "dry": 300.0}
LONG_PARTS: Final = {"greedy tokens": 2.0, "examples": 2.5, "engine": 2.0}  # times that: the host compiles kernels, too
FAMILIES_AT_ONCE: Final = 8  # most of their time is compiling, of which a GPU knows nothing

# Tokens a second that were set as a mark for W0 on an H200, of whose bandwidth (bytes a second) they hang.
MARKS: Final = {"0.6B": 36_200.0, "1B": 70_000.0, "8B": 13_300.0}
MARKED_BANDWIDTH: Final = 4.3e12
TREE_AIMS: Final = {"8B": 3.5, "0.6B": 8.0}
GAP_AIM: Final = 15.0  # us
CEILINGS: Final = ("bytes a second", "operations a second")
KERNEL: Final = "kernel "  # parts whose name begins so are cases of the check
FAMILY: Final = "family "
DRY_FAMILY: Final = "qwen3"

Part = Callable[[], Iterator[Json]]


@dataclass
class Report:
    """What was found, written whenever something comes: a run that is cut off leaves what it had."""

    path: Path | None
    machine: Json = field(default_factory=dict)
    ceilings: Json = field(default_factory=dict)
    kernels: list[Json] = field(default_factory=list)
    lines: list[Json] = field(default_factory=list)
    aims: list[Json] = field(default_factory=list)

    def add(self, part: str, line: Json) -> None:
        if part == "ceilings" and CEILINGS[0] in line:
            self.ceilings = line
        (self.kernels if part.startswith(KERNEL) else self.lines).append({"part": part, **line})
        about = "" if {"case", "work"} & line.keys() else f"{part}: "
        print(about + ", ".join(f"{name} {check.cell(value)}" for name, value in line.items()), flush=True)
        self.write()

    def write(self) -> None:
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        found = {
            "machine": self.machine,
            "ceilings": self.ceilings,
            "kernels": self.kernels,
            "models": self.lines,
            "aims": self.aims,
        }
        beside = self.path.with_suffix(".part")
        beside.write_text(json.dumps(found, indent=2) + "\n", "utf-8")
        beside.replace(self.path)

    def take_over(self, path: Path) -> set[str]:
        """What an earlier run has found of parts that it ran to their end, and rightly. Which these are."""
        found = json.loads(path.read_text("utf-8"))
        every = [*found["kernels"], *found["models"]]
        broken = {line["part"] for line in every if check.exit_status([line]) != check.ALL_RIGHT}
        self.machine, self.ceilings = found["machine"], found["ceilings"]
        self.kernels = [line for line in found["kernels"] if line["part"] not in broken]
        self.lines = [line for line in found["models"] if line["part"] not in broken]
        return {str(line["part"]) for line in (*self.kernels, *self.lines)}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write everything here")
    parser.add_argument("--models", default="0.6B,8B,1B", help="which shapes, by comma; none: the others only")
    parser.add_argument("--only", default="", help="parts whose name holds this")
    parser.add_argument("--list", action="store_true", help="print the names of the parts, in their order")
    parser.add_argument("--quick", action="store_true", help="each thing once, and nothing begun after 7 minutes")
    parser.add_argument("--resume", type=Path, help="what an earlier run has written; what it has is not run again")
    parser.add_argument("--expected", type=Path, help="what gpu_examples.py has written: what a CPU prints")
    parser.add_argument("--tune", action="store_true", help="measure block sizes first")
    parser.add_argument("--dry-run", action="store_true", help="a tiny shape in the interpreter, without a GPU")
    parser.add_argument(OPTION, type=int, help=argparse.SUPPRESS)
    given = list(sys.argv[1:] if arguments is None else arguments)
    chosen = parser.parse_args(given)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not chosen.dry_run and not chosen.list:
        print("bench_gpu needs an NVIDIA GPU; torch sees none. --dry-run does without one.")
        return 1
    work = TINY if chosen.dry_run else QUICK if chosen.quick else FULL
    bench = Bench(device, work, chosen.models, chosen.expected, chosen.tune)
    if chosen.worker is not None:
        serve(chosen.worker, bench.run, lambda: check.is_lost(device), check.in_short, check.machine())
        return 0
    parts = [part for part in bench.parts(family_names(work)) if chosen.only in part]
    if chosen.list:
        print(*parts, sep="\n")
        return 0
    folder = os.environ.get("OUT")
    report = Report(chosen.json or (Path(folder) / "bench_gpu.json" if folder else None))
    if chosen.resume is not None:
        has = report.take_over(chosen.resume)
        parts = [part for part in parts if part not in has]
    ends = time.monotonic() + 60 * QUICK_MINUTES if chosen.quick else math.inf
    seconds = PART_SECONDS["dry" if chosen.dry_run else "quick" if chosen.quick else "full"]
    run_parts(parts, given, report, seconds=seconds, ends=ends, is_dry=chosen.dry_run)
    bandwidth = report.ceilings.get(CEILINGS[0])
    report.aims = aims(report.kernels, report.lines, bandwidth if isinstance(bandwidth, float) else math.nan)
    report.write()
    every = [*report.kernels, *report.lines]
    faulty = [line for line in every if check.exit_status([line]) != check.ALL_RIGHT]
    print(f"\n{len(every) - len(faulty)} of {len(every)} lines are right. The others:\n{check.table(faulty)}")
    print(f"\n{check.table(report.aims)}")
    return check.exit_status(every)


def run_parts(
    parts: Sequence[str], options: Sequence[str], report: Report, *, seconds: float, ends: float, is_dry: bool
) -> None:
    """In their order, families several at once."""

    def tell(part: str, line: Json) -> None:
        report.add(part, line)
        isolated.knowledge["ceilings"] = report.ceilings

    def learn(machine: Json) -> None:
        report.machine = machine

    isolated = Isolated([sys.executable, "-m", "tests.benchmarks.bench_gpu", *options], tell, learn)
    isolated.knowledge["ceilings"] = report.ceilings
    stops = ends + GRACE_SECONDS
    for at_once, some in in_turns(parts):
        workers = 1 if is_dry or not at_once else FAMILIES_AT_ONCE
        isolated.run(
            some, seconds=lambda part: seconds * LONG_PARTS.get(part, 1.0), ends=ends, stops=stops, workers=workers
        )


def family_names(work: Work) -> list[str]:
    try:
        from tests.families import MODELS
    except ModuleNotFoundError:  # no transformers
        return []
    return [name for name in MODELS if work is not TINY or name == DRY_FAMILY]


def in_turns(parts: Sequence[str]) -> Iterator[tuple[bool, list[str]]]:
    """Neighbours that may run at the same time, and that may not."""
    turn: list[str] = []
    for part in parts:
        if turn and part.startswith(FAMILY) != turn[0].startswith(FAMILY):
            yield turn[0].startswith(FAMILY), turn
            turn = []
        turn.append(part)
    if turn:
        yield turn[0].startswith(FAMILY), turn


@dataclass
class Bench:
    """The parts, by name, as a worker runs them."""

    device: torch.device
    work: Work
    models: str
    expected: Path | None = None
    tunes: bool = False
    ceilings: check.Ceilings | None = None

    def run(self, part: str, told: Json) -> Iterator[Json]:
        measured = told["ceilings"]
        if isinstance(measured, dict) and measured:
            self.ceilings = check.Ceilings(*(measured[name] for name in CEILINGS))
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # of what the part before has left
        families = [part.removeprefix(FAMILY)] if part.startswith(FAMILY) else []
        yield from self.parts(families)[part]()

    def parts(self, families: Sequence[str]) -> dict[str, Part]:
        """What is run, what matters most first."""
        device, work, is_dry = self.device, self.work, self.work is TINY
        shapes = {"tiny": DRY} if is_dry else {name: SHAPES[name] for name in self.models.split(",") if name}
        found: dict[str, Part] = {}
        if device.type == "cuda":
            found["ceilings"] = self._ceiling_lines
        if self.tunes:
            found["block sizes"] = self._tuning_lines
        found |= {f"{KERNEL}{name}": partial(self._kernel_lines, name, make) for name, make in self._cases().items()}
        found["greedy tokens"] = partial(greedy_lines, device, 2 if is_dry else GREEDY_STEPS, self.expected)
        printing = names()[:2] if is_dry else names()
        found["examples"] = partial(example_lines, device.type, self.expected, printing)
        for name, config in shapes.items():
            found[f"{name}: decode"] = partial(self._decode_lines, name, config)
        for name, config in shapes.items():
            found[f"{name}: shared prefix"] = partial(prefix_lines, name, config, device, work)
            if device.type == "cuda":
                found[f"{name}: gap"] = partial(gap_lines, name, config, device, work)
        for name, config in shapes.items():
            found[f"{name}: prefill"] = partial(prefill_lines, name, config, device, work)
        found |= {f"{FAMILY}{name}": partial(family_lines, name, device) for name in families}
        found["engine"] = partial(engine_lines, device.type, work)
        for name, config in shapes.items():
            found[f"{name}: few tokens a row"] = partial(ragged_lines, name, config, device, work)
        found |= {f"blocks of {kind}": partial(cut_lines, kind, device, work) for kind in ("prefill", "decode")}
        found["parts of the keys"] = self._split_lines
        for name, config in shapes.items():
            for kind in work.kinds:
                found[f"{name}: {kind}"] = partial(kind_lines, name, config, kind, device, work)
        if device.type == "cuda":
            found |= {f"{peer} beside prefill": partial(self._peer_lines, "prefill", peer) for peer in SLOW_PEERS}
        return found

    def _cases(self) -> dict[str, Maker]:
        if self.device.type == "cuda":
            return cases(REAL, self.device, torch.bfloat16)
        return cases(TINY_SIZE, self.device, torch.float32)

    def _measured(self) -> check.Ceilings:
        """Once for all workers, unless it was not to be had then."""
        if self.ceilings is None:
            self.ceilings = check.measured_ceilings(self.device)
        return self.ceilings

    def _bandwidth(self) -> float:
        return self._measured().bytes_per_second if self.device.type == "cuda" else math.nan

    def _ceiling_lines(self) -> Iterator[Json]:
        found = self._measured()
        yield dict(zip(CEILINGS, (found.bytes_per_second, found.operations_per_second), strict=True))

    def _tuning_lines(self) -> Iterator[Json]:
        yield {"work": "block sizes", "measured": len(tune_all(self.device, check.median_seconds))}

    def _kernel_lines(self, name: str, make: Maker) -> Iterator[Json]:
        ceilings = self._measured() if self.device.type == "cuda" else None
        torch.manual_seed(0)  # so that a case is the same by itself
        yield check.check_case(make(), ceilings, without=SLOW_PEERS)

    def _peer_lines(self, name: str, peer: str) -> Iterator[Json]:
        case = self._cases()[name]()
        times = [check.median_seconds(run) for run in (case.peers[peer], case.run)]
        yield {"work": f"{name} beside {peer}", f"x {peer}": times[0] / times[1], "us": times[1] * 1e6}

    def _decode_lines(self, name: str, config: ModelConfig) -> Iterator[Json]:
        yield from decode_lines(name, config, self.device, self._bandwidth(), self.work)

    def _split_lines(self) -> Iterator[Json]:
        yield from split_lines(self.device, self._bandwidth(), self.work)


def aims(kernels: Sequence[Json], lines: Sequence[Json], bandwidth: float) -> list[Json]:
    """What was to be reached, and what was."""

    def found(many: Sequence[Json], key: str, **wanted: str) -> float | None:
        """Of the first line whose fields begin so."""
        for line in many:
            if all(str(line.get(name, "")).startswith(text) for name, text in wanted.items()) and key in line:
                value = line[key]
                return value if isinstance(value, float) else None
        return None

    mark = bandwidth / MARKED_BANDWIDTH
    rows: list[tuple[str, float | None, float]] = [
        ("decode attention, of the copy", found(kernels, "of copy", case="decode"), 0.85),
        ("prefill attention, of the product", found(kernels, "of product", case="prefill"), 0.55),
        ("prefill attention, x SDPA", found(kernels, "x SDPA", case="prefill"), 1.0),
    ]
    for name, least in TREE_AIMS.items():
        rows.append((f"W14, {name}: row by row / tree", found(lines, "row by row / tree", model=name), least))
    for name, tokens in MARKS.items():
        reached = found(lines, "tokens/s", model=name, work=f"decode, {FULL.batches[-1]} x")
        rows.append((f"W0, {name}: tokens/s, the mark for this bandwidth", reached, 0.8 * mark * tokens))
    told: list[Json] = [
        {"aim": aim, "reached": reached, "at least": least, "met": None if reached is None else reached >= least}
        for aim, reached, least in rows
    ]
    for name in MARKS:
        gap = found(lines, "gap us", model=name)
        is_met = None if gap is None else gap <= GAP_AIM
        told.append({"aim": f"W17, {name}: us between steps", "reached": gap, "at most": GAP_AIM, "met": is_met})
    return told


if __name__ == "__main__":
    sys.exit(main())
