"""What the tests of models share: a model of transformers beside its folder, and prompts fed in random pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from niwaki.runtime.forward.runner import Row, Runner

Ids = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Pair:
    """The same random weights in transformers and on disk."""

    reference: PreTrainedModel
    folder: Path

    def in_float32(self) -> Pair:
        """The same stored weights, computed in float32. (`.float()` on the model keeps its rounded frequencies.)"""
        return Pair(open_reference(self.folder, torch.float32), self.folder)

    def logits(self, ids: Ids) -> torch.Tensor:
        with torch.inference_mode():
            out = self.reference(torch.from_numpy(ids.astype(np.int64))[None]).logits[0]
        assert isinstance(out, torch.Tensor)
        return out.float()


def open_reference(folder: Path, dtype: torch.dtype, **options: object) -> PreTrainedModel:
    # Not its fused attention, which knows no soft cap.
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager", **options).eval()
    assert isinstance(model, PreTrainedModel)
    return model


@dataclass
class Sequenced:
    """A prompt on its way through the runner: pages, position, and the logits so far."""

    ids: Ids
    page_ids: list[int]
    done: int = 0
    logits: list[torch.Tensor] = field(default_factory=list)


def run(runner: Runner, sequences: Sequence[Sequenced], rng: np.random.Generator, largest: int = 64) -> None:
    """Feed all sequences to their end: in each step some of them, shuffled, each with a chunk of random length."""
    while waiting := [s for s in sequences if s.done < len(s.ids)]:
        batch = [waiting[i] for i in rng.permutation(len(waiting))[: rng.integers(1, len(waiting) + 1)]]
        counts = [
            min(len(s.ids) - s.done, 1 if rng.random() < 0.5 else int(rng.integers(1, largest + 1))) for s in batch
        ]
        rows = [Row(s.ids[s.done : s.done + n], s.done, s.page_ids, n) for s, n in zip(batch, counts, strict=True)]
        parts = torch.split(runner.forward(rows).cpu(), counts)  # not the device's memory, which the next step takes
        for sequence, count, part in zip(batch, counts, parts, strict=True):
            sequence.done += count
            sequence.logits.append(part)


def difference(sequence: Sequenced, expected: torch.Tensor) -> float:
    got = torch.cat(sequence.logits)
    return float((got - expected[-len(got) :]).abs().max())
