"""Engines behind Ray Serve, for a server in this process: started or found there, asked order by order, counted.

Stands where `link.engine_process` stands for one engine. Ray starts replicas, finds them machines and replaces the
dead; this file brings orders to them, gives an order whose replica died to another one, and brings back what they say.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from niwaki.radix.summary import marks_of
from niwaki.runtime import bundled
from niwaki.runtime.api import EngineStopped
from niwaki.runtime.checkpoint.tokenizer import Tokenizer
from niwaki.runtime.link import frames
from niwaki.runtime.link.engine_client import EngineClient
from niwaki.runtime.link.frames import Order, Report
from niwaki.runtime.link.remote_engine import RemoteEngine
from niwaki.runtime.replicas.config import ReplicaConfig
from niwaki.runtime.replicas.ray_cluster import connected

log = logging.getLogger("niwaki.server")

APP = "niwaki"
BEAT_SECONDS = 1.0
USAGE_SECONDS = 3.0  # for the replicas to say how they are
SUMMARY_SECONDS = 1.0  # between two summaries of a replica
MAX_ONGOING = 100_000  # at one replica: the server's own limits hold before, and the engine orders what waits
MAX_MARKS = 512  # of a prompt: the first 16,384 tokens say who has it
MAX_TRIES = 3
START_SECONDS = 600.0
# For what runs at a replica that is to end: Serve's own 20 s would cut long answers off whenever fewer are needed.
DRAIN_SECONDS = 3600.0


class RayEngines(RemoteEngine):
    """Replicas of an engine, on a cluster."""

    def __init__(
        self,
        model: Path | None = None,
        options: Mapping[str, object] | None = None,
        config: ReplicaConfig | None = None,
    ) -> None:
        self._model = model
        self._options = dict(options or {})
        self._config = config or ReplicaConfig()
        self._cluster = ExitStack()
        self._link: ReplicaLink | None = None

    def start(self) -> None:
        """Connect to Ray and deploy the replicas, or use those that are deployed alike; returns when they are ready.

        Raises:
            EngineStopped: they did not start. ConfigError: Ray is not installed, or not there.
        """
        self.tokenizer = Tokenizer(bundled.MODEL_DIR if self._model is None else self._model)
        self._cluster.enter_context(connected(self._config.address))
        handle = deploy(self._model, self._options, self._config)
        try:
            said = handle.loaded.remote().result(timeout_s=START_SECONDS)
            self.loaded = msgspec.msgpack.decode(said, type=frames.Loaded)
        except Exception as error:  # whatever Ray calls it; or replicas of another version
            raise EngineStopped(f"the replicas do not say what they are: {type(error).__name__}: {error}") from error
        # Other servers may ask the same replicas: numbers of orders must not meet there.
        self.backend = EngineClient(self.tokenizer, first_number=secrets.randbits(61))
        self._link = ReplicaLink(handle, self.backend)
        self.backend.connect(self._link, self.loaded, keeps_branches=False)
        self._link.start()

    def process_ids(self) -> list[int]:
        """Of the replicas that run now."""
        assert self._link is not None
        return self._link.process_ids()

    def shutdown(self) -> None:
        """Disconnect; a Ray that was started for us ends. Calling it twice is allowed."""
        if self._link is not None:
            self._link.close()
            self._link = None
            self.backend.disconnect(EngineStopped("the engines were left"))
        self._cluster.close()


def deploy(model: Path | None, options: Mapping[str, object], config: ReplicaConfig) -> Any:
    """The handle of the deployment, which is there as `config` says when this returns.

    Raises:
        EngineStopped: its replicas did not start.
    """
    from ray import serve

    from niwaki.runtime.replicas.replica import PrefixRouter, Replica

    # Loading Serve has set it to tell whatever it does on stderr, a line for each client that leaves among it.
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    serve.start(proxy_location="Disabled")  # it is our server that listens
    number: dict[str, object] = {"num_replicas": config.lowest}
    if config.highest > config.lowest:
        number = {
            "autoscaling_config": {
                "min_replicas": config.lowest,
                "max_replicas": config.highest,
                "target_ongoing_requests": config.target_requests,
                "upscale_delay_s": config.busy_seconds,
                "downscale_delay_s": config.idle_seconds,
            }
        }
    deployment = serve.deployment(
        Replica,
        name="engine",
        ray_actor_options={"num_cpus": config.cpus, "num_gpus": config.gpus},
        max_ongoing_requests=MAX_ONGOING,
        graceful_shutdown_timeout_s=DRAIN_SECONDS,
        request_router_config={
            "request_router_class": PrefixRouter,
            "request_routing_stats_period_s": SUMMARY_SECONDS,
            "request_routing_stats_timeout_s": 30.0,
        },
        **number,
    )
    try:
        app = deployment.bind(None if model is None else str(model.resolve()), dict(options))
        return serve.run(app, name=APP, route_prefix=None)
    except RuntimeError as error:
        raise EngineStopped(f"the replicas did not start: {error}") from error


class ReplicaLink:
    """The `EngineLink` to replicas: each order is a call of its own, on an event loop in a thread of this link."""

    def __init__(self, handle: Any, client: EngineClient) -> None:
        self._handle = handle
        self._client = client
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="niwaki-replicas", daemon=True)
        self._calls: dict[int, asyncio.Task[None]] = {}  # by the order's id; used on the loop only, as is the next one
        self._telling: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        self._thread.start()
        self._soon(self._begin, 0, self._beat)

    def close(self) -> None:
        """What still runs is cancelled. One that was never started is closed, too."""
        if self._thread.ident is not None:
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self._loop.close()

    def process_ids(self) -> list[int]:
        found = self._handle.broadcast("process_id").results(timeout_s=USAGE_SECONDS, return_exceptions=True)
        return [one for one in found if isinstance(one, int)]

    def post(self, order: Order, *, flush: bool = True) -> None:
        match order:
            case frames.Start() | frames.Weigh() | frames.Look():
                self._soon(self._begin, order.id, partial(self._ask, order))
            case frames.Flush(id):
                self._soon(self._begin, id, partial(self._flush, id))
            case frames.Cancel(id):
                self._soon(self._cancel, id)
            case frames.Fork() | frames.Close() | frames.Demote():
                pass  # no branch stands there
            case frames.Listen(id, reads):
                self._soon(self._listen, id, reads)
            case frames.Load():
                raise AssertionError("Serve loads the replicas")

    def _soon(self, call: Callable[..., None], *arguments: object) -> None:
        with suppress(RuntimeError):  # the loop is closed: the link is down
            self._loop.call_soon_threadsafe(call, *arguments)

    # -- on the loop --------------------------------------------------------------------------------------------------

    def _begin(self, order_id: int, work: Callable[[], Coroutine[None, None, None]]) -> None:
        task = self._calls[order_id] = self._loop.create_task(work())
        task.add_done_callback(partial(self._over, order_id))

    def _over(self, order_id: int, task: asyncio.Task[None]) -> None:
        """Tell whoever was told nothing: of a task that was cancelled before it began no line has run."""
        del self._calls[order_id]
        if task.cancelled():
            self._client.receive([frames.Failed(order_id, "Cancelled", "the request was cancelled")])
        elif (error := task.exception()) is not None:
            log.error("an order to the replicas failed", exc_info=error)
            self._client.receive([frames.Failed(order_id, "EngineStopped", f"the replicas cannot be asked: {error}")])

    def _cancel(self, order_id: int) -> None:
        task = self._calls.get(order_id)
        if task is not None:
            task.cancel()

    def _listen(self, order_id: int, reads: bool) -> None:
        if order_id in self._calls:
            task = self._loop.create_task(self._tell_listener(order_id, reads))
            self._telling.add(task)
            task.add_done_callback(self._telling.discard)

    async def _tell_listener(self, order_id: int, reads: bool) -> None:
        """All replicas are told: Serve alone knows which of them has the order, and it may be on its way there, or from
        one that died to another one. One who is not told loses the pieces, and has the whole text in the end."""
        with suppress(Exception):  # Ray's own trouble
            await self._handle.broadcast("listen", order_id, reads).results_async(return_exceptions=True)

    async def _end(self) -> None:
        tasks = [*self._calls.values(), *self._telling]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask(self, order: frames.Start | frames.Weigh | frames.Look) -> None:
        said, marks = msgspec.msgpack.encode(order), _marks(order)
        for _ in range(MAX_TRIES):
            has_told = False
            stream = self._handle.options(stream=True).ask.remote(said, marks)
            try:
                async for answer in stream:
                    reports = msgspec.msgpack.decode(answer, type=list[Report])
                    has_told |= any(not isinstance(report, frames.Accepted) for report in reports)
                    self._client.receive(reports)
                return
            except asyncio.CancelledError:
                stream.cancel()
                raise
            except Exception as error:  # whatever Ray calls it: the replica is gone, or was never reached
                reason = type(error).__name__
            if has_told:  # its client has read some of it: another replica might go on with other words
                break
        self._client.receive([frames.Failed(order.id, "EngineStopped", f"a replica was lost ({reason})")])

    async def _flush(self, order_id: int) -> None:
        answers = await self._handle.broadcast("flush").results_async(return_exceptions=True)
        self._client.receive([frames.Flushed(order_id, all(answer is True for answer in answers))])

    async def _beat(self) -> None:
        """Once a second: the replicas' counters, added up. Where none answers, none is told, and nothing is alive."""
        while True:
            try:
                response = self._handle.broadcast("usage")
                found = await asyncio.wait_for(response.results_async(return_exceptions=True), USAGE_SECONDS)
            except Exception:  # Ray's own trouble: the next beat will tell
                found = []
            total: Counter[str] = Counter()
            for usage in found:
                if isinstance(usage, dict):
                    total.update(usage)
            if total:
                self._client.receive([frames.Beat(dict(total))])
            await asyncio.sleep(BEAT_SECONDS)


def _marks(order: frames.Start | frames.Weigh | frames.Look) -> bytes:
    if isinstance(order, frames.Look):
        return b""
    return b"".join(marks_of(np.frombuffer(order.tail, dtype=np.int32), order.namespace, MAX_MARKS))
