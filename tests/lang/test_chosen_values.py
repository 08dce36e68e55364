"""A gen of a Literal, an Enum or a bool is the choice among its whole values, by their exact probabilities."""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

import pytest

import niwaki as nw
from niwaki.lang.nodes import MAX_SCORED_VALUES
from niwaki.lang.state import State
from niwaki.runtime.api import SamplingParams, Score, TokenLogprob
from niwaki.runtime.api.choices import decided, draws, exact

if TYPE_CHECKING:
    from niwaki.runtime.engine import Engine

WEIGHTS = [math.log(p) for p in (0.5, 0.3, 0.15, 0.05)]


class Mood(enum.Enum):
    GLAD = "positive"
    SAD = "negative"


@pytest.fixture
def engine(bundled_engine: Engine) -> Engine:
    return bundled_engine


@nw.function
def judge(s: State, dtype: object, text: str) -> None:
    s += nw.system("Classify the sentiment.")
    s += nw.user(text)
    s += nw.assistant(nw.gen("x", dtype=dtype))


@nw.function
def plain(s: State, dtype: object, said: Mapping[str, object]) -> None:
    s += "Is it? " + nw.gen("x", dtype=dtype, **said)  # type: ignore[arg-type]  # a gen's


def kinds(dtype: object, answer: str, said: Mapping[str, object], **run: object) -> list[str]:
    backend = nw.ScriptedBackend(lambda prompt: answer)
    plain.run(dtype, said, backend=backend, **run).sync()
    return [call.kind for call in backend.calls]


@pytest.mark.parametrize(
    ("dtype", "answer", "values"),
    [
        (Literal[1, 2], "2", [1, 2]),
        (bool, "true", [True, False]),
        (Mood, "negative", [Mood.GLAD, Mood.SAD]),
        (Literal["a", "b"], "b", ["a", "b"]),
    ],
)
def test_probabilities_are_told_by_values_too(dtype: type[object], answer: str, values: list[object]) -> None:
    state = plain.run(dtype, {"temperature": 0}, backend=nw.ScriptedBackend([answer]))
    told = state.probabilities("x", dtype)
    assert sorted(told, key=str) == sorted(values, key=str)
    assert max(told, key=told.__getitem__) == state["x"]
    assert list(told.values()) == list(state.probabilities("x").values())
    with pytest.raises(nw.ProgramError, match="which is no float"):
        state.probabilities("x", float)


def test_values_that_are_equal_have_the_probability_of_all_their_texts() -> None:
    state = plain.run(Literal[1, True, 2], {"temperature": 0}, backend=nw.ScriptedBackend(["1"]))
    assert len(state.probabilities("x")) == 3
    assert state.probabilities("x", Literal[1, True, 2]) == pytest.approx({1: 1.0, 2: 0.0})


def test_greedy_takes_the_most_probable_value_where_the_likeliest_token_begins_another() -> None:
    """Token by token the text would begin with 'a', and 'a' has 0.6; of whole values 'b' is the likeliest."""
    scores = [
        Score("ax", (TokenLogprob(math.log(0.6), 1), TokenLogprob(math.log(0.5), 2))),
        Score("ay", (TokenLogprob(math.log(0.6), 1), TokenLogprob(math.log(0.5), 3))),
        Score("b", (TokenLogprob(math.log(0.4), 4),)),
    ]
    assert decided(exact, scores, (), None).index == 2


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0, 2.0])
def test_values_are_drawn_with_their_probabilities_to_the_power_of_one_over_the_temperature(temperature: float) -> None:
    count = 4_000
    drawn = Counter(draws(WEIGHTS, SamplingParams(temperature=temperature, n=count), seed=3))
    if temperature == 0:
        assert drawn == {0: count}
        return
    powers = [math.exp(logprob / temperature) for logprob in WEIGHTS]
    for index, power in enumerate(powers):
        share = power / sum(powers)
        assert drawn[index] / count == pytest.approx(share, abs=4 * math.sqrt(share * (1 - share) / count))


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.5}, {0}),
        ({"top_p": 0.51}, {0, 1}),
        ({"top_k": 3, "top_p": 0.85}, {0, 1, 2}),  # 0.15 of the 0.95 that top_k leaves begin below 0.85
        ({"min_p": 0.3}, {0, 1, 2}),
        ({"min_p": 1.0}, {0}),
        ({}, {0, 1, 2, 3}),
    ],
)
def test_the_tail_of_the_values_is_cut_as_that_of_tokens_is(options: dict[str, float], left: set[int]) -> None:
    assert set(draws(WEIGHTS, SamplingParams(n=500, **options), seed=0)) == left  # type: ignore[arg-type]  # by name


