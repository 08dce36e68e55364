"""A fork of a process that has an engine has none of its threads: every way to one says so, and nobody waits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.toy import make_model

IN_A_FORK = """
import os, sys, warnings
import niwaki as nw
warnings.simplefilter("ignore", DeprecationWarning)  # Python's own warning of this very thing

@nw.function
def program(s):
    s += "hello" + nw.gen("x", max_tokens=2)

@nw.function
def choice(s):
    s += "hello" + nw.select("x", ["a", "b"])

engine = nw.Engine(sys.argv[1], kv_tokens=256)
program.run(backend=engine).sync()
tries = (
    lambda: program.run(backend=engine).sync(),
    lambda: choice.run(backend=engine).sync(),
    lambda: engine.generate("hello"),
    engine.flush_cache,
    lambda: nw.Engine(sys.argv[1], kv_tokens=256),
)
pid = os.fork()
if not pid:
    told = 0
    for attempt in tries:
        try:
            attempt()
        except nw.EngineStopped as error:
            told += "spawn" in str(error)
    engine.shutdown()
    os._exit(told)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), len(tries))
engine.generate("hello", {"max_new_tokens": 1})  # the parent's engine goes on
print("done")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no fork there")
def test_a_fork_of_a_process_with_an_engine_is_told_so_and_never_waits(tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    command = [sys.executable, "-c", IN_A_FORK, str(tmp_path / "model")]
    told = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert told.stdout == "5 5\ndone\n", told.stderr
