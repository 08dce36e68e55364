"""`niwaki run` in a process of its own: a kill costs nothing, Ctrl-C and a full disk keep whole lines."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import IO

import pytest

from niwaki.__main__ import main
from tests.counted_engine import make_folder, one_line, rows

ROOT = Path(__file__).parent.parent

# `niwaki` in a process of its own, with the counted engine; arguments: those of the command.
LAUNCHER = """
import sys, types
sys.path.insert(0, {root!r})
engine = types.ModuleType("niwaki.runtime.engine")
from tests.counted_engine import CountedEngine
engine.Engine = CountedEngine
sys.modules["niwaki.runtime.engine"] = engine
from niwaki.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


def command(
    *arguments: str, max_file_bytes: int | None = None, stdout: int | IO[str] = subprocess.PIPE
) -> subprocess.Popen[str]:
    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (max_file_bytes or 0, max_file_bytes or 0))

    launcher = textwrap.dedent(LAUNCHER.format(root=str(ROOT)))
    return subprocess.Popen(
        [sys.executable, "-c", launcher, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
        preexec_fn=None if max_file_bytes is None else limit,
    )


def wait_for_lines(process: subprocess.Popen[str], path: Path, count: int) -> None:
    deadline = time.monotonic() + 60
    while not path.exists() or path.read_bytes().count(b"\n") < count:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return make_folder(tmp_path, monkeypatch)


def test_the_output_may_be_a_pipe(folder: Path) -> None:
    Path("in.txt").write_text("a\nfail\n")
    done = command("run", "program.py:shout", "--input", "in.txt", "--output", "/dev/stdout")
    text, _ = done.communicate(timeout=60)
    assert done.returncode == 0
    assert [json.loads(line)["index"] for line in text.splitlines()] == [0, 1]


def test_an_output_that_a_shell_sends_into_a_file_stands_behind_what_is_there(folder: Path) -> None:
    Path("in.txt").write_text("a\nb\n")
    for rows_before in (0, 2):  # which are no beginning of this run
        with Path("all.jsonl").open("a") as file:
            done = command("run", "program.py:shout", "--input", "in.txt", "--output", "-", stdout=file)
            _, told = done.communicate(timeout=60)
        assert (done.returncode, told.splitlines()[-1]) == (0, "written to /dev/stdout")
        indices = [json.loads(line)["index"] for line in Path("all.jsonl").read_text().splitlines()]
        assert indices == [0, 1] * (1 + rows_before // 2)
    assert not Path("/dev/stdout.meta").exists()


def test_a_reader_of_the_output_that_leaves_ends_the_run(folder: Path) -> None:
    Path("in.txt").write_text("x" * 100 + "\n" + ("y" * 100 + "\n") * 3000)
    process = command("run", "program.py:shout", "--input", "in.txt", "--output", "-")
    assert process.stdout is not None
    assert process.stderr is not None
    assert json.loads(process.stdout.readline())["index"] == 0
    process.stdout.close()
    assert process.wait(timeout=60) == 1
    assert "Broken pipe: /dev/stdout" in one_line(process.stderr.read())
    process.stderr.close()


@pytest.mark.parametrize("rows", [1, 3000])
def test_a_reader_of_a_page_that_leaves_is_told_of_in_one_line(folder: Path, rows: int) -> None:
    Path("long.txt").write_text("|".join(f"word{number}" for number in range(rows)))
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as gone:
        process = command("constraint", "show", "long.txt", stdout=gone)
        _, told = process.communicate(timeout=60)
    assert (process.returncode, one_line(told)) == (1, "niwaki: [Errno 32] Broken pipe")


def test_killed_again_and_again_a_run_loses_and_repeats_no_row(folder: Path) -> None:
    texts = [*(f"slow record {index}" for index in range(199)), "held record"]
    Path("in.txt").write_text("\n".join(texts))
    Path("hold").touch()  # the last one takes until the run is killed
    run_it = ("run", "program.py:shout", "--input", "in.txt", "--output", "out.jsonl", "--concurrency", "4")
    pause = random.Random(3)
    for at_least in (1, 60, 120):
        process = command(*run_it)
        wait_for_lines(process, Path("out.jsonl"), at_least)
        time.sleep(pause.random() * 0.02)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        assert process.returncode == -signal.SIGKILL
        assert at_least <= len(Path("out.jsonl").read_bytes().splitlines()) < len(texts)
    Path("hold").unlink()
    finished = command(*run_it)
    out, error = finished.communicate(timeout=60)
    assert finished.returncode == 0, error
    assert "stood there already" in out
    assert [row["loud"] for row in rows()] == [text.upper() for text in texts]


def test_control_c_says_how_to_go_on_and_exits_with_130(folder: Path) -> None:
    Path("in.txt").write_text("\n".join(f"slow {index}" for index in range(400)))
    process = command("run", "program.py:shout", "--input", "in.txt", "--output", "out.jsonl", "--concurrency", "2")
    wait_for_lines(process, Path("out.jsonl"), 3)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "give the same command again to continue" in one_line(error)
    assert len(rows()) >= 3


def test_control_c_while_it_loads_is_one_line_too() -> None:
    code = (
        "import os, signal, sys\n"
        "class Interrupting:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'niwaki.lang.batch': os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupting())\n"
        "from niwaki.__main__ import main\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (130, "niwaki: interrupted\n")


def test_a_disk_that_fills_up_fails_the_run_and_keeps_whole_lines(folder: Path) -> None:
    Path("in.txt").write_text("\n".join(f"record {index}" for index in range(200)))
    run_it = ("run", "program.py:shout", "--input", "in.txt", "--output", "out.jsonl")
    process = command(*run_it, max_file_bytes=1000)  # what a file may grow to: stands for a disk that is full
    _, error = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "File too large: out.jsonl" in one_line(error)
    held = len(rows())
    assert 0 < held < 200
    assert main(list(run_it)) == 0
    assert [row["loud"] for row in rows()] == [f"RECORD {index}" for index in range(200)]
