"""What another process compiles beside the first start is what the first start needs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from niwaki.kernels import first_start

ROOT = Path(__file__).parents[2]
STEPS = """
from niwaki.kernels.first_start import kernels
from niwaki.runtime.engine import Engine

with Engine(kv_tokens=4096) as engine:
    prompts = ["The cat sat on the mat. " * 10 + name for name in ("Anna", "Ben", "Carl")]
    params = {"max_new_tokens": 64, "temperature": 0.5}
    engine.generate(prompts, params)
    engine.generate(prompts[0], params)  # one alone may guess
print(*(kernel.__name__ for kernel, signature in kernels() if kernel.signatures != [signature]))
"""


def test_what_is_compiled_ahead_is_what_the_first_steps_call(tmp_path: Path) -> None:
    """With nothing on the disk, so that all that steps call is known in their process."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", STEPS], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


def test_a_process_on_one_core_starts_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_start, "_begun", [])
    monkeypatch.setattr(first_start, "_is_first_start", lambda folder: True)
    monkeypatch.setattr(first_start, "num_cores", lambda: 1)
    first_start.begin_beside()
    assert not first_start._begun


@pytest.mark.parametrize("executable", [None, "", "/opt/app/server"])
def test_what_is_no_interpreter_is_not_started(monkeypatch: pytest.MonkeyPatch, executable: str | None) -> None:
    """A frozen application would start itself, which would start itself."""
    monkeypatch.setattr(first_start, "_begun", [])
    monkeypatch.setattr(first_start, "_is_first_start", lambda folder: True)
    monkeypatch.setattr(first_start, "num_cores", lambda: 2)
    monkeypatch.setattr(sys, "executable", executable)
    first_start.begin_beside()
    assert not first_start._begun


def test_of_engines_that_start_at_once_one_has_the_other_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As long as it runs; each would compile the same beside the others, on the same cores."""
    started: list[subprocess.Popen[bytes]] = []

    def start(command: list[str], *, pass_fds: list[int], **how: object) -> subprocess.Popen[bytes]:
        started.append(popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=pass_fds))
        return started[-1]

    def begin() -> int:
        monkeypatch.setattr(first_start, "_begun", [])  # as in a process of its own
        first_start.begin_beside()
        return len(started)

    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(first_start, "_folder", lambda: tmp_path)
    monkeypatch.setattr(first_start, "num_cores", lambda: 2)
    assert [begin(), begin(), begin()] == [1, 1, 1]
    started[0].communicate(b"\n")
    assert begin() == 2
    started[1].communicate(b"\n")
