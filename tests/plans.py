"""Random programs: plans that hypothesis draws, and a program that does what a plan says, and decides in between."""

from __future__ import annotations

from typing import Literal, TypeAlias

from hypothesis import strategies as st

import niwaki as nw
from niwaki.lang.state import State

NAMES = ["a", "b", "c"]
Step: TypeAlias = tuple[str, str]


def plans_of(*more: str) -> st.SearchStrategy[list[tuple[str, object]]]:
    """Plans of what every backend does, and of `more`."""
    step = st.one_of(
        st.tuples(st.just("text"), st.sampled_from(["so ", "{x}", "\ue004", "and\n", ""])),
        st.tuples(st.sampled_from(["gen", "write", "decide", "scope", "turn", *more]), st.sampled_from(NAMES)),
    )
    branches = st.lists(st.lists(step, max_size=4), min_size=1, max_size=3)
    fork = st.tuples(st.sampled_from(["fork", "concat"]), branches)
    return st.lists(st.one_of(step, fork), max_size=8)


@nw.function
def follow(s: State, plan: list[tuple[str, object]], decided: list[str]) -> None:
    """Does what the plan says; never reads what is not set."""
    known: set[str] = set()
    for what, arg in plan:
        if what == "text":
            s += str(arg)
        elif what == "gen":
            s += nw.gen(str(arg))
            known.add(str(arg))
        elif what == "select":
            s += "it is " + nw.select(str(arg), choices=["a cat", "a dog", "the mat"])
            known.add(str(arg))
        elif what == "value":
            s += "it is " + nw.gen(str(arg), dtype=Literal["a cat", "a dog", "the mat"])
            known.add(str(arg))
        elif what == "scope":
            with s.var_scope(str(arg)):
                s += "in " + nw.gen("inner")
            known.add(str(arg))
        elif what == "write" and arg in known:
            s += f"<{s[str(arg)]}> " + s[str(arg)]  # type: ignore[operator]  # a text
        elif what == "turn" and arg in known:
            s += nw.user(f"{s[str(arg)]}!") + nw.assistant(nw.gen("turn"))
        elif what == "decide" and arg in known:
            decided.append(str(s[str(arg)]))
            s += "even" if str(s[str(arg)]) < "8" else "odd"
        elif what in ("fork", "concat"):
            assert isinstance(arg, list)
            forks = s.fork(len(arg))
            for branch, steps in zip(forks, arg, strict=True):
                follow_branch(branch, steps, set(known))
            for i, branch in enumerate(forks):
                branch += f"{i} " + nw.gen("each")
                branch += "again: " + branch["each"]  # type: ignore[operator]  # a text
            forks.join("concat" if what == "concat" else "gather_variable")
            if what == "fork" and "each" not in known:
                s += ", ".join(s["each"])  # type: ignore[arg-type]  # a list of texts
                s += s["each"][0]  # type: ignore[index]  # of the same
                for one in s["each"]:  # type: ignore[attr-defined]  # of the same
                    s += f"[{one}]"
                known.add("each")


def follow_branch(s: State, steps: list[Step], known: set[str]) -> None:
    for what, arg in steps:
        if what == "text":
            s += arg
        elif what == "gen":
            s += nw.gen(arg)
            known.add(arg)
        elif what in ("write", "turn", "decide") and arg in known:
            s += f"({s[arg]})"
