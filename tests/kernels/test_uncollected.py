"""Python looks for cycles again when kernels have been compiled, whatever came between."""

from __future__ import annotations

import gc

import pytest
from numba.core import event

from niwaki.kernels import jit, order


class Interrupted(BaseException):
    """As Ctrl-C does."""


def test_an_interrupt_where_a_compilation_begins_leaves_the_collector_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listener = jit._Uncollected()
    disable = gc.disable

    def interrupted() -> None:
        disable()
        raise Interrupted

    compiling = event.Event("numba:compile", event.EventStatus.START, {"dispatcher": order.stable_order})  # type: ignore[no-untyped-call]
    assert gc.isenabled()
    monkeypatch.setattr(gc, "disable", interrupted)
    try:
        with pytest.raises(Interrupted):
            listener.on_start(compiling)
        listener.on_end(compiling)
        assert gc.isenabled()
        monkeypatch.undo()
        listener.on_end(compiling)  # of one whose start was cut off before it got here
        listener.on_start(compiling)
        listener.on_start(compiling)
        listener.on_end(compiling)
        assert not gc.isenabled()
        listener.on_end(compiling)
        assert gc.isenabled()
    finally:
        gc.enable()
