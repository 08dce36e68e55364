"""A GPU's machine may lack msgspec: its checks then run with the stand-in, which knows every option of a struct."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="the GPU kernels need the package triton")

WITHOUT_MSGSPEC = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "msgspec":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Absent())
import tests.benchmarks.gpu_lines
import tests.kernels.triton_setup
from niwaki.runtime.api import Delta

assert not hasattr(sys.modules["msgspec"], "__file__")  # the stand-in
assert Delta("a", (1,)) == Delta("a", (1,)) and Delta("a").token_ids == ()
"""


def test_what_a_gpus_checks_import_needs_no_msgspec() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_MSGSPEC], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
