"""The rows of the table in docs/errors.md: what the page says of a fault, and the code that makes it happen.

python -m tests.lang.faults    # how long each takes to raise, the slowest first
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import pydantic

import niwaki as nw
from niwaki.lang.backends import Host
from niwaki.lang.state import State
from niwaki.runtime.api import Message
from tests.lang.dying_server import dying_server, nobody
from tests.lang.passing_time import passing_time

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


FAULTS: list[Fault] = []


def fault(what: str, error: type[BaseException], place: str, message: str) -> Callable[[Callable[[], object]], None]:
    def add(act: Callable[[], object]) -> None:
        FAULTS.append(Fault(what, error, place, message, act))

    return add


def at_once(what: str, error: type[BaseException], message: str, act: Callable[[], object]) -> None:
    FAULTS.append(Fault(what, error, WRITTEN, message, act))


def run(body: Callable[[State], object], backend: Host | None = None, **options: object) -> State:
    return nw.function(body).run(backend=backend or nw.ScriptedBackend(lambda prompt: "ok"), **options)


def read_x(body: Callable[[State], object], backend: Host | None = None, **options: object) -> object:
    return run(body, backend, **options)["x"]


def slow() -> nw.ScriptedBackend:
    return nw.ScriptedBackend(lambda prompt: "word " * 1000, threads=1, delay=0.1)


def gen_x(s: State) -> None:
    s += "Go: " + nw.gen("x", max_tokens=100_000)


# -- nodes ------------------------------------------------------------------------------------------------------------

at_once("a regex that is malformed", nw.ConstraintError, r"regex '\(a' is not valid at 1", lambda: nw.gen(regex="(a"))
at_once(
    "a `stop_regex` that is malformed",
    nw.ConstraintError,
    r"stop_regex '\(a' is not valid at 1",
    lambda: nw.gen(stop_regex="(a"),
)
at_once(
    "a regex that is no string", nw.ConstraintError, "must be a string, got 5", lambda: nw.gen(regex=cast("str", 5))
)
at_once(
    "two constraints on one gen", nw.ProgramError, "got dtype and regex; keep one", lambda: nw.gen(regex="a", dtype=int)
)
at_once("a type that cannot be enforced", nw.ConstraintError, "object cannot be enforced", lambda: nw.gen(dtype=object))
at_once("n with choices", nw.ProgramError, "takes no n; leave it out", lambda: nw.gen(choices=["a"], n=2))
at_once("a select without choices", nw.ProgramError, "list of choices, got None", lambda: nw.select("x"))
at_once("an empty choice", nw.ProgramError, "non-empty strings, got ''", lambda: nw.select(choices=["a", ""]))
at_once("a choice given twice", nw.ProgramError, "choice 'a' is given twice", lambda: nw.select(choices=["a", "a"]))
at_once(
    "a select that is to sample",
    nw.ProgramError,
    "must be 0, got 0.5",
    lambda: nw.select(choices=["a"], temperature=0.5),
)
at_once(
    "an unknown method of choosing",
    nw.ProgramError,
    "got 'best'",
    lambda: nw.select(choices=["a"], choices_method="best"),
)
at_once("a method without choices", nw.ProgramError, "needs choices", lambda: nw.gen(choices_method="exact"))
at_once("an option out of its bounds", nw.RequestError, "temperature .* got -1", lambda: nw.gen(temperature=-1))
at_once(
    "a budget given under both names", nw.ProgramError, "give one of them", lambda: nw.gen("x", 2, max_new_tokens=2)
)
at_once("an empty stop string", nw.RequestError, "non-empty strings, got ''", lambda: nw.gen(stop=""))
at_once("too many samples", nw.RequestError, "from 1 to 16, got 17", lambda: nw.gen(n=17))
at_once("a time-out that is no time", nw.ProgramError, "seconds of at least 0, got -1", lambda: nw.gen(timeout=-1))
at_once("a variable without a name", nw.ProgramError, "non-empty string, got ''", lambda: nw.gen(""))
at_once("a node in an f-string", nw.ProgramError, "write s \\+= 'text' \\+ gen", lambda: f"{nw.gen('x')}")
at_once("a turn inside a turn", nw.ProgramError, "they do not nest", lambda: nw.user("a" + nw.assistant("b")))
at_once("a program without a state", nw.ProgramError, r"def f\(s, \.\.\.\)", lambda: nw.function(_no_state))
at_once(
    "a default backend that is none",
    nw.ConfigError,
    "5 is no backend",
    lambda: nw.set_default_backend(cast("nw.ScriptedBackend", 5)),
)


at_once(
    "a schema that is no JSON",
    nw.ConstraintError,
    "json_schema is not valid JSON: .* column 2",
    lambda: nw.gen(json_schema="{"),
)


class Blob(pydantic.BaseModel):
    title: str
    content: Callable[[], int]


at_once(
    "a field that cannot be enforced", nw.ConstraintError, "dtype Blob, field 'content'", lambda: nw.gen(dtype=Blob)
)


def _no_state() -> None: ...


_no_state.__name__ = "f"

# -- states -----------------------------------------------------------------------------------------------------------


@fault("something else than text and nodes is appended", nw.ProgramError, BODY, r"got 5; write str\(\.\.\.\) around it")
def _() -> object:
    def body(s: State) -> None:
        s += cast("str", 5)

    return run(body)


@fault("a turn is begun while one is open", nw.ProgramError, BODY, "assistant turn begins inside a user turn")
def _() -> object:
    def body(s: State) -> None:
        with s.user(), s.assistant():
            pass

    return run(body)


@fault("a turn is ended that is not open", nw.ProgramError, BODY, "no turn is open")
def _() -> object:
    def body(s: State) -> None:
        s += nw.user_end()

    return run(body)


@fault("a variable is read that nothing sets", nw.UnknownVariable, BODY, "no variable 'y'; it has: 'x'")
def _() -> object:
    def body(s: State) -> object:
        s += nw.gen("x")
        return s["y"]

    return run(body)


@fault(
    "a variable is read before the gen that sets it is appended",
    nw.UnknownVariable,
    BODY,
    r"no variable 'x'; it has: none; append what sets it before: s \+= gen\('x'\)",
)
def _() -> object:
    def body(s: State) -> None:
        value = s["x"]
        s += str(value) + nw.gen("x")

    return run(body)


@fault("the making of a variable is asked for that was set by hand", nw.UnknownVariable, BODY, "'x' was not generated")
def _() -> object:
    def body(s: State) -> None:
        s["x"] = 1
        s.get_meta_info("x")

    return run(body)


@fault("a state is iterated over", TypeError, BODY, r"use text_iter\(\)")
def _() -> object:
    return run(lambda s: list(cast("list[object]", s)))


@fault("a gen is returned, not appended", nw.ProgramError, BODY, "returns a gen that nothing has appended")
def _() -> object:
    return run(lambda s: nw.gen("x"))


@fault("no fork is asked for", nw.ProgramError, BODY, "from 1 to 10000, got 0")
def _() -> object:
    return run(lambda s: s.fork(0))


@fault(
    "a list of another length is spread over forks", nw.ProgramError, BODY, "a list of 1 items cannot be spread over 2"
)
def _() -> object:
    def body(s: State) -> None:
        forks = s.fork(2)
        forks += ["a"]

    return run(body)


@fault("forks are joined twice", nw.ProgramError, BODY, "joined already; fork again")
def _() -> object:
    def body(s: State) -> None:
        forks = s.fork(2)
        forks.join()
        forks.join()

    return run(body)


@fault("forks are joined in an unknown way", nw.ProgramError, BODY, "got 'zip'")
def _() -> object:
    return run(lambda s: s.fork(2).join("zip"))


@fault("the texts of forks with chat turns are joined", nw.ProgramError, READ, r"gather their variables with join\(\)")
def _() -> object:
    def body(s: State) -> None:
        forks = s.fork(2)
        forks += nw.user("hi")
        forks.join("concat")

    return run(body).text()


@fault("a function given to forks raises", ZeroDivisionError, BODY, "modulo by zero")
def _() -> object:
    def body(s: State) -> None:
        forks = s.fork(2)
        forks += lambda i: str(1 // (i - 1))

    return run(body)


# -- runs -------------------------------------------------------------------------------------------------------------


@fault("the body raises", ValueError, BODY, "^no$")
def _() -> object:
    def body(s: State) -> None:
        raise ValueError("no")

    return run(body)


@fault("an argument does not fit the program", nw.ProgramError, CALL, "missing a required argument: 'text'")
def _() -> object:
    return nw.function(lambda s, text: None).run(backend=nw.ScriptedBackend())  # type: ignore[call-arg]


@fault("an option that neither program nor run has", nw.ProgramError, CALL, "no parameter 'temprature'.*'temperature'")
def _() -> object:
    return run(gen_x, temprature=0)


@fault("a run's option is out of its bounds", nw.RequestError, CALL, "top_p must be a number from 0.0 to 1.0, got 2")
def _() -> object:
    return run(gen_x, top_p=2)


@fault("options exclude each other only in the run", nw.RequestError, READ, "min_tokens 50 is above max_new_tokens 4")
def _() -> object:
    def body(s: State) -> None:
        s += nw.gen("x", min_tokens=50)

    return read_x(body, max_new_tokens=4)


@fault("an async program is run where an event loop runs", nw.ProgramError, CALL, r"write await f\.arun\(\.\.\.\)")
def _() -> object:
    @nw.function
    async def f(s: State) -> None: ...

    async def main() -> None:
        f.run(backend=nw.ScriptedBackend())

    return asyncio.run(main())


@fault("an async program waits without await", nw.ProgramError, BODY, r'write await s\.get\("x"\)')
def _() -> object:
    @nw.function
    async def f(s: State) -> object:
        s += nw.gen("x", max_tokens=100_000)
        return s["x"]

    return f.run(backend=slow())


@fault("a row of a batch does not fit", nw.ProgramError, ROW, "got 5")
def _() -> object:
    (result,) = nw.function(gen_x).run_batch(cast("list[tuple[object]]", [5]), backend=nw.ScriptedBackend())
    assert isinstance(result, Exception)
    raise result


@fault("a batch on no thread", nw.ConfigError, CALL, "at least 1, got 0")
def _() -> object:
    return nw.function(gen_x).run_batch([], num_threads=0, backend=nw.ScriptedBackend())


# -- what the backend brings ------------------------------------------------------------------------------------------


@fault("a generation fails", nw.GenerationError, READ, "on fire")
def _() -> object:
    return read_x(gen_x, nw.ScriptedBackend([nw.GenerationError("on fire")]))


@fault("a generation fails in a fork, and the fork is joined", nw.GenerationError, READ, "on fire")
def _() -> object:
    def body(s: State) -> None:
        forks = s.fork(2)
        forks += nw.gen("x")
        forks.join()

    return read_x(body, nw.ScriptedBackend(["ok", nw.GenerationError("on fire")]))


@fault("a failed state is forked", nw.GenerationError, READ, "on fire")
def _() -> object:
    def body(s: State) -> object:
        s += nw.gen("x")
        return s.fork(2)[1]

    state = run(body, nw.ScriptedBackend([nw.GenerationError("on fire")]))
    return cast("State", state._executor.error()) and state.fork(1)[0].text()


@fault("a generation fails in a program inside another", nw.GenerationError, READ, "on fire")
def _() -> object:
    inner = nw.function(gen_x)

    def body(s: State) -> None:
        s["x"] = inner.run()["x"]

    return read_x(body, nw.ScriptedBackend([nw.GenerationError("on fire")]))


@fault("a value is cut short by its budget", nw.GenerationError, READ, "used up its 2 tokens .* larger max_tokens")
def _() -> object:
    def body(s: State) -> None:
        s += nw.gen("x", dtype=list[int], max_tokens=2)

    return read_x(body, nw.ScriptedBackend(["[1,2,3]"]))


class Even(pydantic.BaseModel):
    number: int

    @pydantic.field_validator("number")
    @classmethod
    def is_even(cls, value: int) -> int:
        if value % 2:
            raise ValueError(f"{value} is odd")
        return value


@fault("a validator of yours refuses the value", nw.GenerationError, READ, "which Even refuses: .*3 is odd")
def _() -> object:
    def body(s: State) -> None:
        s += nw.gen("x", dtype=Even)

    return read_x(body, nw.ScriptedBackend(['{"number":3}']))


@fault("a scripted answer breaks the constraint", nw.ConstraintError, READ, "'b' does not match the regex 'a'")
def _() -> object:
    def body(s: State) -> None:
        s += nw.gen("x", regex="a")

    return read_x(body, nw.ScriptedBackend(["b"]))


@fault(
    "the script has no answer", nw.GenerationError, READ, "no answer to a prompt that ends with 'Go: '; it knows: 'a'"
)
def _() -> object:
    return read_x(gen_x, nw.ScriptedBackend({"a": "b"}))


@fault("the backend was shut down before the run", nw.EngineStopped, READ, "was shut down")
def _() -> object:
    backend = nw.ScriptedBackend(["a"])
    backend.shutdown()
    return read_x(gen_x, backend)


@fault("no server answers at the address", nw.EngineStopped, READ, "cannot be reached: ConnectionRefusedError")
def _() -> object:
    with nobody() as url, nw.RuntimeEndpoint(url) as server:
        return read_x(gen_x, server)


@fault(
    "the server dies in the middle of an answer",
    nw.EngineStopped,
    READ,
    "closed the connection before the generation ended",
)
def _() -> object:
    with dying_server() as url, nw.RuntimeEndpoint(url) as server:
        return read_x(gen_x, server)


@fault("a run takes longer than its timeout", nw.TimedOut, READ, "within its timeout, of 60 s")
def _() -> object:
    with passing_time() as later:
        state = run(gen_x, slow(), timeout=60)
        later(60)
        return state["x"]


@fault("a gen takes longer than its timeout", nw.TimedOut, READ, "gen 'x' was not done within its timeout of 0.05 s")
def _() -> object:
    def body(s: State) -> None:
        s += nw.gen("x", max_tokens=100_000, timeout=0.05)

    return read_x(body, slow())


@fault("the run is cancelled", nw.Cancelled, "every read", "was cancelled")
def _() -> object:
    state = run(gen_x, slow())
    state.cancel()
    return state["x"]


class NoTemplate(nw.ScriptedBackend):
    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        raise nw.UnsupportedByBackend("the model has no chat template; write its turns as text")


@fault("chat turns for a model without a chat template", nw.UnsupportedByBackend, READ, "write its turns as text")
def _() -> object:
    def body(s: State) -> None:
        s += nw.user("hi")

    return run(body, NoTemplate()).text()


# -- carried out ------------------------------------------------------------------------------------------------------


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


if __name__ == "__main__":
    for seconds, what in sorted(((outcome_of(row.act).seconds, row.what) for row in FAULTS), reverse=True):
        print(f"{seconds * 1000:7.1f} ms  {what}")
