"""Attention of rows with many new tokens: gather the row's keys and values from its pages, then dense causal attention.

torch's fused CPU attention reads grouped heads without repeating them. Its causal mode aligns the first query with the
first key, so a row that continues a cached prefix brings an explicit mask. The alternative, causal over the new keys
merged with unmasked attention over the cached ones by log-sum-exp, was 10 % faster at 128 to 512 new tokens and
rounds bfloat16 four times as coarsely; not taken.

Under a sliding window, or in chunks, a long row is cut into pieces, each of which gathers only the pages that it sees.
A soft cap stands between the scores and their softmax, where the fused attention does not reach: those rows go by the
formula.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from niwaki.kernels.operand import Operand
from niwaki.kernels.partial import NOTHING, Partial, finish
from niwaki.kernels.plan import PrefillRow
from niwaki.kernels.rule import NO_CAP, PLAIN, AttentionRule
from niwaki.kernels.segments import Int32s
from niwaki.kernels.shared_prefix import flash_attention

MAX_PIECE = 256  # queries of a row at a time, where there is a window or a cap: bounds the scores held at once


def prefill_attention(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    rows: Sequence[PrefillRow],
    out: torch.Tensor,
    rule: AttentionRule = PLAIN,
    partial: Partial = NOTHING,
) -> None:
    """For each row, query t of its `count` sees keys 0 to start + t of its pages, as far back as `rule` lets it.

    Other rows of `out` stay as they are. Keys before a row's first_key are not read: `partial` holds what its tokens
    got from them (CPU only; the rule is one that `shared_prefix.can_share` allows).

    q, out [tokens, heads, head_dim], any strides; k_pool, v_pool [pages, page_size, kv_heads, head_dim]; one dtype.
    """
    page_size, kv_heads, head_dim = k_pool.shape[1:]
    if not (q.dtype == k_pool.dtype == v_pool.dtype == out.dtype):
        raise TypeError(
            f"prefill_attention: one dtype is needed, got {q.dtype}, {k_pool.dtype}, {v_pool.dtype}, {out.dtype}"
        )
    if q.shape != out.shape or q.shape[2] != head_dim or q.shape[1] % kv_heads or k_pool.shape != v_pool.shape:
        raise ValueError(
            f"prefill_attention: shapes do not fit: q {tuple(q.shape)}, out {tuple(out.shape)}, "
            f"k_pool {tuple(k_pool.shape)}, v_pool {tuple(v_pool.shape)}"
        )
    scale = rule.scale_for(head_dim)
    for row in _pieces(rows, rule):
        if row.first_key:
            _finish_row(q, k_pool, v_pool, row, out, rule, partial)
            continue
        used = row.start + row.count
        own = row.start // rule.chunk * rule.chunk  # a piece lies in one chunk
        skipped = rule.first_seen(row.start) // page_size  # pages that no query of this piece sees
        first = skipped * page_size
        pages = index_of(row.page_ids[skipped : -(-used // page_size)], q.device)
        keys = k_pool.index_select(0, pages).view(-1, kv_heads, head_dim)[: used - first]
        values = v_pool.index_select(0, pages).view(-1, kv_heads, head_dim)[: used - first]
        new = slice(row.first, row.first + row.count)
        mask = None
        if row.start or rule.window < used or rule.soft_cap != NO_CAP:
            mask = torch.ones((row.count, used - first), dtype=torch.bool, device=q.device).tril_(row.start - first)
        if mask is not None and rule.window < used:
            mask.triu_(row.start - first + 1 - rule.window)
        if mask is not None and own > first:
            mask[:, : own - first] = False
        if mask is not None and rule.soft_cap != NO_CAP:
            out[new] = _capped_attention(q[new], keys, values, mask, scale, rule.soft_cap)
            continue
        queries = q[new].transpose(0, 1)[None]  # [1, heads, count, head_dim]
        keys, values = keys.transpose(0, 1)[None], values.transpose(0, 1)[None]
        if rule.sinks is not None:
            added = None if mask is None else torch.zeros(mask.shape, dtype=q.dtype).masked_fill_(~mask, -torch.inf)
            part, lse = flash_attention(queries, keys, values, is_causal=mask is None, attn_mask=added, scale=scale)
            out[new] = _sunk(part, lse, rule.sinks.tensor)[0][0].transpose(0, 1)
            continue
        mixed = scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=mask,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=kv_heads != q.shape[1],
        )
        out[new] = mixed[0].transpose(0, 1)


def _finish_row(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    row: PrefillRow,
    out: torch.Tensor,
    rule: AttentionRule,
    partial: Partial,
) -> None:
    """A row whose first keys several rows share: its attention to the others, merged with `partial`."""
    page_size, kv_heads, head_dim = k_pool.shape[1:]
    used = row.start + row.count
    pages = index_of(row.page_ids[row.first_key // page_size : -(-used // page_size)], q.device)
    keys, values = (
        pool.index_select(0, pages).view(-1, kv_heads, head_dim)[: used - row.first_key].transpose(0, 1)[None]
        for pool in (k_pool, v_pool)
    )
    mask = None
    if row.start > row.first_key:
        mask = q.new_full((row.count, used - row.first_key), -torch.inf).triu_(row.start - row.first_key + 1)
    queries = q[row.first : row.first + row.count].transpose(0, 1)[None]
    scale = rule.scale_for(head_dim)
    part, lse = flash_attention(queries, keys, values, is_causal=mask is None, attn_mask=mask, scale=scale)
    if rule.sinks is not None:
        part, lse = _sunk(part, lse, rule.sinks.tensor)
    target = Operand.of(out).array
    assert target is not None, "partial attention is the CPU's own"
    finish(part, lse, row.first, partial, target)


def _sunk(part: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """part [1, heads, count, head_dim] and lse [1, heads, count] with a score more for each head, of no value."""
    sinks = sinks[None, :, None]
    return part * (lse - sinks).sigmoid()[..., None].to(part.dtype), torch.logaddexp(lse, sinks)


def index_of(page_ids: Int32s, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(page_ids.astype(np.int64)).to(device)


def _pieces(rows: Sequence[PrefillRow], rule: AttentionRule) -> Iterator[PrefillRow]:
    """The rows, cut at chunks, and to at most MAX_PIECE queries where that saves work or memory."""
    for row in rows:
        is_whole = rule.soft_cap == NO_CAP and row.start + row.count <= rule.window + MAX_PIECE
        step = row.count if is_whole else MAX_PIECE
        done = 0
        while done < row.count:
            start = row.start + done
            count = min(step, row.count - done, rule.chunk - start % rule.chunk)
            yield PrefillRow(row.first + done, count, start, row.page_ids, row.first_key)
            done += count


def _capped_attention(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, scale: float, cap: float
) -> torch.Tensor:
    """q [count, heads, head_dim], keys, values [used, kv_heads, head_dim], mask bool [count, used]. In float32."""
    (count, heads, head_dim), kv_heads = q.shape, keys.shape[1]
    grouped = q.float().view(count, kv_heads, -1, head_dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, head_dim)
    scores = torch.bmm(grouped, keys.float().permute(1, 2, 0)).mul_(scale / cap).tanh_().mul_(cap)
    by_head = scores.view(kv_heads, -1, *mask.shape)  # [kv_heads, group, count, used]
    weights = by_head.masked_fill_(~mask, -torch.inf).softmax(-1).view(scores.shape)
    mixed = torch.bmm(weights, values.float().permute(1, 0, 2)).view(heads, count, head_dim)
    return mixed.transpose(0, 1).to(q.dtype)


def prefill_attention_torch(
    q: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    rows: Sequence[PrefillRow],
    out: torch.Tensor,
    rule: AttentionRule = PLAIN,
) -> None:
    """The reference: the formula in float32."""
    kv_heads, head_dim = k_pool.shape[2:]
    group = q.shape[1] // kv_heads
    for row in rows:
        used = row.start + row.count
        pages = index_of(row.page_ids, q.device)
        keys = k_pool[pages].reshape(-1, kv_heads, head_dim)[:used].float()
        values = v_pool[pages].reshape(-1, kv_heads, head_dim)[:used].float()
        queries = q[row.first : row.first + row.count].float().reshape(row.count, kv_heads, group, head_dim)
        scores = torch.einsum("qhgd,khd->hgqk", queries, keys) * rule.scale_for(head_dim)
        if rule.soft_cap != NO_CAP:
            scores = rule.soft_cap * torch.tanh(scores / rule.soft_cap)
        at = torch.arange(row.start, used, device=q.device)[:, None]
        key_at = torch.arange(used, device=q.device)
        seen = (key_at <= at) & (key_at > at - rule.window) & (key_at >= at // rule.chunk * rule.chunk)
        scores = scores.masked_fill(~seen, -torch.inf)
        if rule.sinks is not None:
            sinks = rule.sinks.tensor.view(kv_heads, group, 1, 1).expand(-1, -1, row.count, 1)
            scores = torch.cat((scores, sinks), -1)
        weights = scores.softmax(-1)[..., :used]
        mixed = torch.einsum("hgqk,khd->qhgd", weights, values)
        out[row.first : row.first + row.count] = mixed.reshape(row.count, -1, head_dim).to(out.dtype)
