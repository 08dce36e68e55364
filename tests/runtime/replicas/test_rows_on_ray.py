"""`niwaki run --ray` on a Ray of this machine (`make test-ray`): failed rows again, tables, a kill, a failure."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from datetime import date
from decimal import Decimal
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not os.environ.get("NIWAKI_RAY"), reason="make test-ray runs it")
ROOT = Path(__file__).parents[3]
COUNT = 384  # six times what a worker is given at once
PROGRAM = """
import time
from pathlib import Path
import niwaki as nw
from niwaki.runtime.api import EngineStopped

HERE = Path(__file__).resolve().parent

@nw.function
def ask(s, name, day, price, data):
    with open(HERE / "ran.txt", "a") as file:
        file.write(name + "\\n")
    time.sleep(0.05)
    if "never" in name or ("away" in name and not (HERE / "back").exists()):
        raise ValueError(f"no answer to {name}")
    if "die" in name:
        raise EngineStopped("the engine died")
    return {"loud": name.upper(), "kinds": [type(day).__name__, str(price), type(data).__name__]}
"""


def command(folder: Path, *more: str, source: str = "in.parquet", output: str = "out.parquet") -> subprocess.Popen[str]:
    arguments = ["run", str(folder / "program.py") + ":ask", "--input", str(folder / source)]
    return subprocess.Popen(
        [sys.executable, "-m", "niwaki", *arguments, "--output", str(folder / output), "--concurrency", "4", *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


def ran(folder: Path) -> set[int]:
    texts = (folder / "ran.txt").read_text().splitlines()
    (folder / "ran.txt").unlink()
    return {int(text.split()[-1]) for text in texts}


def test_failed_rows_of_a_parquet_file_run_again_on_ray_and_a_kill_costs_none(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    (tmp_path / "program.py").write_text(PROGRAM)
    names = [f"{('fine', 'away', 'never')[number % 3]} {number}" for number in range(COUNT)]
    row = {"day": date(2024, 2, 29), "price": Decimal("1.50"), "data": b"\xff"}
    parquet.write_table(pyarrow.Table.from_pylist([{"name": name, **row} for name in names]), tmp_path / "in.parquet")
    first = command(tmp_path, "--ray", "1", "--limit", "320")
    told, error = first.communicate(timeout=300)
    assert first.returncode == 0, error
    assert "320 records" in told
    lines = tmp_path / "out.parquet.rows.jsonl"
    before = lines.read_bytes()
    kept = [line for line in before.splitlines() if b'"error"' not in line]
    assert len(kept) == 107
    assert json.loads(kept[0])["kinds"] == ["date", "1.50", "bytes"], "as without Ray"
    (tmp_path / "back").touch()
    ran(tmp_path)

    retry = tmp_path / "out.parquet.rows.jsonl.retry"
    process = command(tmp_path, "--ray", "1", "--retry-failed")
    deadline = time.monotonic() + 300
    while not retry.exists() or retry.read_bytes().count(b"\n") < 20:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    written = retry.read_bytes().count(b"\n")
    assert written < COUNT, "rows come as their batches end, and not all at the end"
    assert lines.read_bytes() == before
    deadline = time.monotonic() + 60
    while (tmp_path / "ran.txt").exists():  # workers of the Ray that was killed end a little later
        ran(tmp_path)
        assert time.monotonic() < deadline
        time.sleep(2)

    last = command(tmp_path, "--ray", "1", "--retry-failed")
    told, error = last.communicate(timeout=300)
    assert last.returncode == 0, error
    assert ran(tmp_path) == {number for number in range(written, COUNT) if number % 3 or number >= 320}
    rows = parquet.read_table(tmp_path / "out.parquet").to_pylist()
    assert [row["index"] for row in rows] == list(range(COUNT))
    assert [row["index"] for row in rows if row["error"] is not None] == list(range(2, COUNT, 3))
    assert rows[1]["loud"] == "AWAY 1"
    after = lines.read_bytes().splitlines()
    assert all(after[json.loads(line)["index"]] == line for line in kept)
    assert sorted(path.name for path in tmp_path.glob("out*")) == ["out.parquet", lines.name, f"{lines.name}.meta"]


def test_a_worker_that_fails_is_told_of_in_one_line_and_the_rows_before_are_kept(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    names = ["fine"] * 200 + ["die"]
    row = {"day": "2024-02-29", "price": 1, "data": None}
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"name": name, **row}) + "\n" for name in names))
    process = command(tmp_path, "--ray", "1", source="in.jsonl", output="out.jsonl")
    _, error = process.communicate(timeout=300)
    assert process.returncode == 1
    kept = (tmp_path / "out.jsonl").read_bytes().count(b"\n")
    assert kept >= 64
    assert error.splitlines()[-1] == (
        f"niwaki: a worker on Ray failed: EngineStopped: the engine died; {kept} rows stand in {tmp_path}/out.jsonl; "
        "give the same command again to continue"
    )
    assert "Traceback" not in error
