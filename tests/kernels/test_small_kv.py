"""A KV pool of 8 bits: what is stored is near what came, and attention is that over what is stored."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from niwaki.kernels.operand import Operand
from niwaki.kernels.ops import NumbaOps, TorchOps
from niwaki.kernels.plan import MAX_DECODE_TOKENS, AttentionPlan, Span, make_plan
from niwaki.kernels.rope import rope_tables, unrotated_tables
from niwaki.kernels.rule import PLAIN, AttentionRule
from niwaki.kernels.segments import Costs
from niwaki.kernels.small_kv import E4M3, KINDS, narrowed_torch, widened_torch

PAGE = 16
PAGES = 60
ALWAYS = Costs(paged_pair=1.0, dense_pair=0.0, key=1.0, query=0.0, segment=0.0)


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def pool(seed: int, kv_heads: int, head_dim: int, kind: torch.dtype = torch.int8) -> torch.Tensor:
    return narrowed_torch(drawn(seed, PAGES, PAGE, kv_heads, head_dim), kind)


def plan_of(shares: bool) -> AttentionPlan:
    """Single tokens, short rows and long ones; three of them over the same six pages."""
    order = np.random.default_rng(0).permutation(PAGES).tolist()
    spans = []
    for start, count in ((0, 1), (77, 1), (20, MAX_DECODE_TOKENS), (0, 40), (30, 33)):
        own = -(-(start + count) // PAGE)
        spans.append(Span(start, count, order[:own]))
        del order[:own]
    trunk = [order.pop() for _ in range(6)]
    spans += [Span(100, count, [*trunk, *(order.pop() for _ in range(3))]) for count in (1, 1, 20)]
    return make_plan(spans, page_size=PAGE, num_pages=PAGES, costs=ALWAYS if shares else None)


both_kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


@both_kinds
@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("rule", [PLAIN, AttentionRule(soft_cap=5.0), AttentionRule(window=24)])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 64), (3, 1, 128), (2, 2, 40), (6, 2, 24)])
def test_attention_is_that_over_what_the_pool_means(
    heads: int, kv_heads: int, head_dim: int, rule: AttentionRule, shares: bool, kind: torch.dtype
) -> None:
    plan = plan_of(shares)
    assert (plan.shared is not None) == shares
    k_pool, v_pool = pool(1, kv_heads, head_dim, kind), pool(2, kv_heads, head_dim, kind)
    q = drawn(3, plan.num_tokens, heads + 1, head_dim)[:, :heads]  # inside a wider row
    got = torch.full((plan.num_tokens, heads, head_dim), torch.nan, dtype=torch.bfloat16)
    exact = got.float()
    NumbaOps().attend(Operand.of(q), Operand.of(k_pool), Operand.of(v_pool), plan, Operand.of(got), rule)
    keys, values = Operand.of(widened_torch(k_pool)), Operand.of(widened_torch(v_pool))
    TorchOps().attend(Operand.of(q.float()), keys, values, plan_of(False), Operand.of(exact), rule)
    assert (got - exact).abs().max() < 0.015 * exact.abs().max()


@both_kinds
@pytest.mark.parametrize("head_dim", [64, 40])
def test_what_is_stored_is_the_turned_key_rounded(head_dim: int, kind: torch.dtype) -> None:
    heads, kv_heads, tokens = 4, 2, 30
    cos, sin = (Operand.of(table) for table in rope_tables(head_dim, 10_000.0, None, 64))
    plan = make_plan([Span(0, tokens, [7, 3])], page_size=PAGE, num_pages=PAGES)
    qkv = drawn(4, tokens, (heads + 2 * kv_heads) * head_dim)
    qkv[5] = 0
    other = qkv.clone()
    small = [torch.zeros(PAGES, PAGE, kv_heads, head_dim + 4, dtype=kind) for _ in range(2)]
    wide = [torch.zeros(PAGES, PAGE, kv_heads, head_dim, dtype=torch.bfloat16) for _ in range(2)]
    for rows, pools in ((qkv, small), (other, wide)):
        keys, values = map(Operand.of, pools)
        NumbaOps().rope_store_kv(Operand.of(rows), cos, sin, plan, keys, values)
    assert torch.equal(qkv, other), "queries are turned alike"
    for narrow, exact in zip(small, wide, strict=True):
        steps = exact.float().abs().amax(-1, keepdim=True) / 127
        if kind == torch.uint8:  # three bits behind the point, and the least step
            largest = exact.float().abs().amax(-1, keepdim=True)
            steps = (exact.float().abs() / 8).maximum(largest / 448 / 512)
        assert ((widened_torch(narrow) - exact.float()).abs() <= 0.51 * steps).all()


def test_every_e4m3_is_read_as_torch_reads_it_and_written_as_it_was_read() -> None:
    codes = torch.tensor([code for code in range(256) if code & 127 != 127], dtype=torch.uint8)
    assert np.isnan(E4M3[[127, 255]]).all()
    rows = torch.zeros(1, 1, 2, 256, dtype=torch.bfloat16)  # two heads, whose largest is 448: a scale of 1
    rows[..., : len(codes)] = torch.from_numpy(E4M3[codes.numpy()])
    cos, sin = (Operand.of(table) for table in unrotated_tables(64))
    keys, values = (Operand.of(torch.zeros(PAGES, PAGE, 2, 260, dtype=torch.uint8)) for _ in range(2))
    plan = make_plan([Span(0, 1, [4])], page_size=PAGE, num_pages=PAGES)
    qkv = torch.cat((rows, rows, rows), 2).flatten(1)
    NumbaOps().rope_store_kv(Operand.of(qkv), cos, sin, plan, keys, values)
    for stored in (keys, values):
        assert torch.equal(widened_torch(stored.tensor[4:5, :1]), rows.float())


@both_kinds
def test_a_key_that_is_no_number_harms_who_sees_it_alone(kind: torch.dtype) -> None:
    heads, kv_heads, head_dim = 2, 1, 32
    cos, sin = (Operand.of(table) for table in rope_tables(head_dim, 10_000.0, None, 64))
    keys, values = (Operand.of(torch.zeros(PAGES, PAGE, kv_heads, head_dim + 4, dtype=kind)) for _ in range(2))
    plan = make_plan([Span(0, 3, [4]), Span(0, 3, [2])], page_size=PAGE, num_pages=PAGES)
    qkv = drawn(4, 6, (heads + 2 * kv_heads) * head_dim)
    qkv[1, heads * head_dim + 5] = torch.nan
    NumbaOps().rope_store_kv(Operand.of(qkv), cos, sin, plan, keys, values)
    q = qkv.view(6, -1, head_dim)[:, :heads]
    out = torch.empty(q.shape, dtype=torch.bfloat16)
    NumbaOps().attend(Operand.of(q), keys, values, plan, Operand.of(out))
    assert out.isnan().flatten(1).all(1).tolist() == [False, True, True, False, False, False]
    assert not out[[0, 3, 4, 5]].isnan().any()


def test_pools_of_8_bits_want_bfloat16_queries_of_their_width() -> None:
    plan = make_plan([Span(3, 1, [0])], page_size=PAGE, num_pages=PAGES)
    k_pool, v_pool = Operand.of(pool(1, 1, 32)), Operand.of(pool(2, 1, 32))
    for dtype, width, error in ((torch.float32, 32, TypeError), (torch.bfloat16, 64, ValueError)):
        q = torch.zeros(1, 1, width, dtype=dtype)
        with pytest.raises(error, match="paged_decode_attention: pools of"):
            NumbaOps().attend(Operand.of(q), k_pool, v_pool, plan, Operand.of(torch.empty_like(q)))
