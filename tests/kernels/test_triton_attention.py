"""Attention in Triton against the formula: ragged rows, splits, trees, windows, caps, FP8, empty rows, odd shapes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.kernels.triton_setup import DEVICE, assert_close, ints, randn

from niwaki.kernels.operand import Operand
from niwaki.kernels.paged_decode import paged_decode_attention_torch
from niwaki.kernels.rule import NO_WINDOW, PLAIN, AttentionRule
from niwaki.kernels.segments import Int32s, Int64s, Segments
from niwaki.kernels.small_kv import KINDS, narrowed_torch, widened_torch
from niwaki.kernels.triton import attend
from niwaki.kernels.triton import paged_attention as paged
from niwaki.kernels.triton import plan as plans
from niwaki.kernels.triton.attend import AttentionCall
from niwaki.kernels.triton.launch import launch
from niwaki.kernels.triton.merge import merge_parts, merge_parts_torch
from niwaki.kernels.triton.paged_attention import RaggedRows, bounded_split, paged_attention
from niwaki.kernels.triton.plan import (
    DevicePlan,
    device_plan,
    lay_out,
    packed,
    padded,
    plan_in,
    tree_arrays,
    tree_items,
)
from niwaki.kernels.triton.tree_attention import tree_attention
from niwaki.kernels.triton.tuning import Tuning

SMALL = Tuning(block_m=16, block_n=32, num_warps=4, num_stages=1)
PAGE = 16


class Batch:
    """Rows of (start, count) on pages of their own, or on pages in common where `tables` says so."""

    def __init__(
        self,
        spans: list[tuple[int, int]],
        heads: int = 4,
        kv_heads: int = 2,
        head_dim: int = 16,
        dtype: torch.dtype = torch.float32,
        tables: list[list[int]] | None = None,
    ) -> None:
        self.starts, self.counts = (np.array(column, np.int64) for column in zip(*spans, strict=True))
        self.lengths = self.starts + self.counts
        widest = int((-(-self.lengths // PAGE)).max())
        if tables is None:
            order = np.random.default_rng(0).permutation(len(spans) * widest)
            self.table = order.reshape(len(spans), widest).astype(np.int32)
        else:
            self.table = np.array(tables, np.int32)
        num_pages = int(self.table.max()) + 1
        total = int(self.counts.sum())
        self.q = 2 * randn(1, total, heads + 1, head_dim, dtype=dtype)[:, :heads]  # inside a wider row
        self.k_pool = randn(2, num_pages, PAGE, kv_heads, head_dim, dtype=dtype)
        self.v_pool = randn(3, num_pages, PAGE, kv_heads, head_dim, dtype=dtype)
        self.positions = np.concatenate([np.arange(s, s + c) for s, c in spans]).astype(np.int64)
        self.rows = np.repeat(np.arange(len(spans)), self.counts)

    def out(self) -> torch.Tensor:
        return torch.full(self.q.shape, torch.nan, dtype=self.q.dtype, device=DEVICE)

    def expected(self, rule: AttentionRule = PLAIN) -> torch.Tensor:
        out = self.out()
        paged_decode_attention_torch(
            self.q, self.k_pool, self.v_pool,
            torch.from_numpy(self.table).to(DEVICE), torch.arange(len(self.rows)), torch.from_numpy(self.rows),
            torch.from_numpy(self.positions + 1), out, rule,
        )  # fmt: skip
        return out

    def ragged(self, which: list[int]) -> RaggedRows:
        firsts = np.cumsum(self.counts) - self.counts
        tokens = [t for row in which for t in range(firsts[row], firsts[row] + self.counts[row])]
        first = [0, *np.cumsum(self.counts[which]).tolist()]
        return RaggedRows(ints(which), ints(first), ints(tokens), len(tokens), int(self.lengths[which].max()))

    def on_device(self) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.from_numpy(self.table).to(DEVICE), ints(self.lengths.tolist())

    def host_arrays(self) -> tuple[Int64s, Int64s, Int32s, Int32s, Int64s, Int64s]:
        token_ids = np.zeros(len(self.rows), np.int32)
        return self.starts, self.counts, self.table, token_ids, self.positions, self.positions

    def plan(self, *, shares: bool = False) -> DevicePlan:
        group = self.q.shape[1] // self.k_pool.shape[2]
        return device_plan(*self.host_arrays(), page_size=PAGE, group=group, device=DEVICE, shares=shares)


@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads", "head_dim"),
    [(torch.float32, 4, 2, 16), (torch.bfloat16, 3, 1, 80), (torch.float16, 2, 2, 64)],
)
def test_a_ragged_batch_attends_as_the_formula_says(
    dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int
) -> None:
    batch = Batch([(0, 1), (40, 17), (0, 21), (70, 2)], heads, kv_heads, head_dim, dtype)
    out = batch.out()
    paged_attention(
        batch.q, batch.k_pool, batch.v_pool, *batch.on_device(), batch.ragged([0, 1, 2, 3]), out, tuning=SMALL
    )
    assert_close(out, batch.expected(), 20 if dtype == torch.float32 else 4)


def test_wide_heads_and_rows_left_out() -> None:
    batch = Batch([(30, 3), (5, 2)], 2, 1, 256, torch.bfloat16)
    out = batch.out()
    paged_attention(batch.q, batch.k_pool, batch.v_pool, *batch.on_device(), batch.ragged([1]), out, tuning=SMALL)
    assert_close(out[3:], batch.expected()[3:], 4)
    assert out[:3].isnan().all(), "tokens of other rows stay as they are"


@pytest.mark.parametrize("heads", [12, 24, 48])
def test_heads_that_leave_room_for_one_token_at_a_time_attend_in_rows_of_several(heads: int) -> None:
    batch = Batch([(150, 3), (5, 2), (0, 1), (300, 16), (20, 30)], heads, 1)
    out, expected = batch.out(), batch.expected()
    AttentionCall(batch.q, batch.k_pool, batch.v_pool, out, PLAIN).launch(batch.plan())
    assert_close(out, expected, 20)
    out = batch.out()
    for rows in ([0, 3], [1, 2, 4]):
        paged_attention(batch.q, batch.k_pool, batch.v_pool, *batch.on_device(), batch.ragged(rows), out, tuning=SMALL)
    assert_close(out, expected, 20)


WINDOW, CAP = AttentionRule(window=20), AttentionRule(soft_cap=3.0, scale=0.3)
SUNK = AttentionRule(window=40, sinks=Operand.of(torch.tensor([-30.0, 0.0, 1.0, 3.0], device=DEVICE)))


@pytest.mark.parametrize(
    ("rule", "split"),
    [
        (WINDOW, 0),
        (WINDOW, 128),
        (CAP, 0),
        (AttentionRule(window=1), 128),
        (AttentionRule(chunk=50), 0),
        (AttentionRule(chunk=50), 128),
        (SUNK, 0),
        (SUNK, 128),
    ],
)
def test_windows_caps_chunks_and_sinks_attend_as_the_formula_says(rule: AttentionRule, split: int) -> None:
    batch = Batch([(150, 1), (0, 1), (120, 9), (0, 18)])
    out = batch.out()
    for rows in ([0, 1], [2, 3]):
        paged_attention(
            batch.q, batch.k_pool, batch.v_pool, *batch.on_device(), batch.ragged(rows), out, rule,
            split=split, tuning=SMALL,
        )  # fmt: skip
    assert_close(out, batch.expected(rule), 20)


@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads", "head_dim"), [(torch.float32, 3, 1, 80), (torch.bfloat16, 8, 2, 32)]
)
def test_split_decoding_gives_the_same_as_one_pass(
    dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int
) -> None:
    batch = Batch([(299, 1), (0, 1), (127, 1), (128, 1)], heads, kv_heads, head_dim, dtype)
    out, whole = batch.out(), batch.out()
    rows = batch.ragged([0, 1, 2, 3])
    for target, split in ((out, 128), (whole, 0)):
        paged_attention(batch.q, batch.k_pool, batch.v_pool, *batch.on_device(), rows, target, split=split)
    assert_close(out, batch.expected(), 20 if dtype == torch.float32 else 4)
    assert torch.equal(out[1], whole[1]), "a row that fits one part does not depend on how long the others are"


def test_parts_are_longer_where_they_would_be_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged, "MAX_PARTS", 6)
    assert [bounded_split(split, 1101, 2) for split in (128, 0, 2048)] == [512, 0, 2048]
    assert bounded_split(128, 300, 2) == 128
    batch = Batch([(1100, 1), (5, 1)])
    out, asked = batch.out(), batch.out()
    for target, split in ((out, 128), (asked, 512)):
        operands = batch.q, batch.k_pool, batch.v_pool, *batch.on_device()
        paged_attention(*operands, batch.ragged([0, 1]), target, split=split)
    assert_close(out, batch.expected(), 20)
    assert torch.equal(out, asked)
    trunk = list(range(64))
    tables = [[*trunk, 64 + i] for i in range(16)]
    shared = Batch([(1024 + i % 9, 1) for i in range(16)], tables=tables).plan(shares=True)
    assert shared.tree is not None
    assert shared.tree.shared.key.tolist()[0][1:3] == [0, 1024]


def test_parts_of_any_size_run_the_same_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a batch that grows would stop for the compiler."""
    compiled_for: list[dict[str, object]] = []

    def told(kernel: object, grid: tuple[int, ...], *args: object, **meta: object) -> None:
        compiled_for.append(meta)
        launch(kernel, grid, *args, **meta)

    monkeypatch.setattr(paged, "launch", told)
    batch = Batch([(1100, 1), (5, 1)])
    outs = []
    for most in (1 << 14, 6, 4):
        monkeypatch.setattr(paged, "MAX_PARTS", most)
        outs.append(batch.out())
        operands = batch.q, batch.k_pool, batch.v_pool, *batch.on_device()
        paged_attention(*operands, batch.ragged([0, 1]), outs[-1], split=128)
        assert_close(outs[-1], batch.expected(), 20)
    assert len(compiled_for) == 3
    assert compiled_for[0] == compiled_for[1] == compiled_for[2]


