"""From a pattern to a byte automaton, by outlines-core; also the program of the process that does it under a limit.

Run as a script (`python -P worker.py SECONDS BYTES`) it answers requests on its standard input one after the other,
and dies by its own timers when one takes too long. Imports the standard library and outlines-core only: it starts in
tens of milliseconds and never loads NumPy, torch or niwaki.

Frames, both ways: 4 bytes length (little-endian), then the body. A request is a pattern in UTF-8. An answer is one
status byte (OK or REFUSED) and `Transitions.to_bytes()`, or the reason in UTF-8.
"""

from __future__ import annotations

import signal
import struct
import sys
from array import array
from dataclasses import dataclass
from typing import BinaryIO

from outlines_core import Index  # type: ignore[import-untyped]  # ships no types
from outlines_core import Vocabulary as OutlinesVocabulary

OK, REFUSED = b"\x00", b"\x01"
LENGTH = struct.Struct("<I")
HEADER = struct.Struct("<II")

# Two noncharacters that no pattern matches (see pattern.py) stand before and after the text. END: `text` matches P
# exactly when what follows BEGIN takes `text + END`; reading acceptance from this transition is exact where
# outlines-core's own final states are not. BEGIN: outlines-core also builds the states of a search that may start
# anywhere, at every byte anew, which for [a-z][a-z0-9]{0,30} are 2**30; with BEGIN a search can start only once.
BEGIN, END = "\U0010fffe", "\U0010ffff"
END_ID = 256
_TOKENS: dict[str | bytes, list[int]] = {bytes([byte]): [byte] for byte in range(256)}
_TOKENS[END.encode()] = [END_ID]
BYTES_VOCABULARY = OutlinesVocabulary(END_ID + 1, _TOKENS)


@dataclass(frozen=True, slots=True)
class Transitions:
    """A deterministic automaton over bytes as a list of edges. State 0 is the start."""

    accepting: bytes  # one byte a state: 1 where the text may end
    sources: array[int]  # "i"
    labels: bytes
    targets: array[int]  # "i"

    def to_bytes(self) -> bytes:
        parts = (HEADER.pack(len(self.accepting), len(self.labels)), self.accepting, self.labels)
        return b"".join((*parts, self.sources.tobytes(), self.targets.tobytes()))

    @classmethod
    def from_bytes(cls, body: bytes) -> Transitions:
        num_states, num_edges = HEADER.unpack_from(body)
        accepting_at = HEADER.size
        labels_at = accepting_at + num_states
        sources_at = labels_at + num_edges
        targets_at = sources_at + 4 * num_edges
        if len(body) != targets_at + 4 * num_edges:
            raise ValueError(f"an answer of {len(body)} bytes cannot hold {num_states} states, {num_edges} edges")
        return cls(
            accepting=body[accepting_at:labels_at],
            labels=body[labels_at:sources_at],
            sources=array("i", body[sources_at:targets_at]),
            targets=array("i", body[targets_at:]),
        )


def transitions_of(pattern: str) -> Transitions:
    """The byte automaton of a pattern in the Rust regex dialect. May take for ever: see `pattern.cost`.

    Raises:
        ValueError: outlines-core refuses the pattern.
    """
    index = Index(f"{BEGIN}(?:{pattern}){END}", BYTES_VOCABULARY)
    final = set(index.get_final_states())
    edges = index.get_transitions()
    start = index.get_initial_state()
    for byte in BEGIN.encode():
        start = edges[start][byte]
    number: dict[int, int] = {start: 0}
    order = list(number)
    accepting = bytearray()
    sources, labels, targets = array("i"), bytearray(), array("i")
    for state in order:  # grows while we walk: states are numbered as they are met
        row = edges.get(state, {})
        source = number[state]
        accepting.append(row.get(END_ID) in final)
        for token, target in row.items():
            if token >= END_ID:
                continue
            known = number.get(target)
            if known is None:
                known = number[target] = len(order)
                order.append(target)
            sources.append(source)
            labels.append(token)
            targets.append(known)
    return Transitions(bytes(accepting), sources, bytes(labels), targets)


def serve(requests: BinaryIO, answers: BinaryIO, seconds: float) -> None:
    """Answer until the input ends."""
    answers.write(LENGTH.pack(1) + OK)  # ready: what follows is compile time, not start-up time
    answers.flush()
    while len(head := requests.read(LENGTH.size)) == LENGTH.size:
        pattern = requests.read(LENGTH.unpack(head)[0]).decode()
        # No Python handler can run while outlines-core computes; the default action of these signals ends the process
        # even then. Processor time decides, so that a busy machine does not refuse what an idle one compiles; the
        # clock only ends what is left over when the parent died meanwhile.
        signal.setitimer(signal.ITIMER_PROF, seconds)
        signal.setitimer(signal.ITIMER_REAL, 20 * seconds)
        try:
            body = OK + transitions_of(pattern).to_bytes()
        except (ValueError, MemoryError) as error:
            body = REFUSED + str(error).encode()
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        answers.write(LENGTH.pack(len(body)) + body)
        answers.flush()


def limit_memory(num_bytes: int) -> None:
    """Let allocations beyond num_bytes fail, where the system can."""
    try:
        import resource  # not on every platform
    except ImportError:
        return
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes, num_bytes))


if __name__ == "__main__":
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent; we end when our input does
    limit_memory(int(sys.argv[2]))
    serve(sys.stdin.buffer, sys.stdout.buffer, float(sys.argv[1]))
