"""Stop strings: found wherever the tokens cut them, and no text of theirs is ever shown."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

import pytest

from niwaki.runtime.engine import Engine
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


def test_what_ends_early_stops_nothing_and_what_only_begins_there_does() -> None:
    stops = StopText(["\n", "END"])
    assert stops.push("a\nb\nE", is_early=True) == "a\nb\n"
    assert stops.push("ND", is_early=True) == "END"
    assert stops.push("EN", is_early=True) == ""
    assert stops.push("D, and") == ""
    assert (stops.matched, stops.length) == ("END", len("a\nb\nEND"))


def test_early_text_is_shown_whole_up_to_the_first_stop_that_ends_behind_it() -> None:
    draw = random.Random(8)
    num_early_stops = 0
    for _ in range(5000):
        text = "".join(draw.choice("ab\n") for _ in range(draw.randint(1, 14)))
        stop_strings = [
            "".join(draw.choice("ab\n") for _ in range(draw.randint(1, 4))) for _ in range(draw.randint(1, 3))
        ]
        stops, early = StopText(stop_strings), draw.randint(0, len(text))
        shown, at = "", 0
        while at < len(text) and stops.matched is None:
            step = min(draw.randint(1, 3), early - at if at < early else 3)
            shown += stops.push(text[at : at + step], is_early=at < early)
            at += step
        if stops.matched is None:
            shown += stops.finish()
        read = text[:at]
        ends = [(i, stop) for stop in stop_strings for i in range(len(read)) if read.startswith(stop, i)]
        late = [i for i, stop in ends if i + len(stop) > early]
        num_early_stops += len(ends) > len(late)
        assert shown == (read[: min(late)] if late else read)
        assert stops.length == len(shown)
    assert num_early_stops > 1000


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """The bundled model, with the same logits whatever is asked beside a text: after "[10," 1 and 2 are as likely."""
    with Engine(kv_tokens=1024, deterministic=True) as engine:
        yield engine


COUNTS = {"regex": "( [0-9]+,)*"}
LIST = {"json_schema": {"type": "array", "items": {"type": "integer"}, "minItems": 9}}


@pytest.mark.parametrize("stop", [{"stop": [",", "9"]}, {"stop_regex": ", ?[0-9]"}], ids=["strings", "regex"])
@pytest.mark.parametrize("asked", [{}, COUNTS, LIST], ids=["free", "regex", "schema"])
@pytest.mark.parametrize("logprobs", [False, True])
def test_no_stop_ends_a_text_within_its_min_tokens(
    engine: Engine, asked: dict[str, object], stop: dict[str, object], logprobs: bool
) -> None:
    """As the end token, which the one behind them may be, too."""
    prompt = "Count: 1, 2, 3, 4," if asked is not LIST else "Count: "
    options = {**asked, "temperature": 0, "max_new_tokens": 24}
    whole = told(engine.generate(prompt, {**options, "ignore_eos": True, "min_tokens": 24}))
    seen = set()
    for least in range(12):
        early = len(engine.tokenizer.decode(whole["output_ids"][:least]))
        said = {**options, **stop, "min_tokens": least}
        one = told(engine.generate(prompt, said, return_logprob=logprobs))
        *_, streamed = engine.generate(prompt, said, stream=True)
        assert (streamed["text"], streamed["output_ids"]) == (one["text"], one["output_ids"])
        assert one["meta_info"]["finish_reason"]["type"] == "stop"
        assert len(one["output_ids"]) > least
        if "stop" in stop:
            at = min(at for at in (whole["text"].find(x, early) for x in (",", "9")) if at >= 0)
        else:
            at = next(match.end() for match in re.finditer(", ?[0-9]", whole["text"]) if match.end() > early)
        assert one["text"] == whole["text"][:at]
        seen.add(one["text"])
    assert len(seen) > 2


def told(answer: object) -> dict[str, Any]:
    assert isinstance(answer, dict)
    return answer
