"""CUDA graphs without CUDA: they keep each operator and each kernel that is called while they record, and do all of it
anew over the same memory when they replay, as CUDA graphs do. What CUDA would refuse while it records, they name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar, Self

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import interpreter

# Operators that wait for a device, or copy from memory of the host that is not pinned, which is the same.
WAITING = {
    "_local_scalar_dense",
    "_unique2",
    "bincount",
    "equal",
    "item",
    "lift_fresh",
    "masked_select",
    "nonzero",
    "repeat_interleave",
    "unique_dim",
}


class Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch gives it no types
    """Keeps what is called under it. A result that lies in memory of its own is written there again on a replay."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Callable[[], object]] = []
        self.names: set[str] = set()  # of operators
        self.is_inside_kernel = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        made = func(*args, **given)
        if not self.is_inside_kernel:
            self.names.add(name_of(func))

            def again() -> None:
                for old, new in zip(tensors_of(made), tensors_of(func(*args, **given)), strict=True):
                    if old.data_ptr() != new.data_ptr():
                        old.copy_(new)

            self.calls.append(again)
        return made


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch gives it no types
    """Keeps the names of the operators that are called under it, but for those of replays: what a step asks of torch
    beside its graphs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not Graph.is_replaying:
            self.names.append(name_of(func))
        return func(*args, **(kwargs or {}))


def name_of(func: Any) -> str:
    """Without namespace and overload."""
    return str(func).split(".")[1]


def tensors_of(made: object) -> list[torch.Tensor]:
    parts = made if isinstance(made, list | tuple) else [made]
    return [part for part in parts if isinstance(part, torch.Tensor)]


class Graph:
    """Stands for `torch.cuda.CUDAGraph`."""

    recording: Tape | None = None  # of the one that records
    is_replaying = False
    num_replays = 0
    on_replay: Callable[[], object] = staticmethod(lambda: None)

    def __init__(self) -> None:
        self.tape = Tape()

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local", "what another thread does must not end it"
        assert Graph.recording is None, "one graph records at a time"
        assert Stream.current, "nothing may be recorded on the stream that all of a process use"
        Graph.recording = self.tape
        self.tape.__enter__()  # type: ignore[no-untyped-call]

    def capture_end(self) -> None:
        assert Graph.recording is self.tape
        Graph.recording = None
        self.tape.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        waiting = self.tape.names & WAITING
        if waiting:
            raise RuntimeError(f"operation not permitted when stream is capturing: {', '.join(sorted(waiting))}")

    def replay(self) -> None:
        Graph.num_replays += 1
        Graph.on_replay()
        Graph.is_replaying = True
        for call in self.tape.calls:
            call()
        Graph.is_replaying = False


class Stream:
    current: ClassVar[list[Stream]] = []  # none: that of all

    def wait_stream(self, other: Self) -> None: ...


@contextmanager
def on_stream(stream: Stream) -> Iterator[None]:
    Stream.current.append(stream)
    yield
    Stream.current.pop()


@contextmanager
def inside_kernel(tape: Tape) -> Iterator[None]:
    tape.is_inside_kernel = True
    yield
    tape.is_inside_kernel = False


def put_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of torch's, and of what Triton's interpreter does with a launch, for one test."""
    run = interpreter.GridExecutor.__call__

    def run_and_keep(self: object, *args: object, **kwargs: object) -> None:
        tape = Graph.recording
        with nullcontext() if tape is None else inside_kernel(tape):
            run(self, *args, **kwargs)
        if tape is not None:
            tape.calls.append(lambda: run(self, *args, **kwargs))

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", run_and_keep)
    monkeypatch.setattr(Graph, "num_replays", 0)
    monkeypatch.setattr(Graph, "on_replay", Graph.on_replay)
    monkeypatch.setattr(Stream, "current", [])
    fakes = {
        "CUDAGraph": Graph,
        "graph_pool_handle": lambda: (0, 0),
        "Stream": lambda device: Stream(),
        "current_stream": lambda device: Stream(),
        "stream": on_stream,
        "empty_cache": lambda: None,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
