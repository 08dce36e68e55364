"""One row of the table in docs/errors.md: what it says of a fault, how it is made to happen, and what came of that."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import niwaki as nw
from niwaki.lang.backends import Host
from niwaki.lang.state import State

PATIENCE = 60.0  # after so many seconds a fault hangs

WRITTEN = "the line that writes it"
CALL = "the call"
READ = "every read, with the line that asked"
BODY = "`run`, and every read"
ROW = "the row's place in the batch"


@dataclass(frozen=True, slots=True)
class Fault:
    what: str
    error: type[BaseException]
    place: str
    message: str  # a regex: it names the value, and what to do
    act: Callable[[], object]


class Rows(list[Fault]):
    """Of the table, in its order."""

    def fault(
        self, what: str, error: type[BaseException], place: str, message: str
    ) -> Callable[[Callable[[], object]], None]:
        def add(act: Callable[[], object]) -> None:
            self.append(Fault(what, error, place, message, act))

        return add

    def at_once(self, what: str, error: type[BaseException], message: str, act: Callable[[], object]) -> None:
        self.append(Fault(what, error, WRITTEN, message, act))


@dataclass(frozen=True, slots=True)
class Outcome:
    error: BaseException | None
    seconds: float


def outcome_of(act: Callable[[], object]) -> Outcome:
    """What it raises. On a thread, so that a hang is seen as one."""
    raised: list[Outcome] = []

    def do() -> None:
        begun = time.perf_counter()
        error = None
        try:
            act()
        except BaseException as found:
            error = found
        raised.append(Outcome(error, time.perf_counter() - begun))

    thread = threading.Thread(target=do, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert raised, f"it hangs for {PATIENCE:g} s"
    return raised[0]


# -- what the rows share ----------------------------------------------------------------------------------------------


def run(body: Callable[[State], object], backend: Host | None = None, **options: object) -> State:
    return nw.function(body).run(backend=backend or nw.ScriptedBackend(lambda prompt: "ok"), **options)


def read_x(body: Callable[[State], object], backend: Host | None = None, **options: object) -> object:
    return run(body, backend, **options)["x"]


def slow() -> nw.ScriptedBackend:
    return nw.ScriptedBackend(lambda prompt: "word " * 1000, threads=1, delay=0.1)


def gen_x(s: State) -> None:
    s += "Go: " + nw.gen("x", max_tokens=100_000)
