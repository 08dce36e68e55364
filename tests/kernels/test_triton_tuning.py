"""Measured tunings are kept, found again and checked; the fastest wins; the check tells right from wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.kernels.triton_setup import DEVICE
from triton.runtime.errors import OutOfResources
from niwaki.kernels import check
from niwaki.kernels.triton import launch, tune
from niwaki.kernels.triton.case import TINY, Case
from niwaki.kernels.triton.row_cases import gather_case, norm_case
from niwaki.kernels.triton.tune import attention_runs, best_of, candidates, product_run
from niwaki.kernels.triton.tuning import (
    DEFAULTS,
    EXACT,
    LONG,
    WIDE,
    Tuning,
    key_of,
    load,
    save,
    tuning_file,
    tuning_for,
)


def test_a_shape_that_nobody_measured_gets_the_default_of_its_kind() -> None:
    assert tuning_for("decode", torch.device("cpu"), head_dim=77, group=3, bits=16) is DEFAULTS["decode"]


def test_tunings_are_kept_beside_those_already_there(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "triton-some-gpu.json"
    assert load(path) == {}
    one, other = Tuning(64, 32, 8, 2), Tuning(16, 128, 4, 4, block_k=128)
    save(path, {key_of("decode", {"head_dim": 64, "bits": 16}): one})
    save(path, {"prefill": other})
    assert load(path) == {"decode(bits=16, head_dim=64)": one, "prefill": other}


def test_where_measurements_cannot_be_read_there_are_none(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("no folder; a folder of another user is as good")
    assert load(tmp_path / "home" / "triton.json") == {}


def test_launches_of_a_shape_ask_once_how_it_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def name_of(device: torch.device) -> str:
        asked.append(device)
        return "Some GPU"

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", name_of)
    device, shape = torch.device("cuda"), {"head_dim": 77, "group": 5, "bits": 16}
    for _ in range(3):
        assert tuning_for("decode", device, **shape) is DEFAULTS["decode"]
    assert len(asked) == 1
    measured = Tuning(16, 128, 4, 4)
    save(tuning_file(device), {key_of("decode", shape): measured})
    assert tuning_for("decode", device, **shape) == measured, "what was measured since counts"


@pytest.mark.parametrize("content", ["{", "[]", '{"decode": {"block_m": 17}}', '{"decode": {"blocks": 16}}'])
def test_a_file_that_holds_no_tunings_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "triton.json"
    path.write_text(content, "utf-8")
    with pytest.raises(ValueError, match=r"triton.json does not hold tunings"):
        load(path)


def test_the_fastest_that_fits_is_taken() -> None:
    slow, large, fast = Tuning(16, 16, 4, 1), Tuning(128, 128, 8, 4), Tuning(16, 32, 4, 2)
    seconds = {slow: 2.0, fast: 1.0}
    tried: list[Tuning] = []

    def run(tuning: Tuning) -> None:
        tried.append(tuning)
        if tuning == large:
            raise OutOfResources(300_000, 232_448, "shared memory")

    def timed(one: object) -> float:
        assert callable(one)
        one()
        return seconds[tried[-1]]

    assert best_of([slow, large, fast], run, timed) == fast
    assert len(set(candidates("prefill"))) == len(list(candidates("prefill")))


def test_every_candidate_computes_the_same() -> None:
    torch.manual_seed(0)
    chosen = (DEFAULTS["decode"], Tuning(16, 32, 4, 2))
    for kind in ("decode", "prefill"):
        run = attention_runs(kind, TINY, DEVICE, torch.float32)
        one, other = (torch.as_tensor(run(tuning)).clone() for tuning in chosen)
        assert torch.allclose(one, other, atol=1e-5)
    product = product_run(3, 2, 1, 40, 20, DEVICE, torch.float32)
    one, other = (torch.as_tensor(product(tuning)).clone() for tuning in chosen)
    assert torch.allclose(one, other, atol=1e-4)


def test_every_shape_is_measured_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "REAL", TINY)
    monkeypatch.setattr(tune, "HEADS", ((4, 2, 16),))
    monkeypatch.setattr(tune, "EXPERTS", ((16, 32),))
    monkeypatch.setattr(tune, "MXFP4_EXPERTS", ((64, 48),))
    monkeypatch.setattr(tune, "PRODUCTS", ((64, 32),))
    monkeypatch.setattr(tune, "candidates", lambda kind: [DEFAULTS[kind]])
    monkeypatch.setattr(tune, "tuning_file", lambda device: tmp_path / "tunings.json")
    runs: list[object] = []

    def seconds(run: Callable[[], object]) -> float:
        runs.append(run())
        return 1.0

    save(tmp_path / "tunings.json", {"coded(bits=8, inputs=64, outputs=32)": Tuning(16, 16, 4, 2)})
    measured = tune.tune_all(DEVICE, seconds, torch.float32)
    assert len(measured) == 4 + 2 + 2 + 4
    assert len(runs) == len(measured) - 1, "a run that was cut off goes on"
    assert measured["coded(bits=8, inputs=64, outputs=32)"] == Tuning(16, 16, 4, 2)
    assert load(tmp_path / "tunings.json") == measured
    assert measured["decode(bits=8, group=2, head_dim=16)"] == DEFAULTS["decode"]
    assert measured["coded(bits=4, inputs=64, outputs=32)"] == DEFAULTS["coded"]
    again = tmp_path / "more.json"
    monkeypatch.setattr(tune, "tuning_file", lambda device: again)
    assert set(tune.tune_all(DEVICE, seconds, torch.float32, "decode(")) == {
        "decode(bits=32, group=2, head_dim=16)",
        "decode(bits=8, group=2, head_dim=16)",
    }
    assert measured["moe_coded_few(bits=4, inputs=64, outputs=48)"] == DEFAULTS["moe_coded_few"]


def test_the_check_says_what_is_wrong(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    right = norm_case(TINY, DEVICE, torch.float32)
    wrong = Case("wrong", "", right.run, lambda: right.reference() * 1.01, 1e-5)
    nan = Case("NaN", "", lambda: right.run() * torch.nan, right.reference, 1e-5)
    lines = [check.check_case(case, None) for case in (right, wrong, nan, gather_case(TINY, DEVICE, torch.bfloat16))]
    assert [line["right"] for line in lines] == [True, False, False, True]
    assert check.main(["--only", "SiLU", "--json", str(tmp_path / "out.json")]) == 0
    assert "SiLU gate" in capsys.readouterr().out
    assert json.loads((tmp_path / "out.json").read_text("utf-8"))["results"][0]["right"] is True


def test_a_check_that_is_cut_off_leaves_what_it_had(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def check_made(name: str, make: object, ceilings: object) -> check.Json:
        if made:
            raise KeyboardInterrupt
        made.append(name)
        return {"case": name, "right": True}

    monkeypatch.setattr(check, "check_made", check_made)
    with pytest.raises(KeyboardInterrupt):
        check.main(["--only", "gate", "--json", str(tmp_path / "out.json")])
    assert "case SiLU gate, right yes" in capsys.readouterr().out
    assert json.loads((tmp_path / "out.json").read_text("utf-8"))["results"] == [{"case": "SiLU gate", "right": True}]


def test_nothing_is_begun_when_the_time_is_over() -> None:
    told: list[check.Json] = []
    lines = check.check_all("gate", tunes=False, tell=told.append, ends=0.0)
    assert (
        lines == told == [{"case": f"{kind} gate", "left out": "no time left"} for kind in ("SiLU", "GELU", "clamped")]
    )
    assert check.exit_status(lines) == check.SOME_LEFT_OUT, "what was not run was neither wrong nor right"
    right: check.Json = {"case": "run", "right": True}
    assert check.exit_status([right]) == check.exit_status([]) == check.ALL_RIGHT
    for wrong in ({"right": False}, {"failed": "MemoryError"}, {"same tokens": "NO"}):
        assert check.exit_status([*lines, right, {"case": "other", **wrong}]) == check.SOME_WRONG


def test_behind_a_case_that_took_the_gpu_with_it_the_others_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "is_lost", lambda device: True)
    monkeypatch.setattr(
        check, "check_made", lambda name, make, ceilings: {"case": name, "right": not name.startswith("GELU")}
    )
    lines = check.check_all("gate", tunes=False)
    assert [line.get("right") for line in lines] == [True, False, None]
    assert lines[2]["left out"] == "the GPU answers no more after 'GELU gate'"
    assert check.exit_status(lines) == check.SOME_WRONG


def test_kernels_compile_for_a_gpu_that_is_not_there(tmp_path: Path) -> None:
    """In a process of its own: whether kernels are interpreted is settled when they are defined."""
    out = tmp_path / "out.json"
    options = ["--compile", "90", "--only", "SiLU", "--json", str(out)]
    command = [sys.executable, "-m", "niwaki.kernels.check", *options]
    told = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert told.returncode == 0, told.stderr
    (line,) = json.loads(out.read_text("utf-8"))["results"]
    assert line["kernel"] == "_gate_mul"
    assert line["registers"] > 0
    assert told.stdout.startswith("case SiLU gate, kernel _gate_mul, "), "told as it comes"
    assert line["stack bytes"] == 0


class Heavy:
    """Stands for a kernel that fits the GPU with so many stages."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.tried: list[int] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def run(*, num_stages: int, width: int) -> None:
            self.tried.append(num_stages)
            if num_stages > self.most:
                raise OutOfResources(num_stages, self.most, "shared memory")

        return run


