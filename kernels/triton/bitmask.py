"""Logits of forbidden tokens become -inf: token t of a row is allowed where bit t % 32 of word t // 32 is set.

A batch mixes constrained rows and free ones, so a row names its mask, or none. `sample.py` reads masks itself; this is
for whoever needs the masked logits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from niwaki.kernels.triton.launch import FLOATS, ceil_div, check, launch

BLOCK = 1024


def apply_bitmask(logits: torch.Tensor, masks: torch.Tensor, mask_of: torch.Tensor) -> None:
    """In place. logits [rows, vocab], masks int32 [masks, ceil(vocab / 32)], mask_of int32 [rows]: its mask, below 0
    for none; within bounds, which is not checked."""
    name = "apply_bitmask"
    check(name, "logits", logits, (None, None), FLOATS, logits.device)
    rows, vocab = logits.shape
    check(name, "masks", masks, (None, ceil_div(vocab, 32)), torch.int32, logits.device)
    check(name, "mask_of", mask_of, (rows,), torch.int32, logits.device, contiguous=True)
    launch(
        _apply_bitmask,
        (rows, ceil_div(vocab, BLOCK)),
        logits, masks, mask_of, vocab, logits.stride(0), masks.stride(0),
        BLOCK=BLOCK,
        num_warps=4,
    )  # fmt: skip


def apply_bitmask_torch(logits: torch.Tensor, masks: torch.Tensor, mask_of: torch.Tensor) -> None:
    """The reference of `apply_bitmask`."""
    tokens = torch.arange(logits.shape[1], device=logits.device)
    allowed = (masks[mask_of.clamp(min=0).long()][:, tokens // 32] >> (tokens % 32)) & 1 == 1
    logits.masked_fill_(~allowed & (mask_of >= 0)[:, None], -torch.inf)


@triton.jit
def _apply_bitmask(logits_ptr, mask_ptr, mask_of_ptr, vocab, logits_stride, mask_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    mask = tl.load(mask_of_ptr + row).to(tl.int64)
    if mask >= 0:
        token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = token < vocab
        word = tl.load(mask_ptr + mask * mask_stride + token // 32, mask=inside, other=-1)
        is_forbidden = ((word >> (token % 32)) & 1) == 0
        tl.store(logits_ptr + row * logits_stride + token, -float("inf"), mask=inside & is_forbidden)
