"""Attention on the matrix unit against the formula: every rule, odd counts, pages that nobody should read."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from niwaki.kernels import tile_attention
from niwaki.kernels.jit import for_any_thread, set_num_threads
from niwaki.kernels.operand import Operand
from niwaki.kernels.ops import NumbaOps, array_of
from niwaki.kernels.partial import NOTHING
from niwaki.kernels.plan import PrefillRow, Segment, Span, make_plan
from niwaki.kernels.prefill import prefill_attention_torch
from niwaki.kernels.rule import PLAIN, AttentionRule
from niwaki.kernels.stack_by_tiles import attend_by_tiles
from niwaki.kernels.tile_attention import tile_rows, tile_segments
from niwaki.kernels.tiles import has_tiles

pytestmark = pytest.mark.skipif(not has_tiles(), reason="this CPU has no bfloat16 tiles")

NUM_PAGES = 60
RULES = [
    PLAIN,
    AttentionRule(scale=0.3),
    AttentionRule(window=37),
    AttentionRule(chunk=50),
    AttentionRule(soft_cap=3.0),
    AttentionRule(window=100, soft_cap=3.0),
    AttentionRule(sinks=Operand.of(torch.linspace(-2, 3, 6))),
]


def pools_of(seed: int, page_size: int, kv_heads: int, head_dim: int, used: list[int]) -> list[torch.Tensor]:
    """Keys and values; every page that is not used is NaN."""
    generator = torch.Generator().manual_seed(seed)
    pools = []
    for _ in "kv":
        pool = torch.full((NUM_PAGES, page_size, kv_heads, head_dim), torch.nan, dtype=torch.bfloat16)
        pool[used] = torch.randn((len(used), *pool.shape[1:]), generator=generator).to(torch.bfloat16)
        pools.append(pool)
    return pools


def attend(
    q: torch.Tensor,
    keys: Operand,
    values: Operand,
    rows: list[PrefillRow],
    out: torch.Tensor,
    rule: AttentionRule = PLAIN,
) -> None:
    queries, k_pool, v_pool, result = (array_of(each) for each in (Operand.of(q), keys, values, Operand.of(out)))
    tile_rows(queries, k_pool, v_pool, rows, result, rule, NOTHING)


def case(
    start: int, count: int, *, shape: tuple[int, int, int, int] = (6, 2, 64, 16), rule: AttentionRule = PLAIN
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the kernel gives a row of `count` tokens behind `start` others, and what the formula gives in float32."""
    heads, kv_heads, head_dim, page_size = shape
    used = np.random.default_rng(start + count).permutation(NUM_PAGES)[: -(-(start + count) // page_size)]
    pools = pools_of(count, page_size, kv_heads, head_dim, used.tolist())
    for pool in pools:  # behind the last key
        pool[used[-1], (start + count - 1) % page_size + 1 :] = torch.nan
    wide = torch.randn((count + 3, heads + 2, head_dim), generator=torch.Generator().manual_seed(start))
    q = wide.to(torch.bfloat16)[:, :heads]  # inside a wider row, as in the fused projection
    row = PrefillRow(2, count, start, used.astype(np.int32))
    out = torch.full(q.shape, torch.nan, dtype=torch.bfloat16)
    keys, values = (Operand.of(pool) for pool in pools)
    attend(q, keys, values, [row], out, rule)
    assert out[:2].isnan().all()
    assert out[2 + count :].isnan().all()
    expected = torch.empty(q.shape)
    prefill_attention_torch(q.float(), keys.tensor.float(), values.tensor.float(), [row], expected, rule)
    return out[2 : 2 + count].float(), expected[2 : 2 + count]


ROWS = [(0, 1), (0, 9), (0, 64), (0, 200), (5, 16), (63, 2), (64, 65), (300, 17), (700, 60), (2200, 60)]


@pytest.mark.parametrize(("start", "count"), ROWS)
def test_a_row_attends_as_the_formula_says(start: int, count: int) -> None:
    got, expected = case(start, count, shape=(6, 2, 64, 48 if start > 900 else 16))
    assert (got - expected).abs().max() < 2e-2


@pytest.mark.parametrize("shape", [(4, 2, 64, 32), (3, 3, 64, 16), (8, 2, 128, 16), (20, 1, 256, 48)], ids=str)
def test_any_number_of_heads_and_columns(shape: tuple[int, int, int, int]) -> None:
    got, expected = case(150, 30, shape=shape)
    assert (got - expected).abs().max() < 2e-2


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_every_rule(rule: AttentionRule) -> None:
    for start, count in ((0, 90), (130, 40)):
        got, expected = case(start, count, rule=rule)
        assert (got - expected).abs().max() < 2e-2


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_tiles_do_as_the_formula_says_also_where_pairs_are_quicker(
    rule: AttentionRule, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tile_attention, "_attend_all", for_any_thread(attend_by_tiles))
    monkeypatch.setattr(tile_attention, "_attend_parallel", None)
    got, expected = case(130, 40, rule=rule)
    assert (got - expected).abs().max() < 2e-2


@pytest.mark.parametrize("first_to_last", [(0.01, 40.0), (40.0, 0.01)], ids=["rising", "falling"])
def test_scores_may_rise_and_fall_by_hundreds(first_to_last: tuple[float, float]) -> None:
    heads, kv_heads, head_dim, page_size, keys_seen = 6, 2, 64, 16, 400
    used = list(range(keys_seen // page_size))
    keys, values = pools_of(7, page_size, kv_heads, head_dim, used)
    keys[used] *= torch.linspace(*first_to_last, keys_seen).view(-1, page_size, 1, 1)
    q = torch.randn((20, heads, head_dim), generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    row = PrefillRow(0, 20, keys_seen - 20, np.array(used, np.int32))
    out, expected = torch.empty_like(q), torch.empty(q.shape)
    attend(q, Operand.of(keys), Operand.of(values), [row], out)
    prefill_attention_torch(q.float(), keys.float(), values.float(), [row], expected)
    assert (out.float() - expected).abs().max() < 2e-2


@pytest.mark.parametrize(("tokens", "cuts"), [(200, [1, 50, 51, 128]), (2200, [300, 513, 515, 530, 2150])], ids=str)
def test_a_rows_result_does_not_depend_on_where_it_was_cut(tokens: int, cuts: list[int]) -> None:
    heads, kv_heads, head_dim, page_size = 6, 2, 64, 48
    used = list(range(tokens // page_size + 1))
    keys, values = (Operand.of(pool) for pool in pools_of(0, page_size, kv_heads, head_dim, used))
    q = torch.randn((tokens, heads, head_dim), generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    pages = np.array(used, np.int32)

    def pieces(cuts: list[int]) -> torch.Tensor:
        rows = [PrefillRow(a, b - a, a, pages) for a, b in zip([0, *cuts], [*cuts, tokens], strict=True)]
        out = torch.empty_like(q)
        attend(q, keys, values, rows, out)
        return out

    whole = pieces([])
    assert torch.equal(whole, pieces(cuts))


@pytest.mark.parametrize("rule", [PLAIN, AttentionRule(window=100, soft_cap=3.0), RULES[-1]], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 9, 11, 13])
def test_queries_at_the_end_of_a_stack_get_what_they_get_inside_one(
    count: int, group: int, head_dim: int, rule: AttentionRule
) -> None:
    # 1 to 39 queries, the last of which may fill less than half of a block: any number of them. Scores rise by steps.
    used, start, kv_heads = list(range(20)), 300, 6 // group
    keys, values = pools_of(5, 16, kv_heads, head_dim, used)
    keys[used] *= torch.linspace(0.01, 20, 20).view(-1, 1, 1, 1)
    q = torch.randn((16, 6, head_dim), generator=torch.Generator().manual_seed(4)).to(torch.bfloat16)
    outs = [torch.empty_like(q), torch.empty_like(q)]
    for out, tokens in zip(outs, (16, count), strict=True):
        row = PrefillRow(0, tokens, start, np.array(used, np.int32))
        attend(q, Operand.of(keys), Operand.of(values), [row], out, rule)
    assert torch.equal(outs[0][:count], outs[1][:count])


@pytest.mark.parametrize("count", [3, 7, 11])
def test_a_segments_part_is_the_same_for_few_queries_and_many(count: int) -> None:
    keys, values = (Operand.of(pool) for pool in pools_of(6, 16, 2, 64, list(range(20))))
    q = array_of(Operand.of(torch.randn((16, 6, 64), generator=torch.Generator().manual_seed(8)).to(torch.bfloat16)))
    pages = np.random.default_rng(2).permutation(20).astype(np.int32)
    parts = []
    for tokens in (16, count):
        numbers = np.arange(tokens, dtype=np.int32)
        segments = [Segment(pages[:7], numbers, 0), Segment(pages[7:], numbers, 7 * 16)]
        parts.append(tile_segments(q, array_of(keys), array_of(values), segments, PLAIN))
    assert np.array_equal(parts[0].mixed[:count], parts[1].mixed[:count])
    assert np.array_equal(parts[0].lse[:count], parts[1].lse[:count])


def test_two_threads_do_as_one_does() -> None:
    spans = [Span(400, 100, list(range(32))), Span(0, 300, list(range(32, 51)))]
    plan = make_plan(spans, page_size=16, num_pages=NUM_PAGES)
    keys, values = (Operand.of(pool) for pool in pools_of(3, 16, 2, 64, list(range(51))))
    q = Operand.of(torch.randn((400, 6, 64), generator=torch.Generator().manual_seed(2)).to(torch.bfloat16))
    outs = []
    try:
        for threads in (1, 2):
            set_num_threads(threads)
            outs.append(torch.empty_like(q.tensor))
            NumbaOps().attend(q, keys, values, plan, Operand.of(outs[-1]), PLAIN)
    finally:
        set_num_threads(1)
    assert torch.equal(*outs)


@pytest.mark.parametrize("page_size", [16, 48])
@pytest.mark.parametrize(
    ("start", "rule", "is_shared"),
    [(4000, PLAIN, True), (300, PLAIN, False), (4000, AttentionRule(window=100), False)],
    ids=["4000", "300", "window"],
)
def test_threads_share_a_row_of_enough_products_whatever_the_size_of_pages(
    start: int, rule: AttentionRule, is_shared: bool, page_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares = []
    monkeypatch.setattr(tile_attention, "get_num_threads", lambda: 2)
    monkeypatch.setattr(tile_attention, "_attend_all", lambda *args: shares.append(1))
    monkeypatch.setattr(tile_attention, "_attend_parallel", lambda *args: shares.append(len(args[-1]) - 1))
    num_pages = -(-(start + 15) // page_size)
    pool = Operand.of(torch.zeros((num_pages, page_size, 2, 64), dtype=torch.bfloat16))
    q = torch.zeros((15, 4, 64), dtype=torch.bfloat16)
    attend(q, pool, pool, [PrefillRow(0, 15, start, np.arange(num_pages, dtype=np.int32))], q, rule)
    assert shares == [2 if is_shared else 1]


def test_nan_in_one_query_harms_no_other() -> None:
    keys, values = (Operand.of(pool) for pool in pools_of(0, 16, 2, 64, [0, 1, 2, 3]))
    q = torch.randn((40, 6, 64), generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    q[7, 4, 3] = torch.nan
    out = torch.empty_like(q)
    row = PrefillRow(0, 40, 10, np.arange(4, dtype=np.int32))
    attend(q, keys, values, [row], out)
    assert out[7, 4].isnan().all()
    assert int(out.isnan().any(-1).sum()) == 1


def test_nested_segments_add_up_to_one_pass() -> None:
    keys, values = (Operand.of(pool) for pool in pools_of(4, 16, 2, 64, list(range(20))))
    q = torch.randn((11, 6, 64), generator=torch.Generator().manual_seed(5)).to(torch.bfloat16)
    tokens, some = np.arange(11, dtype=np.int32), np.array([1, 4, 10], np.int32)
    pages = np.random.default_rng(0).permutation(20).astype(np.int32)
    segments = [Segment(pages[:7], tokens, 0), Segment(pages[7:20], some, 7 * 16)]
    partial = tile_segments(array_of(Operand.of(q)), array_of(keys), array_of(values), segments, PLAIN)
    for token in range(11):
        seen = pages[:20] if token in some else pages[:7]
        k, v = (pool.tensor[seen].float().reshape(-1, 2, 64).repeat_interleave(3, 1) for pool in (keys, values))
        scores = torch.einsum("hd,khd->hk", q[token].float(), k) / 8
        mixed = torch.einsum("hk,khd->hd", scores.softmax(-1), v)
        assert np.abs(partial.mixed[token] - mixed.numpy()).max() < 1e-2
        assert np.abs(partial.lse[token] - scores.logsumexp(-1).numpy()).max() < 1e-4


@pytest.mark.parametrize(
    ("page_size", "head_dim", "dtype"), [(8, 64, "bfloat16"), (16, 48, "bfloat16"), (16, 64, "float32")]
)
def test_pages_that_do_not_fit_are_refused(page_size: int, head_dim: int, dtype: str) -> None:
    kind = getattr(torch, dtype)
    pool, q = (Operand.of(torch.zeros(shape, dtype=kind)) for shape in ((4, page_size, 2, head_dim), (9, 6, head_dim)))
    with pytest.raises(ValueError, match="no tiles for"):
        attend(q.tensor, pool, pool, [PrefillRow(0, 9, 0, np.arange(4, dtype=np.int32))], q.tensor)
