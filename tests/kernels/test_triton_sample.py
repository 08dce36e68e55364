"""Sampling in Triton draws the tokens that the CPU sampler draws, for the same seeds; penalties, masks, faults."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from tests.kernels.triton_setup import DEVICE, randn

import niwaki.kernels.triton.sample as kernel
from niwaki.runtime.api import GenerationError, SamplingParams
from niwaki.runtime.sampling.device_sampler import drawn_on_device, sample_on_device, token_logprobs_on_device
from niwaki.kernels.sample import uniform
from niwaki.runtime.sampling.sampler import PlainDraws, Sampled, SampleRow, sample, token_logprobs

VOCAB = 203  # no multiple of a block or of a mask's word


def both(logits: torch.Tensor, rows: list[SampleRow]) -> list[tuple[object, object]]:
    """Results of the CPU sampler and of the kernels; the logits stay as they are."""
    before = logits.clone()
    expected = sample(logits.cpu(), rows)
    got = sample_on_device(logits, rows)
    assert torch.equal(logits.nan_to_num(), before.nan_to_num())
    return list(zip(expected, got, strict=True))


def params(**options: float) -> SamplingParams:
    return SamplingParams(max_new_tokens=1, **options)  # type: ignore[arg-type]  # floats and ints by name


OPTIONS: list[dict[str, float]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 2.0, "top_k": 7},
    {"temperature": 1.5, "top_p": 0.6},
    {"temperature": 1.0, "top_p": 0.05},
    {"temperature": 1.0, "min_p": 0.2},
    {"temperature": 3.0, "top_k": 50, "top_p": 0.8, "min_p": 0.02},
]


def test_the_same_seeds_draw_the_same_tokens_as_on_the_cpu() -> None:
    rows = [SampleRow(params(**options), seed=2**62 + i, position=3 * i) for i, options in enumerate(OPTIONS)]
    logits = 2 * randn(0, len(rows), VOCAB)
    for (expected, got), row in zip(both(logits, rows), rows, strict=True):
        assert got == expected, row.params


@pytest.mark.parametrize("spread", [0.5, 4.0], ids=["flat", "steep"])
def test_long_rows_are_searched_among_their_best_tokens(spread: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flat ones keep more than stand side by side, steep ones less."""
    monkeypatch.setattr(kernel, "BLOCK", 32)
    monkeypatch.setattr(kernel, "CANDIDATES", 48)
    monkeypatch.setattr(kernel, "RANK", 12)
    few = np.zeros(-(-VOCAB // 32), np.uint32)
    few[[0, 6]] = 0x80000F01
    options = [chosen for chosen in [*OPTIONS, {"temperature": 2.0, "top_k": 90}] if chosen["temperature"] > 0]
    options.append({"temperature": 2.0, "top_p": 0.97, "min_p": 0.4})
    rows = [SampleRow(params(**chosen), seed, 7 * seed) for chosen in options for seed in range(3)]
    rows += [SampleRow(params(**chosen), 5, 1, mask=few) for chosen in options]
    for (expected, got), row in zip(both(spread * randn(1, len(rows), VOCAB), rows), rows, strict=True):
        assert got == expected, row


def test_a_zero_below_0_is_a_zero() -> None:
    logits = torch.full((4, VOCAB), -5.0, device=DEVICE)
    logits[:, 20:40] = 0.0
    logits[:, 20:30] *= -1.0
    for expected, got in both(logits, [SampleRow(params(temperature=1.0, top_k=11), seed, 0) for seed in range(4)]):
        assert got == expected


def test_equal_logits_are_taken_in_the_order_of_their_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "BLOCK", 128)  # so that a row takes more than one
    logits = torch.zeros(4, VOCAB, device=DEVICE)
    logits[:, 150] = 1.0
    rows = [SampleRow(params(**OPTIONS[4]), seed=seed, position=0) for seed in range(2)]
    rows += [SampleRow(params(temperature=1.0, top_p=0.3), seed=seed, position=0) for seed in range(2)]
    for expected, got in both(logits, rows):
        assert got == expected


def test_masks_penalties_bias_and_forbidden_tokens_act_as_on_the_cpu() -> None:
    generator = np.random.default_rng(0)
    words = -(-VOCAB // 32)
    many = generator.integers(0, 2**32, words, dtype=np.uint32)
    one = np.zeros(words, np.uint32)
    one[201 // 32] = np.uint32(1 << (201 % 32))
    penalised = params(temperature=1.0, repetition_penalty=1.7, frequency_penalty=0.4, presence_penalty=-0.3)
    biased = SamplingParams(max_new_tokens=1, temperature=0.0, logit_bias=((7, 9.0), (5, -100.0)))
    output = np.array([3, 3, 200, 9], np.int32)
    rows = [
        SampleRow(params(temperature=1.0), 5, 0, mask=many),
        SampleRow(params(temperature=1.0, top_k=3), 5, 1, mask=one),
        SampleRow(params(temperature=0.0), 5, 2, mask=np.zeros(words, np.uint32)),
        SampleRow(penalised, 5, 3, prompt_ids=np.array([1, 200, VOCAB + 5]), output_ids=output),
        SampleRow(biased, 5, 4, forbid=(7, 8)),
        SampleRow(params(temperature=0.0), 5, 5),
    ]
    results = both(2 * randn(3, len(rows), VOCAB), rows)
    for place, (expected, got) in enumerate(results):
        if place == 2:
            assert isinstance(expected, GenerationError)
            assert isinstance(got, GenerationError)
            assert str(got) == str(expected)
        else:
            assert got == expected, place


def test_a_row_that_is_not_finite_fails_alone() -> None:
    logits = randn(0, 4, VOCAB)
    logits[1, 7] = torch.nan
    logits[2, 199] = torch.inf
    logits[3] = -torch.inf
    rows = [SampleRow(params(temperature=1.0), 5, i) for i in range(4)]
    results = both(logits, rows)
    assert results[0][0] == results[0][1]
    for expected, got in results[1:]:
        assert isinstance(expected, GenerationError)
        assert isinstance(got, GenerationError)


def test_logprobs_are_those_of_the_model() -> None:
    logits = 2 * randn(0, 2, VOCAB)
    asked = SamplingParams(max_new_tokens=1, temperature=0.0, return_logprob=True, top_logprobs_num=3)
    for expected, got in both(logits, [SampleRow(asked, 5, 0, forbid=(4,)), SampleRow(asked, 5, 1)]):
        assert isinstance(expected, Sampled)
        assert isinstance(got, Sampled)
        assert (got.token_id, got.top.ids) == (expected.token_id, expected.top.ids)
        assert got.logprob == pytest.approx(expected.logprob, abs=1e-5)


def test_logprobs_of_known_tokens_are_those_of_the_cpu() -> None:
    """Of them and the likeliest alone: a prompt's logits are hundreds of megabytes."""
    logits = 2 * randn(0, 5, VOCAB)
    targets = [3, 0, VOCAB - 1, 7, 7]
    for most in (0, 4):
        expected = token_logprobs(logits.cpu(), targets, most)
        got = token_logprobs_on_device(logits, np.array(targets, np.int32), most)
        for mine, its in zip(got, expected, strict=True):
            assert isinstance(mine, Sampled)
            assert isinstance(its, Sampled)
            assert (mine.token_id, mine.top.ids) == (its.token_id, its.top.ids)
            assert mine.logprob == pytest.approx(its.logprob, abs=1e-5)
            assert mine.top.unpacked()[1] == pytest.approx(its.top.unpacked()[1], abs=1e-5)
    for bad in (torch.nan, torch.inf):
        logits[3, 5] = bad
        told = token_logprobs_on_device(logits, np.array(targets, np.int32), 0)
        assert [type(one) for one in told] == [Sampled, Sampled, Sampled, GenerationError, Sampled]
        assert f"the logits of this row hold {bad}" in str(told[3])


def test_tokens_of_a_guess_are_drawn_in_one_go() -> None:
    logits = 2 * randn(1, 6, VOCAB)
    for options in ({"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.8}):
        ahead = PlainDraws.of([(params(**options), 11, 4)], VOCAB).ahead(np.array([6]))
        expected = ahead.draw(logits.cpu())
        assert expected is not None
        found = drawn_on_device(ahead, logits)
        assert found is not None
        assert found.tolist() == expected.tolist()
    logits[2, 0] = torch.nan
    greedy = PlainDraws.of([(params(temperature=0.0), 11, 4)], VOCAB).ahead(np.array([6]))
    assert drawn_on_device(greedy, logits) is None


def test_the_random_numbers_are_the_cpu_samplers() -> None:
    cases = [(0, 0), (1, 1), (2**63 - 1, 12_345), (987_654_321, 2**31)]
    # A row of equal logits without filters draws token floor(number x vocab).
    vocab = 1 << 10
    rows = [SampleRow(params(temperature=1.0), seed, position) for seed, position in cases]
    drawn = sample_on_device(torch.zeros(len(cases), vocab, device=DEVICE), rows)
    assert [d.token_id for d in drawn if isinstance(d, Sampled)] == [int(uniform(*case) * vocab) for case in cases]


def test_batches_of_even_and_odd_numbers_of_rows_are_drawn_by_one_kernel() -> None:
    """In a process of its own, where kernels are compiled: another would be compiled in the middle of a batch."""
    program = """
import torch
from triton.runtime.driver import driver
from niwaki.kernels.check import AbsentGpu
from niwaki.kernels.triton.launch import compiling
from niwaki.kernels.triton.sample import Draws, sample_rows

driver.set_active(AbsentGpu(90))

def drawn_by(rows):
    floats, numbers = torch.zeros(3, rows, dtype=torch.float64), torch.zeros(3, rows, dtype=torch.int64)
    ints = torch.zeros(rows, dtype=torch.int32)
    draws = Draws(floats[0].float(), floats[1], floats[2], *numbers, ints, torch.zeros(1, 2, dtype=torch.int32))
    with compiling() as kernels:
        sample_rows(torch.zeros(rows, 64), draws)
    return [kernel.hash for kernel in kernels]

print(drawn_by(2) == drawn_by(3) == drawn_by(5))
"""
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-c", program]
    told = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert told.stdout == "True\n", told.stderr


def test_a_token_beside_the_edge_is_no_fault_and_another_is() -> None:
    """What the check on a GPU takes for right: sums in another order round across an edge."""
    logits = torch.tensor([[1.0, 2.0, 3.0, 4.0]] * 3, device=DEVICE).log()  # a tenth, two, three, four
    draws = kernel.Draws(
        scale=torch.tensor([1.0, 1.0, 0.0], device=DEVICE),
        top_p=torch.ones(3, dtype=torch.float64, device=DEVICE),
        min_p=torch.zeros(3, dtype=torch.float64, device=DEVICE),
        top_k=torch.tensor([4, 2, 4], device=DEVICE),
        seed=torch.tensor([1, 2, 3], device=DEVICE),
        position=torch.zeros(3, dtype=torch.int64, device=DEVICE),
        mask_of=torch.full((3,), -1, dtype=torch.int32, device=DEVICE),
        masks=torch.zeros((1, 1), dtype=torch.int32, device=DEVICE),
    )
    drawn = kernel.sample_rows_torch(logits, draws)
    assert kernel.misses_torch(logits, draws, drawn).tolist() == [0.0, 0.0, 0.0]
    number = kernel.uniform_torch(1, 0)
    ends = [0.0, 0.1, 0.3, 0.6, 1.0]
    for token in range(4):
        miss = float(kernel.misses_torch(logits, draws, torch.tensor([token, 0, 3]))[0])
        assert miss == pytest.approx(max(ends[token] - number, number - ends[token + 1], 0.0), abs=1e-6)
    wrong = kernel.misses_torch(logits, draws, torch.tensor([int(drawn[0]), 0, 0]))
    assert wrong.tolist() == [0.0, float("inf"), float("inf")], "not of the two best, not the best"
