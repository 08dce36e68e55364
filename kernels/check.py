"""Checks every GPU kernel on the device at hand and, on a GPU, times it. `python -m niwaki.kernels.check`.

On an NVIDIA GPU: real sizes, against references in float32; the time of each beside torch's own attention in the same
run, and its share of what this device copies and multiplies, measured first. Without one: small sizes, in Triton's
interpreter, correctness alone. `--compile 90` needs no GPU either: it compiles all kernels to machine code of that
compute capability, and tells their registers, shared memory and spills.

Exits 1 where a kernel is wrong, or fits no such GPU, and 3 where none is, but some were left out. Needs torch, NumPy,
Numba and Triton, and nothing of niwaki but its kernels.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from niwaki.kernels.triton.case import Case

Json = dict[str, object]

CACHES = 1 << 26  # float32, 256 MB: more than a GPU keeps near
CYCLES = 2_000_000  # of a GPU's clock, a millisecond: time to launch what is timed
SECONDS = 0.1  # for which a case is timed

# Of shared memory, what a block may have, by compute capability (CUDA C++ Programming Guide, table of capabilities).
SHARED_KIB = {75: 64, 80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99}
LEAST_SHARED_KIB = 64

ALL_RIGHT, SOME_WRONG, SOME_LEFT_OUT = 0, 1, 3  # what it exits with; 2 is for options that are not there


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What this device does at best, measured: bytes a second of a copy, operations a second of a product."""

    bytes_per_second: float
    operations_per_second: float


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write everything here")
    parser.add_argument(
        "--tune", action="store_true", help="measure block sizes first, of what --only names, and keep the best (GPU)"
    )
    parser.add_argument("--compile", type=int, metavar="CAPABILITY", help="compile only, for example for 90")
    parser.add_argument("--only", default="", help="cases whose name holds this")
    chosen = parser.parse_args(arguments)
    found: list[Json] = []

    def tell(line: Json) -> None:
        """A run that is cut off leaves what it had."""
        found.append(line)
        print(", ".join(f"{name} {cell(value)}" for name, value in line.items()), flush=True)
        write(chosen.json, found)

    if chosen.compile:
        os.environ["TRITON_INTERPRET"] = "0"  # before the first kernel is defined
        results = compile_all(chosen.compile, chosen.only, tell)
    else:
        results = check_all(chosen.only, tunes=chosen.tune, tell=tell)
    print(f"\n{table(results)}")
    write(chosen.json, results)
    return exit_status(results)


def exit_status(lines: Sequence[Json]) -> int:
    """Of these lines of a check; what was not run was not found right."""
    if any("failed" in line or line.get("right") is False or line.get("same tokens") == "NO" for line in lines):
        return SOME_WRONG
    return SOME_LEFT_OUT if any("left out" in line for line in lines) else ALL_RIGHT


def write(path: Path | None, results: Sequence[Json]) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"machine": machine(), "results": results}, indent=2) + "\n", "utf-8")


def machine() -> Json:
    import triton

    from niwaki.kernels.triton.peers import presence

    has_gpu = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name() if has_gpu else f"{platform.machine()} (interpreter)",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        **presence(),
    }


# ---------------------------------------------------------------------------------------------------------------
# Right and fast
# ---------------------------------------------------------------------------------------------------------------


def check_all(
    only: str, *, tunes: bool, tell: Callable[[Json], object] = lambda line: None, ends: float = math.inf
) -> list[Json]:
    """A line for each case, told as it comes. A case that fails is a line, too, and the others go on, unless it took
    the device with it. None is begun behind `ends` of `time.monotonic`; such lines say that they were left out."""
    from niwaki.kernels.triton.case import REAL, TINY
    from niwaki.kernels.triton.cases import cases

    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if has_gpu else "cpu")
    ceilings = None
    if has_gpu:
        ceilings = measured_ceilings(device)
        print(f"{torch.cuda.get_device_name()}: copies {ceilings.bytes_per_second / 1e12:.2f} TB/s, ", end="")
        print(f"multiplies {ceilings.operations_per_second / 1e12:.0f} TFLOP/s in bfloat16")
        if tunes:
            from niwaki.kernels.triton.tune import tune_all

            tune_all(device, median_seconds, only=only)
    results: list[Json] = []
    size, dtype = (REAL, torch.bfloat16) if has_gpu else (TINY, torch.float32)
    lost_after = ""
    for name, make in cases(size, device, dtype, only).items():
        if lost_after:
            line: Json = {"case": name, "left out": f"the GPU answers no more after {lost_after!r}"}
        elif time.monotonic() >= ends:
            line = {"case": name, "left out": "no time left"}
        else:
            line = check_made(name, make, ceilings)
            lost_after = name if line.get("right") is False and is_lost(device) else ""
        results.append(line)
        tell(line)
        gc.collect()
    return results


def check_made(name: str, make: Callable[[], Case], ceilings: Ceilings | None) -> Json:
    """The line of a case; what is wrong with it where it cannot be made or run."""
    torch.manual_seed(0)  # so that a case is the same by itself
    try:
        return check_case(make(), ceilings)
    except Exception as error:
        traceback.print_exc()
        return {"case": name, "right": False, "failed": in_short(error)}