def test_a_launch_that_does_not_fit_has_fewer_stages() -> None:
    heavy, hopeless = Heavy(2), Heavy(0)
    for width in (5, 5, 7):
        launch.launch(heavy, (1,), num_stages=4, width=width)
    assert heavy.tried == [4, 3, 2, 2, 4, 3, 2], "what fits is remembered for what was asked"
    with pytest.raises(OutOfResources):
        launch.launch(hopeless, (1,), num_stages=2, width=5)
    assert hopeless.tried == [2, 1]


def test_float32_of_wide_heads_is_cut_small() -> None:
    assert tuning_for("prefill", torch.device("cpu"), head_dim=64, group=2, bits=32) is EXACT
    assert tuning_for("prefill", torch.device("cpu"), head_dim=32, group=2, bits=32) is DEFAULTS["prefill"]


def test_prompts_in_16_bits_have_longer_blocks_where_they_fit_registers() -> None:
    cpu = torch.device("cpu")
    assert tuning_for("prefill", cpu, head_dim=128, group=4, bits=16) is LONG
    assert tuning_for("prefill", cpu, head_dim=64, group=4, bits=16) is DEFAULTS["prefill"]
    assert tuning_for("prefill", cpu, head_dim=128, group=4, bits=8) is DEFAULTS["prefill"]
    assert tuning_for("prefill", cpu, head_dim=256, group=4, bits=16) is WIDE["prefill"]
    assert LONG in candidates("prefill")


def test_wide_heads_have_smaller_blocks() -> None:
    assert tuning_for("decode", torch.device("cpu"), head_dim=256, group=2, bits=16) is WIDE["decode"]
    assert tuning_for("decode", torch.device("cpu"), head_dim=128, group=2, bits=16) is DEFAULTS["decode"]


def test_what_is_timed_is_launched_while_the_device_has_something_else_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            done.append("event")

        def elapsed_time(self, end: object) -> float:
            return 40.0

    monkeypatch.setattr(check, "CACHES", 8)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: done.append("other work"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: done.append("wait"))
    assert check.median_seconds(lambda: done.append("run"), "cpu") == 0.04
    runs = ["other work", "event", "run", "event"]
    assert done == ["run", "wait", *runs * 3, "wait", *runs * 5, "wait"]
