"""Attention of other projects over the same cache, timed beside ours where they are installed: FlashInfer, and
FlashAttention 3. They are asked for nothing else, and nothing else of niwaki knows them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np
import torch

from niwaki.kernels.triton.case import PAGE, Run

if TYPE_CHECKING:
    from niwaki.kernels.triton.attention_cases import Cache

MODULES = {"FlashInfer": "flashinfer", "FA3": "flash_attn_interface"}
WORKSPACE = 256 << 20  # bytes, of which FlashInfer lays out its parts


def presence() -> dict[str, str]:
    """Of each whether it can be timed here."""
    return {name: "installed" if find_spec(module) else "not installed" for name, module in MODULES.items()}


def decode_peers(cache: Cache) -> dict[str, Run]:
    """Of single tokens over pages, on a GPU."""
    return _present(cache, {"FlashInfer": _flashinfer_decode, "FA3": _fa3_decode})


def prefill_peers(cache: Cache) -> dict[str, Run]:
    """Of whole prompts of one length, on a GPU."""
    return _present(cache, {"FA3": _fa3_prefill})


def _present(cache: Cache, makers: Mapping[str, Callable[[Cache], Run]]) -> dict[str, Run]:
    if cache.device.type != "cuda":
        return {}
    return {name: made_late(make, cache) for name, make in makers.items() if find_spec(MODULES[name])}


def made_late(make: Callable[[Cache], Run], cache: Cache) -> Run:
    """Made when first run: what fails then is told as that peer's fault."""
    made: list[Run] = []

    def run() -> torch.Tensor:
        if not made:
            made.append(make(cache))
        return made[0]()

    return run


def _flashinfer_decode(cache: Cache) -> Run:
    flashinfer = import_module(MODULES["FlashInfer"])
    heads, head_dim = cache.q.shape[1:]
    lengths = cache.starts + cache.counts
    pages = -(-lengths // PAGE)
    used = [row[:count] for row, count in zip(cache.table, pages.tolist(), strict=True)]
    workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=cache.device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=cache.group > 1)
    wrapper.plan(
        _ints(np.concatenate(([0], np.cumsum(pages))), cache),
        _ints(np.concatenate(used), cache),
        _ints((lengths - 1) % PAGE + 1, cache),
        heads,
        heads // cache.group,
        head_dim,
        PAGE,
        q_data_type=cache.q.dtype,
        kv_data_type=cache.k_pool.dtype,
    )
    pools = cache.k_pool, cache.v_pool
    return lambda: wrapper.run(cache.q, pools)


def _fa3_decode(cache: Cache) -> Run:
    attend = import_module(MODULES["FA3"]).flash_attn_with_kvcache
    table, lengths = _ints(cache.table, cache), _ints(cache.starts + cache.counts, cache)
    q = cache.q[:, None]
    return lambda: attend(q, cache.k_pool, cache.v_pool, cache_seqlens=lengths, page_table=table, causal=True)


def _fa3_prefill(cache: Cache) -> Run:
    attend = import_module(MODULES["FA3"]).flash_attn_func
    q, keys, values = (part.transpose(1, 2).contiguous() for part in cache.dense())
    return lambda: attend(q, keys, values, causal=True)


def _ints(array: np.ndarray[tuple[int, ...], np.dtype[np.integer]], cache: Cache) -> torch.Tensor:
    return torch.from_numpy(array.astype(np.int32)).to(cache.device)
