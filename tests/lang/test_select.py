"""`select` compares scores by a named, pure method, and tells what it saw."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, cast

import pytest

import niwaki as nw
from niwaki.lang.meta import Logprob
from niwaki.lang.state import State
from niwaki.runtime.api import Score, TokenLogprob
from niwaki.runtime.api.choices import Decision, mean_logprob


def score(text: str, *logprobs: float | None) -> Score:
    return Score(text, tuple(TokenLogprob(logprob, i, None) for i, logprob in enumerate(logprobs)))


def test_token_length_normalized_takes_the_best_mean() -> None:
    scores = [score("long", -1.0, -1.0, -1.0), score("short", -2.0), score("middle", -0.5, -1.25)]
    decision = nw.token_length_normalized.decide(scores)
    assert decision.index == 2
    assert decision.meta == {"normalized_prompt_logprobs": [-1.0, -2.0, -0.875]}


def test_the_first_of_equals_is_taken() -> None:
    assert nw.token_length_normalized.decide([score("a", -1.0), score("b", -1.0, -1.0)]).index == 0


def test_a_certain_token_counts() -> None:
    assert mean_logprob(score("x", 0.0, -1.0)) == -0.5


def test_the_first_token_of_an_empty_prompt_has_no_score_and_is_left_out() -> None:
    assert mean_logprob(score("x", None, -3.0)) == -3.0


def test_choices_that_cannot_be_compared_are_an_error() -> None:
    with pytest.raises(nw.GenerationError, match="'x' has no log-probability"):
        mean_logprob(score("x", None))


@nw.function
def pick(s: State) -> None:
    s += "Is it? " + nw.select("answer", choices=["yes", "no way"]) + "."


@pytest.mark.parametrize("answer", ["yes", "no way"])
def test_select_appends_the_choice_and_sets_the_variable(answer: str) -> None:
    state = pick.run(backend=nw.ScriptedBackend([answer]))
    assert state["answer"] == answer
    assert state.text() == f"Is it? {answer}."


def test_meta_info_of_a_select_holds_the_scores_of_all_choices() -> None:
    meta = pick.run(backend=nw.ScriptedBackend(["no way"])).get_meta_info("answer")
    assert meta["choices"] == ["yes", "no way"]
    assert meta["normalized_prompt_logprobs"] == [-100.0, -1e-12]
    tokens = cast("list[list[Logprob]]", meta["input_token_logprobs"])
    assert [[text for _, _, text in choice] for choice in tokens] == [["yes"], ["no", " way"]]


@pytest.mark.parametrize("method", ["exact", "token_length_normalized"])
def test_each_choice_has_a_probability_and_they_sum_to_one(method: str) -> None:
    @nw.function
    def f(s: State) -> float:
        s += "yes or no? " + nw.select("x", choices=["yes", "no"], choices_method=method)
        return s.probabilities("x")["no"]

    state = f.run(backend=nw.ScriptedBackend(["no"]))
    told = state.probabilities("x")
    assert list(told) == state.get_meta_info("x")["choices"]
    assert list(told.values()) == state.get_meta_info("x")["probabilities"]
    assert sum(told.values()) == pytest.approx(1)
    assert state.ret_value == told["no"] > told["yes"]


def test_what_was_not_chosen_has_no_probabilities() -> None:
    @nw.function
    def f(s: State) -> None:
        s += "A word: " + nw.gen("x") + nw.gen("y", dtype=Literal["a", "b"], temperature=0)
        s["z"] = 1

    state = f.run(backend=nw.ScriptedBackend(["some", "b"]))
    assert list(state.probabilities("y")) == ["a", "b"]
    with pytest.raises(nw.ProgramError, match="variable 'x' was generated token by token"):
        state.probabilities("x")
    with pytest.raises(nw.UnknownVariable, match="'z' was not generated"):
        state.probabilities("z")


def test_a_gen_with_choices_is_a_select() -> None:
    assert nw.gen("x", choices=["a", "b"], temperature=0.0) == nw.select("x", choices=["a", "b"])


def test_all_choices_are_one_call() -> None:
    backend = nw.ScriptedBackend(["yes"])
    pick.run(backend=backend).sync()
    (call,) = backend.calls
    assert (call.kind, call.prompt, call.choices) == ("score", "Is it? ", ("yes", "no way"))


class Worst:
    """An author's method: the members that the protocol asks for, and nothing else."""

    needs_unconditional = False

    def decide(self, scores: Sequence[Score], unconditional: Sequence[Score] = (), /) -> Decision:
        return Decision(min(range(len(scores)), key=lambda i: mean_logprob(scores[i])), {"why": "contrary"})


class Broken(Worst):
    def decide(self, scores: Sequence[Score], unconditional: Sequence[Score] = (), /) -> Decision:
        raise ZeroDivisionError("no")


def test_an_author_may_bring_a_method() -> None:
    @nw.function
    def f(s: State) -> None:
        s += "? " + nw.select("x", choices=["a", "b"], choices_method=Worst())

    state = f.run(backend=nw.ScriptedBackend(["a"]))
    assert state["x"] == "b"
    assert state.get_meta_info("x")["why"] == "contrary"  # type: ignore[typeddict-item]  # of a method of one's own


def test_an_unnamed_select_is_text_only() -> None:
    @nw.function
    def f(s: State) -> None:
        s += nw.select(choices=["a"])

    assert f.run(backend=nw.ScriptedBackend(["a"])).text() == "a"


def test_an_error_in_a_method_comes_out_with_the_line() -> None:
    @nw.function
    def f(s: State) -> None:
        s += nw.select("x", choices=["a"], choices_method=Broken())

    with pytest.raises(ZeroDivisionError) as caught:
        f.run(backend=nw.ScriptedBackend(["a"]))["x"]
    assert "in program f, test_select.py" in caught.value.__notes__[0]
