"""The table of docs/errors.md, row by row: each fault raises its error at its place, within a second, and says which.

The page's table must hold exactly the rows of `faults`.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import niwaki as nw
from niwaki.lang.state import State
from tests.lang.fault import READ, Fault, outcome_of
from tests.lang.faults import FAULTS

PAGE = Path(__file__).parent.parent.parent / "docs" / "errors.md"
WITHIN = 1.0  # seconds


@pytest.mark.parametrize("row", FAULTS, ids=[row.what for row in FAULTS])
def test_each_fault_raises_its_error_at_its_place_and_says_what_to_look_at(row: Fault) -> None:
    outcome = outcome_of(row.act)
    error = outcome.error
    assert type(error) is row.error, repr(error)
    assert re.search(row.message, str(error), re.DOTALL), str(error)
    notes = [note for note in getattr(error, "__notes__", []) if note.startswith("in program ")]
    assert len(notes) == (row.place == READ), notes
    if notes:
        assert re.search(r" fault(s_of_lines|s_of_runs)?\.py:\d+: ", notes[0]), "a line of the row, or that it shares"
    # A busy machine may halt a thread for a second, but not each of three times.
    assert outcome.seconds < WITHIN or min(outcome_of(row.act).seconds for _ in range(2)) < WITHIN


def row_of(row: Fault) -> str:
    return f"| {row.what} | `{row.error.__name__}` | {row.place} |"


def test_the_page_holds_exactly_these_rows() -> None:
    rows = [line for line in PAGE.read_text("utf-8").splitlines() if re.fullmatch(r"\| .* \| `\w+` \| .* \|", line)]
    assert rows == [row_of(row) for row in FAULTS]
    assert len(rows) >= 40


def test_every_error_of_the_tree_is_on_the_page() -> None:
    page = PAGE.read_text("utf-8")
    for name in nw.__all__:
        value = getattr(nw, name)
        if isinstance(value, type) and issubclass(value, Exception):
            assert f"`{name}`" in page, name


def test_an_engine_shut_down_in_the_middle_of_a_run_ends_it_with_engine_stopped() -> None:
    @nw.function
    def f(s: State) -> None:
        s += "Go: " + nw.gen("x", max_tokens=3000, ignore_eos=True)

    with nw.Engine(kv_tokens=4096) as engine:
        state = f.run(backend=engine)
        assert next(state.text_iter("x"))  # it is in the middle
    error = outcome_of(lambda: state["x"]).error
    assert type(error) is nw.EngineStopped
    assert str(error).startswith("the engine was shut down")
    assert "read what a program makes, or state.sync(), before its engine ends" in str(error)
    assert "in program f, test_errors_table.py" in error.__notes__[0]
