"""Rows of the table in docs/errors.md: faults of what a line writes, in a node or on a state."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pydantic

import niwaki as nw
from niwaki.lang.state import State
from tests.lang.fault import BODY, READ, Rows, run

ROWS = Rows()
fault, at_once = ROWS.fault, ROWS.at_once

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
