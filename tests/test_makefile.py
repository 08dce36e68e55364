"""`make`: every target stands on one environment, which is made once."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")


def planned(folder: Path, target: str) -> str:
    """What make would do, in order."""
    ours = {"MAKEFLAGS", "MAKELEVEL"}  # of a make that runs us
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    command = ["make", "--dry-run", target]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("target", ["setup", "demo", "test", "eval", "lint", "bench"])
def test_a_target_installs_what_is_missing_and_nothing_twice(target: str, tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    before = planned(tmp_path, target)
    assert "-m venv .venv" in before
    assert "-m pip install" in before

    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / ".installed").touch()
    after = planned(tmp_path, target)
    assert "pip" not in after
    assert "venv .venv" not in after
    assert before.endswith(after) or target == "setup", "the environment comes first"

    later = (tmp_path / ".venv" / ".installed").stat().st_mtime + 10
    os.utime(tmp_path / "constraints.txt", (later, later))
    assert planned(tmp_path, target) == before
