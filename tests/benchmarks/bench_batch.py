"""A batch of many rows on a scripted model: how fast, in how much memory, and whether kills lose or repeat rows.

python -m tests.benchmarks.bench_batch --rows 50000 --kills 20
python -m tests.benchmarks.bench_batch --rows 50000 --cli    # the same rows through `niwaki run`, on a toy model
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

import niwaki as nw
from niwaki.lang.state import State

ROOT = Path(__file__).parent.parent.parent
MEBIBYTE = 2**20
NUM_VALUES = 1000  # the scripted backend remembers every word that it ever saw: these are all


@nw.function
def double(s: State, n: int) -> None:
    s += f"{n % NUM_VALUES} doubled is " + nw.gen("twice", dtype=int)


def rows(count: int) -> Iterator[dict[str, object]]:
    return ({"n": n} for n in range(count))


def answer(prompt: str) -> str:
    return str(2 * int(prompt.split()[0]))


def run(path: Path, count: int) -> None:
    """One attempt: every row that is not in the file yet. Tells its memory and its speed at the end."""
    backend = nw.ScriptedBackend(answer)
    process = psutil.Process()
    began, seen = time.perf_counter(), []
    results = double.run_batch(rows(count), checkpoint=path, generator_style=True, backend=backend)
    for number, _ in enumerate(results):
        if number % 1000 == 0:
            backend.calls.clear()  # the script's own record of what it was asked would grow with the rows
            seen.append(process.memory_info().rss / MEBIBYTE)
    print(json.dumps({"seconds": time.perf_counter() - began, "mebibytes": seen}))


def attempt(path: Path, count: int) -> list[str]:
    return [sys.executable, "-m", "tests.benchmarks.bench_batch", "--attempt", str(path), "--rows", str(count)]


def check(path: Path, count: int) -> None:
    """Every row once, in order, with its own value."""
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file):
            row = json.loads(line)
            assert (row["index"], row["twice"]) == (number, 2 * (number % NUM_VALUES)), row
    assert number + 1 == count


def whole(count: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "out.jsonl"
        done = subprocess.run(attempt(path, count), cwd=ROOT, capture_output=True, text=True, check=True)
        told = json.loads(done.stdout)
        check(path, count)
        seen = told["mebibytes"]
        print(
            f"{count} rows with a checkpoint: {count / told['seconds']:,.0f} rows/s, {told['seconds']:.1f} s; "
            f"memory {seen[len(seen) // 10]:.0f} MiB after a tenth, {seen[len(seen) // 2]:.0f} half way, "
            f"{max(seen):.0f} at most"
        )


def killed(count: int, kills: int) -> None:
    """Kill it at random moments, start it again each time, and look at the file when it is done."""
    draw = random.Random(7)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "out.jsonl"
        held: list[int] = []
        for kill in range(kills):
            child = subprocess.Popen(attempt(path, count), cwd=ROOT, stdout=subprocess.DEVNULL)
            wanted = (held[-1] if held else 0) + draw.randint(1, max(1, count // (kills + 4)))
            while child.poll() is None and (not path.exists() or _lines(path) < wanted):
                time.sleep(0.01)
            assert child.poll() is None, f"it was done before kill {kill}: take more rows"
            os.kill(child.pid, signal.SIGKILL)
            child.wait()
            held.append(_lines(path))
        assert held == sorted(held), "nothing that stood there was lost"
        subprocess.run(attempt(path, count), cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
        check(path, count)
        print(f"{kills} kills at {held} of {count} rows: none lost, none twice, order kept")


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n")


def command_line(count: int) -> None:
    from tests.toy import make_model  # loads torch

    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        model = make_model(here / "toy")
        (here / "rows.jsonl").write_text("".join(json.dumps({"n": n}) + "\n" for n in range(count)), "utf-8")
        (here / "program.py").write_text(
            "import niwaki as nw\n\n\n@nw.function\ndef ask(s, n: int):\n"
            "    s += f'{n}: ' + nw.gen('x', max_tokens=1, temperature=0)\n",
            "utf-8",
        )
        words = ["run", "program.py:ask", "--input", "rows.jsonl", "--output", "out.jsonl", "--model", str(model)]
        began = time.perf_counter()
        child = subprocess.Popen(
            [sys.executable, "-m", "niwaki", *words], cwd=here, env={**os.environ, "PYTHONPATH": str(ROOT)}
        )
        seen: list[int] = []
        while child.poll() is None:
            seen.append(psutil.Process(child.pid).memory_info().rss)
            time.sleep(0.5)
        assert child.returncode == 0
        indexes = [json.loads(line)["index"] for line in (here / "out.jsonl").open(encoding="utf-8")]
        assert indexes == list(range(count))
        half = seen[len(seen) // 2]
        print(f"niwaki run: {count} rows in {time.perf_counter() - began:.0f} s, start included")
        print(f"memory {half / MEBIBYTE:.0f} MiB half way, {max(seen) / MEBIBYTE:.0f} MiB at most")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--cli", action="store_true")
    parser.add_argument("--attempt", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.attempt is not None:
        run(arguments.attempt, arguments.rows)
    elif arguments.cli:
        command_line(arguments.rows)
    else:
        whole(arguments.rows)
        if arguments.kills:
            killed(arguments.rows, arguments.kills)
    return 0


if __name__ == "__main__":
    sys.exit(main())
