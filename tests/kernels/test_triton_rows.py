"""The Triton kernels that work row by row, against the references: odd widths, strides, three dtypes; and refusals."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.triton_setup import DEVICE, DTYPES, assert_close, ints, randn

from niwaki.kernels.copy_pages import copy_pages as copy_pages_torch
from niwaki.kernels.gelu_mul import gelu_mul_torch
from niwaki.kernels.rms_norm import qk_norm_torch, rms_norm_torch
from niwaki.kernels.rope import rope_tables, unrotated_tables
from niwaki.kernels.silu_mul import silu_mul_torch
from niwaki.kernels.clamped_mul import clamped_mul_torch
from niwaki.kernels.small_kv import KINDS, narrowed_torch, widened_torch
from niwaki.kernels.store_kv import rope_store_kv_torch
from niwaki.kernels.triton.bitmask import apply_bitmask, apply_bitmask_torch
from niwaki.kernels.triton.gate import clamped_mul, gelu_mul, silu_mul
from niwaki.kernels.triton.norm import add_rms_norm, qk_norm, rms_norm
from niwaki.kernels.triton.pages import copy_pages
from niwaki.kernels.triton.rope_store import rope_store_kv
from niwaki.kernels.triton.rows import gather_rows


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "width"), [(1, 1), (3, 7), (2, 320)])
def test_norms_match_the_reference(dtype: torch.dtype, tokens: int, width: int) -> None:
    x, delta = randn(0, tokens, width + 3, dtype=dtype)[:, :width], randn(1, tokens, width, dtype=dtype)
    weight, out = randn(2, width, dtype=dtype), torch.empty(tokens, width, dtype=dtype, device=DEVICE)
    rms_norm(x, weight, 1e-5, out, 1.0)
    assert_close(out, rms_norm_torch(x, weight, 1e-5, 1.0), 4)
    summed = x + delta
    add_rms_norm(x, delta, weight, 1e-5, out)
    assert_close(x, summed)
    assert_close(out, rms_norm_torch(x, weight, 1e-5), 4)
    rms_norm(x, weight, 1e-5, x)
    assert torch.equal(x, out), "a norm in place is the same norm"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("q_block", "k_block"), [(16, 16), (48, 24)])
def test_queries_and_keys_are_normalised_and_values_are_not(dtype: torch.dtype, q_block: int, k_block: int) -> None:
    qkv = randn(0, 3, 48 + 2 * 48, dtype=dtype)
    q_weight, k_weight = randn(1, q_block, dtype=dtype), randn(2, k_block, dtype=dtype)
    expected = qkv.clone()
    qk_norm_torch(expected, q_weight, k_weight, 48, 48, 1e-5, 1.0)
    values = qkv[:, 96:].clone()
    qk_norm(qkv, q_weight, k_weight, 48, 48, 1e-5, 1.0)
    assert_close(qkv, expected, 4)
    assert torch.equal(qkv[:, 96:], values)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "width"), [(1, 1), (3, 33), (2, 2500)])
def test_gates_match_the_reference(dtype: torch.dtype, tokens: int, width: int) -> None:
    gate_up, out = 4 * randn(0, tokens, 2 * width, dtype=dtype), torch.empty(tokens, width, dtype=dtype, device=DEVICE)
    silu_mul(gate_up, out)
    assert_close(out, silu_mul_torch(gate_up))
    gelu_mul(gate_up, out)
    assert_close(out, gelu_mul_torch(gate_up))
    clamped_mul(gate_up, out, 1.7, 3.0)
    assert_close(out, clamped_mul_torch(gate_up, 1.7, 3.0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "rotated"), [(4, 2, 16, 16), (3, 1, 80, 80), (2, 2, 24, 8)])
def test_rotation_and_store_match_the_reference(
    dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, rotated: int
) -> None:
    cos, sin = (table.to(DEVICE) for table in rope_tables(rotated, 10_000.0, None, 40))
    qkv = randn(0, 4, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    expected = qkv.clone()
    pools = [torch.zeros(3, 16, kv_heads, head_dim, dtype=dtype, device=DEVICE) for _ in range(4)]
    positions, slots = ints([0, 39, 7, 8]), ints([5, 47, 16, 20])
    rope_store_kv_torch(expected, cos, sin, positions.long(), slots.long(), pools[2], pools[3])
    rope_store_kv(qkv, cos, sin, positions, slots, pools[0], pools[1])
    q_width = heads * head_dim
    assert_close(qkv[:, :q_width], expected[:, :q_width])
    assert_close(pools[0], pools[2])
    assert torch.equal(pools[1], pools[3]), "values are moved, not computed"


def test_keys_that_are_their_own_values_are_stored_once() -> None:
    cos, sin = (table.to(DEVICE) for table in rope_tables(8, 10_000.0, None, 40))
    qkv = randn(0, 3, (3 + 1) * 24)
    expected = qkv.clone()
    pool, expected_pool = (torch.zeros(3, 16, 1, 24, device=DEVICE) for _ in range(2))
    positions, slots = ints([0, 39, 7]), ints([5, 47, 16])
    rope_store_kv_torch(expected, cos, sin, positions.long(), slots.long(), expected_pool, expected_pool[:0])
    rope_store_kv(qkv, cos, sin, positions, slots, pool, pool[:0])
    assert_close(qkv[:, : 3 * 24], expected[:, : 3 * 24])
    assert_close(pool, expected_pool)


def test_tokens_without_a_slot_are_left_alone_and_unrotated_layers_only_store() -> None:
    cos, sin = (table.to(DEVICE) for table in unrotated_tables(40))
    qkv = randn(0, 2, 4 * 16)
    before = qkv.clone()
    k_pool, v_pool = (torch.zeros(1, 16, 1, 16, device=DEVICE) for _ in range(2))
    rope_store_kv(qkv, cos, sin, ints([3, 3]), ints([-1, 3]), k_pool, v_pool)
    assert torch.equal(qkv, before)
    assert torch.equal(k_pool[0, 3, 0], qkv[1, 32:48])
    assert torch.equal(v_pool[0, 3, 0], qkv[1, 48:])
    assert int((k_pool != 0).any(-1).sum()) == 1


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("rotated", [16, 8])
def test_a_pool_of_8_bits_holds_numbers_and_their_scales(kind: torch.dtype, rotated: int) -> None:
    cos, sin = (table.to(DEVICE) for table in rope_tables(rotated, 10_000.0, None, 40))
    qkv = 100 * randn(0, 3, 6 * 16, dtype=torch.bfloat16)
    qkv[1] = 0
    turned = qkv.clone()
    wide = [torch.zeros(1, 16, 2, 16, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)]
    small = [torch.zeros(1, 16, 2, 16 + 4, dtype=kind, device=DEVICE) for _ in range(2)]
    positions, slots = ints([4, 5, 6]), ints([4, 5, 6])
    rope_store_kv_torch(turned, cos, sin, positions.long(), slots.long(), *wide)
    rope_store_kv(qkv, cos, sin, positions, slots, *small)
    assert_close(qkv[:, :32], turned[:, :32])
    for narrow, exact in zip(small, wide, strict=True):
        got, expected = widened_torch(narrow), widened_torch(narrowed_torch(exact, kind))
        largest = exact.float().abs().amax(-1, keepdim=True)
        # The reference has rounded to bfloat16 between: a number may fall to its neighbour.
        steps = largest / 127 if kind == torch.int8 else exact.float().abs() / 8 + largest / 448 / 512
        is_near = (got - expected).abs() <= 1.1 * steps
        if DEVICE.type != "cuda" and kind == torch.uint8:  # where it rounds up to a power of two,
            is_lost = (got - expected / 2).abs() < 0.01 * expected.abs()  # the interpreter loses the carry
            assert is_lost.float().mean() < 0.1, "zeros are not lost"
            is_near |= is_lost
        assert is_near.all()
        assert not got[0, :4].any()
        assert not got[0, 5].any()


@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")  # NumPy, for the interpreter
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_number_that_is_none_shows_in_its_own_scale(kind: torch.dtype) -> None:
    cos, sin = (table.to(DEVICE) for table in rope_tables(16, 10_000.0, None, 40))
    qkv = randn(0, 2, 6 * 16, dtype=torch.bfloat16)
    qkv[1, 2 * 16 + 5] = torch.nan
    k_pool, v_pool = (torch.zeros(1, 16, 2, 16 + 4, dtype=kind, device=DEVICE) for _ in range(2))
    rope_store_kv(qkv, cos, sin, ints([0, 1]), ints([0, 1]), k_pool, v_pool)
    keys = widened_torch(k_pool)[0]
    assert keys[1, 0].isnan().all()
    assert not keys[0].isnan().any()
    assert not keys[1, 1].isnan().any()
    assert not widened_torch(v_pool).isnan().any()


def test_rows_are_gathered_alone_and_in_pairs() -> None:
    x, other = randn(0, 5, 33, dtype=torch.bfloat16), randn(1, 5, 4100, dtype=torch.bfloat16)
    index = ints([4, 0, 4])
    out, other_out = torch.empty_like(x[:3]), torch.empty_like(other[:3])
    gather_rows(index, (x, out))
    assert torch.equal(out, x[[4, 0, 4]])
    out.zero_()
    gather_rows(index, (x, out), (other, other_out))
    assert torch.equal(out, x[[4, 0, 4]])
    assert torch.equal(other_out, other[[4, 0, 4]])


@pytest.mark.parametrize("vocab", [5, 64, 1030])
def test_a_bitmask_forbids_in_its_own_rows(vocab: int) -> None:
    logits = randn(0, 3, vocab)
    masks = torch.randint(-(2**31), 2**31, (2, -(-vocab // 32)), generator=torch.Generator().manual_seed(1)).int()
    masks, mask_of = masks.to(DEVICE), ints([1, -1, 0])
    expected = logits.clone()
    apply_bitmask_torch(expected, masks, mask_of)
    apply_bitmask(logits, masks, mask_of)
    assert torch.equal(logits, expected)
    assert torch.isinf(logits[0]).any()
    assert not torch.isinf(logits[1]).any()


def test_pages_are_copied_in_order_up_to_the_given_token() -> None:
    pool = randn(0, 2, 2, 6, 4, 2, 8)
    expected = pool.clone()
    copies = [(1, 4, 3), (4, 5, 2), (0, 2, 0), (3, 1, 4), (2, 3, 1)]  # chained, and over what was read before
    copy_pages_torch(expected, copies)
    copy_pages(pool, copies)
    assert torch.equal(pool, expected)
    for small in (torch.int8, torch.uint8):
        bytes_ = torch.randint(256, pool.shape, dtype=torch.uint8, device=DEVICE).view(small)
        copied = bytes_.clone()
        copy_pages_torch(copied, copies)
        copy_pages(bytes_, copies)
        assert torch.equal(bytes_, copied)
    with pytest.raises(ValueError, match="cannot copy 5 tokens from page 0 to page 6"):
        copy_pages(pool, [(0, 6, 5)])


def test_launches_refuse_operands_that_do_not_fit() -> None:
    x, weight = randn(0, 2, 8), randn(1, 8)
    with pytest.raises(ValueError, match=r"rms_norm: weight must have the shape \(8\), got \(7,\)"):
        rms_norm(x, weight[:7], 1e-5, x)
    with pytest.raises(TypeError, match=r"rms_norm: weight must be torch.float32, got torch.bfloat16"):
        rms_norm(x, weight.bfloat16(), 1e-5, x)
    with pytest.raises(TypeError, match=r"rms_norm: x must be torch.float32 or torch.bfloat16 or torch.float16"):
        rms_norm(x.double(), weight, 1e-5, x)
    with pytest.raises(ValueError, match="rms_norm: x must be contiguous in its last dimension"):
        rms_norm(randn(0, 8, 2).t(), weight, 1e-5, x)
    with pytest.raises(ValueError, match="rms_norm: weight must be on"):
        rms_norm(x, weight.to("meta"), 1e-5, x)
    with pytest.raises(ValueError, match="silu_mul: gate_up must have the shape"):
        silu_mul(x, x)
    pool = torch.zeros(1, 16, 1, 10, dtype=torch.int8, device=DEVICE)
    with pytest.raises(ValueError, match="a pool of 8 bits wants heads of a multiple of 4, got 6"):
        rope_store_kv(randn(0, 1, 18), randn(0, 9, 3), randn(0, 9, 3), ints([0]), ints([0]), pool, pool)
