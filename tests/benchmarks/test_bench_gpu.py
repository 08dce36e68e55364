"""The arithmetic of the GPU benchmark, and that it says so where there is no GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="the GPU kernels need the package triton")

from niwaki.kernels import check
from niwaki.runtime.forward.runner import Runner
from tests.benchmarks import gpu_examples
from tests.benchmarks.bench_gpu import Bench, Report, aims, in_turns, main
from tests.benchmarks.gpu_lines import (
    DRY,
    KINDS,
    QUICK,
    SHAPES,
    TINY,
    Json,
    branches,
    decode_lines,
    greedy_tokens,
    limit_seconds,
)
from tests.fake_graphs import put_in_place


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
def test_a_dry_run_takes_every_path_of_the_models(tmp_path: Path) -> None:
    """The kernels, the families and the engines have tests of their own."""
    bench = Bench(torch.device("cpu"), TINY, "")
    names = [name for name in bench.parts([]) if name.startswith("tiny: ")]
    assert len(names) == 4 + len(KINDS)
    report = Report(tmp_path / "out.json")
    for name in [*names, "blocks of prefill", "blocks of decode", "parts of the keys"]:
        for line in bench.run(name, {"ceilings": {}}):
            report.add(name, line)
    work = [line["work"] for line in json.loads((tmp_path / "out.json").read_text())["models"]]
    assert len(work) == len(set(work)) == 11 + len(KINDS), work


def test_steps_that_could_not_be_recorded_are_no_figures_of_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine goes on without graphs; a table that did so in silence would show their times as those of graphs."""
    lines = list(decode_lines("tiny", DRY, torch.device("cpu"), 1e12, TINY))
    assert check.exit_status(lines) == check.ALL_RIGHT
    put_in_place(monkeypatch)
    monkeypatch.setattr(Runner, "is_on_gpu", property(lambda runner: True))
    monkeypatch.setattr(Runner, "_forward_recorded", lambda runner, *args: setattr(runner, "_graphs", None))
    (line,) = decode_lines("tiny", DRY, torch.device("cpu"), 1e12, replace(TINY, by_launch=False))
    assert "could not be recorded" in str(line["failed"])
    assert check.exit_status([line]) == check.SOME_WRONG


def test_a_dry_run_gives_its_parts_to_workers(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """And one that goes on where it was cut off runs the others alone."""
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    assert main(["--dry-run", "--only", "kernel gather", "--json", str(first)]) == 0
    (line,) = json.loads(first.read_text())["kernels"]
    assert line["part"] == "kernel gather two"
    assert line["right"] is True
    assert main(["--dry-run", "--only", "a", "--list"]) == 0
    assert "kernel gather two\n" in capfd.readouterr().out
    assert main(["--dry-run", "--only", "kernel gather", "--resume", str(first), "--json", str(second)]) == 0
    assert json.loads(second.read_text())["kernels"] == [line]


def test_what_was_broken_off_is_run_again(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    report = Report(path)
    report.add("ceilings", {"bytes a second": 3e12, "operations a second": 8e14})
    report.add("kernel one", {"case": "one", "right": True})
    report.add("kernel two", {"failed": "its process ended by SIGSEGV"})
    report.add("8B: decode", {"work": "decode, 1 x 1024", "tokens/s": 100.0})
    report.add("8B: decode", {"failed": "it took longer than 60 s"})
    report.add("engine", {"left out": "no time left"})
    report.add("kernel three", {"case": "three", "right": False})
    report.add("examples", {"work": "examples, float32", "same tokens": "NO"})
    again = Report(None)
    assert again.take_over(path) == {"ceilings", "kernel one"}
    assert again.ceilings["bytes a second"] == 3e12
    assert [line["part"] for line in again.kernels] == ["kernel one"]
    assert check.exit_status([*report.kernels, *report.lines]) == check.SOME_WRONG


def test_tokens_that_a_cpu_has_written_before_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the GPU's machine no CPU is asked then."""
    path, asked = tmp_path / "expected.json", []
    path.write_text(json.dumps({"greedy tokens": [[1, 2, 3]], "examples": {"one": "a", "two": "b"}}))

    def written(device: str, steps: int, ops: object = None) -> list[list[int]]:
        asked.append(device)
        return [[1, 2]]

    def said(device: str, some: object) -> dict[str, str]:
        asked.append(device)
        return {"one": "a", "two": "c"}

    monkeypatch.setattr(gpu_examples, "greedy_tokens", written)
    monkeypatch.setattr(gpu_examples, "said_on", said)
    (line,) = gpu_examples.greedy_lines(torch.device("cuda"), 2, path)
    assert line["same tokens"] == "yes"
    other, every = gpu_examples.example_lines("cuda", path, ["one", "two"])
    assert (other["work"], other["printed"], other["on the CPU"]) == ("example two", "c", "b")
    assert check.exit_status([other]) == check.exit_status([every]) == check.SOME_WRONG
    assert every["examples"] == "1 of 2 print what they print on the CPU"
    assert asked == ["cuda", "cuda"]


def test_the_parts_of_a_gpu_are_named_without_one() -> None:
    """What matters most first."""
    parts = list(Bench(torch.device("cuda"), QUICK, "0.6B,8B,1B").parts(["llama"]))
    order = ["ceilings", "kernel decode", "kernel prefill", "greedy tokens", "examples", "0.6B: decode", "8B: gap"]
    order += ["1B: prefill", "family llama", "engine", "FlexAttention beside prefill"]
    assert [part for part in parts if part in order] == order
    assert parts[-1] == order[-1]


def test_families_run_side_by_side_and_nothing_beside_them() -> None:
    parts = ["ceilings", "kernel decode", "family llama", "family qwen3", "engine"]
    assert list(in_turns(parts)) == [(False, parts[:2]), (True, parts[2:4]), (False, parts[4:])]


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
