"""Records CUDA graphs: on a stream of its own, over memory that all graphs of a model share.

`torch.cuda.graph` does so, too; but around each recording it hands all free memory back to the driver, the host's
pinned memory with it, which waits for whatever the GPU does and has to be asked for again. A batch of a new shape comes
in the middle of others, so that is done once, before the first. Only an NVIDIA GPU ever comes here.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch


class Recorder:
    """Of one model, whose graphs never run at the same time: they share the memory of what they compute on the way."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.memory = torch.cuda.graph_pool_handle()
        # One for all: cuBLAS keeps 32 MB for each stream that it has seen.
        self._beside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch gives it no types
        self._has_room = False

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Where graphs are recorded, and what they hold is computed once before: that compiles and loads kernels, which
        no recording allows. Behind all that was launched, and before all that will be."""
        if not self._has_room:
            torch.cuda.empty_cache()  # of what loading has left, for a pool may take all the rest
            self._has_room = True
        current = torch.cuda.current_stream(self._device)
        self._beside.wait_stream(current)
        try:
            with torch.cuda.stream(self._beside):
                yield
        finally:
            current.wait_stream(self._beside)

    @contextmanager
    def recording(self) -> Iterator[Recording]:
        """Inside `beside`: what is launched is recorded, and not run."""
        was_collecting = gc.isenabled()
        gc.disable()  # cycles that others have left may own things of CUDA, whose end no recording allows
        try:
            found = Recording(self)
            try:
                yield found
            except BaseException:
                with suppress(RuntimeError):  # which tells of the same fault
                    found.end()
                raise
            found.end()
        finally:
            if was_collecting:
                gc.enable()


class Recording:
    """One graph behind the other: `cut` ends one and begins the next."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self._begin()

    def cut(self) -> None:
        self.end()
        self._begin()

    def end(self) -> None:
        self.graphs[-1].capture_end()

    def _begin(self) -> None:
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the GPU meanwhile, as a second engine does.
        graph.capture_begin(pool=self._recorder.memory, capture_error_mode="thread_local")
        self.graphs.append(graph)
