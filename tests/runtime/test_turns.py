"""Processes that compile offer their processor to whoever waits, wherever they are."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from niwaki.runtime.api import Grammar, Regex
from niwaki.runtime.constraints.process import LENGTH, CompileProcess
from niwaki.runtime.constraints.sources import request_for
from niwaki.runtime.constraints.turns import SCHED_SETATTR, Turns

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in SCHED_SETATTR, reason="nobody takes short turns there"
)

ROOT = str(Path(__file__).parents[2])

# A handler of Python's, in the place of the C library's own, counts.
COUNTED = """
import os, signal
from niwaki.runtime.constraints.turns import OWN, Turns

count = 0

def handle(number, frame):
    global count
    count += 1

OWN.begin()
niceness = os.getpriority(os.PRIO_PROCESS, 0)
with OWN.short():
    total = sum(sum(range(1000)) for _ in range(3000))  # hundreds of turns by the handler that is no Python
signal.signal(signal.SIGVTALRM, handle)
with Turns().short():
    sum(sum(range(1000)) for _ in range(300))
assert count == 0, "who has not begun takes none"
with OWN.short():
    while count < 3:
        pass
inside = count
sum(sum(range(1000)) for _ in range(300))
print(total, niceness, count == inside)
"""

# Where the program of the process takes short turns, and on which threads.
NOTED = """
import sys, threading
from contextlib import contextmanager
from niwaki.runtime.constraints.turns import Turns

@contextmanager
def short(turns):
    sys.stderr.write(threading.current_thread().name + "\\n")
    yield

Turns.short = short
from niwaki.runtime.constraints.compile_worker import main
main()
"""


def run(program: str, *arguments: str, told: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-c", program, *arguments]
    environment = {**os.environ, "PYTHONPATH": ROOT}
    return subprocess.run(command, input=told, capture_output=True, timeout=300, env=environment)


def test_turns_are_offered_again_and_again_inside_and_not_behind() -> None:
    done = run(COUNTED)
    assert done.stdout.split() == [b"1498500000", str(os.getpriority(os.PRIO_PROCESS, 0)).encode(), b"True"], (
        done.stderr[-1000:]
    )


def test_who_has_not_begun_goes_on_as_ever() -> None:
    with Turns().short():
        pass


def test_a_process_that_compiles_offers_its_turns_from_its_start_on() -> None:
    process = CompileProcess(seconds=20)
    process.ask(request_for(Regex("a|ab"), b""))
    status = Path(f"/proc/{process.pid}/status").read_text("ascii")
    process.close()
    caught = int(status.partition("SigCgt:")[2].split()[0], 16)
    assert caught >> 25 & 1, "SIGVTALRM has a handler, which is none of Python's"


def test_all_that_is_asked_is_worked_out_in_short_turns_on_whatever_thread() -> None:
    asked = [request_for(Regex("a|ab"), b""), request_for(Grammar('start: "a" | "b"'), b"a")]
    done = run(NOTED, "20", str(2**31), told=b"".join(LENGTH.pack(len(one)) + one for one in asked))
    assert done.stderr.split() == [b"MainThread", b"MainThread", b"niwaki-grammar"]
