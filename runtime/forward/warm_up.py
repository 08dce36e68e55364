"""The first steps of a model on a GPU: one of each kind, so that its kernels are compiled and loaded before anybody
waits for them. They are compiled once on a machine, and loaded in each process.

What a kernel is compiled for does not hang on how many rows and keys there are (see the arguments that are not
specialised in kernels/triton/), so a step of each kind is enough. The pool must not hold anything yet.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from niwaki.kernels.triton.paged_attention import MAX_SPLIT_TOKENS
from niwaki.kernels.triton.plan import PARTED_SPLIT, SPLIT
from niwaki.radix.pages import PageCopy
from niwaki.runtime.api import SamplingParams
from niwaki.runtime.forward.runner import Row, Runner
from niwaki.runtime.sampling.device_sampler import sample_on_device
from niwaki.runtime.sampling.sampler import SampleRow

MANY = 1024  # tokens for which weights in few bits, and experts, have other kernels than for few
LOGITS = 32  # as many for the head
BRANCHES = 16  # of a text of so many tokens: reading that once pays
TRUNK = 1024


def warm_up(runner: Runner) -> None:
    """Run them, as far as the pool has room for their keys."""
    for rows in _steps(runner):
        logits = runner.forward(rows)
    params = SamplingParams(temperature=0.8, repetition_penalty=1.1)
    all_tokens = np.full((runner.config.vocab_size + 31) // 32, 0xFFFFFFFF, np.uint32)
    sample_on_device(logits[:1], [SampleRow(params, 0, 0, all_tokens, [0], [0])])
    runner.copy_pages([PageCopy(0, runner.num_pages - 1, 1)])


def _steps(runner: Runner) -> Iterator[list[Row]]:
    page_size = runner.page_size
    room = min(runner.num_pages * page_size, runner.config.context_length)
    few = 1, 2, MAX_SPLIT_TOKENS + 1
    # The largest first: graphs would keep the memory that it grows out of.
    for start, counts in ((0, (MANY, *few)), (SPLIT, few), (PARTED_SPLIT, few)):
        for count in counts:
            if start + count <= room:
                yield [_row(start, count, range(-(-(start + count) // page_size)))]
    trunk = -(-TRUNK // page_size)
    if trunk * page_size < room and trunk + BRANCHES <= runner.num_pages:
        yield [_row(trunk * page_size, 1, [*range(trunk), trunk + branch]) for branch in range(BRANCHES)]


def _row(start: int, count: int, page_ids: Sequence[int]) -> Row:
    return Row(np.zeros(count, np.int32), start, page_ids, min(count, LOGITS))
