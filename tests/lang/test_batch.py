"""Rows through a function: order, bounds, errors; and the journal that a killed run continues from."""

from __future__ import annotations

import fcntl
import json
import os
import random
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from niwaki.lang.batch import READ_AHEAD, WINDOW, Journal, JournalError, run_rows
from niwaki.lang.progress import with_progress_bar
from niwaki.runtime.api import ConfigError, ProgramError
from tests.lang.waiting import PATIENCE

FINGERPRINT = {"input": "a1", "program": "b2"}


def double(row: int) -> int:
    return 2 * row


def fail_on_three(row: int) -> int:
    if row == 3:
        raise ValueError("three is refused")
    return row


def outcomes(results: Iterator[int | Exception]) -> list[int | str]:
    return [repr(result) if isinstance(result, Exception) else result for result in results]


def test_results_come_in_row_order_whatever_order_they_finish_in() -> None:
    last_is_done = threading.Event()

    def run_one(row: int) -> int:
        if row == 0:
            last_is_done.wait(PATIENCE)
        if row == 7:
            last_is_done.set()
        return row

    assert list(run_rows(run_one, range(8), num_threads=4)) == list(range(8))


def test_a_row_that_raises_yields_its_exception_and_the_others_go_on() -> None:
    results = outcomes(run_rows(fail_on_three, range(6), num_threads=2))
    assert results == [0, 1, 2, "ValueError('three is refused')", 4, 5]


def test_on_error_raise_delivers_what_stood_before_the_first_failure() -> None:
    results = run_rows(fail_on_three, range(6), num_threads=2, on_error="raise")
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="three is refused"):
        next(results)


def test_a_row_that_exits_the_interpreter_fails_alone() -> None:
    def run_one(row: int) -> int:
        if row == 1:
            raise SystemExit(3)
        return row

    first, second, third = run_rows(run_one, range(3), num_threads=1)
    assert (first, third) == (0, 2)
    assert isinstance(second, ProgramError)
    assert "SystemExit(3)" in str(second)


def test_no_more_rows_run_at_once_than_threads() -> None:
    lock, running, most = threading.Lock(), 0, 0
    barrier = threading.Barrier(4)  # breaks the test where fewer than four run at once

    def run_one(row: int) -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        barrier.wait(PATIENCE)
        with lock:
            running -= 1

    assert len(list(run_rows(run_one, range(40), num_threads=4))) == 40
    assert most == 4


def test_rows_are_read_only_a_window_ahead_of_the_oldest_unfinished_one() -> None:
    release = threading.Event()
    num_read = 0

    def rows() -> Iterator[int]:
        nonlocal num_read
        for row in range(1000):
            num_read += 1
            if num_read == WINDOW * 2:
                release.set()  # the window is full: only now may the first row end
            yield row

    def run_one(row: int) -> int:
        if row == 0:
            assert release.wait(PATIENCE)
        return row

    results = run_rows(run_one, rows(), num_threads=2)
    assert next(results) == 0
    assert num_read <= WINDOW * 2
    assert list(results) == list(range(1, 1000))


def test_a_row_that_takes_long_leaves_no_thread_idle_and_reads_no_more_rows_at_once() -> None:
    """Here 30 times as long as others, as an answer that goes round in circles until its budget ends it."""
    others_are_done = threading.Event()
    lock, num_ended, most_unfinished = threading.Lock(), 0, 0

    def rows() -> Iterator[int]:
        nonlocal most_unfinished
        for row in range(400):
            with lock:
                most_unfinished = max(most_unfinished, row - num_ended)
            yield row

    def run_one(row: int) -> bool:
        nonlocal num_ended
        if row == 30 * 2:
            others_are_done.set()
        was_whole = row > 0 or others_are_done.wait(PATIENCE)
        with lock:
            num_ended += 1
        return was_whole

    assert all(run_rows(run_one, rows(), num_threads=2))
    assert most_unfinished <= READ_AHEAD * 2


def test_an_input_that_breaks_off_raises_after_the_rows_before_it() -> None:
    def rows() -> Iterator[int]:
        yield from range(3)
        raise OSError("the disk went away")

    results = run_rows(double, rows(), num_threads=2)
    assert [next(results) for _ in range(3)] == [0, 2, 4]
    with pytest.raises(OSError, match="went away"):
        next(results)


def test_closing_the_iterator_starts_no_further_row() -> None:
    started: list[int] = []
    results = run_rows(lambda row: started.append(row), iter(range(10_000)), num_threads=1)
    next(results)
    results.close()  # type: ignore[attr-defined]  # a generator, which the signature does not promise
    assert len(started) <= WINDOW + 2


@pytest.mark.parametrize(("option", "value"), [("num_threads", 0), ("num_threads", True), ("on_error", "ignore")])
def test_an_impossible_option_is_refused_at_once(option: str, value: object) -> None:
    with pytest.raises(ConfigError, match=option):
        run_rows(double, [1], **{option: value})  # type: ignore[arg-type]


