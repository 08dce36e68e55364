"""Whoever waits for kernels to be compiled is told so."""

from __future__ import annotations

import io
import logging
import sys
import threading
import time
from collections.abc import Callable

import numba
import pytest

from niwaki.kernels import compile_notice
from niwaki.kernels.compile_notice import announce_compiling

PATIENCE = 60.0


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
def test_what_is_no_terminal_gets_no_line_and_the_log_does(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "stderr", file := io.StringIO())
    with caplog.at_level(logging.INFO, "niwaki.kernels"):
        function_of("niwaki.kernels.some")(2)
        wait_for(lambda: len(caplog.messages) == 2)
    assert caplog.messages[0].startswith("compiling kernels")
    # Somebody's handler of an earlier test may complain there that its own stream is closed.
    assert not any(line.startswith("niwaki: ") for line in file.getvalue().splitlines())


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("module", ["somebody.elses", None])
def test_functions_of_others_are_not_told_of(module: str | None) -> None:
    assert function_of(module)(2) == 4
    assert not watches()
