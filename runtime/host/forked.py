"""Whether this process was forked from one in which an engine ran. A fork copies memory, not threads: the engine's own,
those that share a step and torch's stay behind, and whoever waited for them would wait for ever."""

from __future__ import annotations

import os

from niwaki.runtime.api import EngineStopped


def check_not_forked() -> None:
    """Raises EngineStopped: this process was forked from one in which an engine ran."""
    if _process.is_orphan:
        raise EngineStopped(
            "this process was forked from one in which an engine ran, whose threads are not here; start processes with "
            "multiprocessing.get_context('spawn'), fork before the first engine, or share a server by RuntimeEndpoint"
        )


def is_forked() -> bool:
    return _process.is_orphan


def engine_starts() -> None:
    """From now on a fork of this process has no engines."""
    _process.has_engine = True


class _Process:
    def __init__(self) -> None:
        self.has_engine = False
        self.is_orphan = False

    def become_child(self) -> None:
        self.is_orphan = self.has_engine


_process = _Process()
if hasattr(os, "register_at_fork"):  # where processes can be forked
    os.register_at_fork(after_in_child=_process.become_child)
