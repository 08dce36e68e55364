"""Rows that are done before their turn: a kill does not cost them, and the order of the file stays."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import niwaki as nw
from niwaki.lang import behind
from niwaki.lang.async_batch import run_rows_async
from niwaki.lang.batch import Journal, JournalError, run_rows
from niwaki.lang.retry import Wording, opened_journal
from niwaki.runtime.api import EngineStopped
from tests.counted_engine import make_folder, one_line, run

FINGERPRINT = {"input": "a"}
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent.parent)}


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits is kept at once."""
    monkeypatch.setattr(behind, "KEEP_SECONDS", 0.0)


def ahead_of(path: Path) -> Path:
    return path.with_name(path.name + ".ahead")


def whole_lines(path: Path) -> int:
    return sum(line.startswith("{") for line in path.read_text().splitlines()) if path.exists() else 0


def wait_for_lines(path: Path, count: int) -> None:
    while whole_lines(path) < count:
        time.sleep(0.002)


def indices(path: Path) -> list[int]:
    return [json.loads(line)["index"] for line in path.read_text().splitlines() if line]


def test_what_comes_in_its_turn_is_not_kept() -> None:
    kept: list[int] = []
    results = run_rows(str, range(50), num_threads=1, keep=lambda number, result: kept.append(number))
    assert list(results) == [str(number) for number in range(50)]
    assert not kept


def test_what_waits_for_a_slow_row_is_kept_once() -> None:
    kept: list[tuple[int, int | Exception]] = []
    are_kept = threading.Event()

    def run_one(row: int) -> int:
        if row == 0:
            assert are_kept.wait(60)
        if row == 5:
            raise ValueError("no")
        return row * 10

    def keep(number: int, result: int | Exception) -> None:
        kept.append((number, result))
        if len(kept) == 9:
            are_kept.set()

    results = list(run_rows(run_one, range(10), num_threads=3, keep=keep))
    assert [result for result in results if isinstance(result, int)] == [0, 10, 20, 30, 40, 60, 70, 80, 90]
    assert sorted(number for number, _ in kept) == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert all(str(result) == ("no" if number == 5 else str(number * 10)) for number, result in kept)


def test_what_waits_for_a_slow_coroutine_is_kept_likewise() -> None:
    kept: list[tuple[int, int | Exception]] = []
    are_kept = asyncio.Event()

    async def run_one(row: int) -> int:
        if row == 0:
            await are_kept.wait()
        return row

    def keep(number: int, result: int | Exception) -> None:
        kept.append((number, result))
        if len(kept) == 4:
            are_kept.set()

    async def main() -> list[int | Exception]:
        return [result async for result in run_rows_async(run_one, range(5), concurrency=2, keep=keep)]

    assert asyncio.run(main()) == [0, 1, 2, 3, 4]
    assert sorted(kept, key=str) == [(1, 1), (2, 2), (3, 3), (4, 4)]


KILLED = """
import os, signal, sys, time
from pathlib import Path
import niwaki as nw
from niwaki.lang import behind

behind.KEEP_SECONDS = 0.0
path, ran, ahead = (Path(name) for name in ("out.jsonl", "ran.txt", "out.jsonl.ahead"))


@nw.function
def double(s, n):
    with ran.open("a") as file:
        file.write(f"{n}\\n")
    if n == 2 and sys.argv[1] == "dies":
        while not ahead.exists() or sum(line.startswith("{") for line in ahead.read_text().splitlines()) < 20:
            time.sleep(0.002)
        os.kill(os.getpid(), signal.SIGKILL)
    if n == 7:
        raise ValueError("seven")
    s += f"{n} doubled is " + nw.gen("twice", dtype=int)


backend = nw.ScriptedBackend(lambda prompt: str(2 * int(prompt.split()[0])))
double.run_batch([{"n": n} for n in range(200)], num_threads=2, checkpoint=path, backend=backend)
"""


def test_a_kill_costs_the_rows_under_way_and_not_those_that_wait_for_a_slow_one(tmp_path: Path) -> None:
    def start(how: str) -> int:
        return subprocess.run([sys.executable, "-c", KILLED, how], cwd=tmp_path, env=ENVIRONMENT, timeout=60).returncode

    def ran() -> list[int]:
        return [int(line) for line in (tmp_path / "ran.txt").read_text().split()]

    out = tmp_path / "out.jsonl"
    assert start("lives") == 0
    whole = out.read_bytes()
    assert not ahead_of(out).exists()
    for path in (out, tmp_path / "ran.txt"):
        path.unlink()

    assert start("dies") == -9
    assert indices(out) == [0, 1]
    num_ahead = len([index for index in indices(ahead_of(out)) if index > 2])  # row 1 may have waited for row 0
    assert num_ahead >= 19
    first = ran()
    (tmp_path / "ran.txt").unlink()
    assert start("lives") == 0
    assert out.read_bytes() == whole
    assert not ahead_of(out).exists()
    assert len(ran()) == 198 - num_ahead
    # Of those that had begun, the slow one runs again, and those whose results nobody had looked at yet.
    assert 2 in ran()
    assert len(set(first) & set(ran())) == len(first) - 2 - num_ahead


class Stopping:
    """A program under the first row of which the engine dies once, when all others wait for it."""

    def __init__(self, path: Path) -> None:
        ran: list[int] = []
        live: set[int] = set()
        self.path, self.ran = path, ran

        @nw.function
        def double(s: nw.State, n: int) -> None:
            ran.append(n)
            if n == 0 and n not in live:
                live.add(n)
                wait_for_lines(ahead_of(path), 5)
                raise EngineStopped("gone")
            if n == 4:
                raise ValueError("four")
            s["twice"] = 2 * n

        self.program = double

    def run(self) -> list[object]:
        self.ran.clear()
        rows = [{"n": n} for n in range(6)]
        results = self.program.run_batch(rows, checkpoint=self.path, backend=nw.ScriptedBackend({}))
        return [str(one) if isinstance(one, Exception) else one["twice"] for one in results]