def test_where_the_system_allows_fewer_threads_that_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    start, count = threading.Thread.start, 0

    def start_three(self: threading.Thread) -> None:
        nonlocal count
        count += 1
        if count > 3:
            raise RuntimeError("can't start new thread")
        start(self)

    release = threading.Event()
    monkeypatch.setattr(threading.Thread, "start", start_three)
    with pytest.raises(ConfigError, match=r"can't start new thread: .* run fewer rows at once"):
        list(run_rows(lambda row: release.wait(60), range(8), num_threads=8))
    release.set()


def test_rows_at_the_interpreters_end_are_not_told_to_be_fewer() -> None:
    """A thread of the author's outlives the main one, and no pool takes work any more."""
    code = (
        "import concurrent.futures.thread as pools, threading, time\n"
        "from niwaki.lang.batch import run_rows\n"
        "def late():\n"
        "    while not pools._shutdown:\n"
        "        time.sleep(0.001)\n"
        "    list(run_rows(str, range(3), num_threads=2))\n"
        "threading.Thread(target=late).start()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert "RuntimeError: cannot schedule new futures after" in done.stderr
    assert "ConfigError" not in done.stderr


def test_the_progress_bar_counts_rows(capsys: pytest.CaptureFixture[str]) -> None:
    counters = {"generated_tokens": 0.0, "cached_tokens": 0.0, "prefilled_tokens": 0.0}

    def rows() -> Iterator[int]:
        for row in range(5):
            counters.update(generated_tokens=10.0 * row, cached_tokens=3.0 * row, prefilled_tokens=1.0 * row)
            yield row

    assert list(with_progress_bar(rows(), range(5), lambda: counters)) == [0, 1, 2, 3, 4]
    shown = capsys.readouterr().err
    assert "5/5" in shown
    assert "row/s" in shown
    assert re.search(r"[0-9,]+ tok/s, 75% cached", shown)


# ---------------------------------------------------------------------------------------------------------------
# The journal
# ---------------------------------------------------------------------------------------------------------------


def write_rows(path: Path, upto: int, *, restart: bool = False, finish: bool = False) -> int:
    """Continue the journal up to `upto` rows; returns how many it held before."""
    with Journal(path, FINGERPRINT, restart=restart) as journal:
        held = journal.num_done
        journal.begin()
        for value in range(held, upto):
            journal.write({"value": value})
        if finish:
            journal.finish()
    return held


def values(path: Path) -> list[int]:
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    assert [row["index"] for row in rows] == list(range(len(rows)))
    return [row["value"] for row in rows]


def test_a_journal_continues_after_its_last_row(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    assert write_rows(path, 3) == 0
    assert write_rows(path, 8) == 3
    assert values(path) == list(range(8))


def test_cut_at_any_byte_a_journal_continues_without_losing_or_repeating_a_row(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    write_rows(path, 12)
    whole = path.read_bytes()
    for cut in random.Random(1).sample(range(len(whole) + 1), 60):
        path.write_bytes(whole[:cut])
        assert write_rows(path, 12) == whole[:cut].count(b"\n")
        assert path.read_bytes() == whole


def test_opening_alone_changes_no_byte(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    write_rows(path, 2)
    with path.open("ab") as file:
        file.write(b'{"index": 2, "val')
    before = path.read_bytes()
    for restart in (False, True):
        with Journal(path, FINGERPRINT, restart=restart) as journal:
            assert journal.num_done == (0 if restart else 2)
    assert path.read_bytes() == before


def test_restart_begins_again(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    write_rows(path, 5)
    assert write_rows(path, 2, restart=True) == 0
    assert values(path) == [0, 1]


def test_a_changed_input_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    write_rows(path, 2)
    with pytest.raises(JournalError, match=r"holds 2 rows of another run \(other input\): delete it"):
        Journal(path, {**FINGERPRINT, "input": "zz"})
    assert values(path) == [0, 1]


def test_a_file_of_someone_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text('{"name": "mine"}\n')
    with pytest.raises(JournalError, match=r"line 1 of .* is not row 0"):
        Journal(path, FINGERPRINT)
    assert path.read_text() == '{"name": "mine"}\n'
    for text in ('{"name": "mine"}', "my notes"):  # with no end of a line, and so no whole one
        path.write_text(text)
        with pytest.raises(JournalError, match=r"line 1 of .* is not row 0"):
            Journal(path, FINGERPRINT)
        assert path.read_text() == text


def test_rows_without_their_sidecar_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    write_rows(path, 2)
    path.with_name("out.jsonl.meta").unlink()
    with pytest.raises(JournalError, match=r"out\.jsonl\.meta.* is missing"):
        Journal(path, FINGERPRINT)


def test_two_runs_never_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with Journal(path, FINGERPRINT), pytest.raises(JournalError, match="being written by another run"):
        Journal(path, FINGERPRINT)
    assert write_rows(path, 1) == 0  # free again


def test_a_file_that_another_run_takes_away_while_it_is_opened_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.jsonl"
    other, flock = Journal(path, FINGERPRINT), fcntl.flock

    def late(fd: int, how: int) -> None:
        other.close()  # it made the file and began nothing
        flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(JournalError, match="taken away by another run"):
        Journal(path, FINGERPRINT)
    monkeypatch.undo()
    with Journal(path, FINGERPRINT) as journal:
        journal.begin()
        journal.write({"a": 1})
    assert path.read_text() == '{"index": 0, "a": 1}\n'


def test_only_a_finished_run_is_called_finished(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    meta = tmp_path / "out.jsonl.meta"
    write_rows(path, 2)
    assert json.loads(meta.read_text())["finished"] is False
    write_rows(path, 3, finish=True)
    assert json.loads(meta.read_text())["finished"] is True


def test_a_row_that_is_no_json_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with Journal(path, FINGERPRINT) as journal:
        journal.begin()
        journal.write({"value": 0})
        for bad in (float("nan"), "\ud800"):
            with pytest.raises(ValueError):  # noqa: PT011  # two kinds of ValueError, worded by the standard library
                journal.write({"value": bad})
        journal.write({"value": 1})
    assert values(path) == [0, 1]


def test_a_sidecar_that_could_not_be_written_leaves_nothing_beside_the_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "out.jsonl"
    with Journal(path, FINGERPRINT) as journal, monkeypatch.context() as disk:
        disk.setattr(os, "fsync", full)
        with pytest.raises(OSError, match=r"No space left on device: '.*out\.jsonl\.meta'"):
            journal.begin()
    assert [one.name for one in tmp_path.iterdir()] == ["out.jsonl"]


def test_a_folder_in_the_place_of_the_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path in (tmp_path, Path(".")):
        with pytest.raises(IsADirectoryError, match=re.escape(f"'{path}'")):
            Journal(path, FINGERPRINT)
    assert not list(tmp_path.iterdir())


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*nodir; make it first: '.*nodir/t.jsonl'"):
        Journal(tmp_path / "nodir" / "t.jsonl", FINGERPRINT)
    (tmp_path / "t.jsonl").symlink_to(tmp_path / "nodir" / "t.jsonl")
    with pytest.raises(FileNotFoundError, match="No such file or directory"):
        Journal(tmp_path / "t.jsonl", FINGERPRINT)


def test_a_full_disk_leaves_whole_lines_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out.jsonl"
    room = 100
    real_write = os.write

    def write_while_there_is_room(fd: int, data: memoryview) -> int:
        nonlocal room
        if room == 0:
            raise OSError(28, "No space left on device")
        written = real_write(fd, data[:room])
        room -= written
        return written

    with Journal(path, FINGERPRINT) as journal:
        journal.begin()
        monkeypatch.setattr(os, "write", write_while_there_is_room)
        with pytest.raises(OSError, match=r"No space left on device: '.*out\.jsonl'"):  # noqa: PT012  # which of the rows hits the limit is open
            for value in range(20):
                journal.write({"value": value})
        monkeypatch.undo()
        held = journal.num_done
    assert values(path) == list(range(held))
    assert write_rows(path, 20) == held
    assert values(path) == list(range(20))


def test_a_device_is_written_but_never_continued() -> None:
    with Journal(Path(os.devnull), FINGERPRINT) as journal:
        assert not journal.is_resumable
        journal.begin()
        journal.write({"value": 1})
        journal.finish()
    assert not Path(os.devnull + ".meta").exists()


def test_rows_of_a_run_that_ends_early_are_synced_when_the_file_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, synced, sync = tmp_path / "out.jsonl", list[int](), os.fsync

    def noting(fd: int) -> None:
        synced.append(path.stat().st_size)
        sync(fd)

    with Journal(path, FINGERPRINT) as journal:
        journal.begin()
        monkeypatch.setattr(os, "fsync", noting)
        journal.write({"x": 1})
        journal.write({"x": 2})
    assert synced[-1:] == [path.stat().st_size]
    count = len(synced)
    Journal(path, FINGERPRINT).close()
    assert len(synced) == count, "nothing was written"


def test_a_power_cut_never_leaves_rows_of_one_run_beside_the_sidecar_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Begun again for another program: what was there is gone on the disk before the sidecar changes, and the new
    sidecar stands on it before the first row. Without a sync between them a disk may keep the later one alone."""
    path, done, sync, replace = tmp_path / "out.jsonl", list[str](), os.fsync, Path.replace
    write_rows(path, 3)

    def noting(fd: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{fd}")).name
        done.append(f"{name}: {path.stat().st_size} bytes" if name == path.name else name)
        sync(fd)

    def renaming(self: Path, target: Path) -> Path:
        done.append(f"{self.name} -> {target.name}")
        return replace(self, target)

    with Journal(path, {**FINGERPRINT, "program": "another"}, restart=True) as journal:
        monkeypatch.setattr(os, "fsync", noting)
        monkeypatch.setattr(Path, "replace", renaming)
        journal.begin()
    meta = "out.jsonl.meta"
    assert done == ["out.jsonl: 0 bytes", f"{meta}.partial", f"{meta}.partial -> {meta}", tmp_path.name]
