"""What macOS and Windows lack is taken away, in processes of their own, and what is left runs.

It does not show that niwaki works there: nobody has tried.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = str(Path(__file__).parent.parent)

# In every process that is started, before anything else. Each of these is asked for by name here or in a library.
WITHOUT_LINUX = """
import os, resource

for name in ("eventfd", "eventfd_read", "memfd_create", "sched_getaffinity", "sched_setaffinity", "pidfd_open"):
    if hasattr(os, name):
        delattr(os, name)

def refuse(kind, limits):
    raise ValueError("current limit exceeds maximum limit")  # as macOS says of an address space that is this small

resource.setrlimit = refuse
"""

ON_MACOS = """
import sys, sysconfig, types, zoneinfo
import torch
import niwaki.runtime.engine  # libraries choose their parts for this system, and our modules come again for the other

sysconfig.get_config_vars()
for name in [name for name in sys.modules if name.partition(".")[0] == "niwaki"]:
    del sys.modules[name]
torch.ops.mkldnn = types.SimpleNamespace()  # the builds for macOS have no oneDNN
torch.cpu._is_amx_tile_supported = lambda: False
sys.platform = "darwin"

from examples.extract import extract
import niwaki as nw

with nw.Engine(kv_tokens=1024) as engine:
    state = extract.run(text="Hi, I'm Lena Fischer, a nurse from Dresden.", backend=engine.backend)
    print(state["contact"].name)
    schema = '{"allOf": [{"enum": [12, "a"]}, {"type": "integer"}]}'  # the process that compiles is asked
    print(engine.generate("a", {"json_schema": schema, "max_new_tokens": 4})["text"])
"""

# A second time, by modules that find another system. The libraries stay as they are.
ON_WINDOWS = """
import ctypes, os, signal, socket, sys
import niwaki.__main__, niwaki.lang.openai_backend, niwaki.lang.remote, niwaki.lang.scripted, niwaki.run_command
from niwaki.lang.decorator import function
{loaded}

for name in [name for name in sys.modules if name.partition(".")[0] == "niwaki"]:
    del sys.modules[name]
for name in ("fcntl", "grp", "pwd", "resource", "termios"):
    sys.modules[name] = None
for name in (
    "O_CLOEXEC", "eventfd", "fork", "getpriority", "getuid", "killpg", "memfd_create", "nice", "register_at_fork",
    "sched_getaffinity", "sched_setaffinity", "setpriority", "setsid",
):
    delattr(os, name)
for name in ("SIGALRM", "SIGPROF", "setitimer", "ITIMER_PROF", "ITIMER_REAL"):
    delattr(signal, name)
for name in ("AF_UNIX", "MSG_DONTWAIT"):
    delattr(socket, name)
ctypes.CDLL = None
sys.platform = "win32"

import niwaki as nw

"""

PROGRAM = """
from pathlib import Path

@nw.function
def shout(s, word: str):
    s += word + nw.gen("end", regex="!+")

state = shout.run(word="hey", backend=nw.ScriptedBackend(["!!"]))
print(state["end"], [s["end"] for s in shout.run_batch([{"word": "a"}] * 2, backend=nw.ScriptedBackend(["!"] * 2))])
nw.RuntimeEndpoint("http://127.0.0.1:9")

from niwaki.lang.batch import Journal, JournalError

try:
    Journal(Path("never.jsonl"), {})
except JournalError as error:
    print(error)
"""

ENGINE = """
try:
    nw.Engine()
except nw.ConfigError as error:
    print(error)

from niwaki.__main__ import main

sys.exit(main(["serve"]))
"""


def run(program: str, *folders: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, folders), ROOT])},
    )


@pytest.mark.skipif(sys.platform != "linux", reason="takes away what Linux has")
def test_an_engine_runs_without_what_linux_alone_has(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_LINUX, "utf-8")
    done = run(ON_MACOS, tmp_path)
    assert done.returncode == 0, done.stderr[-1000:]
    assert done.stdout == "Lena Fischer\n12\n"


@pytest.mark.skipif(sys.platform != "linux", reason="takes away what Linux has")
def test_on_windows_programs_run_and_output_files_are_refused() -> None:
    done = run(ON_WINDOWS.format(loaded="") + PROGRAM)
    assert done.returncode == 0, done.stderr[-1000:]
    said = "never.jsonl: niwaki writes no output files on Windows, where it cannot lock them; use WSL"
    assert done.stdout == f"!! ['!', '!']\n{said}\n"


@pytest.mark.skipif(sys.platform != "linux", reason="takes away what Linux has")
def test_on_windows_an_engine_is_refused_in_one_line() -> None:
    done = run(ON_WINDOWS.format(loaded="import niwaki.runtime.engine") + ENGINE)
    said = "niwaki's engine does not run on Windows; run it in WSL, or let programs ask a service: "
    assert done.stdout.startswith(said), done.stderr[-1000:]
    assert (done.returncode, done.stdout.count("\n")) == (1, 1)
    assert said in done.stderr
