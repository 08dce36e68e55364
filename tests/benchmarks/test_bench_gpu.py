"""The arithmetic of the GPU benchmark, and that it says so where there is no GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="the GPU kernels need the package triton")

from tests.benchmarks.bench_gpu import KINDS, SHAPES, branches, greedy_tokens, limit_seconds, main


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
    monkeypatch.setattr("niwaki.kernels.check.check_all", lambda only, tunes: ([], True))
    monkeypatch.setattr("tests.benchmarks.bench_gpu.greedy_tokens", lambda device, steps, ops=None: [])
    assert main(["--dry-run", "--json", str(tmp_path / "out.json")]) == 0
    report = json.loads((tmp_path / "out.json").read_text())
    work = [line["work"] for line in report["models"]]
    assert len(work) == len(set(work)) == 1 + 1 + len(KINDS) + 4
    assert report["models"][0]["same tokens"] == "yes"
