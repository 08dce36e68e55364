"""Side-by-side timing: A and B take turns in one process, and only their ratio counts. Medians, spread, JSON."""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

MIN_PAIRS = 5


@dataclass(frozen=True, slots=True)
class Comparison:
    """One workload, run as A and as B in turn. `ratio` is the median of B's seconds over A's, pair by pair: above 1, A
    is the faster. `low` and `high` are the smallest and the largest ratio of a pair."""

    workload: str
    shape: str
    a: str
    b: str
    pairs: int
    seconds_a: float
    seconds_b: float
    ratio: float
    low: float
    high: float
    aim: str
    notes: Mapping[str, float]


def compare(
    workload: str,
    shape: str,
    a: tuple[str, Callable[[], None]],
    b: tuple[str, Callable[[], None]],
    *,
    aim: str,
    pairs: int = MIN_PAIRS,
    notes: Callable[[], Mapping[str, float]] = dict,
    clock: Callable[[], float] = time.perf_counter,
) -> Comparison:
    """Run each once to warm up, then `pairs` times A and B, the order turned round every time.

    `notes` is read at the end: figures that explain the ratio (tokens prefilled, hit rate). With `time.process_time` as
    the clock, what runs on one thread is timed by its own work, whatever else the machine does.
    """
    assert pairs >= MIN_PAIRS, f"at least {MIN_PAIRS} pairs, or the spread says nothing"
    a[1]()
    b[1]()
    times: list[tuple[float, float]] = []
    for pair in range(pairs):
        if pair % 2 == 0:
            seconds_a = _seconds(a[1], clock)
            seconds_b = _seconds(b[1], clock)
        else:
            seconds_b = _seconds(b[1], clock)
            seconds_a = _seconds(a[1], clock)
        times.append((seconds_a, seconds_b))
    ratios = [seconds_b / seconds_a for seconds_a, seconds_b in times]
    return Comparison(
        workload,
        shape,
        a[0],
        b[0],
        pairs,
        statistics.median(seconds_a for seconds_a, _ in times),
        statistics.median(seconds_b for _, seconds_b in times),
        statistics.median(ratios),
        min(ratios),
        max(ratios),
        aim,
        notes(),
    )


def _seconds(run: Callable[[], None], clock: Callable[[], float]) -> float:
    gc.collect()
    start = clock()
    run()
    return clock() - start


def number_of_pairs(text: str) -> int:
    """What `--pairs` says, for argparse: too few are refused before an engine starts."""
    if not text.isascii() or not text.isdigit() or int(text) < MIN_PAIRS:
        raise argparse.ArgumentTypeError(f"at least {MIN_PAIRS} pairs, or the spread says nothing, got {text!r}")
    return int(text)


def table(comparisons: Sequence[Comparison]) -> str:
    header = ("id", "shape", "A", "B", "A s", "B s", "B / A", "spread", "aim")
    rows = [
        (
            c.workload,
            c.shape,
            c.a,
            c.b,
            f"{c.seconds_a:.3f}",
            f"{c.seconds_b:.3f}",
            f"{c.ratio:.3f}",
            f"{c.low:.3f} to {c.high:.3f}",
            c.aim,
        )
        for c in comparisons
    ]
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (header, *rows)]
    notes = [
        f"{c.workload}: "
        + ", ".join(f"{name} {value:,.3g}" if value < 10 else f"{name} {value:,.0f}" for name, value in c.notes.items())
        for c in comparisons
        if c.notes
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:], *notes])


def write_json(path: Path, comparisons: Sequence[Comparison], machine: Mapping[str, object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    report = {"machine": dict(machine), "results": [asdict(comparison) for comparison in comparisons]}
    path.write_text(json.dumps(report, indent=2) + "\n", "utf-8")
