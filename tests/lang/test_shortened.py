"""`shortened`: which gens of a run, and which rows of a batch, have values that their budgets made shorter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import niwaki as nw
from niwaki.lang.program import Program
from niwaki.lang.state import State
from tests.lang.shortening import Shortening


@pytest.fixture(autouse=True)
def _no_line_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("niwaki.lang.calling._lines_told", set())


def backend() -> Shortening:
    return Shortening(lambda prompt: prompt.rsplit(" ", 1)[-1])


@nw.function
def named(s: State, words: list[str]) -> None:
    for number, word in enumerate(words):
        s += f' ["{word}"]' + nw.gen(f"x{number}", dtype=list[str])


def test_gens_are_named_in_their_order_each_once() -> None:
    state = named.run(["cut", "whole", "cut"], backend=backend())
    assert state.shortened == ("x0", "x2")
    assert named.run(["whole"], backend=backend()).shortened == ()


def test_a_gen_without_a_variable_is_told_by_its_line() -> None:
    @nw.function
    def f(s: State) -> None:
        s += ' ["cut"]' + nw.gen(dtype=list[str])

    (place,) = f.run(backend=backend()).shortened
    name, line = place.split(":")
    assert name == "test_shortened.py"
    assert "nw.gen(dtype=list[str])" in Path(__file__).read_text("utf-8").splitlines()[int(line) - 1]


@nw.function
def forked(s: State) -> None:
    forks = s.fork(3)
    for fork, word in zip(forks, ("whole", "cut", "cut"), strict=True):
        fork += f' ["{word}"]' + nw.gen("branch", dtype=list[str])
    forks.join()


@nw.function
def around(s: State) -> None:
    inner = forked.run()
    s["all"] = inner["branch"]


@pytest.mark.parametrize("program", [forked, around])
def test_forks_and_programs_inside_count_for_the_run(program: Program[object]) -> None:
    assert program.run(backend=backend()).shortened == ("branch",)


def test_texts_numbers_and_regexes_are_not_told_as_they_end_with_their_budgets_in_many_programs() -> None:
    @nw.function
    def f(s: State) -> None:
        s += " cut" + nw.gen("text")
        s += " cut" + nw.gen("letters", regex="[a-z]+")

    assert f.run(backend=backend()).shortened == ()


def test_a_checkpoint_keeps_the_names_beside_the_values(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    rows = [(["cut"],), (["whole"],)]
    first = named.run_batch(rows, checkpoint=path, backend=backend())
    assert first == [{"shortened": ["x0"], "x0": ["cut"]}, {"x0": ["whole"]}]
    assert json.loads(path.read_text("utf-8").splitlines()[0])["shortened"] == ["x0"]
    assert named.run_batch(rows, checkpoint=path, backend=nw.ScriptedBackend([])) == first


def test_a_batch_of_async_programs_tells_them_too() -> None:
    @nw.function
    async def f(s: State, word: str) -> None:
        s += f' ["{word}"]' + nw.gen("x", dtype=list[str])
        await s.wait()

    results = f.run_batch([("cut",), ("whole",)], backend=backend())
    assert [state.shortened for state in results if isinstance(state, State)] == [("x",), ()]
