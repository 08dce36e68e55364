"""`import niwaki` is cheap: it loads no torch, and neither does the language."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HEAVY = ("torch", "numba", "llvmlite", "transformers", "tokenizers", "numpy", "pydantic", "jinja2", "tqdm")
LIMIT_SECONDS = 0.3


def modules_after(statement: str) -> set[str]:
    report = f"import sys, json\n{statement}\nprint(json.dumps(sorted(sys.modules)))"
    answer = subprocess.run([sys.executable, "-c", report], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(json.loads(answer.stdout))


def test_importing_niwaki_loads_nothing_heavy() -> None:
    assert not modules_after("import niwaki") & set(HEAVY)


def test_a_program_on_a_scripted_backend_does_not_load_torch() -> None:
    program = (
        "import niwaki as nw\n"
        "@nw.function\n"
        "def p(s, q):\n"
        "    s += nw.system('x') + nw.user(q)\n"
        "    s += nw.assistant(nw.gen('a', dtype=int) + nw.select('b', choices=['x', 'y']))\n"
        "p.run(q='?', backend=nw.ScriptedBackend(['1', 'x']))['b']\n"
    )
    assert not modules_after(program) & {"torch", "numba", "llvmlite", "transformers", "tokenizers"}


@pytest.mark.parametrize(
    "module",
    ["niwaki.lang.batch", "niwaki.lang.records", "niwaki.runtime.api", "niwaki.runtime.checkpoint.stored"],
)
def test_the_language_the_seam_and_what_looks_into_folders_load_without_torch(module: str) -> None:
    assert "torch" not in modules_after(f"import {module}")


def test_importing_niwaki_takes_less_than_its_limit() -> None:
    """Processor time of the import itself, so that a busy machine does not fail it; median of five."""
    measure = "import time; t = time.process_time(); import niwaki; print(time.process_time() - t)"
    seconds = [
        float(
            subprocess.run(
                [sys.executable, "-c", measure],
                cwd=ROOT,
                env={**os.environ},
                capture_output=True,
                text=True,
                check=True,
            ).stdout
        )
        for _ in range(5)
    ]
    assert statistics.median(seconds) < LIMIT_SECONDS
