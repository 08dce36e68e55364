"""Mixtures of experts in Triton: routing, grouped products, the sum, against the formula; empty experts, odd sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.kernels.test_coded import KINDS, drawn
from tests.kernels.test_triton_coded import on_device
from tests.kernels.triton_setup import DEVICE, DTYPES, assert_close, ints, randn

from niwaki.kernels.triton.coded_experts import grouped_coded_linear, stacked_codes
from niwaki.kernels.triton.moe import (
    combine,
    grouped_linear,
    grouped_linear_torch,
    route,
    route_torch,
    sorted_choices,
)
from niwaki.kernels.triton.tuning import Tuning

SMALL = Tuning(block_m=16, block_n=16, num_warps=4, num_stages=1, block_k=32)


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize(("experts", "per_token"), [(5, 2), (60, 4)])
def test_tokens_are_routed_to_their_best_experts(experts: int, per_token: int, renormalise: bool) -> None:
    scores = randn(0, 3, experts)
    scores[1, 3] = scores[1, 1]  # of equals the lower number comes first
    weights = torch.empty(3, per_token, device=DEVICE)
    chosen = torch.empty(3, per_token, dtype=torch.int32, device=DEVICE)
    route(scores, weights, chosen, renormalise=renormalise)
    expected_weights, expected = route_torch(scores, per_token, renormalise=renormalise)
    assert torch.equal(chosen.long(), expected)
    assert_close(weights, expected_weights)


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_choice_is_multiplied_by_its_own_expert(dtype: torch.dtype) -> None:
    tokens, per_token, experts, inputs, outputs = 11, 2, 4, 40, 37
    x, weight = randn(0, tokens, inputs, dtype=dtype), randn(1, experts, outputs, inputs, dtype=dtype) / 6
    chosen = ints([0] * 5 + [2] * 17).view(tokens, per_token)  # experts 1 and 3 have none, 2 has more than a tile
    order, bounds = sorted_choices(chosen, experts)
    assert bounds.tolist() == [0, 5, 5, 22, 22]
    out = torch.full((tokens * per_token, outputs), torch.nan, dtype=dtype, device=DEVICE)
    grouped_linear(x, weight, order, bounds, out, per_row=per_token, tuning=SMALL)
    assert_close(out, grouped_linear_torch(x, weight, chosen, per_token), 4)
    again = torch.full_like(out, torch.nan)
    spread = x.repeat_interleave(per_token, 0)
    grouped_linear(spread, weight, order, bounds, again, per_row=1, tuning=SMALL)
    assert torch.equal(again, out), "rows of choices give what rows of tokens give"


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_the_experts_add_is_weighed_and_summed(dtype: torch.dtype) -> None:
    results, weights = randn(0, 6, 33, dtype=dtype), randn(1, 2, 3).abs()
    out = torch.empty(2, 33, dtype=dtype, device=DEVICE)
    combine(results, weights, out)
    assert_close(out, (results.view(2, 3, 33).float() * weights[..., None]).sum(1).to(dtype))


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_scores_that_are_no_numbers_choose_experts_that_there_are() -> None:
    """What is indexed by the choice would else end every request on the device; so it is that row's fault alone."""
    scores = randn(0, 3, 5)
    scores[1] = torch.nan
    weights = torch.empty(3, 2, device=DEVICE)
    chosen = torch.full((3, 2), -1, dtype=torch.int32, device=DEVICE)
    route(scores, weights, chosen, renormalise=True)
    assert ((chosen >= 0) & (chosen < 5)).all()
    assert weights.isnan().any(1).tolist() == [False, True, False]


def test_a_route_to_more_experts_than_there_are_is_refused() -> None:
    weights, chosen = torch.empty(1, 5, device=DEVICE), torch.empty(1, 5, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match="5 experts a token cannot be chosen from 4"):
        route(randn(0, 1, 4), weights, chosen, renormalise=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("inputs", "outputs", "group"), [(70, 37, 70), (96, 33, 32)])
def test_each_choice_is_multiplied_by_what_the_codes_of_its_expert_mean(
    kind: str, inputs: int, outputs: int, group: int
) -> None:
    tokens, per_token = 11, 2
    one = on_device(drawn(kind, outputs, inputs, group))
    experts = []
    for by in range(4):
        zeros = None if one.zeros is None else one.zeros.roll(by, 0)
        experts.append(replace(one, codes=one.codes.roll(by, 0), scales=one.scales.roll(by, 0), zeros=zeros))
    weight = stacked_codes(experts)
    assert weight is not None
    chosen = ints([0] * 5 + [2] * 17).view(tokens, per_token)
    order, bounds = sorted_choices(chosen, len(experts))
    meant = torch.stack([expert.matrix() for expert in experts])
    for dtype in (torch.float32, torch.bfloat16):
        x = randn(0, tokens, inputs, dtype=dtype) / inputs**0.5
        out = torch.full((tokens * per_token, outputs + 1), torch.nan, dtype=dtype, device=DEVICE)[:, :outputs]
        grouped_coded_linear(x, weight, order, bounds, out, per_row=per_token, tuning=SMALL)
        assert_close(out, grouped_linear_torch(x, meant, chosen, per_token), 20 if dtype == torch.float32 else 2)
        again, spread = torch.empty_like(out), x.repeat_interleave(per_token, 0)
        grouped_coded_linear(spread, weight, order, bounds, again, per_row=1, tuning=SMALL)
        assert torch.equal(again, out), "rows of choices give what rows of tokens give"


def test_experts_whose_codes_are_laid_out_in_two_ways_are_not_stacked() -> None:
    one, other = drawn("int4", 32, 128, 32), drawn("int8", 32, 128, 32)
    assert stacked_codes([on_device(one), on_device(one)]) is not None
    assert stacked_codes([on_device(one), on_device(other)]) is None
    assert stacked_codes([on_device(drawn("int4", 32, 96, 24))]) is None, "no span fits its groups"
