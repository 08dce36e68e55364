"""The program of a process that compiles under limits, see `process.py`: `main`, with the arguments SECONDS BYTES. It
answers requests on its standard input one after the other, and dies by its own timers when one takes too long. Frames,
both ways: 4 bytes length (little-endian), then the body; see `sources.py`."""

from __future__ import annotations

import contextlib
import gc
import json
import select
import signal
import sys
from typing import BinaryIO, Final

from niwaki.runtime.api import JsonSchema
from niwaki.runtime.constraints.process import LENGTH
from niwaki.runtime.constraints.schema.formats import KNOWN_FORMATS
from niwaki.runtime.constraints.sources import answer, request_for

IDLE_SECONDS: Final = 0.05  # that nobody asks for, before what may be asked for later is worked out


def serve(requests: BinaryIO, answers: BinaryIO, seconds: float) -> None:
    """Answer until the input ends. The first frame is empty: ready. What follows is compile time, not start-up time."""
    answers.write(LENGTH.pack(0))
    answers.flush()
    unread = [*({"format": name} for name in sorted(KNOWN_FORMATS)), {"pattern": r"\w"}]
    while True:
        while unread and not select.select([requests], [], [], IDLE_SECONDS)[0]:
            learn(unread.pop())
        head = requests.read(LENGTH.size)
        if len(head) < LENGTH.size:
            return
        request = requests.read(LENGTH.unpack(head)[0])
        # No Python handler can run inside native code; the default action of these signals ends the process even then.
        # Processor time decides, so that a busy machine does not refuse what an idle one compiles; the clock only ends
        # what is left over when the parent died meanwhile.
        signal.setitimer(signal.ITIMER_PROF, seconds)
        signal.setitimer(signal.ITIMER_REAL, 20 * seconds)
        body = answer(request, seconds)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        answers.write(LENGTH.pack(len(body)) + body)
        answers.flush()
        gc.collect(0)  # what this request left; nothing was collected while somebody waited


def learn(asked: dict[str, str]) -> None:
    """What is worked out once for all schemas: the language of a format, which takes up to 16 ms, and what a character
    of a word is, which takes 30."""
    answer(request_for(JsonSchema(json.dumps({"type": "string", **asked})), b"a"), 1.0)
    gc.collect(0)


def limit_memory(num_bytes: int) -> None:
    """Let allocations beyond num_bytes fail, where the system can."""
    with contextlib.suppress(ImportError, ValueError, OSError):  # Windows has none, and macOS takes none this small
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))


def main() -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent; we end when our input does
    limit_memory(int(sys.argv[2]))
    gc.disable()
    serve(sys.stdin.buffer, sys.stdout.buffer, float(sys.argv[1]))
