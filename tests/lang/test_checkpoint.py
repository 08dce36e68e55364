"""run_batch with a checkpoint: no row is lost and none runs twice, whenever the process dies."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

import niwaki as nw
from niwaki.lang.backends import model_identity
from niwaki.lang.batch import JournalError
from niwaki.lang.state import State
from niwaki.runtime import bundled
from niwaki.runtime.checkpoint.weights_digest import weights_fingerprint

ROOT = Path(__file__).parent.parent.parent
ROWS = [{"n": n} for n in range(5)]


class Counting:
    """A program that notes which rows it has run."""

    def __init__(self) -> None:
        self.ran: list[int] = []

        @nw.function
        def double(s: State, n: int) -> None:
            self.ran.append(n)
            if n == 3:
                raise ValueError("three")
            s += f"{n} doubled is " + nw.gen("twice", dtype=int)

        self.program = double


def backend() -> nw.ScriptedBackend:
    return nw.ScriptedBackend(lambda prompt: str(2 * int(prompt.split()[0])))


def shown(results: object) -> list[object]:
    assert isinstance(results, list)
    return [f"{type(r).__name__}: {r}" if isinstance(r, Exception) else dict(r) for r in results]


def test_a_run_that_is_started_again_gives_the_same_results_and_runs_nothing(tmp_path: Path) -> None:
    counting = Counting()
    path = tmp_path / "out.jsonl"
    first = counting.program.run_batch(ROWS, checkpoint=path, backend=backend())
    assert shown(first) == [{"twice": 0}, {"twice": 2}, {"twice": 4}, "ValueError: three", {"twice": 8}]
    counting.ran.clear()
    again = counting.program.run_batch(ROWS, checkpoint=str(path), backend=backend())
    assert counting.ran == []
    assert shown(again) == [{"twice": 0}, {"twice": 2}, {"twice": 4}, "ProgramError: ValueError: three", {"twice": 8}]


@pytest.mark.parametrize("path", [5, b"out.jsonl", "", True])
def test_what_is_no_path_is_refused_before_anything_runs(path: object) -> None:
    @nw.function
    def never(s: State, text: str) -> None:
        raise AssertionError

    for run in (never.run_batch, never.arun_batch):
        with pytest.raises(nw.ConfigError, match="checkpoint is the path of a file, a str or a Path; got"):
            run([{"text": "a"}], checkpoint=path)  # type: ignore[call-overload]  # that is the point


def test_a_file_that_cannot_be_written_is_one_of_niwakis_errors_and_the_systems(tmp_path: Path) -> None:
    @nw.function
    def never(s: State, text: str) -> None:
        raise AssertionError

    for path, kind in ((tmp_path / "nowhere" / "out.jsonl", FileNotFoundError), (tmp_path, IsADirectoryError)):
        with pytest.raises(kind) as caught:
            never.run_batch([{"text": "a"}], checkpoint=path)
        assert issubclass(caught.type, nw.NiwakiError)
        assert caught.value.filename == str(path)


def test_an_error_of_ours_comes_back_as_its_class(tmp_path: Path) -> None:
    @nw.function
    def f(s: State, n: int) -> None:
        s += "? " + nw.gen("x")

    failing = nw.ScriptedBackend(lambda prompt: str(1 / 0))
    path = tmp_path / "out.jsonl"
    full = nw.ScriptedBackend([nw.CapacityError("the pool is full")])
    assert shown(f.run_batch([(1,)], checkpoint=path, backend=full)) == ["CapacityError: the pool is full"]
    assert shown(f.run_batch([(1,)], checkpoint=path, backend=failing)) == ["CapacityError: the pool is full"]


def test_an_error_comes_back_with_the_line_that_asked(tmp_path: Path) -> None:
    @nw.function
    def f(s: State, n: int) -> None:
        s += "? " + nw.gen("x")
        s.sync()

    path = tmp_path / "out.jsonl"
    notes = []
    for _ in range(2):
        full = nw.ScriptedBackend([nw.CapacityError("the pool is full")])
        [error] = f.run_batch([(1,)], checkpoint=path, backend=full)
        assert isinstance(error, nw.CapacityError)
        notes.append(error.__notes__)
    assert notes[0] == notes[1]
    assert notes[0][0].startswith("in program f, test_checkpoint.py:")


def test_only_the_rows_that_are_left_run(tmp_path: Path) -> None:
    counting = Counting()
    path = tmp_path / "out.jsonl"
    counting.program.run_batch(ROWS[:2], checkpoint=path, backend=backend())
    with path.open("ab") as file:
        file.write(b'{"index": 2, "twi')  # a kill in the middle of a line
    counting.ran.clear()
    results = counting.program.run_batch(ROWS, checkpoint=path, backend=backend())
    assert sorted(counting.ran) == [2, 3, 4]
    assert len(shown(results)) == 5


def test_results_are_yielded_as_they_come_and_rows_are_read_as_they_are_needed(tmp_path: Path) -> None:
    read: list[int] = []

    def rows() -> Iterator[Mapping[str, object]]:
        for n in range(100):
            read.append(n)
            yield {"n": n + 10}

    counting = Counting()
    path = tmp_path / "out.jsonl"
    results = counting.program.run_batch(
        rows(), checkpoint=path, generator_style=True, num_threads=2, backend=backend()
    )
    assert next(results) == {"twice": 20}
    assert len(read) < 30
    assert len(path.read_bytes().splitlines()) >= 1, "written before it is yielded"
    assert len(list(results)) == 99
    assert [json.loads(line)["index"] for line in path.read_text().splitlines()] == list(range(100))


def test_other_rows_another_program_and_other_options_are_refused(tmp_path: Path) -> None:
    counting = Counting()
    path = tmp_path / "out.jsonl"
    counting.program.run_batch(ROWS[:2], checkpoint=path, backend=backend())
    with pytest.raises(JournalError, match="row 1 is not the one"):
        counting.program.run_batch([{"n": 0}, {"n": 7}], checkpoint=path, backend=backend())
    with pytest.raises(JournalError, match=r"\(other options\)"):
        counting.program.run_batch(ROWS, checkpoint=path, backend=backend(), temperature=0.5)

    @nw.function
    def double(s: State, n: int) -> None:
        s += "something else"

    with pytest.raises(JournalError, match=r"\(other program\)"):
        double.run_batch(ROWS, checkpoint=path, backend=backend())


def test_rows_hold_whatever_a_program_takes(tmp_path: Path) -> None:
    ran: list[object] = []

    @nw.function
    def size(s: State, held: dict[object, object] | set[int] | int | list[object]) -> int:
        ran.append(held)
        return 1

    ring: list[object] = []
    ring.append(ring)
    rows: list[dict[str, object]] = [{"held": held} for held in ({1: "a", "b": 2}, {(1, 2): 3}, {0, 8}, 10**6000, ring)]
    path = tmp_path / "out.jsonl"
    assert shown(size.run_batch(rows, checkpoint=path, backend=backend())) == [{"value": 1}] * 5
    ran.clear()
    rows[0] = {"held": {"b": 2, 1: "a"}}
    rows[2] = {"held": {8, 0}}  # equal, and yet its repr is another one, as those of texts are in the next process
    assert shown(size.run_batch(rows, checkpoint=path, backend=backend())) == [{"value": 1}] * 5
    assert ran == []
    for place, other in enumerate([{1: "a", "b": 3}, {(2, 1): 3}, {0, 9}, 10**6000 + 1, [[1]]]):
        changed: list[dict[str, object]] = [*rows[:place], {"held": other}]
        with pytest.raises(JournalError, match=f"row {place} is not the one"):
            size.run_batch(changed, checkpoint=path, backend=backend())


def test_another_template_function_is_refused(tmp_path: Path) -> None:
    def loud(turns: Sequence[Mapping[str, str]], begins_answer: bool) -> str:
        return "".join(turn["content"].upper() for turn in turns)

    def calm(turns: Sequence[Mapping[str, str]], begins_answer: bool) -> str:
        return "".join(turn["content"] for turn in turns)

    counting, path = Counting(), tmp_path / "out.jsonl"
    counting.program.run_batch(ROWS[:1], checkpoint=path, backend=backend(), chat_template=loud)
    assert counting.program.run_batch(ROWS[:1], checkpoint=path, backend=backend(), chat_template=loud)
    with pytest.raises(JournalError, match=r"\(other options\)"):
        counting.program.run_batch(ROWS[:1], checkpoint=path, backend=backend(), chat_template=calm)


def test_another_model_of_the_same_name_is_refused(tmp_path: Path) -> None:
    class Weighed(nw.ScriptedBackend):
        def __init__(self, weights: str) -> None:
            super().__init__(lambda prompt: "0")
            self._info = replace(self._info, weights=weights)

    counting, path = Counting(), tmp_path / "out.jsonl"
    counting.program.run_batch(ROWS[:1], checkpoint=path, backend=Weighed("one"))
    with pytest.raises(JournalError, match=r"\(other model\)"):
        counting.program.run_batch(ROWS[:1], checkpoint=path, backend=Weighed("two"))


def test_the_default_model_is_told_from_others_without_loading_it() -> None:
    """As it is once it is loaded."""
    assert model_identity(None) == weights_fingerprint(None).hex() == weights_fingerprint(bundled.MODEL_DIR).hex()


def test_on_error_raise_leaves_the_row_undone(tmp_path: Path) -> None:
    counting = Counting()
    path = tmp_path / "out.jsonl"
    for _ in range(2):
        counting.ran.clear()
        with pytest.raises(ValueError, match="three"):
            counting.program.run_batch(ROWS, checkpoint=path, backend=backend(), on_error="raise")
        assert 3 in counting.ran
        assert len(path.read_bytes().splitlines()) == 3


def test_rows_are_left_undone_when_the_backend_goes(tmp_path: Path) -> None:
    counting = Counting()
    gone = backend()
    gone.shutdown()
    path = tmp_path / "out.jsonl"
    with pytest.raises(nw.EngineStopped):
        counting.program.run_batch(ROWS, checkpoint=path, backend=gone)
    assert path.read_bytes() == b""


def test_a_variable_of_a_reserved_name_fails_its_row(tmp_path: Path) -> None:
    @nw.function
    def f(s: State) -> None:
        s["index"] = 5

    [error] = f.run_batch([()], checkpoint=tmp_path / "out.jsonl", backend=backend())
    assert isinstance(error, nw.ProgramError)
    assert "'index'" in str(error)


def test_an_async_program_has_checkpoints_too(tmp_path: Path) -> None:
    ran: list[int] = []

    @nw.function
    async def double(s: State, n: int) -> None:
        ran.append(n)
        s += f"{n} doubled is " + nw.gen("twice", dtype=int)
        await s.wait()

    path = tmp_path / "out.jsonl"
    rows = [(1,), (2,)]
    first = double.run_batch(rows, checkpoint=path, backend=backend())
    again = double.run_batch(rows, checkpoint=path, backend=backend())
    assert shown(first) == shown(again) == [{"twice": 2}, {"twice": 4}]
    assert ran == [1, 2]


def test_an_async_batch_goes_on_with_the_file_of_either_kind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    counting = Counting()
    path = tmp_path / "out.jsonl"
    counting.program.run_batch(ROWS[:2], checkpoint=path, backend=backend())
    counting.ran.clear()

    async def main() -> tuple[object, list[object]]:
        batch = counting.program.arun_batch(ROWS, checkpoint=path, backend=backend(), progress_bar=True)
        first = await batch
        again = counting.program.arun_batch(ROWS, checkpoint=path, backend=backend())
        return first, [result async for result in again]

    first, again = asyncio.run(main())
    assert shown(first) == [{"twice": 0}, {"twice": 2}, {"twice": 4}, "ValueError: three", {"twice": 8}]
    assert len(again) == 5
    assert sorted(counting.ran) == [2, 3, 4]
    assert "5/5" in capsys.readouterr().err
    with pytest.raises(nw.ConfigError, match="concurrency"):
        counting.program.arun_batch(ROWS, checkpoint=path, concurrency=0)


CHILD = """
import sys, time
import niwaki as nw

