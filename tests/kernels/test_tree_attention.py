"""Tree attention gives what one pass over all keys gives: random trees of branches, both dtypes, every kind of row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from niwaki.kernels.operand import Operand
from niwaki.kernels.ops import NumbaOps, TorchOps
from niwaki.kernels.partial import Partial, take
from niwaki.kernels.plan import AttentionPlan, Span, make_plan
from niwaki.kernels.rule import PLAIN, AttentionRule
from niwaki.kernels.segments import Costs
from niwaki.kernels.shared_prefix import can_share, costs_for
from niwaki.kernels.tiles import has_matrix_unit
from niwaki.kernels.vector_tiles import multiplies_pairs

ALWAYS = Costs(paged_pair=1.0, dense_pair=0.0, key=1.0, query=0.0, segment=0.0)
NUM_PAGES = 500
SHAPES = [
    (1, 1, 16, 1),
    (4, 2, 64, 16),
    (6, 2, 64, 16),
    (20, 1, 128, 32),
    (8, 1, 64, 4),
    (6, 2, 80, 16),
    (10, 5, 32, 16),
    (7, 1, 24, 3),
]


def branches(seed: int, page_size: int) -> list[Span]:
    """Rows on a random tree: forks of forks, decoding, forced runs and chunks of prompts, some with nothing shared."""
    random = np.random.default_rng(seed)
    free = random.permutation(NUM_PAGES).tolist()
    if seed % 3 == 0:
        free.sort(reverse=True)  # pages in a row, as in a fresh pool
    paths: list[list[int]] = [[]]
    for _ in range(random.integers(1, 6)):
        trunk = paths[random.integers(len(paths))]
        paths.append([*trunk, *(free.pop() for _ in range(random.integers(1, 8)))])
    spans = []
    for _ in range(random.integers(2, 10)):
        path = paths[random.integers(len(paths))]
        own_cached, count = int(random.integers(0, 40)), int(random.choice([1, 1, 2, 8, 9, 40]))
        start = len(path) * page_size + own_cached
        own_pages = -(-(own_cached + count) // page_size)
        spans.append(Span(start, count, [*path, *(free.pop() for _ in range(own_pages))]))
    return spans


def plan_of(spans: Sequence[Span], page_size: int, costs: Costs | None) -> AttentionPlan:
    return make_plan(spans, page_size=page_size, num_pages=NUM_PAGES, costs=costs)


def attend(
    ops: NumbaOps | TorchOps, plan: AttentionPlan, q: torch.Tensor, pools: Sequence[torch.Tensor], rule: AttentionRule
) -> torch.Tensor:
    out = torch.full(q.shape, torch.nan, dtype=q.dtype)
    keys, values = (Operand.of(pool) for pool in pools)
    ops.attend(Operand.of(q), keys, values, plan, Operand.of(out), rule)
    return out


def random_inputs(
    plan: AttentionPlan, shape: tuple[int, int, int, int], dtype: torch.dtype
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    heads, kv_heads, head_dim, page_size = shape
    generator = torch.Generator().manual_seed(plan.num_tokens)
    pools = [torch.randn((NUM_PAGES, page_size, kv_heads, head_dim), generator=generator).to(dtype) for _ in "kv"]
    # Queries lie inside a wider row, as in the fused projection.
    q = 2 * torch.randn((plan.num_tokens, heads + 3, head_dim), generator=generator).to(dtype)[:, :heads]
    return q, pools


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_tree_of_branches_attends_as_one_pass_does(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    shared = 0
    for seed in range(12):
        spans = branches(seed, shape[3])
        tree, flat = plan_of(spans, shape[3], ALWAYS), plan_of(spans, shape[3], None)
        shared += tree.shared is not None
        q, pools = random_inputs(tree, shape, dtype)
        got, expected = attend(NumbaOps(), tree, q, pools, PLAIN), attend(TorchOps(), flat, q, pools, PLAIN)
        assert (got.float() - expected.float()).abs().max() < (1e-5 if dtype == torch.float32 else 3e-2), f"seed {seed}"
    assert shared > 6


@pytest.mark.parametrize(
    "rule",
    [
        AttentionRule(window=30),
        AttentionRule(soft_cap=3.0),
        AttentionRule(chunk=50),
        AttentionRule(window=3000, scale=0.3),
        AttentionRule(window=3000, sinks=Operand.of(torch.tensor([1.0, -2.0, 0.0, 3.0]))),
    ],
    ids=str,
)
def test_windows_caps_chunks_and_sinks_attend_right_with_a_tree_too(rule: AttentionRule) -> None:
    shape = (4, 2, 32, 16)
    for seed in range(6):
        spans = branches(seed, 16)
        tree, flat = plan_of(spans, 16, ALWAYS), plan_of(spans, 16, None)
        if tree.shared is not None:
            assert can_share(tree.shared, rule) == (rule.window == 3000)
        q, pools = random_inputs(tree, shape, torch.float32)
        got, expected = attend(NumbaOps(), tree, q, pools, rule), attend(TorchOps(), flat, q, pools, rule)
        assert (got - expected).abs().max() < 2e-5


def test_a_window_that_ends_with_the_longest_row_still_shares() -> None:
    spans = [Span(40, 1, [1, 2, 3]), Span(37, 2, [1, 2, 4])]
    shared = plan_of(spans, 16, ALWAYS).shared
    assert shared is not None
    assert can_share(shared, AttentionRule(window=41))
    assert not can_share(shared, AttentionRule(window=40))


def test_shared_keys_are_not_read_again_by_the_rows() -> None:
    """With the shared pages' keys made NaN for the rows' own pass, only a second reading could see them."""
    spans = [Span(36, 1, [1, 2, 3]), Span(33, 2, [1, 2, 4]), Span(40, 30, [1, 2, 5, 6, 7])]
    plan = plan_of(spans, 16, ALWAYS)
    assert plan.shared is not None
    (segment,) = plan.shared.segments
    assert segment.tokens.tolist() == list(range(33))
    assert plan.shared.decode.first_key.tolist() == [32, 32, 32]
    assert [row.first_key for row in plan.shared.prefill] == [32]
    q, pools = random_inputs(plan, (4, 2, 32, 16), torch.float32)
    whole = attend(NumbaOps(), plan, q, pools, PLAIN)
    hidden = [pool.clone() for pool in pools]
    for pool in hidden:
        pool[9:11] = pool[1:3]
        pool[1:3] = torch.nan
    table = plan.page_table.copy()
    table[:, :2] = 9, 10
    moved = replace(plan, shared=replace(plan.shared, flat=replace(plan.shared.flat, table=table)))
    assert torch.equal(attend(NumbaOps(), moved, q, hidden, PLAIN), whole)


def test_nan_in_one_branch_harms_no_other() -> None:
    spans = [Span(40, 1, [1, 2, page]) for page in (3, 4, 5)]
    plan = plan_of(spans, 16, ALWAYS)
    assert plan.shared is not None
    q, pools = random_inputs(plan, (4, 2, 32, 16), torch.float32)
    q[1, 2, 5] = torch.nan
    out = attend(NumbaOps(), plan, q, pools, PLAIN)
    assert out[1, 2].isnan().all()
    assert int(out.isnan().any(-1).sum()) == 1


def test_merging_parts_is_exact_however_far_apart_their_sums_are() -> None:
    """Two parts of one query: with log-sum-exps of +-80, either may vanish beside the other, neither may overflow."""
    first, second = torch.tensor([1.0, -2.0]), torch.tensor([5.0, 3.0])
    tokens = np.zeros(1, np.int32)
    for a, b in ((0.0, 0.0), (80.0, -80.0), (-80.0, 80.0), (1.0, -3.0), (500.0, 499.0)):
        into = Partial.empty(1, 1, 2)
        take(first.view(1, 1, 1, 2), torch.tensor([[[a]]]), tokens, into, is_first=True)
        take(second.view(1, 1, 1, 2), torch.tensor([[[b]]]), tokens, into, is_first=False)
        weights = torch.tensor([a, b], dtype=torch.float64).softmax(0)
        expected = weights[0] * first.double() + weights[1] * second.double()
        assert torch.allclose(torch.from_numpy(into.mixed[0, 0]).double(), expected, atol=1e-6)
        assert into.lse[0, 0] == pytest.approx(float(torch.tensor([a, b], dtype=torch.float64).logsumexp(0)), abs=1e-5)


def test_the_costs_of_this_processor_share_long_prefixes_and_leave_short_ones() -> None:
    costs = costs_for(4, 2, 64, 16, torch.bfloat16)
    for pages, rows, pays in ((32, 32, True), (32, 8, True), (1, 2, False), (2, 3, False)):
        spans = [Span(pages * 16 + 3, 1, [*range(pages), pages + row]) for row in range(rows)]
        assert (plan_of(spans, 16, costs).shared is not None) == pays, f"{rows} rows over {pages} pages"


@pytest.mark.skipif(not multiplies_pairs() and not has_matrix_unit(), reason="there merging costs less than reading")
def test_the_costs_of_this_processor_let_long_rows_read_what_is_near_by_themselves() -> None:
    costs = costs_for(4, 2, 64, 16, torch.bfloat16)
    for tokens, pays in ((10, True), (64, False)):
        spans = [Span(512, tokens, [*range(32), *range(32 + 4 * row, 36 + 4 * row)]) for row in range(32)]
        assert (plan_of(spans, 16, costs).shared is not None) == pays, f"rows of {tokens}"