def in_short(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".strip().splitlines()[0][:120]


def is_lost(device: torch.device) -> bool:
    """Whether nothing can run on the device any more, as after an access out of bounds."""
    try:
        torch.ones(1, device=device).item()
    except RuntimeError:
        return True
    return False


def check_case(case: Case, ceilings: Ceilings | None, without: Sequence[str] = ()) -> Json:
    """The line of a case, timed where there is a GPU, but for the peers that it does without."""
    got, expected = (case.seen_as(tensor) for tensor in (case.run(), case.reference()))
    error = float((got - expected).norm() / expected.norm().clamp(min=1e-30))
    fits = error <= case.tolerance  # NaN does not
    line: Json = {"case": case.name, "shape": case.shape, "error": error, "right": fits}
    del got, expected
    if ceilings is None:
        for run in case.peers.values():  # they are not timed here, but a GPU shall not be the first to run them
            run()
        return line
    seconds = median_seconds(case.run)
    line["us"] = seconds * 1e6
    if case.num_bytes:
        line["GB/s"] = case.num_bytes / seconds / 1e9
        line["of copy"] = case.num_bytes / seconds / ceilings.bytes_per_second
    if case.operations:
        line["TFLOP/s"] = case.operations / seconds / 1e12
        line["of product"] = case.operations / seconds / ceilings.operations_per_second
    for name, run in case.peers.items():
        if name in without:
            continue
        try:
            line[f"x {name}"] = median_seconds(run) / seconds
        except Exception as error:  # somebody else's kernel: ours was right all the same
            line[f"x {name}"] = in_short(error)
    return line


def median_seconds(run: Callable[[], object], device: str = "cuda") -> float:
    """Of the device alone, whose caches hold nothing of what is run. It has something else to do while the host
    launches: else the time of a short kernel would be the host's."""
    run()
    torch.cuda.synchronize()
    other = torch.ones(CACHES, device=device)

    def timed(count: int) -> float:
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]  # type: ignore[no-untyped-call]
        for begin, end in events:
            other.sum()  # not written: that would come to memory while `run` is timed
            torch.cuda._sleep(CYCLES)  # type: ignore[no-untyped-call]
            begin.record()
            run()
            end.record()
        torch.cuda.synchronize()
        milliseconds: float = statistics.median(begin.elapsed_time(end) for begin, end in events)
        return milliseconds / 1e3

    return timed(max(5, min(100, int(SECONDS / timed(3)))))


def measured_ceilings(device: torch.device) -> Ceilings:
    source = torch.randn(2**29, device=device)  # 2 GiB: far larger than any cache
    target = torch.empty_like(source)
    copy = 2 * source.numel() * 4 / median_seconds(lambda: target.copy_(source))
    a, b = (torch.randn(8192, 8192, device=device).bfloat16() for _ in range(2))
    return Ceilings(copy, 2 * 8192**3 / median_seconds(lambda: a @ b))


# ---------------------------------------------------------------------------------------------------------------
# Compiled without a GPU
# ---------------------------------------------------------------------------------------------------------------


class AbsentGpu:
    """What Triton asks of a driver before it compiles; there is nothing to run on."""

    def __init__(self, capability: int) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self._target


def compile_all(capability: int, only: str, tell: Callable[[Json], object] = lambda line: None) -> list[Json]:
    """A line for each kernel that the cases start, at real widths, or why it fits no such GPU; told as it comes."""
    from triton.runtime.driver import driver

    from niwaki.kernels.triton.case import COMPILED
    from niwaki.kernels.triton.cases import cases, wide_cases
    from niwaki.kernels.triton.launch import compiling

    driver.set_active(AbsentGpu(capability))  # type: ignore[no-untyped-call,unused-ignore]
    results: list[Json] = []
    made = cases(COMPILED, torch.device("cpu"), torch.bfloat16, only) | wide_cases(torch.device("cpu"), only)
    for name, make in made.items():
        try:
            with compiling(SHARED_KIB.get(capability, LEAST_SHARED_KIB) << 10) as kernels:
                make().run()
            lines: list[Json] = [{"case": name, **resources(kernel)} for kernel in kernels]
        except Exception as error:
            lines = [{"case": name, "failed": in_short(error)}]
        for line in lines:
            if line not in results:
                results.append(line)
                tell(line)
    return results


def resources(kernel: Any) -> Json:
    """What one compiled kernel takes of a multiprocessor, as the assembler tells."""
    from triton import knobs

    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        told = subprocess.run(  # noqa: S603  # Triton's own tool
            [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    used = {name: int(number) for name, number in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", told)}
    return {
        "kernel": kernel.metadata.name,
        "warps": kernel.metadata.num_warps,
        "stages": kernel.metadata.num_stages,
        "registers": used["REG"],
        "stack bytes": used["STACK"] + used["LOCAL"],  # above 0: registers were spilled
        "shared KiB": kernel.metadata.shared / 1024,
        "mma": kernel.asm["ptx"].count("mma.sync"),
        "wgmma": kernel.asm["ptx"].count("wgmma.mma_async"),  # Hopper's own products
    }


def table(results: Sequence[Json]) -> str:
    columns = list(dict.fromkeys(name for line in results for name in line))
    cells = [[cell(line.get(name)) for name in columns] for line in results]
    widths = [max(len(row[i]) for row in [columns, *cells]) for i in range(len(columns))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in [columns, *cells]]
    return "\n".join(line.rstrip() for line in lines)


def cell(value: object) -> str:
    match value:
        case None:
            return ""
        case bool():
            return "yes" if value else "NO"
        case float():
            return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"
        case _:
            return str(value)


if __name__ == "__main__":
    sys.exit(main())