until = int(sys.argv[2])

@nw.function
def double(s, n):
    time.sleep(0.002)
    while n >= until:  # however long it takes until it is killed
        time.sleep(1)
    s += f"{n} doubled is " + nw.gen("twice", dtype=int)

backend = nw.ScriptedBackend(lambda prompt: str(2 * int(prompt.split()[0])))
rows = ({"n": n} for n in range(%d))
results = double.run_batch(rows, checkpoint=sys.argv[1], generator_style=True, num_threads=4, backend=backend)
total = sum(result["twice"] for result in results)
print(total)
"""


def test_no_row_is_lost_or_comes_twice_when_the_process_is_killed(tmp_path: Path) -> None:
    """Five kills at random moments of one run, each continued by the next."""
    count = 600
    script = tmp_path / "child.py"
    script.write_text(CHILD % count)
    path = tmp_path / "out.jsonl"

    def command(until: int) -> list[str]:
        return [sys.executable, str(script), str(path), str(until)]

    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    draw = random.Random(3)
    held = 0
    for _ in range(5):
        wanted = held + draw.randint(1, count // 8)
        child = subprocess.Popen(command(wanted + 20), env=environment, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while child.poll() is None and (not path.exists() or path.read_bytes().count(b"\n") < wanted):
            assert time.monotonic() < deadline
            time.sleep(0.002)
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        before, held = held, path.read_bytes().count(b"\n")
        assert before < held < count, "killed half way, and nothing that stood there was lost"
    done = subprocess.run(command(count), env=environment, capture_output=True, text=True, check=True)
    assert int(done.stdout) == count * (count - 1)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["index"], line["twice"]) for line in lines] == [(n, 2 * n) for n in range(count)]
