"""A process that ends while daemon threads wait for an engine ends at once, and says nothing of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.toy import make_model

ENDS = """
import itertools, sys, threading
import niwaki as nw

@nw.function
def program(s):
    s += "hello" + nw.gen("x", max_tokens=400, ignore_eos=True)

engine = nw.Engine(sys.argv[1], kv_tokens=1024)
if sys.argv[2] == "default":
    nw.set_default_backend(engine)
many = threading.Event()
rounds = itertools.count()

def work():
    while True:
        if next(rounds) == 12:
            many.set()
        match sys.argv[2]:
            case "engine":
                engine.generate("hello", {"max_new_tokens": 400, "ignore_eos": True})
            case _:
                program.run(backend=engine)["x"]

for _ in range(4):
    threading.Thread(target=work, daemon=True).start()
many.wait()
print("done")
"""


@pytest.mark.parametrize("way", ["engine", "program", "default"])
def test_daemon_threads_that_wait_for_an_engine_go_without_a_word_when_the_process_ends(
    tmp_path: Path, way: str
) -> None:
    make_model(tmp_path / "model")
    command = [sys.executable, "-c", ENDS, str(tmp_path / "model"), way]
    told = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (told.stdout, told.returncode) == ("done\n", 0)
    assert "Traceback" not in told.stderr, told.stderr
