"""The link to replicas, without Ray: whoever gives an order hears of its end, however early that comes."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, cast

import pytest

from niwaki.runtime.link import frames
from niwaki.runtime.link.engine_client import EngineClient
from niwaki.runtime.link.frames import Report
from niwaki.runtime.replicas.engines import ReplicaLink


class Heard:
    """What an `EngineClient` is told."""

    def __init__(self) -> None:
        self.failed: dict[int, frames.Failed] = {}
        self.has_failed = threading.Event()

    def receive(self, reports: Sequence[Report]) -> None:
        for report in reports:
            if isinstance(report, frames.Failed):
                self.failed[report.id] = report
                self.has_failed.set()


class Deployment:
    """A handle whose replicas are asked by `ask`, and say nothing else."""

    def __init__(self, ask: Callable[[], AsyncIterator[bytes]]) -> None:
        self._ask = ask
        self.ask = self

    def options(self, *, stream: bool) -> Deployment:
        return self

    def remote(self, said: bytes, marks: bytes) -> AsyncIterator[bytes]:
        return self._ask()

    def broadcast(self, name: str) -> Any:
        raise RuntimeError("nobody is there")


def started(ask: Callable[[], AsyncIterator[bytes]]) -> tuple[ReplicaLink, Heard]:
    heard = Heard()
    link = ReplicaLink(Deployment(ask), cast("EngineClient", heard))
    link.start()
    return link, heard


def refuse() -> AsyncIterator[bytes]:
    raise RuntimeError("the deployment is gone")


def test_an_order_that_is_cancelled_before_it_begins_is_told_so() -> None:
    link, heard = started(refuse)

    def order_and_cancel() -> None:  # on the link's own thread: nothing runs between the two
        link.post(frames.Look(7, 10, ""))
        link.post(frames.Cancel(7))

    link._loop.call_soon_threadsafe(order_and_cancel)
    assert heard.has_failed.wait(20)
    link.close()
    assert heard.failed[7].kind == "Cancelled"


def test_an_order_that_cannot_be_sent_is_told_so(caplog: pytest.LogCaptureFixture) -> None:
    link, heard = started(refuse)
    link.post(frames.Look(8, 10, ""))
    assert heard.has_failed.wait(20)
    link.close()
    assert heard.failed[8].kind == "EngineStopped"
    assert "the deployment is gone" in caplog.text
