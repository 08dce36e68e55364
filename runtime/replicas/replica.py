"""One replica: an engine in a process that Ray Serve started; and the router that Serve asks for one.

Both are named in a deployment, so Ray loads this module wherever they run. What goes over its wire is bytes of ours.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from niwaki.radix.summary import MARK_BYTES
from niwaki.runtime.engine import Engine
from niwaki.runtime.link import frames
from niwaki.runtime.link.engine_host import warm_up
from niwaki.runtime.link.frames import Order, Report
from niwaki.runtime.link.orders import Orders
from niwaki.runtime.replicas.routing import Routing

SUMMARY_MARKS = 4096  # of 32 tokens each: 32 KiB for the most recently used 131,072 tokens
MAX_LISTENED = 4096  # orders whose pieces somebody wants, here or at another replica
LAST = (frames.Ended, frames.Weighed, frames.Failed, frames.Seen, frames.Flushed)


class Replica:
    """An engine, asked order by order. Nothing of a conversation stays but what the tree holds."""

    def __init__(self, model: str | None, options: Mapping[str, object]) -> None:
        self._engine = Engine(None if model is None else Path(model), **options)
        warm_up(self._engine)
        self._answers = Answers()
        self._orders = Orders(self._engine.backend, self._answers)
        self._listened: dict[int, bool] = {}  # by order, that may be about to come: whether its reader waits

    async def ask(self, said: bytes, marks: bytes) -> AsyncIterator[bytes]:
        """Carry out an order; its reports as they come, those of a step together. `marks` are for the router."""
        order: Order = msgspec.msgpack.decode(said, type=Order)
        assert not isinstance(
            order, frames.Load | frames.Fork | frames.Close | frames.Cancel | frames.Demote | frames.Listen
        )
        answer = self._answers.open(order.id)
        try:
            self._orders.take(order)
            if order.id in self._listened:
                self._orders.take(frames.Listen(order.id, self._listened[order.id]))
            is_over = False
            while not is_over:
                reports = await answer.take()
                is_over = any(isinstance(report, LAST) for report in reports)
                yield msgspec.msgpack.encode(reports)
        finally:
            self._answers.close(order.id, answer)
            self._orders.take(frames.Cancel(order.id))
            if isinstance(order, frames.Start | frames.Weigh):
                self._orders.take(frames.Close(order.branch))

    async def listen(self, order_id: int, reads: bool) -> None:
        """Tell the pieces of an order, if it is here or comes here, as `frames.Listen` says."""
        self._listened[order_id] = reads or self._listened.get(order_id, False)
        if len(self._listened) > MAX_LISTENED:
            del self._listened[next(iter(self._listened))]
        self._orders.take(frames.Listen(order_id, reads))

    async def loaded(self) -> bytes:
        return msgspec.msgpack.encode(frames.loaded_by(self._engine))

    async def flush(self) -> bool:
        return await asyncio.to_thread(self._engine.backend.flush)

    async def usage(self) -> dict[str, float]:
        return dict(self._engine.stats())

    async def process_id(self) -> int:
        return os.getpid()

    async def record_routing_stats(self) -> dict[str, bytes]:
        """Asked by Serve now and then, and given to every router."""
        marks = await asyncio.to_thread(self._engine.backend.summary, SUMMARY_MARKS)
        return {"marks": b"".join(marks)}

    def check_health(self) -> None:
        """Asked by Serve, which replaces a replica where this raises."""
        if not self._engine.backend.is_alive:
            raise RuntimeError("the engine's thread is gone")

    def __del__(self) -> None:
        self._orders.close()
        self._engine.shutdown()


class Answers:
    """Reports by the order that they answer. Posted on any thread, taken on the event loop that opened the answer."""

    def __init__(self) -> None:
        self._open: dict[int, Answer] = {}

    def open(self, order_id: int) -> Answer:
        answer = self._open[order_id] = Answer()
        return answer

    def close(self, order_id: int, answer: Answer) -> None:
        """Whoever asked the same once more, as it took the replica for lost, has an answer of its own by then."""
        if self._open.get(order_id) is answer:
            del self._open[order_id]

    def post(self, message: Report, *, flush: bool = True) -> None:
        if isinstance(message, frames.Loaded | frames.Beat):
            return
        answer = self._open.get(message.id)
        if answer is not None:
            answer.reports.append(message)
        if flush:
            self.flush()

    def flush(self) -> None:
        for answer in tuple(self._open.values()):
            if answer.reports:
                answer.tell()


class Answer:
    """What came for one order and was not taken yet."""

    def __init__(self) -> None:
        self.reports: list[Report] = []
        self._loop = asyncio.get_running_loop()
        self._arrived = asyncio.Event()

    def tell(self) -> None:
        self._loop.call_soon_threadsafe(self._arrived.set)

    async def take(self) -> list[Report]:
        """All that came; waits for the first."""
        while not self.reports:
            self._arrived.clear()
            await self._arrived.wait()
        count = len(self.reports)  # other threads go on appending
        taken = self.reports[:count]
        del self.reports[:count]
        return taken


class PrefixRouter(RequestRouter):  # type: ignore[misc]  # Ray's classes have no types for us
    """Serve's side of `Routing`: one in each process that asks replicas."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._routing = Routing()
        self._told: dict[str, bytes] = {}

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        names = {_name(replica.replica_id) for replica in replicas}
        self._routing.stand(names)
        self._told = {name: marks for name, marks in self._told.items() if name in names}
        for replica in replicas:
            name, marks = _name(replica.replica_id), replica.routing_stats.get("marks", b"")
            if self._told.get(name) != marks:
                self._told[name] = marks
                self._routing.hold(name, _split(marks))
        super().update_replicas(replicas)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        marks = _marks(pending_request)
        by_name = {_name(replica.replica_id): replica for replica in candidate_replicas}
        return [[by_name[name]] for name in self._routing.choose(by_name, marks)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: object) -> None:
        name, marks = _name(replica_id), _marks(pending_request)
        self._routing.send(name, marks)
        self._routing.begin(name, pending_request.metadata.internal_request_id, marks)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._routing.end(_name(replica_id), internal_request_id)


def _name(replica_id: ReplicaID) -> str:
    return str(replica_id.unique_id)


def _marks(request: PendingRequest | None) -> Sequence[bytes]:
    """Those that `Replica.ask` is called with; none for its other methods."""
    return _split(request.args[1]) if request is not None and len(request.args) > 1 else ()


def _split(marks: bytes) -> list[bytes]:
    return [marks[start : start + MARK_BYTES] for start in range(0, len(marks), MARK_BYTES)]