def test_results_of_rows_that_were_done_before_their_turn_are_given_in_order(tmp_path: Path) -> None:
    stopping = Stopping(tmp_path / "out.jsonl")
    with pytest.raises(EngineStopped):
        stopping.run()
    assert sorted(stopping.ran) == [0, 1, 2, 3, 4, 5]
    assert indices(stopping.path) == []
    assert stopping.run() == [0, 2, 4, 6, "ValueError: four", 10]
    assert stopping.ran == [0]
    assert indices(stopping.path) == [0, 1, 2, 3, 4, 5]
    assert sorted(one.name for one in tmp_path.iterdir()) == ["out.jsonl", "out.jsonl.meta"]
    assert stopping.run() == [0, 2, 4, 6, "ValueError: four", 10]
    assert stopping.ran == []


def test_rows_of_niwaki_run_that_wait_for_a_slow_one_do_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_folder(tmp_path, monkeypatch)
    Path("in.txt").write_text("first\n" + "".join(f"{n}\n" for n in range(1, 30)) + "nan\nlast\n")
    Path("program.py").write_text(
        "import time\nfrom pathlib import Path\nimport niwaki as nw\nfrom niwaki.runtime.api import EngineStopped\n"
        "@nw.function\ndef f(s, text):\n"
        "    with Path('ran.txt').open('a') as file:\n        file.write(text + ' ')\n"
        "    ahead = Path('out.jsonl.ahead')\n"
        "    if text == 'first' and not Path('again').exists():\n"
        "        while not ahead.exists() or ahead.read_text().count('index') < 30:\n            time.sleep(0.002)\n"
        "        raise EngineStopped('gone')\n"
        "    s['x'] = float(text) if text == 'nan' else text\n"
    )
    assert run("f", "in.txt") == 1
    assert "0 rows stand in out.jsonl; give the same command again" in one_line(capsys.readouterr().err)
    assert indices(Path("out.jsonl")) == []
    Path("again").touch()
    Path("ran.txt").unlink()
    assert run("f", "in.txt") == 0
    assert sorted(Path("ran.txt").read_text().split()) == ["first", "nan"]  # of which a row says that it is no JSON
    found = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    assert [row.get("x") for row in found] == ["first", *map(str, range(1, 30)), None, "last"]
    assert found[30]["error"]["type"] == "ValueError"
    assert not Path("out.jsonl.ahead").exists()
    assert "2 records in" in capsys.readouterr().out


def written_ahead(path: Path, *, more: bytes = b"") -> None:
    """A journal of three rows, the first of which is not there."""
    with Journal(path, FINGERPRINT) as journal:
        journal.begin()
        journal.keep(1, {"x": 1})
        journal.keep(2, {"error": {"type": "E", "message": "m"}})
    with ahead_of(path).open("ab") as file:
        file.write(more)


def test_half_a_line_is_passed_over_and_what_comes_behind_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    written_ahead(path, more=b'\n{"index": 3, "x')
    with Journal(path, FINGERPRINT) as journal:
        journal.begin()
        assert list(journal.undone("abcdef")) == ["a", "d", "e", "f"]
        journal.keep(2, {"x": 4})  # of the four
    with Journal(path, FINGERPRINT) as journal:
        journal.begin()
        assert list(journal.undone("abcdef")) == ["a", "d", "f"]
        for row in ({"x": 0}, {"x": 3}, {"x": 5}):
            journal.write(row)
        journal.complete()
        journal.settle()
    assert indices(path) == [0, 1, 2, 3, 4, 5]
    assert [json.loads(line).get("x") for line in path.read_text().splitlines()] == [0, 1, None, 3, 4, 5]
    assert not ahead_of(path).exists()


def test_rows_ahead_of_another_run_are_refused_and_go_with_a_new_beginning(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    written_ahead(path)
    with pytest.raises(JournalError, match=r"holds 2 rows of another run \(other input\)"):
        Journal(path, {"input": "b"})
    with Journal(path, {"input": "b"}, restart=True) as journal:
        assert ahead_of(path).exists()  # nothing changes before it begins
        journal.begin()
        assert list(journal.undone("abc")) == ["a", "b", "c"]
    assert not ahead_of(path).exists()


def test_whoever_deletes_the_output_has_all_rows_run_again(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    written_ahead(path)
    path.unlink()
    with Journal(path, FINGERPRINT) as journal:
        journal.begin()
        assert list(journal.undone("abc")) == ["a", "b", "c"]
    assert not ahead_of(path).exists()


def test_failed_rows_ahead_run_again_where_failed_ones_are_to(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    written_ahead(path)
    with opened_journal(path, FINGERPRINT, Wording("", ""), num_rows=3, retry_failed=True) as journal:
        assert list(journal.undone("abc")) == ["a", "c"]


def test_a_disk_that_is_full_costs_what_is_ahead_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t.jsonl"
    with Journal(path, FINGERPRINT) as journal:
        journal.begin()
        with monkeypatch.context() as full:
            full.setattr(os, "write", lambda fd, line: (_ for _ in ()).throw(OSError(28, "No space left on device")))
            journal.keep(1, {"x": 1})
        journal.keep(2, {"x": 2})  # half a line may stand there: nothing comes behind it
        journal.write({"x": 0})
    assert indices(path) == [0]
    with Journal(path, FINGERPRINT) as journal:
        assert list(journal.undone("abc")) == ["b", "c"]
