"""Every CPU kernel against its torch twin: odd shapes, both dtypes, strides; and what the launch functions refuse."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from niwaki.kernels import jit
from niwaki.kernels.copy_pages import copy_pages, read_pages, write_pages
from niwaki.kernels.linear import MIN_PARALLEL_ELEMENTS, linear_few_rows, linear_torch
from niwaki.kernels.numeric import exp_f32, load, store
from niwaki.kernels.operand import Array, Operand
from niwaki.kernels.ops import NumbaOps, TorchOps, array_of, ops_for
from niwaki.kernels.packed import columns_of, packed_linear
from niwaki.kernels.plan import Span, make_plan
from niwaki.kernels.rope import Llama3Scaling, inverse_frequencies, rope_tables, rotate_torch, unrotated_tables
from niwaki.kernels.store_kv import turn_rows
from niwaki.kernels.tiles import WHOLE
from tests.kernels.inputs import DTYPES, close, plan_of, randn

CPU = torch.device("cpu")


# ---------------------------------------------------------------------------------------------------------------
# Scalars
# ---------------------------------------------------------------------------------------------------------------


@jit.jit()
def _exp_all(x: Array, out: Array) -> None:
    for i in range(len(x)):
        out[i] = exp_f32(x[i])


@jit.jit()
def _convert(x: Array, out: Array) -> None:
    for i in range(len(x)):
        out[i] = store(load(x[i]), out[0])


def test_the_exponential_is_exact_to_float32_and_keeps_nan() -> None:
    x = np.linspace(-87, 88, 200_001, dtype=np.float32)
    got = np.empty_like(x)
    _exp_all(x, got)
    assert np.abs(got / np.exp(x.astype(np.float64)) - 1).max() < 5e-7
    special = np.array([-np.inf, -1e30, 0.0, 1e30, np.nan], np.float32)
    got = np.empty_like(special)
    _exp_all(special, got)
    assert got[0] == got[1] < 1e-37
    assert got[2] == 1.0
    assert 1e38 < got[3] < np.inf
    assert np.isnan(got[4])


def test_bfloat16_rounds_as_torch_does() -> None:
    x = torch.cat([randn(0, 20_000) * 10.0 ** torch.arange(-20, 20).repeat(500), torch.tensor([0.0, -0.0, torch.inf])])
    bits = np.empty(len(x), np.uint16)
    _convert(x.numpy(), bits)
    expected = x.bfloat16()
    assert np.array_equal(bits, expected.view(torch.uint16).numpy())
    back = np.empty(len(x), np.float32)
    _convert(bits, back)
    assert np.array_equal(back, expected.float().numpy())
    nans = np.array([0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF], np.uint32).view(np.float32)
    _convert(nans, bits[:3])
    assert torch.from_numpy(bits[:3]).view(torch.bfloat16).isnan().all()


# ---------------------------------------------------------------------------------------------------------------
# Row by row
# ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "width"), [(1, 1), (1, 320), (3, 7), (5, 256), (2, 33), (12, 320)])
def test_norms_and_gates_match_torch(dtype: torch.dtype, tokens: int, width: int) -> None:
    x, delta = randn(1, tokens, width, dtype=dtype), randn(2, tokens, width, dtype=dtype)
    weight = randn(3, width, dtype=dtype)
    gate_up = 4 * randn(4, tokens, 2 * width, dtype=dtype)
    results: list[tuple[torch.Tensor, ...]] = []
    for ops in (NumbaOps(), TorchOps()):
        residual = x.clone()
        normed, offset, added, gated, gelued, clamped = (torch.empty_like(x) for _ in range(6))
        ops.rms_norm(Operand.of(x), Operand.of(weight), 1e-5, Operand.of(normed))
        ops.rms_norm(Operand.of(x), Operand.of(weight), 1e-5, Operand.of(offset), 1.0)
        ops.add_rms_norm(Operand.of(residual), Operand.of(delta), Operand.of(weight), 1e-5, Operand.of(added))
        ops.silu_mul(Operand.of(gate_up), Operand.of(gated))
        ops.gelu_mul(Operand.of(gate_up), Operand.of(gelued))
        ops.clamped_mul(Operand.of(gate_up), Operand.of(clamped), 1.7, 3.0)
        in_place = x.clone()
        ops.rms_norm(Operand.of(in_place), Operand.of(weight), 1e-5, Operand.of(in_place))
        results.append((normed, offset, residual, added, gated, gelued, clamped, in_place))
    for got, expected in zip(*results, strict=True):
        assert close(got, expected)
    assert torch.equal(results[0][0], results[0][-1]), "a norm in place is the same norm"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("q_block", "k_block"), [(16, 16), (64, 32), (1, 1)])
def test_queries_and_keys_are_normalised_by_head_or_whole_and_values_are_not(
    dtype: torch.dtype, q_block: int, k_block: int
) -> None:
    qkv = randn(0, 5, 64 + 2 * 32, dtype=dtype)
    q_weight, k_weight = (Operand.of(randn(i, n, dtype=dtype)) for i, n in ((1, q_block), (2, k_block)))
    got, expected = qkv.clone(), qkv.clone()
    for ops, out in ((NumbaOps(), got), (TorchOps(), expected)):
        ops.qk_norm(Operand.of(out), q_weight, k_weight, (64, 32), 1e-5, 1.0)
    assert close(got, expected)
    assert torch.equal(got[:, 96:], qkv[:, 96:])
    first = qkv[2, :q_block].float()
    by_hand = first / (first.square().mean() + 1e-5).sqrt() * (q_weight.tensor.float() + 1)
    assert torch.allclose(got[2, :q_block].float(), by_hand, rtol=1e-2, atol=1e-2)


def test_a_nan_stays_in_its_own_row() -> None:
    x = randn(0, 3, 64)
    x[1, 5] = torch.nan
    out = torch.empty_like(x)
    NumbaOps().rms_norm(Operand.of(x), Operand.of(torch.ones(64)), 1e-5, Operand.of(out))
    assert out.isnan().all(1).tolist() == [False, True, False]
    assert not out[[0, 2]].isnan().any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(1, 1, 2), (4, 2, 16), (8, 1, 32), (6, 6, 80), (8, 2, 128)]
)
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_rotation_and_store_match_torch(
    dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, page_size: int
) -> None:
    cos, sin = rope_tables(head_dim, 10_000.0, Llama3Scaling(8.0, 1.0, 4.0, 32), 100)
    plan = plan_of([(0, 3), (61, 1), (17, 9)], page_size, 120)
    qkv = randn(0, plan.num_tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    results = []
    for ops in (NumbaOps(), TorchOps()):
        rotated = qkv.clone()
        k_pool, v_pool = (torch.full((120, page_size, kv_heads, head_dim), 7.0, dtype=dtype) for _ in range(2))
        ops.rope_store_kv(
            Operand.of(rotated), Operand.of(cos), Operand.of(sin), plan, Operand.of(k_pool), Operand.of(v_pool)
        )
        results.append((rotated[:, : heads * head_dim], k_pool, v_pool))
    for got, expected in zip(*results, strict=True):
        assert close(got, expected)
    assert torch.equal(results[0][2], results[1][2]), "values are moved, not computed"


def test_keys_that_are_their_own_values_are_stored_once() -> None:
    cos, sin = rope_tables(8, 10_000.0, None, 100)
    plan = plan_of([(0, 3), (61, 1)], 4, 60)
    qkv = randn(0, plan.num_tokens, (3 + 1) * 32)
    results = []
    for ops in (NumbaOps(), TorchOps()):
        turned, pool = qkv.clone(), torch.zeros(60, 4, 1, 32)
        ops.rope_store_kv(
            Operand.of(turned), Operand.of(cos), Operand.of(sin), plan, Operand.of(pool), Operand.of(pool[:0])
        )
        results.append((turned[:, : 3 * 32], pool))
    for got, expected in zip(*results, strict=True):
        assert close(got, expected)
    keys = results[0][1].view(-1, 32)[torch.from_numpy(plan.slots)]
    assert torch.equal(keys[:, 8:], qkv[:, 3 * 32 + 8 :])


@pytest.mark.parametrize("rotated", [0, 8, 24])
def test_a_partial_rotation_leaves_the_last_channels_of_a_head_alone(rotated: int) -> None:
    heads, kv_heads, head_dim = 4, 2, 32
    cos, sin = rope_tables(rotated, 10_000.0, None, 100) if rotated else unrotated_tables(100)
    plan = plan_of([(0, 3), (61, 1)], 4, 60)
    qkv = randn(0, plan.num_tokens, (heads + 2 * kv_heads) * head_dim)
    results = []
    for ops in (NumbaOps(), TorchOps()):
        turned = qkv.clone()
        k_pool, v_pool = torch.zeros(60, 4, kv_heads, head_dim), torch.zeros(60, 4, kv_heads, head_dim)
        ops.rope_store_kv(
            Operand.of(turned), Operand.of(cos), Operand.of(sin), plan, Operand.of(k_pool), Operand.of(v_pool)
        )
        results.append((turned[:, : heads * head_dim], k_pool, v_pool))
    for got, expected in zip(*results, strict=True):
        assert close(got, expected)
    before, after = (x[:, : heads * head_dim].view(-1, heads, head_dim) for x in (qkv, results[0][0]))
    assert torch.equal(after[..., rotated:], before[..., rotated:])
    assert not rotated or not torch.equal(after[1:, :, :rotated], before[1:, :, :rotated])
    keys = results[0][1].view(-1, kv_heads, head_dim)[torch.from_numpy(plan.slots)]
    stored = qkv[:, heads * head_dim : -kv_heads * head_dim].view(-1, kv_heads, head_dim)
    assert torch.equal(keys[..., rotated:], stored[..., rotated:])


@pytest.mark.parametrize(("rotated", "head_dim"), [(0, 32), (8, 32), (64, 64), (72, 96)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_queries_of_some_tokens_are_turned_as_those_of_all(rotated: int, head_dim: int, dtype: torch.dtype) -> None:
    heads, kv_heads = 3, 1
    cos, sin = rope_tables(rotated, 10_000.0, None, 100) if rotated else unrotated_tables(100)
    plan = plan_of([(0, 3), (61, 1), (17, 9)], 4, 60)
    qkv = randn(0, plan.num_tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    some, width = np.array([1, 3, 12]), heads * head_dim
    spread = Operand.of(torch.full_like(qkv, 7.0))
    q, c, s = (array_of(Operand.of(each)) for each in (qkv[some, :width], cos, sin))
    turn_rows(q, head_dim, c, s, plan.positions, some, array_of(spread))
    expected = torch.full_like(qkv, 7.0)
    turned = rotate_torch(qkv[some, :width].view(3, heads, head_dim), cos, sin, torch.from_numpy(plan.positions[some]))
    expected[some, :width] = turned.reshape(3, width)
    assert close(spread.tensor, expected)


def test_rotation_keeps_lengths_and_depends_on_distance_alone() -> None:
    cos, sin = rope_tables(32, 10_000.0, None, 200)
    q, k = randn(0, 1, 1, 32), randn(1, 1, 1, 32)

    def score(query_at: int, key_at: int) -> float:
        at = [rotate_torch(x, cos, sin, torch.tensor([p])) for x, p in ((q, query_at), (k, key_at))]
        return float((at[0] * at[1]).sum())

    assert rotate_torch(q, cos, sin, torch.tensor([150])).norm() == pytest.approx(float(q.norm()), rel=1e-5)
    assert score(5, 3) == pytest.approx(score(190, 188), abs=1e-3)
    assert score(5, 3) != pytest.approx(score(5, 4), abs=1e-3)


def test_llama3_scaling_keeps_short_wavelengths_and_stretches_long_ones() -> None:
    plain = inverse_frequencies(64, 500_000.0, None)
    scaled = inverse_frequencies(64, 500_000.0, Llama3Scaling(8.0, 1.0, 4.0, 8192))
    assert torch.equal(scaled[:8], plain[:8])
    assert torch.allclose(scaled[-8:], plain[-8:] / 8)
    assert ((scaled <= plain) & (scaled >= plain / 8 * 0.999)).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (7, 5), (64, 33), (320, 100)])
def test_a_product_of_few_rows_matches_torch(dtype: torch.dtype, has_bias: bool, inputs: int, outputs: int) -> None:
    weight = randn(0, outputs, inputs, dtype=dtype)
    bias = randn(1, outputs, dtype=dtype) if has_bias else None
    for rows in range(1, 20):  # both sides of the size from which torch takes over
        x = randn(rows, rows, inputs, dtype=dtype)
        got, expected = (torch.empty(rows, outputs, dtype=dtype) for _ in range(2))
        for ops, out in ((NumbaOps(), got), (TorchOps(), expected)):
            ops.linear(Operand.of(x), Operand.of(weight), None if bias is None else Operand.of(bias), Operand.of(out))
        tolerance = 1e-5 if dtype == torch.float32 else 2**-7
        assert torch.allclose(got.float(), expected.float(), rtol=tolerance, atol=tolerance * inputs**0.5)


@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="this CPU has no bfloat16 tiles")
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (7, 5), (64, 33), (320, 100)])
def test_a_packed_product_matches_torch(has_bias: bool, inputs: int, outputs: int) -> None:
    weight = randn(0, outputs, inputs, dtype=torch.bfloat16)
    bias = randn(1, outputs, dtype=torch.bfloat16) if has_bias else None
    packed = packed_linear(weight, bias)
    assert packed is not None
    for rows in (1, 2, 16, 17, 32, 33, 70):
        x = randn(rows, rows, inputs, dtype=torch.bfloat16)
        got, expected = (torch.empty(rows, outputs, dtype=torch.bfloat16) for _ in range(2))
        packed.forward(Operand.of(x), Operand.of(got))
        linear_torch(x, weight, bias, expected)
        assert torch.allclose(got.float(), expected.float(), rtol=2**-7, atol=2**-7 * inputs**0.5)


@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="this CPU has no bfloat16 tiles")
@pytest.mark.parametrize("inputs", [1000, 992])  # those of a whole number of tiles are read where they lie
def test_no_row_of_a_packed_product_depends_on_the_rows_beside_it_or_on_threads(inputs: int) -> None:
    packed = packed_linear(randn(0, 700, inputs, dtype=torch.bfloat16), None)
    assert packed is not None
    x = randn(1, 772, inputs, dtype=torch.bfloat16)  # twice what goes at once and some; work for two threads
    whole, again, alone = torch.empty(772, 700), torch.empty(772, 700), torch.empty(1, 700)
    packed.forward(Operand.of(x), Operand.of(whole))
    before = jit.get_num_threads()
    try:
        jit.set_num_threads(2)
        packed.forward(Operand.of(x), Operand.of(again))
    finally:
        jit.set_num_threads(before)
    assert torch.equal(again, whole)
    for row in (0, 15, 16, 33, 767, 771):
        packed.forward(Operand.of(x[row : row + 1]), Operand.of(alone))
        assert torch.equal(alone[0], whole[row])
    for count in (15, 16, 17, 31, 33, 47, 48):  # each way that the last tiles of rows may lie
        some = torch.empty(count, 700, dtype=torch.bfloat16)
        packed.forward(Operand.of(x[:count]), Operand.of(some))
        assert torch.equal(some, whole[:count].bfloat16())


@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="this CPU has no bfloat16 tiles")
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("inputs", [32, 96, 352, 544])  # sums are written 32, 16, 4 and 2 rows at a time
def test_blocks_of_rows_have_the_numbers_of_rows_alone(inputs: int, has_bias: bool) -> None:
    outputs, bias = 1100, randn(3, 1100, dtype=torch.bfloat16) if has_bias else None  # the last block is not whole
    packed = packed_linear(randn(0, outputs, inputs, dtype=torch.bfloat16), bias)
    assert packed is not None
    x = randn(1, 1061, inputs, dtype=torch.bfloat16)  # 33 blocks, and rows behind them
    whole, alone = torch.empty(1061, outputs, dtype=torch.bfloat16), torch.empty(1, outputs, dtype=torch.bfloat16)
    packed.forward(Operand.of(x), Operand.of(whole))
    for row in range(0, 1061, 53):
        packed.forward(Operand.of(x[row : row + 1]), Operand.of(alone))
        assert torch.equal(alone[0], whole[row])


@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="this CPU has no bfloat16 tiles")
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_packed_product_may_end_in_its_gates(has_bias: bool) -> None:
    inputs, width = 544, 560
    weight = randn(0, 2 * width, inputs, dtype=torch.bfloat16) / inputs**0.5
    bias = randn(3, 2 * width, dtype=torch.bfloat16) if has_bias else None
    packed = packed_linear(weight, bias)
    assert packed is not None
    x = randn(1, 300, inputs, dtype=torch.bfloat16)
    out = torch.empty(300, width, dtype=torch.bfloat16)

    def gated(rows: torch.Tensor, to: torch.Tensor) -> None:
        x, w, added, y = map(array_of, (Operand.of(rows), packed.weight, packed.bias, Operand.of(to)))
        columns_of(x, w, added, y, width // 16, WHOLE, 0, width // 16)

    gated(x, out)
    product = torch.nn.functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    gates, ups = product.chunk(2, -1)
    torch.testing.assert_close(out.float(), torch.nn.functional.silu(gates) * ups, atol=0.02, rtol=0.02)
    alone = torch.empty(1, width, dtype=torch.bfloat16)  # too few to go 32 by 32
    for row in range(0, 300, 13):
        gated(x[row : row + 1], alone)
        assert torch.equal(alone[0], out[row])


def test_only_bfloat16_is_packed() -> None:
    assert packed_linear(torch.ones(4, 4), None) is None


def test_threads_change_no_product() -> None:
    x, weight = randn(0, 5, 1024), randn(1, MIN_PARALLEL_ELEMENTS // 1024 + 1, 1024)
    outs = []
    before = jit.get_num_threads()
    try:
        for threads in (1, 2):
            jit.set_num_threads(threads)
            out = torch.empty(5, len(weight))
            linear_few_rows(x.numpy(), weight.numpy(), None, out.numpy())
            outs.append(out)
    finally:
        jit.set_num_threads(before)
    assert torch.equal(*outs)


# ---------------------------------------------------------------------------------------------------------------
# Plans and pages
# ---------------------------------------------------------------------------------------------------------------


def test_a_plan_places_each_token_on_its_page() -> None:
    plan = make_plan([Span(3, 2, [5, 9]), Span(0, 9, [1, 0, 7]), Span(4, 1, [2, 8, 3])], page_size=4, num_pages=10)
    assert plan.positions.tolist() == [3, 4, *range(9), 4]
    assert plan.slots.tolist() == [23, 36, 4, 5, 6, 7, 0, 1, 2, 3, 28, 32]
    assert plan.decode.token.tolist() == [0, 1, 11]
    assert plan.decode.table_row.tolist() == [0, 0, 2]
    assert plan.decode.length.tolist() == [4, 5, 5]
    (row,) = plan.prefill
    assert (row.first, row.count, row.start, row.page_ids.tolist()) == (2, 9, 0, [1, 0, 7])


@pytest.mark.parametrize(
    ("span", "message"),
    [
        (Span(0, 0, [1]), "at least one new token"),
        (Span(-1, 1, [1]), "at least one new token"),
        (Span(3, 2, [1]), "needs 2 pages of 4 for 3 cached and 2 new tokens, got 1"),
        (Span(0, 1, [10]), "outside the pool of 10"),
        (Span(0, 1, [0, -1]), "outside the pool of 10"),
    ],
)
def test_a_span_that_would_leave_the_pool_is_refused(span: Span, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_plan([Span(0, 1, [0]), span], page_size=4, num_pages=10)


def test_a_page_is_copied_up_to_the_given_token_in_every_layer() -> None:
    pool = randn(0, 3, 2, 6, 4, 2, 8)
    before = pool.clone()
    copy_pages(pool, [(1, 4, 3), (4, 5, 2), (0, 2, 0)])
    assert torch.equal(pool[:, :, 4, :3], before[:, :, 1, :3])
    assert torch.equal(pool[:, :, 5, :2], before[:, :, 1, :2])
    changed = torch.zeros(6, 4, dtype=torch.bool)
    changed[4, :3] = changed[5, :2] = True
    assert torch.equal(pool[:, :, ~changed], before[:, :, ~changed])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pages_come_back_as_they_were_read_wherever_each_of_them_lies(dtype: torch.dtype) -> None:
    pool = randn(0, 3, 2, 6, 4, 2, 8, dtype=dtype)
    before = pool.clone()
    contents = read_pages(pool, [4, 1])
    write_pages(pool, [0, 5], [page.copy() for page in contents])
    write_pages(pool, [2, 3], contents)
    assert torch.equal(pool, before[:, :, [4, 1, 4, 1, 4, 1]])
    for wrong in ([*contents, contents[0]], contents[:, :-1], contents[:, :6]):
        with pytest.raises(ValueError, match=r"more pages than ids|reshape"):
            write_pages(pool, [0, 5], wrong)
    after = pool.clone()
    assert write_pages(pool, [0, 5], []) == 0
    assert torch.equal(pool, after)
    pool[:] = before
    assert write_pages(pool, [0, 5], (page for page in contents[:1])) == 1, "those that come"
    assert torch.equal(pool, before[:, :, [4, 1, 2, 3, 4, 5]])


# ---------------------------------------------------------------------------------------------------------------
# Refusals
# ---------------------------------------------------------------------------------------------------------------


def test_a_kernel_refuses_arrays_that_do_not_fit() -> None:
    ops = NumbaOps()
    x, weight = Operand.of(randn(0, 2, 8)), Operand.of(randn(1, 8))
    with pytest.raises(ValueError, match=r"rms_norm: weight must have the shape \(8,\), got \(7,\)"):
        ops.rms_norm(x, Operand.of(randn(1, 7)), 1e-5, x)
    with pytest.raises(TypeError, match="rms_norm: weight must be float32 like the others, got uint16"):
        ops.rms_norm(x, Operand.of(randn(1, 8, dtype=torch.bfloat16)), 1e-5, x)
    doubled, doubled_weight = (Operand.of(operand.tensor.double()) for operand in (x, weight))
    with pytest.raises(TypeError, match="float32, or bfloat16 seen as uint16"):
        ops.rms_norm(doubled, doubled_weight, 1e-5, doubled)
    with pytest.raises(ValueError, match="contiguous in its last dimension"):
        ops.rms_norm(Operand.of(randn(0, 8, 2).t()), weight, 1e-5, x)
    with pytest.raises(ValueError, match="silu_mul: gate_up must have the shape"):
        ops.silu_mul(x, x)


def test_attention_refuses_pools_and_queries_that_do_not_fit() -> None:
    ops = NumbaOps()
    pool = Operand.of(randn(0, 8, 4, 2, 16))
    for spans, prefix in (([(9, 1)], "paged_decode_attention"), ([(0, 20)], "prefill_attention")):
        plan = plan_of(spans, 4, 8)
        for heads, head_dim, dtype in ((3, 16, torch.float32), (4, 8, torch.float32), (4, 16, torch.bfloat16)):
            q = Operand.of(randn(1, plan.num_tokens, heads, head_dim, dtype=dtype))
            with pytest.raises((ValueError, TypeError), match=prefix):
                ops.attend(q, pool, pool, plan, q)


def test_rotation_refuses_positions_beyond_its_tables() -> None:
    cos, sin = (Operand.of(table) for table in rope_tables(16, 10_000.0, None, 10))
    pool = Operand.of(torch.zeros(4, 4, 1, 16))
    qkv = Operand.of(randn(0, 1, 48))
    with pytest.raises(ValueError, match="position 10 is beyond the 10 positions"):
        NumbaOps().rope_store_kv(qkv, cos, sin, plan_of([(10, 1)], 4, 4), pool, pool)
    assert not pool.tensor.any()


def test_the_cpu_gets_numba_and_other_devices_the_references() -> None:
    assert isinstance(ops_for(CPU), NumbaOps)
    assert isinstance(ops_for(torch.device("meta")), TorchOps)
    operand = Operand.of(torch.empty(1, 4, device="meta"))
    with pytest.raises(TypeError, match="a CPU kernel was given a tensor on meta"):
        NumbaOps().silu_mul(operand, operand)
