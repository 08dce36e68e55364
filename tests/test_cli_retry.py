"""`niwaki run --retry-failed`: the failed rows of an output run again, and no others; a kill costs nothing."""

from __future__ import annotations

import json
import os
import random
import signal
import stat
import time
from contextlib import suppress
from pathlib import Path

import pytest

from niwaki.__main__ import main
from niwaki.lang.batch import Journal
from niwaki.lang.retry import Retry
from tests.counted_engine import make_folder, one_line, rows, run
from tests.test_cli_processes import command, wait_for_lines

# Notes what it ran. "away" fails until the file `back` is there, "never" always.
PROGRAM = """
import time
from pathlib import Path
import niwaki as nw
from niwaki.runtime.api import EngineStopped

@nw.function
def ask(s, text):
    with open("ran.txt", "a") as file:
        file.write(text + "\\n")
    if "slow" in text:
        time.sleep(0.02)
    while "held" in text and Path("hold").exists():
        time.sleep(0.02)
    if "never" in text or ("away" in text and not Path("back").exists()):
        raise ValueError(f"no answer to {text}")
    if "die" in text and Path("back").exists():
        raise EngineStopped("the engine died")
    s["loud"] = text.upper()
"""
TEXTS = ["one", "away 1", "two", "never 3", "away 4", "three", "four"]
RETRY = ("run", "program.py:ask", "--input", "in.txt", "--output", "out.jsonl", "--retry-failed")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = make_folder(tmp_path, monkeypatch)
    (folder / "program.py").write_text(PROGRAM)
    (folder / "in.txt").write_text("\n".join(TEXTS) + "\n")
    return folder


def ran() -> list[str]:
    """What ran since this was last asked."""
    path = Path("ran.txt")
    texts = path.read_text().splitlines() if path.exists() else []
    path.unlink(missing_ok=True)
    return sorted(texts)


def failed() -> list[object]:
    return [row["index"] for row in rows() if "error" in row]


def come_back() -> None:
    """The service is there again. What ran before is no matter."""
    assert failed() == [1, 3, 4]
    Path("back").touch()
    ran()


