"""Streams: pieces add up to the text, whenever one starts to listen, and an error comes after the text before it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

import niwaki as nw
from niwaki.lang.calling import Active
from niwaki.lang.executor import Executor
from niwaki.lang.nodes import Gen, Select
from niwaki.lang.state import State
from tests.lang.waiting import PATIENCE

STORY = "Once upon a time there was a tree, and it grew."


@nw.function
def tell(s: State, body_error: bool = False) -> str:
    s += "Story: " + nw.gen("story") + " The end"
    with s.var_scope("both"):
        s += " [" + nw.gen("second") + "]"
    s += nw.select("mood", choices=["calm", "wild"])
    s["given"] = 5
    if body_error:
        raise ValueError("the author failed")
    return "told"


def backend(threads: int = 1, delay: float = 0.0005) -> nw.ScriptedBackend:
    return nw.ScriptedBackend({"Story: ": STORY, "[": "two words", "": "calm"}, threads=threads, delay=delay)


WHOLE = f"Story: {STORY} The end [two words]calm"


@pytest.mark.parametrize("threads", [0, 1])
def test_the_pieces_of_a_stream_add_up_to_the_text(threads: int) -> None:
    state = tell.stream(backend=backend(threads), timeout=PATIENCE)
    pieces = list(state.text_iter())
    assert "".join(pieces) == WHOLE == state.text()
    assert all(pieces)
    assert state.ret_value == "told"


def test_who_begins_to_read_while_a_text_is_sent_gets_each_piece_once(monkeypatch: pytest.MonkeyPatch) -> None:
    set_alarm = Executor._set_alarm

    def read_meanwhile(own: Executor, active: Active, node: Gen | Select) -> None:
        own._start_streaming()  # as another thread does
        set_alarm(own, active, node)

    monkeypatch.setattr(Executor, "_set_alarm", read_meanwhile)
    state = tell.run(backend=backend(), timeout=PATIENCE)
    assert state.text() == WHOLE
    assert "".join(state.text_iter()) == WHOLE


def test_a_stream_comes_in_pieces() -> None:
    gates: list[threading.Semaphore] = [threading.Semaphore(0)]

    def answer(prompt: str) -> str:
        return "one two three"

    def wait() -> float:
        assert gates[0].acquire(timeout=PATIENCE)
        return 0.0

    @nw.function
    def f(s: State) -> None:
        s += nw.gen("x")

    state = f.stream(backend=nw.ScriptedBackend(answer, threads=1, delay=wait))
    pieces = state.text_iter()
    seen = []
    for _ in range(3):
        gates[0].release()
        seen.append(next(pieces))  # each comes before the next one is allowed to be made
    assert seen == ["one", " two", " three"]
    gates[0].release(10)
    assert list(pieces) == []


@pytest.mark.parametrize(
    ("name", "text"),
    [("story", STORY), ("second", "two words"), ("both", " [two words]"), ("mood", "calm"), ("given", "5")],
)
@pytest.mark.parametrize("is_late", [False, True])
def test_one_variable_can_be_streamed_also_late(name: str, text: str, is_late: bool) -> None:
    state = tell.stream(backend=backend(), timeout=PATIENCE)
    if is_late:
        state.sync()
    assert "".join(state.text_iter(name)) == text


def test_sglangs_spelling_of_the_name_is_taken() -> None:
    state = tell.run(backend=backend())

    async def pieces() -> str:
        return "".join([piece async for piece in state.text_async_iter(var_name="story")])

    assert "".join(state.text_iter(var_name="story")) == asyncio.run(pieces()) == state["story"]


def test_late_iteration_gives_the_whole_text() -> None:
    state = tell.run(backend=backend())
    state.sync()
    assert "".join(state.text_iter()) == WHOLE
    assert "".join(state.text_iter()) == WHOLE


def test_run_can_stream_too() -> None:
    assert "".join(tell.run(backend=backend(), stream=True).text_iter()) == WHOLE


def test_several_readers_see_the_same_text() -> None:
    state = tell.stream(backend=backend(), timeout=PATIENCE)
    texts: dict[int, str] = {}

    def read(i: int) -> None:
        texts[i] = "".join(state.text_iter(("story", None)[i % 2]))

    readers = [threading.Thread(target=read, args=(i,)) for i in range(6)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join(PATIENCE)
    assert [texts[i] for i in range(6)] == [STORY, WHOLE] * 3


def test_a_body_may_stream_from_its_own_state() -> None:
    @nw.function
    def f(s: State) -> str:
        s += "a " + nw.gen("x")
        return "".join(s.text_iter("x"))  # how many pieces there are depends on who is faster

    assert f.run(backend=nw.ScriptedBackend(lambda prompt: "b c", threads=1, delay=0.001)).ret_value == "b c"


def test_reads_of_a_streamed_state_wait_for_what_the_body_has_not_said_yet() -> None:
    gate = threading.Event()

    @nw.function
    def f(s: State) -> None:
        assert gate.wait(PATIENCE)
        s += "late" + nw.gen("x")

    state = f.stream(backend=nw.ScriptedBackend(lambda prompt: "ok"))
    got: list[object] = []
    reader = threading.Thread(target=lambda: got.append(state["x"]))
    reader.start()
    assert state.text_iter() is not None
    gate.set()
    reader.join(PATIENCE)
    assert got == ["ok"]
    assert state.text() == "lateok"


def test_an_error_comes_out_of_the_stream_after_the_text_before_it() -> None:
    state = tell.stream(backend=backend(), body_error=True, timeout=PATIENCE)
    state_text: list[str] = []

    def read() -> Iterator[str]:
        for piece in state.text_iter():
            state_text.append(piece)
            yield piece

    with pytest.raises(ValueError, match="the author failed"):
        list(read())
    assert WHOLE.startswith("".join(state_text))
    with pytest.raises(ValueError, match="the author failed"):
        state.text()
    with pytest.raises(ValueError, match="the author failed"):
        _ = state.ret_value


def test_a_stream_of_a_variable_that_nothing_sets_raises_when_the_body_has_ended() -> None:
    state = tell.stream(backend=backend(), timeout=PATIENCE)
    with pytest.raises(nw.UnknownVariable, match="no variable 'nothing'"):
        list(state.text_iter("nothing"))


def test_a_time_out_ends_a_stream() -> None:
    state = tell.stream(backend=nw.ScriptedBackend(lambda prompt: "w " * 100, threads=1, delay=0.02), timeout=0.1)
    with pytest.raises(nw.TimedOut):
        list(state.text_iter())


def test_a_stream_that_is_left_early_leaves_the_state_usable() -> None:
    state = tell.stream(backend=backend(), timeout=PATIENCE)
    for _ in state.text_iter():
        break
    assert state.text() == WHOLE
