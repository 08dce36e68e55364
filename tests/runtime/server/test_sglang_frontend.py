"""SGLang's own frontend, out of its wheel (tests/sglang_wheel.py), runs programs on our server."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from niwaki.runtime.engine import Engine
from tests.sglang_wheel import sglang_wheel

pytest.importorskip("requests")

PARTS = ("sglang/lang/", "sglang/utils.py", "sglang/srt/environ.py")


@pytest.fixture(scope="module")
def frontend(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sglang")
    with zipfile.ZipFile(sglang_wheel()) as wheel:
        wheel.extractall(folder, [name for name in wheel.namelist() if name.startswith(PARTS)])
    return folder


def test_its_programs_run_on_our_server(frontend: Path, url: str, engine: Engine) -> None:
    command = [sys.executable, str(Path(__file__).with_name("sglang_frontend.py")), str(frontend), url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    ours = engine.generate("the cat is ", {"max_new_tokens": 48, "temperature": 0, "ignore_eos": True})
    assert isinstance(ours, dict)
    assert said["text"] == ours["text"]
    # Its iterator leaves out what comes while it hands over a piece, when that was the end.
    assert str(ours["text"]).startswith(said["streamed"])
    assert said["completion_tokens"] == 48
    assert said["model"] == "toy"
    assert int(said["number"]) is not None
    assert len(said["code"]) == 3
    assert set(said["code"]) <= {"a", "b"}
    assert sum(letter in "abcdefghijklmnopqrstuvwxyz" for letter in said["letters"]) <= 1
    assert {said["size"], *said["sizes"], *said["batch"]} <= {"small", "large"}
    assert said["end"].startswith(said["size"])
    assert said["kv_tokens"] == 8192
