"""run_batch with a checkpoint and retry_failed: the failed rows run again and no others; a kill costs nothing."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import niwaki as nw
from niwaki.lang.batch import JournalError
from niwaki.lang.state import State

ROOT = Path(__file__).parents[2]
ROWS = [{"n": n} for n in range(7)]


class Service:
    """A program that notes which rows it ran. Rows 1 and 4 fail until the service is there, row 3 always."""

    def __init__(self) -> None:
        self.is_there = False
        self.ran: list[int] = []

        @nw.function
        def double(s: State, n: int) -> None:
            self.ran.append(n)
            if n == 3 or (n in (1, 4) and not self.is_there):
                raise ValueError(f"no answer to {n}")
            s += f"{n} doubled is " + nw.gen("twice", dtype=int)

        self.program = double

    def come_back(self) -> None:
        self.is_there = True
        self.ran.clear()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


@pytest.fixture
def service(path: Path) -> Service:
    """It was away when all rows ran."""
    service = Service()
    service.program.run_batch(ROWS, checkpoint=path, backend=backend())
    assert failed(path) == [1, 3, 4]
    service.come_back()
    return service


def backend() -> nw.ScriptedBackend:
    return nw.ScriptedBackend(lambda prompt: str(2 * int(prompt.split()[0])))


def failed(path: Path) -> list[int]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["index"] for row in rows] == list(range(len(rows)))
    return [row["index"] for row in rows if "error" in row]


def shown(results: object) -> list[object]:
    assert isinstance(results, list)
    return [str(result) if isinstance(result, Exception) else result["twice"] for result in results]


def names(path: Path) -> list[str]:
    return sorted(one.name for one in path.parent.glob(f"{path.name}*"))


AGAIN = [0, 2, 4, "no answer to 3", 8, 10, 12]


def test_the_failed_rows_alone_run_again_and_stand_in_their_places(service: Service, path: Path) -> None:
    before = path.read_bytes().splitlines()
    results = service.program.run_batch(ROWS, checkpoint=path, retry_failed=True, backend=backend())
    assert shown(results) == AGAIN
    assert sorted(service.ran) == [1, 3, 4]
    assert failed(path) == [3]
    after = path.read_bytes().splitlines()
    assert [after[index] for index in (0, 2, 5, 6)] == [before[index] for index in (0, 2, 5, 6)]
    assert names(path) == ["out.jsonl", "out.jsonl.meta"]
    service.ran.clear()
    stored = service.program.run_batch(ROWS, checkpoint=path, backend=backend())
    assert shown(stored) == [*AGAIN[:3], "ValueError: no answer to 3", *AGAIN[4:]]
    assert service.ran == []


def test_an_async_batch_does_the_same(service: Service, path: Path) -> None:
    async def main() -> list[object]:
        batch = service.program.arun_batch(ROWS, checkpoint=path, retry_failed=True, backend=backend())
        return [result async for result in batch]

    assert shown(asyncio.run(main())) == AGAIN
    assert sorted(service.ran) == [1, 3, 4]
    assert failed(path) == [3]
    assert names(path) == ["out.jsonl", "out.jsonl.meta"]


def test_where_no_row_failed_or_none_was_run_it_is_a_run_as_ever(path: Path) -> None:
    service = Service()
    service.come_back()
    for rows, ran in ((ROWS[:1], [0]), (ROWS[:3], [1, 2]), (ROWS[:3], [])):
        service.ran.clear()
        results = service.program.run_batch(rows, checkpoint=path, retry_failed=True, backend=backend())
        assert shown(results) == AGAIN[: len(rows)]
        assert sorted(service.ran) == ran
        assert names(path) == ["out.jsonl", "out.jsonl.meta"]


def test_rows_that_were_not_run_yet_follow_those_that_failed(service: Service, path: Path) -> None:
    rows = [*ROWS, {"n": 7}, {"n": 8}]
    results = service.program.run_batch(iter(rows), checkpoint=path, retry_failed=True, backend=backend())
    assert shown(results) == [*AGAIN, 14, 16]
    assert sorted(service.ran) == [1, 3, 4, 7, 8]
    assert failed(path) == [3]


def test_a_retry_that_was_stopped_is_gone_on_with_or_told_of(service: Service, path: Path) -> None:
    results = service.program.run_batch(
        ROWS, checkpoint=path, retry_failed=True, generator_style=True, num_threads=1, backend=backend()
    )
    for result in results:
        if isinstance(result, Exception):  # row 3; row 4 may run, and is not written
            break
    del results
    before = path.read_bytes()
    assert failed(path) == [1, 3, 4]
    with pytest.raises(JournalError, match=r"give retry_failed=True to go on with it, or delete .*out\.jsonl\.retry"):
        service.program.run_batch(ROWS, checkpoint=path, backend=backend())

    async def batch() -> object:
        return await service.program.arun_batch(ROWS, checkpoint=path, backend=backend())

    with pytest.raises(JournalError, match="give retry_failed=True to go on with it"):
        asyncio.run(batch())
    assert path.read_bytes() == before
    service.ran.clear()
    again = service.program.run_batch(ROWS, checkpoint=path, retry_failed=True, backend=backend())
    assert [str(one).removeprefix("ValueError: ") for one in shown(again)] == list(map(str, AGAIN))
    assert service.ran == [4]
    assert names(path) == ["out.jsonl", "out.jsonl.meta"]


def test_whoever_counts_the_rows_and_asks_for_no_more_has_them_all_in_the_file(service: Service, path: Path) -> None:
    results = service.program.run_batch(
        ROWS, checkpoint=path, retry_failed=True, generator_style=True, backend=backend()
    )
    for _, _ in zip(ROWS, results, strict=False):  # which never asks for what comes behind the last one
        pass
    del results
    assert failed(path) == [3]
    assert names(path) == ["out.jsonl", "out.jsonl.meta"]


def test_results_come_before_the_rows_behind_them_are_read(service: Service, path: Path) -> None:
    read: list[int] = []

    def rows() -> Iterator[dict[str, int]]:
        for row in ROWS:
            read.append(row["n"])
            yield row

    results = service.program.run_batch(
        rows(), checkpoint=path, retry_failed=True, generator_style=True, backend=backend()
    )
    assert next(results) == {"twice": 0}
    assert read == [0]
    assert shown(list(results)) == AGAIN[1:]


def test_a_row_that_is_another_one_now_is_refused_and_nothing_is_lost(service: Service, path: Path) -> None:
    before = path.read_bytes()
    with pytest.raises(JournalError, match="row 5 is not the one"):
        service.program.run_batch(
            [*ROWS[:5], {"n": 50}, ROWS[6]], checkpoint=path, retry_failed=True, backend=backend()
        )
    assert path.read_bytes() == before
    service.ran.clear()
    service.program.run_batch(ROWS, checkpoint=path, retry_failed=True, backend=backend())
    assert service.ran == []
    assert failed(path) == [3]


def test_fewer_rows_than_stand_there_are_refused(service: Service, path: Path) -> None:
    before = path.read_bytes()
    with pytest.raises(nw.ConfigError, match="has 7 rows, and retry_failed=True goes through all of them"):
        service.program.run_batch(ROWS[:2], checkpoint=path, retry_failed=True, backend=backend())
    assert service.ran == []
    with pytest.raises(nw.ConfigError, match="has 7 rows, and only 3 were given"):
        service.program.run_batch(iter(ROWS[:2]), checkpoint=path, retry_failed=True, backend=backend())
    assert path.read_bytes() == before


def test_without_a_checkpoint_it_is_refused(service: Service) -> None:
    with pytest.raises(nw.ConfigError, match="name its file with checkpoint="):
        service.program.run_batch(ROWS, retry_failed=True)  # type: ignore[call-overload]  # as a checker says, too
    with pytest.raises(nw.ConfigError, match="name its file with checkpoint="):
        service.program.arun_batch(ROWS, retry_failed=True)  # type: ignore[call-overload]


def test_a_row_that_raises_stays_undone(service: Service, path: Path) -> None:
    for ran in ([1, 3], [3]):
        service.ran.clear()
        with pytest.raises(ValueError, match="no answer to 3"):
            service.program.run_batch(
                ROWS, checkpoint=path, retry_failed=True, on_error="raise", num_threads=1, backend=backend()
            )
        assert [n for n in service.ran if n != 4] == ran
    assert failed(path) == [1, 3, 4]


def test_rows_are_left_undone_when_the_backend_goes(service: Service, path: Path) -> None:
    gone = backend()
    gone.shutdown()
    before = path.read_bytes()
    with pytest.raises(nw.EngineStopped):
        service.program.run_batch(ROWS, checkpoint=path, retry_failed=True, backend=gone)
    assert path.read_bytes() == before


def test_what_a_link_leads_to_is_replaced(service: Service, path: Path) -> None:
    link = path.with_name("link.jsonl")
    link.symlink_to(path.name)
    path.with_name("out.jsonl.meta").rename(path.with_name("link.jsonl.meta"))
    service.program.run_batch(ROWS, checkpoint=link, retry_failed=True, backend=backend())
    assert link.is_symlink()
    assert failed(path) == [3]


CHILD = """
import sys, time
from pathlib import Path
import niwaki as nw

