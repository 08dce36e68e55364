"""Everything that one looks at on an NVIDIA GPU, in one run: `python -m tests.benchmarks.bench_gpu --json PATH`.

1. The kernels: right, and how fast (`niwaki.kernels.check`). 2. For the shapes of 0.6B, 8B and 1B models with random
weights: decoding through CUDA graphs and launch by launch, against what the device's bandwidth allows (W0); the same
with weights and caches of few bits; the gap between two steps (W17); a shared prefix, by tree attention and row by row
(W14); prefill, a step of both kinds, and one of a few tokens a row, through graphs in pieces. 3. Decode attention cut
into parts of several sizes. 4. The bundled model: in the engine the tokens and the time of steps that are launched
ahead against those of steps in turn, and the CPU's greedy tokens. 5. Which of the aims are met.

A part that fails is a line, and the others go on. With `--quick` each thing is looked at once, and nothing is begun
after 7 minutes. What was found is written as it comes, to `--json`, or to bench_gpu.json in the folder that OUT names.
Runs from a bare checkout with PYTHONPATH=. and needs torch, Triton, Numba, safetensors, tokenizers and psutil; for the
engine llguidance and outlines_core, too. `--dry-run` needs no GPU: the same code over a tiny shape in Triton's
interpreter, whose times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch

from niwaki.kernels import check
from niwaki.runtime.models.config import ModelConfig
from tests.benchmarks.gpu_lines import (
    DRY,
    FULL,
    QUICK,
    SHAPES,
    TINY,
    Json,
    Work,
    decode_lines,
    engine_lines,
    gap_lines,
    greedy_lines,
    kind_lines,
    prefill_lines,
    prefix_lines,
    ragged_lines,
    split_lines,
)

QUICK_MINUTES = 7.0
KERNEL_MINUTES = 4.0  # of them

# Tokens a second that were set as a mark for W0 on an H200, of whose bandwidth (bytes a second) they hang.
MARKS = {"0.6B": 36_200.0, "1B": 70_000.0, "8B": 13_300.0}
MARKED_BANDWIDTH = 4.3e12
TREE_AIMS = {"8B": 3.5, "0.6B": 8.0}
GAP_AIM = 15.0  # us


@dataclass
class Report:
    """What was found, written whenever something comes: a run that is cut off leaves what it had."""

    path: Path | None
    ends: float = math.inf  # of `time.monotonic`: nothing is begun behind it
    kernels: list[Json] = field(default_factory=list)
    lines: list[Json] = field(default_factory=list)
    aims: list[Json] = field(default_factory=list)

    def add(self, line: Json) -> None:
        self.lines.append(line)
        print(check.table([line]), flush=True)
        self.write()

    def add_kernel(self, line: Json) -> None:
        self.kernels.append(line)
        print(f"kernel {line['case']}: {line.get('failed') or line.get('left out') or 'done'}", flush=True)
        self.write()

    def run(self, part: str, lines: Callable[[], Iterator[Json]], device: torch.device) -> None:
        """Add the lines of a part, or why there are none."""
        if time.monotonic() > self.ends:
            self.add({"part": part, "left out": "no time left"})
            return
        try:
            for line in lines():
                self.add(line)
        except ModuleNotFoundError as error:
            self.add({"part": part, "left out": f"{error.name} is not installed"})
        except Exception as error:
            traceback.print_exc()
            self.add({"part": part, "failed": check.in_short(error)})
            if check.is_lost(device):
                self.ends = -math.inf

    def write(self) -> None:
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        found = {"machine": check.machine(), "kernels": self.kernels, "models": self.lines, "aims": self.aims}
        self.path.write_text(json.dumps(found, indent=2) + "\n", "utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write everything here")
    parser.add_argument("--models", default="0.6B,8B,1B", help="which shapes, by comma; none: kernels only")
    parser.add_argument("--quick", action="store_true", help="each thing once, and nothing begun after 7 minutes")
    parser.add_argument("--tune", action="store_true", help="measure block sizes first")
    parser.add_argument("--dry-run", action="store_true", help="a tiny shape in the interpreter, without a GPU")
    chosen = parser.parse_args(arguments)
    if not torch.cuda.is_available() and not chosen.dry_run:
        print("bench_gpu needs an NVIDIA GPU; torch sees none. --dry-run does without one.")
        return 1
    folder = os.environ.get("OUT")
    report = Report(chosen.json or (Path(folder) / "bench_gpu.json" if folder else None))
    kernels_end = math.inf
    if chosen.quick:
        report.ends = time.monotonic() + 60 * QUICK_MINUTES
        kernels_end = time.monotonic() + 60 * KERNEL_MINUTES
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    work = TINY if chosen.dry_run else QUICK if chosen.quick else FULL
    kernels = check.check_all("", tunes=chosen.tune, tell=report.add_kernel, ends=kernels_end)
    print(check.table(kernels), flush=True)
    if check.is_lost(device):
        return 1
    bandwidth = check.measured_ceilings(device).bytes_per_second if device.type == "cuda" else math.nan
    named = {name: SHAPES[name] for name in chosen.models.split(",") if name}
    shapes = {"tiny": DRY} if chosen.dry_run else named
    for part, lines in parts(shapes, device, bandwidth, work):
        report.run(part, lines, device)
    report.aims = aims(kernels, report.lines, bandwidth)
    report.write()
    print("\n" + check.table(report.aims))
    return check.exit_status([*kernels, *report.lines])


def parts(
    shapes: dict[str, ModelConfig], device: torch.device, bandwidth: float, work: Work
) -> Iterator[tuple[str, Callable[[], Iterator[Json]]]]:
    """What is run, what matters most first."""
    for name, config in shapes.items():
        yield f"{name}: decode", partial(decode_lines, name, config, device, bandwidth, work)
        yield f"{name}: shared prefix", partial(prefix_lines, name, config, device, work)
        if device.type == "cuda":
            yield f"{name}: gap", partial(gap_lines, name, config, device, work)
    yield "parts of the keys", partial(split_lines, device, bandwidth, work)
    for name, config in shapes.items():
        yield f"{name}: prefill", partial(prefill_lines, name, config, device, work)
        yield f"{name}: few tokens a row", partial(ragged_lines, name, config, device, work)
    yield "greedy tokens", partial(greedy_lines, device, 2 if work is TINY else 32)
    yield "engine", partial(engine_lines, device.type, work)
    for name, config in shapes.items():
        for kind in work.kinds:
            yield f"{name}: {kind}", partial(kind_lines, name, config, kind, device, work)


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
