"""Single queries on the matrix unit: any number of heads in a group, keys that nobody sees, and what came before."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from niwaki.kernels import paged_decode
from niwaki.kernels.jit import set_num_threads
from niwaki.kernels.operand import Operand
from niwaki.kernels.ops import NumbaOps, array_of
from niwaki.kernels.paged_decode import paged_decode_attention, paged_decode_attention_torch
from niwaki.kernels.partial import NOTHING, Partial
from niwaki.kernels.plan import DecodeQueries
from niwaki.kernels.rule import PLAIN, AttentionRule
from niwaki.kernels.tiles import has_matrix_unit
from tests.kernels.inputs import plan_of, randn

pytestmark = pytest.mark.skipif(not has_matrix_unit(), reason="this CPU has no matrix unit")

LENGTHS = [1, 15, 16, 17, 63, 64, 65, 130, 300]


def pools_of(rows: list[int], kv_heads: int, head_dim: int, page_size: int) -> tuple[list[torch.Tensor], np.ndarray]:
    """Keys and values of rows of these lengths on shuffled pages, NaN where no key is; and the page table."""
    most = -(-max(rows) // page_size)
    table = np.random.default_rng(1).permutation(len(rows) * most).reshape(len(rows), most).astype(np.int32)
    pools = []
    for seed in range(2):
        pool = torch.full((table.size, page_size, kv_heads, head_dim), torch.nan, dtype=torch.bfloat16)
        for number, length in enumerate(rows):
            keys = randn(10 * number + seed, length, kv_heads, head_dim, dtype=torch.bfloat16)
            for first in range(0, length, page_size):
                part = keys[first : first + page_size]
                pool[table[number, first // page_size], : len(part)] = part
        pools.append(pool)
    return pools, table


def attend(
    q: torch.Tensor,
    pools: list[torch.Tensor],
    table: np.ndarray,
    queries: DecodeQueries,
    out: torch.Tensor,
    rule: AttentionRule = PLAIN,
    partial: Partial = NOTHING,
) -> None:
    queries_of_all, keys, values, result = (array_of(Operand.of(each)) for each in (q, *pools, out))
    paged_decode_attention(queries_of_all, keys, values, table, queries, result, rule, partial)


def queries_of(lengths: list[int], first_key: list[int] | None = None) -> DecodeQueries:
    every = np.arange(len(lengths), dtype=np.int32)
    first = np.array([0] * len(lengths) if first_key is None else first_key, np.int32)
    return DecodeQueries(every + np.int32(1), every, np.array(lengths, np.int32), first)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "page_size"),
    [(2, 2, 64, 16), (4, 2, 64, 16), (6, 2, 64, 32), (8, 2, 64, 16), (5, 1, 128, 16), (24, 3, 64, 16), (20, 1, 64, 48)],
)
@pytest.mark.parametrize(
    "rule",
    [PLAIN, AttentionRule(scale=0.4), AttentionRule(window=1), AttentionRule(window=70), AttentionRule(chunk=50)],
    ids=str,
)
def test_a_query_attends_as_the_formula_says_and_reads_no_key_that_it_may_not_see(
    heads: int, kv_heads: int, head_dim: int, page_size: int, rule: AttentionRule
) -> None:
    pools, table = pools_of(LENGTHS, kv_heads, head_dim, page_size)
    for number, length in enumerate(LENGTHS):  # what lies before what is seen
        for key in range(rule.first_seen(length - 1)):
            for pool in pools:
                pool[table[number, key // page_size], key % page_size] = torch.nan
    q = randn(3, len(LENGTHS) + 2, heads + 2, head_dim, dtype=torch.bfloat16)[:, :heads]
    out, expected = torch.full_like(q, torch.nan), torch.full(q.shape, torch.nan)
    queries = queries_of(LENGTHS)
    attend(q, pools, table, queries, out, rule)
    keys, values = (pool.float() for pool in pools)
    pages, token, table_row, seen = (
        torch.from_numpy(each).long() for each in (table, queries.token, queries.table_row, queries.length)
    )
    paged_decode_attention_torch(q.float(), keys, values, pages, token, table_row, seen, expected, rule)
    assert out[0].isnan().all()
    assert out[-1].isnan().all()
    assert (out[1:-1].float() - expected[1:-1]).abs().max() < 2e-2


@pytest.mark.parametrize("group", [1, 3, 8, 11])
def test_a_sink_takes_its_share(group: int) -> None:
    heads = 2 * group
    sinks = torch.linspace(-2, 3, heads)
    plan = plan_of([(99, 1), (3, 1), (200, 1)], 16, 40)
    k_pool, v_pool = (randn(seed, 40, 16, 2, 64, dtype=torch.bfloat16) for seed in (1, 2))
    q = randn(3, 3, heads, 64, dtype=torch.bfloat16)
    got, plain = torch.empty_like(q), torch.empty_like(q)
    asked, keys_there, values_there = (Operand.of(each) for each in (q, k_pool, v_pool))
    for rule, out in ((AttentionRule(sinks=Operand.of(sinks)), got), (PLAIN, plain)):
        NumbaOps().attend(asked, keys_there, values_there, plan, Operand.of(out), rule)
    for row in range(3):
        pages = torch.from_numpy(plan.page_table[row]).long()
        keys = k_pool[pages].view(-1, 2, 64)[: int(plan.decode.length[row])].float().repeat_interleave(group, 1)
        total = (torch.einsum("hd,khd->hk", q[row].float(), keys) / 8).logsumexp(-1)
        share = (total - torch.logaddexp(total, sinks)).exp()
        assert (got[row].float() - plain[row].float() * share[:, None]).abs().max() < 2e-2


@pytest.mark.parametrize("group", [1, 2, 3, 8, 11])
def test_a_query_goes_on_from_what_it_got_before(group: int) -> None:
    heads, first_key = 2 * group, [0, 16, 48, 64, 288]
    lengths = [30, 17, 200, 65, 300]
    pools, table = pools_of(lengths, 2, 64, 16)
    q = randn(3, len(lengths) + 1, heads, 64, dtype=torch.bfloat16)
    whole, resumed = torch.zeros_like(q), torch.zeros_like(q)
    attend(q, pools, table, queries_of(lengths), whole)
    partial = Partial.empty(len(lengths) + 1, heads, 64)
    for number, first in enumerate(first_key):
        keys, values = (
            pool[torch.from_numpy(table[number]).long()].view(-1, 2, 64)[:first].float().repeat_interleave(group, 1)
            for pool in pools
        )
        scores = torch.einsum("hd,khd->hk", q[number + 1].float(), keys) / 8
        partial.lse[number + 1] = scores.logsumexp(-1).numpy()
        partial.mixed[number + 1] = torch.einsum("hk,khd->hd", scores.softmax(-1), values).numpy()
    attend(q, pools, table, queries_of(lengths, first_key), resumed, PLAIN, partial)
    assert (whole.float() - resumed.float()).abs().max() < 2e-2


def test_neither_neighbours_nor_threads_change_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    pools, table = pools_of(LENGTHS, 3, 64, 16)
    q = randn(3, len(LENGTHS) + 1, 6, 64, dtype=torch.bfloat16)
    queries = queries_of(LENGTHS)
    alone, together, halved = (torch.zeros_like(q) for _ in range(3))
    attend(q, pools, table, queries, together)
    for i in range(len(LENGTHS)):
        token, table_row, length, first_key = (
            each[i : i + 1] for each in (queries.token, queries.table_row, queries.length, queries.first_key)
        )
        attend(q, pools, table, DecodeQueries(token, table_row, length, first_key), alone)
    monkeypatch.setattr(paged_decode, "MIN_PARALLEL_ELEMENTS", 0)
    set_num_threads(2)
    try:
        attend(q, pools, table, queries, halved)
    finally:
        set_num_threads(1)
    assert torch.equal(alone, together)
    assert torch.equal(halved, together)


def test_nan_in_one_head_harms_no_other() -> None:
    pools, table = pools_of(LENGTHS, 2, 64, 16)
    q = randn(3, len(LENGTHS) + 1, 6, 64, dtype=torch.bfloat16)
    q[4, 2, 5] = torch.nan
    out = torch.zeros_like(q)
    attend(q, pools, table, queries_of(LENGTHS), out)
    assert out[4, 2].isnan().all()
    assert int(out.isnan().any(-1).sum()) == 1
