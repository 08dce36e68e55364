"""The loop that all attention kernels share: fold a range of paged keys into a running softmax (arXiv 2112.05682).

For a block of scores s and values v, with m the highest score so far:
    m' = max(m, max s);  l' = l 2^(m - m') + sum 2^(s - m');  acc' = acc 2^(m - m') + 2^(s - m') v
and at the end out = acc / l, lse = m + log2 l. Scores are q k^T x scale, which is above 0, then cap x tanh(score / cap)
where there is a cap, then times log2 e, so that the exponentials are powers of two. Blocks begin at multiples of
BLOCK_N whatever the batch, so a query's sums depend on its own keys alone. Of a pool of 8 bits (kernels/small_kv.py)
scores are multiplied by their keys' scales, and weights by their values'.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def first_seen_by(query_at, window, chunk):
    """The first key that a query at `query_at` sees: AttentionRule.first_seen."""
    return tl.maximum(query_at - window + 1, query_at // chunk * chunk)


@triton.jit
def attend_keys(
    q,  # [BLOCK_M, BLOCK_D], in the type of the products
    query_at,  # [BLOCK_M] positions; below 0: no query, which sees no key
    first_seen,  # [BLOCK_M] the first key that each query sees
    k_ptr,  # of this kv head, as are the three after it
    v_ptr,
    k_scale_ptr,  # read only where IS_SMALL
    v_scale_ptr,
    pages_ptr,  # the row's page table
    begin,  # a multiple of BLOCK_N, as is the next
    whole,  # every query sees every key before it
    end,
    first_key,  # keys before it belong to someone else
    scale,
    soft_cap,
    token_stride,  # elements between two slots of the pool, four times the scales between them
    PAGE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_CAP: tl.constexpr,
    IS_SMALL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """out [BLOCK_M, BLOCK_D] and lse [BLOCK_M] to base 2; 0 and -inf where a query saw no key."""
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    highest = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc, highest, total = _fold_keys(
        acc, highest, total, q, query_at, first_seen, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, pages_ptr, begin,
        whole, first_key, scale, soft_cap, token_stride, PAGE, HEAD_DIM, BLOCK_D, BLOCK_N, False, HAS_CAP, IS_SMALL,
        PRECISION,
    )  # fmt: skip
    acc, highest, total = _fold_keys(
        acc, highest, total, q, query_at, first_seen, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, pages_ptr, whole,
        end, first_key, scale, soft_cap, token_stride, PAGE, HEAD_DIM, BLOCK_D, BLOCK_N, True, HAS_CAP, IS_SMALL,
        PRECISION,
    )  # fmt: skip
    some = total > 0.0
    out = acc / tl.where(some, total, 1.0)[:, None]
    return out, tl.where(some, highest + tl.log2(tl.where(some, total, 1.0)), -float("inf"))


@triton.jit
def _fold_keys(
    acc,
    highest,
    total,
    q,
    query_at,
    first_seen,
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    pages_ptr,
    begin,
    end,
    first_key,
    scale,
    soft_cap,
    token_stride,
    PAGE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    IS_MASKED: tl.constexpr,  # False: every query sees every key of the range
    HAS_CAP: tl.constexpr,
    IS_SMALL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    d = tl.arange(0, BLOCK_D)
    to_base_2 = LOG2_E if HAS_CAP else scale * LOG2_E
    ahead = begin + tl.arange(0, BLOCK_N)
    page = tl.load(pages_ptr + ahead // PAGE, mask=ahead < end, other=0)
    for start in range(begin, end, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        inside = n < end
        slot = (page.to(tl.int64) * PAGE + n % PAGE) * token_stride
        # A block ahead of its keys: loads whose address waits for another load are not kept in flight.
        page = tl.load(pages_ptr + (n + BLOCK_N) // PAGE, mask=n + BLOCK_N < end, other=0)
        is_read = (d < HEAD_DIM)[None, :] & (inside[:, None] if IS_MASKED else True)
        k = tl.load(k_ptr + slot[:, None] + d[None, :], mask=is_read, other=0.0)
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION)
        if IS_SMALL:
            scores = scores * tl.load(k_scale_ptr + slot // 4, mask=inside, other=0.0)[None, :]
        if HAS_CAP:
            scores = soft_cap * (2.0 * tl.sigmoid(2.0 * scale * scores / soft_cap) - 1.0)
        if IS_MASKED:
            seen = (n[None, :] <= query_at[:, None]) & (n[None, :] >= first_seen[:, None])
            scores = tl.where(seen & (inside & (n >= first_key))[None, :], scores, -float("inf"))
        higher = tl.maximum(highest, tl.max(scores, 1) * to_base_2)
        shift = tl.where(higher == -float("inf"), 0.0, higher)
        weights = tl.exp2(scores * to_base_2 - shift[:, None])
        shrink = tl.exp2(highest - shift)
        total = total * shrink + tl.sum(weights, 1)
        if IS_SMALL:
            weights = weights * tl.load(v_scale_ptr + slot // 4, mask=inside, other=0.0)[None, :]
        v = tl.load(v_ptr + slot[:, None] + d[None, :], mask=is_read, other=0.0)
        mixed = tl.dot(weights.to(q.dtype), v.to(q.dtype), input_precision=PRECISION)
        acc = acc * shrink[:, None] + mixed
        highest = higher
    return acc, highest, total
