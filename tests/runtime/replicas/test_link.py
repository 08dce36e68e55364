"""The link to replicas, without Ray: whoever gives an order hears of its end, however early that comes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import nullcontext
from typing import Any, cast

import msgspec
import pytest

from niwaki.runtime.api import Delta, EngineStopped
from niwaki.runtime.link import frames
from niwaki.runtime.link.engine_client import EngineClient
from niwaki.runtime.link.frames import Report
from niwaki.runtime.replicas import engines
from niwaki.runtime.replicas.engines import RayEngines, ReplicaLink


class Heard:
    """What an `EngineClient` is told."""

    def __init__(self) -> None:
        self.reports: list[Report] = []
        self.failed: dict[int, frames.Failed] = {}
        self.has_failed = threading.Event()
        self.has_ended = threading.Event()

    def receive(self, reports: Sequence[Report]) -> None:
        self.reports += reports
        for report in reports:
            if isinstance(report, frames.Failed):
                self.failed[report.id] = report
                self.has_failed.set()
            if isinstance(report, frames.Failed | frames.Ended):
                self.has_ended.set()

    def wait_for_end(self) -> None:
        assert self.has_ended.wait(20)


class Deployment:
    """A handle whose replicas are asked by `ask`, and say nothing else."""

    def __init__(self, ask: Callable[[], AsyncIterator[bytes]]) -> None:
        self._ask = ask
        self.ask = self
        self.told: list[tuple[object, ...]] = []
        self.was_told = threading.Event()

    def options(self, *, stream: bool) -> Deployment:
        return self

    def remote(self, said: bytes, marks: bytes) -> AsyncIterator[bytes]:
        return self._ask()

    def broadcast(self, name: str, *given: object) -> Any:
        if name == "listen":
            self.told.append(given)
            self.was_told.set()
        raise RuntimeError("nobody is there")


def started(ask: Callable[[], AsyncIterator[bytes]]) -> tuple[ReplicaLink, Heard]:
    link, heard, _ = with_deployment(ask)
    return link, heard


def with_deployment(ask: Callable[[], AsyncIterator[bytes]]) -> tuple[ReplicaLink, Heard, Deployment]:
    heard, deployment = Heard(), Deployment(ask)
    link = ReplicaLink(deployment, cast("EngineClient", heard))
    link.start()
    return link, heard, deployment


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


def test_what_is_posted_when_the_link_is_down_is_lost_without_a_word() -> None:
    """As a server's last requests cancel what they asked for."""
    link, _ = started(refuse)
    link.close()
    for order in (frames.Look(9, 10, ""), frames.Cancel(9), frames.Flush(10)):
        link.post(order)


class Silent:
    """A handle whose replicas do not come up, or are of another version."""

    def __init__(self, said: Exception | bytes) -> None:
        self._said = said
        self.loaded = self

    def remote(self) -> Silent:
        return self

    def result(self, timeout_s: float) -> bytes:
        if isinstance(self._said, Exception):
            raise self._said
        return self._said


@pytest.mark.parametrize("said", [TimeoutError("it took too long"), msgspec.msgpack.encode([20, "toy"])])
def test_replicas_that_do_not_say_what_they_are_are_no_engine(
    said: Exception | bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "connected", lambda address: nullcontext())
    monkeypatch.setattr(engines, "deploy", lambda *given: Silent(said))
    with pytest.raises(EngineStopped, match="do not say what they are"), RayEngines():
        pass


def test_a_link_that_was_never_started_can_be_closed() -> None:
    link = ReplicaLink(Deployment(refuse), cast("EngineClient", Heard()))
    link.close()
    link.post(frames.Flush(1))


PIECE = frames.Piece(1, Delta("a", (1,)))
ENDED = frames.Ended(1, (), 0, b"")


@pytest.mark.parametrize(
    ("said", "asked"),
    [
        ([], 2),
        ([frames.Accepted(1)], 2),
        ([frames.Accepted(1), PIECE], 1),
        ([PIECE, PIECE], 1),
        ([PIECE, ENDED], 1),
    ],
)
def test_killed_at_any_moment_of_a_stream_another_replica_answers_or_the_loss_is_told(
    said: list[Report], asked: int
) -> None:
    """The first replica dies behind what it `said`. Nobody hears a piece twice, and everybody hears of an end."""
    calls = 0

    async def ask() -> AsyncIterator[bytes]:
        nonlocal calls
        calls += 1
        for report in said if calls == 1 else [PIECE, ENDED]:
            yield msgspec.msgpack.encode([report])
        if calls == 1:
            raise ConnectionError("the replica died")

    link, heard = started(ask)
    link.post(frames.Look(1, 10, ""))
    heard.wait_for_end()
    link.close()
    assert calls == asked
    pieces = [report for report in heard.reports if isinstance(report, frames.Piece)]
    ends = [one for one in heard.reports if isinstance(one, frames.Ended | frames.Failed) and one.id == 1]
    assert len(pieces) == (1 if asked == 2 else said.count(PIECE))
    if asked == 2 or ENDED in said:
        assert ends[0] == ENDED
    else:
        assert [end.kind for end in ends if isinstance(end, frames.Failed)] == ["EngineStopped"]


def test_who_wants_pieces_has_all_replicas_told_while_the_order_runs() -> None:
    """Which of them has it, or will have it, nobody here knows; that Ray loses the word harms nobody."""
    has_asked, is_over = threading.Event(), threading.Event()

    async def ask() -> AsyncIterator[bytes]:
        has_asked.set()
        await asyncio.to_thread(is_over.wait, 20)
        yield msgspec.msgpack.encode([PIECE, ENDED])

    link, heard, deployment = with_deployment(ask)
    link.post(frames.Listen(1, True))  # of nothing that runs
    link.post(frames.Look(1, 10, ""))
    assert has_asked.wait(20)
    link.post(frames.Listen(1, False))
    assert deployment.was_told.wait(20)
    is_over.set()
    heard.wait_for_end()
    link.close()
    assert deployment.told == [(1, False)]
    assert heard.reports[:2] == [PIECE, ENDED]


def test_where_replica_after_replica_dies_the_loss_is_told() -> None:
    async def ask() -> AsyncIterator[bytes]:
        for nothing in list[bytes]():
            yield nothing
        raise ConnectionError("the replica died")

    link, heard = started(ask)
    link.post(frames.Look(1, 10, ""))
    heard.wait_for_end()
    link.close()
    assert heard.failed[1].message == "a replica was lost (ConnectionError)"
