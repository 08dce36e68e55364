"""CUDA graphs of decoding: a step whose rows add one token each is one launch instead of hundreds.

A graph is recorded the first time that a batch of its shape comes: the number of rows, the keys of the longest and the
tree's items, each rounded up (see `padded` of kernels/triton/plan.py). All that changes from step to step lies in one
buffer of whole numbers, written by one copy before the replay. Only an NVIDIA GPU ever comes here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from niwaki.kernels.plan import AttentionPlan
from niwaki.kernels.segments import Int32s
from niwaki.kernels.triton.plan import BatchShape, packed, padded, plan_in
from niwaki.runtime.forward.recording import Recorder
from niwaki.runtime.models.decoder import Decoder

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)
MAX_GRAPHS = 256  # each holds some megabytes; beyond that the one that was not used for longest goes


@dataclass(frozen=True, slots=True)
class Recorded:
    graph: torch.cuda.CUDAGraph
    host: torch.Tensor  # int32, pinned
    inputs: torch.Tensor  # int32, on the device
    token_ids: torch.Tensor  # int32 [rows], of `inputs`
    logits: torch.Tensor  # float32 [rows, vocab], of the memory of all graphs
    has_copied: torch.cuda.Event  # `host` may be written again
    memory: object  # buffers that the graph writes to


class DecodeGraphs:
    """The graphs of one model. `blank` is a plan whose device half is put in for each graph."""

    def __init__(self, model: Decoder, device: torch.device, blank: AttentionPlan, recorder: Recorder) -> None:
        self._model = model
        self._device = device
        self._blank = blank
        self._recorder = recorder
        self._recorded: dict[BatchShape, Recorded] = {}
        # Of all graphs: the logits of each by itself, of 17 batch sizes and ever longer rows, would come to gigabytes.
        self._logits: torch.Tensor | None = None

    def forward(
        self, arrays: Mapping[str, Int32s], shape: BatchShape, drawn: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """Logits float32 [tokens, vocab] of a batch of single tokens, good until the next step; None for one of more
        rows than graphs are for. `drawn`: the tokens, on the device, in place of those in `arrays`."""
        rows = next((rows for rows in ROWS if rows >= shape.num_tokens), None)
        if rows is None:
            return None
        filled, filled_shape = padded(arrays, shape, rows)
        recorded = self._recorded.pop(filled_shape, None)
        if recorded is None:
            if len(self._recorded) >= MAX_GRAPHS:  # the one whose last step is longest over
                del self._recorded[next(iter(self._recorded))]
            recorded = self._record(filled, filled_shape)
        self._recorded[filled_shape] = recorded  # behind all others
        recorded.has_copied.synchronize()
        recorded.host.copy_(torch.from_numpy(packed(filled)))
        recorded.inputs.copy_(recorded.host, non_blocking=True)
        recorded.has_copied.record()
        if drawn is not None:
            recorded.token_ids[: shape.num_tokens].copy_(drawn)
        recorded.graph.replay()
        return recorded.logits[: shape.num_tokens]

    def _record(self, arrays: Mapping[str, Int32s], shape: BatchShape) -> Recorded:
        host = torch.from_numpy(packed(arrays)).pin_memory()
        inputs = host.to(self._device)
        on_device = plan_in(inputs, shape)
        plan = replace(self._blank, num_tokens=shape.num_tokens, on_device=on_device)
        with self._recorder.beside():
            first = self._model.forward(on_device.token_ids, plan, None)  # stores what the replay will store again
            if self._logits is None:
                self._logits = first.new_empty((ROWS[-1], first.shape[1]))
            logits = self._logits[: shape.num_tokens]
            with self._recorder.recording() as recording:
                self._model.forward(on_device.token_ids, plan, None, out=logits)
        (graph,) = recording.graphs
        memory = self._model.buffers(shape.num_tokens)
        has_copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        return Recorded(graph, host, inputs, on_device.token_ids, logits, has_copied, memory)