def test_a_draw_is_a_function_of_its_seed_and_the_params_own_comes_first() -> None:
    many = draws(WEIGHTS, SamplingParams(n=20, seed=5), seed=None)
    assert draws(WEIGHTS, SamplingParams(n=20, seed=5), seed=77) == many
    assert tuple(draws(WEIGHTS, SamplingParams(), seed=5 + index)[0] for index in range(20)) == many


@pytest.mark.parametrize(
    ("dtype", "answer", "value"),
    [
        (Literal["yes", "no"], "no", "no"),
        (Literal[1, True], "True", True),
        (bool, "true", True),
        (Mood, "negative", Mood.SAD),
    ],
)
def test_the_value_is_of_the_type_and_the_call_is_one_of_scores(dtype: object, answer: str, value: object) -> None:
    backend = nw.ScriptedBackend({"": answer})
    state = plain.run(dtype, {}, backend=backend, temperature=2.0)  # a script's choice is certain, so any draw gives it
    assert state["x"] is value or state["x"] == value
    assert state.text() == f"Is it? {answer}"
    assert [call.kind for call in backend.calls] == ["score"]
    meta = state.get_meta_info("x")
    assert meta["probabilities"] == pytest.approx([float(answer == text) for text in meta["choices"]])
    assert meta["complete"] is True


def test_what_is_about_tokens_makes_it_a_generation() -> None:
    some = Literal["yes", "no"]
    about_values = {"top_p": 0.9, "top_k": 3, "min_p": 0.1, "seed": 1, "n": 2, "heal": False, "max_tokens": 9}
    assert kinds(some, "no", about_values) == ["score"]
    for about_tokens in ({"stop": "\n"}, {"min_tokens": 1}, {"return_logprob": True}, {"repetition_penalty": 1.1}):
        assert kinds(some, "no", about_tokens) == ["generate"]
        assert kinds(some, "no", {}, options=about_tokens) == ["score"], "what the run says is for its other gens"


def test_of_many_values_one_is_generated() -> None:
    for count, kind in ((MAX_SCORED_VALUES, "score"), (MAX_SCORED_VALUES + 1, "generate")):
        values = enum.Enum("values", {f"v{i}": f"v{i}" for i in range(count)})  # type: ignore[misc]  # by count
        assert kinds(values, "v7", {}) == [kind]


def test_several_values_are_drawn_from_one_scoring(engine: Engine) -> None:
    state = judge.run(Mood, "The film was on Monday.", n=5, seed=2, temperature=2.0, backend=engine)
    values = state["x"]
    assert isinstance(values, list)
    assert len(values) == 5
    assert all(isinstance(value, Mood) for value in values)
    assert state.messages()[-1]["content"] == values[0].value, "the text goes on with the first"
    assert judge.run(Mood, "The film was on Monday.", n=5, seed=2, temperature=2.0, backend=engine)["x"] == values


def test_an_engine_gives_the_most_probable_value_at_temperature_0(engine: Engine) -> None:
    for text, expected in (("The meal was great.", Mood.GLAD), ("What an awful hotel!", Mood.SAD)):
        state = judge.run(Mood, text, temperature=0, backend=engine)
        probabilities = state.get_meta_info("x")["probabilities"]
        assert isinstance(probabilities, list)
        assert state["x"] is expected
        assert sum(probabilities) == pytest.approx(1)
        assert max(probabilities) == probabilities[list(Mood).index(expected)]


def test_an_engine_with_a_seed_draws_the_same_values_again() -> None:
    from niwaki.runtime.engine import Engine

    drawn = []
    for _ in range(2):
        with Engine(seed=4) as engine:
            states = [
                judge.run(Literal["a", "b", "c", "d"], "Well?", temperature=2.0, backend=engine) for _ in range(12)
            ]
            drawn.append([state["x"] for state in states])
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) > 1, "each call has a seed of its own"


def test_of_several_values_without_a_temperature_each_is_the_best() -> None:
    backend = nw.ScriptedBackend(lambda prompt: "b")
    state = plain.run(Literal["a", "b"], {"n": 3, "temperature": 0.0}, backend=backend)
    assert state["x"] == ["b", "b", "b"]
