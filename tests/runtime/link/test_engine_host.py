"""The engine process's own side, here: what it cannot tell it does not go on with."""

from __future__ import annotations

import socket
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from niwaki.runtime.api import Delta, GenerationError, SamplingParams
from niwaki.runtime.engine import Engine
from niwaki.runtime.link import frames
from niwaki.runtime.link.engine_client import EngineClient
from niwaki.runtime.link.engine_host import Host
from niwaki.runtime.link.frames import Message, Order
from niwaki.runtime.link.link import Link
from niwaki.runtime.link.orders import Orders
from tests.lang.waiting import wait_until

LONG = SamplingParams(max_new_tokens=400, temperature=0, ignore_eos=True)
TORN = Delta("\ud800")  # which msgpack does not write


def test_a_generation_of_which_a_piece_cannot_be_told_ends_there_too(
    toy_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Host, "_hang_up", lambda self: None)  # which ends the process
    tell = Orders._tell_piece
    monkeypatch.setattr(Orders, "_tell_piece", lambda self, id, delta: tell(self, id, TORN))
    ours, theirs = socket.socketpair()
    with Engine(toy_folder, kv_tokens=1024) as engine:
        client, host = EngineClient(engine.tokenizer), Host(theirs)
        link: Link[Order, Message] = Link(ours, Message, client.receive, lambda: None)
        orders = host._orders = Orders(engine.backend, host._link)
        for one in (link, host._link):
            one.start()
        client.connect(link, frames.loaded_by(engine))
        with pytest.raises(GenerationError, match="UnicodeEncodeError"):
            client.start(np.array([5, 6, 7], np.int32), LONG).result(60)
        wait_until(lambda: not engine.stats()["requests_running"])
        assert engine.stats()["finished"] == 0
        assert not orders._running
        link.close()
        for close in (partial(link.join, 60), partial(host._link.join, 60), orders.close):
            close()
