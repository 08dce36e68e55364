"""A model that is exactly right about a known set of texts, behind the runner's interface: for tests of distributions.

It says what a perfectly trained model would: of the texts that go on as the prompt's continuation does so far, in the
tokenizer's own cut, each with its weight. Its "KV cache" holds token ids, so that a row that reads a wrong page shows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt
import torch

from niwaki.radix.pages import PageCopy
from niwaki.runtime.forward.runner import Batch

UNTOLD = -30.0  # logit of what it never says


class OracleRunner:
    """`texts`: token ids behind the prompt -> weight. Where they are left, every token is as likely as any other."""

    def __init__(
        self,
        texts: Mapping[tuple[int, ...], float],
        num_prompt: int,
        vocab_size: int,
        end_id: int,
        num_pages: int,
        page_size: int = 16,
    ) -> None:
        self.config = SimpleNamespace(vocab_size=vocab_size, eos_ids=(end_id,))
        self.num_rows = 0
        self._num_prompt = num_prompt
        self._page_size = page_size
        self._slots = np.full(num_pages * page_size, -1, np.int32)
        self._next: dict[tuple[int, ...], dict[int, float]] = {}
        for ids, weight in texts.items():
            whole = (*ids, end_id)
            for i, token_id in enumerate(whole):
                row = self._next.setdefault(whole[:i], {})
                row[token_id] = row.get(token_id, 0.0) + weight

    def forward(self, batch: Batch) -> torch.Tensor:
        spans, first = batch.spans, 0
        wanted = range(len(batch.token_ids)) if batch.wanted is None else batch.wanted.tolist()
        out: list[npt.NDArray[np.float32]] = []
        for start, count, page_ids in zip(spans.starts.tolist(), spans.counts.tolist(), spans.table, strict=True):
            self.num_rows += 1
            positions = np.arange(start + count)
            places = page_ids[positions // self._page_size] * self._page_size + positions % self._page_size
            self._slots[places[start:]] = batch.token_ids[first : first + count]
            ids = self._slots[places]
            assert (ids >= 0).all(), "a row reads a slot that nobody wrote"
            ends = [start + i - first + 1 for i in wanted if first <= i < first + count]
            out += [self._logits(tuple(ids[self._num_prompt : end].tolist())) for end in ends]
            first += count
        shape = (len(out), self.config.vocab_size)
        return torch.from_numpy(np.stack(out)) if out else torch.empty(shape, dtype=torch.float32)

    def host_planes(self) -> None: ...

    def copy_pages(self, copies: Sequence[PageCopy]) -> None:
        size = self._page_size
        for copy in copies:
            source = copy.src * size
            self._slots[copy.dst * size :][: copy.num_tokens] = self._slots[source : source + copy.num_tokens]

    def _logits(self, so_far: tuple[int, ...]) -> npt.NDArray[np.float32]:
        logits = np.full(self.config.vocab_size, UNTOLD, np.float32)
        known = self._next.get(so_far)
        if known is None:
            logits[:] = 0.0
        else:
            logits[list(known)] = np.log(list(known.values()))
        return logits
