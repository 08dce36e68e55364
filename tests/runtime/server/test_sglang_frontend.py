"""SGLang's own frontend, out of its wheel, runs programs on our server.

The wheel is never a part of this repository: NIWAKI_SGLANG_WHEEL names it, or NIWAKI_DOWNLOADS=1 lets pip fetch it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from niwaki.runtime.engine import Engine

pytest.importorskip("requests")

WHEEL = "sglang==0.5.23"
PARTS = ("sglang/lang/", "sglang/utils.py", "sglang/srt/environ.py")


@pytest.fixture(scope="module")
def frontend(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sglang")
    fetched = next(Path("build/wheels").glob("sglang-*.whl"), None)  # by the test of its programs
    named = os.environ.get("NIWAKI_SGLANG_WHEEL") or fetched
    if named is None:
        if os.environ.get("NIWAKI_DOWNLOADS") != "1":
            pytest.skip("NIWAKI_DOWNLOADS=1 lets this test fetch SGLang's wheel")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), WHEEL]
        if subprocess.run(command, capture_output=True).returncode:
            pytest.skip(f"{WHEEL} cannot be fetched here")
    path = Path(named) if named is not None else next(folder.glob("*.whl"))
    with zipfile.ZipFile(path) as wheel:
        wheel.extractall(folder, [name for name in wheel.namelist() if name.startswith(PARTS)])
    return folder


def test_its_programs_run_on_our_server(frontend: Path, url: str, engine: Engine) -> None:
    command = [sys.executable, str(Path(__file__).with_name("sglang_frontend.py")), str(frontend), url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    ours = engine.generate("the cat is ", {"max_new_tokens": 48, "temperature": 0, "ignore_eos": True})
    assert isinstance(ours, dict)
    assert said["text"] == said["streamed"] == ours["text"]
    assert said["completion_tokens"] == 48
    assert said["num_pieces"] > 1
    assert said["model"] == "toy"
    assert int(said["number"]) is not None
    assert len(said["code"]) == 3
    assert set(said["code"]) <= {"a", "b"}
    assert {said["size"], *said["batch"]} <= {"small", "large"}
    assert said["end"].startswith(said["size"])
    assert said["kv_tokens"] == 8192
