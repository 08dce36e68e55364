"""A fork of a process that ran programs runs programs of its own: its threads and connections are not its parent's."""

from __future__ import annotations

import http.server
import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no fork there")

PROGRAMS = """
import os, sys, threading
import niwaki as nw

class Watched(nw.ScriptedBackend):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.closed = threading.Event()

    def close(self, branch):
        super().close(branch)
        self.closed.set()

@nw.function
def f(s, timeout=None):
    s += "go " + nw.gen("x", timeout=timeout)

parents = Watched(lambda prompt: "word " * 20, threads=1, delay=0.01)
kept = f.run(backend=parents, timeout=600)  # its clock, its closer and what waits for them are the parent's
kept.sync()
f.run(600.0, backend=Watched(["ok"])).sync()
pid = os.fork()
if not pid:
    own = Watched(lambda prompt: "ok")
    f.run(backend=own).sync()
    print("closed", own.closed.wait(60))
    slow = nw.ScriptedBackend(lambda prompt: "word " * 100_000, threads=1, delay=0.01)
    print("ended", type(f.run(0.05, backend=slow).error()).__name__)
    del kept
    mine = Watched(["ok"])
    f.run(backend=mine).sync()
    mine.closed.wait(60)  # one thread closes all, in turn
    print("the parent's", parents.closed.is_set(), flush=True)
    os._exit(0)
os.waitpid(pid, 0)
"""

SCRIPTED = """
import os, threading
import niwaki as nw

@nw.function
def f(s):
    s += "go " + nw.gen("x")

backend = nw.ScriptedBackend(["word"] * 3, threads=2)
print(f.run(backend=backend)["x"], flush=True)
held, forked = threading.Event(), threading.Event()

def hold():
    with backend._lock, backend._script._lock:
        held.set()
        forked.wait()

threading.Thread(target=hold).start()  # it is not there in the fork
held.wait()
pid = os.fork()
forked.set()
if not pid:
    print(f.run(backend=backend, timeout=60)["x"], flush=True)
    os._exit(0)
os.waitpid(pid, 0)
print(f.run(backend=backend)["x"])
"""

CONNECTIONS = """
import os, sys
import niwaki as nw

endpoint = nw.RuntimeEndpoint(sys.argv[1])
first = endpoint.get_server_info()["port"]
pid = os.fork()
if not pid:
    print(endpoint.get_server_info()["port"] != first, flush=True)
    os._exit(0)
os.waitpid(pid, 0)
print(endpoint.get_server_info()["port"] == first)
"""

CLIENTS = """
import os, sys
import niwaki as nw

backend = nw.OpenAI("m", base_url=sys.argv[1] + "/v1", api_key="k")

@nw.function
def f(s):
    s += nw.user("From where?") + nw.assistant(nw.gen("port"))

first = f.run(backend=backend)["port"]
pid = os.fork()
if not pid:
    state = f.run(backend=backend, timeout=60)
    print(state.error() is None and state["port"] != first, flush=True)
    os._exit(0)
os.waitpid(pid, 0)
print(f.run(backend=backend).error() is None)
"""

READY = """
import os, time
from niwaki.runtime.api.readiness import readiness

with readiness:
    time.sleep(0.01)
readiness.begin()  # on a thread that is not there in the fork
time.sleep(0.01)
before = readiness.seconds()
pid = os.fork()
if not pid:
    stands = readiness.seconds()
    print(stands >= before and readiness.seconds() == stands, flush=True)
    os._exit(0)
os.waitpid(pid, 0)
"""


def told_by(code: str, *words: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *words],
        cwd=ROOT, capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_in_a_fork_branches_are_closed_and_time_outs_kept_and_what_is_the_parents_stays() -> None:
    assert told_by(PROGRAMS) == ["closed True", "ended TimedOut", "the parent's False"]


def test_what_made_a_process_ready_stays_counted_in_its_fork_and_nothing_runs_on_there() -> None:
    assert told_by(READY) == ["True"]


def test_a_scripted_backend_answers_in_a_fork_by_threads_of_its_own() -> None:
    assert told_by(SCRIPTED) == ["word"] * 3


class Answers(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        content = json.dumps({"port": self.client_address[1]}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        choice = {"index": 0, "finish_reason": "stop", "delta": {"content": str(self.client_address[1])}}
        content = f"data: {json.dumps({'id': 'x', 'model': 'm', 'choices': [choice]})}\n\ndata: [DONE]\n\n".encode()
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Not on stderr."""


@pytest.mark.parametrize("code", [CONNECTIONS, CLIENTS])
def test_a_fork_asks_a_server_on_connections_of_its_own(code: str) -> None:
    if code is CLIENTS:
        pytest.importorskip("openai")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            assert told_by(code, f"http://127.0.0.1:{server.server_address[1]}") == ["True", "True"]
        finally:
            server.shutdown()
            thread.join()
