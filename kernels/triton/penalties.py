"""What changes logits before a token is drawn from them: penalties, bias and forbidden tokens, a program a row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from niwaki.kernels.triton.launch import check, launch


@dataclass(frozen=True, slots=True)
class Changes:
    """What changes logits before they are drawn from: tokens of row i from bounds[i] to bounds[i + 1], each once."""

    bounds: torch.Tensor  # int32 [rows + 1]
    token: torch.Tensor  # int32 [changes], within the vocabulary
    count: torch.Tensor  # int32 [changes] times in the output
    is_seen: torch.Tensor  # int32 [changes] 1: in the prompt or the output, for the repetition penalty
    bias: torch.Tensor  # float32 [changes]; -inf: forbidden
    penalties: torch.Tensor  # float32 [rows, 3] repetition, frequency, presence


def change_logits(logits: torch.Tensor, changes: Changes) -> None:
    """In place, logits float32 [rows, vocab]: of a token that was seen, x / repetition above 0 and x * repetition below
    (Keskar et al., arXiv 1909.05858); minus count x frequency + presence where count > 0; plus bias."""
    name, device = "change_logits", logits.device
    check(name, "logits", logits, (None, None), torch.float32, device)
    rows = len(logits)
    check(name, "bounds", changes.bounds, (rows + 1,), torch.int32, device, contiguous=True)
    check(name, "token", changes.token, (None,), torch.int32, device, contiguous=True)
    for label, tensor in (("count", changes.count), ("is_seen", changes.is_seen)):
        check(name, label, tensor, changes.token.shape, torch.int32, device, contiguous=True)
    check(name, "bias", changes.bias, changes.token.shape, torch.float32, device, contiguous=True)
    check(name, "penalties", changes.penalties, (rows, 3), torch.float32, device, contiguous=True)
    launch(
        _change_logits,
        (rows,),
        logits, changes.bounds, changes.token, changes.count, changes.is_seen, changes.bias, changes.penalties,
        logits.stride(0),
        BLOCK=256,
        num_warps=4,
    )  # fmt: skip


@triton.jit
def _change_logits(
    logits_ptr, bounds_ptr, token_ptr, count_ptr, seen_ptr, bias_ptr, penalty_ptr, stride, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    repetition = tl.load(penalty_ptr + 3 * row)
    frequency = tl.load(penalty_ptr + 3 * row + 1)
    presence = tl.load(penalty_ptr + 3 * row + 2)
    end = tl.load(bounds_ptr + row + 1)
    for start in range(tl.load(bounds_ptr + row), end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < end
        target = logits_ptr + row * stride + tl.load(token_ptr + at, mask=inside, other=0)
        x = tl.load(target, mask=inside, other=0.0)
        is_seen = tl.load(seen_ptr + at, mask=inside, other=0) != 0
        x = tl.where(is_seen, tl.where(x > 0.0, x / repetition, x * repetition), x)
        count = tl.load(count_ptr + at, mask=inside, other=0)
        x = tl.where(count > 0, x - (count.to(tl.float32) * frequency + presence), x)
        tl.store(target, x + tl.load(bias_ptr + at, mask=inside, other=0.0), mask=inside)
