"""To an engine that shares its places among programs, the rows of a batch are one program."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence

import pytest

import niwaki as nw
from niwaki.lang.batch import run_rows
from niwaki.lang.state import State
from niwaki.runtime.api import Branch
from niwaki.runtime.engine import Engine


@pytest.fixture
def opened(bundled_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The programs of the branches that are opened."""
    programs: list[int] = []
    open_branch = bundled_engine.backend.open

    def opening(*, namespace: str = "", program: int | None = None) -> Branch:
        branch = open_branch(namespace=namespace, program=program)
        programs.append(branch.program)
        return branch

    monkeypatch.setattr(bundled_engine.backend, "open", opening)
    yield programs
    monkeypatch.undo()


@nw.function
def inner(s: State, text: str) -> None:
    s += text + nw.gen("x", max_tokens=1)


@nw.function
async def waited(s: State, text: str) -> None:
    s += text + nw.gen("x", max_tokens=1)
    await s.get("x")


ROWS = [("a",), ("b",), ("c",)]


def run_async(engine: Engine) -> Sequence[object]:
    async def both() -> Sequence[object]:
        return [*await waited.arun_batch(ROWS, backend=engine), *await waited.arun_batch(ROWS, backend=engine)]

    return asyncio.run(both())


@pytest.mark.parametrize(
    "batches",
    [
        lambda engine: [inner.run_batch(ROWS, backend=engine), inner.run_batch(ROWS, backend=engine)],
        lambda engine: [waited.run_batch(ROWS, backend=engine), waited.run_batch(ROWS, backend=engine)],
        run_async,
        lambda engine: [
            list(run_rows(lambda row: inner.run(*row, backend=engine).sync(), ROWS)),
            list(run_rows(lambda row: inner.run(*row, backend=engine).sync(), ROWS)),
        ],
    ],
    ids=["threads", "async program", "awaited", "niwaki run"],
)
def test_the_rows_of_a_batch_are_one_program_and_another_batch_is_another(
    bundled_engine: Engine, opened: list[int], batches: Callable[[Engine], Sequence[object]]
) -> None:
    batches(bundled_engine)
    assert len(opened) == 6
    assert len(set(opened[:3])) == len(set(opened[3:])) == 1
    assert opened[0] != opened[3]


def test_what_a_row_runs_is_of_the_same_program(bundled_engine: Engine, opened: list[int]) -> None:
    @nw.function
    def outer(s: State, text: str) -> None:
        s += text + nw.gen("x", max_tokens=1)
        inner.run(text).sync()
        inner.run_batch([(text,)], backend=bundled_engine, on_error="raise")

    outer.run_batch([("a",)], backend=bundled_engine, on_error="raise")
    assert len(opened) == 3
    assert len(set(opened)) == 1
    inner.run("a", backend=bundled_engine).sync()
    assert opened[3] != opened[0], "a run by itself is a program of its own"


def test_a_batch_runs_where_no_places_are_shared() -> None:
    backend = nw.ScriptedBackend(lambda prompt: "x")
    states = inner.run_batch(ROWS, backend=backend)
    assert [state["x"] for state in states if isinstance(state, State)] == ["x"] * 3