COUNT, until, folder = int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[1])

@nw.function
def double(s, n):
    with open(folder / "ran.txt", "a") as file:
        file.write(f"{n}\\n")
    time.sleep(0.004)
    while n >= until:  # however long it takes until it is killed
        time.sleep(1)
    if n % 3 == 2 or (n % 3 == 1 and not (folder / "back").exists()):
        raise ValueError(f"no answer to {n}")
    s += f"{n} doubled is " + nw.gen("twice", dtype=int)

backend = nw.ScriptedBackend(lambda prompt: str(2 * int(prompt.split()[0])))
again = (folder / "back").exists()
rows = ({"n": n} for n in range(COUNT))
results = double.run_batch(
    rows, checkpoint=folder / "out.jsonl", retry_failed=again, generator_style=True, num_threads=4, backend=backend
)
print(sum(result["twice"] for result in results if not isinstance(result, Exception)))
"""


def test_killed_again_and_again_no_row_is_lost_and_none_runs_again_that_was_written(tmp_path: Path, path: Path) -> None:
    (tmp_path / "child.py").write_text(CHILD)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    def child(count: int, until: int = 300) -> subprocess.Popen[str]:
        arguments = [sys.executable, str(tmp_path / "child.py"), str(tmp_path), str(count), str(until)]
        return subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE, text=True)

    def ran() -> set[int]:
        texts = (tmp_path / "ran.txt").read_text().split()
        (tmp_path / "ran.txt").unlink()
        return set(map(int, texts))

    done = child(240)
    done.communicate(timeout=60)
    before = path.read_bytes()
    assert failed(path) == [n for n in range(240) if n % 3]
    (tmp_path / "back").touch()
    ran()
    retry = tmp_path / "out.jsonl.retry"
    draw = random.Random(5)
    written = 0
    for at_least in (1, 90, 180, 250):  # 60 rows are not run yet
        process = child(300, at_least + 20)
        deadline = time.monotonic() + 60
        while not retry.exists() or retry.read_bytes().count(b"\n") < at_least:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.002)
        time.sleep(draw.random() * 0.02)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        assert path.read_bytes() == before  # until all is done
        assert not ran() & set(range(written))
        written = retry.read_bytes().count(b"\n")
        assert at_least <= written < 300
    told, _ = child(300).communicate(timeout=60)
    assert int(told) == sum(2 * n for n in range(300) if n % 3 != 2)
    assert failed(path) == [n for n in range(300) if n % 3 == 2]
    after = path.read_bytes().splitlines()
    assert all(after[n] == line for n, line in enumerate(before.splitlines()) if n % 3 == 0)
    assert names(path) == ["out.jsonl", "out.jsonl.meta"]
