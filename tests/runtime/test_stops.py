"""Stop strings: found wherever the tokens cut them, and no text of theirs is ever shown."""

from __future__ import annotations

import random

import pytest

from niwaki.runtime.requests.stops import StopText


def test_without_stops_all_text_is_shown_at_once() -> None:
    stops = StopText(())
    assert [stops.push("ab"), stops.push(""), stops.push("c")] == ["ab", "", "c"]
    assert stops.length == 3
    assert stops.finish() == ""


def test_a_stop_split_over_pieces_is_found_and_cut() -> None:
    stops = StopText(["\n\n"])
    assert stops.push("one\n") == "one"
    assert stops.push("\ntwo") == "\n"[:0]
    assert stops.matched == "\n\n"
    assert stops.length == 3


def test_held_back_text_is_shown_when_it_turns_out_harmless() -> None:
    stops = StopText(["END"])
    assert stops.push("the E") == "the "
    assert stops.push("N") == ""
    assert stops.push("T") == "ENT"
    assert stops.push(" EN") == " "
    assert stops.finish() == "EN"


def test_the_stop_that_begins_first_wins() -> None:
    stops = StopText(["b", "ab"])
    assert stops.push("xab") == "x"
    assert stops.matched == "ab"


def test_shown_pieces_always_add_up_to_the_text_before_the_first_stop() -> None:
    draw = random.Random(7)
    for _ in range(3000):
        text = "".join(draw.choice("ab\n") for _ in range(draw.randint(0, 12)))
        stop_strings = [
            "".join(draw.choice("ab\n") for _ in range(draw.randint(1, 4))) for _ in range(draw.randint(1, 3))
        ]
        stops = StopText(stop_strings)
        shown, at = "", 0
        while at < len(text) and stops.matched is None:
            step = draw.randint(1, 3)
            shown += stops.push(text[at : at + step])
            at += step
        if stops.matched is None:
            shown += stops.finish()
        found = [text[:at].find(stop) for stop in stop_strings if stop in text[:at]]
        assert shown == (text[:at][: min(found)] if found else text)
        assert stops.length == len(shown)


@pytest.mark.parametrize("width", [1, 2, 3, 50])
def test_nothing_stops_before_the_text_that_it_waits_for(width: int) -> None:
    text = "<think>a. b.</think>Yes. No."
    watch = StopText((". ",), after="</think>")
    shown = ""
    for at in range(0, len(text), width):
        shown += watch.push(text[at : at + width])
        if watch.matched is not None:
            break
    assert (shown, watch.matched) == ("<think>a. b.</think>Yes", ". ")
    assert watch.length == len(shown)
