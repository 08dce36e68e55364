"""Pieces come for those who ask for them: from the first one on, and in order, whenever they do."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from niwaki.runtime.api import Delta, EngineStopped, Generation, Regex, SamplingParams
from niwaki.runtime.api.likeliest import Likeliest
from niwaki.runtime.engine import Engine
from niwaki.runtime.link import frames
from niwaki.runtime.link.engine_client import EngineClient, _Asked
from niwaki.runtime.link.frames import Order, Report
from niwaki.runtime.link.orders import Orders
from niwaki.runtime.loop.roster import _is_read
from tests.lang.waiting import PATIENCE
from tests.runtime.server.conftest import held

IDS = np.array([5, 6, 7], np.int32)
PARAMS = SamplingParams(max_new_tokens=12, temperature=0, ignore_eos=True)


class Way:
    """Orders on an engine here, and the reports that came back."""

    def __init__(self, engine: Engine) -> None:
        self.reports: list[Report] = []
        self.engine = engine
        self.client = EngineClient(engine.tokenizer)
        self.orders = Orders(engine.backend, self)
        self.client.connect(self, frames.loaded_by(engine))

    def post(self, message: Order | Report, *, flush: bool = True) -> None:
        if isinstance(message, Order):
            self.orders.take(message)
        else:
            self.reports.append(message)
            self.client.receive([message])

    def flush(self) -> None: ...

    @property
    def num_pieces(self) -> int:
        return sum(isinstance(report, frames.Piece) for report in self.reports)


@pytest.fixture
def way(toy_folder: Path) -> Iterator[Way]:
    with Engine(toy_folder, kv_tokens=1024) as engine:
        made = Way(engine)
        yield made
        made.orders.close()


def text_of(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def test_who_does_not_ask_costs_no_piece_and_has_the_whole_text_in_the_end(way: Way) -> None:
    generation = way.client.start(IDS, PARAMS, streams=None)
    (output,) = generation.result(60)
    assert way.num_pieces == 0
    (delta,) = generation.deltas()
    assert (delta.text, delta.token_ids) == (output.text, output.token_ids)
    assert len(output.token_ids) == 12


@pytest.mark.parametrize("reads", [True, False])
def test_who_asks_while_it_runs_hears_all_of_it(way: Way, reads: bool) -> None:
    """And counts as a reader only where he waits for it."""
    heard: list[Delta] = []
    was_read: list[bool] = []
    several = threading.Event()

    def hear(delta: Delta) -> None:
        heard.append(delta)
        was_read.extend(map(_is_read, way.engine.backend._core._roster.running.values()))
        if len(heard) > 3:
            several.set()

    with held(way.engine, steps=4) as release:
        generation = way.client.start(IDS, PARAMS, streams=None)
        assert not heard
        generation.add_delta_callback(hear, reads=reads)
        release()
        (output,) = generation.result(60)
    assert several.wait(PATIENCE)
    assert text_of(heard) == output.text
    assert [token for delta in heard for token in delta.token_ids] == list(output.token_ids)
    assert way.num_pieces == len(heard) > 3
    assert set(was_read) == {reads}


def test_who_begins_to_wait_for_what_others_count_is_a_reader_and_no_piece_comes_twice(way: Way) -> None:
    heard: list[Delta] = []
    was_read: list[bool] = []

    def hear(delta: Delta) -> None:
        heard.append(delta)
        was_read.extend(map(_is_read, way.engine.backend._core._roster.running.values()))

    with held(way.engine, steps=4) as release:
        generation = way.client.start(IDS, PARAMS, streams=None)
        generation.watch(lambda: None, reads=False)
        generation.add_delta_callback(hear)
        release()
        (output,) = generation.result(60)
    assert [token for delta in heard for token in delta.token_ids] == list(output.token_ids)
    assert way.num_pieces == len(heard) > 3
    assert set(was_read) == {True}


def test_who_asks_before_the_constraint_is_compiled_hears_it(way: Way) -> None:
    gate = threading.Event()
    for _ in range(2):  # all threads that compile
        way.orders._compiling.submit(gate.wait, PATIENCE)
    generation = Generation()
    way.client._asked[77] = asked(generation)
    params = SamplingParams(max_new_tokens=40, temperature=0, constraint=Regex("[a-z ]{12}"))
    way.post(frames.Start(77, 0, 0, frames.packed(IDS), frames.plain(params), "", None, 0, False, 0))
    way.post(frames.Listen(77, True))
    with held(way.engine, steps=1):
        gate.set()
    (output,) = generation.result(60)
    assert len(output.text) == 12
    assert way.num_pieces > 0
    assert text_of(list(generation.deltas())) == output.text
    assert not way.orders._early


def test_where_each_order_may_go_to_another_engine_nobody_is_a_reader_who_does_not_ask(way: Way) -> None:
    """Programs whose text nobody reads made all prompts of such a server come in small pieces."""
    way.client.connect(way, frames.loaded_by(way.engine), keeps_branches=False)
    was_read: list[bool] = []
    way.engine.backend.after_step = lambda: was_read.extend(
        map(_is_read, way.engine.backend._core._roster.running.values())
    )
    (output,) = way.client.start(IDS, PARAMS, streams=None).result(60)
    assert set(was_read) == {False}
    assert way.num_pieces == 0
    assert output.text


def asked(generation: Generation) -> _Asked:
    return _Asked(generation, None, None, is_late=True)


def test_likeliest_tokens_that_nobody_looks_at_stay_packed_in_each_piece(way: Way) -> None:
    """With 20 likeliest tokens of each the naming of them took as long as drawing them all."""
    params = SamplingParams(max_new_tokens=12, temperature=0, ignore_eos=True, return_logprob=True, top_logprobs_num=3)
    generation = way.engine.backend.start(IDS, params)
    (output,) = generation.result(60)
    deltas = list(generation.deltas())
    assert all(isinstance(delta.top_logprobs, Likeliest) for delta in deltas)
    assert "".join(delta.text for delta in deltas) == output.text
    assert [top for delta in deltas for top in delta.top_logprobs] == list(output.top_logprobs)


def test_likeliest_tokens_come_with_each_piece(way: Way) -> None:
    params = SamplingParams(max_new_tokens=12, temperature=0, ignore_eos=True, return_logprob=True, top_logprobs_num=3)
    generation = way.client.start(IDS, params)
    (output,) = generation.result(60)
    pieces = [report.delta for report in way.reports if isinstance(report, frames.Piece)]
    assert len(pieces) > 3
    told = msgspec.msgpack.decode(msgspec.msgpack.encode(pieces), type=list[Delta])
    assert tuple(top for delta in told for top in delta.top_logprobs) == tuple(output.top_logprobs)


def test_streams_are_told_before_whole_answers(way: Way) -> None:
    told: list[str] = []
    read, whole = Generation(), Generation()
    read.watch(lambda: told.append("a piece"))
    whole.add_done_callback(lambda: told.append("an answer"))
    way.client._asked |= {1000: _Asked(read), 1001: _Asked(whole)}
    way.client._generations[1000] = read
    way.client.receive([frames.Ended(1001, (), 0, b""), frames.Piece(1000, Delta("a"))])
    assert told == ["a piece", "an answer"]


def test_the_pieces_of_a_step_travel_as_one_message_and_stand_in_order_before_its_ends(way: Way) -> None:
    streams = {number: Generation() for number in (1000, 1001)}
    way.client._asked |= {number: _Asked(generation) for number, generation in streams.items()}
    way.client._generations |= streams
    ended, failed = frames.Ended(1001, (), 0, b""), frames.Failed(1000, "RequestError", "no")
    pieces = [frames.Piece(1000, Delta("a")), frames.Piece(1001, Delta("b", (1, 2))), frames.Piece(1000, Delta("c"))]
    posted: list[Report] = [pieces[0], ended, pieces[1], frames.Piece(999, Delta("nobody's")), pieces[2], failed]
    sent = frames.gathered(posted)
    assert len(sent) == 3, "the pieces are one"
    assert list(sent[1:]) == [ended, failed]
    way.client.receive(msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=list[frames.Message]))
    assert [generation.deltas_from(0) for generation in streams.values()] == [
        [Delta("a"), Delta("c")],
        [Delta("b", (1, 2))],
    ]
    assert all(generation.is_done for generation in streams.values())
    assert not way.client._generations


@pytest.mark.parametrize("is_on_loop", [True, False])
def test_who_is_over_takes_no_piece_of_a_step_that_names_the_same_as_the_last(way: Way, is_on_loop: bool) -> None:
    streams = {number: Generation() for number in (1000, 1001)}
    way.client._asked |= {number: _Asked(generation) for number, generation in streams.items()}
    way.client._generations |= streams
    told: list[int] = []

    async def receive(*reports: frames.Message) -> None:
        way.client.receive(reports)

    def say(*reports: frames.Message) -> None:
        if is_on_loop:
            asyncio.run(receive(*reports))
        else:
            way.client.receive(reports)

    streams[1001].watch(lambda: told.append(1001))
    say(frames.Pieces.of([1000, 1001], [Delta("a"), Delta("b")]))
    streams[1000].watch(lambda: told.append(1000))
    say(frames.Pieces.of([1000, 1001], [Delta("c"), Delta("d")]))
    assert told == [1001, 1000, 1000, 1001], "the first of 1000 as there was something"
    say(frames.Failed(1000, "RequestError", "no"))
    say(frames.Pieces.of([1000, 1001], [Delta("e"), Delta("f")]))
    way.client.disconnect(EngineStopped("gone"))
    say(frames.Pieces.of([1000, 1001], [Delta("g"), Delta("h")]))
    assert ["".join(delta.text for delta in one.deltas_from(0)) for one in streams.values()] == ["ac", "bdf"]
    assert told[4:] == [1001]


@pytest.mark.parametrize("reports", [[], [frames.Piece(1, Delta("a"))], [frames.Flushed(2, True)]])
def test_what_holds_fewer_than_two_pieces_travels_as_it_is(reports: list[Report]) -> None:
    assert frames.gathered(reports) == reports
