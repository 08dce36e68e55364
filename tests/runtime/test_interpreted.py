"""On a machine with a GPU the kernels of tests run there. What stands in for CUDA graphs wants Triton's interpreter,
which a process has from its start or not at all: those tests get one of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the GPU kernels need the package triton")

from niwaki.kernels.triton.launch import is_interpreted


@pytest.mark.skipif(is_interpreted(), reason="they run in this process")
@pytest.mark.parametrize("name", ["test_graphs.py", "test_pieces.py"])
def test_what_stands_in_for_cuda_graphs_does_what_they_do(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__).parent / name)],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-3000:]
