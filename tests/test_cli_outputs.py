"""`niwaki run`: what it must not write over, and what its output and its bar are made of."""

from __future__ import annotations

import errno
import io
import os
import types
from pathlib import Path
from typing import Self

import pytest

from niwaki.lang import tables
from niwaki.lang.report import Progress, Tally
from tests.counted_engine import make_folder, one_line, run


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = make_folder(tmp_path, monkeypatch)
    (folder / "in.txt").write_text("a\nb\n")
    return folder


def test_a_table_that_no_run_has_made_is_not_written_over(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.csv").write_text("the only copy\n")
    for limit in ("1", "2"):
        assert run("shout", "in.txt", "--limit", limit, output="mine.csv") == 1
        told = one_line(capsys.readouterr().err)
        assert "mine.csv stands there already, and mine.csv.rows.jsonl, which says that a run has made it" in told
    assert Path("mine.csv").read_text() == "the only copy\n"
    assert not [*folder.glob("mine.csv.*")]
    assert run("shout", "in.txt", "--restart", output="mine.csv") == 0
    assert Path("mine.csv").read_text() == "index,loud\n0,A\n1,B\n"


def test_a_table_of_a_run_is_made_again_and_an_empty_file_is_none(folder: Path) -> None:
    Path("out.csv").touch()  # as mktemp makes it
    assert run("shout", "in.txt", "--limit", "1", output="out.csv") == 0
    assert run("shout", "in.txt", output="out.csv") == 0
    assert Path("out.csv").read_text() == "index,loud\n0,A\n1,B\n"
    Path("none.txt").touch()
    for _ in range(2):  # of no rows, too
        assert run("shout", "none.txt", output="none.csv") == 0


def test_rows_beside_a_table_are_never_the_input_of_that_table(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("shout", "in.txt", output="out.csv") == 0
    before = Path("out.csv.rows.jsonl").read_bytes()
    capsys.readouterr()
    assert run("shout", "out.csv.rows.jsonl", "--column", "loud", "--restart", output="out.csv") == 1
    assert "whose rows stand in out.csv.rows.jsonl, is the input" in one_line(capsys.readouterr().err)
    assert Path("out.csv.rows.jsonl").read_bytes() == before


def fill_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the next file that is synced: what was written of it stays in memory, and the disk has no place for it."""
    sync, is_full = os.fsync, [True]

    def synced(fd: int) -> None:
        if is_full:
            is_full.clear()
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(fd)

    monkeypatch.setattr("os.fsync", synced)


@pytest.mark.parametrize("output", ["out.jsonl", "out.csv"])
def test_a_disk_that_is_full_before_the_first_row_is_told_with_the_file(
    folder: Path, output: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        fill_the_disk(patch)
        assert run("shout", "in.txt", output=output) == 1
    assert "No space left on device" in (told := one_line(capsys.readouterr().err))
    assert f"{output}{'.rows.jsonl' * (output == 'out.csv')}.meta" in told
    assert run("shout", "in.txt", output=output) == 0


def test_a_disk_that_is_full_as_the_table_is_made_is_told_with_it_and_no_half_of_it_stays(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pyarrow")
    for output in ("out.csv", "out.parquet"):
        with monkeypatch.context() as patch:

            def full(lines: Path, output: Path, count: int, *, patch: pytest.MonkeyPatch = patch) -> None:
                fill_the_disk(patch)
                tables.write_table(lines, output, count)

            patch.setattr("niwaki.run_command.write_table", full)
            assert run("shout", "in.txt", output=output) == 1
        told = one_line(capsys.readouterr().err)
        assert f"No space left on device: {folder}/{output}; 2 rows stand in {output}.rows.jsonl" in told
        assert not [*folder.glob("*.partial"), *folder.glob(output)]
        assert run("shout", "in.txt", output=output) == 0
        assert Path(output).exists()
        capsys.readouterr()


def test_a_long_error_is_told_in_a_line_that_can_be_read(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("in.txt").write_text("fail " + "x" * 5000 + "\na\n")
    assert run("shout", "in.txt") == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert len(first) < 600
    assert "record 0: ValueError: refused: fail xxx" in first
    assert "in program shout, program.py:" in first
    assert "x" * 5000 in Path("out.jsonl").read_text()


def test_a_bar_does_not_ask_for_the_engines_counters_at_each_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """They cost as much as a third of a record."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    class Clock:
        now = 0.0

        def monotonic(self: Self) -> float:
            return self.now

        def perf_counter(self) -> float:
            return self.now

    clock, asked = Clock(), list[float]()

    def usage() -> dict[str, float]:
        asked.append(clock.now)
        return {"generated_tokens": clock.now, "cached_tokens": 1.0, "prefilled_tokens": 1.0}

    stands_for_it = types.SimpleNamespace(monotonic=clock.monotonic, perf_counter=clock.perf_counter)
    monkeypatch.setattr("niwaki.lang.report.time", stands_for_it)
    screen = Terminal()
    with Progress(Tally(0, 1000, usage, started_at=0.0), screen) as progress:
        for _ in range(1000):
            clock.now += 0.01
            progress.show()
    assert len(asked) <= 21
    assert "1000/1000" in screen.getvalue().split("\r")[-1]
    assert "1 tok/s, 50% cached" in screen.getvalue().split("\r")[-1], "what it says last is of the end"
