"""What a served program answers is told where its body tells it, and never where a run may answer another thing."""

from __future__ import annotations

import pytest

import niwaki as nw
from niwaki.lang.endpoint import Endpoint
from niwaki.lang.program import Program
from niwaki.lang.state import State


@nw.function
def says(s: State, n: str) -> None:
    asked = f"Is {n} there?"
    asked += " Say " + n
    s += nw.system("You know " + n) + nw.user(asked)
    s += nw.assistant(nw.gen("x", max_tokens=3, stop=["\n", f"{n}"]))


@nw.function
def chooses(s: State, n: str) -> None:
    s += "\n".join(["One of", n])
    s += nw.select("x", choices=[f"{n} a", "b %s" % n, str(n)])  # noqa: UP031  # as authors write
    s["y"] = f"{n}"


@nw.function
def forks(s: State, n: str) -> None:
    both = s.fork(2)
    both += lambda index: f"{n} {index} is "
    both += nw.gen("x", choices=["small", "large"])
    both.join()


@nw.function
def looks_up(s: State, n: str) -> None:
    s += nw.gen({"q": "x"}.get(f"{n}", "y"), max_tokens=3)


@nw.function
def measures(s: State, n: str) -> None:
    s += nw.gen(f"v{len('an ' + n)}", max_tokens=3)


@nw.function
def compares(s: State, n: str) -> None:
    s += nw.gen("xy"["%s" % n == "y"], max_tokens=3)  # noqa: UP031  # as above


@nw.function
def looks_up_by_name(s: State, n: str) -> None:
    key = ""
    key += f"{n}"
    s += nw.gen({"q": "x"}.get(key, "y"), max_tokens=3)


@nw.function
def goes_through(s: State, n: str) -> None:
    for _ in f"{n}":
        s += nw.gen("x", max_tokens=3)


def written(n: str) -> str:
    return f"{n}"


@nw.function
def looks_up_elsewhere(s: State, n: str) -> None:
    s += nw.gen({"q": "x"}.get(written(n), "y"), max_tokens=3)


@nw.function
def looks_up_in_a_list(s: State, n: str) -> None:
    parts = []
    parts += [f"{n}"]
    s += nw.gen({"q": "x"}.get(parts[0], "y"), max_tokens=3)


@nw.function
def looks_up_in_a_dict(s: State, n: str) -> None:
    held = {}
    held["k"] = f"{n}"
    s += nw.gen({"q": "x"}.get(held["k"], "y"), max_tokens=3)


@nw.function
def looks_up_a_sum(s: State, n: str) -> None:
    before = "k"
    s += nw.gen({"kq": "x"}.get(before + n, "y"), max_tokens=3)


@nw.function
def looks_up_a_pattern(s: State, n: str) -> None:
    pattern = "%s"
    s += nw.gen({"q": "x"}.get(pattern % n, "y"), max_tokens=3)


@nw.function
def asks_other_text(s: State, n: str) -> None:
    s += nw.gen("yx"["quit".startswith(n)], max_tokens=3)


@nw.function
def asks_for_the_type(s: State, n: str | list[str]) -> None:
    s += nw.gen("yx"[isinstance(n, str)], max_tokens=3)


@nw.function
def puts_another_in_its_place(s: State, n: str) -> None:
    n = f"{n}"
    s += nw.gen({"Q": "x"}.get(n.upper(), "y"), max_tokens=3)


def ask(s: State, n: str) -> None:
    s += f"{n}? " + nw.gen("x", max_tokens=3)


@nw.function
def hands_on(s: State, n: str, m: dict[str, str]) -> None:
    with s.user():
        s += n + m["a"]
    for index, fork in enumerate(s.fork(2)):
        fork += f"{index} {n}"
    several = s.fork(2)
    for fork in several:
        fork += n
    several.join("concate_and_append")
    ask(s, n)


@pytest.mark.parametrize(
    ("program", "names"), [(says, ["x"]), (chooses, ["x", "y"]), (forks, ["x"]), (hands_on, ["x"])]
)
def test_text_of_arguments_that_is_only_said_leaves_the_answer_typed(program: Program, names: list[str]) -> None:
    answer = Endpoint(program).answer
    assert answer is not None
    assert list(answer.model_json_schema()["properties"]) == names


def test_text_that_an_expression_was_made_of_leaves_the_answer_typed() -> None:
    str(nw.gen("printed"))  # what is appended from here on is looked through for it
    answer = Endpoint(hands_on).answer
    assert answer is not None
    assert list(answer.model_json_schema()["properties"]) == ["x"]


@pytest.mark.parametrize(
    "program",
    [
        looks_up, measures, compares, looks_up_by_name, goes_through, looks_up_elsewhere, looks_up_in_a_list,
        looks_up_in_a_dict, looks_up_a_sum, looks_up_a_pattern, asks_other_text, asks_for_the_type,
        puts_another_in_its_place,
    ],
    ids=lambda p: p.name,
)  # fmt: skip
def test_where_text_of_arguments_is_read_nothing_is_told(program: Program) -> None:
    assert Endpoint(program).answer is None
