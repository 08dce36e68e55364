"""A stop ends a constrained text, too: before the stop string, and told to be complete where that much satisfies it."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from niwaki.runtime.api import Reasoned, Regex, Segment
from niwaki.runtime.engine import Engine
from niwaki.runtime.options.from_dict import options_from_dict
from tests.toy import make_model

PAIR = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "of": {"enum": ["cat", "mat"]}},
    "required": ["n", "of"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with Engine(make_model(tmp_path_factory.mktemp("toy"), sharpness=3.0), kv_tokens=4096) as made:
        yield made
        made.backend.check()


def result(answer: object) -> dict[str, Any]:
    assert isinstance(answer, dict)
    return answer


def is_pair(text: str) -> bool:
    try:
        value = json.loads(text)
    except ValueError:
        return False
    return set(value) == {"n", "of"}


def is_number(text: str) -> bool:
    return re.fullmatch("-?(0|[1-9][0-9]*)", text) is not None


@pytest.mark.parametrize("heal", [False, True])
@pytest.mark.parametrize("logprobs", [False, True], ids=["watched", "log-probabilities"])
@pytest.mark.parametrize(
    ("constraint", "stops", "is_satisfied"),
    [
        ({"json_schema": PAIR}, ["}", '"of"', "t", "9"], is_pair),
        ({"json_schema": {"type": "integer"}}, ["1", "23", "00", "-"], is_number),
        ({"regex": "(ab?|the cat){1,9}"}, ["b", "t", "e c"], re.compile("(ab?|the cat){1,9}").fullmatch),
        ({"choices": ["cat", "cat sat", "mat"]}, [" sat", "t", "cat"], {"cat", "cat sat", "mat"}.__contains__),
        ({"ebnf": 'root ::= ("é" | "a ")+ "."'}, ["é", "a", "."], re.compile(r"(é|a )+\.").fullmatch),
    ],
    ids=["object", "integer", "regex", "choices", "grammar"],
)
def test_a_stopped_text_is_complete_where_it_satisfies_the_constraint(
    constraint: dict[str, object],
    stops: list[str],
    is_satisfied: Callable[[str], object],
    logprobs: bool,
    heal: bool,
    engine: Engine,
) -> None:
    seen: Counter[tuple[bool, bool]] = Counter()
    for seed in range(12):
        for stop in stops:
            options = {"temperature": 1.4, "seed": seed, "max_new_tokens": 40, "stop": stop, "heal": heal}
            one = result(engine.generate("the ca", constraint | options, return_logprob=logprobs))
            was_stopped = one["meta_info"]["finish_reason"].get("matched") == stop
            assert stop not in one["text"]
            assert one["meta_info"]["complete"] == bool(is_satisfied(one["text"])), (stop, one["text"])
            seen[was_stopped, one["meta_info"]["complete"]] += 1
    assert seen[True, False]


def test_a_stop_regex_cuts_inside_a_token_of_a_constrained_text(engine: Engine) -> None:
    """The match is part of the text, and what the last token says behind it is not."""
    seen: Counter[bool] = Counter()
    for seed in range(30):
        options = {"choices": ["the cat", "the dog sat"], "temperature": 1.4, "seed": seed, "max_new_tokens": 12}
        one = result(engine.generate("a", {**options, "stop_regex": "the (ca|do)[gt]"}))
        assert one["text"] in ("the cat", "the dog")
        assert one["meta_info"]["complete"] == (one["text"] == "the cat")
        seen[one["meta_info"]["complete"]] += 1
        cut = result(engine.generate("a", {**options, "stop_regex": "the [cd]"}))
        assert cut["text"] in ("the c", "the d")
        assert not cut["meta_info"]["complete"]
    assert set(seen) == {True, False}


def test_a_schema_that_never_writes_the_stop_ends_by_itself(engine: Engine) -> None:
    for seed in range(6):
        options = {"json_schema": PAIR, "temperature": 1.0, "seed": seed, "max_new_tokens": 40, "stop": ["\n", "dog"]}
        one = result(engine.generate("the", options))
        assert one["meta_info"]["finish_reason"] in ({"type": "stop"}, {"type": "length", "length": 40})
        assert one["meta_info"]["complete"]
        assert is_pair(one["text"])


def test_a_program_goes_on_behind_the_stop_and_its_tokens_are_those_of_the_shown_text(engine: Engine) -> None:
    params = options_from_dict({"json_schema": PAIR, "temperature": 1.0, "max_new_tokens": 40, "stop": '":'}).resolve()
    branch = engine.backend.open()
    generation = engine.backend.generate(branch, [Segment("the cat")], params)
    (output,) = generation.result(60)
    assert (output.text, output.complete, output.finish_reason.matched) == ('{"n', False, '":')
    assert "".join(delta.text for delta in generation.deltas()) == output.text
    start = engine.tokenizer.encode([Segment("the cat")], at_start=True)
    assert list(branch.token_ids) == start + engine.tokenizer.plain_ids('{"n')
    engine.backend.close(branch)


def test_behind_reasoning_the_answer_is_what_a_stop_leaves_of_it(engine: Engine) -> None:
    seen: Counter[bool] = Counter()
    for seed in range(30):
        thoughts = Reasoned(begin="", end="</think>", max_tokens=6, constraint=Regex("1[05]|23"))
        options = {"constraint": thoughts, "temperature": 1.2, "seed": seed, "max_new_tokens": 30, "stop": "5"}
        one = result(engine.generate("the cat", options))
        answer = one["text"].partition("</think>")[2]
        assert answer in ("10", "1", "23")
        assert one["meta_info"]["complete"] == (answer != "1")
        seen[answer != "1"] += 1
    assert set(seen) == {True, False}


def test_a_text_that_can_only_end_ends_although_its_min_tokens_are_not_there(bundled_engine: Engine) -> None:
    """Its budget leaves no room for another round, and its mask the end token alone."""
    options = {"temperature": 0, "max_new_tokens": 24, "min_tokens": 24, "regex": "( [0-9]+,)*"}
    one = result(bundled_engine.generate("Count: 1, 2, 3, 4,", options))
    assert re.fullmatch("( [0-9]+,)*", one["text"])
    assert one["meta_info"]["complete"]
    assert len(one["output_ids"]) > 16


@pytest.mark.parametrize("constraint", [{"regex": "[a-z ]*!"}, {"json_schema": PAIR}], ids=["automaton", "grammar"])
def test_a_whole_text_ends_for_length_exactly_where_the_budget_made_it_shorter(
    constraint: dict[str, object], engine: Engine
) -> None:
    reasons: Counter[str] = Counter()
    for seed in range(20):
        options = {**constraint, "max_new_tokens": 40, "temperature": 1.5, "seed": seed}
        one = result(engine.generate("the cat", options))
        reason = one["meta_info"]["finish_reason"]["type"]
        assert one["meta_info"]["complete"]
        assert reason == ("length" if len(one["output_ids"]) == 40 else "stop"), one["text"]
        reasons[reason] += 1
    assert min(reasons["length"], reasons["stop"]) >= 3