def test_the_failed_rows_alone_run_again_and_stand_in_their_places(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("ask", "in.txt")
    before = Path("out.jsonl").read_bytes().splitlines()
    come_back()
    capsys.readouterr()
    assert main([*RETRY]) == 0
    assert ran() == ["away 1", "away 4", "never 3"]
    after = Path("out.jsonl").read_bytes().splitlines()
    assert [after[index] for index in (0, 2, 3, 5, 6)] == [before[index] for index in (0, 2, 3, 5, 6)]
    assert [rows()[index]["loud"] for index in (1, 4)] == ["AWAY 1", "AWAY 4"]
    report = capsys.readouterr().out
    assert report.startswith("3 records in ")
    assert "1 of them with an error (the first is record 3: ValueError: no answer to never 3" in report
    assert report.endswith("written to out.jsonl (4 stood there already)\n")
    assert sorted(path.name for path in folder.glob("out.jsonl*")) == ["out.jsonl", "out.jsonl.meta"]
    assert json.loads(Path("out.jsonl.meta").read_text())["finished"] is True


def test_a_row_that_fails_for_good_is_told_again_each_time(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("ask", "in.txt")
    come_back()
    main([*RETRY])
    whole = Path("out.jsonl").read_bytes()
    ran()
    capsys.readouterr()
    assert main([*RETRY]) == 1  # every record of this run
    assert ran() == ["never 3"]
    assert Path("out.jsonl").read_bytes() == whole
    assert "with an error (record 3: ValueError: no answer to never 3" in capsys.readouterr().out


def test_strict_counts_the_rows_that_ran_again(folder: Path) -> None:
    run("ask", "in.txt")
    come_back()
    assert main([*RETRY, "--strict"]) == 1


def test_the_same_command_says_that_failed_rows_can_run_again(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("ask", "in.txt")
    capsys.readouterr()
    assert run("ask", "in.txt") == 0
    told = capsys.readouterr().out
    assert told == (
        "nothing to do: out.jsonl has all 7 records, 3 of them with an error (--retry-failed runs those again) "
        "(--restart begins again)\n"
    )


def test_where_no_row_failed_the_run_goes_on_as_ever(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("in.txt").write_text("one\ntwo\nthree\n")
    run("ask", "in.txt", "--limit", "2")
    ran()
    assert main([*RETRY]) == 0
    assert ran() == ["three"]
    assert main([*RETRY]) == 0
    assert "nothing to do: out.jsonl has all 3 records (--restart" in capsys.readouterr().out
    assert not Path("out.jsonl.retry").exists()


def test_without_an_output_it_is_a_first_run(folder: Path) -> None:
    assert main([*RETRY]) == 0
    assert ran() == sorted(TEXTS)
    assert failed() == [1, 3, 4]


def test_records_that_were_not_run_yet_follow_those_that_failed(folder: Path) -> None:
    run("ask", "in.txt", "--limit", "4")
    Path("back").touch()
    ran()
    assert main([*RETRY]) == 0
    assert ran() == sorted(["away 1", "never 3", *TEXTS[4:]])
    assert failed() == [3]


def test_a_limit_that_would_leave_failed_rows_out_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("ask", "in.txt")
    before = Path("out.jsonl").read_bytes()
    capsys.readouterr()
    assert main([*RETRY, "--limit", "3"]) == 1
    assert "give no --limit, or one of at least 7" in one_line(capsys.readouterr().err)
    assert Path("out.jsonl").read_bytes() == before
    assert main([*RETRY, "--limit", "7"]) == 1  # as many as stand there: all that ran failed again


def test_a_table_is_made_again(folder: Path) -> None:
    assert run("ask", "in.txt", output="out.csv") == 0
    Path("back").touch()
    assert run("ask", "in.txt", "--retry-failed", output="out.csv") == 0
    table = Path("out.csv").read_text()
    assert "AWAY 1" in table
    assert "AWAY 4" in table
    assert "no answer to never 3" in table


@pytest.mark.parametrize("hook", ["niwaki.run_command.write_table", "niwaki.lang.retry.Retry.settle"])
def test_killed_when_all_has_run_the_next_run_makes_the_table_and_runs_nothing(
    folder: Path, hook: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("ask", "in.txt", output="out.csv") == 0
    Path("back").touch()
    ran()

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(hook, killed)
        with suppress(KeyboardInterrupt):
            assert run("ask", "in.txt", "--retry-failed", output="out.csv") == 130
    assert ran() == ["away 1", "away 4", "never 3"]
    assert run("ask", "in.txt", "--retry-failed", output="out.csv") == 0
    assert ran() == []
    table = Path("out.csv").read_text()
    assert "AWAY 1" in table
    assert "no answer to never 3" in table
    assert sorted(path.name for path in folder.glob("out.csv*")) == [
        "out.csv",
        "out.csv.rows.jsonl",
        "out.csv.rows.jsonl.meta",
    ]


def test_what_a_link_leads_to_is_replaced_and_keeps_its_mode(folder: Path) -> None:
    Path("there").mkdir()
    Path("out.jsonl").symlink_to("there/real.jsonl")
    run("ask", "in.txt")
    Path("there/real.jsonl").chmod(0o640)
    come_back()
    assert main([*RETRY]) == 0
    assert Path("out.jsonl").is_symlink()
    assert failed() == [3]
    assert stat.S_IMODE(Path("there/real.jsonl").stat().st_mode) == 0o640
    assert [path.name for path in Path("there").iterdir()] == ["real.jsonl"]


def test_killed_again_and_again_no_row_is_lost_and_none_runs_again_that_was_written(folder: Path) -> None:
    texts = [f"slow {('fine', 'away', 'never')[index % 3]} {index}" for index in range(300)]
    texts[-1] = "held never 299"
    Path("in.txt").write_text("\n".join(texts))
    Path("hold").touch()  # the last one takes until the run is killed
    assert run("ask", "in.txt", "--limit", "240") == 0  # 60 are not run yet
    before = Path("out.jsonl").read_bytes()
    Path("back").touch()
    ran()
    pause = random.Random(7)
    written = 0
    for at_least in (1, 90, 180, 250):
        process = command(*RETRY, "--concurrency", "4")
        wait_for_lines(process, Path("out.jsonl.retry"), at_least)
        time.sleep(pause.random() * 0.02)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        assert Path("out.jsonl").read_bytes() == before  # until all is done
        # Those that had been written are not among what ran since.
        assert not {int(text.split()[-1]) for text in ran()} & set(range(written))
        written = Path("out.jsonl.retry").read_bytes().count(b"\n")
        assert at_least <= written < len(texts)
    Path("hold").unlink()
    finished = command(*RETRY, "--concurrency", "4")
    out, error = finished.communicate(timeout=60)
    assert finished.returncode == 0, error
    assert "stood there already" in out
    found = rows()
    assert len(found) == len(texts)
    for index, (text, row) in enumerate(zip(texts, found, strict=True)):
        assert ("error" in row) == (index % 3 == 2)
        assert index % 3 == 2 or row["loud"] == text.upper()
    assert not Path("out.jsonl.retry").exists()


def test_killed_before_the_file_is_renamed_the_next_run_does_only_that(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run("ask", "in.txt")
    come_back()

    def killed(self: Retry) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Retry, "settle", killed)
        assert main([*RETRY]) == 130
    assert "stand in out.jsonl.retry; give the same command again" in one_line(capsys.readouterr().err)
    assert failed() == [1, 3, 4]
    ran()
    assert main([*RETRY]) == 0
    assert ran() == []
    assert failed() == [3]
    assert "nothing to do: out.jsonl has all 7 records, 1 of them with an error" in capsys.readouterr().out


def stopped_half_way() -> None:
    """A retry whose engine died at the record after the first two that failed."""
    Path("in.txt").write_text("\n".join([*TEXTS[:4], "away, and die", *TEXTS[5:]]))
    run("ask", "in.txt")
    come_back()
    assert main([*RETRY, "--concurrency", "1"]) == 1
    assert Path("out.jsonl.retry").read_bytes().count(b"\n") == 4


def test_a_dead_engine_leaves_the_output_as_it_was(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stopped_half_way()
    assert "4 rows stand in" in capsys.readouterr().err.splitlines()[-1]
    assert failed() == [1, 3, 4]


def test_a_retry_that_was_stopped_is_gone_on_with_or_forgotten(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stopped_half_way()
    capsys.readouterr()
    assert run("ask", "in.txt") == 1
    told = one_line(capsys.readouterr().err)
    assert "give --retry-failed to go on with it, or delete" in told
    assert failed() == [1, 3, 4]
    Path("back").unlink()
    assert run("ask", "in.txt", "--restart") == 0
    assert failed() == [1, 3, 4]
    assert not [*folder.glob("*.retry*")]


def test_a_retry_of_other_rows_never_takes_their_place(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stopped_half_way()
    lines = Path("out.jsonl").read_text().splitlines(keepends=True)
    lines[3] = '{"index": 3, "loud": "a good row that the retry does not have"}\n'
    Path("out.jsonl").write_text("".join(lines))
    capsys.readouterr()
    assert main([*RETRY]) == 1
    assert "is no retry of the rows that stand in out.jsonl now: delete it" in one_line(capsys.readouterr().err)
    assert Path("out.jsonl").read_text() == "".join(lines)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--restart",), "give one of them"),
        (("--output", "-"), "/dev/stdout is no file"),
        (("--output", "/dev/null"), "/dev/null is no file"),
    ],
)
def test_what_makes_no_sense_beside_it_is_refused(
    folder: Path, more: tuple[str, ...], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([*RETRY, *more]) == 1
    assert message in one_line(capfd.readouterr().err)
    assert ran() == []


def test_two_retries_never_write_one_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("ask", "in.txt")
    meta = json.loads(Path("out.jsonl.meta").read_text())
    with Journal(Path("out.jsonl"), meta["fingerprint"]) as journal, Retry(journal, meta["fingerprint"]):
        capsys.readouterr()
        assert main([*RETRY]) == 1
        assert "is being written by another run" in one_line(capsys.readouterr().err)
    assert not Path("out.jsonl.retry").exists()


def test_error_within_a_value_is_no_failure(folder: Path) -> None:
    Path("in.txt").write_text("one\n")
    said = PROGRAM.replace("text.upper()", '{"error": text}')
    Path("program.py").write_text(said)
    run("ask", "in.txt")
    assert ran() == ["one"]
    assert main([*RETRY]) == 0
    assert ran() == []
