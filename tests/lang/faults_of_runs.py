"""Rows of the table in docs/errors.md: faults that a run meets, in its body or from its backend."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import cast

import pydantic

import niwaki as nw
from niwaki.lang.state import State
from niwaki.runtime.api import Message
from tests.lang.dying_server import dying_server, nobody
from tests.lang.fault import BODY, CALL, READ, ROW, Rows, gen_x, read_x, run, slow
from tests.lang.passing_time import passing_time

ROWS = Rows()
fault, at_once = ROWS.fault, ROWS.at_once

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
