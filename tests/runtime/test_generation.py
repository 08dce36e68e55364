"""A generation hands its deltas on, whoever reads them and whenever they begin to."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Iterator

import pytest

from niwaki.runtime.api import Cancelled, Delta, Generation, TimedOut
from niwaki.runtime.api.pending import Streams

DELTAS = [Delta(str(number), (number,)) for number in range(1000)]


@pytest.fixture
def switching() -> Iterator[None]:
    """Threads take turns as often as the interpreter can have them."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("switching")
def test_every_reader_gets_each_delta_once_and_in_order_while_they_are_pushed() -> None:
    generation = Generation()
    heard: list[list[Delta]] = []
    read: list[list[Delta]] = [[], [], []]

    def push() -> None:
        for delta in DELTAS:
            generation.push(delta)
        generation.succeed(())

    pushing = threading.Thread(target=push)
    readers = [threading.Thread(target=lambda into=into: into.extend(generation.deltas(60))) for into in read]
    for thread in (*readers, pushing):
        thread.start()
    while len(heard) < 20:
        heard.append([])
        generation.add_delta_callback(heard[-1].append)
    for thread in (*readers, pushing):
        thread.join()
    assert all(deltas == DELTAS for deltas in (*heard, *read))


@pytest.mark.usefixtures("switching")
def test_who_is_told_and_then_looks_misses_nothing() -> None:
    generation = Generation()
    told = threading.Semaphore(0)
    generation.watch(told.release)

    def push() -> None:
        for delta in DELTAS:
            generation.push(delta)

    pushing = threading.Thread(target=push)
    pushing.start()
    found: list[Delta] = []
    while len(found) < len(DELTAS):
        assert told.acquire(timeout=60), "told too seldom"
        found += generation.deltas_from(len(found))
    pushing.join()
    assert found == DELTAS


def test_who_comes_late_is_told_of_what_there_is() -> None:
    generation = Generation()
    assert generation.is_streamed is False
    generation.push(DELTAS[0])
    told: list[None] = []
    heard: list[Delta] = []
    generation.watch(lambda: told.append(None))
    generation.add_delta_callback(heard.append)
    assert (len(told), heard, bool(generation.is_streamed)) == (1, DELTAS[:1], True)
    generation.push(DELTAS[1])
    assert (len(told), heard) == (2, DELTAS[:2])
    assert generation.deltas_from(1) == DELTAS[1:2]
    assert generation.deltas_from(2) == []


def test_who_only_counts_reads_nothing_and_the_first_who_listens_and_the_first_who_waits_are_told_of() -> None:
    told: list[bool] = []
    generation = Generation(listen=told.append)
    assert told == []
    generation.watch(lambda: None, reads=False)
    assert (bool(generation.is_streamed), generation.is_read, told) == (True, False, [False])
    generation.watch(lambda: None, reads=False)
    assert (generation.is_read, told) == (False, [False])
    generation.add_delta_callback(lambda delta: None)
    assert (generation.is_read, told) == (True, [False, True])
    generation.watch(lambda: None)
    assert told == [False, True]
    late: list[bool] = []
    ended = Generation(listen=late.append)
    ended.succeed(())
    assert list(ended.deltas()) == []
    assert late == [], "nobody is there to be asked any more"


def test_a_callback_that_fails_keeps_no_delta_from_others() -> None:
    generation = Generation()
    heard: list[Delta] = []

    def fail(_: Delta) -> None:
        raise ValueError

    generation.add_delta_callback(fail)
    generation.add_delta_callback(heard.append)
    for delta in DELTAS[:3]:
        generation.push(delta)
    assert heard == DELTAS[:3]


def test_deltas_end_with_what_the_generation_failed_with() -> None:
    generation = Generation()
    generation.push(DELTAS[0])
    with pytest.raises(TimedOut):
        list(generation.deltas(timeout=0.01))
    generation.fail(Cancelled("stopped"))
    deltas = generation.deltas()
    assert list(itertools.islice(deltas, 1)) == DELTAS[:1]
    with pytest.raises(Cancelled):
        next(deltas)


def test_streams_go_on_to_whom_they_went_and_tell_who_began_to_read_since() -> None:
    first, second = Generation(), Generation()
    told: list[str] = []
    heard: list[Delta] = []
    first.watch(lambda: told.append("first"))
    streams = Streams((first, None, second))

    def push(*texts: str) -> list[str]:
        told.clear()
        for tell in streams.push(map(Delta, texts)):
            tell()
        return told

    assert push("a", "nobody's", "b") == ["first"]
    second.watch(lambda: told.append("second"))
    assert push("c", "nobody's", "d") == ["first", "second"]
    first.add_delta_callback(heard.append)
    second.succeed(())
    assert push("e", "nobody's", "f") == ["first"]
    assert heard == [Delta("a"), Delta("c"), Delta("e")]
    assert [one.deltas_from(1) for one in (first, second)] == [heard[1:], [Delta("d"), Delta("f")]]


def test_who_begins_to_read_just_before_a_stream_goes_on_is_told() -> None:
    generation = Generation()
    streams = Streams((generation,))
    told: list[None] = []

    def deltas() -> Iterator[Delta]:
        generation.watch(lambda: told.append(None))  # as another thread may, just before
        yield DELTAS[0]

    for tell in streams.push(deltas()):
        tell()
    assert len(told) == 1
