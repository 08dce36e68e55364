"""Whoever waits for kernels to be compiled is told so."""

from __future__ import annotations

import io
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numba
import pytest

from niwaki.kernels import compile_notice
from niwaki.kernels.compile_notice import announce_compiling
from niwaki.kernels.compile_time import on_compiling

PATIENCE = 60.0
ROOT = Path(__file__).parents[2]


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def function_of(module: str | None) -> Callable[[int], int]:
    def double(number: int) -> int:
        return number * 2

    double.__module__ = module  # type: ignore[assignment]  # None: as `exec` makes them
    return numba.njit()(double)


def wait_for(is_there: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not is_there():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_notice, "TELL_SECONDS", 0.0)
    monkeypatch.setattr(compile_notice, "QUIET_SECONDS", 0.0)
    wait_for(lambda: not watches())
    announce_compiling()


def watches() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "niwaki-compiling"]


@pytest.mark.usefixtures("impatient")
def test_a_terminal_is_told_of_compiling_and_of_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", screen := Screen())
    assert function_of("niwaki.kernels.some")(2) == 4
    wait_for(lambda: screen.getvalue().count("\n") == 2)
    begin, end = screen.getvalue().splitlines()
    assert begin.startswith("niwaki: compiling kernels for this processor (in each process, for no folder")
    assert end.startswith("niwaki: kernels compiled in ")


@pytest.mark.usefixtures("impatient")
def test_where_logging_is_set_up_and_no_terminal_there_the_log_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "stderr", file := io.StringIO())
    with caplog.at_level(logging.INFO, "niwaki.kernels"):
        function_of("niwaki.kernels.some")(2)
        wait_for(lambda: len(caplog.messages) == 2)
    assert caplog.messages[0].startswith("compiling kernels")
    # Somebody's handler of an earlier test may complain there that its own stream is closed.
    assert not any(line.startswith("niwaki: ") for line in file.getvalue().splitlines())


def test_a_process_without_a_terminal_or_a_log_is_told_on_stderr() -> None:
    """As an engine's process in a container, or `niwaki run` in a pipe."""
    code = """
import time
import numba
from niwaki.kernels import compile_notice

compile_notice.TELL_SECONDS = compile_notice.QUIET_SECONDS = 0.0
compile_notice.announce_compiling()

def double(number):
    return number * 2

double.__module__ = "niwaki.kernels.some"
assert numba.njit()(double)(2) == 4
while compile_notice._listeners[0]._watch is not None:
    time.sleep(0.01)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    begin, end = done.stderr.splitlines()
    assert begin.startswith("niwaki: compiling kernels for this processor (in each process")
    assert end.startswith("niwaki: kernels compiled in ")
    assert not done.stdout


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("module", ["somebody.elses", None])
def test_functions_of_others_are_not_told_of(module: str | None) -> None:
    assert function_of(module)(2) == 4
    assert not watches()


def test_whoever_keeps_the_time_is_told_once_of_what_is_compiled_and_of_ours_alone() -> None:
    told: list[str] = []

    def begins() -> None:
        told.append("begins")

    def ends() -> None:
        told.append("ends")

    on_compiling(begins, ends)
    on_compiling(begins, ends)
    function_of("somebody.else")(2)
    assert told == []
    function_of("niwaki.kernels.some")(2)
    assert told == ["begins", "ends"]
