"""The engine process: an engine behind one end of a socket. Started by `engine_process`, which holds the other end.

It lives as long as its parent: when the socket ends, whatever the reason, so does this process.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from typing import NoReturn

from niwaki.runtime.api import NiwakiError, Pending, RequestError
from niwaki.runtime.engine import Engine
from niwaki.runtime.link import frames
from niwaki.runtime.link.frames import Order, Report
from niwaki.runtime.link.link import Link
from niwaki.runtime.link.orders import Orders

BEAT_SECONDS = 0.5
END_SECONDS = 2.0  # to end by itself when the socket does
# Of Python's garbage, of which requests leave next to none: 30 times as seldom as usual through all that there is. With
# a thousand who wait that took 40 ms, between two steps.
COLLECTIONS = (700, 10, 300)


def main() -> int:
    """Load what the first frame says, then answer until the socket ends. Exit code 1: the model could not be loaded."""
    for number in (signal.SIGINT, signal.SIGTERM):  # meant for the parent, which drains first and then hangs up
        signal.signal(number, signal.SIG_IGN)
    host = Host(socket.socket(fileno=int(sys.argv[1])))
    return host.run()


class Host:
    """Loads the engine, has orders carried out on it, and tells that it lives."""

    def __init__(self, connection: socket.socket) -> None:
        self._link: Link[Report, Order] = Link(
            connection, Order, self._take_all, self._hang_up, frames.gathered, self._unwritten, self._misread
        )
        self._over = threading.Event()
        self._first: Pending[frames.Load] = Pending()
        self._orders: Orders | None = None

    def run(self) -> int:
        self._link.start()
        try:
            load = self._first.result()
            with Engine(load.model, **load.options) as engine:
                warm_up(engine)
                gc.collect()
                gc.freeze()  # to go through all that was loaded took a full collection 0.15 s, between two steps
                gc.enable()
                gc.set_threshold(*COLLECTIONS)
                self._orders = Orders(engine.backend, self._link)
                self._link.post(frames.Beat(dict(engine.stats())))  # first, so that nobody asks before it is there
                self._link.post(frames.loaded_by(engine))
                while not self._over.wait(BEAT_SECONDS):
                    self._link.post(frames.Beat(dict(engine.stats())))
        except NiwakiError as error:
            self._link.post(frames.failed(0, error))
            return 1
        finally:
            if self._orders is not None:
                self._orders.close()
            self._link.close()
            self._link.join(timeout=5)
        return 0

    def _take_all(self, orders: Sequence[Order]) -> None:
        for order in orders:
            if isinstance(order, frames.Load):
                self._first.succeed(order)
            else:
                assert self._orders is not None, "other orders come behind Loaded"
                self._orders.take(order)

    def _unwritten(self, report: Report, error: Exception) -> Report | None:
        """As `frames.unwritten`. What goes on telling such pieces is ended: nobody hears of it any more."""
        if self._orders is not None and isinstance(report, frames.Piece):
            self._orders.take(frames.Cancel(report.id))
        return frames.unwritten(report, error)

    def _misread(self, order: object, error: Exception) -> None:
        """Something came that is no order: tell whoever waits for it."""
        match order:
            case [int(), int(number), *_]:  # its tag and its id
                self._link.post(frames.failed(number, RequestError(f"the engine cannot read the order: {error}")))

    def _hang_up(self) -> None:
        last = threading.Timer(END_SECONDS, os._exit, (1,))  # a step may take longer than anybody wants to wait
        last.daemon = True
        last.start()
        self._over.set()
        self._first.fail(NiwakiError("the parent is gone"))


def warm_up(engine: Engine) -> None:
    """Run every kernel once, greedy, sampled, with log-probabilities and under a constraint, which also starts the
    process that compiles those: what is made at its first use is there before anybody waits. Two that begin alike
    decode side by side. Nothing of it is counted."""
    greedy = {"max_new_tokens": 6, "temperature": 0.0, "ignore_eos": True}
    engine.generate(["a a", "a b"], greedy)
    sampled = {"max_new_tokens": 2, "temperature": 1.0, "ignore_eos": True}
    engine.generate("a", sampled)
    engine.generate("a", sampled, return_logprob=True, top_logprobs_num=2)
    engine.generate("a", {"max_new_tokens": 8, "json_schema": '{"allOf": [{"type": "boolean"}]}'})
    engine.backend.flush(tiers=False)  # what a folder keeps from the last time is wanted
    engine.backend.forget_counts()  # nobody asked for any of that


def start() -> NoReturn:
    """What the process runs."""
    # Nothing is left to be done, and taking torch apart would take a second in which a new engine cannot start.
    os._exit(main())
