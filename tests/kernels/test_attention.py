"""Attention on the CPU against its torch twin: mixed batches, windows, caps, sinks; threads change nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from niwaki.kernels import jit
from niwaki.kernels.operand import Operand
from niwaki.kernels.ops import NumbaOps, TorchOps, array_of
from niwaki.kernels.paged_decode import NO_SINKS, decode_items
from niwaki.kernels.partial import NOTHING
from niwaki.kernels.plan import MAX_DECODE_TOKENS
from niwaki.kernels.rule import NO_CAP, NO_WINDOW, AttentionRule
from tests.kernels.inputs import DTYPES, close, plan_of, randn

MIXED = [(0, 1), (99, 1), (0, 40), (31, 1), (30, 33), (16, MAX_DECODE_TOKENS), (5, MAX_DECODE_TOKENS + 1), (63, 2)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "page_size"),
    [
        (1, 1, 16, 1), (4, 2, 32, 16), (8, 1, 64, 4), (6, 2, 80, 16), (8, 8, 128, 4), (10, 5, 32, 16), (7, 1, 24, 3),
        (6, 2, 64, 16), (14, 2, 64, 3), (4, 2, 192, 16), (6, 1, 128, 16),
    ],
)  # fmt: skip
def test_a_mixed_batch_attends_as_the_formula_says(
    dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, page_size: int
) -> None:
    num_pages = 600
    plan = plan_of(MIXED, page_size, num_pages)
    assert plan.prefill
    assert len(plan.decode.token)
    k_pool = randn(1, num_pages, page_size, kv_heads, head_dim, dtype=dtype)
    v_pool = randn(2, num_pages, page_size, kv_heads, head_dim, dtype=dtype)
    # Queries lie inside a wider row, as in the fused projection.
    q = 2 * randn(3, plan.num_tokens, heads + 3, head_dim, dtype=dtype)[:, :heads]
    got, expected = (torch.full((plan.num_tokens, heads, head_dim), torch.nan, dtype=dtype) for _ in range(2))
    for ops, out in ((NumbaOps(), got), (TorchOps(), expected)):
        ops.attend(Operand.of(q), Operand.of(k_pool), Operand.of(v_pool), plan, Operand.of(out))
    assert not expected.isnan().any()
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    assert (got.float() - expected.float()).abs().max() < tolerance


RULES = [
    AttentionRule(window=1),
    AttentionRule(window=7),
    AttentionRule(window=64, scale=0.11),
    AttentionRule(soft_cap=3.0),
    AttentionRule(window=20, soft_cap=5.0, scale=0.3),
    AttentionRule(chunk=32),
    AttentionRule(chunk=13, window=9),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "page_size"), [(4, 2, 32, 16), (7, 1, 24, 3), (6, 2, 64, 16)]
)
def test_windows_caps_and_scales_attend_as_the_formula_says(
    dtype: torch.dtype, rule: AttentionRule, heads: int, kv_heads: int, head_dim: int, page_size: int
) -> None:
    num_pages = 600
    plan = plan_of([*MIXED, (10, 290), (300, 1)], page_size, num_pages)
    k_pool = randn(1, num_pages, page_size, kv_heads, head_dim, dtype=dtype)
    v_pool = randn(2, num_pages, page_size, kv_heads, head_dim, dtype=dtype)
    q = 2 * randn(3, plan.num_tokens, heads + 3, head_dim, dtype=dtype)[:, :heads]
    got, expected = (torch.full((plan.num_tokens, heads, head_dim), torch.nan, dtype=dtype) for _ in range(2))
    for ops, out in ((NumbaOps(), got), (TorchOps(), expected)):
        ops.attend(Operand.of(q), Operand.of(k_pool), Operand.of(v_pool), plan, Operand.of(out), rule)
    assert not expected.isnan().any()
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    assert (got.float() - expected.float()).abs().max() < tolerance


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", [AttentionRule(), AttentionRule(window=9), AttentionRule(chunk=13)], ids=str)
def test_sinks_take_their_share_of_each_heads_weights(dtype: torch.dtype, rule: AttentionRule) -> None:
    sunk = replace(rule, sinks=Operand.of(torch.tensor([-40.0, 0.0, 2.5, 90.0])))
    plan = plan_of(MIXED, 16, 60)
    k_pool, v_pool = (randn(seed, 60, 16, 2, 32, dtype=dtype) for seed in (1, 2))
    q = 2 * randn(3, plan.num_tokens, 4, 32, dtype=dtype)
    got, expected, plain = (torch.full_like(q, torch.nan) for _ in range(3))
    for ops, out, chosen in ((NumbaOps(), got, sunk), (TorchOps(), expected, sunk), (NumbaOps(), plain, rule)):
        ops.attend(Operand.of(q), Operand.of(k_pool), Operand.of(v_pool), plan, Operand.of(out), chosen)
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    assert (got.float() - expected.float()).abs().max() < tolerance
    assert close(got[:, 0], plain[:, 0]), "a sink far below the scores takes nothing"
    assert got[:, 3].abs().max() < 1e-30, "one far above takes all"
    short = AttentionRule(sinks=Operand.of(torch.zeros(3)))
    with pytest.raises(ValueError, match=r"sinks must be float32 \[4\]"):
        NumbaOps().attend(Operand.of(q), Operand.of(k_pool), Operand.of(v_pool), plan, Operand.of(got), short)
    with pytest.raises(ValueError, match="do not go together"):
        replace(sunk, soft_cap=3.0)


def test_a_window_of_one_key_gives_that_keys_value_whatever_lies_before() -> None:
    plan = plan_of([(40, 1), (0, 30)], 4, 40)
    k_pool, v_pool = randn(1, 40, 4, 1, 16), randn(2, 40, 4, 1, 16)
    own = v_pool.view(-1, 1, 16)[torch.from_numpy(plan.slots)]
    k_pool[:], out = torch.nan, torch.empty_like(own)
    k_pool.view(-1, 1, 16)[torch.from_numpy(plan.slots)] = 1.0
    q = randn(3, plan.num_tokens, 1, 16)
    queries, keys, values = (Operand.of(tensor) for tensor in (q, k_pool, v_pool))
    NumbaOps().attend(queries, keys, values, plan, Operand.of(out), AttentionRule(window=1))
    assert torch.allclose(out[0], own[0])
    with pytest.raises(ValueError, match="must be above 0"):
        AttentionRule(window=0)


@pytest.mark.parametrize("rule", [AttentionRule(), AttentionRule(window=1000, soft_cap=20.0)], ids=str)
def test_threads_change_nothing(rule: AttentionRule) -> None:
    kv_heads, head_dim, page_size, num_pages, dtype = 4, 64, 16, 600, torch.bfloat16
    plan = plan_of([(4500, 1), (3, 1), (2900, 1), (1100, 1)], page_size, num_pages)
    keys, values = (Operand.of(randn(i, num_pages, page_size, kv_heads, head_dim, dtype=dtype)) for i in (1, 2))
    q = Operand.of(randn(3, 4, 8, head_dim, dtype=dtype))
    outs = []
    before = jit.get_num_threads()
    try:
        for threads in (1, 2):
            jit.set_num_threads(threads)
            out = torch.empty_like(q.tensor)
            NumbaOps().attend(q, keys, values, plan, Operand.of(out), rule)
            outs.append(out)
    finally:
        jit.set_num_threads(before)
    assert torch.equal(*outs)


@pytest.mark.parametrize(("group", "head_dim"), [(1, 64), (3, 64), (5, 128)])
def test_heads_of_a_key_that_threads_share_are_as_those_that_one_reads(group: int, head_dim: int) -> None:
    kv_heads, page_size, num_pages, dtype = 4, 16, 40, torch.bfloat16
    plan = plan_of([(300, 1), (77, 1)], page_size, num_pages)
    pools = [Operand.of(randn(i, num_pages, page_size, kv_heads, head_dim, dtype=dtype)) for i in (1, 2)]
    keys, values = map(array_of, pools)
    q = Operand.of(randn(3, 2, kv_heads * group, head_dim, dtype=dtype))
    outs, whole = [], int(np.int64(NO_WINDOW))  # no literal, for which the kernel would be compiled anew
    for heads_at_once in (kv_heads, 2, 1):
        out = torch.zeros_like(q.tensor)
        for first in range(0, 2 * kv_heads, heads_at_once):
            decode_items(
                array_of(q), keys, values, plan.page_table, plan.decode.token, plan.decode.table_row,
                plan.decode.length, plan.decode.first_key, NOTHING.mixed, NOTHING.lse, NO_SINKS,
                array_of(Operand.of(out)), 0.1, whole, whole, NO_CAP, first, first + heads_at_once
            )  # fmt: skip
        outs.append(out)
    assert outs[0].any()
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


@pytest.mark.parametrize("growth", [0.25, -0.04])
@pytest.mark.parametrize("group", [1, 3, 5])
def test_scores_may_rise_and_fall_from_block_to_block(growth: float, group: int) -> None:
    """In bfloat16, whose weights are seen from the highest score of a block before, as long as they stay small."""
    kv_heads, head_dim, num_pages, dtype = 2, 64, 24, torch.bfloat16
    plan = plan_of([(299, 1), (60, 1)], 16, num_pages)
    keys = randn(1, num_pages, 16, kv_heads, head_dim)
    keys[plan.page_table[0].astype(np.int64)] *= (1 + growth * torch.arange(plan.page_table.shape[1]))[
        :, None, None, None
    ]
    k_pool, v_pool = Operand.of(keys.to(dtype)), Operand.of(randn(2, num_pages, 16, kv_heads, head_dim, dtype=dtype))
    q = Operand.of(4 * randn(3, 2, kv_heads * group, head_dim, dtype=dtype))
    out, expected = torch.empty_like(q.tensor), torch.empty_like(q.tensor)
    NumbaOps().attend(q, k_pool, v_pool, plan, Operand.of(out))
    TorchOps().attend(q, k_pool, v_pool, plan, Operand.of(expected))
    assert (out.float() - expected.float()).abs().max() < 2e-2
    k_pool.tensor[plan.page_table[0, 11], 3, 0] = torch.nan  # of the third block, and of the first head
    NumbaOps().attend(q, k_pool, v_pool, plan, Operand.of(out))
    assert out[0, :group].isnan().all()
    assert not out[0, group:].isnan().any()
    assert not out[1].isnan().any()


def test_scores_of_a_thousand_do_not_overflow_and_nan_harms_one_query_only() -> None:
    plan = plan_of([(70, 1), (70, 1)], 16, 20)
    k_pool, v_pool = (Operand.of(randn(i, 20, 16, 1, 32)) for i in (1, 2))
    q = 1000 * randn(3, 2, 2, 32)
    out, expected = torch.empty_like(q), torch.empty_like(q)
    NumbaOps().attend(Operand.of(q), k_pool, v_pool, plan, Operand.of(out))
    TorchOps().attend(Operand.of(q), k_pool, v_pool, plan, Operand.of(expected))
    assert torch.allclose(out, expected, atol=1e-3)
    q[1, 0, 3] = torch.nan
    NumbaOps().attend(Operand.of(q), k_pool, v_pool, plan, Operand.of(out))
    assert out[1, 0].isnan().all()
    assert not out[0].isnan().any()
    assert not out[1, 1].isnan().any()
