"""CUDA graphs of small ragged steps, in pieces: what lies between two attentions is recorded, attention is launched.

Which kernels attention takes, on which grids, depends on every row. All else sees tokens alone: so a step is filled up
to one of a few sizes, and what is recorded for that size is replayed, a graph from each attention to the next. What is
added belongs to no row: it is stored nowhere and attends to nothing. Only an NVIDIA GPU ever comes here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from niwaki.kernels.plan import AttentionPlan
from niwaki.kernels.segments import Int32s
from niwaki.kernels.transfer import on_device
from niwaki.kernels.triton.attend import AttentionCall
from niwaki.kernels.triton.plan import BatchShape, DevicePlan, packed, plan_in, with_tokens
from niwaki.runtime.forward.recording import Recorder
from niwaki.runtime.models.decoder import Decoder

# Tokens. The head is computed for all of them, and a larger step keeps a GPU busy while its kernels are launched.
SIZES = (8, 16, 32, 64, 128, 256)


@dataclass(frozen=True, slots=True)
class Pieces:
    """A step of one size: `graphs[i]`, then `calls[i]`, and at last one graph more."""

    graphs: tuple[torch.cuda.CUDAGraph, ...]
    calls: tuple[AttentionCall, ...]
    inputs: torch.Tensor  # int32 [3 x tokens]: ids, positions, slots, as they begin a packed batch
    attended: torch.Tensor  # [tokens, heads x head_dim], which the calls write
    logits: torch.Tensor  # float32 [tokens, vocab], of the memory of all sizes
    memory: object  # buffers that the graphs write to


class PieceGraphs:
    """The recorded steps of one model. `blank` is a plan whose device half is put in for each."""

    def __init__(self, model: Decoder, device: torch.device, blank: AttentionPlan, recorder: Recorder) -> None:
        self._model = model
        self._device = device
        self._blank = blank
        self._recorder = recorder
        self._recorded: dict[int, Pieces] = {}
        self._logits: torch.Tensor | None = None

    def forward(
        self,
        arrays: Mapping[str, Int32s],
        shape: BatchShape,
        wanted: npt.NDArray[np.int64] | None,
        drawn: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Logits float32 of the tokens `wanted`, of all where it is None, good until the next step; None for a step
        that is too large, or wants none. `drawn`: the tokens, on the device, in place of those in `arrays`."""
        tokens = shape.num_tokens
        size = next((size for size in SIZES if size >= tokens), None)
        if size is None or (wanted is not None and not len(wanted)):
            return None
        pieces = self._recorded.get(size)
        if pieces is None:
            pieces = self._recorded[size] = self._record(size)
        index = None if wanted is None else on_device(wanted, self._device)
        filled, filled_shape = with_tokens(arrays, shape, size)
        batch = on_device(packed(filled), self._device)
        plan = plan_in(batch, filled_shape)
        pieces.inputs.copy_(batch[: 3 * size])
        if drawn is not None:
            pieces.inputs[:tokens].copy_(drawn)
        pieces.attended[tokens:].zero_()  # whatever a larger step has left there
        for graph, call in zip(pieces.graphs, pieces.calls, strict=False):
            graph.replay()
            call.launch(plan)
        pieces.graphs[-1].replay()
        return pieces.logits[:tokens] if index is None else pieces.logits.index_select(0, index)

    def _record(self, size: int) -> Pieces:
        inputs = torch.zeros(3 * size, dtype=torch.int32, device=self._device)
        inputs[2 * size :].fill_(-1)  # nothing is stored
        attended = self._model.buffers(size).attended.tensor.zero_()
        calls: list[AttentionCall] = []
        with self._recorder.beside():
            first = self._forward(inputs, lambda call: None)
            if self._logits is None:
                self._logits = first.new_empty((SIZES[-1], first.shape[1]))
            logits = self._logits[:size]
            with self._recorder.recording() as recording:

                def part(call: AttentionCall) -> None:
                    recording.cut()
                    calls.append(call)

                self._forward(inputs, part, logits)
        graphs = tuple(recording.graphs)
        return Pieces(graphs, tuple(calls), inputs, attended, logits, self._model.buffers(size))

    def _forward(
        self, inputs: torch.Tensor, put_off: Callable[[AttentionCall], None], out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Over these inputs, but for the attentions, of which it tells."""
        ids, positions, slots = inputs.view(3, -1).unbind()
        none = ids[:0]
        half = DevicePlan(len(ids), ids, positions, slots, none.view(0, 0), none, (), (), (), None, put_off)
        plan = replace(self._blank, num_tokens=len(ids), on_device=half)
        return self._model.forward(ids, plan, None, out=out)
