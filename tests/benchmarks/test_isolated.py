"""Whatever a part does to its process, the others are run, and it is told what became of it."""

from __future__ import annotations

import sys
import time

import pytest

from tests.benchmarks.isolated import Isolated, Json

WORKER = """
import os, signal, subprocess, sys, time
from tests.benchmarks.isolated import serve

lost = []

def run(part, told):
    yield {"begun": part, "process": os.getpid(), "known": told["known"]}
    match part:
        case "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "leave":
            os._exit(7)
        case "hang":
            subprocess.Popen(["sleep", "600"])
            time.sleep(600)
        case "raise":
            raise ValueError("too large")
        case "lose":
            lost.append(part)
            raise RuntimeError("illegal address")
        case "lack":
            import a_package_that_is_nowhere

serve(int(sys.argv[2]), run, lambda: bool(lost), str, {"device": "none"})
"""


def ran(*parts: str, seconds: float = 60.0, ends: float = 600.0, workers: int = 1, program: str = WORKER) -> Told:
    told = Told()
    isolated = Isolated([sys.executable, "-c", program], told.tell, told.machines.append, {"known": 5})
    now = time.monotonic()
    isolated.run(parts, seconds=lambda part: seconds, ends=now + ends, stops=now + 600.0, workers=workers)
    return told


class Told:
    def __init__(self) -> None:
        self.lines: list[tuple[str, Json]] = []
        self.machines: list[Json] = []

    def tell(self, part: str, line: Json) -> None:
        self.lines.append((part, line))

    def processes(self) -> list[object]:
        return [line["process"] for _, line in self.lines if "process" in line]

    def fates(self) -> dict[str, Json]:
        return {part: line for part, line in self.lines if "process" not in line}


def test_a_part_that_crashes_takes_no_other_with_it() -> None:
    told = ran("one", "crash", "two", "leave", "three")
    assert told.fates() == {
        "crash": {"failed": "its process ended by SIGSEGV"},
        "leave": {"failed": "its process ended with 7"},
    }
    assert [line["begun"] for _, line in told.lines if "begun" in line] == ["one", "crash", "two", "leave", "three"]
    one, crash, two, leave, three = told.processes()
    assert one == crash != two == leave != three
    assert told.machines == [{"device": "none"}] * 3
    assert all(line["known"] == 5 for _, line in told.lines if "known" in line)


def test_a_part_that_hangs_is_ended_and_the_next_begins() -> None:
    start = time.monotonic()
    told = ran("hang", "after", seconds=2.0)
    assert told.fates() == {"hang": {"failed": "it took longer than 2 s"}}
    assert len(set(told.processes())) == 2
    assert time.monotonic() - start < 60.0


def test_an_error_leaves_the_process_unless_the_device_is_lost() -> None:
    told = ran("raise", "lack", "lose", "after")
    assert told.fates() == {
        "raise": {"failed": "too large"},
        "lack": {"left out": "a_package_that_is_nowhere is not installed"},
        "lose": {"failed": "illegal address"},
    }
    first, lacking, losing, after = told.processes()
    assert first == lacking == losing != after


def test_what_is_too_late_is_not_begun() -> None:
    assert ran("one", "two", ends=-1.0).lines == [
        ("one", {"left out": "no time left"}),
        ("two", {"left out": "no time left"}),
    ]


def test_a_worker_that_cannot_start_is_not_started_for_each_part() -> None:
    told = ran("one", "two", program="raise SystemExit(3)")
    assert told.lines == [(part, {"failed": "no worker starts: its process ended with 3"}) for part in ("one", "two")]


@pytest.mark.parametrize("workers", [1, 3])
def test_several_workers_share_the_parts(workers: int) -> None:
    told = ran(*"abcdef", workers=workers)
    assert sorted(part for part, _ in told.lines) == list("abcdef")
    assert len(set(told.processes())) <= workers