def test_an_empty_row_gives_zeros_and_harms_no_other() -> None:
    batch = Batch([(200, 1), (7, 1)])
    table, length = batch.on_device()
    expected = batch.expected()
    expected[1] = 0.0
    length[1] = 0
    for split in (0, 128):
        out = batch.out()
        paged_attention(batch.q, batch.k_pool, batch.v_pool, table, length, batch.ragged([0, 1]), out, split=split)
        assert_close(out, expected, 20)


def small_pools(batch: Batch, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The batch's pools in 8 bits; it goes on with what these hold."""
    k_small, v_small = (narrowed_torch(pool, kind) for pool in (batch.k_pool, batch.v_pool))
    batch.k_pool, batch.v_pool = widened_torch(k_small), widened_torch(v_small)
    return k_small, v_small


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize(("split", "rule"), [(0, PLAIN), (128, PLAIN), (128, AttentionRule(window=50, soft_cap=4.0))])
def test_a_cache_of_8_bits_is_read_with_its_scales(kind: torch.dtype, split: int, rule: AttentionRule) -> None:
    batch = Batch([(140, 1), (30, 1), (20, 18)], heads=3, kv_heads=1, head_dim=24)
    exact, pools = batch.q, small_pools(batch, kind)
    for dtype, steps in ((torch.float32, 20), (torch.bfloat16, 4)):
        batch.q = exact.to(dtype)
        out = batch.out()
        for rows in ([0, 1], [2]):
            paged_attention(batch.q, *pools, *batch.on_device(), batch.ragged(rows), out, rule, split=split)
        assert_close(out, batch.expected(rule), steps)


def test_parts_merge_in_proportion_to_their_sums() -> None:
    parts, lse = randn(0, 7, 3, 24), randn(1, 7, 3)
    lse[2] = -torch.inf
    parts[2] = torch.nan  # an empty part counts for nothing, whatever it holds
    lse[6] = -torch.inf
    bounds, token = ints([0, 1, 4, 6, 7]), ints([2, 0, 1, 3])
    out, expected = torch.empty(4, 3, 24, device=DEVICE), torch.zeros(4, 3, 24, device=DEVICE)
    merge_parts(parts, lse, bounds, token, out)
    merge_parts_torch(parts, lse, bounds, token, expected)
    assert_close(out, expected)
    assert torch.equal(out[2], parts[0])
    assert not out[3].any()


def test_as_many_parts_for_each_query_merge_without_bounds() -> None:
    """More than a program takes at a time, the last ones empty, with a sink."""
    parts, lse = randn(0, 3 * 37, 2, 24), randn(1, 3 * 37, 2)
    lse[20:37] = -torch.inf
    parts[20:37] = torch.nan
    sinks, token = Operand.of(randn(2, 2)), ints([1, 2, 0])
    out, expected, alone = (torch.empty(3, 2, 24, device=DEVICE) for _ in range(3))
    merge_parts(parts, lse, 37, token, out, sinks)
    merge_parts_torch(parts, lse, ints([0, 37, 74, 111]), token, expected, sinks)
    assert_close(out, expected)
    merge_parts(parts[:20].contiguous(), lse[:20].contiguous(), 20, token[:1], alone, sinks)
    assert torch.equal(out[1], alone[1]), "empty ones behind the others change no bit"
    with pytest.raises(ValueError, match="111 parts are not 36 for each of 3 queries"):
        merge_parts(parts, lse, 36, token, out)


# Four rows below one trunk of two pages, two of them below a branch of one page more.
TABLES = [[0, 1, 2, 3, 4], [0, 1, 2, 5, 6], [0, 1, 7, 8, 9], [0, 1, 10, 11, 12]]
SPANS = [(60, 1), (50, 2), (70, 1), (35, 6)]
SEGMENTS = Segments(
    first_page=np.array([0, 2], np.int32),
    end_page=np.array([2, 3], np.int32),
    bounds=np.array([0, 4, 6], np.int32),
    rows=np.array([0, 1, 2, 3, 0, 1], np.int32),
    row_end=np.array([3, 3, 2, 2], np.int32),
)


@pytest.mark.parametrize(
    ("dtype", "rule", "heads", "kv_heads"),
    [
        (torch.float32, replace(SUNK, window=NO_WINDOW), 4, 2),
        (torch.float32, AttentionRule(chunk=45), 4, 2),
        (torch.bfloat16, AttentionRule(window=20, soft_cap=4.0), 3, 1),
    ],
)
def test_a_nested_tree_attends_as_its_rows_do(
    dtype: torch.dtype, rule: AttentionRule, heads: int, kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans, "SPLIT", 32)  # so that segments and tails are cut, too
    batch = Batch(SPANS, heads, kv_heads, 24, dtype, TABLES)
    firsts = np.cumsum(batch.counts) - batch.counts
    arrays, parts = tree_arrays(SEGMENTS, batch.starts, batch.counts, firsts, np.full(4, True), PAGE, heads // kv_heads)
    items = tree_items({n: ints(a.tolist()) for n, a in arrays.items()}, parts, heads // kv_heads)
    assert len(items.shared.key) == 2
    out = batch.out()
    table, _ = batch.on_device()
    positions = ints(batch.positions.tolist())
    tree_attention(batch.q, batch.k_pool, batch.v_pool, table, positions, items, out, rule)
    assert_close(out, batch.expected(rule), 20 if dtype == torch.float32 else 4)
    for kind in KINDS.values():
        tree_attention(batch.q, *small_pools(batch, kind), table, positions, items, out, rule)
        assert_close(out, batch.expected(rule), 20 if dtype == torch.float32 else 4)


def test_a_plan_sorts_rows_by_their_own_length_and_shares_where_it_pays() -> None:
    batch = Batch([(5, 1), (0, 40), (9, 1), (3, 7)])
    plan = batch.plan()
    assert [rows.row.tolist() for rows in plan.split] == [[0, 2], [3]]
    assert [rows.row.tolist() for rows in plan.whole] == [[1]]
    assert plan.split[1].token.tolist() == list(range(42, 49))
    assert plan.split[0].max_length == 10
    assert plan.tree is None
    trunk = list(range(64))
    tables = [[*trunk, 64 + i] for i in range(16)]
    shared = Batch([(1024 + i % 9, 1) for i in range(16)], tables=tables).plan(shares=True)
    assert shared.tree is not None
    assert not shared.split
    assert shared.tree.shared.key.tolist()[0][1:3] == [0, 512]
    assert shared.tree.bounds.tolist() == list(range(0, 49, 3))


def test_rows_of_some_tokens_behind_many_keys_have_them_cut_into_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block of queries alone keeps one multiprocessor of a GPU busy, while it reads a long text from end to end."""
    monkeypatch.setattr(plans, "PARTED_SPLIT", 128)
    monkeypatch.setattr(attend, "PARTED_SPLIT", 128)
    batch = Batch([(250, 17), (5, 1), (100, 20), (130, 40), (129, 3)])
    grids: list[tuple[int, ...]] = []

    def noted(kernel: object, grid: tuple[int, ...], *args: object, **meta: object) -> None:
        grids.append(grid)
        launch(kernel, grid, *args, **meta)

    monkeypatch.setattr(paged, "launch", noted)
    plan, out = batch.plan(), batch.out()
    assert [rows.row.tolist() for rows in plan.split] == [[1], [4]]
    assert [rows.row.tolist() for rows in plan.parted] == [[0, 3]]
    assert [rows.row.tolist() for rows in plan.whole] == [[2]]
    AttentionCall(batch.q, batch.k_pool, batch.v_pool, out, PLAIN).launch(plan)
    assert_close(out, batch.expected(), 20)
    assert grids[2][2] == 3, "267 keys"
    window = AttentionRule(window=100)
    AttentionCall(batch.q, batch.k_pool, batch.v_pool, out, window).launch(plan)
    assert_close(out, batch.expected(window), 20)
    alone = Batch([(250, 17)]).plan()
    assert alone.parted[0].row.tolist() == [0], "whatever stands beside it"
    monkeypatch.setattr(plans, "MAX_PARTED_TOKENS", 39)
    assert [rows.row.tolist() for rows in batch.plan().whole] == [[2, 3]]


@pytest.mark.parametrize("shares", [False, True])
def test_a_batch_filled_up_for_a_graph_attends_as_before(shares: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "COSTS", replace(plans.COSTS, segment=0.0))  # or a tree this small would not pay
    trunk = [0, 1, 2, 3] * 2
    batch = Batch([(128 + i, 1) for i in range(5)], tables=[[*trunk, 4 + i] for i in range(5)])
    arrays, shape = lay_out(*batch.host_arrays(), page_size=PAGE, group=2, shares=shares)
    assert (shape.num_parts > 0) == shares
    arrays, shape = padded(arrays, shape, 8)
    plan = plan_in(torch.from_numpy(packed(arrays)).to(DEVICE), shape)
    assert plan.slots.tolist() == [*range(128, 133), -1, -1, -1]
    q = torch.cat((batch.q, batch.q[:3]))
    out = torch.full(q.shape, torch.nan, device=DEVICE)
    if plan.tree is None:
        operands = batch.k_pool, batch.v_pool, plan.page_table, plan.length, plan.split[0]
        paged_attention(q, *operands, out, split=plans.SPLIT)
    else:
        tree_attention(q, batch.k_pool, batch.v_pool, plan.page_table, plan.positions, plan.tree, out)
    assert_close(out[:5], batch.expected(), 20)
    assert not out[5:].any()


def test_attention_refuses_operands_that_do_not_fit() -> None:
    batch = Batch([(9, 1)])
    out = batch.out()
    table, length = batch.on_device()
    rows = batch.ragged([0])
    with pytest.raises(ValueError, match="3 query heads are no multiple of 2 kv heads"):
        paged_attention(batch.q[:, :3], batch.k_pool, batch.v_pool, table, length, rows, out[:, :3])
    with pytest.raises(TypeError, match=r"k_pool must be .* or torch.int8 or torch.uint8, got torch.bfloat16"):
        paged_attention(batch.q, batch.k_pool.bfloat16(), batch.v_pool.bfloat16(), table, length, rows, out)
    with pytest.raises(TypeError, match=r"page_table must be torch.int32, got torch.int64"):
        paged_attention(batch.q, batch.k_pool, batch.v_pool, table.long(), length, rows, out)
    with pytest.raises(ValueError, match="split must be a multiple of 128, got 100"):
        paged_attention(batch.q, batch.k_pool, batch.v_pool, table, length, rows, out, split=100)
    with pytest.raises(ValueError, match=r"token must have the shape \(2\)"):
        paged_attention(batch.q, batch.k_pool, batch.v_pool, table, length, replace(rows, num_tokens=2), out)
