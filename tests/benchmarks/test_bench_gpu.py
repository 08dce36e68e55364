"""The arithmetic of the GPU benchmark, and that it says so where there is no GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="the GPU kernels need the package triton")

from niwaki.kernels import check
from tests.benchmarks.bench_gpu import Report, aims, main
from tests.benchmarks.gpu_lines import KINDS, SHAPES, Json, branches, greedy_tokens, limit_seconds


@pytest.mark.parametrize(
    ("model", "batch", "tokens_per_second"), [("8B", 1, 283), ("1B", 32, 38_812), ("0.6B", 1, 3283)]
)
def test_the_limit_is_bytes_over_bandwidth(model: str, batch: int, tokens_per_second: int) -> None:
    """At the 4.3 TB/s of an H200, against figures worked out by hand from published sizes of the models."""
    limit = batch / limit_seconds(SHAPES[model], batch, 1024, 4.3e12)
    assert limit == pytest.approx(tokens_per_second, rel=0.01)


def test_branches_share_their_trunk_and_nothing_else() -> None:
    rows = branches(3, 64, 20)
    assert [list(row.page_ids)[:4] for row in rows] == [[0, 1, 2, 3]] * 3
    own = [page for row in rows for page in list(row.page_ids)[4:]]
    assert own == list(range(4, 10))
    assert rows[0].start == 84


def test_the_greedy_check_writes_for_every_prompt() -> None:
    written = greedy_tokens("cpu", 2)
    assert [len(row) for row in written] == [2, 2, 2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 1
    assert "needs an NVIDIA GPU" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_dry_run_takes_every_path_of_the_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other parts have tests of their own."""
    monkeypatch.setattr("niwaki.kernels.check.check_all", lambda only, tunes, tell, ends: [])
    monkeypatch.setattr("tests.benchmarks.gpu_lines.greedy_tokens", lambda device, steps, ops=None: [])
    assert main(["--dry-run", "--json", str(tmp_path / "out.json")]) == 0
    report = json.loads((tmp_path / "out.json").read_text())
    work = [line["work"] for line in report["models"]]
    assert len(work) == len(set(work)) == 10 + len(KINDS), work
    assert [line["same tokens"] for line in report["models"] if "same tokens" in line] == ["yes", "yes", "yes"]
    assert all(line["met"] is None for line in report["aims"]), "nothing was timed on a GPU"


def test_it_does_without_what_a_gpus_machine_may_not_have() -> None:
    """What only constraints, servers and the language need."""
    program = """
import sys

class Lacking:
    def find_spec(self, name, path=None, target=None):
        if name in ("llguidance", "msgspec", "outlines_core", "pydantic", "starlette", "uvicorn"):
            raise ModuleNotFoundError(name, name=name)

sys.meta_path.insert(0, Lacking())
import tests.kernels.test_triton_sample
import tests.benchmarks.bench_gpu
import niwaki.runtime.sampling.device_sampler, niwaki.runtime.forward.graphs, niwaki.runtime.forward.pieces
from tests.benchmarks.gpu_lines import greedy_tokens
print(greedy_tokens("cpu", 1))
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert len(json.loads(ran.stdout)) == 3


def test_a_part_that_fails_is_told_and_the_next_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    report, device = Report(path), torch.device("cpu")

    def failing() -> Iterator[Json]:
        yield {"work": "before"}
        raise MemoryError("too large")

    def lacking() -> Iterator[Json]:
        import a_package_that_is_nowhere  # type: ignore[import-not-found]

        yield {"work": a_package_that_is_nowhere}

    report.run("one", failing, device)
    report.run("two", lacking, device)
    report.run("three", lambda: iter([{"work": "behind"}]), device)
    assert check.exit_status(report.lines) == check.SOME_WRONG
    report.ends = 0.0
    report.run("late", failing, device)
    assert json.loads(path.read_text())["models"] == [
        {"work": "before"},
        {"part": "one", "failed": "MemoryError: too large"},
        {"part": "two", "left out": "a_package_that_is_nowhere is not installed"},
        {"work": "behind"},
        {"part": "late", "left out": "no time left"},
    ]


def test_the_aims_are_read_from_the_lines() -> None:
    kernels: list[Json] = [
        {"case": "decode", "of copy": 0.9},
        {"case": "prefill", "of product": 0.5, "x SDPA": "failed"},
    ]
    lines: list[Json] = [
        {"model": "8B", "work": "decode, 1 x 1024", "tokens/s": 280.0},
        {"model": "8B", "work": "decode, 256 x 1024", "tokens/s": 10_000.0},
        {"model": "0.6B", "work": "a prefix", "row by row / tree": 7.9},
        {"model": "1B", "work": "steps", "gap us": 12.0},
    ]
    met = {str(line["aim"]): line["met"] for line in aims(kernels, lines, 3.0e12)}
    assert [aim for aim, is_met in met.items() if is_met] == [
        "decode attention, of the copy",
        "W0, 8B: tokens/s, the mark for this bandwidth",
        "W17, 1B: us between steps",
    ]
    assert [aim for aim, is_met in met.items() if is_met is False] == [
        "prefill attention, of the product",
        "W14, 0.6B: row by row / tree",
    ]
