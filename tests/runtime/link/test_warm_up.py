"""What is compiled or read from a disk at its first use is there when an engine is warm."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]

# In a process of its own: in this one other tests have used the kernels. Signatures are there once they were called.
CODE = """
import gc
from numba.core.dispatcher import Dispatcher
from niwaki.runtime.engine import Engine
from niwaki.runtime.link.engine_host import warm_up

def known():
    return {
        (each.py_func.__name__, str(signature))
        for each in gc.get_objects()
        if isinstance(each, Dispatcher) and (each.py_func.__module__ or "").startswith("niwaki.")
        for signature in each.signatures
    }

engine = Engine()
warm_up(engine)
before = known()
assert before
for temperature in (0.0, 1.0):
    params = [{"max_new_tokens": count, "temperature": temperature, "ignore_eos": True} for count in (4, 12, 20)]
    engine.generate(["Once upon", "Once more", "The"], params)  # one after the other leaves the steady batch
    engine.generate("Once upon", params[1])
    engine.generate("Once upon", params[1], return_logprob=True, top_logprobs_num=3)
print(*sorted(known() - before), sep=chr(10))
engine.shutdown()
"""


def test_nothing_is_compiled_for_texts_that_come_when_an_engine_is_warm() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CODE],
        cwd=ROOT, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == ""
